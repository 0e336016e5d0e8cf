"""The newest state of every target, and how long a failing one waits for its next try.

Cycles write the states; API, notifier and reports read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from msgspec import Struct, field

from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.rules.rule import Severity


class SourceState(Struct, frozen=True):
    """The result of a source's last run.

    `joined` is how GPUs were matched to the target, and whether that is a guess; empty for the
    target's own page.
    """

    name: str
    t_s: float
    success: bool
    duration_s: float
    error: str = ""
    joined: str = ""


class TargetState(Struct, frozen=True):
    """One target after its newest cycle. `url` carries no credentials.

    `interval_s` is the current interval: longer than the setting during backoff.
    """

    name: str
    url: str
    labels: Mapping[str, str]
    t_s: float
    diagnoses: tuple[Diagnosis, ...]
    cycle_s: float
    interval_s: float
    cycles: int
    failures: int
    failing: int
    """Failed cycles in a row."""
    sources: tuple[SourceState, ...] = field(default=())

    @property
    def severity(self) -> Severity:
        """The worst severity of its engines."""
        return max((diagnosis.severity for diagnosis in self.diagnoses), default=Severity.OK)


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
        """A target's newest state; None if it is not watched or had no cycle yet."""
        return self._states.get(name)

    @property
    def answering(self) -> int:
        """Number of targets whose newest cycle succeeded."""
        with self._lock:
            return sum(not state.failing for state in self._states.values())

    def states(self) -> list[TargetState]:
        """The states of all targets, worst first, then by name."""
        with self._lock:
            states = list(self._states.values())
        return sorted(states, key=lambda state: (-state.severity, state.name))


# --- When a target that does not answer is tried again --------------------------------------------


FAILURES_BEFORE_BACKOFF = 3
"""Failures in a row before backoff starts: the first ones are retried at the usual interval."""

MAX_INTERVALS = 12
MAX_S = 60.0


def backoff_s(interval_s: float, *, failing: int, jitter: float) -> float:
    """Seconds until the next try after `failing` failures in a row: doubled each time.

    At most 12 intervals or a minute, whichever is less, and never less than the interval itself.
    `jitter`, from 0 to 1, subtracts up to a fifth, so that targets that failed together are not
    retried together.
    """
    if failing < FAILURES_BEFORE_BACKOFF:
        return interval_s
    most_s = max(min(MAX_INTERVALS * interval_s, MAX_S), interval_s)
    # 2 ** 6 exceeds the limit already; larger powers in a long outage would overflow.
    times = 2.0 ** min(failing - FAILURES_BEFORE_BACKOFF + 1, 6)
    delay_s = min(interval_s * times, most_s)
    return max(delay_s * (1 - 0.2 * jitter), interval_s)
