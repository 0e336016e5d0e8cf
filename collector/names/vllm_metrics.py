"""The table of vLLM's metrics, and a page's series by prefix, metric, engine and bucket. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

from msgspec import Struct, field

from kneewatch.collector.errors import CollectError
from kneewatch.collector.packaged import packaged_tables, read_as
from kneewatch.collector.page import Layout

Kind = Literal["gauge", "counter", "histogram", "info"]
Part = Literal["value", "bucket", "sum", "count", "created"]

PREFIXES = ("vllm:", "ray_vllm_", "ray_vllm:", "kserve_vllm:", "kserve_vllm_", "vllm_", "vllm.")
"""Prefixes of vLLM's metric names, on pages and in metrics systems; vLLM's own is first.

Ray adds ray_, and some versions replace the colon. KServe adds kserve_. OpenTelemetry and Datadog
replace the colon by an underscore or a dot.
"""

VLLM_PREFIX = PREFIXES[0]

LARGEST = 1e24
"""The largest value that is believed: the bytes that a GPU reads in ten thousand years."""

KINDS_MAX = 1024
"""Most different sets of engine labels on a page. Twice as many engines as are judged; more would
take seconds to tell apart."""

NAME_MAX_CHARS = 1024
"""Most characters of an engine's model, number or replica: names are kept for thousands of them."""

RATIO_MAX = 1.01
"""Largest valid ratio: 1 plus a tolerance for rounding."""


class Metric(Struct, frozen=True):
    """A row of the table. `scope` is what the metric describes: an engine, a model or the page.

    `names` are all names that the metric has had in vLLM's versions, newest first.
    """

    name: str
    kind: Kind
    unit: str
    names: tuple[str, ...]
    core: bool = False
    scope: str = "engine"
    labels: tuple[str, ...] = ()

    @property
    def most(self) -> float:
        """The largest possible value; the smallest is 0 for every metric."""
        share = self.kind == "gauge" and self.unit == "ratio"
        return RATIO_MAX if share else LARGEST


class SampleName(Struct, frozen=True):
    """The metric and part that a sample name stands for, without the page's prefix.

    If a page has a metric under two names, the lower `rank` wins. The newest name ranks before
    older names, and a counter with _total ranks before one without (Ray exports both).
    """

    metric: Metric
    spelling: str
    part: Part
    rank: int


class MetricTable(Struct, frozen=True):
    """All metrics by canonical name, and all sample names without prefix."""

    metrics: Mapping[str, Metric]
    samples: Mapping[str, SampleName]


@cache
def metric_table() -> MetricTable:
    """The packaged table; read on first use."""
    return table_from(packaged_tables("collector.engines", "vllm/metrics.toml"))


def table_from(document: Mapping[str, Any]) -> MetricTable:
    """The table from a parsed TOML document."""
    metrics = {name: _metric(name, row) for name, row in document["metrics"].items()}
    samples: dict[str, SampleName] = {}
    for name, row in document["metrics"].items():
        shown = row.get("sample")
        names = metrics[name].names if shown is None else (shown,)
        for age, spelling in enumerate(names):
            samples.update(_samples(metrics[name], spelling, age))
    return MetricTable(metrics, samples)


def _metric(name: str, row: Mapping[str, Any]) -> Metric:
    former = (spelling["name"] for spelling in row.get("former", ()))
    return read_as({**row, "name": name, "names": (name, *former)}, Metric)


def _samples(metric: Metric, name: str, age: int) -> dict[str, SampleName]:
    rank = 2 * age

    def sample(part: Part, rank: int = rank) -> SampleName:
        return SampleName(metric, name, part, rank)

    if metric.kind == "histogram":
        parts: tuple[Part, ...] = ("bucket", "sum", "count", "created")
        return {f"{name}_{part}": sample(part) for part in parts}
    if metric.kind == "counter":
        return {
            f"{name}_total": sample("value"),
            name: sample("value", rank + 1),
            f"{name}_created": sample("created"),
        }
    return {name: sample("value")}


# --- The vLLM series of a page: prefix, metric, engine and histogram buckets ----------------------

Labels = tuple[tuple[str, str], ...]

_OF_VLLM_ALONE = ("num_preemptions", "num_preemptions_total", "cache_config_info")
"""Metric names that only vLLM has. Other engines copied its names for load, tokens and latency.

A prefix that is not in `PREFIXES` is accepted only with one of these names.
"""
OF_THE_PAGE = ("lmcache:", "http_requests", "process_resident_memory_bytes", "process_open_fds")
"""Beginnings of metric names without vLLM's prefix. Their series have no label for the engine."""
_OWN = frozenset({"model_name", "engine", "le"})
# Labels that distinguish replicas on a page with several, the best first: Ray names its replicas,
# Kubernetes its pods; a Ray worker or a scrape address is the last resort.
_REPLICA_LABELS = (
    *("ReplicaId", "replica", "replica_id", "exported_pod", "pod", "pod_name"),
    *("kubernetes_pod_name", "WorkerId", "worker_id", "exported_instance", "instance"),
)
_LISTED_ENGINE = re.compile(r"\[(\d+)\]")  # some 0.8 servers show the list of engines: [0]


class EngineKey(Struct, frozen=True):
    """One engine of a page.

    `replica` is empty unless several engines of the page have the same model and engine number.
    """

    model: str
    engine: str
    replica: str = ""


class PageSeries(NamedTuple):
    """A series of the page that the table contains. A named tuple, because a page has hundreds of
    them."""

    position: int
    sample: SampleName
    labels: Labels


class PageNames(Struct, frozen=True):
    """A page's identified series, with their positions on the page."""

    prefix: str
    identified: tuple[PageSeries, ...]
    process_start: int | None


class Engines(Struct, frozen=True):
    """The engines of a page, and for each identified series the indices of its engines.

    `target_labels` are labels that the deployment or the scraper added, not vLLM.
    """

    keys: tuple[EngineKey, ...]
    owners: tuple[tuple[int, ...], ...]
    target_labels: frozenset[str]


def find_prefix(names: Collection[str], table: MetricTable) -> str | None:
    """The prefix of vLLM's names on this page; None if the page has no core metric."""

    def core(prefix: str) -> int:
        hits = (table.samples.get(n[len(prefix) :]) for n in names if n.startswith(prefix))
        return len({hit.metric.name for hit in hits if hit is not None and hit.metric.core})

    best = max(PREFIXES, key=core)
    if core(best):
        return best
    other = {n.removesuffix(own) for n in names for own in _OF_VLLM_ALONE if n.endswith(own)}
    return max(sorted(filter(core, other)), key=core, default=None)


def read_names(layout: Layout, prefix: str, table: MetricTable) -> PageNames:
    """The prefix of a page and its identified series. Repeated series are left out."""
    samples = {name: _sample(name, prefix, table) for name in {s.name for s in layout.series}}
    identified: list[PageSeries] = []
    for position, series in enumerate(layout.series):
        sample = samples[series.name]
        if position in layout.repeated:
            continue
        if sample is not None:
            identified.append(PageSeries(position, sample, series.labels))
    return PageNames(prefix, tuple(identified), process_start_of(layout))


def process_start_of(layout: Layout) -> int | None:
    """The position of the process's start time. None on a page of several processes: any of them
    may be the engine's."""
    starts = [
        position
        for position, series in enumerate(layout.series)
        if series.name == "process_start_time_seconds" and position not in layout.repeated
    ]
    return starts[0] if len(starts) == 1 else None


def _sample(name: str, prefix: str, table: MetricTable) -> SampleName | None:
    if name.startswith(OF_THE_PAGE):
        return table.samples.get(name)
    return table.samples.get(name[len(prefix) :]) if name.startswith(prefix) else None


def find_engines(page_series: Sequence[PageSeries]) -> Engines:
    """The engines of a page, found from its identified series.

    A series may lack a label that others have, such as `admission_rejections` without `engine`. It
    then belongs to every engine that its other labels match. Series of LMCache and of the HTTP
    server do not name their engine. On a page with several engines they belong to none.
    """
    anchors = _anchors(page_series)
    target = frozenset(label for _, labels in anchors for label, _ in labels) - _OWN
    reader = _KeyReader(anchors, _replica_labels(anchors, target))
    partial = [reader.read(f) for f in page_series]
    kinds = set(partial)
    if len(kinds) > KINDS_MAX:
        raise CollectError(
            f"more than {KINDS_MAX} engines by the labels of this page",
            kind="too_large",
            hint="scrape the engines one by one; labels such as engine must not change",
        )
    if any(len(name) > NAME_MAX_CHARS for part in kinds for name in part if name):
        raise CollectError(
            f"an engine's labels have more than {NAME_MAX_CHARS} characters",
            kind="too_large",
            hint="shorten the model's name (--served-model-name)",
        )
    keys = {reader.key(part) for part in kinds if reader.is_full(part)}
    for part in sorted(kinds, key=_most_said_first):
        if part.model is not None and not any(part.fits(key) for key in keys):
            keys.add(reader.key(part))
    ordered = tuple(sorted(keys or {EngineKey("", "0")}, key=_order))
    owners = {part: tuple(i for i, key in enumerate(ordered) if part.fits(key)) for part in kinds}
    return Engines(
        keys=ordered,
        owners=tuple(
            () if len(ordered) > 1 and is_unowned(f) else owners[part]
            for f, part in zip(page_series, partial, strict=True)
        ),
        target_labels=target,
    )


class _Partial(NamedTuple):
    """The parts of an engine's key that a series' labels give; None where a label is missing."""

    model: str | None
    engine: str | None
    replica: str | None

    def fits(self, key: EngineKey) -> bool:
        return (
            self.model in (None, key.model)
            and self.engine in (None, key.engine)
            and self.replica in (None, key.replica)
        )


class _KeyReader:
    """Reads engine keys from labels. The core metrics show which labels the page uses."""

    def __init__(self, anchors: Sequence[tuple[Labels, Labels]], replica: Sequence[str]) -> None:
        used = {label for _, labels in anchors for label, _ in labels}
        self._model, self._engine = "model_name" in used, "engine" in used
        self._replica = replica

    def read(self, series: PageSeries) -> _Partial:
        """The parts of the engine's key that one series has."""
        if is_unowned(series):  # LMCache's model_name is a label of its own
            return _Partial(None, None, None)
        model = engine = replica = None
        for label, value in series.labels:
            if label == "model_name":
                model = value
            elif label == "engine":
                listed = None if value.isdecimal() else _LISTED_ENGINE.fullmatch(value)
                engine = listed[1] if listed else value
        if self._replica:
            labels = dict(series.labels)
            if not labels.keys().isdisjoint(self._replica):
                replica = "/".join(labels.get(label, "") for label in self._replica)
        return _Partial(model, engine, replica)

    def is_full(self, part: _Partial) -> bool:
        """Whether a series has all labels that distinguish engines on this page."""
        return (
            (part.model is not None or not self._model)
            and (part.engine is not None or not self._engine)
            and (part.replica is not None or not self._replica)
            and (part.model, part.engine, part.replica) != (None, None, None)
        )

    def key(self, part: _Partial) -> EngineKey:
        """The engine key of a series. The V0 engine has no number and gets 0."""
        return EngineKey(part.model or "", part.engine or "0", part.replica or "")


def is_unowned(series: PageSeries) -> bool:
    """Whether the series has no label for its engine, as LMCache's and the HTTP server's series."""
    return series.sample.spelling.startswith(OF_THE_PAGE)


def _anchors(page_series: Sequence[PageSeries]) -> list[tuple[Labels, Labels]]:
    """For each series of a core metric: its name and own labels, then its other labels.

    The own labels of core metrics are in the table, so any other label comes from the target.
    """
    core = [f for f in page_series if f.sample.metric.core and f.sample.part != "created"]
    plain = [f for f in core if f.sample.part != "bucket"]
    anchors: list[tuple[Labels, Labels]] = []
    for f in plain or core:
        own = {*f.sample.metric.labels, "le"}
        name = (("", f"{f.sample.spelling} {f.sample.part} {f.sample.rank}"),)
        mine = tuple(pair for pair in f.labels if pair[0] in own)
        anchors.append((name + mine, tuple(pair for pair in f.labels if pair[0] not in own)))
    return anchors


def _replica_labels(
    anchors: Sequence[tuple[Labels, Labels]], target: frozenset[str]
) -> tuple[str, ...]:
    """The labels that distinguish series of the same metric, model and engine."""
    chosen: list[str] = []
    rows = [(name, dict(labels)) for name, labels in anchors]
    for candidate in (*_REPLICA_LABELS, *sorted(target.difference(_REPLICA_LABELS))):
        if candidate not in target:
            continue
        groups: dict[tuple[object, ...], set[str]] = {}
        for name, labels in rows:
            values = (labels.get(label, "") for label in ("model_name", "engine", *chosen))
            groups.setdefault((name, *values), set()).add(labels.get(candidate, ""))
        if any(len(values) > 1 for values in groups.values()):
            chosen.append(candidate)
    return tuple(chosen)


def _most_said_first(part: _Partial) -> tuple[int, str]:
    return -sum(value is not None for value in (part.model, part.engine, part.replica)), repr(part)


def _order(key: EngineKey) -> tuple[str, int, str, str]:
    number = int(key.engine) if key.engine.isdecimal() else -1
    return key.model, number, key.engine, key.replica


# --- Histograms from their series -----------------------------------------------------------------


class HistogramSlots(Struct, frozen=True):
    """The positions of one histogram in `Page.values`.

    `bounds` ascend and end with infinity. `buckets` are the positions of the cumulative counts, one
    per bound. If the scraper dropped the buckets, the only bound is infinity and its position is
    that of the histogram's count, so the mean can still be computed.
    """

    bounds: tuple[float, ...]
    buckets: tuple[int, ...]
    sum: int | None
    count: int | None
    labels: Labels = ()


class _Pieces(Struct):
    buckets: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    sum: int | None = None
    count: int | None = None


def read_histograms(labelled: Iterable[tuple[PageSeries, Labels]]) -> tuple[HistogramSlots, ...]:
    """The histograms of one metric and engine. Those with damaged bounds are left out.

    There is one histogram per set of labels, apart from the engine's labels and `le`.
    """
    pieces: dict[Labels, _Pieces] = {}
    for f, own in labelled:
        piece = pieces.setdefault(own, _Pieces())
        if f.sample.part == "bucket":
            piece.buckets.append((dict(f.labels).get("le", ""), f.position))
        elif f.sample.part == "sum":
            piece.sum = f.position
        else:
            piece.count = f.position
    histograms: list[HistogramSlots] = []
    for own, piece in pieces.items():
        if bounds := _bounds(piece):
            les, at = zip(*bounds, strict=True)
            count = at[-1] if piece.count is None else piece.count
            histograms.append(HistogramSlots(les, at, piece.sum, count, own))
    return tuple(histograms)


def _bounds(pieces: _Pieces) -> list[tuple[float, int]]:
    """The bounds with their positions, ascending; empty if the histogram is damaged."""
    if not pieces.buckets:
        return [] if pieces.count is None else [(math.inf, pieces.count)]
    try:
        # The order of lines means nothing, as in Prometheus.
        bounds = sorted((float(le), position) for le, position in pieces.buckets)
    except ValueError:
        return []
    edges = [bound for bound, _ in bounds]
    nan, twice = any(map(math.isnan, edges)), len(set(edges)) < len(edges)
    return [] if nan or twice or edges[-1] != math.inf else bounds
