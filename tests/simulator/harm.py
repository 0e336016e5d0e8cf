"""What clients got of a server, by its own books, and how much worse that is than without a fault.

Nothing here reads a page, and nothing here knows of a signal or a bound of ours.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import IntEnum
from operator import sub

from msgspec import Struct, field

from tests.simulator.counters import ITL_LE, TTFT_LE
from tests.simulator.server import Server

TTFT, ITL = "time_to_first_token_seconds", "inter_token_latency_seconds"
KEPT = (TTFT, ITL, "request_decode_time_seconds", "request_generation_tokens",
        "e2e_request_latency_seconds")  # fmt: skip
PAUSE_S = 0.5
"""A stream that pauses for so long is seen to stop."""

MINUTE_S = 60.0
LONGER_FROM = 1.3
"""Answers that take longer at the same length are slower, not longer: that is counted elsewhere."""

FEW_ENDED = 100
"""The mean length of so few answers is chance."""


class Harm(IntEnum):
    """How much worse clients are served than without the fault."""

    NONE = 0
    LITTLE = 1
    CLEAR = 2


class Kept(Struct, frozen=True):
    """A moment of a server's books. `process` counts its restarts."""

    t_s: float
    process: int
    buckets: tuple[tuple[float, ...], ...]
    sums: tuple[float, ...]
    preempted: float
    tokens: float
    running: int
    waiting: int
    wait_s: float
    down: bool


class Served(Struct, frozen=True):
    """What clients got between two moments of one process, in means. `wait_s` is the longest wait
    at the head of the queue, with that of who still waits."""

    ttft_s: float
    pace_s: float
    """Seconds for each token of an answer, once its first one is out."""
    e2e_s: float
    ended: float
    output_tokens: float
    paused_ratio: float
    """Share of the streams' time that they spent in pauses."""
    preempted_per_s: float
    """Preemptions a second for each running request."""
    wait_s: float
    stopped: bool
    """Whether no token came out though requests were there, or nobody could connect."""


class Ledger(Struct):
    """The books of a case at each scrape."""

    kept: list[Kept] = field(default_factory=list[Kept])
    _engine: object = None
    _process: int = 0

    def note(self, t_s: float, server: Server) -> None:
        """Keep the books of a moment, in seconds from the start."""
        engine = server.engine
        if engine is not self._engine:
            self._engine, self._process = engine, self._process + 1
        histograms = [engine.counters.histograms[name] for name in KEPT]
        waiting = engine.scheduler.waiting
        self.kept.append(
            Kept(
                t_s,
                self._process,
                tuple(tuple(histogram.own) for histogram in histograms),
                tuple(histogram.sum for histogram in histograms),
                engine.counters.counts["num_preemptions_total"],
                engine.counters.counts["generation_tokens_total"],
                len(engine.scheduler.running),
                len(waiting),
                t_s - min(waiting[0].arrived_s, t_s) if waiting else 0.0,
                server.down,
            )
        )

    def served(self, from_s: float, to_s: float) -> Served | None:
        """What clients got from one moment to another, of the last process then; None where less
        than two scrapes show it."""
        last = self._at(to_s)
        kept = [k for k in self.kept if from_s <= k.t_s <= to_s and k.process == last.process]
        return _between(kept) if len(kept) > 1 else None

    def _at(self, t_s: float) -> Kept:
        return self.kept[bisect_left(self.kept, t_s, hi=len(self.kept) - 1, key=lambda k: k.t_s)]

    def p99_s(self, name: str, from_s: float, to_s: float) -> float | None:
        """The 99th percentile of TTFT or ITL between two moments; None where nothing was counted
        or the server was restarted."""
        first, last, at = self._at(from_s), self._at(to_s), KEPT.index(name)
        if first.process != last.process:
            return None
        own = [
            after - before
            for before, after in zip(first.buckets[at], last.buckets[at], strict=True)
        ]
        left = 0.99 * sum(own)
        if not left:
            return None
        edges: Sequence[float] = (0.0, *(TTFT_LE if name == TTFT else ITL_LE))
        for place, count in enumerate(own[: len(edges) - 1]):
            if count >= left:
                return edges[place] + (edges[place + 1] - edges[place]) * left / count
            left -= count
        return edges[-1]

    def of_target(
        self, name: str, target_s: float | None, from_s: float, to_s: float
    ) -> Harm | None:
        """The harm where this P99 is promised of TTFT or ITL, by the minute: clear where every
        minute misses it; None where nothing is promised."""
        if target_s is None:
            return None
        p99s_s = [self.p99_s(name, *minute_s) or 0.0 for minute_s in _minutes(from_s, to_s)]
        if min(p99s_s) >= 1.25 * target_s:
            return Harm.CLEAR
        return Harm.LITTLE if max(p99s_s) >= 0.8 * target_s else Harm.NONE

    def is_healthy(self, from_s: float, to_s: float) -> bool:
        """Whether nobody waited, was preempted or saw a stream pause between two moments."""
        parts = (self.served(*minute_s) for minute_s in _minutes(from_s, to_s))
        return all(
            part is None
            or (part.wait_s <= 1.0 and not part.preempted_per_s and part.paused_ratio < 0.01)
            for part in parts
        )


def _minutes(from_s: float, to_s: float) -> list[tuple[float, float]]:
    """The minutes between two moments, without a rest."""
    count = int((to_s - from_s) / MINUTE_S)
    return [(from_s + at * MINUTE_S, from_s + (at + 1) * MINUTE_S) for at in range(count)]


def _between(kept: Sequence[Kept]) -> Served:
    first, last = kept[0], kept[-1]
    over_s = last.t_s - first.t_s
    sums = dict(zip(KEPT, map(sub, last.sums, first.sums), strict=True))
    counts = {
        name: sum(after) - sum(before)
        for name, before, after in zip(KEPT, first.buckets, last.buckets, strict=True)
    }
    itl = list(map(sub, last.buckets[KEPT.index(ITL)], first.buckets[KEPT.index(ITL)]))
    edges = (0.0, *ITL_LE)
    paused_s = sum(c * edge for c, edge in zip(itl, edges, strict=True) if edge >= PAUSE_S)
    running = sum(k.running for k in kept) / len(kept)
    wait_s = max(k.wait_s for k in kept)
    busy = any(k.running or k.waiting for k in kept)
    ended = counts["e2e_request_latency_seconds"]
    return Served(
        max(sums[TTFT] / max(1.0, counts[TTFT]), last.wait_s),
        sums["request_decode_time_seconds"] / max(1.0, sums["request_generation_tokens"]),
        sums["e2e_request_latency_seconds"] / max(1.0, ended),
        ended,
        sums["request_generation_tokens"] / max(1.0, ended),
        paused_s / max(sums[ITL], 1e-9),
        (last.preempted - first.preempted) / over_s / max(1.0, running),
        wait_s,
        last.down or (busy and last.tokens == first.tokens),
    )


Bounds = tuple[tuple[float, float], tuple[float, float]]
"""From which value on, and from how many times that of otherwise, harm is little, and is clear."""

SLOW_START: Bounds = (0.3, 1.5), (1.0, 2.0)
SLOW_PACE: Bounds = (0.0, 1.2), (0.05, 1.5)
"""Twenty tokens a second are read by nobody: slower streams are seen."""

PAUSES: Bounds = (0.01, 1.5), (0.05, 2.0)
PREEMPTED: Bounds = (0.001, 1.5), (0.05, 2.0)
LONG_ANSWERS: Bounds = (1.0, 1.4), (1.0, 2.0)


def harm(
    served: Served | None, otherwise: Served | None, *, ttft: Harm | None, itl: Harm | None
) -> Harm:
    """How much worse clients are served than otherwise. `ttft` and `itl` are the harm against
    targets, None without one: where anything is promised that counts, not what was better."""
    if served is None or otherwise is None or served.stopped:
        return Harm.CLEAR
    most = Harm.CLEAR if ttft is None and itl is None else Harm.LITTLE
    if ttft is None:
        ttft = min(most, _compared(served.ttft_s, otherwise.ttft_s, SLOW_START))
    if itl is None:
        pace = min(most, _compared(served.pace_s, otherwise.pace_s, SLOW_PACE))
        itl = max(pace, _compared(served.paused_ratio, otherwise.paused_ratio, PAUSES))
    longer = Harm.NONE
    if min(served.ended, otherwise.ended) >= FEW_ENDED:
        longer = _compared(served.e2e_s, otherwise.e2e_s, LONG_ANSWERS)
        if served.output_tokens < LONGER_FROM * otherwise.output_tokens:
            longer = min(longer, Harm.LITTLE)
    preempted = _compared(served.preempted_per_s, otherwise.preempted_per_s, PREEMPTED)
    return max(ttft, itl, longer, preempted)


def _compared(value: float, otherwise: float, bounds: Bounds) -> Harm:
    little, clear = (value > least and value > ratio * otherwise for least, ratio in bounds)
    return Harm.CLEAR if clear else Harm.LITTLE if little else Harm.NONE
