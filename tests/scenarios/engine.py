"""A vLLM engine and its API server, step by step: each token, block and request is counted.

Unlike `tests/simulator`, which adapts real step times, its times are plain numbers that a scenario
may change at any moment.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from random import Random

from msgspec import Struct

from tests.simulator.counters import Counters
from tests.simulator.scheduler import Launch

BLOCK = 16
MAX_MODEL_LEN = 262_144
IDLE_S = 0.01


class Knobs(Struct):
    """What a scenario sets. Times are in seconds, lengths in tokens.

    - `rate`: requests/s of an open loop. `callers`: callers of a closed loop, who wait `think_s`
      between an answer and the next request.
    - `prompt`, `answer`: mean lengths; `spread`: standard deviation of their logarithms. `hit`:
      share of a prompt from the prefix cache; `hit_share`: share of requests that hit at all.
    - `giant_every_s`, `giant`: every so often a prompt of that length.
    - `ramble_share`: share of answers that run to `answer_most`.
    - `base_s`, `sequence_s`, `context_s`, `prompt_s`: a step, and each sequence, token of context
      and computed prompt token in it. `slow` multiplies all; `decode_slow`, `prefill_slow` a part.
    - `accepted`: tokens per sequence and step, of `drafts` and one.
    - `captured`: the largest batch with a CUDA graph; above it a step takes `uncaptured_s` more.
    - `pause_every_s`, `pause_s`: the engine stops so often, for so long. `hang`: it stops.
    - `load_share`, `load_s`: share of requests that first load an adapter, for which steps wait.
    - `fetch_s`: a request waits so long for its KV cache from a connector.
    - `request_s`, `token_s`: the API server's time for a request, and for a token.
    - `fail_share`: share of requests that end with an error. `timeout_s`: clients give up then.
    - `held`: blocks that no request holds.
    - `down`: nothing answers. A new `process` is a restart.
    """

    rate: float = 0.0
    callers: float = 0.0
    think_s: float = 1.0
    prompt: float = 800.0
    answer: float = 200.0
    spread: float = 0.4
    hit: float = 0.3
    hit_share: float = 1.0
    giant_every_s: float = 0.0
    giant: float = 0.0
    ramble_share: float = 0.0
    answer_most: float = 4096.0
    seats: float = 64.0
    budget: float = 4096.0
    blocks: float = 20_000.0
    base_s: float = 0.008
    sequence_s: float = 1.2e-4
    context_s: float = 1e-8
    prompt_s: float = 6e-5
    slow: float = 1.0
    decode_slow: float = 1.0
    prefill_slow: float = 1.0
    accepted: float = 1.0
    drafts: float = 0.0
    captured: float = math.inf
    uncaptured_s: float = 0.0
    pause_every_s: float = 0.0
    pause_s: float = 0.0
    hang: float = 0.0
    load_share: float = 0.0
    load_s: float = 0.0
    fetch_s: float = 0.0
    request_s: float = 0.0
    token_s: float = 0.0
    fail_share: float = 0.0
    timeout_s: float = math.inf
    held: float = 0.0
    down: float = 0.0
    process: float = 0.0


class Request:
    """A request on its way."""

    __slots__ = (
        "answer", "arrived_s", "caller", "first_s", "hit", "left", "origin", "prompt", "ready_s",
        "scheduled_s", "tokens",
    )  # fmt: skip

    def __init__(
        self, arrived_s: float, prompt: int, answer: int, hit: int, *, caller: bool
    ) -> None:
        self.arrived_s, self.prompt, self.answer, self.hit = arrived_s, prompt, answer, hit
        self.caller, self.left, self.tokens, self.origin = caller, prompt - hit, 0.0, 0.0
        self.ready_s, self.scheduled_s, self.first_s = 0.0, -1.0, -1.0


class Engine:
    """The engine, as `Shown` of tests/simulator shows it."""

    def __init__(self, knobs: Knobs, rng: Random, now_s: float) -> None:
        self.knobs, self.now_s, self._rng = knobs, now_s, rng
        self.launch = Launch(
            num_gpu_blocks=int(knobs.blocks),
            max_model_len=MAX_MODEL_LEN,
            num_speculative_tokens=int(knobs.drafts),
        )
        self.counters, self.asleep = Counters(MAX_MODEL_LEN), False
        self.adapters_seen: dict[str, float] = {}
        self.scheduler = self
        self.blocks = self
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, None] = {}
        self.deferred, self.queried_tokens, self.hit_tokens = 0, 0.0, 0.0
        self.answered = self.failed = 0
        self._prefilling: list[Request] = []
        self._ends: list[tuple[float, int, Request]] = []
        self._decoding, self._held_tokens, self._clock, self._last_s = 0, 0.0, 0.0, 0.0
        self._calls: list[tuple[float, int]] = []
        self._incoming: deque[tuple[float, Request]] = deque()
        self._unsent_s: deque[float] = deque()
        self._callers, self._serial, self._api_free_s = 0, 0, now_s
        self._next_s, self._giant_s, self._paused_s, self._checked_s = now_s, now_s, now_s, now_s

    @property
    def usage_ratio(self) -> float:
        """The share of blocks in use."""
        used = self.knobs.held + self._held_tokens / BLOCK + len(self.running) / 2
        return min(1.0, used / self.knobs.blocks)

    @property
    def in_flight(self) -> int:
        """Calls that are open, those among them whose end the API server has not sent yet."""
        while self._unsent_s and self._unsent_s[0] <= self.now_s:
            self._unsent_s.popleft()
        calls = len(self.waiting) + len(self.running) + len(self._incoming)
        return calls + len(self._unsent_s)

    def run(self, until_s: float) -> None:
        """Go on until then. A step that has begun ends at its end."""
        while self.now_s < until_s:
            self._arrive()
            self._give_up()
            knobs = self.knobs
            if knobs.hang:
                self.now_s = until_s
            elif knobs.pause_every_s and self.now_s - self._paused_s >= knobs.pause_every_s:
                self.now_s += knobs.pause_s
                self._paused_s = self.now_s
            else:
                self._step()

    # --- Requests ---

    def _length(self, mean: float) -> int:
        spread = self.knobs.spread
        return max(2, round(self._rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)))

    def _call(self, arrived_s: float, prompt: float = 0.0, *, caller: bool = False) -> None:
        knobs, rng = self.knobs, self._rng
        tokens = int(prompt) or self._length(knobs.prompt)
        answer = min(int(knobs.answer_most), self._length(knobs.answer))
        if rng.random() < knobs.ramble_share:
            answer = int(knobs.answer_most)
        hits = knobs.hit if rng.random() < knobs.hit_share and not prompt else 0.0
        request = Request(
            arrived_s, tokens, answer, int(tokens * hits) // BLOCK * BLOCK, caller=caller
        )
        self._api_free_s = max(self._api_free_s, arrived_s) + knobs.request_s
        self._incoming.append((self._api_free_s, request))

    def _arrive(self) -> None:
        knobs, rng, now_s = self.knobs, self._rng, self.now_s
        if not knobs.rate:
            self._next_s = now_s
        while knobs.rate and self._next_s <= now_s:
            self._call(self._next_s)
            self._next_s += rng.expovariate(knobs.rate)
        while self._callers < knobs.callers:
            self._callers += 1
            self._again(now_s + rng.random())
        while self._calls and self._calls[0][0] <= now_s:
            at_s, _ = heappop(self._calls)
            if self._callers > knobs.callers:
                self._callers -= 1
            else:
                self._call(at_s, caller=True)
        if not knobs.giant_every_s:
            self._giant_s = now_s
        elif self._giant_s <= now_s:
            self._call(now_s, knobs.giant)
            self._giant_s = now_s + knobs.giant_every_s * (0.5 + rng.random())
        while self._incoming and self._incoming[0][0] <= now_s:
            at_s, request = self._incoming.popleft()
            request.ready_s = at_s
            self.waiting.append(request)

    def _again(self, at_s: float) -> None:
        self._serial += 1
        heappush(self._calls, (at_s, self._serial))

    def _give_up(self) -> None:
        if self.now_s - self._checked_s < 0.5 or self.knobs.timeout_s == math.inf:
            return
        self._checked_s = self.now_s
        for request in [*self.running, *self.waiting]:
            if self.now_s - request.arrived_s > self.knobs.timeout_s:
                if request in self.running:
                    self._leave(request)
                else:
                    self.waiting.remove(request)
                self._end(request, "abort")

    def _leave(self, request: Request) -> None:
        """Take a request out of the batch."""
        del self.running[request]
        if request.left > 0:
            self._prefilling.remove(request)
        else:
            self._decoding -= 1
            request.tokens = self._clock - request.origin
        self._held_tokens -= request.prompt + request.tokens - request.left

    # --- Steps ---

    def _chunk(self, request: Request, budget: int) -> int:
        """Compute the next part of a prompt; the number of its tokens."""
        tokens = min(request.left, budget)
        request.left -= tokens
        return tokens

    def _admit(self, budget: int) -> int:
        """Begin requests while the step has room for tokens; the number of prompt tokens."""
        knobs, computed = self.knobs, 0
        self.deferred = 0
        while self.waiting and len(self.running) < knobs.seats and computed < budget:
            request = self.waiting[0]
            if self.now_s < request.ready_s + knobs.fetch_s:
                self.deferred = len(self.waiting)
                break
            tokens = min(request.left, budget - computed)
            more = (request.prompt + request.tokens - request.left + tokens) / BLOCK + 1
            if self.usage_ratio + more / knobs.blocks >= 1.0 and self.running:
                break
            self.waiting.popleft()
            if request.scheduled_s < 0:
                request.scheduled_s = self.now_s
                self.queried_tokens += request.prompt
                self.hit_tokens += request.hit
            self.running[request] = None
            self._prefilling.append(request)
            self._held_tokens += request.prompt + request.tokens - request.left
            computed += self._chunk(request, budget - computed)
            if self._rng.random() < knobs.load_share:
                self.now_s += knobs.load_s
        return computed

    def _step(self) -> None:
        knobs, decoding = self.knobs, self._decoding
        budget, computed = int(knobs.budget) - decoding, 0
        for request in self._prefilling:
            computed += self._chunk(request, budget - computed)
        computed += self._admit(budget - computed)
        if not self.running:
            self.now_s += IDLE_S
            return
        begun = [request for request in self._prefilling if request.left == 0]
        took_s = knobs.base_s + knobs.sequence_s * decoding + knobs.context_s * self._held_tokens
        took_s = took_s * knobs.decode_slow + knobs.prompt_s * computed * knobs.prefill_slow
        if decoding > knobs.captured:
            took_s += knobs.uncaptured_s
        self.now_s += took_s * knobs.slow * (1 + 0.05 * self._rng.random())
        whole = int(knobs.accepted)
        tokens = whole + (self._rng.random() < knobs.accepted - whole)
        self._clock += tokens
        self._held_tokens += computed + tokens * decoding
        self._api_free_s = max(self._api_free_s, self.now_s) + knobs.token_s * (
            tokens * decoding + len(begun)
        )
        self._count(took_s, decoding, tokens, computed + decoding)
        for request in begun:
            self._begin(request)
        self._finish()
        while self.usage_ratio >= 1.0 and len(self.running) > 1:
            self._preempt()

    def _count(self, took_s: float, decoding: int, tokens: int, iteration: int) -> None:
        counts, histograms = self.counters.counts, self.counters.histograms
        histograms["iteration_tokens_total"].add(iteration)
        if decoding:
            gap_s = self.now_s - self._last_s if self._last_s else took_s
            histograms["inter_token_latency_seconds"].add(gap_s, decoding)
            counts["generation_tokens_total"] += decoding * tokens
            if self.knobs.drafts:
                counts["spec_decode_num_drafts_total"] += decoding
                counts["spec_decode_num_draft_tokens_total"] += decoding * self.knobs.drafts
                counts["spec_decode_num_accepted_tokens_total"] += decoding * (tokens - 1)
        self._last_s = self.now_s

    def _begin(self, request: Request) -> None:
        """The prefill has ended, with the next token of the answer."""
        self._prefilling.remove(request)
        self._decoding += 1
        counts = self.counters.counts
        if request.first_s < 0:
            request.first_s = self.now_s
            seen_s = self._api_free_s
            self.counters.histograms["time_to_first_token_seconds"].add(seen_s - request.arrived_s)
            fresh = request.prompt - request.hit
            counts["prompt_tokens_total"] += request.prompt
            counts["prompt_tokens_by_source_total|source=local_compute"] += fresh
            counts["prompt_tokens_by_source_total|source=local_cache_hit"] += request.hit
            counts["prompt_tokens_cached_total"] += request.hit
            counts["prompt_tokens_cached_by_source_total|source=device"] += request.hit
        counts["generation_tokens_total"] += 1
        self._held_tokens += 1
        request.origin = self._clock - request.tokens - 1
        self._serial += 1
        heappush(self._ends, (request.origin + request.answer, self._serial, request))

    def _finish(self) -> None:
        while self._ends and self._ends[0][0] <= self._clock:
            at, _, request = heappop(self._ends)
            # An entry of before a preemption has another time.
            if (
                request in self.running
                and not request.left
                and at == request.origin + request.answer
            ):
                self._leave(request)
                failed = self._rng.random() < self.knobs.fail_share
                rambled = request.answer >= self.knobs.answer_most
                self._end(request, "error" if failed else "length" if rambled else "stop")

    def _end(self, request: Request, reason: str) -> None:
        if reason == "error":
            self.failed += 1
        elif reason != "abort":
            self.answered += 1
        counts, histograms = self.counters.counts, self.counters.histograms
        counts[f"request_success_total|finished_reason={reason}"] += 1
        now_s, seen_s = self.now_s, max(self.now_s, self._api_free_s)
        self._unsent_s.append(seen_s)
        histograms["e2e_request_latency_seconds"].add(seen_s - request.arrived_s)
        histograms["request_prompt_tokens"].add(request.prompt)
        for name in ("generation_tokens", "max_num_generation_tokens", "params_max_tokens"):
            histograms[f"request_{name}"].add(request.tokens)
        if request.first_s >= 0:
            decode_s, prefill_s = now_s - request.first_s, request.first_s - request.scheduled_s
            queue_s = request.scheduled_s - request.ready_s
            parts = {"queue": queue_s, "prefill": prefill_s, "decode": decode_s}
            parts["inference"] = prefill_s + decode_s
            for part, seconds in parts.items():
                histograms[f"request_{part}_time_seconds"].add(seconds)
            histograms["request_prefill_kv_computed_tokens"].add(request.prompt - request.hit)
            between_s = decode_s / max(1.0, request.tokens - 1)
            histograms["request_time_per_output_token_seconds"].add(between_s)
        if request.caller:
            self._again(seen_s + self.knobs.think_s * (0.5 + self._rng.random()))

    def _preempt(self) -> None:
        """Throw out the newest: it is computed again, with its answer so far."""
        request = next(reversed(self.running))
        self._leave(request)
        self.counters.counts["num_preemptions_total"] += 1
        request.left = int(request.prompt + request.tokens)
        self.waiting.appendleft(request)
