"""A request, and where requests come from: open and closed loops with seeded lengths."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from random import Random
from typing import Protocol

from msgspec import Struct, field

from tests.simulator.blocks import Chain

Length = Callable[[Random], int]


class Request(Struct, eq=False):
    """A request and how far it is. `prefix` holds its first `prefix_tokens`, shared with others.

    `grows`: what it adds becomes part of its prefix (the next turn of a conversation).
    `acceptance_ratio`: the chance that one drafted token is accepted.
    """

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: Chain | None = None
    prefix_tokens: int = 0
    grows: bool = False
    adapter: str = ""
    acceptance_ratio: float = 0.0
    capped: bool = False
    hung_up: bool = False
    """Whether its client goes away before the answer is complete."""

    own: Chain = field(default_factory=Chain)
    """What only this request holds; stays findable while it waits after a preemption."""
    held: float = 0.0
    fills: bool = False
    computed: float = 0.0
    target: int = 0
    """Tokens to compute before the next token comes out."""
    hit_tokens: int = 0
    generated: float = 0.0
    per_turn: float = 1.0
    turn: int = 0
    scheduled_s: float = math.nan
    queued_from_s: float = math.nan
    first_s: float = math.nan
    last_s: float = math.nan
    preempted: int = 0
    uncounted: int = 0
    """Preemptions that vLLM counts when the next token comes out."""


class Source(Protocol):
    """Where requests come from."""

    def next_s(self) -> float:
        """When the next one comes; inf for never."""
        ...

    def take(self) -> Request:
        """The next one."""
        ...

    def ended(self, request: Request, now_s: float) -> None:
        """A request was answered."""
        ...


class Kind(Struct, kw_only=True):
    """What requests are like; what is drawn is drawn from `rng` in the order of arrivals."""

    prompt: Length
    output: Length
    prefixes: list[Chain] = field(default_factory=list[Chain])
    prefix_tokens: int = 0
    adapters: tuple[str, ...] = ()
    acceptance: Callable[[Random], float] = lambda _rng: 0.0
    output_cap: int = 1 << 30
    hang_up_ratio: float = 0.0

    def make(self, arrived_s: float, rng: Random) -> Request:
        """A request. The prompt's length is that of what follows the prefix."""
        output = self.output(rng)
        request = Request(
            arrived_s,
            max(1, self.prompt(rng)),
            max(1, min(output, self.output_cap)),
            capped=output >= self.output_cap,
            adapter=rng.choice(self.adapters) if self.adapters else "",
            acceptance_ratio=self.acceptance(rng),
        )
        if self.prefixes:
            request.prefix = rng.choice(self.prefixes)
            request.prefix_tokens = self.prefix_tokens
            request.prompt_tokens += self.prefix_tokens
        if self.hang_up_ratio and rng.random() < self.hang_up_ratio:
            request.hung_up = True
            request.output_tokens = max(1, int(rng.random() * request.output_tokens))
        return request


class Open:
    """Arrivals at random (Poisson) at a rate a second that may change slowly, whatever the server
    does with them. `kind` and `rate` may be replaced at any time.
    """

    def __init__(self, kind: Kind, rate: Callable[[float], float], rng: Random) -> None:
        self.kind, self.rate, self._rng = kind, rate, rng
        self._next_s = self._after(0.0)

    def _after(self, now_s: float) -> float:
        return now_s + self._rng.expovariate(max(self.rate(now_s), 1e-6))

    def resume(self, now_s: float) -> None:
        """Draw anew when the next one comes: the rate has changed at once."""
        self._next_s = self._after(now_s)

    def next_s(self) -> float:
        """When the next one comes."""
        return self._next_s

    def take(self) -> Request:
        """The next one."""
        arrived_s, self._next_s = self._next_s, self._after(self._next_s)
        return self.kind.make(arrived_s, self._rng)

    def ended(self, request: Request, now_s: float) -> None:
        """Nobody waits for it."""


class Closed:
    """So many clients, each with one request in flight; their number may change at any time."""

    def __init__(self, kind: Kind, rng: Random) -> None:
        self.kind, self._rng = kind, rng
        self._due_s: list[float] = []
        self._in_flight = 0
        self.size = 0

    def resize(self, size: int, now_s: float) -> None:
        """Let so many be in flight from now on."""
        self.size = size
        for _ in range(size - self._in_flight - len(self._due_s)):
            heapq.heappush(self._due_s, now_s)

    def resume(self, now_s: float) -> None:
        """All clients send anew: the server was restarted."""
        self._due_s, self._in_flight = [], 0
        self.resize(self.size, now_s)

    def next_s(self) -> float:
        """When the next one comes."""
        return self._due_s[0] if self._due_s else math.inf

    def take(self) -> Request:
        """The next one."""
        self._in_flight += 1
        return self.kind.make(heapq.heappop(self._due_s), self._rng)

    def ended(self, request: Request, now_s: float) -> None:
        """Its client asks again, unless there are too many."""
        self._in_flight -= 1
        if self._in_flight + len(self._due_s) < self.size:
            heapq.heappush(self._due_s, now_s)


class Merged:
    """Several sources as one."""

    def __init__(self, *sources: Source) -> None:
        self._sources = sources
        self._of: dict[int, Source] = {}

    def next_s(self) -> float:
        """When the next one comes."""
        return min(source.next_s() for source in self._sources)

    def take(self) -> Request:
        """The next one."""
        source = min(self._sources, key=lambda candidate: candidate.next_s())
        request = source.take()
        self._of[id(request)] = source
        return request

    def ended(self, request: Request, now_s: float) -> None:
        """A request was answered."""
        self._of.pop(id(request)).ended(request, now_s)


def lengths(mean: float, shape: float = 2.0) -> Length:
    """Gamma-distributed lengths; a smaller `shape` has a longer tail."""
    return lambda rng: max(1, round(rng.gammavariate(shape, mean / shape)))


def lognormal(mean: float, sigma: float) -> Length:
    """Lognormal lengths, up to ten times the mean; a greater `sigma` has a longer tail."""
    mu, most = math.log(mean) - sigma * sigma / 2, 10 * mean
    return lambda rng: max(1, round(min(rng.lognormvariate(mu, sigma), most)))


def between(low: int, high: int) -> Length:
    """Lengths that are all as likely, the bounds among them."""
    return lambda rng: rng.randint(low, high)


def fixed(tokens: int) -> Length:
    """One length."""
    return lambda _rng: tokens
