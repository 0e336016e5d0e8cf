"""Signals, and their evaluation on one window. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kneewatch.collector.scrape_history import History
from kneewatch.collector.signals.expr import Expr, Value
from kneewatch.collector.window import Window


@dataclass(frozen=True, slots=True)
class Signal:
    """A named quantity; its key ends with the unit (none for plain counts).

    `needs` says what makes an absent metric appear, for the "unknown" list. `optional` signals
    belong to features that a server need not use (speculation, LoRA): their absence is no gap.
    """

    key: str
    expr: Expr
    help: str
    source: str
    needs: str = ""
    optional: bool = False
    core: bool = False
    """Without its core signals no verdict about an engine can be trusted."""


@dataclass(frozen=True, slots=True)
class Reading:
    """All signals of one engine at one moment; None for a signal that has metrics but no value.

    `missing` maps each unknown signal to its metrics without a value on the newest page. A signal
    whose metric has just vanished keeps a value while the window holds enough of it. `impossible`
    are those of these metrics that are on the page with an impossible value.
    """

    values: Mapping[str, float | None]
    missing: Mapping[str, tuple[str, ...]]
    impossible: Mapping[str, float]


class SignalSet:
    """The signals of one history. What is missing is worked out once per page layout."""

    def __init__(self, signals: Sequence[Signal], history: History) -> None:
        self._signals, self._history = tuple(signals), history
        self._generation = -1
        self._known: tuple[tuple[str, Value], ...] = ()
        self._absent: dict[str, None] = {}
        self.missing: dict[str, tuple[str, ...]] = {}

    def read(self, window: Window) -> Reading:
        """Every signal's value on a window."""
        if self._generation != self._history.generation:
            self._bind()
        values = {key: value(window) for key, value in self._known}
        values.update(self._absent)
        odd = self._history.impossible
        return Reading(values, self._without(odd) if odd else self.missing, odd)

    def _without(self, odd: Mapping[str, float]) -> dict[str, tuple[str, ...]]:
        def has(metric: str) -> bool:
            return metric not in odd and self._history.shows(metric)

        lacking = ((signal.key, signal.expr.lacking(has)) for signal in self._signals)
        return {key: tuple(dict.fromkeys(metrics)) for key, metrics in lacking if metrics}

    def _bind(self) -> None:
        bound: list[Signal] = []
        self.missing, self._absent = {}, {}
        for signal in self._signals:
            lacking = tuple(dict.fromkeys(signal.expr.lacking(self._history.shows)))
            if lacking:
                self.missing[signal.key] = lacking
            if lacking and signal.expr.lacking(self._history.has):
                self._absent[signal.key] = None
            else:
                bound.append(signal)
        self._known = tuple((signal.key, signal.expr.bind(self._history)) for signal in bound)
        self._generation = self._history.generation
