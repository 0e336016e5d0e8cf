"""Which replicas, engines, models and tiers a fleet has, by the labels of its series. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kneewatch.collector.errors import SettingsError

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
"""The labels for each part: the first that is present counts (for `namespace` all of them).

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


@dataclass(frozen=True, slots=True)
class LabelMap:
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


@dataclass(frozen=True, slots=True)
class Member:
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
        """How reports call it."""
        return f"{self.replica} engine {self.engine}" if self.engine else self.replica

    @property
    def group(self) -> Group:
        """Pool, tier and role: only engines of one group are compared and averaged."""
        return self.pool, self.tier, self.role


@dataclass(frozen=True, slots=True)
class Shape:
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
