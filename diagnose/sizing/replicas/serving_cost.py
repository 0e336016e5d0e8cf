"""What replicas cost: per million tokens, per year, idle, and by tensor-parallel degree. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.diagnose.catalogue.inputs import not_negative, positive, within
from kneewatch.diagnose.sizing.arithmetic import Step, figure
from kneewatch.diagnose.sizing.benchmark.tensor_parallel import (
    Degree,
    Sweep,
    Unit,
    compared,
    degrees_of,
)
from kneewatch.diagnose.sizing.replicas.tiers import TRAP_RATIO

HOURS_PER_YEAR = 8760
"""365 days; GPUs are paid around the clock."""

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class TokenCost:
    """What tokens cost at a utilization; `tokens_per_hour` are those really made."""

    usd_per_hour: float
    tokens_per_hour: float
    usd_per_million_tokens: float
    steps: tuple[Step, ...]


def _share(name: str, value: float) -> None:
    within(name, value, low=0, high=1)
    positive(name, value)


def usd_per_hour(*, gpus: float, usd_per_gpu_hour: float) -> float:
    """Dollars per hour of a fleet.

    Raises:
        SizingError: a number is not positive, or negative.
    """
    positive("gpus", gpus)
    not_negative("usd_per_gpu_hour", usd_per_gpu_hour)
    return gpus * usd_per_gpu_hour


def token_cost(
    *, gpus: float, usd_per_gpu_hour: float, tokens_per_s: float, utilization_ratio: float = 1.0
) -> TokenCost:
    """Dollars per million tokens of a fleet.

    `tokens_per_s` is what the whole fleet makes at full load, of which `utilization_ratio` (0..1)
    is used on average. With tokens that were really made, the ratio is 1: they hold it already.

    Raises:
        SizingError: a number is not positive, or the ratio outside 0..1.
    Source: guide 9.2, 9.1 step 12.
    """
    hourly = usd_per_hour(gpus=gpus, usd_per_gpu_hour=usd_per_gpu_hour)
    positive("tokens_per_s", tokens_per_s)
    _share("utilization_ratio", utilization_ratio)
    tokens = tokens_per_s * SECONDS_PER_HOUR * utilization_ratio
    cost = hourly / tokens * 1e6
    steps = (
        Step(
            title="These GPUs per hour",
            formula="GPUs x USD per GPU-hour",
            values=f"{figure(gpus)} x {figure(usd_per_gpu_hour)}",
            result=f"{figure(hourly)} USD/h",
            source="guide 9.2",
        ),
        Step(
            title="Cost per million tokens",
            formula="USD per hour / (tokens/s x 3600 x utilization) x 1e6",
            values=f"{figure(hourly)} / ({figure(tokens_per_s)} x 3,600 x "
            f"{figure(utilization_ratio)}) x 1e6",
            result=f"{figure(cost)} USD",
            source="guide 9.2",
        ),
    )
    return TokenCost(hourly, tokens, cost, steps)


@dataclass(frozen=True, slots=True)
class YearlyCost:
    """Dollars per year of a fleet that never stops."""

    usd_per_year: float
    steps: tuple[Step, ...]


def yearly_cost(
    *, gpus: float, usd_per_gpu_hour: float, hours_per_year: float = HOURS_PER_YEAR
) -> YearlyCost:
    """Dollars per year: GPUs x price x hours (8,760 when nothing is switched off).

    Raises:
        SizingError: a number is not positive, or more hours than a year has.
    Source: guide 9.1 step 12.
    """
    hourly = usd_per_hour(gpus=gpus, usd_per_gpu_hour=usd_per_gpu_hour)
    within("hours_per_year", hours_per_year, low=0, high=8784)
    yearly = hourly * hours_per_year
    step = Step(
        title="Cost per year",
        formula="GPUs x USD per GPU-hour x hours",
        values=f"{figure(gpus)} x {figure(usd_per_gpu_hour)} x {figure(hours_per_year)}",
        result=f"{figure(yearly)} USD",
        source="guide 9.1 step 12",
    )
    return YearlyCost(yearly, (step,))


@dataclass(frozen=True, slots=True)
class UtilizationTrap:
    """What idle GPUs cost.

    Cost per token against a full fleet (`multiple_of_full`) and against the target
    (`multiple_of_target`); dollars per year that no token came from, and those that the same work
    at the target would not cost. `trapped`: below the guide's 40 %.
    """

    multiple_of_full: float
    multiple_of_target: float
    idle_usd_per_year: float
    recoverable_usd_per_year: float
    trapped: bool
    steps: tuple[Step, ...]


def utilization_trap(
    *,
    gpus: float,
    usd_per_gpu_hour: float,
    utilization_ratio: float,
    target_ratio: float = 0.7,
) -> UtilizationTrap:
    """The utilization trap in money, for a fleet's average utilization (0..1) and a target.

    The target defaults to the middle of the guide's 60-80 %. Above it nothing is recoverable.

    Raises:
        SizingError: a number is not positive, or a ratio outside 0..1.
    Source: guide 9.2, 9.3.
    """
    _share("utilization_ratio", utilization_ratio)
    _share("target_ratio", target_ratio)
    yearly = yearly_cost(gpus=gpus, usd_per_gpu_hour=usd_per_gpu_hour).usd_per_year
    idle = yearly * (1 - utilization_ratio)
    recoverable = yearly * max(0.0, 1 - utilization_ratio / target_ratio)
    multiple = 1 / utilization_ratio
    steps = (
        Step(
            title="Cost per token against a full fleet",
            formula="1 / utilization",
            values=f"1 / {figure(utilization_ratio)}",
            result=f"{figure(multiple)} times",
            source="guide 9.2",
        ),
        Step(
            title="Paid for idle GPUs per year",
            formula="USD per year x (1 - utilization)",
            values=f"{figure(yearly)} x (1 - {figure(utilization_ratio)})",
            result=f"{figure(idle)} USD",
            source="guide 9.2",
        ),
        Step(
            title=f"Saved per year by the same work at {target_ratio:.0%}",
            formula="USD per year x (1 - utilization / target)",
            values=f"{figure(yearly)} x (1 - {figure(utilization_ratio)} / {figure(target_ratio)})",
            result=f"{figure(recoverable)} USD",
            source="guide 9.2",
        ),
    )
    trapped = utilization_ratio < TRAP_RATIO
    return UtilizationTrap(
        multiple, target_ratio / utilization_ratio, idle, recoverable, trapped, steps
    )


@dataclass(frozen=True, slots=True)
class Saving:
    """A change in dollars per year; negative where it costs more. `over_years_usd` adds them up."""

    usd_per_year: float
    ratio: float
    over_years_usd: float
    steps: tuple[Step, ...]


def saving(*, before_usd_per_year: float, after_usd_per_year: float, years: float = 1.0) -> Saving:
    """What a change saves, undiscounted over `years` (the guide's hardware lasts 3-4).

    Raises:
        SizingError: the cost before is not positive, the cost after negative, or no years.
    Source: guide, preface (errors last a depreciation cycle) and 9.2.
    """
    positive("before_usd_per_year", before_usd_per_year)
    not_negative("after_usd_per_year", after_usd_per_year)
    positive("years", years)
    yearly = before_usd_per_year - after_usd_per_year
    step = Step(
        title="Saving per year",
        formula="before - after",
        values=f"{figure(before_usd_per_year)} - {figure(after_usd_per_year)}",
        result=f"{figure(yearly)} USD ({yearly / before_usd_per_year:.1%})",
        source="guide 9.2",
    )
    return Saving(yearly, yearly / before_usd_per_year, yearly * years, (step,))


# --- What levers on a bill are worth: idle hours, standby, shorter prompts, other GPUs. Pure ------
#
# Guide 9.2. Routing between models is in `routing`.


def idle_usd_per_year(
    *, gpus: float, usd_per_gpu_hour: float, idle_hours_per_day: float, days: float = 365
) -> float:
    """Dollars per year for hours in which nothing is served, such as nights.

    Raises:
        SizingError: a number is not positive, or more than 24 hours or 366 days.
    Source: guide 9.2 (aggressive autoscaling, offline batch fill).
    """
    within("idle_hours_per_day", idle_hours_per_day, low=0, high=24)
    within("days", days, low=0, high=366)
    return usd_per_hour(gpus=gpus, usd_per_gpu_hour=usd_per_gpu_hour) * idle_hours_per_day * days


# --- What each measured tensor-parallel degree gives a GPU and what its tokens cost. Pure ---------
#
# Source: guide 8.4 (requests per second and GPU), 9.1 step 12.


@dataclass(frozen=True, slots=True)
class Scaled:
    """A degree beside the others. `efficiency_ratio` is its throughput a GPU over that of the
    smallest degree that keeps the targets; None where it keeps none. `usd_per_million_tokens` is
    None also where no price is known or the sweeps do not count tokens."""

    degree: Degree
    efficiency_ratio: float | None
    usd_per_million_tokens: float | None


@dataclass(frozen=True, slots=True)
class Scaling:
    """All measured degrees; `cheapest` is the one that gives most a GPU within the targets, None
    where none keeps them. `notes` say what cannot be compared, and what a wide split loses."""

    unit: Unit
    rows: tuple[Scaled, ...]
    cheapest: int | None
    notes: tuple[str, ...]


def scaling(
    sweeps: Sequence[Sweep],
    *,
    ttft_p99_s: float | None,
    itl_p99_s: float | None,
    usd_per_gpu_hour: float | None,
    utilization_ratio: float = 1.0,
) -> Scaling:
    """The degrees side by side within the targets (seconds; None: no target).

    Raises:
        SizingError: a target or a price cannot be.
    """
    unit, degrees = degrees_of(sweeps, ttft_p99_s=ttft_p99_s, itl_p99_s=itl_p99_s)
    kept = [degree for degree in degrees if degree.point is not None]
    best = max(kept, key=lambda degree: degree.per_s_per_gpu, default=None)
    rows = [
        Scaled(
            degree,
            degree.per_s_per_gpu / kept[0].per_s_per_gpu if degree in kept else None,
            _usd(degree, unit, usd_per_gpu_hour, utilization_ratio) if degree in kept else None,
        )
        for degree in degrees
    ]
    notes = [note for degree in degrees if (note := _note(unit, degrees, degree))]
    return Scaling(unit, tuple(rows), None if best is None else best.tensor_parallel, tuple(notes))


def _usd(degree: Degree, unit: Unit, price: float | None, utilization_ratio: float) -> float | None:
    if price is None or unit != "tokens":
        return None
    return token_cost(
        gpus=degree.tensor_parallel,
        usd_per_gpu_hour=price,
        tokens_per_s=degree.per_s,
        utilization_ratio=utilization_ratio,
    ).usd_per_million_tokens


def _note(unit: Unit, degrees: Sequence[Degree], measured: Degree) -> str:
    comparison = compared(unit, degrees, measured.tensor_parallel)
    if (
        comparison.far_below
        and comparison.narrow is not None
        and comparison.share_ratio is not None
    ):
        return (
            f"TP {measured.tensor_parallel} has {1 - comparison.share_ratio:.0%} less "
            f"throughput per GPU than TP {comparison.narrow.tensor_parallel}, and all-reduces over "
            "PCIe cost 20 to 30%: use fewer GPUs per replica and more replicas"
        )
    smallest = min(degree.tensor_parallel for degree in degrees) == measured.tensor_parallel
    return "" if smallest else comparison.why
