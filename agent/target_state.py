"""The newest state of every target, and the backoff for targets that fail. Pure, thread-safe.

Cycles write the states; the API, the notifier and reports read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.health import SourceState
from kneewatch.rules.rule import Severity
from kneewatch.rules.wire import to_ms


class TargetState(Struct, frozen=True):
    """The state of one target after its newest cycle. `url` contains no credentials.

    `interval_s` is the current scrape interval; during backoff it is longer than the setting.
    """

    name: str
    url: str
    labels: Mapping[str, str]
    t_s: float
    diagnoses: tuple[Verdict, ...]
    cycle_s: float
    interval_s: float
    cycles: int = 0
    failures: int = 0
    failing: int = 0
    """Number of failed cycles in a row."""
    sources: tuple[SourceState, ...] = field(default=())

    @property
    def severity(self) -> Severity:
        """The worst severity of the target's engines."""
        return max((diagnosis.severity for diagnosis in self.diagnoses), default=Severity.OK)


def watching(state: TargetState, *, late: bool) -> dict[str, Any]:
    """The scrape state of a target, as documents contain it."""
    return {
        "target": state.name,
        "url": state.url,
        "labels": state.labels,
        "t": to_ms(state.t_s),
        "late": late,
        "interval_s": state.interval_s,
        "cycle_s": round(state.cycle_s, 6),
        "cycles": state.cycles,
        "failures": state.failures,
        "failing": state.failing,
        "sources": [
            replace(source, t_s=to_ms(source.t_s), duration_s=round(source.duration_s, 6))
            for source in state.sources
        ],
    }


class Board:
    """The newest state of each target, by name. Thread-safe: states are immutable."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._states: dict[str, TargetState] = {}

    def put(self, state: TargetState) -> None:
        """Store a target's newest state."""
        with self._lock:
            self._states[state.name] = state

    def drop(self, name: str) -> None:
        """Remove a target that is no longer watched."""
        with self._lock:
            self._states.pop(name, None)

    def get(self, name: str) -> TargetState | None:
        """The newest state of a target. None if the target is not watched, or had no cycle yet."""
        return self._states.get(name)

    def beside(self) -> list[tuple[Mapping[str, str], Verdict]]:
        """The labels, with the address as `instance`, and the verdict of each engine whose page was
        read in the newest cycle."""
        with self._lock:
            states = [state for state in self._states.values() if not state.failing]
        return [
            ({**state.labels, "instance": state.url.partition("://")[2].partition("/")[0]}, verdict)
            for state in states
            for verdict in state.diagnoses
        ]

    @property
    def answering(self) -> int:
        """Number of targets whose newest cycle succeeded."""
        with self._lock:
            return sum(not state.failing for state in self._states.values())

    def states(self) -> list[TargetState]:
        """The states of all targets, sorted by severity (worst first), then by name."""
        with self._lock:
            states = list(self._states.values())
        return sorted(states, key=lambda state: (-state.severity, state.name))


# --- When a target that does not answer is tried again --------------------------------------------


FAILURES_BEFORE_BACKOFF = 3
"""Number of failures in a row at which backoff starts. Before that, scrapes are retried at the
usual interval."""

MAX_INTERVALS = 12
MAX_S = 60.0


def backoff_s(interval_s: float, *, failing: int, jitter: float) -> float:
    """Seconds until the next scrape, after `failing` failures in a row. The backoff doubles with
    each failure.

    It is at most 12 intervals and at most a minute, but never shorter than the interval. `jitter`
    (0 to 1) subtracts up to a fifth, so that targets that failed together are not retried together.
    """
    if failing < FAILURES_BEFORE_BACKOFF:
        return interval_s
    most_s = max(min(MAX_INTERVALS * interval_s, MAX_S), interval_s)
    # 2 ** 6 exceeds the limit already; larger powers in a long outage would overflow.
    times = 2.0 ** min(failing - FAILURES_BEFORE_BACKOFF + 1, 6)
    delay_s = min(interval_s * times, most_s)
    return max(delay_s * (1 - 0.2 * jitter), interval_s)
