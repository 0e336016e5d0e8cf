"""The replicas, engines, models and tiers of a fleet, and what Prometheus reports of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.gpu import GpuState
from kneewatch.diagnose.learned.length_drift import Buckets
from kneewatch.rules.rule import Severity

if TYPE_CHECKING:
    from kneewatch.diagnose.fleet.routers import RouterState


Labels = Mapping[str, str]
Key = tuple[str, ...]
"""The values of the labels that tell engines apart."""

Group = tuple[str, str, str]
"""Pool, tier and role."""

DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "replica": ("pod", "ReplicaId", "WorkerId", "instance"),
    "namespace": ("cluster", "namespace", "application"),
    "pool": (),
    "model": ("model_name",),
    "tier": ("tier",),
    "role": ("role", "llm_d_ai_role"),
    "engine": ("engine",),
    "node": ("node", "Hostname", "hostname", "kubernetes_node"),
}
"""The labels that may hold each part of an engine's identity: the first that is present counts (for
`namespace` all of them).

`pod` is Kubernetes', `ReplicaId` and `WorkerId` are Ray Serve's, `instance` is Prometheus's own,
`llm_d_ai_role` what Prometheus makes of llm-d's pod label.
"""

GROUPS = ("pool", "namespace", "model", "tier", "role")
"""The parts that make a group of replicas."""

RECORDED = ("instance", "model_name", "engine", "pod", "namespace", "job", "cluster", "tier")
"""Labels that the recording rules keep."""

ROLES = ("prefill", "decode")
"""Pools of a disaggregated fleet: their replicas do different work and are never compared."""

NOT_IDENTITY = frozenset({"__name__", "le", "endpoint", "container", "prometheus"})


class LabelMap(Struct, frozen=True):
    """The meaning of labels; `names` maps a part of DEFAULTS to its labels."""

    names: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DEFAULTS)

    def value_of(self, part: str, labels: Labels) -> str:
        """The value of a part; empty where no label gives it."""
        if part == "namespace":
            return "/".join(value for name in self.names[part] if (value := labels.get(name)))
        return next((labels[name] for name in self.names[part] if labels.get(name)), "")

    def grouping(self, series: Iterable[Labels]) -> tuple[str, ...]:
        """The labels of series that decide which pool, tier and role they belong to."""
        names = [label for part in GROUPS for label in self.names[part]]
        present = {name for labels in series for name in labels}
        return tuple(name for name in dict.fromkeys(names) if name in present)


def label_map(stated: Mapping[str, str], origin: str) -> LabelMap:
    """The defaults with the user's labels in their place: {"replica": "pod_name"}.

    Raises:
        SettingsError: there is no such part.
    """
    names = dict(DEFAULTS)
    for part, label in stated.items():
        if part not in names:
            raise SettingsError(
                f"fleet.labels ({origin}): no part {part!r}; there are {', '.join(DEFAULTS)}"
            )
        names[part] = tuple(name.strip() for name in label.split(",") if name.strip())
    return LabelMap(names)


class Member(Struct, frozen=True):
    """One engine of one replica. `tier` is empty where its kind of GPU is unknown, `role` where it
    is not one of ROLES.

    `namespace` and `model` make its pool, where no label names one: replicas that take the same
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

    @property
    def name(self) -> str:
        """The engine's name in reports."""
        return f"{self.replica} engine {self.engine}" if self.engine else self.replica

    @property
    def group(self) -> Group:
        """Pool, tier and role: only engines of one group are compared and averaged."""
        return self.pool, self.tier, self.role


class Shape(Struct, frozen=True):
    """The engines of a fleet, and the labels `by` that tell them apart."""

    by: tuple[str, ...]
    members: tuple[Member, ...]

    @property
    def recorded(self) -> bool:
        """Whether the labels that recording rules keep are enough."""
        return set(self.by) <= set(RECORDED)

    def key(self, labels: Labels) -> Key:
        """The key of a series."""
        return tuple(labels.get(name, "") for name in self.by)


def shape_of(series: Iterable[Labels], names: LabelMap) -> Shape:
    """The shape of a fleet, from one gauge's series (one per engine)."""
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
    """Labels that together identify every series, preferring those that recording rules keep."""
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


def _identity(labels: Labels) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, v) for k, v in labels.items() if k not in NOT_IDENTITY))


def _member(labels: Labels, by: tuple[str, ...], names: LabelMap) -> Member:
    namespace, model = names.value_of("namespace", labels), names.value_of("model", labels)
    return Member(
        key=tuple(labels.get(name, "") for name in by),
        replica=names.value_of("replica", labels) or "?",
        engine=names.value_of("engine", labels),
        model=model,
        namespace=namespace,
        pool=names.value_of("pool", labels)
        or "/".join(part for part in (namespace, model) if part),
        tier=names.value_of("tier", labels),
        role=role if (role := names.value_of("role", labels)) in ROLES else "",
        node=names.value_of("node", labels),
        labels=labels,
    )


# --- A fleet as Prometheus reports it: now, and over the past week --------------------------------


STEP_S = 300.0
"""Step of range queries: Prometheus' look-back for a value, so that no moment is left out."""

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
WEEK_S = 7 * DAY_S
SEEN_MIN = 0.95

PAST_HOURS_S = (900.0, 900.0 + HOUR_S, DAY_S, WEEK_S)
"""Ages of the hours from which usual values are taken, in seconds since their ends. The newest
minutes are left out: a change within them is not usual yet."""

HITS, QUERIES, TTFT = USUAL_SIGNALS = ("prefix_hit_ratio", "prefix_query_per_s", "ttft_p50_s")
"""Signals whose usual values are read."""

LOOKED_UP_TOKENS = 100_000.0
"""Least prompt tokens looked up in an hour whose hit ratio counts."""

Values = Mapping[str, float]


class Peak(Struct, frozen=True):
    """Requests that ran on all of a tier: the most at one moment `t_s`, and the mean.

    `span_s` is the time that was queried, `seen_ratio` the share of its steps with a value.
    """

    requests: float
    t_s: float
    mean_requests: float
    span_s: float
    seen_ratio: float

    @property
    def weekly(self) -> bool:
        """Whether it covers a week almost without gaps, as advice to remove replicas needs."""
        return self.span_s >= WEEK_S and self.seen_ratio >= SEEN_MIN


def peak_of(points: Sequence[tuple[float, float]], *, span_s: float, steps: int) -> Peak | None:
    """The peak of (unix seconds, requests); None where no point has a value."""
    values = [(value, t_s) for t_s, value in points if isfinite(value)]
    if not values:
        return None
    most, t_s = max(values)
    mean = sum(value for value, _ in values) / len(values)
    return Peak(most, t_s, mean, span_s, min(1.0, len(values) / max(steps, 1)))


class Usual(Struct, frozen=True):
    """What the prefix caches of a group usually reach: hit ratio, looked-up prompt tokens per
    second of all replicas together, and TTFT P50, None where it is unknown."""

    hit_ratio: float
    query_per_s: float
    ttft_p50_s: float | None


def usual_of(hours: Mapping[float, Values]) -> Usual | None:
    """The usual values of a group, from the values of past hours by their age in seconds; None if
    no hour looked up enough tokens.

    Each is the median of the hours. The hit ratio is at most the best one at this time of day: a
    lower ratio at the same time of every day is usual.
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
    """The past by group; `missing` is the reason where some of it is unknown.

    `lengths` are the tokens of the last hour's requests and of the same hour a week ago, by
    signal: (before, now). `recent` are those of the last hour, also where no week ago is known.
    """

    peaks: Mapping[Group, Peak] = field(default_factory=dict[Group, Peak])
    lengths: Mapping[Group, Mapping[str, tuple[Buckets, Buckets]]] = field(
        default_factory=dict[Group, Mapping[str, tuple[Buckets, Buckets]]]
    )
    missing: str = ""
    recent: Mapping[Group, Mapping[str, Buckets]] = field(
        default_factory=dict[Group, Mapping[str, Buckets]]
    )
    usual: Mapping[Group, Usual] = field(default_factory=dict[Group, Usual])


# --- A fleet at one moment ------------------------------------------------------------------------


class Why(Enum):
    """Why a replica that had series within the last hour does not serve now."""

    DOWN = "scrapes have failed for a minute and at least three times"
    FAILING = "scrapes began to fail"
    TERMINATING = "Kubernetes deletes its pod"
    LEFT = "it is no longer a target"


class Gone(Struct, frozen=True):
    """A replica that had series within the last hour and does not serve now. `seen_s` is the Unix
    time of its last series, None where that is unknown."""

    replica: str
    pool: str
    why: Why
    seen_s: float | None = None

    @property
    def down(self) -> bool:
        """Whether it is a target whose scrapes have failed for a while, and not because its pod is
        being deleted."""
        return self.why is Why.DOWN


class Loading(Struct, frozen=True):
    """A target that has not answered in the last hour and may serve `pool`, such as a server that
    loads its model.

    `since_s` is the Unix time of its first failed scrape in that hour. `patience_s` is how long it
    may take to answer.
    """

    replica: str
    pool: str
    since_s: float
    patience_s: float


class Load(Struct, frozen=True):
    """Load on the metrics system: queries, retries and their total time in seconds."""

    queries: int = 0
    retried: int = 0
    seconds: float = 0.0


class Observed(Struct, frozen=True):
    """A fleet at one moment, by engine key.

    `values` are signals, `gpus` the figures of the GPUs that an engine's replica has, `faulty_gpus`
    those of its GPUs that report an XID (of its node's, where DCGM names no pod). `recorded`
    are signals that recording rules gave, `raw` those computed from raw series, `failed` those
    whose query failed, with the reason. `skew_s` is how far the server's clock is ahead,
    None where that is within what measuring it can tell. `configs` are the labels of
    cache_config_info, `images` those of the containers by kube-state-metrics, `alerts` the
    severities of rules whose recorded alerts fire, by rule id.
    `streaks_s` is for how long at least named conditions have held, `scrape_interval_s` the
    longest time between scrapes of a pool, None where it could not be measured.

    `routers` are those whose metrics are scraped, one per namespace.

    `scaled_to_zero` are the pools without a running replica whose workload wanted none within the
    last minutes; None where no kube-state-metrics is scraped, or every pool has replicas.
    `renamed` are pools without one whose workload serves another model now: {pool: pool now}.
    `is_scraping`: targets have been scraped for some intervals, so that a missing series means a
    missing replica.
    """

    t_s: float
    source: str
    window_s: float
    shape: Shape
    values: Mapping[Key, Values]
    gpus: Mapping[Key, Values] = field(default_factory=dict[Key, Values])
    faulty_gpus: Mapping[Key, Sequence[GpuState]] = field(
        default_factory=dict[Key, Sequence[GpuState]]
    )
    configs: Mapping[Key, Labels] = field(default_factory=dict[Key, Labels])
    images: Mapping[Key, str] = field(default_factory=dict[Key, str])
    alerts: Mapping[Key, Mapping[str, Severity]] = field(
        default_factory=dict[Key, Mapping[str, Severity]]
    )
    past: Past = field(default_factory=Past)
    gone: Sequence[Gone] = ()
    loading: Sequence[Loading] = ()
    scaled_to_zero: frozenset[str] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    is_scraping: bool = True
    recorded: Sequence[str] = ()
    raw: Sequence[str] = ()
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    warnings: Sequence[str] = ()
    skew_s: float | None = None
    load: Load = field(default_factory=Load)
    streaks_s: Mapping[Key, Mapping[str, float]] = field(
        default_factory=dict[Key, Mapping[str, float]]
    )
    scrape_interval_s: float | None = None
    routers: Sequence[RouterState] = ()
