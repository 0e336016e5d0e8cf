"""The PromQL queries of a fleet's diagnosis. Sends several in one request and collects their
errors. I/O edge."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from math import inf
from operator import itemgetter
from threading import Lock

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import (
    PROGRAM,
    VLLM,
    EngineKind,
    canonical_labels,
    engine_kinds,
    kind_of,
)
from kneewatch.collector.errors import CollectError, SettingsError
from kneewatch.collector.names.vllm_metrics import PREFIXES
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.collector.prometheus.responses import Answer, Sample, Track
from kneewatch.collector.signals.expr import Expr, OverTime, Quantile
from kneewatch.collector.signals.promql import (
    ENGINES_OWN,
    EXPORTED_BY_ROUTERS,
    Dialect,
    NoSeriesError,
    any_of,
    duration,
    promql,
    quoted,
)
from kneewatch.collector.signals.table import SIGNAL_BY_KEY
from kneewatch.diagnose import gpu as health
from kneewatch.diagnose.fleet.inventory import USUAL_SIGNALS, Key, Labels
from kneewatch.diagnose.fleet.workload_drift import SIGNALS as LENGTH_SIGNALS
from kneewatch.diagnose.lengths import METRICS
from kneewatch.rules.rule import DAY_S, HOUR_S, WEEK_S

PRESENCE, QUEUED = "num_requests_running", "num_requests_waiting"
BACKLOG_RATIO = 0.05
"""Queued over running requests of a tier from which they are a backlog."""

PREFILL = "request_prefill_kv_computed_tokens"

OWN: Mapping[str, Expr] = {
    "prefill_tokens_p10": Quantile(PREFILL, 0.1),
    "prefill_tokens_p90": Quantile(PREFILL, 0.9),
}
"""Signals that only a fleet's diagnosis uses: they show whether prompts hit fully or miss fully."""

LENGTHS = ("prompt_tokens_mean", "output_tokens_mean")
"""Signals that are computed over the last hour: sizing needs usual requests, and a minute may have
too few requests."""

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
"""GPU signals: how they are aggregated over the GPUs of a replica, and the DCGM field."""

USUAL_MHZ = "usual_clock_mhz"
"""The highest clock of an engine's GPUs within a day."""

XID, XID_NEW, XID_WORKED = XIDS = "xid", "xid_new", "xid_worked"
"""For each GPU with an XID: the last XID, whether it occurred within the hour, and whether the GPU
still works."""

BOARD = "cluster, Hostname, hostname, gpu, UUID"
"""Labels that together identify a GPU board."""

COUNTED = "gpus"
EXPORTED = ("namespace", "pod", "container")
"""Labels of a workload. In DCGM's series they are named exported_*."""

_VALUE = r"""("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`[^`]*`)"""
MATCHER = re.compile(rf"\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*{_VALUE}\s*(?:,\s*|$)")
"""A PromQL label matcher; a list may end with a comma."""


@cache
def all_prefixes() -> tuple[str, ...]:
    """The prefixes of the metric names of all kinds of engines."""
    return (*PREFIXES, *(prefix for kind in engine_kinds() for prefix in kind.prefixes))


class QueryScope(Struct, frozen=True):
    """The scope of queries: label matchers, the window in seconds, the labels that distinguish
    engines, and the prefixes of their metric names."""

    selector: str
    window_s: float
    by: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = field(default_factory=all_prefixes)

    def for_engines(self, by: tuple[str, ...], running: Iterable[Labels]) -> QueryScope:
        """A copy with the labels `by`, and with only those metric prefixes that occur in
        `running`. `running` are the labels of series of running requests; if it is empty, all
        prefixes stay."""
        names = {labels.get("__name__", "") for labels in running}
        present = [
            prefix
            for prefix in self.prefixes
            if names.intersection(Dialect(0.0, prefix=prefix).names_of(PRESENCE))
        ]
        return replace(self, by=by, prefixes=tuple(present) or self.prefixes)

    def of_vllm(self, *metrics: str) -> str:
        """A selector for vLLM's series of these metrics, under any of the prefixes."""
        names = (prefix + metric for prefix in self.of_kind(VLLM) for metric in metrics)
        own = ENGINES_OWN if EXPORTED_BY_ROUTERS.intersection(metrics) else ""
        by_name = any_of("__name__", names)
        return self.series("", f"{by_name},{own}" if own else by_name)

    def of_kind(self, kind: EngineKind) -> list[str]:
        return [prefix for prefix in self.prefixes if kind_of(prefix) is kind]

    def either(self, make: Callable[[Dialect], str | None], of_vllm: str = "") -> str:
        """One query for all prefixes, joined with `or`. `make` returns the query for one prefix, or
        None. Empty if all are None. `of_vllm` is the query for all of vLLM's prefixes.

        Samples of engines that are not vLLM have their title in the label PROGRAM.
        """
        by_prefix = [of_vllm] if of_vllm and self.of_kind(VLLM) else []
        for prefix in self.prefixes:
            kind = kind_of(prefix)
            if kind is VLLM and of_vllm:
                continue
            with suppress(NoSeriesError):
                query = make(Dialect(self.window_s, self.by, self.selector, {}, prefix))
                if query is not None and kind is not VLLM:
                    query = f'label_replace({query}, "{PROGRAM}", "{kind.title}", "", "")'
                by_prefix += [] if query is None else [query]
        if len(by_prefix) == 1:
            return by_prefix[0]
        return " or ".join(f"({query})" for query in by_prefix)

    def query(self, expr: Expr) -> str:
        """One query for an expression with all prefixes; empty if PromQL cannot express it."""
        return self.either(partial(promql, expr))

    def series(self, name: str, extra: str = "") -> str:
        """A selector for a series that does not come from vLLM."""
        matchers = ",".join(part for part in (self.selector, extra) if part)
        return f"{name}{{{matchers}}}"


of_scope = lru_cache(maxsize=8)
"""Keeps the queries of a scope: each cycle sends the same ones."""


def checked_selector(text: str, origin: str) -> str:
    """Check a selector. Returns its label matchers without braces.

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


@of_scope
def presence(scope: QueryScope) -> str:
    """A query for all series of running requests."""
    return scope.either(lambda dialect: dialect.series(PRESENCE), scope.of_vllm(PRESENCE))


@of_scope
def vanished(scope: QueryScope) -> str:
    """A query for engines of any kind that have no series of running requests now but had one in
    the last hour. The value is the Unix time of their last sample, up to SEEN_STEP_S too early."""
    over = f"[{duration(HOUR_S)}:{duration(SEEN_STEP_S)}]"

    def vanished_series(dialect: Dialect) -> str:
        running = dialect.series(PRESENCE)
        return f"max_over_time(timestamp({running}){over}) unless {running}"

    return replace(scope, prefixes=all_prefixes()).either(vanished_series)


@of_scope
def own_queries(scope: QueryScope) -> Mapping[str, str]:
    """Queries, by signal, for how much prompts compute."""
    return {key: scope.query(expr) for key, expr in OWN.items()}


@of_scope
def hourly_queries(scope: QueryScope) -> Mapping[str, str]:
    """Queries, by signal, for the last hour of an engine: its usual requests (a minute may have too
    few) and how many ran."""
    hourly = replace(scope, window_s=HOUR_S)
    return {key: hourly.query(expr) for key, expr in _catalogue(LENGTHS).items()} | {
        "running_hour_avg": hourly.query(OverTime(PRESENCE, "avg")),
        "running_hour_max": hourly.query(OverTime(PRESENCE, "max")),
        "running_hour_ago": scope.either(
            lambda dialect: dialect.folded(f"{{}} offset {duration(HOUR_S)}", PRESENCE)
        ),
    }


@of_scope
def usual_clock(scope: QueryScope) -> str:
    """A query for the highest clock of GPUs within a day, every few minutes."""
    over = f"max_over_time({{}}[{duration(DAY_S)}:{duration(SCRAPES_OVER_S)}])"
    return (
        f"max by ({', '.join(GPU_LABELS)}) ({_gpu_series(health.CLOCK, scope.selector, of=over)})"
    )


SCRAPES_OVER_S = 300.0
"""Seconds over which scrapes are counted."""


@of_scope
def scrapes(scope: QueryScope) -> str:
    """A query for the number of recent scrapes of each engine. An engine that was not present for
    all of SCRAPES_OVER_S is left out."""
    span = duration(SCRAPES_OVER_S)
    return scope.either(
        lambda dialect: (
            f"count_over_time({dialect.series(PRESENCE)}[{span}]) "
            f"and ({dialect.series(PRESENCE)} offset {span})"
        )
    )


STARTS_SEEN_S = 6 * HOUR_S
"""Seconds in the past in which starts of servers are searched."""

SEEN_STEP_S = 15.0
"""Resolution in seconds of the time of an engine's last sample."""

DELETED = "kube_pod_deletion_timestamp"
"""A metric of kube-state-metrics that exists for pods that are being deleted."""

WORKLOADS = '{__name__=~"kube_deployment_spec_replicas|kube_statefulset_replicas"}'
"""A query for the replicas that each workload wants."""

WANTED_NONE = f"max_over_time(timestamp({WORKLOADS} == 0)[15m:15s])"
"""A query for when each workload last wanted no replica, within the last 15 minutes: a workload
that is scaled up from zero needs minutes to start."""


def targets(jobs: Iterable[str]) -> str:
    """A query that shows whether the newest scrape of each target of these jobs succeeded.

    `up` has no labels of the scraped page, so the user's selector cannot be applied to it.
    """
    return f"up{{{any_of('job', jobs)}}}"


def scrapes_of(failing: Sequence[Labels]) -> str:
    """A query for the scrapes of the last hour of targets with these labels. The answer may contain
    another target too, which has the job of one of them and the address of another."""
    matchers = (
        any_of(name, sorted({labels.get(name, "") for labels in failing}))
        for name in ("job", "instance")
    )
    return f"up{{{','.join(matchers)}}}[{duration(HOUR_S)}]"


def failed_before_first_answer(jobs: Iterable[str]) -> str:
    """A query for the number of scrapes that failed before a target's first answer: the maximum by
    cluster, namespace and job.

    Only targets count that are new within STARTS_SEEN_S and answer now. A target without a failed
    scrape is left out: it was running before the metrics system.
    """
    up, span = targets(jobs), duration(STARTS_SEEN_S)
    failed = f"(count_over_time({up}[{span}]) - sum_over_time({up}[{span}]))"
    new = f"({failed} > 0) and {up} == 1 unless {up} offset {span}"
    return f"max by (cluster, namespace, kubernetes_namespace, job) ({new})"


ANY_SCRAPES = f"count(count_over_time(up[{duration(SCRAPES_OVER_S)}]) >= 3)"
"""A query that has a sample if any target was scraped at least three times in the last minutes. A
metrics system that was just restarted has no series yet."""


def running_requests(scope: QueryScope, groups: Iterable[str]) -> str:
    """A query for running requests, summed over the replicas of a group, while few are queued.

    While a backlog is served, as many run as fit: the load does not need that much at once.
    """
    grouped = replace(scope, by=tuple(groups))
    by = f"sum by ({', '.join(grouped.by)})"

    def quiet(running: str, queued: str) -> str:
        return f"{running} unless {queued} > {BACKLOG_RATIO} * {running}"

    return grouped.either(
        lambda dialect: quiet(dialect.folded("{}", PRESENCE), dialect.folded("{}", QUEUED)),
        quiet(f"{by} ({scope.of_vllm(PRESENCE)})", f"{by} ({scope.of_vllm(QUEUED)})"),
    )


def lengths(scope: QueryScope, groups: Iterable[str]) -> dict[tuple[str, bool], str]:
    """Queries for the buckets of a group's request lengths over an hour. The key is the signal and
    whether the hour is that of a week ago (True) or the last one (False)."""
    grouped, hour = replace(scope, by=(*groups, "le")), duration(HOUR_S)

    def increase(metric: str, offset: str, dialect: Dialect) -> str:
        return dialect.folded(f"increase({{}}[{hour}]{offset})", metric, "_bucket")

    return {
        (LENGTH_SIGNALS[side], bool(offset)): grouped.either(partial(increase, metric, offset))
        for side, metric in METRICS.items()
        for offset in ("", f" offset {duration(WEEK_S)}")
    }


def hourly(scope: QueryScope, groups: Sequence[str]) -> dict[str, str]:
    """Queries for the hourly values of USUAL_SIGNALS per group. They are compared with past
    weeks."""
    grouped = replace(scope, window_s=HOUR_S, by=tuple(groups))
    return {key: grouped.query(expr) for key, expr in _catalogue(USUAL_SIGNALS).items()}


@cache
def images() -> str:
    """A query for the containers whose image is an engine's, from kube-state-metrics, which does
    not export arguments. `image` is the name that the container runtime reports; `image_spec`
    (newer versions) is the name in the pod's spec."""
    parts = "|".join(re.escape(part) for kind in (VLLM, *engine_kinds()) for part in kind.images)
    names = quoted(f".*({parts}).*")
    return (
        "count by (cluster, exported_namespace, exported_pod, exported_container, namespace, pod, "
        "container, image, image_spec) "
        f'(kube_pod_container_info{{image=~"{names}"}} '
        f'or kube_pod_container_info{{image_spec=~"{names}"}})'
    )


@of_scope
def gpu_queries(scope: QueryScope) -> Mapping[str, str]:
    """A query for each GPU signal, for the number of GPUs, and for the XIDs of each GPU.

    An XID counts for two windows, because the symptoms that it explains may end later than the XID.
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
    """A query for a DCGM series, restricted by the selector where DCGM names the workload
    (namespace, pod, container). Series without a workload are all kept.

    `of` is a format string for a function of the series.
    """
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
    return {key: SIGNAL_BY_KEY[key].expr for key in keys}


# --- The queries of one diagnosis: several in one request, with their errors. I/O edge ------------


KEY = "kneewatch_query"
"""The label that distinguishes the samples of several queries in one request."""

QUERIES_MAX, REQUEST_CHARACTERS_MAX = 6, 8000
"""Maximum number of queries and of characters in one request: servers limit its time and its length
(VictoriaMetrics: 16 KiB)."""

OF_THE_QUERY = frozenset({"query", "timeout", "too_large"})
"""Kinds of errors that a single query may have caused. Each query of the request is then sent
alone."""


class AnswerLog(Struct):
    """Collects the warnings of answers (they are partial), and the errors of failed queries by
    name. Thread-safe."""

    warnings: dict[str, None] = field(default_factory=dict[str, None])
    failed: dict[str, CollectError] = field(default_factory=dict[str, CollectError])
    _lock: Lock = field(default_factory=Lock)

    def fail(self, name: str, error: CollectError) -> None:
        """Add the error of a query."""
        with self._lock:
            self.failed[name] = error

    def warn(self, warnings: Iterable[str]) -> None:
        with self._lock:
            self.warnings.update(dict.fromkeys(warnings))

    def samples(self, key: str, answer: Answer | CollectError) -> Sequence[Sample]:
        """The samples of an answer; empty for an error."""
        if isinstance(answer, CollectError):
            self.fail(key, answer)
            return ()
        self.warn(answer.warnings)
        if not any(PROGRAM in sample.labels for sample in answer.samples):
            return answer.samples
        return [replace(each, labels=canonical_labels(each.labels)) for each in answer.samples]


class QueryMoment(Struct, frozen=True):
    """Sends queries for one moment and collects their errors and warnings."""

    source: PrometheusSource
    log: AnswerLog
    at_s: float

    def instants(self, queries: Mapping[str, str]) -> dict[str, Sequence[Sample]]:
        """The samples of each query; empty for an error, and for an empty query."""
        parts = {" ".join(part): part for part in _parts(queries)}
        requests = {name: _joined(part) for name, part in parts.items()}
        alone: dict[str, str] = {}
        by_key: dict[str, Sequence[Sample]] = {}
        for name, answer in self.source.instants(requests, self.at_s).items():
            part = parts[name]
            if not isinstance(answer, CollectError):
                by_key |= _by_query(part, self.log.samples(name, answer))
            elif answer.kind in OF_THE_QUERY and len(part) > 1:
                alone |= part
            else:
                by_key |= {key: self.log.samples(key, answer) for key in part}
        again = self.source.instants(alone, self.at_s)
        by_key |= {key: self.log.samples(key, answer) for key, answer in again.items()}
        return {key: by_key.get(key, ()) for key in queries}

    def tracks(self, key: str, selector: str) -> Sequence[Track]:
        """The raw samples of a range selector, with the times of their scrapes; empty for an
        error."""
        try:
            piece = self.source.samples(selector, self.at_s)
        except CollectError as exc:
            self.log.fail(key, exc)
            return ()
        self.log.warn(piece.warnings)
        return piece.tracks


KEPT_S = 60.0
"""Seconds for which answers about an hour are used, and for which an exporter counts as missing
whose metrics a metrics system does not have."""


class KeptAnswers:
    """Answers that change slowly, kept from moment to moment."""

    def __init__(self) -> None:
        self._kept: dict[
            tuple[str, ...], tuple[float, Collection[Key], Mapping[str, Sequence[Sample]]]
        ] = {}
        """When queries of these names were asked, the engines they are about, and the samples."""

    def instants(
        self, moment: QueryMoment, queries: Mapping[str, str], about: Collection[Key] = ()
    ) -> Mapping[str, Sequence[Sample]]:
        """The samples of each query: up to KEPT_S old if they are about an hour of the same engines
        (`about`), or if none of these queries had a sample."""
        names = tuple(queries)
        at_s, engines, answers = self._kept.get(names, (-inf, (), {}))
        holds = engines == about and (about or not any(answers.values()))
        if not (holds and 0 <= moment.at_s - at_s < KEPT_S):
            answers = moment.instants(queries)
            is_whole = not (moment.log.warnings or moment.log.failed)
            self._kept[names] = moment.at_s if is_whole else -inf, about, answers
        return answers


def _parts(queries: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yields groups of queries; each group is sent in one request."""
    part: dict[str, str] = {}
    for key, query in filter(itemgetter(1), queries.items()):
        length = sum(map(len, part.values())) + len(query)
        if part and (len(part) == QUERIES_MAX or length > REQUEST_CHARACTERS_MAX):
            yield part
            part = {}
        part[key] = query
    if part:
        yield part


def _joined(part: Mapping[str, str]) -> str:
    """One query that combines several. The label KEY of each sample contains the key of its
    query."""
    if len(part) == 1:
        return next(iter(part.values()))
    return " or ".join(
        f'label_replace({query}, "{KEY}", "{key}", "", "")' for key, query in part.items()
    )


def _by_query(part: Mapping[str, str], samples: Sequence[Sample]) -> Mapping[str, Sequence[Sample]]:
    """The samples of each query out of the answer to a combined query, without the label KEY."""
    if len(part) == 1:
        return dict.fromkeys(part, samples)
    by_key: dict[str, list[Sample]] = {key: [] for key in part}
    for sample in samples:
        labels = dict(sample.labels)
        by_key[labels.pop(KEY)].append(Sample(labels, sample.value))
    return by_key
