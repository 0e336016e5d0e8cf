"""Histories filled from pages, or from columns written by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from kneewatch.collector.exposition import PageParser
from kneewatch.collector.names.vllm_metrics import EngineKey, HistogramSlots
from kneewatch.collector.names.vllm_resolver import EngineBinding, ValueSlot, resolve
from kneewatch.collector.page import Layout, Page
from kneewatch.collector.scrape_history import History, Restart
from tests.collector.name_pages import only_engine

KEY = EngineKey("tiny", "0")
ALWAYS_S = 1e9


class Scraped:
    """The history of the only engine of pages taken one after the other."""

    def __init__(self, *, keep_s: float = ALWAYS_S) -> None:
        self.history = History(keep_s=keep_s)
        self._parser = PageParser()

    def take(self, t_s: float, body: str) -> Restart | None:
        """Take one page."""
        page = self._parser.parse(body)
        binding = resolve(page.layout)
        return self.history.append(t_s, page, only_engine(binding), binding.process_start)


class Handmade(Struct):
    """A history of counters, gauges and one histogram, all by name, without text around them.

    A name that a scrape leaves out is not on that scrape's page.
    """

    bounds: tuple[float, ...] = ()
    history: History = field(default_factory=lambda: History(keep_s=ALWAYS_S))
    _bindings: dict[tuple[str, ...], EngineBinding] = field(
        default_factory=dict[tuple[str, ...], EngineBinding]
    )

    def take(
        self,
        t_s: float,
        counters: Mapping[str, float] | None = None,
        gauges: Mapping[str, float] | None = None,
        buckets: Sequence[float] | None = None,
        *,
        start_s: float | None = None,
    ) -> Restart | None:
        """Take one scrape; `start_s` is the process's start time where it tells one."""
        counters, gauges = counters or {}, gauges or {}
        names = ("histogram" if buckets else "", *counters, "|", *gauges)
        binding = self._bindings.get(names)
        if binding is None:
            binding = self._bindings[names] = self._bind(counters, gauges, bool(buckets))
        values = [*counters.values(), *gauges.values(), *(buckets or ())]
        page = Page(Layout((), {}), [*values, math.nan if start_s is None else start_s])
        return self.history.append(t_s, page, binding, None if start_s is None else len(values))

    def _bind(
        self, counters: Mapping[str, float], gauges: Mapping[str, float], buckets: bool
    ) -> EngineBinding:
        first = len(counters) + len(gauges)
        at = tuple(range(first, first + len(self.bounds)))
        slots = HistogramSlots(self.bounds, at, None, at[-1] if at else None)
        return EngineBinding(
            key=KEY,
            counters={name: (ValueSlot(place),) for place, name in enumerate(counters)},
            gauges={name: (ValueSlot(place),) for place, name in enumerate(gauges, len(counters))},
            histograms={"histogram": (slots,)} if buckets else {},
            infos={},
            created=(),
            shared=frozenset(),
        )
