"""The replicas, engines, models and tiers of a fleet, and what Prometheus has about them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import PROGRAM
from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.values import Histogram
from kneewatch.rules.rule import DAY_S, HOUR_S, WEEK_S

if TYPE_CHECKING:
    from kneewatch.diagnose.causes.evidence import ReplacedProcess
    from kneewatch.diagnose.fleet.routers import RouterState
    from kneewatch.diagnose.verdict import Verdict


Labels = Mapping[str, str]
Key = tuple[str, ...]
"""The values of the labels that distinguish engines."""

Group = tuple[str, str, str]
"""Pool, tier and role."""

DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "replica": ("pod", "kubernetes_pod_name", "ReplicaId", "WorkerId", "instance"),
    "namespace": ("cluster", "namespace", "kubernetes_namespace", "application"),
    "pool": (),
    "model": ("model_name",),
    "tier": ("tier",),
    "role": ("role", "llm_d_ai_role"),
    "engine": ("engine",),
    "node": ("node", "Hostname", "hostname", "kubernetes_node"),
    "goal": ("kneewatch_goal",),
}
"""Labels that may contain each part of an engine's identity.

The first label that is present is used; for `namespace`, all of them. `pod` is Kubernetes'; the
kubernetes_* are those of older scrape configurations. `ReplicaId` and `WorkerId` are Ray Serve's.
`instance` is Prometheus's own. `llm_d_ai_role` is Prometheus's name for llm-d's pod label. `goal`
is THROUGHPUT for pools whose requests may queue.
"""

THROUGHPUT = "throughput"

GROUPS = ("pool", "namespace", "model", "tier", "role")
"""The parts that define a group of replicas."""

RECORDED = ("instance", "model_name", "engine", "pod", "namespace", "job", "cluster", "tier")
"""Labels that recording rules keep."""

ROLES = ("prefill", "decode")
"""Roles in a disaggregated fleet. Their replicas do different work and are never compared."""

NOT_IDENTITY = frozenset({"__name__", "le", "endpoint", "container", "prometheus"})


class LabelMap(Struct, frozen=True):
    """The meaning of labels: `names` maps a part of DEFAULTS to its labels. `throughput_pools` are
    names of pools, with * and ?, whose requests may queue by design."""

    names: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DEFAULTS)
    throughput_pools: tuple[str, ...] = ()

    def value_of(self, part: str, labels: Labels) -> str:
        """The value of a part; empty if no label contains it."""
        if part == "namespace":
            values = (labels.get(name, "") for name in self.names[part])
            return "/".join(dict.fromkeys(value for value in values if value))
        return next((labels[name] for name in self.names[part] if labels.get(name)), "")

    def grouping(self, series: Iterable[Labels]) -> tuple[str, ...]:
        """The labels that decide which pool, tier and role the series belong to."""
        names = [*(label for part in GROUPS for label in self.names[part]), PROGRAM]
        present = {name for labels in series for name in labels}
        return tuple(name for name in dict.fromkeys(names) if name in present)


def label_map(
    stated: Mapping[str, str], origin: str, throughput_pools: Sequence[str] = ()
) -> LabelMap:
    """The meaning of labels: the user's labels, {"replica": "pod_name"}, come before the default
    ones.

    Raises:
        SettingsError: a key is not a part of an engine's identity (see DEFAULTS).
    """
    names = dict(DEFAULTS)
    for part, label in stated.items():
        if part not in names:
            raise SettingsError(
                f"fleet.labels ({origin}): no part {part!r}; there are {', '.join(DEFAULTS)}"
            )
        first = [name.strip() for name in label.split(",") if name.strip()]
        names[part] = tuple(dict.fromkeys((*first, *names[part])))
    return LabelMap(names, tuple(throughput_pools))


class Member(Struct, frozen=True):
    """One engine of one replica.

    `tier` is empty if the kind of GPU is unknown; `role` is empty if it is not one of ROLES. If no
    label names the pool, it is made of `namespace` and `model`: replicas that get the same
    requests.
    """

    key: Key
    replica: str
    engine: str
    model: str
    pool: str
    namespace: str = ""
    tier: str = ""
    role: str = ""
    node: str = ""
    labels: Labels = field(default_factory=dict[str, str])
    throughput_only: bool = False
    """Whether its requests may queue by design."""

    @property
    def name(self) -> str:
        return f"{self.replica} engine {self.engine}" if self.engine else self.replica

    @property
    def group(self) -> Group:
        """Pool, tier and role: only engines of one group are compared and averaged."""
        return self.pool, self.tier, self.role


class Shape(Struct, frozen=True):
    """The engines of a fleet; `by` are the labels that distinguish them."""

    by: tuple[str, ...]
    members: tuple[Member, ...]

    def key(self, labels: Labels) -> Key:
        """The key of the engine that a series belongs to."""
        return tuple(labels.get(name, "") for name in self.by)


def shape_of(series: Iterable[Labels], names: LabelMap) -> Shape:
    """The shape of a fleet, from the series of one gauge (one series per engine)."""
    unique = list({_identity(labels): labels for labels in series}.values())
    by = distinguishing(unique)
    members = [_member(labels, by, names) for labels in unique]
    spaces: dict[str, set[str]] = {}
    for member in members:
        spaces.setdefault(member.replica, set()).add(member.namespace)
    several = {name for name, namespaces in spaces.items() if len(namespaces) > 1}
    members = [
        replace(m, replica=f"{m.namespace}/{m.replica}") if m.replica in several else m
        for m in members
    ]
    counts: dict[str, int] = {}
    for member in members:
        counts[member.replica] = counts.get(member.replica, 0) + 1
    single = [m if counts[m.replica] > 1 else replace(m, engine="") for m in members]
    return Shape(by, tuple(sorted(single, key=lambda m: (m.pool, m.tier, m.replica, m.engine))))


def distinguishing(series: Sequence[Labels]) -> tuple[str, ...]:
    """Labels that together identify every series; those that recording rules keep are preferred."""
    others = {name for labels in series for name in labels} - NOT_IDENTITY - set(RECORDED)
    by: list[str] = []
    apart = 1
    for name in (*RECORDED, *sorted(others)):
        if apart >= len(series) and by:
            break
        keys = {tuple(labels.get(label, "") for label in (*by, name)) for labels in series}
        if len(keys) > apart or not by:
            by.append(name)
            apart = len(keys)
    return tuple(by)


def of_process(by: Iterable[str]) -> tuple[str, ...]:
    """The labels in `by` that identify a process: its engines' own labels are left out, which its
    other series lack."""
    return tuple(label for label in by if label not in ("model_name", "engine"))


def _identity(labels: Labels) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, v) for k, v in labels.items() if k not in NOT_IDENTITY))


def _member(labels: Labels, by: tuple[str, ...], names: LabelMap) -> Member:
    namespace, model = names.value_of("namespace", labels), names.value_of("model", labels)
    pool = names.value_of("pool", labels) or "/".join(part for part in (namespace, model) if part)
    by_design = any(fnmatchcase(pool, pattern) for pattern in names.throughput_pools)
    return Member(
        key=tuple(labels.get(name, "") for name in by),
        replica=names.value_of("replica", labels) or "?",
        engine=names.value_of("engine", labels),
        model=model,
        namespace=namespace,
        pool=pool,
        tier=names.value_of("tier", labels),
        role=role if (role := names.value_of("role", labels)) in ROLES else "",
        node=names.value_of("node", labels),
        labels=labels,
        throughput_only=by_design or names.value_of("goal", labels) == THROUGHPUT,
    )


# --- A fleet as Prometheus reports it: now, and over the past week --------------------------------


STEP_S = 300.0
"""Step of range queries: as long as Prometheus's look-back for a value, so that no moment is
missed."""

SEEN_MIN = 0.98

PAST_HOURS_S = (900.0, 900.0 + HOUR_S, DAY_S, WEEK_S)
"""The hours from which usual values are computed, as seconds since each hour's end.

The newest minutes are left out: a change within them is not usual yet.
"""

HITS, QUERIES, TTFT = USUAL_SIGNALS = ("prefix_hit_ratio", "prefix_query_per_s", "ttft_p50_s")
"""Signals whose usual values are read."""

LOOKED_UP_TOKENS = 100_000.0
"""An hour's hit ratio counts if at least this many prompt tokens were looked up."""

Readings = Mapping[str, float]


class Peak(Struct, frozen=True):
    """The measured peak of a whole tier.

    - `requests`: the most requests that ran at one time. Times with a backlog are left out: as many
      run then as fit.
    - `t_s`: the time of the most requests.
    - `mean_requests`: the mean of running requests.
    - `span_s`: the seconds that were queried.
    - `seen_ratio`: the share of the queried steps that have a value and no backlog.
    """

    requests: float
    t_s: float = field(name="t")
    mean_requests: float
    span_s: float
    seen_ratio: float

    @property
    def weekly(self) -> bool:
        """Whether the peak covers a week almost without gaps; advice to remove replicas needs
        that."""
        return self.span_s >= WEEK_S and self.seen_ratio >= SEEN_MIN


def peak_of(points: Sequence[tuple[float, float]], *, span_s: float, steps: int) -> Peak | None:
    """The peak from points of (unix seconds, requests); None if no point has a value."""
    values = [(value, t_s) for t_s, value in points if isfinite(value)]
    if not values:
        return None
    most, t_s = max(values)
    mean = sum(value for value, _ in values) / len(values)
    return Peak(most, t_s, mean, span_s, min(1.0, len(values) / max(steps, 1)))


class Usual(Struct, frozen=True):
    """Usual values of the prefix caches of a group.

    Hit ratio, looked-up prompt tokens/s of all replicas together, and TTFT P50 (None if unknown).
    `expected`: the hit ratio is not the group's own, but the one that its user expects.
    """

    hit_ratio: float
    query_per_s: float
    ttft_p50_s: float | None
    expected: bool = False


def usual_of(hours: Mapping[float, Readings]) -> Usual | None:
    """The usual values of a group; None if no hour looked up enough tokens.

    `hours` has the values of past hours, by age in seconds. Each usual value is the median of the
    hours. The hit ratio is at most the best one at this time of day: a lower ratio at the same time
    of every day is usual.
    """
    busy = {
        age_s: values
        for age_s, values in hours.items()
        if values.get(QUERIES, 0.0) * HOUR_S >= LOOKED_UP_TOKENS and HITS in values
    }
    if not busy:
        return None
    hits = {age_s: values[HITS] for age_s, values in busy.items()}
    same_time = [ratio for age_s, ratio in hits.items() if age_s >= DAY_S]
    ttft_s = [values[TTFT] for values in busy.values() if TTFT in values]
    return Usual(
        min(median(hits.values()), max(same_time, default=1.0)),
        median(values[QUERIES] for values in busy.values()),
        median(ttft_s) if ttft_s else None,
    )


class Past(Struct, frozen=True):
    """Earlier values by group; `missing` says why some of them are unknown.

    `lengths` compares request lengths in tokens, by signal: (same hour a week ago, last hour).
    `recent` has the last hour's lengths, also if a week ago is unknown.
    """

    peaks: Mapping[Group, Peak] = field(default_factory=dict[Group, Peak])
    lengths: Mapping[Group, Mapping[str, tuple[Histogram, Histogram]]] = field(
        default_factory=dict[Group, Mapping[str, tuple[Histogram, Histogram]]]
    )
    missing: str = ""
    recent: Mapping[Group, Mapping[str, Histogram]] = field(
        default_factory=dict[Group, Mapping[str, Histogram]]
    )
    usual: Mapping[Group, Usual] = field(default_factory=dict[Group, Usual])

    def reuse_of(self, group: Group, expected: float | None) -> Usual | None:
        """A group's usual values, with the expected hit ratio if it never reached that."""
        usual = self.usual.get(group)
        if usual is None or expected is None or usual.hit_ratio >= expected:
            return usual
        return replace(usual, hit_ratio=expected, expected=True)


# --- A fleet at one moment ------------------------------------------------------------------------


class Why(Enum):
    """Why a replica that had series within the last hour does not serve now."""

    DOWN = "scrapes have failed for a minute and at least three times"
    FAILING = "scrapes began to fail"
    TERMINATING = "Kubernetes deletes its pod"
    LEFT = "it is no longer a target"


class Gone(Struct, frozen=True):
    """A replica that had series within the last hour and does not serve now.

    `seen_s` is the Unix time of its last series or of its first failed scrape; None if unknown.
    """

    replica: str
    pool: str
    why: Why
    seen_s: float | None = None

    @property
    def down(self) -> bool:
        """Whether the replica is down: its scrapes fail, and not because its pod is being
        deleted."""
        return self.why is Why.DOWN


class Loading(Struct, frozen=True):
    """A target that may serve `pool` but has not answered within the last hour.

    For example, a server that is loading its model. `since_s` is the Unix time of its first failed
    scrape in that hour. `patience_s` is how long it may take to answer.
    """

    replica: str
    pool: str
    since_s: float
    patience_s: float


class RestartedReplica(Struct, frozen=True):
    """A replica whose process was replaced within the last hour, oldest first."""

    replica: str
    pool: str
    processes: Sequence[ReplacedProcess]


class QueryLoad(Struct, frozen=True):
    """Load that the queries put on the metrics system.

    - `queries`: the number of queries.
    - `retried`: the number of queries that were sent again.
    - `seconds`: the total time of the queries.
    """

    queries: int = 0
    retried: int = 0
    seconds: float = 0.0


class Observed(Struct, frozen=True):
    """A fleet at one moment, by engine key.

    - `verdicts`: the newest verdict on each engine; absent if no page could be rebuilt.
    - `values`: signals that the pages do not have: of the last hour and of the process.
    - `gpus`: figures of the GPUs of an engine's replica.
    - `failed`: signals whose query failed, with the reason.
    - `skew_s`: seconds that the server's clock is ahead; None if that is within the measuring
      error.
    - `configs`: labels of cache_config_info.
    - `images`: container images, from kube-state-metrics.
    - `scrape_interval_s`: the longest time between scrapes of a pool; None if not measured.
    - `routers`: routers whose metrics are scraped, one per namespace.
    - `stopped`: engines that do not serve now and did within the last hour.
    - `restarted`: replicas, also those that do not answer now, whose process was replaced.
    - `scaled_to_zero`: pools without a running replica whose workload wants none, or wanted none
      after their last one had left. None if kube-state-metrics is not scraped, or if every pool has
      replicas.
    - `renamed`: pools without replicas whose workload serves another model now: {pool: pool now}.
    - `is_scraping`: targets have been scraped for some intervals, so a missing series means a
      missing replica.
    """

    t_s: float
    source: str
    window_s: float
    shape: Shape
    verdicts: Mapping[Key, Verdict] = field(default_factory=dict[Key, "Verdict"])
    values: Mapping[Key, Readings] = field(default_factory=dict[Key, Readings])
    gpus: Mapping[Key, Readings] = field(default_factory=dict[Key, Readings])
    configs: Mapping[Key, Labels] = field(default_factory=dict[Key, Labels])
    images: Mapping[Key, str] = field(default_factory=dict[Key, str])
    past: Past = field(default_factory=Past)
    gone: Sequence[Gone] = ()
    stopped: Sequence[Member] = ()
    loading: Sequence[Loading] = ()
    restarted: Sequence[RestartedReplica] = ()
    scaled_to_zero: frozenset[str] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    is_scraping: bool = True
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    warnings: Sequence[str] = ()
    skew_s: float | None = None
    load: QueryLoad = field(default_factory=QueryLoad)
    scrape_interval_s: float | None = None
    routers: Sequence[RouterState] = ()
