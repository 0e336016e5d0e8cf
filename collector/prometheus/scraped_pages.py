"""Rebuilds the scraped pages of targets from the samples that a metrics system stores. Pure.

A metrics system stores each sample with the time of its scrape, so all samples of a target with one
time are the page that was scraped then.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from weakref import WeakValueDictionary

import msgspec
from msgspec import Struct

from kneewatch.collector.engines.engine_kind import VLLM, EngineKind, engine_kinds, kind_of
from kneewatch.collector.engines.translation import sample_names
from kneewatch.collector.names.vllm_metrics import OF_THE_PAGE, metric_table
from kneewatch.collector.packaged import decoder
from kneewatch.collector.page import Layout, Page, Series
from kneewatch.collector.prometheus.responses import RawSeries

TARGET_LABELS = ("cluster", "namespace", "job", "pod", "instance")
"""Labels that identify a scraped target. All series of its page have the same values for them."""

UP, PROCESS_START = "up", "process_start_time_seconds"
OF_ENGINES = frozenset({"model_name", "engine", "dp_rank", "le"})
"""Labels that an engine's page has itself, also where all of its series have the same value."""

LAYOUTS_KEPT = 4
"""Layouts remembered per target: a page may gain a series and lose it again."""

Target = tuple[str, ...]
"""The values of TARGET_LABELS; empty for labels that the target lacks."""


def target_of(labels: Mapping[str, str]) -> Target:
    """The target whose page a series is on."""
    return tuple(labels.get(name, "") for name in TARGET_LABELS)


IsRead = Callable[[str, str], bool]
"""Whether a part of a metric is read, by canonical name and part."""


@cache
def page_names(is_read: IsRead, prefixes: tuple[str, ...]) -> str:
    """A regular expression for the names of the series that are read, under each of the prefixes,
    in every version of vLLM; also for the start of the process and the result of the scrape."""
    own: list[str] = []
    shared = [UP, PROCESS_START]
    for name, sample in metric_table().samples.items():
        if is_read(sample.metric.name, sample.part):
            (shared if name.startswith(OF_THE_PAGE) else own).append(re.escape(name))
    begins: dict[EngineKind, list[str]] = {}
    for prefix in prefixes:
        begins.setdefault(kind_of(prefix), []).append(re.escape(prefix))
    by_kind = {kind: own if kind is VLLM else _own_names(kind, is_read) for kind in begins}
    names = [f"({'|'.join(begins[kind])})({'|'.join(by_kind[kind])})" for kind in begins]
    marks = [kind.beside + sign for kind in engine_kinds() if kind.beside for sign in kind.signs]
    return "|".join([*names, *shared, *marks])


def _own_names(kind: EngineKind, is_read: IsRead) -> list[str]:
    """The sample names, without prefix, of the sources that are read."""
    sources = [source for source in kind.all_sources if is_read(source.metric, "value")]
    named = [(name, s, part) for s in sources for name, part in sample_names(s, kind)]
    names = {name for name, source, part in named if is_read(source.metric, part)}
    return sorted(map(re.escape, {*names, *(source.over for source in sources)} - {""}))


_layouts: WeakValueDictionary[tuple[Series, ...], Layout] = WeakValueDictionary()
"""Layouts in use. Replicas with equal pages share one, and with it everything bound to it."""


class _TargetPages:
    """The series of one target, and its samples that were not rebuilt to pages yet."""

    def __init__(self) -> None:
        self.series: list[Series] = []
        self.scrapes: defaultdict[float, dict[int, float]] = defaultdict(dict)
        self.whole: dict[float, Page] = {}
        """Pages whose series and layout are those of `newest`."""
        self.failures_s: set[float] = set()
        self.last_s = float("-inf")
        self.interval_s = float("inf")
        """Seconds between the last two scrapes."""
        self.order: tuple[int, _Order | None] = 0, None
        """The hash of the labels of the last answer that began with this target's series, and the
        order of its series once it is known."""
        self._scraped: frozenset[tuple[str, str]] = frozenset()
        self._layouts: dict[tuple[int, ...], tuple[tuple[int, ...], Layout]] = {}
        self.newest: tuple[tuple[int, ...], Layout] | None = None
        """The numbers of the newest page's series in the order of its layout, and the layout."""
        self._held_back_s = float("-inf")

    def pages(self) -> Iterator[tuple[float, Page | None]]:
        """Yields the scrapes since the last call, oldest first; None for a failed scrape.

        Some systems show the samples of a scrape one after the other. So the newest page waits for
        the next call, once, if it has fewer series than the page before it.
        """
        scrapes, self.scrapes = self.scrapes, defaultdict(dict)
        whole, self.whole = self.whole, {}
        failures_s, self.failures_s = self.failures_s, set()
        times = sorted(scrapes.keys() | failures_s | whole.keys())
        for t_s in times:
            samples = scrapes.get(t_s)
            if samples is None:
                self._read_until(t_s)
                yield t_s, whole.get(t_s)
                continue
            complete = self.newest is None or len(samples) >= len(self.newest[0])
            if not complete and t_s == times[-1] and t_s != self._held_back_s:
                self._held_back_s = t_s
                return
            self._read_until(t_s)
            yield t_s, self._page(samples)

    def _read_until(self, t_s: float) -> None:
        self.interval_s, self.last_s = t_s - self.last_s, t_s

    def _page(self, samples: Mapping[int, float]) -> Page:
        newest = self.newest
        if newest is not None and len(newest[0]) == len(samples):
            try:
                return Page(newest[1], [samples[number] for number in newest[0]])
            except KeyError:
                pass  # one series left and another came
        numbers = tuple(sorted(samples))
        newest = self._layouts.get(numbers)
        if newest is None:
            if len(self._layouts) >= LAYOUTS_KEPT:
                del self._layouts[next(iter(self._layouts))]
            newest = self._layouts[numbers] = self._laid_out(numbers)
        self.newest = newest
        return Page(newest[1], [samples[number] for number in newest[0]])

    def _laid_out(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], Layout]:
        """A layout of these series, and the series' numbers in its order.

        Labels that all series have with one value come from the scrape: they are left out, so that
        replicas share layouts and their series.
        """
        everywhere = set(self.series[numbers[0]].labels)
        for number in numbers:
            everywhere.intersection_update(self.series[number].labels)
        self._scraped |= {pair for pair in everywhere if pair[0] not in OF_ENGINES}
        for number in numbers:
            name, labels = self.series[number]
            own = tuple(pair for pair in labels if pair not in self._scraped)
            self.series[number] = Series(name, own)
        ordered = sorted(numbers, key=self.series.__getitem__)
        key = tuple(self.series[number] for number in ordered)
        layout = _layouts.get(key)
        if layout is None:
            layout = _layouts[key] = Layout(key, {})
        for number, series in zip(ordered, layout.series, strict=True):
            self.series[number] = series
        return tuple(ordered), layout


class _Part(Struct, frozen=True):
    """One target's series in an answer. They are `_Order.places[first:last]`, and `up` is at
    `up_at` in the answer. `newest` is the target's newest page while this holds."""

    index: int
    pages: _TargetPages
    newest: tuple[tuple[int, ...], Layout]
    first: int
    last: int
    up_at: int | None


class _Order(Struct, frozen=True):
    """Where the values of each target's page are in an answer, in the order of the page's
    layout."""

    places: array[int]
    parts: Sequence[_Part]


NUMBER_BITS = 24
"""A place is the target's index, shifted by so many bits, plus the series' number."""

FAILED = (1 << NUMBER_BITS) - 1
"""The number of a target's `up`."""


class ScrapedPages:
    """The pages of all targets of a metrics system, rebuilt from answer after answer."""

    def __init__(self) -> None:
        self._indices: dict[Target, int] = {}
        self._targets: list[_TargetPages | None] = []
        self._places: dict[int, int] = {}
        """Places of series by the hash of their labels: with the labels themselves as keys, a
        thousand replicas would take 70 MiB more."""

    def read_until_s(self, target: Target) -> float:
        """Time of the target's last page or failed scrape; -inf if none was read."""
        pages = self._pages_of(target)
        return float("-inf") if pages is None else pages.last_s

    def interval_s(self, target: Target) -> float:
        """Seconds between the target's last two scrapes; infinite if they are not known."""
        pages = self._pages_of(target)
        return float("inf") if pages is None else pages.interval_s

    def _pages_of(self, target: Target) -> _TargetPages | None:
        index = self._indices.get(target)
        return None if index is None else self._targets[index]

    def keep(self, targets: Iterable[Target]) -> None:
        """Forget all other targets."""
        gone = self._indices.keys() - set(targets)
        if not gone:
            return
        indices = {self._indices.pop(target) for target in gone}
        for index in indices:
            self._targets[index] = None
        self._places = {
            metric: place
            for metric, place in self._places.items()
            if place >> NUMBER_BITS not in indices
        }

    def add(self, answer: Sequence[RawSeries]) -> None:
        """Add samples. Samples that were added before, or are older than the last page, are
        ignored.

        Nearly every answer has the series of the answer before, in the same order, with one sample
        each: its pages are then read without a look at a series.

        Raises:
            msgspec.DecodeError: the labels of a series are no JSON object of texts.
            ValueError: a value is no number.
        """
        if not answer:
            return
        labels = hash(b"".join([row.metric for row in answer]))
        pages = self._targets[self._place(answer[0]) >> NUMBER_BITS]
        if pages is not None:
            seen, order = pages.order
            if seen == labels:
                order = order or self._order(answer)
                pages.order = labels, order
                if order is not None and self._add_whole(order, answer):
                    return
            pages.order = labels, None
        self._add_each(answer)

    def _add_each(self, answer: Iterable[RawSeries]) -> None:
        targets = self._targets
        for row in answer:
            place = self._place(row)
            pages, number = targets[place >> NUMBER_BITS], place & FAILED
            if pages is None:
                continue
            last_s = pages.last_s
            if number == FAILED:
                pages.failures_s.update(
                    t_s for t_s, value in values_of(row) if t_s > last_s and value == 0
                )
                continue
            scrapes = pages.scrapes
            for t_s, value in values_of(row):
                if t_s > last_s:
                    scrapes[t_s][number] = value

    def _order(self, answer: Sequence[RawSeries]) -> _Order | None:
        """The order of an answer's series. None unless they are those of its targets' newest
        pages."""
        by_target: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for at, row in enumerate(answer):
            place = self._place(row)
            by_target[place >> NUMBER_BITS][place & FAILED] = at
        places, parts = array("I"), list[_Part]()
        for index, numbered in by_target.items():
            pages, up_at = self._targets[index], numbered.pop(FAILED, None)
            newest = None if pages is None else pages.newest
            if pages is None or newest is None or numbered.keys() != set(newest[0]):
                return None
            first = len(places)
            places.extend([numbered[number] for number in newest[0]])
            parts.append(_Part(index, pages, newest, first, len(places), up_at))
        return _Order(places, parts)

    def _add_whole(self, order: _Order, answer: Sequence[RawSeries]) -> bool:
        """Add an answer in this order. Returns whether it has one whole page of each target."""
        samples = single_samples(answer)
        if samples is None:
            return False
        times, values = samples[0::2], samples[1::2]
        own_times = list(map(times.__getitem__, order.places))
        own_values = list(map(values.__getitem__, order.places))
        read: list[tuple[_TargetPages, float, Page]] = []
        for part in order.parts:
            pages, (_, layout), first, last = part.pages, part.newest, part.first, part.last
            t_s = own_times[first]
            same = own_times[first:last].count(t_s) == last - first
            current = self._targets[part.index] is pages and pages.newest is part.newest
            if not same or not current or (part.up_at is not None and not values[part.up_at]):
                return False
            read.append((pages, t_s, Page(layout, own_values[first:last])))
        for pages, t_s, page in read:
            if t_s > pages.last_s:
                pages.whole[t_s] = page
        return True

    def pages(self, target: Target) -> Iterator[tuple[float, Page | None]]:
        """Yields the target's scrapes that were not yielded before, oldest first.

        A failed scrape has None instead of a page.
        """
        pages = self._pages_of(target)
        if pages is not None:
            yield from pages.pages()

    def _place(self, row: RawSeries) -> int:
        """The place of a series."""
        metric = bytes(row.metric)
        key = hash(metric)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = self._new_place(metric)
        return place

    def _new_place(self, metric: bytes) -> int:
        """The place of a series that was not seen before."""
        labels = _read_labels(metric)
        target = target_of(labels)
        pages = self._pages_of(target)
        if pages is None:
            pages = _TargetPages()
            self._indices[target] = len(self._targets)
            self._targets.append(pages)
        start = self._indices[target] << NUMBER_BITS
        name = labels.pop("__name__", "")
        if name == UP:
            return start + FAILED
        own = (pair for pair in labels.items() if pair[0] not in TARGET_LABELS)
        pages.series.append(Series(name, tuple(sorted(own))))
        return start + len(pages.series) - 1


_read_numbers = decoder(list[tuple[float, float]], strict=False).decode
_read_texts = decoder(list[tuple[float, str]]).decode


def values_of(row: RawSeries) -> list[tuple[float, float]]:
    """The times and values of a series."""
    try:
        return _read_numbers(row.values)
    except msgspec.ValidationError:  # "+Inf", which msgspec does not read as a number
        return [(t_s, float(value)) for t_s, value in _read_texts(row.values)]


_read_flat = decoder(list[float], strict=False).decode


def single_samples(answer: Sequence[RawSeries]) -> list[float] | None:
    """Time and value of each series, one after the other. None unless each has one sample with a
    finite value."""
    pairs = b",".join([row.values for row in answer]).translate(None, b"[]")
    try:
        samples = _read_flat(b"[%b]" % pairs)
    except msgspec.ValidationError:  # "+Inf"
        return None
    return samples if len(samples) == 2 * len(answer) else None


_read_labels = decoder(dict[str, str]).decode
