"""Signals, and their evaluation on one window. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from kneewatch.collector.engines.engine_kind import other_quantities
from kneewatch.collector.scrape_history import Columns, History
from kneewatch.collector.signals.expr import Expr, Has, Value
from kneewatch.collector.window import Window

LOGGERS = "vllm/v1/metrics/loggers.py (0.32)"
"""vLLM's source file that defines most metrics."""


class Signal(Struct, frozen=True):
    """A named quantity. Its key ends with the unit; plain counts have none.

    The head of vllm.toml explains the fields.
    """

    key: str
    expr: Expr
    help: str
    source: str = LOGGERS
    needs: str = ""
    optional: bool = False
    core: bool = False
    shown: bool = False

    def lacks(self, has: Has) -> tuple[str, ...]:
        """Its metrics that a page lacks; empty if only engines other than vLLM have them."""
        lacking = tuple(dict.fromkeys(self.expr.lacking(has)))
        return () if other_quantities().issuperset(lacking) else lacking


def metrics_of(signals: Iterable[Signal]) -> frozenset[str]:
    """Canonical names of all metrics that the signals can use."""
    metrics: set[str] = set()

    def note(metric: str) -> bool:
        metrics.add(metric)
        return False

    for signal in signals:
        signal.expr.lacking(note)
    return frozenset(metrics)


class BoundSignals(Struct, frozen=True, eq=False, weakref=True):
    """Signals bound to columns.

    - `valued`: signals that can have a value, with the function that evaluates them.
    - `absent`: signals whose metrics no page had; without those that only other engines have.
    - `missing`: the metrics that each signal lacks on the newest page.
    """

    signals: tuple[Signal, ...]
    valued: tuple[tuple[str, Value], ...]
    absent: Mapping[str, None]
    missing: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, signals: tuple[Signal, ...], columns: Columns) -> BoundSignals:
        """The signals bound to the columns; shared by all engines with these columns."""
        bound: BoundSignals | None = columns.bound.get(id(signals))
        if bound is None or bound.signals is not signals:
            bound = columns.bound[id(signals)] = cls._bind(signals, columns)
        return bound

    @classmethod
    def _bind(cls, signals: tuple[Signal, ...], columns: Columns) -> BoundSignals:
        missing: dict[str, tuple[str, ...]] = {}
        valued: list[tuple[str, Value]] = []
        absent: dict[str, None] = {}
        for signal in signals:
            if lacking := signal.lacks(columns.shows):
                missing[signal.key] = lacking
            if not signal.expr.lacking(columns.has):
                valued.append((signal.key, signal.expr.bind(columns)))
            elif signal.lacks(columns.has):
                absent[signal.key] = None
        return cls(signals, tuple(valued), absent, missing)


class SignalSet:
    """The signals of one history."""

    def __init__(self, signals: Sequence[Signal], history: History) -> None:
        self._signals, self._history = tuple(signals), history
        self._columns = history.columns
        self._bound = BoundSignals.of(self._signals, self._columns)

    def read(self, window: Window) -> dict[str, float | None]:
        """Every signal's value on a window; None where its metrics give none.

        A signal whose metric has just vanished keeps a value while the window has enough samples.
        """
        if self._columns is not self._history.columns:
            self._columns = self._history.columns
            self._bound = BoundSignals.of(self._signals, self._columns)
        bound = self._bound
        values = {key: value(window) for key, value in bound.valued}
        values.update(bound.absent)
        return values

    @property
    def missing(self) -> Mapping[str, tuple[str, ...]]:
        """For each unknown signal, its metrics without a value on the page that was read last."""
        odd = self._history.impossible
        if not odd:
            return self._bound.missing

        def has(metric: str) -> bool:
            return metric not in odd and self._history.columns.shows(metric)

        lacking = ((signal.key, signal.lacks(has)) for signal in self._signals)
        return {key: metrics for key, metrics in lacking if metrics}
