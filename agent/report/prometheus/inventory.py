"""Finds the engines in a metrics system, the tier of each engine, and the times when targets were
down. I/O edge."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.fleet.queries import MATCHER, PRESENCE, QueryScope
from kneewatch.agent.fleet.snapshot import with_gpus
from kneewatch.agent.report.history import ReportRequest, check_names, tier_name
from kneewatch.agent.report.prometheus import queries
from kneewatch.agent.report.prometheus.queries import Query, Ranges, RowKey, Steps
from kneewatch.agent.report.series import Floats, Truths
from kneewatch.collector.engines.engine_kind import PROGRAM, canonical_labels
from kneewatch.collector.errors import CollectError
from kneewatch.collector.prometheus.responses import Sample
from kneewatch.collector.signals.promql import any_of
from kneewatch.dashboards.prometheus.rule_group import POOL_LABELS
from kneewatch.diagnose.fleet.absence import is_down
from kneewatch.diagnose.fleet.inventory import Key, LabelMap, Labels, Member, Shape, shape_of
from kneewatch.rules.rule import DAY_S, HOUR_S

SCRAPES_COUNTED_S = 600.0
"""Seconds over which scrapes are counted. The time is short because during a rollout few pods live
for an hour."""

USUAL_S = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0)
NEAR = 0.1
"""A measured scrape interval is rounded to an interval in USUAL_S if they differ by at most this
share."""

CLOCKED = "sm_clock_mhz"
"""The GPU signal whose series have the GPU model as a label."""


class TierEngine(Struct, frozen=True):
    """An engine and its tier."""

    member: Member
    tier: str
    gpu: str

    @property
    def key(self) -> Key:
        """The engine's key in the fleet."""
        return self.member.key

    @property
    def target(self) -> str:
        """The engine's replica, which the report lists as the target."""
        return self.member.replica

    @property
    def engine(self) -> str:
        """The engine's number in its replica."""
        return self.member.engine or self.member.labels.get("engine", "0")


class Part(Struct, frozen=True):
    """A set of series that one query sums.

    The query takes all series that match `only` and groups them by the labels `by`. Each group
    belongs to one tier. `kept` matches the recorded sums of the same engines; None if recorded sums
    mix these engines with others.
    """

    name: str
    only: str
    by: tuple[str, ...]
    kept: str | None = None

    def key(self, labels: Labels) -> RowKey:
        """The key of the group to which series with these labels belong. A query sums the series of
        a group."""
        return self.name, tuple(labels.get(name, "") for name in self.by)


class ReportedFleet(Struct, frozen=True):
    """The engines of a report. `parts` are the sets of series that the server sums. `scrape_s` is
    the usual scrape interval in seconds."""

    shape: Shape
    asking: QueryScope
    members: tuple[TierEngine, ...]
    parts: tuple[Part, ...]
    scrape_s: float

    def group(self, engine: TierEngine) -> RowKey:
        """The key of the group to which an engine belongs. A query sums the engines of a group."""
        part = next((part for part in self.parts if part.name == engine.tier), self.parts[0])
        return part.key(engine.member.labels)

    def tiers(self) -> list[str]:
        return sorted({engine.tier for engine in self.members})

    def of(self, tier: str) -> list[TierEngine]:
        return [engine for engine in self.members if engine.tier == tier]


def fleet_engines(
    ranges: Ranges, request: ReportRequest, selector: str, names: LabelMap
) -> ReportedFleet:
    """The requested engines of both periods.

    Raises:
        CollectError: the server does not answer, or has no vLLM series.
        SettingsError: a requested target does not exist.
    """
    from_s = min(grid.from_s for grid in (request.grid, request.before) if grid is not None)
    asking = QueryScope(selector, request.window_s)
    series = _labels(ranges, asking, from_s, request.grid.to_s)
    if not series:
        matching = f" that match {selector}" if selector else ""
        raise CollectError(
            f"{ranges.source.url}: no series of vLLM servers{matching} in this period, nor of "
            f"other engines (…{PRESENCE})",
            kind="no_vllm",
            hint="check that it scrapes vLLM's /metrics, its retention, and --selector; "
            "Mimir and Cortex need a tenant: --header X-Scope-OrgID=TENANT",
        )
    shape = shape_of(series, names)
    asking = asking.for_engines(shape.by, series)
    shape, _, _ = with_gpus(shape, {CLOCKED: _gpus(ranges, from_s, request.grid.to_s)})
    everyone = _by_pool([_tier_engine(member, request) for member in shape.members])
    replicas = [engine.target for engine in everyone]
    existing = [*replicas, *(engine.member.name for engine in everyone)]
    check_names("target", request.targets, existing, "this period", replicas)
    tiers = [engine.tier for engine in everyone]
    existing = [*tiers, *(engine.member.tier for engine in everyone)]
    check_names("tier", request.tiers, existing, "this period", tiers)
    members = tuple(engine for engine in everyone if _asked_for(engine, request))
    return ReportedFleet(
        shape=shape,
        asking=asking,
        members=members,
        parts=_parts(everyone, members, names, asking),
        scrape_s=_scrape_s(ranges, asking, request.grid.from_s, request.grid.to_s),
    )


def _labels(ranges: Ranges, asking: QueryScope, from_s: float, to_s: float) -> list[Labels]:
    hours = _back_from(to_s, HOUR_S, to_s - from_s)
    query = Query(lambda range_s: queries.presence(asking, range_s), frozen, rows=1000)
    rows = ranges.steps({"presence": query}, hours)["presence"]
    if "presence" in ranges.problems.failed:
        raise ranges.problems.failed["presence"]
    return [canonical_labels(dict(key)) for key in rows]


def _gpus(ranges: Ranges, from_s: float, to_s: float) -> list[Sample]:
    """DCGM samples whose labels name the GPU models; one per day."""
    query = Query(lambda _: queries.gpu_models(HOUR_S), frozen, rows=1000)
    rows = ranges.steps({"gpus": query}, _back_from(to_s, DAY_S, to_s - from_s))["gpus"]
    return [Sample(dict(key), 0.0) for key in rows]


def _scrape_s(ranges: Ranges, asking: QueryScope, from_s: float, to_s: float) -> float:
    """The usual scrape interval in seconds, from the number of scrapes in SCRAPES_COUNTED_S."""
    length_s = min(SCRAPES_COUNTED_S, to_s - from_s)
    query = Query(
        lambda range_s: f"max({queries.scrapes(asking, range_s)})", lambda _: (), scraped=1.0
    )
    rows = ranges.steps({"scrapes": query}, _back_from(to_s, length_s, to_s - from_s))["scrapes"]
    most = max((float(np.nanmax(row)) for row in rows.values()), default=1.0)
    seen_s = length_s / max(most, 1.0)
    near = min(USUAL_S, key=lambda usual_s: abs(usual_s - seen_s))
    return near if abs(near - seen_s) <= NEAR * near else max(1.0, seen_s)


def _back_from(to_s: float, step_s: float, span_s: float) -> Steps:
    """Steps that end at `to_s` and cover at least the `span_s` seconds before it."""
    count = max(1, int(-(-span_s // step_s)))
    return Steps(to_s - (count - 1) * step_s, step_s, count)


def _tier_engine(member: Member, request: ReportRequest) -> TierEngine:
    card = request.stated(member.replica).server.gpu
    gpu = card.id if card else ""
    tier = tier_name(member.model, member.tier, gpu, member.labels.get(PROGRAM))
    return TierEngine(member, tier, gpu or member.tier)


def _by_pool(engines: Sequence[TierEngine]) -> list[TierEngine]:
    """Split each tier that several pools share into one tier per pool.

    The names of such tiers end with the pool's namespace, or with the pool itself if namespaces do
    not distinguish the pools.
    """
    pools: dict[str, dict[str, str]] = {}
    for engine in engines:
        member = engine.member
        pools.setdefault(engine.tier, {})[member.pool] = member.namespace
    names: dict[tuple[str, str], str] = {}
    for tier, namespaces in pools.items():
        named = len(set(namespaces.values())) == len(namespaces) and all(namespaces.values())
        for pool, namespace in namespaces.items():
            name = f"{tier} ({namespace if named else pool})" if len(namespaces) > 1 else tier
            names[tier, pool] = name
    return [replace(engine, tier=names[engine.tier, engine.member.pool]) for engine in engines]


def _asked_for(engine: TierEngine, request: ReportRequest) -> bool:
    if request.targets and not {engine.target, engine.member.name} & set(request.targets):
        return False
    return not request.tiers or bool({engine.tier, engine.member.tier} & set(request.tiers))


def _parts(
    everyone: Sequence[TierEngine],
    members: Sequence[TierEngine],
    names: LabelMap,
    asking: QueryScope,
) -> tuple[Part, ...]:
    """The sets of series that the server sums. There is one set for all engines if labels separate
    the tiers. Otherwise there is one set per tier or, if that is impossible too, one sum per
    engine."""
    tier_labels = names.grouping(engine.member.labels for engine in everyone)
    sums = {*tier_labels, *(label for label, _, _ in MATCHER.findall(asking.selector))} <= {
        *POOL_LABELS
    }
    if len(members) == len(everyone) and _apart(everyone, tier_labels):
        return (Part("", "", tier_labels, "" if sums else None),)
    parts: list[Part] = []
    for tier in dict.fromkeys(engine.tier for engine in members):
        own = [engine for engine in members if engine.tier == tier]
        only = _only(everyone, own, asking.by)
        if only is None:
            return (Part("", "", asking.by),)
        parts.append(Part(tier, only, (), _only(everyone, own, tier_labels) if sums else None))
    return tuple(parts) or (Part("", "", asking.by),)


def _only(
    everyone: Sequence[TierEngine], own: Sequence[TierEngine], names: Sequence[str]
) -> str | None:
    """Label matchers for the engines in `own`. None if the matchers would match other engines
    too."""
    values = {name: {engine.member.labels.get(name, "") for engine in own} for name in names}
    reached = [
        engine
        for engine in everyone
        if all(engine.member.labels.get(name, "") in values[name] for name in names)
    ]
    if len(reached) > len(own):
        return None
    return ",".join(any_of(name, sorted(values[name])) for name in names)


def _apart(members: Sequence[TierEngine], by: Sequence[str]) -> bool:
    """Whether the labels `by` separate the tiers: engines with equal values are always in the same
    tier."""
    tiers: dict[Key, set[str]] = {}
    for engine in members:
        key = tuple(engine.member.labels.get(name, "") for name in by)
        tiers.setdefault(key, set()).add(engine.tier)
    return all(len(tiers_of_key) == 1 for tiers_of_key in tiers.values())


def frozen(labels: Labels) -> RowKey:
    """All labels, as a hashable key."""
    return tuple(sorted(labels.items()))


LOADING_S = 1800.0
"""Seconds that a pod may take to load. Its failed scrapes count as an outage only after that."""


class TargetScrapes(Struct, frozen=True):
    """The scrapes of one target by step.

    `up` is the share of scrapes that succeeded (0-1; NaN while the target did not exist), `failed`
    the number that failed. `scrape_s` is the scrape interval in seconds. `deleted` has a value in
    the steps in which Kubernetes is deleting the pod; None if unknown. The shape
    of each array is (steps,).
    """

    up: Floats
    failed: Floats
    scrape_s: float
    deleted: Floats | None = None

    def lived_s(self, at: Steps) -> tuple[float, float]:
        """The Unix times between which a failed scrape of the target counts as an outage. A time
        without a limit is infinite.

        A good step is a step without failed scrapes. Failed scrapes before the first good step do
        not count if the target appeared in the period and the step came within LOADING_S: the
        target was loading. If a target that appeared in the period had no good step and failed for
        at most LOADING_S, none of its scrapes count, because it may have lived for less than one
        step.

        Failed scrapes after the last good step do not count if they are too few for fleet mode to
        call the target down. Otherwise they count until Kubernetes deletes the pod.
        """
        seen, good = np.flatnonzero(~np.isnan(self.up)), np.flatnonzero(self.up >= 1)
        born_s, gone_s = -np.inf, np.inf
        if len(good) == 0:
            failed_s = float(np.nansum(self.failed)) * self.scrape_s
            return (np.inf if 0 < seen[0] and failed_s <= LOADING_S else born_s), gone_s
        if 0 < seen[0] and (good[0] - seen[0]) * at.step_s <= LOADING_S:
            born_s = float(at.begins_s[good[0]])
        end = self._deleted_from(int(good[-1]), at)
        failed = round(float(np.nansum(self.failed[good[-1] + 1 : end])))
        if not is_down(failed, (failed - 1) * self.scrape_s):
            gone_s = float(at.begins_s[good[-1]]) + at.step_s
        elif end < at.count:
            gone_s = float(at.begins_s[end])
        return born_s, gone_s

    def down(self, at: Steps) -> Truths:
        """Mask of the steps with failed scrapes at a time when the target should have served.
        Shape: (steps,)."""
        born_s, gone_s = self.lived_s(at)
        return np.asarray((self.up < 1) & (at.begins_s >= born_s) & (at.begins_s < gone_s))

    def _deleted_from(self, step: int, at: Steps) -> int:
        """The first step, starting from `step`, in which Kubernetes is deleting the pod. The number
        of steps if it is not deleted."""
        if self.deleted is None:
            return at.count
        deleted = np.flatnonzero(~np.isnan(self.deleted[step:]))
        return step + int(deleted[0]) if len(deleted) else at.count
