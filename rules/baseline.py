"""Baselines: medians of quiet scrapes, and usual values at this hour of the week. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kneewatch.rules.facts import NO_TARGETS, Baselines, Targets
from kneewatch.rules.rule import FAMILIES, MORE_IS_BETTER, TRACKED, TRACKED_SIGNALS, TTFT

SAMPLES_MAX = 240
"""Most samples kept: with one per half window, two hours of quiet at the default window of 60 s."""

SAMPLES_MIN = 2
"""Fewest quiet samples for a baseline: one window's worth."""


class Samples:
    """The newest values of one signal, in order of time and also sorted for a fast median."""

    def __init__(self) -> None:
        self._newest, self._ordered = array("d"), array("d")

    def __len__(self) -> int:
        return len(self._newest)

    def add(self, value: float) -> None:
        """Add a value; drops the oldest one if there are too many."""
        if len(self._newest) == SAMPLES_MAX:
            del self._ordered[bisect_left(self._ordered, self._newest.pop(0))]
        self._newest.append(value)
        insort(self._ordered, value)

    def highest(self) -> float | None:
        """The highest value with a margin for a target; None without values."""
        return PROPOSED_RATIO * self._ordered[-1] if self._ordered else None

    def median(self) -> float:
        """The median; needs at least one value."""
        ordered, half = self._ordered, len(self._ordered) // 2
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


PROPOSED_AFTER_S, PROPOSED_RATIO = 4 * 3600.0, 1.25
"""After so much quiet time, latency targets are proposed: so many times the highest quiet P99."""


@dataclass(slots=True)
class Baseline(Baselines):
    """The baselines of one engine: medians of its quiet scrapes, and values that the user states.

    `stated` are values that the engine is known to reach, for signals where more is better.
    """

    spacing_s: float
    _samples: dict[str, Samples]
    _last_s: dict[str, float]
    _medians: dict[str, float]
    _stated: Mapping[str, float]
    season: Mapping[str, float]
    """Usual values at this hour of the week, by signal; empty if unknown."""
    _quiet_samples: int
    _proposed: Targets

    def __init__(self, *, window_s: float, stated: Mapping[str, float] | None = None) -> None:
        self.spacing_s = window_s / 2
        self._samples = {key: Samples() for key in TRACKED_SIGNALS}
        self._last_s = dict.fromkeys(TRACKED, float("-inf"))
        self._medians = {}
        self._stated = stated or {}
        self.season = {}
        self._quiet_samples, self._proposed = 0, NO_TARGETS

    def proposed(self) -> Targets:
        """Latency targets that this engine met in quiet times; none until it was quiet for long.

        They are held once they were proposed.
        """
        quiet_s = self._quiet_samples * self.spacing_s
        if not self._proposed.are_set and quiet_s >= PROPOSED_AFTER_S:
            highest = (self._samples[key].highest() for key in ("ttft_p99_s", "itl_p99_s"))
            self._proposed = Targets(*(value and float(f"{value:.2g}") for value in highest))
        return self._proposed

    def learn(
        self,
        now_s: float,
        values: Mapping[str, float | None],
        families: Collection[str] = FAMILIES,
    ) -> None:
        """Add a scrape during which nothing disturbs these families.

        Each family takes at most one sample per half window.
        """
        for family in families:
            if 0 <= now_s - self._last_s[family] < self.spacing_s:
                continue
            self._last_s[family] = now_s
            self._quiet_samples += family == TTFT
            for key in TRACKED[family]:
                value = values.get(key)
                if value is not None and value == value:
                    samples = self._samples[key]
                    samples.add(value)
                    if len(samples) >= SAMPLES_MIN:
                        self._medians[key] = samples.median()

    def accept(self, values: Mapping[str, float | None], families: Collection[str]) -> None:
        """Take present values as the usual ones of these families."""
        for key in [key for family in families for key in TRACKED[family]]:
            value = values.get(key)
            if value is not None and value == value:
                self.restore({key: value})

    def medians(self) -> Mapping[str, float]:
        """The medians of quiet times."""
        return dict(self._medians)

    def restore(self, medians: Mapping[str, float]) -> None:
        """Go on with medians that were learned earlier; a few quiet samples stand for them."""
        for key in medians.keys() & self._samples.keys():
            samples = self._samples[key] = Samples()
            for _ in range(SAMPLES_MIN):
                samples.add(medians[key])
            self._medians[key] = medians[key]

    def get(self, key: str) -> float | None:
        """A signal's baseline; None if there is none.

        It is the worse of the quiet median and the usual value at this hour of the week, but never
        worse than a stated value.
        """
        if key in self._stated:
            return max(self._stated[key], self._learned(key) or 0.0)
        return self._learned(key)

    def _learned(self, key: str) -> float | None:
        quiet, usual = self._medians.get(key), self.season.get(key) if self.season else None
        if quiet is None or usual is None:
            return usual if quiet is None else quiet
        return min(quiet, usual) if key in MORE_IS_BETTER else max(quiet, usual)

    def usual(self, key: str) -> float | None:
        """A signal's usual value at this hour of the week; None if unknown."""
        return self.season.get(key)
