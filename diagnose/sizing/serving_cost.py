"""What replicas cost: per million tokens, per year, while idle, and by tensor-parallel degree.
Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from kneewatch.diagnose.capacity import Degree, Unit
from kneewatch.diagnose.sizing.arithmetic import Sheet, compiled
from kneewatch.diagnose.sizing.benchmark.operating_point import Sweeps, compared, degrees_of
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import percent

HOURS_PER_YEAR = 8760
"""365 days; GPUs are paid around the clock."""

SECONDS_PER_HOUR = 3600


TRAP_RATIO = 0.40
"""Fleet utilization below which the guide warns of the utilization trap (9.3)."""
TRAP_TARGET_RATIO = 0.7
"""Utilization that idle GPUs are compared with: the middle of the guide's 60-80% (9.3)."""


_TOKEN_COST = "{USD per hour} / ({tokens/s} x {3600} x {utilization}) x 1e6"


def usd_per_million_tokens(
    usd_per_hour: float, tokens_per_s: float, utilization_ratio: float = 1.0
) -> float:
    """Dollars per million tokens at this share of a rate (guide 9.2)."""
    return compiled(_TOKEN_COST)(usd_per_hour, tokens_per_s, SECONDS_PER_HOUR, utilization_ratio)


def token_cost(
    sheet: Sheet,
    *,
    gpus: float,
    usd_per_gpu_hour: float,
    tokens_per_s: float,
    utilization_ratio: float = 1.0,
    owner: str = "the fleet",
) -> float:
    """Dollars per million tokens of a fleet, or of another `owner` of these GPUs.

    `tokens_per_s` is the rate of all these GPUs at full load; on average `utilization_ratio` (0..1)
    of it is used. With a measured rate, pass 1: it already includes the utilization.

    Source: guide 9.2, 9.1 step 12.
    """
    hourly = sheet.line(
        f"Cost per hour of {owner}",
        "{GPUs} x {USD per GPU-hour}",
        (gpus, usd_per_gpu_hour),
        result="{} USD/h",
        source="guide 9.2",
    )
    return sheet.line(
        "Cost per million tokens",
        _TOKEN_COST,
        (hourly, tokens_per_s, SECONDS_PER_HOUR, utilization_ratio),
        result="{} USD",
        source="guide 9.2",
    )


def yearly_cost(sheet: Sheet, *, gpus: float, usd_per_gpu_hour: float) -> float:
    """Dollars per year: GPUs x price x 8,760 hours (guide 9.1 step 12)."""
    return sheet.line(
        "Cost per year",
        "{GPUs} x {USD per GPU-hour} x {hours}",
        (gpus, usd_per_gpu_hour, HOURS_PER_YEAR),
        result="{} USD",
        source="guide 9.1 step 12",
    )


def utilization_trap(
    sheet: Sheet, usd_per_year: float, utilization_ratio: float
) -> tuple[float, float]:
    """The cost of a token as a multiple of a fully used fleet's, and the dollars a year that the
    same work would save at TRAP_TARGET_RATIO; from a fleet's cost and average utilization (0..1).

    Above the target utilization nothing is recoverable. Source: guide 9.2, 9.3.
    """
    multiple = sheet.line(
        "Cost per token against a full fleet",
        "1 / {utilization}",
        (utilization_ratio,),
        result="{}x",
        source="guide 9.2",
    )
    sheet.line(
        "Cost of idle GPU time per year",
        "{USD per year} x (1 - {utilization})",
        (usd_per_year, utilization_ratio),
        result="{} USD",
        source="guide 9.2",
    )
    recoverable = sheet.line(
        f"Saving per year at {percent(TRAP_TARGET_RATIO)} utilization",
        "{USD per year} x max(1 - {utilization} / {target}, 0)",
        (usd_per_year, utilization_ratio, TRAP_TARGET_RATIO),
        result="{} USD",
        source="guide 9.2",
    )
    return multiple, recoverable


# --- Throughput per GPU and cost per token of each measured tensor-parallel degree. Pure ----------
#
# Source: guide 8.4 (requests per second and GPU), 9.1 step 12.


class Scaled(Struct, frozen=True):
    """A degree compared with the others.

    `efficiency_ratio`: its throughput per GPU divided by that of the smallest degree that meets the
    targets; None if this degree misses them. `usd_per_million_tokens`: None in that case, and also
    if no price is known or the sweeps do not count tokens.
    """

    degree: Degree
    efficiency_ratio: float | None
    usd_per_million_tokens: float | None


class Scaling(Struct, frozen=True):
    """All measured degrees.

    `cheapest` is the degree with the most throughput per GPU within the targets; None if all miss
    them. `notes` say what cannot be compared, and what a wide split loses.
    """

    unit: Unit
    rows: tuple[Scaled, ...]
    cheapest: int | None
    notes: tuple[str, ...]


def scaling(
    sweeps: Sweeps,
    targets: Targets,
    *,
    usd_per_gpu_hour: float | None,
    utilization_ratio: float = 1.0,
) -> Scaling:
    """All degrees compared within the targets.

    Raises:
        SizingError: a target is not positive.
    """
    unit, degrees = degrees_of(sweeps, targets)
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
    return usd_per_million_tokens(degree.tensor_parallel * price, degree.per_s, utilization_ratio)


def _note(unit: Unit, degrees: Sequence[Degree], measured: Degree) -> str:
    comparison = compared(unit, degrees, measured.tensor_parallel)
    if (
        comparison.far_below
        and comparison.narrow is not None
        and comparison.share_ratio is not None
    ):
        return (
            f"TP {measured.tensor_parallel} has {percent(1 - comparison.share_ratio)} less "
            f"throughput per GPU than TP {comparison.narrow.tensor_parallel}, more than "
            "all-reduces over PCIe cost (20 to 30%): use fewer GPUs per replica and more replicas"
        )
    smallest = min(degree.tensor_parallel for degree in degrees) == measured.tensor_parallel
    return "" if smallest else comparison.why
