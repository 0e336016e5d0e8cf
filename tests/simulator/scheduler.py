"""Who runs: admission within seats, token budget, blocks and adapter slots; preemption.

After vllm/v1/core/sched/scheduler.py (0.32): running requests come first, then the queue in its
order; where blocks are short the newest running request is thrown out, keeps nothing but what the
prefix cache happens to hold, and goes to the head of the queue.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque

from msgspec import Struct

from tests.simulator.blocks import Blocks, Chain
from tests.simulator.requests import Request


class Launch(Struct, kw_only=True):
    """A server's settings: vLLM's own flags."""

    num_gpu_blocks: int
    block_size: int = 16
    max_model_len: int = 32_768
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0
    max_loras: int = 0
    is_overridden: bool = False
    """Whether `num_gpu_blocks` is --num-gpu-blocks-override."""


class Scheduler:
    """The queue and the batch."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.blocks = Blocks(launch.num_gpu_blocks, launch.block_size)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.prefilling: list[Request] = []
        self.deferred = 0
        self.queried_tokens = self.hit_tokens = 0.0
        self.loads = 0
        """Adapters that were brought into a slot, since the start."""
        self._adapters: Counter[str] = Counter()
        self._resident: OrderedDict[str, None] = OrderedDict()

    @property
    def adapters(self) -> list[str]:
        """Adapters that running requests use."""
        return [name for name, users in self._adapters.items() if users]

    def admit(self, now_s: float, budget: float) -> list[tuple[Request, float]]:
        """Requests that enter the batch now, each with the prompt tokens of its first chunk."""
        launch, taken = self.launch, list[tuple[Request, float]]()
        passed = deque[Request]()
        while self.waiting and budget > 0 and len(self.running) < launch.max_num_seqs:
            request = self.waiting.popleft()
            if not self._slot_for(request.adapter):
                passed.append(request)
                continue
            chunk = self._enter(request, budget)
            if chunk is None:
                self.waiting.appendleft(request)
                break
            if math.isnan(request.first_s):
                request.scheduled_s = now_s
            budget -= chunk
            taken.append((request, chunk))
        self.deferred = len(passed)
        self.waiting.extendleft(reversed(passed))
        return taken

    def _slot_for(self, adapter: str) -> bool:
        return (
            not adapter or self._adapters[adapter] > 0 or len(self.adapters) < self.launch.max_loras
        )

    def _enter(self, request: Request, budget: float) -> float | None:
        """The first chunk of a request that gets its blocks, or None."""
        blocks, size = self.blocks, self.launch.block_size
        request.target = request.prompt_tokens + int(request.generated)
        shared, own = self._hits(request)
        hit = (shared + own) * size
        chunk = float(request.target - hit)
        if chunk > budget:
            if not self.launch.enable_chunked_prefill:
                return None
            chunk = budget
        prefix = request.prefix
        in_use = 0.0 if prefix is None or prefix.refs else prefix.blocks
        if math.ceil(chunk / size) > blocks.free - in_use - request.own.blocks:
            return None
        self._hold(request, own)
        request.computed = hit
        if not request.preempted and self.launch.enable_prefix_caching:
            request.hit_tokens = int(hit)
            self.queried_tokens += request.prompt_tokens
            self.hit_tokens += hit
        self.running[id(request)] = request
        self.prefilling.append(request)
        self._use_adapter(request.adapter)
        self.compute(request, chunk)
        return chunk

    def _hits(self, request: Request) -> tuple[int, int]:
        """Cached blocks of a request's prefix, and of what it had computed itself before."""
        if not self.launch.enable_prefix_caching:
            return 0, 0
        size = self.launch.block_size
        # The last token is computed in any case: it yields the next one.
        most = (request.target - 1) // size
        whole = request.prefix_tokens // size
        shared = 0
        if request.prefix is not None:
            shared = min(int(request.prefix.blocks), whole, most)
        own = min(int(request.own.blocks), most - shared) if shared == min(whole, most) else 0
        return shared, own

    def _hold(self, request: Request, own: int) -> None:
        if request.prefix is not None and self.launch.enable_prefix_caching:
            self.blocks.hold(request.prefix)
            missing = request.prefix.blocks < request.prefix_tokens // self.launch.block_size
            request.fills = missing and not request.prefix.filling
            request.prefix.filling |= request.fills
        if request.own.blocks:
            self.blocks.hold(request.own)
            rest, request.own.blocks = request.own.blocks - own, 0.0
            request.own.refs = 0
            request.held += own
            self.blocks.drop(rest)

    def _use_adapter(self, adapter: str) -> None:
        if not adapter:
            return
        self._adapters[adapter] += 1
        if adapter not in self._resident:
            self.loads += 1
            self._resident[adapter] = None
            idle = (name for name in list(self._resident) if not self._adapters[name])
            while len(self._resident) > max(1, self.launch.max_loras):
                del self._resident[next(idle)]
        self._resident.move_to_end(adapter)

    def compute(self, request: Request, tokens: float) -> bool:
        """Take the blocks of a chunk; False where there are too few."""
        size = self.launch.block_size
        after = request.computed + tokens
        needed = float(math.ceil(after / size) - math.ceil(request.computed / size))
        if not self.blocks.take(needed):
            return False
        if request.fills and request.prefix is not None:
            lacking = max(0.0, request.prefix_tokens // size - request.prefix.blocks)
            shared = min(lacking, needed)
            request.prefix.blocks += shared
            needed -= shared
            if after >= request.prefix_tokens:
                self._filled(request)
        request.held += needed
        request.computed = after
        return True

    def _filled(self, request: Request) -> None:
        if request.fills and request.prefix is not None:
            request.fills = request.prefix.filling = False

    def newest(self) -> Request:
        """The request that is thrown out next."""
        return next(reversed(self.running.values()))

    def preempt(self, request: Request, now_s: float) -> None:
        """Throw a request out of the batch, to the head of the queue."""
        self._leave(request)
        request.preempted += 1
        request.uncounted += 1
        request.last_s = now_s
        if self.launch.enable_prefix_caching:
            request.own = Chain(request.held, refs=1)
            self.blocks.release(request.own)
        else:
            self.blocks.give_back(request.held)
        request.held = request.computed = 0.0
        self.waiting.appendleft(request)

    def finish(self, request: Request) -> None:
        """A request got its last token."""
        self._leave(request)
        if not self.launch.enable_prefix_caching:
            self.blocks.give_back(request.held)
        elif request.grows and request.prefix is not None and not request.prefix.refs:
            self.blocks.hold(request.prefix)
            request.prefix.blocks += request.held
            self.blocks.release(request.prefix)
        else:
            self.blocks.drop(request.held)
        request.held = 0.0

    def _leave(self, request: Request) -> None:
        del self.running[id(request)]
        if request in self.prefilling:
            self.prefilling.remove(request)
        self._filled(request)
        if request.prefix is not None and self.launch.enable_prefix_caching:
            self.blocks.release(request.prefix)
        if request.adapter:
            self._adapters[request.adapter] -= 1
