"""An engine by its requests instead of its steps: for weeks of healthy load, where the detail of
`engine.py` costs too much. `test_quick.py` holds it against that one.

A request is two events, its prompt and its end. Between events all that decode go on at one pace;
a prompt makes steps longer for everybody while it is computed, one prompt after the other. What is
left out is what does not happen on a healthy day: preemption, full seats, swapped adapters. A cache
that would have been too small is told by `overfull`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from tests.simulator.counters import Counters
from tests.simulator.quick_books import Active, Ended, QuickBooks
from tests.simulator.requests import Kind, Request
from tests.simulator.scheduler import Launch
from tests.simulator.work import Steps, Work

POOL = 4096
"""Requests that are drawn beforehand: who comes is one of them."""

RATE_HELD_S = 5.0
SOME_TOKENS = 1e5
FULL_RATIO = 0.98


class QuickEngine:
    """One engine. `rate` is requests a second at a moment; `now_s` is simulated time, from 0."""

    def __init__(
        self,
        launch: Launch,
        steps: Steps,
        kind: Kind,
        rate: Callable[[float], float],
        rng: Random,
        *,
        jitter: float = 0.05,
        hang_up_ratio: float = 0.0,
    ) -> None:
        self.launch, self.steps, self.scheduler = launch, steps, QuickBooks()
        self.counters = Counters(launch.max_model_len)
        self.adapters_seen: dict[str, float] = {}
        self.now_s = self.busy_s = 0.0
        self.overfull = False
        """Whether the cache could not have held all that ran."""
        self.asleep = False
        self._rng, self._jitter, self._rate_at = rng, jitter, rate
        self._hang_up_ratio = hang_up_ratio
        self._rate, self._rate_until_s = rate(0.0), RATE_HELD_S
        self.ask([(kind, 1.0)])
        self._next_s = self._gap_s()
        self._pending: deque[tuple[float, Request]] = deque()
        self._ends: list[tuple[float, int, Active]] = []
        self._turn = self._context = self._pace = self._held = 0.0
        self._entered = 0
        self._seen: set[int] = set()
        self._drafted = launch.num_speculative_tokens
        self._plain: dict[int, tuple[float, float]] = {}
        self._accepted = [0.0] * self._drafted
        histograms = self.counters.histograms
        self._itl = histograms["inter_token_latency_seconds"]
        self._iteration = histograms["iteration_tokens_total"]
        self._ended = Ended(self.counters)

    def ask(self, kinds: Sequence[tuple[Kind, float]]) -> None:
        """Let requests be of these kinds from now on, in these shares."""
        self._pool = [
            kind.make(0.0, self._rng) for kind, share in kinds for _ in range(round(share * POOL))
        ]

    def use(self, steps: Steps) -> None:
        """Let steps take as long as these from now on."""
        self.steps = steps
        self._plain.clear()

    def stop_drafts(self, steps: Steps) -> None:
        """Draft no tokens from now on; steps take as long as these."""
        self._drafted, self._accepted, self._pace = 0, [], float(len(self._ends))
        for *_, active in self._ends:
            active.accepted, active.pace = (), 1.0
        self.use(steps)

    def run(self, until_s: float) -> None:
        """Go on until a moment (or the end of the prompt that it lies in)."""
        while self.now_s < until_s:
            self._arrive(self.now_s)
            if self._pending:
                self._prefill(*self._pending.popleft())
            elif self._ends:
                self._decode(min(until_s, self._next_s))
            else:
                self.now_s = min(until_s, self._next_s)
        self._arrive(until_s)
        books, capacity = self.scheduler, self.launch.num_gpu_blocks * self.launch.block_size
        shared = sum(self._prefix_tokens(active.request) for active in self._prefixes().values())
        books.usage_ratio = min(1.0, (self._held + self._context_grown() + shared) / capacity)
        self.overfull |= books.usage_ratio > FULL_RATIO
        books.waiting = range(len(self._pending))
        books.running = range(len(self._ends))
        books.longest_wait_s = until_s - self._pending[0][0] if self._pending else 0.0
        if self.launch.max_loras:
            names = sorted({active.request.adapter for _, _, active in self._ends})
            self.adapters_seen = {",".join(names): self.now_s}

    def _prefixes(self) -> dict[int, Active]:
        return {
            id(active.request.prefix): active
            for _, _, active in self._ends
            if active.request.prefix is not None
        }

    def _context_grown(self) -> float:
        return sum((self._turn - active.began) * active.pace for *_, active in self._ends)

    def _arrive(self, until_s: float) -> None:
        while self._next_s <= until_s:
            if self._next_s >= self._rate_until_s:
                self._rate = self._rate_at(self._next_s)
                self._rate_until_s = self._next_s + RATE_HELD_S
            if self._rate:
                request = self._pool[int(self._rng.random() * len(self._pool))]
                self._pending.append((self._next_s, request))
            self._next_s += self._gap_s()

    def _gap_s(self) -> float:
        """Seconds to the next arrival; without any, to the next look at the rate."""
        return self._rng.expovariate(self._rate) if self._rate else RATE_HELD_S

    def _prefill(self, arrived_s: float, request: Request) -> None:
        """Compute a prompt, a step's budget at a time, with all that decode in the same steps.

        Where these take the whole budget, it waits until one of them ends.
        """
        began_s, verified, hit = self.now_s, 1 + self._drafted, self._hits(request)
        fresh = left = request.prompt_tokens - hit
        while left > 0:
            decodes = len(self._ends)
            tokens = min(left, max(0, self.launch.max_num_batched_tokens - decodes * verified))
            done = request.prompt_tokens - left + tokens
            pairs = tokens * (done - tokens / 2)
            step_s = self.steps.step_s(Work(decodes, self._context, tokens, pairs, verified))
            self._advance(1, step_s, tokens)
            self._end()
            left -= tokens
        counts, histograms = self.counters.counts, self.counters.histograms
        histograms["time_to_first_token_seconds"].add(self.now_s - arrived_s + self.steps.request_s)
        counts["prompt_tokens_total"] += request.prompt_tokens
        counts["prompt_tokens_by_source_total|source=local_compute"] += fresh
        counts["prompt_tokens_by_source_total|source=local_cache_hit"] += hit
        counts["prompt_tokens_cached_total"] += hit
        counts["prompt_tokens_cached_by_source_total|source=device"] += hit
        counts["generation_tokens_total"] += 1
        ratio = request.acceptance_ratio
        accepted = tuple(ratio ** (at + 1) for at in range(self._drafted))
        pace = 1.0 + sum(accepted)
        tokens = request.output_tokens
        if self._hang_up_ratio and self._rng.random() < self._hang_up_ratio:
            tokens = max(1, int(self._rng.random() * tokens))
        times = arrived_s, began_s, self.now_s, self._turn
        self._start(Active(request, *times, fresh, accepted, pace, tokens))

    def _hits(self, request: Request) -> int:
        books, hit = self.scheduler, 0
        if self.launch.enable_prefix_caching:
            if id(request.prefix) in self._seen:
                hit = self._prefix_tokens(request)
            elif request.prefix is not None:
                self._seen.add(id(request.prefix))
            books.queried_tokens += request.prompt_tokens
            books.hit_tokens += hit
        return hit

    def _prefix_tokens(self, request: Request) -> int:
        size = self.launch.block_size
        return request.prefix_tokens // size * size

    def _start(self, active: Active) -> None:
        request, pace = active.request, active.pace
        self._entered += 1
        end = self._turn + (active.output_tokens - 1) / pace
        heapq.heappush(self._ends, (end, self._entered, active))
        self._context += request.prompt_tokens
        self._pace += pace
        for at, ratio in enumerate(active.accepted):
            self._accepted[at] += ratio
        self._held += request.prompt_tokens - self._prefix_tokens(request)
        self._end()

    def _decode(self, until_s: float) -> None:
        """Steps that are alike, until somebody ends or comes."""
        decodes = len(self._ends)
        base_s, slope_s = self._plain.get(decodes) or self._measured(decodes)
        step_s = base_s + slope_s * self._context
        step_s *= math.exp(self._rng.gauss(0.0, self._jitter / 4))
        turns = math.ceil(max(0.0, until_s - self.now_s) / step_s)
        turns = max(1, min(turns, math.ceil(self._ends[0][0] - self._turn)))
        self._advance(turns, step_s, 0)
        self._end()

    def _measured(self, decodes: int) -> tuple[float, float]:
        """A step's seconds without context, and those of a token of context."""
        verified = 1 + self._drafted
        none_s, some_s = (
            self.steps.step_s(Work(decodes, tokens, 0.0, 0.0, verified))
            for tokens in (0.0, SOME_TOKENS)
        )
        self._plain[decodes] = none_s, (some_s - none_s) / SOME_TOKENS
        return self._plain[decodes]

    def _advance(self, turns: int, step_s: float, prompt: int) -> None:
        decodes = len(self._ends)
        self.now_s += turns * step_s
        self.busy_s += turns * step_s
        self._turn += turns
        self._iteration.add(round(prompt + self._pace), turns)
        if not decodes:
            return
        tokens = self._pace * turns
        self._context += tokens
        self.counters.counts["generation_tokens_total"] += tokens
        self._itl.add(step_s, decodes * turns)
        if self._drafted:
            self._speculate(decodes, turns)

    def _speculate(self, decodes: int, turns: int) -> None:
        counts = self.counters.counts
        counts["spec_decode_num_drafts_total"] += decodes * turns
        counts["spec_decode_num_draft_tokens_total"] += decodes * turns * self._drafted
        for at in range(self._drafted):
            accepted = turns * self._accepted[at]
            counts["spec_decode_num_accepted_tokens_total"] += accepted
            counts[f"spec_decode_num_accepted_tokens_per_pos_total|position={at}"] += accepted

    def _end(self) -> None:
        """End what has all its tokens."""
        while self._ends and self._ends[0][0] <= self._turn:
            _, _, active = heapq.heappop(self._ends)
            request, pace = active.request, active.pace
            grown = pace * (self._turn - active.began)
            self._context -= request.prompt_tokens + grown
            self._pace -= pace
            for at, ratio in enumerate(active.accepted):
                self._accepted[at] -= ratio
            self._held -= request.prompt_tokens - self._prefix_tokens(request)
            over = 1 + grown - active.output_tokens
            self.counters.counts["generation_tokens_total"] -= over
            if not active.hung_up:  # vLLM counts nothing of a request whose client went away
                self._ended.observe(active, self.now_s, self.steps.request_s)
        if not self._ends:
            self._context = self._pace = self._held = 0.0
            self._accepted = [0.0] * self._drafted
