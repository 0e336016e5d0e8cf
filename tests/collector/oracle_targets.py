"""Targets for the oracle: recorded captures and pages, and generated ones with every mishap."""

from __future__ import annotations

import gzip
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import Limits, PageParser
from kneewatch.collector.names.vllm_metrics import find_prefix, metric_table, read_names
from kneewatch.collector.names.vllm_resolver import EngineBinding, resolve
from kneewatch.collector.page import Layout, Page, Series
from kneewatch.collector.signals.table import ITL, PREFILL, TTFT
from tests.collector.oracle import Target

FIXTURES = Path(__file__).parents[1] / "fixtures"
INTERVAL_MS = 2_000
INF = math.inf
BOUNDS: Mapping[str, tuple[float, ...]] = {
    ITL: (*(0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, INF),),
    TTFT: (0.1, 0.5, 1.0, 2.5, 10.0, INF),
    PREFILL: (0.3, 0.5, 0.8, 1.0, 2.5, 10.0, INF),
    "iteration_tokens_total": (1.0, 8.0, 256.0, 512.0, INF),
}
LABEL_VALUES: Mapping[str, tuple[str, ...]] = {
    "reason": ("capacity", "deferred"),
    "finished_reason": ("stop", "length", "abort", "error", "repetition"),
    "source": ("local_compute", "local_cache_hit", "external_kv_transfer"),
    "position": tuple(str(position) for position in range(8)),
    "stage": ("waiting_to_start", "in_progress", "completed_waiting", "handover"),
    "transfer_type": ("GPU_to_CPU", "CPU_to_GPU"),
    "max_lora": ("2",),
    "running_lora_adapters": ("", "a0", "a1"),
    "waiting_lora_adapters": ("", "a2"),
    "sleep_state": ("awake", "weights_offloaded", "discard_all"),
}
BARE = frozenset({"corrupted_requests"})
"""Counters shown without _total, as Ray does."""

GAUGE_MAX = 200.0
"""No generated gauge is above this."""

OWNER_LABELS = {"engine": ("engine", "model_name"), "model": ("model_name",), "page": ()}


def captured(name: str) -> Target:
    """A recorded capture."""
    parser = PageParser(Limits())
    return Target(
        name,
        [
            (round(entry.t_s * 1000), None if entry.body is None else parser.parse(entry.body))
            for entry in CaptureReader(FIXTURES / "captures" / f"{name}.jsonl.gz")
        ],
    )


def paged(name: str, pages: Sequence[str], *, start_ms: int) -> Target:
    """Recorded pages of one server, taken as if they had been scraped one after the other."""
    parser = PageParser(Limits())
    texts = [gzip.decompress((FIXTURES / "pages" / page).read_bytes()).decode() for page in pages]
    return Target(
        name, [(start_ms + at * INTERVAL_MS, parser.parse(text)) for at, text in enumerate(texts)]
    )


def grown(name: str, page: str, *, start_ms: int, scrapes: int) -> Target:
    """A recorded page of a fresh server, and what it might have shown as its counters grew."""
    ((_, first),) = paged(name, [page], start_ms=start_ms).scrapes
    assert first is not None
    rows = [(start_ms, first)]
    for count in range(1, scrapes):
        page_then = Page(first.layout, list(first.values))
        for engine in resolve(first.layout).engines:
            _grow(page_then.values, engine, count)
        rows.append((start_ms + count * INTERVAL_MS, page_then))
    return Target(name, rows)


def spellings(layout: Layout) -> dict[str, str]:
    """The names on a page by canonical names, for `Dialect.names`."""
    table = metric_table()
    prefix = find_prefix({series.name for series in layout.series}, table) or ""
    spelling_of_name: dict[str, tuple[int, str]] = {}
    for name_read in read_names(layout, prefix, table).identified:
        if name_read.sample.part != "created":
            spelled = (name_read.sample.rank, prefix + name_read.sample.spelling)
            spelling_of_name[name_read.sample.metric.name] = min(
                spelling_of_name.get(name_read.sample.metric.name, spelled), spelled
            )
    return {name: spelling for name, (_, spelling) in spelling_of_name.items()}


def _grow(values: list[float], engine: EngineBinding, count: int) -> None:
    for slot in itertools.chain.from_iterable(engine.counters.values()):
        values[slot.position] += count * (slot.position % 7)
    for metric, slots in engine.gauges.items():
        for slot in slots:
            wobble = (count * (slot.position % 5)) % 11
            values[slot.position] += wobble / 11 if _is_share(metric) else wobble
    for histogram in itertools.chain.from_iterable(engine.histograms.values()):
        for height, position in enumerate(histogram.buckets, start=1):
            values[position] += count * height
        for at, step in ((histogram.sum, 0.37), (histogram.count, len(histogram.buckets))):
            if at is not None:
                values[at] += count * step


def _is_share(metric: str) -> bool:
    """Whether a gauge cannot say more than one: what is above is unknown here, not there."""
    row = metric_table().metrics[metric]
    return (row.kind, row.unit) == ("gauge", "ratio")


def generated(seed: int, metrics: Iterable[str], *, start_ms: int, scrapes: int) -> Target:
    """A made-up server: one or two engines, and resets, gaps and series that come and go."""
    rng = Random(seed)
    engines = [_engine(rng, str(number), metrics) for number in range(rng.choice((1, 1, 2)))]
    families = [*itertools.chain.from_iterable(engines)]
    layouts: dict[tuple[Series, ...], Layout] = {}
    rows: list[tuple[int, Page | None]] = []
    for count, t_ms in enumerate(_times(rng, start_ms, scrapes)):
        restarted = rng.random() < 0.02
        shown: dict[Series, float] = {}
        for family in families:
            family.step(restarted=restarted, t_ms=t_ms)
            shown.update(family.shown(count))
        if rng.random() < 0.04:
            continue  # nobody scraped
        series = tuple(shown)
        layout = layouts.setdefault(series, Layout(series, {}))
        rows.append((t_ms, Page(layout, list(shown.values())) if rng.random() > 0.03 else None))
    return Target(f"g{seed}", rows)


def on_edges(name: str, *, start_ms: int, scrapes: int) -> Target:
    """Twenty first tokens between any two scrapes, each twentieth at a bucket's edge.

    The next bucket is empty: there the last bit of a rate decides in which bucket a quantile is.
    """
    labels = (("engine", "0"), ("model_name", "tiny"))
    names = [
        Series(f"vllm:{TTFT}_bucket", (*labels[:1], ("le", _le(float(le))), *labels[1:]))
        for le in (*range(1, 40), INF)
    ]
    names += [Series(f"vllm:{TTFT}_{part}", labels) for part in ("sum", "count")]
    layout = Layout((Series("vllm:num_requests_running", labels), *names), {})
    rows: list[tuple[int, Page | None]] = []
    for count, t_ms in enumerate(_times(Random(name), start_ms, scrapes), start=1):
        buckets = [float(count * (le // 2)) for le in range(2, 42)]
        rows.append((t_ms, Page(layout, [0.0, *buckets, 400.0 * count, 20.0 * count])))
    return Target(name, rows)


def _times(rng: Random, start_ms: int, scrapes: int) -> Iterator[int]:
    """Scrape times: on the second, a little off, or anyhow."""
    low_ms, high_ms = rng.choice(
        ((5_000, 5_000), (10_000, 10_000), (15_000, 15_000), (4_990, 5_010), (700, 25_000))
    )
    t_ms = start_ms if low_ms == high_ms else start_ms + rng.randrange(low_ms)
    for _ in range(scrapes):
        yield t_ms
        t_ms += rng.randint(low_ms, high_ms)


class _Family:
    """One gauge, counter or info series, or the series of one histogram."""

    def __init__(self, rng: Random, metric: str, labels: Mapping[str, str]) -> None:
        self.rng, self.kind = rng, metric_table().metrics[metric].kind
        self.names = _series(metric, self.kind, labels)
        self.born = rng.randrange(30) if rng.random() < 0.2 else 0
        self.dies = rng.randrange(5, 60) if rng.random() < 0.1 else 1_000
        self.flickers = rng.random() < 0.1
        # A level of 1e12 has no slope to speak of: huge are counters only.
        huge = 1e12 if self.kind == "counter" else 1.0
        self.scale = rng.choice((0.0, 1.0, 1.0, 10.0, 0.001, huge))
        if _is_share(metric):
            self.scale /= GAUGE_MAX
        self.values = [0.0] * len(self.names)
        self._reset(rng.choice((0.0, 0.0, 7.0, 1e6, 1e15)))

    def step(self, *, restarted: bool, t_ms: int) -> None:
        """What happens until the next scrape."""
        rng = self.rng
        if self.kind == "info":
            if rng.random() < 0.3:
                self.values = [t_ms / 1000 - rng.random()]
        elif self.kind == "gauge":
            self.values = [self.scale * rng.choice((0, rng.randrange(20), rng.random()))]
        elif restarted or rng.random() < 0.02:
            self._reset(rng.choice((0.0, 0.0, 2.0)))
        elif rng.random() < 0.7:
            self._count()

    def shown(self, count: int) -> dict[Series, float]:
        """What the page of a scrape shows of it."""
        if not self.born <= count < self.dies or (self.flickers and self.rng.random() < 0.1):
            return {}
        shown = dict(zip(self.names, self.values, strict=True))
        if self.kind == "histogram" and self.flickers and self.rng.random() < 0.1:
            del shown[self.rng.choice(self.names[:-3])]
        return shown

    def _reset(self, to: float) -> None:
        self.values = [to] * len(self.values)

    def _count(self) -> None:
        if self.kind != "histogram":
            self.values[0] += self.scale * self.rng.choice((1, self.rng.randrange(50)))
            return
        buckets = len(self.values) - 2
        for at in self.rng.choices(range(buckets), k=self.rng.choice((1, 2, 10, 20))):
            # A page is no snapshot: now and then a bucket is read a moment too early. The last
            # one is the count.
            for above in range(at, buckets):
                self.values[above] += self.rng.random() > 0.02
            self.values[-2] += self.rng.random() * 10
            self.values[-1] = self.values[buckets - 1]


def _engine(rng: Random, number: str, metrics: Iterable[str]) -> Iterator[_Family]:
    for metric in metrics:
        row = metric_table().metrics.get(metric)
        if row is None:
            continue  # no metric of vLLM's: of another engine
        if row.scope != "engine" and number != "0":
            continue  # the first engine has shown it for all
        owner = {"engine": number, "model_name": "tiny"}
        labels = {label: owner[label] for label in OWNER_LABELS[row.scope]}
        for chosen in itertools.product(*(LABEL_VALUES[label] for label in row.labels)):
            yield _Family(rng, metric, {**labels, **dict(zip(row.labels, chosen, strict=True))})


def _series(metric: str, kind: str, labels: Mapping[str, str]) -> list[Series]:
    name = f"vllm:{metric}"
    pairs = tuple(sorted(labels.items()))
    if kind == "counter":
        return [Series(name if metric in BARE else f"{name}_total", pairs)]
    if kind != "histogram":
        return [Series(name, pairs)]
    bounds = BOUNDS.get(metric, (1.0, 2.0, 5.0, 100.0, INF))
    return [
        *(
            Series(f"{name}_bucket", tuple(sorted({**labels, "le": _le(b)}.items())))
            for b in bounds
        ),
        Series(f"{name}_sum", pairs),
        Series(f"{name}_count", pairs),
    ]


def _le(bound: float) -> str:
    return "+Inf" if bound == INF else repr(bound)
