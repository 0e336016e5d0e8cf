"""The queries of a fleet's diagnosis, and several of them in one request, with their errors. I/O
edge."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.collector.errors import CollectError, SettingsError
from kneewatch.collector.names.vllm_metrics import PREFIXES
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.collector.prometheus.responses import Answer, Sample, Track
from kneewatch.collector.signals.expr import (
    ENGINES_OWN,
    EXPORTED_BY_ROUTERS,
    Dialect,
    Expr,
    OverTime,
    Quantile,
    any_of,
)
from kneewatch.collector.signals.signal import Signal
from kneewatch.collector.signals.vllm import VLLM_SIGNALS
from kneewatch.diagnose import gpu as health
from kneewatch.diagnose.fleet.engine_state import Coverage, held_queries
from kneewatch.diagnose.fleet.inventory import HITS, HOUR_S, USUAL_SIGNALS, WEEK_S, Labels
from kneewatch.diagnose.fleet.workload_drift import SIGNALS as LENGTH_SIGNALS
from kneewatch.diagnose.learned.length_drift import METRICS
from kneewatch.rules.facts import Spelling, Targets, duration, recorded
from kneewatch.rules.quantities import RECENT
from kneewatch.rules.rule import WINDOW_S

_SIGNALS: Mapping[str, Signal] = {signal.key: signal for signal in VLLM_SIGNALS}

PRESENCE = "num_requests_running"
PREFILL = "request_prefill_kv_computed_tokens"

OWN: Mapping[str, Expr] = {
    "prefill_tokens_p10": Quantile(PREFILL, 0.1),
    "prefill_tokens_p90": Quantile(PREFILL, 0.9),
}
"""Extra signals of a fleet: they show whether prompts hit fully or miss fully."""

LENGTHS = ("prompt_tokens_mean", "output_tokens_mean")
"""Signals over the last hour: sizing needs usual requests, and a minute may have too few."""

GPU_LABELS = (
    "cluster",
    "exported_namespace",
    "exported_pod",
    "namespace",
    "pod",
    "Hostname",
    "hostname",
    "node",
    "instance",
    "modelName",
    "model_name",
)
GPUS: Mapping[str, tuple[str, str]] = {
    "sm_clock_mhz": ("min", "DCGM_FI_DEV_SM_CLOCK"),
    "temperature_c": ("max", "DCGM_FI_DEV_GPU_TEMP"),
}
"""GPU figures: their aggregation over the GPUs of a replica, and DCGM's field."""

XID, XID_NEW, XID_WORKED = XIDS = "xid", "xid_new", "xid_worked"
"""The last XID of each GPU that has one, whether it occurred within the hour, and whether the GPU
still works."""

BOARD = "cluster, Hostname, hostname, gpu, UUID"
"""Labels that tell boards apart."""

COUNTED = "gpus"
EXPORTED = ("namespace", "pod", "container")
"""Labels of a workload that DCGM's series have as exported_*."""

_VALUE = r"""("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`[^`]*`)"""
MATCHER = re.compile(rf"\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*{_VALUE}\s*(?:,\s*|$)")
"""A PromQL label matcher; a list may end with a comma."""


class QueryScope(Struct, frozen=True):
    """The scope of queries: matchers of the series, the labels that distinguish engines, the
    prefixes of vLLM's metric names, and the window in seconds."""

    selector: str
    window_s: float
    by: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = PREFIXES

    def for_engines(self, by: tuple[str, ...], running: Iterable[Labels]) -> QueryScope:
        """A copy with the labels of engines, and with the prefixes that occur in the series of
        running requests; all prefixes where there are none."""
        names = {labels.get("__name__", "") for labels in running}
        present = sorted({name.removesuffix(PRESENCE) for name in names} - {""})
        return replace(self, by=by, prefixes=tuple(present) or PREFIXES)

    def of_vllm(self, *metrics: str, also: Iterable[str] = ()) -> str:
        """A selector of vLLM's series of some names, under any of the prefixes."""
        names = (prefix + metric for prefix in self.prefixes for metric in metrics)
        own = ENGINES_OWN if EXPORTED_BY_ROUTERS.intersection(metrics) else ""
        by_name = any_of("__name__", (*names, *also))
        return self.series("", f"{by_name},{own}" if own else by_name)

    def either(self, make: Callable[[Dialect], str | None]) -> str:
        """A query over all prefixes, joined with `or`; empty if `make` returns None for each of
        them."""
        by_prefix = [query for dialect in self.dialects if (query := make(dialect)) is not None]
        if len(by_prefix) == 1:
            return by_prefix[0]
        return " or ".join(f"({query})" for query in by_prefix)

    @property
    def dialects(self) -> list[Dialect]:
        """How series are spelled, for each prefix."""
        return [Dialect(self.window_s, self.by, self.selector, {}, p) for p in self.prefixes]

    def series(self, name: str, extra: str = "") -> str:
        """A selector of a series that is not vLLM's."""
        matchers = ",".join(part for part in (self.selector, extra) if part)
        return f"{name}{{{matchers}}}"


def checked_selector(text: str, origin: str) -> str:
    """Label matchers without braces.

    Raises:
        SettingsError: the text is no list of matchers.
    """
    inner = text.strip()
    if inner.startswith("{") and inner.endswith("}"):
        inner = inner[1:-1].strip()
    at = 0
    while at < len(inner):
        match = MATCHER.match(inner, at)
        if match is None:
            raise SettingsError(
                f'{origin}: {text!r} is not a list of matchers such as namespace="a"'
            )
        at = match.end()
    return inner.rstrip(",").rstrip()


def presence(scope: QueryScope) -> str:
    """All series of running requests, and the recorded ones."""
    return scope.of_vllm(PRESENCE, also=(recorded("running"),))


def vanished(scope: QueryScope) -> str:
    """The Unix time of the last series of running requests in the last hour, for engines that have
    none now; up to SEEN_STEP_S too early."""
    over = f"[{duration(HOUR_S)}:{duration(SEEN_STEP_S)}]"

    def vanished_series(dialect: Dialect) -> str:
        running = dialect.series(PRESENCE)
        return f"max_over_time(timestamp({running}){over}) unless {running}"

    return scope.either(vanished_series)


def raw_queries(scope: QueryScope, covered: Coverage) -> dict[str, str]:
    """Queries by signal, on vLLM's own series; without signals that PromQL cannot compute."""
    exprs = {**_catalogue(covered.signals), **OWN}
    by_key = {key: scope.either(expr.promql) for key, expr in exprs.items()}
    lengths = replace(scope, window_s=HOUR_S)
    by_key |= {key: lengths.either(expr.promql) for key, expr in _catalogue(LENGTHS).items()}
    newest = replace(scope, window_s=scope.window_s / 2)
    by_key[RECENT[HITS]] = newest.either(_SIGNALS[HITS].expr.promql)
    return {key: query for key, query in by_key.items() if query}


def recorded_queries(scope: QueryScope, covered: Coverage) -> dict[str, str]:
    """A query for each signal that recording rules keep."""
    return {
        key: f"max by ({', '.join(scope.by)}) ({scope.series(recorded(key))})"
        for key in dict.fromkeys((*covered.signals, *covered.remembered))
    }


SCRAPES_OVER_S = 300.0
"""The time over which scrapes are counted."""


def scrapes(scope: QueryScope) -> str:
    """Scrapes in the last minutes of each engine that was there all the time."""
    span = duration(SCRAPES_OVER_S)
    return scope.either(
        lambda dialect: (
            f"count_over_time({dialect.series(PRESENCE)}[{span}]) "
            f"and ({dialect.series(PRESENCE)} offset {span})"
        )
    )


class _Spelled(Spelling):
    """Spells conditions for all engines of a fleet: with recorded series where there are any, else
    with vLLM's own. A condition is looked up at each scrape."""

    def __init__(
        self, dialect: Dialect, targets: Targets, scrape_s: float, *, is_recorded: bool
    ) -> None:
        self._is_recorded = is_recorded
        super().__init__(
            dialect,
            targets=targets,
            scale=dialect.range_s / WINDOW_S,
            interval_s=scrape_s,
            scrape_s=scrape_s,
        )

    def series(self, key: str) -> str | None:
        """The expression of a signal; None if PromQL has none."""
        if self._is_recorded:
            return f"max by ({', '.join(self.dialect.by)}) ({recorded(key)})"
        signal = _SIGNALS.get(key)
        expr = None if signal is None else signal.expr.promql(self.dialect)
        return None if expr is None else f"({expr})"


def held(
    scope: QueryScope, targets: Targets, scrape_interval_s: float, *, recorded_only: bool
) -> dict[tuple[str, float], str]:
    """Queries for the engines where a condition has held, by its name and for how many seconds."""
    by_prefix = [
        held_queries(_Spelled(dialect, targets, scrape_interval_s, is_recorded=recorded_only))
        for dialect in scope.dialects
    ]
    return {key: " or ".join(f"({queries[key]})" for queries in by_prefix) for key in by_prefix[0]}


def findings(scope: QueryScope) -> str:
    """The severities of the findings that the exported rules have in force, by engine and rule."""
    return f"max by ({', '.join((*scope.by, 'rule'))}) ({scope.series('kneewatch:finding')})"


def process_queries(scope: QueryScope) -> dict[str, str]:
    """Queries for process ages, and for running requests in the last hour."""
    hour = duration(HOUR_S)
    process = ", ".join(label for label in scope.by if label not in ("model_name", "engine"))
    hourly = replace(scope, window_s=HOUR_S)
    # The process start has no model and engine labels, so it is joined in Python.
    age = f"max by ({process}) (time() - {scope.series('process_start_time_seconds')})"
    return {
        "running_hour_avg": hourly.either(OverTime(PRESENCE, "avg").promql),
        "running_hour_max": hourly.either(OverTime(PRESENCE, "max").promql),
        "running_hour_ago": scope.either(
            lambda dialect: dialect.sum(f"{dialect.series(PRESENCE)} offset {hour}")
        ),
        "age_s": age,
    }


def configs(scope: QueryScope) -> str:
    """The cache configuration, whose values are labels."""
    return scope.either(lambda dialect: dialect.series("cache_config_info"))


STARTS_SEEN_S = 6 * HOUR_S
"""How far back starts of servers are looked for."""

SEEN_STEP_S = 15.0
"""How exactly the time of an engine's last series is found."""

DELETED = "kube_pod_deletion_timestamp"
"""kube-state-metrics has it for pods that are being deleted."""

LEAST_WANTED = (
    'min_over_time({__name__=~"kube_deployment_spec_replicas|kube_statefulset_replicas"}[15m])'
)
"""The fewest replicas that each workload wanted within the last minutes: a workload scaled up from
zero needs minutes to start."""


def targets(jobs: Iterable[str]) -> str:
    """Whether the newest scrape of each target of these jobs succeeded.

    `up` has none of the page's labels, so the selector cannot match it.
    """
    return f"up{{{any_of('job', jobs)}}}"


def scrapes_of(failing: Sequence[Labels]) -> str:
    """The query for the last hour's scrapes of the targets with these labels. Its answer may
    contain other targets that share a job with one of these and an address with another."""
    matchers = (
        any_of(name, sorted({labels.get(name, "") for labels in failing}))
        for name in ("job", "instance")
    )
    return f"up{{{','.join(matchers)}}}[{duration(HOUR_S)}]"


def failed_before_first_answer(jobs: Iterable[str]) -> str:
    """A query for the most scrapes that a target failed before its first answer, by cluster,
    namespace and job. Counts targets that are new within STARTS_SEEN_S and answer now; one without
    a failed scrape was there before the metrics system."""
    up, span = targets(jobs), duration(STARTS_SEEN_S)
    failed = f"(count_over_time({up}[{span}]) - sum_over_time({up}[{span}]))"
    new = f"({failed} > 0) and {up} == 1 unless {up} offset {span}"
    return f"max by (cluster, namespace, job) ({new})"


ANY_SCRAPES = f"count(count_over_time(up[{duration(SCRAPES_OVER_S)}]) >= 3)"
"""A sample where any target was scraped a few times in the last minutes: after a restart a metrics
system has no series before it has scraped."""


def running_requests(scope: QueryScope, groups: Iterable[str], *, recorded_only: bool) -> str:
    """Running requests, summed over the replicas of a group. Queued ones are a backlog, not what
    the load needs at once."""
    series = scope.series(recorded("running")) if recorded_only else scope.of_vllm(PRESENCE)
    return f"sum by ({', '.join(groups)}) ({series})"


def lengths(scope: QueryScope, groups: Iterable[str]) -> dict[tuple[str, bool], str]:
    """Queries for a group's buckets of request lengths in an hour, by signal and whether it is the
    hour a week ago; otherwise it is the last hour."""
    by, hour = ", ".join((*groups, "le")), duration(HOUR_S)

    def increase(metric: str, offset: str, dialect: Dialect) -> str:
        return f"sum by ({by}) (increase({dialect.series(metric, '_bucket')}[{hour}]{offset}))"

    return {
        (LENGTH_SIGNALS[side], bool(offset)): scope.either(partial(increase, metric, offset))
        for side, metric in METRICS.items()
        for offset in ("", f" offset {duration(WEEK_S)}")
    }


def hourly(scope: QueryScope, groups: Sequence[str]) -> dict[str, str]:
    """Queries for the hourly values of USUAL_SIGNALS of a group, to compare with past weeks."""
    grouped = replace(scope, window_s=HOUR_S, by=tuple(groups))
    return {key: grouped.either(expr.promql) for key, expr in _catalogue(USUAL_SIGNALS).items()}


IMAGES = (
    "count by (cluster, exported_namespace, exported_pod, exported_container, namespace, pod, "
    "container, image, image_spec) "
    '(kube_pod_container_info{image=~".*vllm.*"} '
    'or kube_pod_container_info{image_spec=~".*vllm.*"})'
)
"""The containers with an image of vLLM, by kube-state-metrics, which does not export their
arguments. `image` is the name that the container runtime reports, `image_spec` (newer versions) the
name in the pod's spec."""


def gpu_queries(scope: QueryScope) -> dict[str, str]:
    """A query for each GPU figure, one for the number of GPUs, and those for the XIDs by GPU.

    An XID counts for two windows: the symptoms that it explains may end later than it does.
    """
    labels, selector = ", ".join(GPU_LABELS), scope.selector
    by_key = {
        key: f"{fold} by ({labels}) ({_gpu_series(name, selector)})"
        for key, (fold, name) in GPUS.items()
    }
    # Do not count MIG devices as GPUs.
    whole_gpus = _gpu_series(health.CLOCK, selector, 'GPU_I_ID=""')
    by_key[COUNTED] = f"count by ({labels}) ({whole_gpus})"
    over = f"max_over_time({{}}[{duration(2 * scope.window_s)}]) > 0"
    changes = f"changes({{}}[{duration(HOUR_S)}]) > 0"
    recent = _gpu_series(health.XID, selector, of=over)
    loads = " or ".join(f"{load} > 0" for load in health.LOADS)
    works = (f"{health.CLOCK} > 0", f"{health.POWER} > 0", loads)
    working = "".join(f" and on ({BOARD}) ({sign})" for sign in works)
    by_board = f"max by ({labels}, gpu)"
    return by_key | {
        XID: f"{by_board} ({recent})",
        XID_NEW: f"{by_board} ({_gpu_series(health.XID, selector, of=changes)})",
        XID_WORKED: f"{by_board} (({recent}){working})",
    }


def _gpu_series(name: str, selector: str, extra: str = "", *, of: str = "{}") -> str:
    """DCGM's series, restricted as far as their labels allow: where the exporter names the
    workload, by namespace, pod and container; where it does not, all are kept. `of` is a function
    of them."""
    matchers = [
        f"exported_{label}{sign}{value}"
        for label, sign, value in MATCHER.findall(selector)
        if label in EXPORTED
    ]
    if not matchers:
        return of.format(f"{name}{{{extra}}}")
    with_pod = ",".join(['exported_pod!=""', *matchers, *([extra] if extra else [])])
    without_pod = ",".join(['exported_pod=""', *([extra] if extra else [])])
    return " or ".join(of.format(f"{name}{{{matching}}}") for matching in (with_pod, without_pod))


def _catalogue(keys: Sequence[str]) -> dict[str, Expr]:
    return {key: _SIGNALS[key].expr for key in keys}


# --- The queries of one diagnosis: several in one request, with their errors. I/O edge ------------


KEY = "kneewatch_query"
"""The label that distinguishes the samples of several queries in one request."""

QUERIES_MAX, REQUEST_CHARACTERS_MAX = 6, 8000
"""Most queries and characters in one request: servers limit its time and its length
(VictoriaMetrics: 16 KiB)."""

OF_THE_QUERY = frozenset({"query", "timeout", "too_large"})
"""Errors of a request that may be caused by one of its queries: each is then sent separately."""


class AnswerLog(Struct):
    """Collects the warnings and errors of answers."""

    warnings: dict[str, None] = field(default_factory=dict[str, None])
    failed: dict[str, str] = field(default_factory=dict[str, str])

    def samples(self, key: str, answer: Answer | CollectError) -> Sequence[Sample]:
        """An answer's samples; empty for an error."""
        if isinstance(answer, CollectError):
            self.failed[key] = str(answer)
            return ()
        self.warnings.update(dict.fromkeys(answer.warnings))
        return answer.samples


class QueryMoment(Struct, frozen=True):
    """Sends queries for one moment, and logs their errors and warnings."""

    source: PrometheusSource
    log: AnswerLog
    at_s: float

    def instants(self, queries: Mapping[str, str]) -> dict[str, Sequence[Sample]]:
        """The samples of each query; empty for an error."""
        parts = {" ".join(part): part for part in _parts(queries)}
        requests = {name: _joined(part) for name, part in parts.items()}
        alone: dict[str, str] = {}
        by_key: dict[str, Sequence[Sample]] = {}
        for name, answer in self.source.instants(requests, self.at_s).items():
            part = parts[name]
            if isinstance(answer, CollectError) and answer.kind in OF_THE_QUERY and len(part) > 1:
                alone |= part
                continue
            for key in part:
                by_key[key] = _samples_of(key, self.log.samples(key, answer), len(part))
        again = self.source.instants(alone, self.at_s)
        by_key |= {key: self.log.samples(key, answer) for key, answer in again.items()}
        return {key: by_key[key] for key in queries}

    def tracks(self, key: str, selector: str) -> Sequence[Track]:
        """The samples of a range selector, as they were scraped; empty for an error."""
        try:
            piece = self.source.samples(selector, self.at_s)
        except CollectError as exc:
            self.log.failed[key] = str(exc)
            return ()
        self.log.warnings.update(dict.fromkeys(piece.warnings))
        return piece.tracks


def _parts(queries: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yields the queries that are sent together in one request."""
    part: dict[str, str] = {}
    for key, query in queries.items():
        length = sum(map(len, part.values())) + len(query)
        if part and (len(part) == QUERIES_MAX or length > REQUEST_CHARACTERS_MAX):
            yield part
            part = {}
        part[key] = query
    if part:
        yield part


def _joined(part: Mapping[str, str]) -> str:
    """One query that combines several, each with its key as a label."""
    if len(part) == 1:
        return next(iter(part.values()))
    return " or ".join(
        f'label_replace({query}, "{KEY}", "{key}", "", "")' for key, query in part.items()
    )


def _samples_of(key: str, samples: Sequence[Sample], queries: int) -> Sequence[Sample]:
    """The samples of one of several combined queries, without the label KEY."""
    if queries == 1:
        return samples
    return [
        replace(sample, labels={name: v for name, v in sample.labels.items() if name != KEY})
        for sample in samples
        if sample.labels.get(KEY) == key
    ]
