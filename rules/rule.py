"""Severities, rules (signal, bounds, durations, advice, guide section) and findings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from kneewatch.rules.wire import Figure, UnixTime, written

MINUTE_S, HOUR_S = 60.0, 3600.0
DAY_S = 24 * HOUR_S
WEEK_S = 7 * DAY_S

WINDOW_S = 60.0
"""The short window that durations are stated for; a profile with another window scales them."""

LONG_WINDOWS = 5.0
"""History kept, in short windows: the guide's second window is 5 minutes."""

SCRAPES_IN_WINDOW = 2.2
"""The window is at least this many scrape intervals long: a rate needs two scrapes in the window,
and scrapes are slightly late."""

QUEUE_RULES = ("QUEUE-GROWS", "QUEUE-SHARE", "TTFT-TAIL", "BREAKER")
"""Ids of the rules whose findings only report that there is a queue."""


Word = Literal["ok", "info", "warning", "critical"]
State = Literal["ok", "info", "warning", "critical", "unknown"]


class Severity(Enum):
    """How bad a state is; `ok` where nothing is wrong. Severities are ordered, and only `ok` is
    false; `int`, `float` and `-` take a severity's rank, from 0 for `ok` to 3 for `critical`."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    def __init__(self, word: Word) -> None:
        self.word: Word = word
        """The severity in lower case, as in the JSON."""
        self.rank = len(type(self).__members__)

    def __bool__(self) -> bool:
        return self.rank > 0

    def __lt__(self, other: Severity) -> bool:
        return self.rank < other.rank

    def __le__(self, other: Severity) -> bool:
        return self.rank <= other.rank

    def __gt__(self, other: Severity) -> bool:
        return self.rank > other.rank

    def __ge__(self, other: Severity) -> bool:
        return self.rank >= other.rank

    def __int__(self) -> int:
        return self.rank

    def __float__(self) -> float:
        return float(self.rank)

    def __neg__(self) -> int:
        return -self.rank


SEVERITIES: tuple[Severity, ...] = tuple(Severity)
OK, INFO, WARNING, CRITICAL = SEVERITIES
"""The members by name: in Python 3.11, `Severity.OK` takes ten times as long as `OK`."""

WORDS = {severity: severity.word for severity in SEVERITIES}
BY_WORD: Mapping[str, Severity] = {severity.word: severity for severity in SEVERITIES}


TTFT, ITL, PREFIX, LENGTHS, LOAD, TRANSFER = "ttft", "itl", "prefix", "lengths", "load", "transfer"
OUTPUT = "output_tokens_mean", "output_tokens_p50"

TRACKED: Mapping[str, tuple[str, ...]] = {
    TTFT: ("ttft_p50_s", "ttft_p99_s", "ttft_mean_s", "ttft_p99_p50_ratio"),
    ITL: ("itl_p50_s", "itl_p99_s", "itl_mean_s", "itl_stall_time_ratio"),
    PREFIX: ("prefix_hit_ratio", "prefix_hit_tokens_mean", "prefix_query_per_s"),
    LENGTHS: ("finished_length_ratio", *OUTPUT, "spec_accepted_per_draft_tokens"),
    LOAD: ("running_avg", "kv_usage_avg_ratio"),
    TRANSFER: ("kv_transfer_mean_s",),
}
"""Signals with a baseline, by family.

Rules and causes name the families that they disturb in `moves`: a queue disturbs TTFT, but not the
hit ratio of the prefix cache. So a server with a small, constant problem still gets baselines for
its other families.
"""

FAMILIES = tuple(TRACKED)

TRACKED_SIGNALS = tuple(key for keys in TRACKED.values() for key in keys)

STAGE_MOVES = (TTFT, ITL, PREFIX, LOAD)
"""The families that stages 2 and above of the cascade disturb: preempted requests lose their
blocks."""

SLOW_MOVES = (TTFT, ITL, LOAD)
"""The families that slow steps disturb, whatever else is concluded."""

QUIET_WAITING, QUEUE_MOVES = 1.0, (TTFT, ITL, LOAD)
"""From this mean of queued requests on, a scrape is not quiet for these families."""

QUEUED_SHARE, QUEUED_MIN = 0.1, 2.0
"""From this share of the running requests on, and from this many, requests queue."""

MORE_IS_BETTER = frozenset({
    "engine_speed_ratio", "gpu_sm_clock_ratio", "kv_capacity_tokens", "kv_residency_s", "lora_max",
    "prefill_speed_ratio", "prefix_hit_ratio", "prefix_hit_tokens_mean", "spec_acceptance_ratio",
    "spec_accepted_per_draft_tokens", "stream_moved_ratio",
})  # fmt: skip
"""Signals whose low values are the trouble; of the others, the high ones are."""


def is_queued(waiting: float | None, running: float) -> bool:
    """Whether requests queue: throughput then shows an engine's capacity, not its load."""
    return waiting is not None and waiting >= max(QUEUED_MIN, QUEUED_SHARE * running)


class Bound(Struct, frozen=True, forbid_unknown_fields=True):
    """From this value upwards (downwards with Rule.below) the state is `severity`.

    `source` says who set the bound.
    """

    severity: Severity
    threshold: float
    source: str


class Guard(Struct, frozen=True, forbid_unknown_fields=True):
    """A rule is judged only while this signal is at least the value; with `below`, at most.
    `words` say what is the case while it fails.

    If the signal is unknown, the rule is not judged (without traffic there is nothing to judge),
    unless `unknown` is true.
    With `ends`, the state ends as soon as the guard fails; the guard's signal then has its own
    hysteresis.
    """

    signal: str
    value: float
    words: str
    below: bool = False
    ends: bool = False
    unknown: bool = False

    def holds(self, values: Mapping[str, float | None]) -> bool:
        """Whether the rule may be judged."""
        value = values.get(self.signal)
        if value is None:
            return self.unknown
        return value <= self.value if self.below else value >= self.value


class Rule(Struct, frozen=True, forbid_unknown_fields=True):
    """Defines when a signal's value is bad.

    A state begins after its bound has been crossed for `for_s`. It ends after the value has been
    inside the bound for `clear_s`, by a margin of `clear_ratio` of the bound. Both times are scaled
    with the short window. While the rule is at warning or worse, the signals of the families
    `moves` are not normal. `stated`: its bounds are the user's. `setting` gives
    the threshold, times `times` plus `plus`. `fine`: the state inside the bounds in words.
    `limit`: the signal with the limit that the advice asks for.
    """

    id: str
    signal: str
    bounds: tuple[Bound, ...]
    summary: str
    advice: str
    guide: tuple[str, ...]
    below: bool = False
    for_s: float = 0.0
    clear_s: float = 30.0
    clear_ratio: float = 0.1
    guards: tuple[Guard, ...] = ()
    moves: tuple[str, ...] = ()
    stated: bool = False
    setting: str = ""
    times: float = 1.0
    plus: float = 0.0
    fine: str = ""
    limit: str = ""

    def level(self, value: float, *, relax: float = 0.0) -> Severity:
        """The worst severity whose bound the value crosses.

        `relax` is the share by which the bounds are moved back first.
        """
        worst = OK
        if value <= 0 and not self.below:
            return worst
        for bound in self.bounds:
            margin = abs(bound.threshold) * relax
            crossed = (
                value < bound.threshold + margin if self.below else value > bound.threshold - margin
            )
            if crossed:
                worst = max(worst, bound.severity)
        return worst

    def threshold(self, severity: Severity) -> float | None:
        """The threshold for a severity; None if the rule has no bounds.

        If no bound has this severity, the first bound's threshold.
        """
        for bound in self.bounds:
            if bound.severity == severity:
                return bound.threshold
        return self.bounds[0].threshold if self.bounds else None


# --- What a rule finds ----------------------------------------------------------------------------


UNKNOWN: Literal["unknown"] = "unknown"


IN_BOUNDS: tuple[State, ...] = ("ok", UNKNOWN)
STATES: Mapping[str, Severity] = {**BY_WORD, UNKNOWN: OK}
"""The severity of each state."""


class Finding(Struct, frozen=True, omit_defaults=True):
    """A rule's current state. `library.rule_of` returns the rule.

    - `rule`: the rule's id.
    - `state`: the state after the rule's durations. It is info during the rule's clear time.
    - `signal`: the key of the signal that is judged.
    - `value`: the signal's value, in the unit that ends its key.
    - `missing`: the metrics or signals that an unknown finding lacks, by their newest names.
    - `since_s`: when the state began; only if it is info or worse.
    - `note`: another reason why the rule is not judged, or why a value out of bounds is not
      reported.
    - `clearing_since_s`: since when the value is inside every bound, or is not judged; only during
      the clear time.
    - `was`: the last value out of bounds; only during the clear time.
    - `was_severity`: the severity before the clear time; an alert with the same clear time still
      fires with it.
    - `bounds`: the rule's thresholds by severity, if they are not those of the rule library.
    """

    rule: Annotated[str, Meta(extra_json_schema={"pattern": "^[A-Z][A-Z0-9]*(-[A-Z0-9]+)*$"})]
    state: State
    signal: str = written("")
    value: Figure | None = written(None)
    missing: tuple[str, ...] = written(())
    since_s: UnixTime | None = field(default=None, name="since")
    note: str = ""
    clearing_since_s: UnixTime | None = None
    was: Figure | None = None
    was_severity: Severity | None = field(default=None, name="held")
    bounds: Mapping[str, Figure | None] | None = None

    @property
    def severity(self) -> Severity:
        """The severity of the state; ok if it is unknown."""
        return STATES[self.state]

    @property
    def held(self) -> Severity:
        """The severity; during the clear time, the severity before it.

        An alert with the same hysteresis would show this severity.
        """
        return self.severity if self.was_severity is None else self.was_severity
