"""Which engines a metrics system knew in a time, and of which tier each is. I/O edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kneewatch.agent.fleet.queries import MATCHER, PRESENCE, QueryScope
from kneewatch.agent.fleet.snapshot import with_gpus
from kneewatch.agent.report.inventory import UNNAMED, Wanted
from kneewatch.agent.report.prometheus import queries
from kneewatch.agent.report.prometheus.queries import Query, Ranges
from kneewatch.agent.report.prometheus.resolution import RowKey, Steps
from kneewatch.collector.errors import CollectError, SettingsError
from kneewatch.collector.prometheus.responses import Sample
from kneewatch.collector.signals.expr import any_of
from kneewatch.dashboards.prometheus.hourly_totals import NAMES
from kneewatch.diagnose.fleet.inventory import Key, LabelMap, Labels, Member, Shape, shape_of
from kneewatch.reports.weekly.hours import DAY_S, HOUR_S

USUAL_S = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0)
NEAR = 0.1
"""An hour may hold a scrape more or less: near a usual interval it is that."""

NAMED_MOST = 20
CLOCKED = "sm_clock_mhz"
"""The GPU figure whose series name the GPUs' model."""


@dataclass(frozen=True, slots=True)
class Rolled:
    """An engine and the tier that it is of."""

    member: Member
    tier: str
    gpu: str

    @property
    def key(self) -> Key:
        """What tells it apart."""
        return self.member.key

    @property
    def target(self) -> str:
        """Its replica, as reports call a target."""
        return self.member.replica

    @property
    def engine(self) -> str:
        """Its number in the replica."""
        return self.member.engine or self.member.labels.get("engine", "0")


@dataclass(frozen=True, slots=True)
class Part:
    """Series that one query adds up: those with some labels (`only`: matchers), `by` labels whose
    values are of one tier each. `kept` are matchers of the sums that recording rules keep of the
    same engines; None: they cannot tell them from others."""

    name: str
    only: str
    by: tuple[str, ...]
    kept: str | None = None

    def key(self, labels: Labels) -> RowKey:
        """What a sum is called."""
        return self.name, tuple(labels.get(name, "") for name in self.by)


@dataclass(frozen=True, slots=True)
class Roll:
    """The engines. `parts` are how they are added up on the server, `part_of` says by which one an
    engine is. `scrape_s` is how often most engines are scraped."""

    shape: Shape
    asking: QueryScope
    members: tuple[Rolled, ...]
    parts: tuple[Part, ...]
    scrape_s: float

    def group(self, engine: Rolled) -> RowKey:
        """What the sum is called that an engine is in."""
        part = next((part for part in self.parts if part.name == engine.tier), self.parts[0])
        return part.key(engine.member.labels)

    def tiers(self) -> list[str]:
        """The tiers' ids, in order."""
        return sorted({engine.tier for engine in self.members})

    def of(self, tier: str) -> list[Rolled]:
        """A tier's engines."""
        return [engine for engine in self.members if engine.tier == tier]


def roll(ranges: Ranges, request: Wanted, selector: str, names: LabelMap) -> Roll:
    """The engines of both periods that are asked for.

    Raises:
        CollectError: the server does not answer, or knows no vLLM server.
        SettingsError: a target that is asked for is not there.
    """
    from_s = min(grid.from_s for grid in (request.grid, request.before) if grid is not None)
    asking = QueryScope(selector, request.window_s)
    series = _labels(ranges, asking, from_s, request.grid.to_s)
    if not series:
        matching = f" that match {selector}" if selector else ""
        raise CollectError(
            f"{ranges.source.url}: it had no series of vLLM servers{matching} in this time "
            f"(…{PRESENCE})",
            kind="no_vllm",
            hint="does it scrape vLLM's /metrics, and keep them for so long? check --selector; "
            "Mimir and Cortex want a tenant: --header X-Scope-OrgID=TENANT",
        )
    shape = shape_of(series, names)
    asking = asking.for_engines(shape.by, series)
    shape, _ = with_gpus(shape, {CLOCKED: _gpus(ranges, from_s, request.grid.to_s)})
    everyone = [_rolled(member, request) for member in shape.members]
    _check(everyone, request)
    members = tuple(engine for engine in everyone if _asked_for(engine, request))
    return Roll(
        shape=shape,
        asking=asking,
        members=members,
        parts=_parts(everyone, members, names, asking),
        scrape_s=_scrape_s(ranges, asking, request.grid.from_s, request.grid.to_s),
    )


def _check(everyone: Sequence[Rolled], request: Wanted) -> None:
    names = {name for engine in everyone for name in (engine.target, engine.member.name)}
    for target in request.targets:
        if target not in names:
            existing = ", ".join(sorted(engine.target for engine in everyone)[:NAMED_MOST])
            raise SettingsError(
                f"--target {target}: no such replica in this time; there are {existing}"
            )


def _labels(ranges: Ranges, asking: QueryScope, from_s: float, to_s: float) -> list[Labels]:
    hours = _back_from(to_s, HOUR_S, to_s - from_s)
    query = Query(lambda range_s: queries.presence(asking, range_s), frozen, rows=1000)
    rows = ranges.steps({"presence": query}, hours)["presence"]
    if "presence" in ranges.told.failed:
        raise ranges.told.failed["presence"]
    return [dict(key) for key in rows]


def _gpus(ranges: Ranges, from_s: float, to_s: float) -> list[Sample]:
    """DCGM's series of once a day."""
    query = Query(lambda _: queries.gpu_models(HOUR_S), frozen, rows=1000)
    rows = ranges.steps({"gpus": query}, _back_from(to_s, DAY_S, to_s - from_s))["gpus"]
    return [Sample(dict(key), 0.0) for key in rows]


def _scrape_s(ranges: Ranges, asking: QueryScope, from_s: float, to_s: float) -> float:
    """The usual distance of two scrapes, by how many there are in an hour."""
    length_s = min(HOUR_S, to_s - from_s)
    query = Query(
        lambda range_s: f"max({queries.scrapes(asking, range_s)})", lambda _: (), scraped=1.0
    )
    rows = ranges.steps({"scrapes": query}, _back_from(to_s, length_s, to_s - from_s))["scrapes"]
    most = max((float(np.nanmax(row)) for row in rows.values()), default=1.0)
    seen_s = length_s / max(most, 1.0)
    near = min(USUAL_S, key=lambda usual_s: abs(usual_s - seen_s))
    return near if abs(near - seen_s) <= NEAR * near else max(1.0, seen_s)


def _back_from(to_s: float, step_s: float, span_s: float) -> Steps:
    """Steps that end with a time and reach over a span at least."""
    count = max(1, int(-(-span_s // step_s)))
    return Steps(to_s - (count - 1) * step_s, step_s, count)


def _rolled(member: Member, request: Wanted) -> Rolled:
    model, card = member.model or UNNAMED, request.stated(member.replica).stated.gpu
    if member.tier:
        return Rolled(member, f"{model} on {member.tier}", card.id if card else member.tier)
    return Rolled(member, f"{model}@{card.id}" if card else model, card.id if card else "")


def _asked_for(engine: Rolled, request: Wanted) -> bool:
    if request.targets and not {engine.target, engine.member.name} & set(request.targets):
        return False
    return not request.tiers or bool({engine.tier, engine.member.tier} & set(request.tiers))


def _parts(
    everyone: Sequence[Rolled], members: Sequence[Rolled], names: LabelMap, asking: QueryScope
) -> tuple[Part, ...]:
    """How engines are added up: by the labels that tell tiers apart; else tier by tier, by the
    labels of its engines; else one by one."""
    telling = names.grouping(engine.member.labels for engine in everyone)
    sums = {*telling, *(label for label, _, _ in MATCHER.findall(asking.selector))} <= {*NAMES}
    if len(members) == len(everyone) and _apart(everyone, telling):
        return (Part("", "", telling, "" if sums else None),)
    parts: list[Part] = []
    for tier in dict.fromkeys(engine.tier for engine in members):
        own = [engine for engine in members if engine.tier == tier]
        only = _only(everyone, own, asking.by)
        if only is None:
            return (Part("", "", asking.by),)
        parts.append(Part(tier, only, (), _only(everyone, own, telling) if sums else None))
    return tuple(parts) or (Part("", "", asking.by),)


def _only(everyone: Sequence[Rolled], own: Sequence[Rolled], names: Sequence[str]) -> str | None:
    """Matchers by some labels of some engines; None where they would reach others too."""
    values = {name: {engine.member.labels.get(name, "") for engine in own} for name in names}
    reached = [
        engine
        for engine in everyone
        if all(engine.member.labels.get(name, "") in values[name] for name in names)
    ]
    if len(reached) > len(own):
        return None
    return ",".join(any_of(name, sorted(values[name])) for name in names)


def _apart(members: Sequence[Rolled], by: Sequence[str]) -> bool:
    """Whether each value of some labels is of one tier only."""
    tiers: dict[Key, set[str]] = {}
    for engine in members:
        key = tuple(engine.member.labels.get(name, "") for name in by)
        tiers.setdefault(key, set()).add(engine.tier)
    return all(len(tiers_of_key) == 1 for tiers_of_key in tiers.values())


def frozen(labels: Labels) -> RowKey:
    """All labels, as a key."""
    return tuple(sorted(labels.items()))
