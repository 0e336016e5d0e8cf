"""An engine by SGLang's rules, which writes its metrics as SGLang's scheduler does.

After SGLang 0.5.23 (managers/schedule_policy.py, schedule_batch.py and scheduler_components): a
batch computes prompts or decodes, and prompts come first. A request is admitted if the pool holds
its prompt, its longest answer, and a part of what running requests may still generate; that part
falls with each decode step and rises when requests are retracted. Gauges are set after each batch
of prompts, without the requests in it, at each 40th decode step, and when the engine becomes idle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Protocol

from tests.simulator.engine import Engine
from tests.simulator.requests import Request, Source
from tests.simulator.scheduler import Launch, Scheduler
from tests.simulator.work import Steps, Work

FIRST_RATIO, LEAST_RATIO, DECAY_STEPS = 0.7, 0.7 * 0.14, 600
"""Of what running requests may still generate, the part that admission keeps free."""

RETRACT_STEPS = 20
LOG_STEPS, IDLE_LOG_S = 40, 30.0


class Metrics(Protocol):
    """Where the engine's metrics go: SGLang's collectors."""

    def gauges(self, engine: SglangEngine, running: int) -> None:
        """The state of the batch, the queue and the pool."""
        ...

    def prefilled(self, computed: float, cached: float, again: float) -> None:
        """Prompt tokens of a batch; of the computed ones, those after a retraction are `again`."""
        ...

    def scheduled(self, queue_s: float) -> None:
        """A request is in a batch for the first time."""
        ...

    def first_token(self, ttft_s: float, prefill_s: float) -> None:
        """A request has its first token."""
        ...

    def decoded(self, tokens: float, steps: int) -> None:
        """Tokens of decode steps."""
        ...

    def between_tokens(self, gap_s: float, times: int) -> None:
        """Gaps between tokens of one stream."""
        ...

    def drafted(self, drafts: float, accepted: float, drafted: float) -> None:
        """Verified drafts since the gauges were set, and their tokens."""
        ...

    def retracted(self, request: Request) -> None:
        """A request lost its KV cache."""
        ...

    def finished(self, request: Request, e2e_s: float, decode_s: float) -> None:
        """A request is answered, or its client is gone."""
        ...

    def failed(self, *, transfer: bool) -> None:
        """A call ends with HTTP 5xx; `transfer`: because its KV did not come."""
        ...


class SglangScheduler(Scheduler):
    """Admission and retraction. `reserved_tokens`: kept free for running requests."""

    def __init__(self, launch: Launch, max_new_tokens: int) -> None:
        super().__init__(launch)
        self.max_new_tokens = max_new_tokens
        self.reserved_tokens = self._left_tokens = 0.0

    def admit(self, now_s: float, budget: float) -> list[tuple[Request, float]]:
        free_tokens = self.blocks.free * self.launch.block_size
        self._left_tokens = free_tokens - self.reserved_tokens
        return super().admit(now_s, budget)

    def _enter(self, request: Request, budget: float) -> float | None:
        request.target = request.prompt_tokens + int(request.generated)
        shared, own = self._hits(request)
        fresh = request.target - (shared + own) * self.launch.block_size
        needed = fresh + max(0.0, self.max_new_tokens - request.generated)
        if needed >= self._left_tokens and self.running:
            return None
        chunk = super()._enter(request, budget)
        self._left_tokens -= 0.0 if chunk is None else needed
        return chunk

    def preempt(self, request: Request, now_s: float) -> None:
        """Retract a request: nothing of it stays cached, and it goes to the end of the queue."""
        self._leave(request)
        request.preempted += 1
        request.uncounted += 1
        request.last_s = now_s
        self.blocks.give_back(request.held)
        request.held = request.computed = 0.0
        self.waiting.append(request)


class SglangEngine(Engine):
    """The engine; `new_token_ratio` as in SGLang's metric of that name."""

    scheduler: SglangScheduler

    def __init__(
        self,
        launch: Launch,
        steps: Steps,
        source: Source,
        rng: Random,
        *,
        metrics: Metrics,
        max_new_tokens: int,
    ) -> None:
        super().__init__(launch, steps, source, rng)
        self.scheduler = SglangScheduler(launch, max_new_tokens)
        self.new_token_ratio = FIRST_RATIO
        self.queue_limit = math.inf
        """Requests beyond it are refused."""
        self.in_transfer, self.failed_ratio = 0, 0.0
        """Requests whose KV is on its way from a prefill server, and the share that fails."""
        self.leaked_tokens = 0.0
        """Tokens of each finished request whose blocks are not given back."""
        self._metrics = metrics
        self._decode_steps, self._idle_logged_s = 0, 0.0
        self._held_up, self._held_up_s = 0, 0.0
        metrics.gauges(self, 0)

    def run(self, until_s: float) -> None:
        super().run(until_s)
        idle = not (self.hung or self.scheduler.running or self.scheduler.waiting)
        if idle and self.now_s - self._idle_logged_s > IDLE_LOG_S:
            self._log_idle()

    def _arrive(self) -> None:
        super()._arrive()
        waiting = self.scheduler.waiting
        while len(waiting) > self.queue_limit:
            waiting.pop()
            self._metrics.failed(transfer=False)

    def _log_idle(self) -> None:
        self._metrics.gauges(self, 0)
        self._idle_logged_s = self.now_s

    def generated(self, request: Request) -> float:
        """Output tokens of a request so far."""
        live = id(request) in self._decoding
        grown = request.per_turn * (self._turn - request.turn) if live else 0.0
        return request.generated + grown

    def _step(self, until_s: float) -> None:
        chunks = self._batch_of_prompts()
        if chunks:
            self._prefill(chunks)
        elif self._decoding:
            self._decode_steps_until(until_s)
        else:
            self.now_s = max(self.now_s + 0.01, min(until_s, self.source.next_s()))
            return
        self._end()
        if not self.scheduler.running and not self.scheduler.waiting:
            self._log_idle()

    def _batch_of_prompts(self) -> list[tuple[Request, float]]:
        scheduler = self.scheduler
        budget = float(self.launch.max_num_batched_tokens)
        chunks, _ = self._chunks(budget)
        budget -= sum(tokens for _, tokens in chunks)
        if self._blocked:
            return chunks
        most = scheduler.max_new_tokens
        left = sum(max(0.0, most - self.generated(r)) for r in scheduler.running.values())
        scheduler.reserved_tokens = self.new_token_ratio * left
        entered = scheduler.admit(self.now_s, budget)
        self._blocked = not entered and not chunks and bool(scheduler.waiting)
        for request, _ in entered:
            if not request.preempted:
                self._metrics.scheduled(self.now_s - request.arrived_s)
        self._note_adapters()
        return chunks + entered

    def _prefill(self, chunks: Sequence[tuple[Request, float]]) -> None:
        loads, decodes = self.scheduler.loads, len(self._decoding)
        prompt = sum(tokens for _, tokens in chunks)
        pairs = sum(tokens * (chunked.computed - tokens / 2) for chunked, tokens in chunks)
        work = Work(0, 0.0, prompt, pairs, 1)
        step_s = self._lasts_s(work, 1)
        took_s = step_s + (self.scheduler.loads - loads) * self.steps.load_adapter_s
        self.now_s += took_s
        self._held_up = self._held_up or decodes
        self._held_up_s += took_s if decodes else 0.0
        again = sum(tokens for request, tokens in chunks if request.preempted)
        starts = [r for r, tokens in chunks if r.computed - tokens <= r.hit_tokens]
        hits = sum(r.hit_tokens for r in starts if not r.preempted)
        self._metrics.prefilled(prompt, hits, again)
        self._metrics.gauges(self, decodes)
        for request, _ in chunks:
            if request.computed >= request.target and id(request) in self.scheduler.running:
                self._token_after_prefill(request)

    def _decode_steps_until(self, until_s: float) -> None:
        scheduler, size = self.scheduler, self.launch.block_size
        self._retract()
        scheduler.blocks.take(self._rate / size)
        drafted = self.launch.num_speculative_tokens
        work = Work(len(self._decoding), self._context, 0.0, 0.0, 1 + drafted)
        count = self._alike(self.steps.step_s(work), until_s)
        step_s = self._lasts_s(work, count)
        self.now_s += count * step_s
        decodes, rate = len(self._decoding), self._rate
        self._decode(count, step_s, 0.0)
        metrics = self._metrics
        metrics.decoded(rate * count, count)
        per_turn = rate / decodes
        metrics.between_tokens(step_s / per_turn, round(rate * count))
        if self._held_up:
            metrics.between_tokens((step_s + self._held_up_s) / per_turn, self._held_up)
            self._held_up, self._held_up_s = 0, 0.0
        if drafted:
            drafts = decodes * count
            metrics.drafted(drafts, rate * count - drafts, drafts * drafted)
        least = LEAST_RATIO
        self.new_token_ratio -= count * (FIRST_RATIO - least) / DECAY_STEPS
        self.new_token_ratio = max(self.new_token_ratio, least)
        before, self._decode_steps = self._decode_steps, self._decode_steps + count
        if before // LOG_STEPS != self._decode_steps // LOG_STEPS:
            metrics.gauges(self, decodes)

    def _lasts_s(self, work: Work, count: int) -> float:
        """Seconds of each of some steps."""
        spread = self._jitter / math.sqrt(count)
        step_s = self.steps.step_s(work)
        step_s *= math.exp(self._rng.gauss(0.0, spread) - spread * spread / 2)
        self.steps.worked(work, count, step_s)
        return step_s

    def _retract(self) -> None:
        """Retract requests with the shortest answers until all others have room."""
        scheduler = self.scheduler
        retracted = False
        while (
            len(self._decoding) > 1 and scheduler.blocks.free < self._rate / self.launch.block_size
        ):
            victim = min(
                self._decoding.values(), key=lambda r: (self.generated(r), -r.prompt_tokens)
            )
            self._throw_out(victim)
            self._metrics.retracted(victim)
            retracted = True
        if retracted:
            running = list(self._decoding.values())
            out = sum(map(self.generated, running)) + RETRACT_STEPS * len(running)
            self.new_token_ratio = min(1.0, out / (scheduler.max_new_tokens * len(running) + 1))
            self._blocked = True

    def _token_after_prefill(self, request: Request) -> None:
        if math.isnan(request.first_s):
            ttft_s = self.now_s - request.arrived_s + self.steps.request_s
            self._metrics.first_token(ttft_s, self.now_s - request.scheduled_s)
        else:
            self._metrics.between_tokens(self.now_s - request.last_s, 1)
        super()._token_after_prefill(request)

    def _finish(self, request: Request) -> None:
        super()._finish(request)
        if self.leaked_tokens:
            self.scheduler.blocks.take(self.leaked_tokens / self.launch.block_size)
        if self.failed_ratio and self._rng.random() < self.failed_ratio:
            self._metrics.failed(transfer=True)
            return
        e2e_s = self.now_s - request.arrived_s + self.steps.request_s
        self._metrics.finished(request, e2e_s, self.now_s - request.first_s)
