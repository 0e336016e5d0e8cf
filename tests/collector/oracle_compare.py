"""kneewatch's values of signals beside Prometheus's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.collector.names.vllm_resolver import Binding, resolve
from kneewatch.collector.page import Layout
from kneewatch.collector.scrape_history import Frame, History, Restart
from kneewatch.collector.signals.promql import Dialect, promql
from kneewatch.collector.signals.signal import Signal, SignalSet
from kneewatch.collector.window import Window
from tests.collector.oracle import Prometheus, Target

RELATIVE = 1e-6
NOTHING = 1e-12
"""What is left of the difference of equals: 1 less a share of one, the slope of a level line."""

KEEP_S = 300.0
GROUP = 12


class Unbroken(History):
    """A history that sees in a restart what Prometheus sees: counters that were reset."""

    def _restart(self, frame: Frame, values: list[float]) -> Restart | None:
        del frame, values
        return None


class Feed:
    """Histories of a target's engines, filled scrape by scrape as a monitor does."""

    def __init__(
        self, target: Target, signals: Sequence[Signal], history: type[History] = Unbroken
    ) -> None:
        self.target = target
        self.histories: dict[EngineKey, History] = {}
        self.failed = False
        """The newest scrape gave nothing; then a monitor says nothing of any signal."""
        self._signals, self._history = signals, history
        self._sets: dict[EngineKey, SignalSet] = {}
        self._bound: tuple[Layout, Binding] | None = None
        self._taken = 0

    def until(self, t_ms: int) -> None:
        """Take the scrapes up to a time."""
        scrapes = self.target.scrapes
        while self._taken < len(scrapes) and scrapes[self._taken][0] <= t_ms:
            then_ms, page = scrapes[self._taken]
            self._taken += 1
            self.failed = page is None
            if page is None:
                continue
            if self._bound is None or self._bound[0] is not page.layout:
                self._bound = (page.layout, resolve(page.layout))
            binding = self._bound[1]
            for engine in binding.engines:
                if engine.key not in self.histories:
                    history = self._history(keep_s=KEEP_S)
                    self.histories[engine.key] = history
                    self._sets[engine.key] = SignalSet(self._signals, history)
                self.histories[engine.key].append(
                    then_ms / 1000, page, engine, binding.process_start
                )

    def values(self, key: EngineKey, t_ms: int, range_ms: int) -> Mapping[str, float | None]:
        """Every signal of an engine."""
        window = Window(self.histories[key], now_s=t_ms / 1000, range_s=range_ms / 1000)
        return self._sets[key].read(window)


class Comparison(Struct):
    """How often each signal had a value on both sides, and where the two sides disagreed."""

    prometheus: Prometheus
    signals: Sequence[Signal]
    compared: int = 0
    valued: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])

    def at(self, feeds: Sequence[Feed], t_ms: int, dialect: Dialect) -> None:
        """Compare all signals of targets that have been fed up to a time."""
        asked = {
            signal.key: query
            for signal in self.signals
            if (query := promql(signal.expr, dialect)) is not None
        }
        answers = self._ask(asked, t_ms)
        range_ms = round(dialect.range_s * 1000)
        for feed in feeds:
            for key in () if feed.failed else feed.histories:
                ours = feed.values(key, t_ms, range_ms)
                for name in asked:
                    whole = answers.get((feed.target.instance, "", name))
                    theirs = answers.get((feed.target.instance, key.engine, name), whole)
                    where = f"{feed.target.instance}/{key.engine} at {t_ms} over {range_ms} ms"
                    self._add(name, ours.get(name), theirs, where)

    def _add(self, key: str, ours: float | None, theirs: float | None, where: str) -> None:
        self.compared += 1
        if ours is None or theirs is None:
            agree = ours is theirs
        else:
            self.valued[key] += 1
            agree = math.isclose(ours, theirs, rel_tol=RELATIVE, abs_tol=NOTHING)
        if not agree:
            self.wrong.append(f"{key} {where}: {ours!r}, Prometheus says {theirs!r}")

    def _ask(self, asked: Mapping[str, str], t_ms: int) -> dict[tuple[str, str, str], float]:
        """Values by instance, engine and signal; engine is empty for what all engines share."""
        parts = [f'label_replace({q}, "signal", "{key}", "", "")' for key, q in asked.items()]
        # All signals in one query. Each `or` looks at all that stands before it: keep it short.
        groups = [" or ".join(parts[at : at + GROUP]) for at in range(0, len(parts), GROUP)]
        query = " or ".join(f"({group})" for group in groups)
        value_of_sample: dict[tuple[str, str, str], float] = {}
        for answer in self.prometheus.ask(query, t_ms):
            labels = answer.labels
            engine = labels.get("engine", "").strip("[]")  # 0.8 shows the list of engines: [0]
            place = (labels["instance"], engine, labels["signal"])
            assert place not in value_of_sample, f"two samples for {place}"
            value_of_sample[place] = answer.value
        return value_of_sample

    def check(self) -> None:
        """Fail where the two sides disagreed."""
        shown = "\n".join(self.wrong[:20])
        assert not self.wrong, f"{len(self.wrong)} of {self.compared} disagree:\n{shown}"
