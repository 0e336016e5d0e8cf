"""An engine over time: steps, what they take, and what vLLM counts of them.

Steps in which nothing changes but one token more for everybody are taken together.
"""

from __future__ import annotations

import heapq
import math
from random import Random

from tests.simulator.counters import Counters
from tests.simulator.ended import observe_end
from tests.simulator.requests import Request, Source
from tests.simulator.scheduler import Launch, Scheduler
from tests.simulator.work import Steps, Work

POSITIONS = 8
TOGETHER_MAX = 256
"""Steps taken together at most: the context grows meanwhile."""


class Engine:
    """One engine core. `now_s` is simulated time, from 0."""

    def __init__(
        self, launch: Launch, steps: Steps, source: Source, rng: Random, *, jitter: float = 0.05
    ) -> None:
        self.launch, self.steps, self.source = launch, steps, source
        self.scheduler = Scheduler(launch)
        self.counters = Counters(launch.max_model_len)
        self.now_s = 0.0
        self.hung = False
        """Whether no step is done any more."""
        self.adapters_seen: dict[str, float] = {}
        self.asleep = False
        self._rng, self._jitter = rng, jitter
        self._turn = 0
        self._decoding: dict[int, Request] = {}
        self._ends: list[tuple[int, int, Request]] = []
        self._entered = 0
        self._context = self._rate = 0.0
        self._accepted = [0.0] * POSITIONS
        self._blocked = False

    def run(self, until_s: float) -> None:
        """Go on until a moment (or the end of the step that it lies in)."""
        while self.now_s < until_s:
            self._arrive()
            if self.hung or not (self.scheduler.running or self.scheduler.waiting):
                self.now_s = max(self.now_s, min(until_s, self.source.next_s()))
                continue
            self._step(until_s)

    def held_blocks(self) -> float:
        """Blocks that live requests hold, added up one by one."""
        requests = self.scheduler.running.values()
        shared = {
            id(request.prefix): request.prefix.blocks
            for request in requests
            if request.prefix is not None
        }
        grown = (
            sum(
                request.per_turn * (self._turn - request.turn)
                for request in self._decoding.values()
            )
            / self.launch.block_size
        )
        return sum(request.held for request in requests) + sum(shared.values()) + grown

    def _arrive(self) -> None:
        while self.source.next_s() <= self.now_s:
            self.scheduler.waiting.append(self.source.take())
            self._blocked = False

    def _step(self, until_s: float) -> None:
        scheduler = self.scheduler
        verified = 1 + self.launch.num_speculative_tokens
        budget = float(self.launch.max_num_batched_tokens)
        preempted = self._make_room()
        decodes = len(self._decoding)
        budget -= decodes * verified
        loads = scheduler.loads
        chunks, short = self._chunks(budget)
        budget -= sum(tokens for _, tokens in chunks)
        if not preempted and not short and not self._blocked:
            entered = scheduler.admit(self.now_s, budget)
            # With the whole budget free nobody can enter until somebody comes or leaves.
            self._blocked = not entered and not chunks
            chunks += entered
            self._note_adapters()
        elif preempted or short:
            self._blocked = False
        if not chunks and not self._decoding:
            # Nobody fits: only a request that is longer than the pool can wait for itself.
            self.now_s = max(self.now_s + 0.01, min(until_s, self.source.next_s()))
            return
        prompt = sum(tokens for _, tokens in chunks)
        pairs = sum(tokens * (chunked.computed - tokens / 2) for chunked, tokens in chunks)
        decodes = len(self._decoding)
        work = Work(decodes, self._context, prompt, pairs, verified)
        step_s = self.steps.step_s(work)
        count = 1 if chunks or preempted else self._alike(step_s, until_s)
        spread = self._jitter / math.sqrt(count)
        step_s *= math.exp(self._rng.gauss(0.0, spread) - spread * spread / 2)
        self.steps.worked(work, count, step_s)
        self.now_s += count * step_s + (scheduler.loads - loads) * self.steps.load_adapter_s
        self._decode(count, step_s, prompt)
        for request, _ in chunks:
            if request.computed >= request.target and id(request) in scheduler.running:
                self._token_after_prefill(request)
        self._end()

    def _make_room(self) -> bool:
        """Throw out the newest until this step's tokens have their blocks."""
        scheduler, preempted = self.scheduler, False
        while self._decoding:
            if scheduler.blocks.free >= self._rate / self.launch.block_size:
                break
            self._throw_out(scheduler.newest())
            preempted = True
        # Before any prompt gets its blocks: running requests come first.
        scheduler.blocks.take(self._rate / self.launch.block_size)
        return preempted

    def _throw_out(self, request: Request) -> None:
        self._stop_decoding(request)
        self.scheduler.preempt(request, self.now_s)

    def _chunks(self, budget: float) -> tuple[list[tuple[Request, float]], bool]:
        """The next part of each prompt under way; whether blocks were short."""
        scheduler, chunks = self.scheduler, list[tuple[Request, float]]()
        for request in list(scheduler.prefilling):
            if id(request) not in scheduler.running or budget <= 0:
                continue
            tokens = min(request.target - request.computed, budget)
            while not scheduler.compute(request, tokens):
                victim = scheduler.newest()
                if id(victim) in self._decoding:
                    scheduler.blocks.give_back(victim.per_turn / self.launch.block_size)
                self._throw_out(victim)
                if victim is request:
                    return chunks, True
                chunks = [(chunked, part) for chunked, part in chunks if chunked is not victim]
            budget -= tokens
            chunks.append((request, tokens))
        return chunks, False

    def _alike(self, step_s: float, until_s: float) -> int:
        """How many steps will be like this one."""
        limit_s = min(until_s, self.source.next_s()) - self.now_s
        count = min(TOGETHER_MAX, math.ceil(max(limit_s, 0.0) / step_s))
        while self._ends and id(self._ends[0][2]) not in self._decoding:
            heapq.heappop(self._ends)
        if self._ends:
            count = min(count, self._ends[0][0] - self._turn)
        grown = self._rate / self.launch.block_size
        if grown > 0:
            count = min(count, 1 + int(self.scheduler.blocks.free / grown))
        return max(1, count)

    def _decode(self, count: int, step_s: float, prompt: float) -> None:
        decodes, counters = len(self._decoding), self.counters
        self._turn += count
        tokens = self._rate * count
        if decodes:
            # One step's blocks were taken before.
            self.scheduler.blocks.take((count - 1) * self._rate / self.launch.block_size)
            self._context += tokens
            counters.counts["generation_tokens_total"] += tokens
            counters.histograms["inter_token_latency_seconds"].add(step_s, decodes * count)
            if self.launch.num_speculative_tokens:
                self._speculate(decodes * count, count)
        seen = counters.histograms["iteration_tokens_total"]
        seen.add(round(prompt + self._rate), count)

    def _speculate(self, drafts: int, count: int) -> None:
        counts, drafted = self.counters.counts, self.launch.num_speculative_tokens
        counts["spec_decode_num_drafts_total"] += drafts
        counts["spec_decode_num_draft_tokens_total"] += drafts * drafted
        for position in range(drafted):
            accepted = self._accepted[position] * count
            counts["spec_decode_num_accepted_tokens_total"] += accepted
            name = f"spec_decode_num_accepted_tokens_per_pos_total|position={position}"
            counts[name] += accepted

    def _token_after_prefill(self, request: Request) -> None:
        """A prompt is computed, or what was thrown away is computed again: a token comes out."""
        scheduler, counters = self.scheduler, self.counters
        counts = counters.counts
        scheduler.prefilling.remove(request)
        if math.isnan(request.first_s):
            request.first_s = self.now_s
            ttft_s = self.now_s - request.arrived_s + self.steps.request_s
            counters.histograms["time_to_first_token_seconds"].add(ttft_s)
            cached = request.hit_tokens
            counts["prompt_tokens_total"] += request.prompt_tokens
            computed = request.prompt_tokens - cached
            counts["prompt_tokens_by_source_total|source=local_compute"] += computed
            counts["prompt_tokens_by_source_total|source=local_cache_hit"] += cached
            counts["prompt_tokens_cached_total"] += cached
            counts["prompt_tokens_cached_by_source_total|source=device"] += cached
        else:
            gap_s = self.now_s - request.last_s
            counters.histograms["inter_token_latency_seconds"].add(gap_s)
        counts["num_preemptions_total"] += request.uncounted
        counts["generation_tokens_total"] += 1
        request.uncounted = 0
        request.generated += 1
        if request.generated >= request.output_tokens:
            self._finish(request)
        else:
            self._start_decoding(request)

    def _start_decoding(self, request: Request) -> None:
        drafted = self.launch.num_speculative_tokens
        accepted = [request.acceptance_ratio ** (at + 1) for at in range(drafted)]
        request.per_turn = 1.0 + sum(accepted)
        request.turn = self._turn
        for at, ratio in enumerate(accepted):
            self._accepted[at] += ratio
        left = request.output_tokens - request.generated
        self._entered += 1
        end = self._turn + math.ceil(left / request.per_turn)
        heapq.heappush(self._ends, (end, self._entered, request))
        self._decoding[id(request)] = request
        self._context += request.prompt_tokens + request.generated
        self._rate += request.per_turn

    def _stop_decoding(self, request: Request) -> None:
        """Its tokens so far are settled; the blocks they fill are its own."""
        if self._decoding.pop(id(request), None) is None:
            return
        grown = request.per_turn * (self._turn - request.turn)
        self._context -= request.prompt_tokens + request.generated + grown
        self._rate -= request.per_turn
        request.held += grown / self.launch.block_size
        over = request.generated + grown - request.output_tokens
        if over > 0:
            self.counters.counts["generation_tokens_total"] -= over
        request.generated = min(request.generated + grown, request.output_tokens)
        for at in range(self.launch.num_speculative_tokens):
            self._accepted[at] -= request.acceptance_ratio ** (at + 1)
        if not self._decoding:
            # Sums of many small numbers drift; with nothing in them they are nothing.
            self._context = self._rate = 0.0
            self._accepted = [0.0] * POSITIONS

    def _end(self) -> None:
        while self._ends and self._ends[0][0] <= self._turn:
            end, _, request = heapq.heappop(self._ends)
            current = self._decoding.get(id(request)) is request
            left = request.output_tokens - request.generated
            if current and end == request.turn + math.ceil(left / request.per_turn):
                self._stop_decoding(request)
                self._finish(request)

    def _finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        self._blocked = False
        if not request.hung_up:  # vLLM counts nothing of a request whose client went away
            observe_end(self.counters, request, self.now_s, self.steps.request_s)
        self.source.ended(request, self.now_s + self.steps.request_s)

    def _note_adapters(self) -> None:
        if self.launch.max_loras:
            self.adapters_seen[",".join(self.scheduler.adapters)] = self.now_s
