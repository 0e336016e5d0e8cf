"""Step 12 of a plan: what the fleet costs at its average utilization. Pure. Guide 9.1, 9.2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.diagnose.sizing.fleet.cost import (
    SECONDS_PER_HOUR,
    token_cost,
    utilization_trap,
    yearly_cost,
)
from kneewatch.diagnose.sizing.fleet.fleet import FleetSize
from kneewatch.diagnose.sizing.fleet.routing import saving_ratio
from kneewatch.diagnose.sizing.fleet.tiers import blended_utilization
from kneewatch.diagnose.sizing.plan.fleet import fleet_of
from kneewatch.diagnose.sizing.plan.model import PlanStep, Sized, Value, of_tier
from kneewatch.diagnose.sizing.plan.profile import WorkloadProfile
from kneewatch.diagnose.sizing.steps import Step, figure


def utilization_of(sized: Sized, fleet: FleetSize) -> float | None:
    """Average load over what the deployed fleet carries at the targets; stated ones win."""
    stated = sized.pool.profile.traffic.utilization_ratio
    if stated is not None:
        return stated
    average, usable = sized.pool.average_requests_per_s, sized.usable_requests_per_s
    if average is None or usable is None:
        return None
    return min(average / (fleet.deployed_instances * usable), 1.0)


@dataclass(frozen=True, slots=True)
class _Cost:
    """What one fleet costs; `utilization_ratio` None where no average is known."""

    gpus: int
    usd_per_hour: float
    usd_per_year: float
    utilization_ratio: float | None
    tokens_per_s: float
    usd_per_million_tokens: float | None
    steps: tuple[Step, ...]


def cost_step(
    profile: WorkloadProfile, sized: Sequence[Sized], *, single: Sized | None = None
) -> PlanStep:
    """Step 12: dollars a year, and per million output tokens at the average utilization.

    `single` is the fleet of one model that tiers are compared with; None where there is none.
    """
    several, output, notes = len(sized) > 1, dict[str, Value](), list[str]()
    found = [(one, _cost(one)) for one in sized]
    known = [(one, cost) for one, cost in found if cost is not None]
    complete = len(known) == len(sized)
    priced = [(one, cost) for one, cost in known if cost.usd_per_million_tokens is not None]
    for one, cost in known:
        prefix = f"{one.pool.name}." if several else ""
        output[f"{prefix}usd_per_year"] = cost.usd_per_year
        output[f"{prefix}utilization_ratio"] = cost.utilization_ratio
        output[f"{prefix}usd_per_million_output_tokens"] = cost.usd_per_million_tokens
    steps = [step for one, cost in known for step in of_tier(one.pool.name, cost.steps)]
    if several and complete:
        hourly = sum(cost.usd_per_hour for _, cost in known)
        tokens = sum(cost.tokens_per_s for _, cost in known) * SECONDS_PER_HOUR
        yearly = sum(cost.usd_per_year for _, cost in known)
        output["usd_per_year"] = yearly
        whole = len(priced) == len(sized)
        output["usd_per_million_output_tokens"] = hourly / tokens * 1e6 if whole else None
        notes.extend(_blend(priced))
        against = _against(single, yearly)
        output |= against.output
        steps.extend(against.steps)
    return PlanStep(
        number=12,
        title="Calculate the cost",
        decision=_decision(output, complete=complete),
        output=output,
        steps=tuple(steps),
        to_measure=("average utilization over a whole week",),
        notes=(*notes, *_unknown(profile, sized, complete=complete, priced=len(priced))),
    )


def _cost(sized: Sized) -> _Cost | None:
    """None where the fleet is not known."""
    fleet, price = fleet_of(sized), sized.pool.usd_per_gpu_hour
    if fleet is None or sized.usable_requests_per_s is None:
        return None
    year = yearly_cost(gpus=fleet.gpus, usd_per_gpu_hour=price)
    hourly, ratio = fleet.gpus * price, utilization_of(sized, fleet)
    if not ratio:
        return _Cost(fleet.gpus, hourly, year.usd_per_year, ratio, 0.0, None, year.steps)
    outputs = sized.pool.lengths.mean_output_tokens
    full = fleet.deployed_instances * sized.usable_requests_per_s * outputs
    cost = token_cost(
        gpus=fleet.gpus, usd_per_gpu_hour=price, tokens_per_s=full, utilization_ratio=ratio
    )
    trap = utilization_trap(gpus=fleet.gpus, usd_per_gpu_hour=price, utilization_ratio=ratio)
    return _Cost(
        fleet.gpus,
        hourly,
        year.usd_per_year,
        ratio,
        full * ratio,
        cost.usd_per_million_tokens,
        (*year.steps, _utilization_step(sized, fleet, ratio), *cost.steps, *trap.steps),
    )


def _utilization_step(sized: Sized, fleet: FleetSize, ratio: float) -> Step:
    average, usable = sized.pool.average_requests_per_s, sized.usable_requests_per_s
    if sized.pool.profile.traffic.utilization_ratio is not None or average is None:
        return Step("Utilization", "as stated", figure(ratio), f"{ratio:.1%}", "profile")
    return Step(
        title="Utilization",
        formula="average RPS / (instances x usable RPS)",
        values=f"{figure(average)} / ({fleet.deployed_instances} x {figure(usable or 0.0)})",
        result=f"{ratio:.1%}",
        source="guide 9.2",
    )


@dataclass(frozen=True, slots=True)
class _Against:
    """Tiers beside one fleet of the large model."""

    output: dict[str, Value]
    steps: tuple[Step, ...]


def _against(single: Sized | None, tiers_usd_per_year: float) -> _Against:
    whole = None if single is None else _cost(single)
    if whole is None or not whole.usd_per_year:
        return _Against({}, ())
    ratio = saving_ratio(blended_usd=tiers_usd_per_year, uniform_usd=whole.usd_per_year)
    step = Step(
        title="Saved by tiers",
        formula="1 - tiers / one fleet of the large model, a year",
        values=f"1 - {figure(tiers_usd_per_year)} / {figure(whole.usd_per_year)}",
        result=f"{ratio:.1%}",
        source="guide 1.5",
    )
    return _Against(
        {"single_fleet_usd_per_year": whole.usd_per_year, "saving_ratio": ratio}, (step,)
    )


def _blend(priced: Sequence[tuple[Sized, _Cost]]) -> list[str]:
    if len(priced) < 2:
        return []
    blend = blended_utilization(
        [(one.pool.name, cost.gpus, cost.utilization_ratio or 0.0) for one, cost in priced]
    )
    below = f": below 40 % {', '.join(blend.trapped)}" if blend.trapped else ""
    return [
        f"all GPUs together are at {blend.utilization_ratio:.0%}; watch each tier by itself{below}"
    ]


def _decision(output: dict[str, Value], *, complete: bool) -> str:
    if not complete:
        return "no cost: the fleet is not known"
    year, each = output["usd_per_year"], output.get("usd_per_million_output_tokens")
    yearly = f"{figure(float(year or 0.0))} USD a year"
    if each is None:
        return f"{yearly}; per token not known"
    return f"{yearly}, {figure(float(each))} USD per million output tokens"


def _unknown(
    profile: WorkloadProfile, sized: Sequence[Sized], *, complete: bool, priced: int
) -> list[str]:
    notes: list[str] = []
    if complete and priced < len(sized):
        notes.append("the average rate is not stated: cost per token is not known")
    if any(one.pool.deployment.usd_per_gpu_hour is None for one in sized):
        notes.append("the price is the catalogue's default: replace it by what you pay")
    if profile.traffic.growth_ratio:
        notes.append("the fleet is sized for the grown peak and costed at today's average")
    return notes
