"""What became of a recommendation: followed or not, and whether it did what it promised. Pure.

A change counts as made when the process was replaced and its page shows the new value. Then the
predicted signals are compared with measured ones, over scrapes that carry at least the load that
the recommendation was computed for: a quiet night proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.recommend.shown import shown
from kneewatch.rules.model import WINDOW_S

LAPSES_S = 7 * 24 * 3600.0
"""One that nobody followed for so long is not waited for any more."""

SETTLE_WINDOWS = 2.0
"""Windows after a restart that are not measured: caches are cold and clients reconnect."""

MEASURED_WINDOWS = 5.0
"""Windows at load that a verdict rests on: the `verify` lines say five minutes."""

SAME_LOAD_RATIO = 0.8
"""A load from this share of the former one on is a fair test."""

TOLERANCE = 1.25
"""A prediction is met up to a quarter beyond it, and harm is worse from a quarter on."""

LARGE_ENOUGH_RATIO = 0.95
"""A capacity from this share of the predicted one on is as predicted."""

MEASURED: Mapping[str, tuple[str, float]] = {
    "preemption_per_s": ("preemption_per_s", 0.05),
    "kv_usage_ratio": ("kv_usage_avg_ratio", 0.1),
    "waiting": ("waiting_avg", 1.0),
    "queue_wait_s": ("queue_mean_s", 0.1),
    "ttft_s": ("ttft_mean_s", 0.05),
    "itl_s": ("itl_mean_s", 0.005),
    "itl_stall_per_s": ("itl_stall_per_s", 0.05),
    "itl_stall_time_ratio": ("itl_stall_time_ratio", 0.02),
    "waiting_deferred": ("waiting_deferred", 1.0),
}
"""Predicted key -> the signal that measures it, less being better, and a difference that is
none."""

HARM = ("preemption_per_s", "waiting", "ttft_s", "itl_s")
"""What must not get worse, whatever was promised."""

CAPACITY = "kv_capacity_tokens"


@dataclass(frozen=True, slots=True)
class Fate:
    """A recommendation over time.

    `verdict`: open | applied | kept | missed | worsened | lapsed. `before` and `measured` hold
    numbers by predicted key, as measured then and after the change. `certain` is False where the
    page cannot show the change and the restart alone speaks for it. `text` says it in words.
    """

    made: Recommendation
    first_s: float
    last_s: float
    load: float
    before: Mapping[str, float]
    verdict: str = "open"
    applied_s: float | None = None
    judged_s: float | None = None
    certain: bool = True
    measured: Mapping[str, float] = field(default_factory=dict[str, float])
    text: str = ""

    @property
    def settled(self) -> bool:
        """Whether nothing more will come of it."""
        return self.verdict not in ("open", "applied")


@dataclass(slots=True)
class _Mean:
    """Signals summed over scrapes at load."""

    seconds: float = 0.0
    last_s: float | None = None
    sums: dict[str, float] = field(default_factory=dict[str, float])
    counts: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, now_s: float, values: Mapping[str, float], *, at_most_s: float) -> None:
        if self.last_s is not None:
            self.seconds += min(now_s - self.last_s, at_most_s)
        self.last_s = now_s
        for key, value in values.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
            self.counts[key] = self.counts.get(key, 0) + 1

    def means(self) -> dict[str, float]:
        return {key: total / self.counts[key] for key, total in self.sums.items()}


class FateBook:
    """The recommendations of one engine and what became of them. `window_s` is the short window.

    `fates` may be those of an earlier run of the program: they go on.
    """

    def __init__(self, *, window_s: float = WINDOW_S, fates: Sequence[Fate] = ()) -> None:
        self._window_s = window_s
        self._fates = {(fate.made.cause, fate.made.id): fate for fate in fates}
        self._means: dict[tuple[str, str], _Mean] = {}
        self._config: Mapping[str, str] = {}

    def take(
        self,
        now_s: float,
        *,
        recommendations: Sequence[Recommendation],
        values: Mapping[str, float | None],
        config: Mapping[str, str],
        causes: Sequence[str],
        restarted: bool,
    ) -> list[Fate]:
        """One scrape that could be read. Returns the fates that this changed.

        `causes` are the ids concluded now, `restarted`: this scrape shows a new process.
        """
        changed: dict[tuple[str, str], Fate] = {}
        if config and (restarted or (self._config and dict(self._config) != dict(config))):
            changed |= self._applied(now_s, config)
        if config:
            self._config = config
        changed |= self._told(now_s, recommendations, values)
        changed |= self._judged(now_s, values, causes)
        for key, fate in self._fates.items():
            if fate.verdict == "open" and now_s - fate.last_s > LAPSES_S:
                changed[key] = replace(fate, verdict="lapsed", judged_s=now_s)
        self._fates |= changed
        return list(changed.values())

    def _told(
        self,
        now_s: float,
        recommendations: Sequence[Recommendation],
        values: Mapping[str, float | None],
    ) -> dict[tuple[str, str], Fate]:
        told: dict[tuple[str, str], Fate] = {}
        for made in recommendations:
            key = (made.cause, made.id)
            known = self._fates.get(key)
            if known is None or known.settled:
                told[key] = Fate(made, now_s, now_s, _load(values), _measured(values))
            elif known.verdict == "open" and known.made is not made:
                told[key] = replace(
                    known, made=made, last_s=now_s, load=_load(values), before=_measured(values)
                )
            elif known.verdict == "open":
                self._fates[key] = replace(known, last_s=now_s)
        return told

    def _applied(self, now_s: float, config: Mapping[str, str]) -> dict[tuple[str, str], Fate]:
        """Fates of the changes that a new configuration shows; where it shows none of them, of
        the first one of each cause that it cannot show."""
        seen: dict[tuple[str, str], Fate] = {}
        guessed: dict[str, tuple[str, str]] = {}
        for key, fate in self._fates.items():
            if fate.verdict != "open":
                continue
            says = [shown(change, config) for change in fate.made.changes]
            flags = all(change.flag.startswith("--") for change in fate.made.changes)
            if says and flags and False not in says:
                if None not in says or True in says:
                    seen[key] = _begun(fate, now_s, certain=None not in says)
                elif now_s - fate.last_s <= 60 * self._window_s:
                    guessed.setdefault(fate.made.cause, key)
        if not seen:
            seen = {key: _begun(self._fates[key], now_s, certain=False) for key in guessed.values()}
        for key in seen:
            self._means[key] = _Mean()
        return seen

    def _judged(
        self, now_s: float, values: Mapping[str, float | None], causes: Sequence[str]
    ) -> dict[tuple[str, str], Fate]:
        done: dict[tuple[str, str], Fate] = {}
        for key, fate in self._fates.items():
            if fate.verdict != "applied" or fate.applied_s is None:
                continue
            mean = self._means.setdefault(key, _Mean())
            if now_s - fate.applied_s < SETTLE_WINDOWS * self._window_s:
                continue
            if _load(values) < SAME_LOAD_RATIO * fate.load:
                mean.last_s = None
                continue
            mean.add(now_s, _measured(values), at_most_s=self._window_s)
            if mean.seconds >= MEASURED_WINDOWS * self._window_s:
                done[key] = _verdict(fate, now_s, mean.means(), causes)
        return done


def _begun(fate: Fate, now_s: float, *, certain: bool) -> Fate:
    how = "the page shows it" if certain else "the process was replaced; the page cannot show it"
    return replace(fate, verdict="applied", applied_s=now_s, certain=certain, text=how)


def _load(values: Mapping[str, float | None]) -> float:
    """Requests a second that are asked for."""
    return values.get("arrival_per_s") or 0.0


def _measured(values: Mapping[str, float | None]) -> dict[str, float]:
    found = {key: values.get(signal) for key, (signal, _) in MEASURED.items()}
    found[CAPACITY] = values.get(CAPACITY)
    return {key: value for key, value in found.items() if value is not None and isfinite(value)}


def _verdict(
    fate: Fate, now_s: float, measured: Mapping[str, float], causes: Sequence[str]
) -> Fate:
    """The fate with its verdict: worse than before, short of what was promised, or as promised."""
    promised = fate.made.predicted
    worse = [
        key
        for key in HARM
        if key in measured
        and key in fate.before
        and not _met(key, measured[key], max(fate.before[key], promised.get(key, 0.0)))
    ]
    short = [
        key
        for key in MEASURED
        if key in measured and key in promised and not _met(key, measured[key], promised[key])
    ]
    smaller = measured.get(CAPACITY, 0.0) < LARGE_ENOUGH_RATIO * promised.get(CAPACITY, 0.0)
    if CAPACITY in measured and CAPACITY in promised and smaller:
        short.append(CAPACITY)
    verdict = "worsened" if worse else "kept"
    if not worse and (short or fate.made.cause in causes):
        verdict = "missed"
    said = [
        f"{key} {fate.before.get(key, float('nan')):.3g} -> {measured[key]:.3g}"
        + (f", promised {promised[key]:.3g}" if key in promised else "")
        for key in (worse or short)
    ]
    if verdict == "missed" and not short:
        said = [f"{fate.made.cause} goes on"]
    return replace(
        fate,
        verdict=verdict,
        judged_s=now_s,
        measured=dict(measured),
        text="; ".join(said) or "as promised",
    )


def _met(key: str, value: float, bound: float) -> bool:
    """Whether a number, less being better, is no more than a bound with its tolerance."""
    return value <= TOLERANCE * bound + MEASURED[key][1]
