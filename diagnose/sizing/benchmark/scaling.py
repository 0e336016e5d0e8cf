"""What each measured tensor-parallel degree gives a GPU and what its tokens cost. Pure.

Source: guide 8.4 (requests per second and GPU), 9.1 step 12.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.diagnose.sizing.benchmark.by_tensor_parallel import (
    Degree,
    Sweep,
    Unit,
    compared,
    degrees_of,
)
from kneewatch.diagnose.sizing.fleet.cost import token_cost


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
    kept = [one for one in degrees if one.point is not None]
    best = max(kept, key=lambda one: one.per_s_per_gpu, default=None)
    rows = [
        Scaled(
            one,
            one.per_s_per_gpu / kept[0].per_s_per_gpu if one in kept else None,
            _usd(one, unit, usd_per_gpu_hour, utilization_ratio) if one in kept else None,
        )
        for one in degrees
    ]
    notes = [note for one in degrees if (note := _note(unit, degrees, one))]
    return Scaling(unit, tuple(rows), None if best is None else best.tensor_parallel, tuple(notes))


def _usd(one: Degree, unit: Unit, price: float | None, utilization_ratio: float) -> float | None:
    if price is None or unit != "tokens":
        return None
    return token_cost(
        gpus=one.tensor_parallel,
        usd_per_gpu_hour=price,
        tokens_per_s=one.per_s,
        utilization_ratio=utilization_ratio,
    ).usd_per_million_tokens


def _note(unit: Unit, degrees: Sequence[Degree], one: Degree) -> str:
    found = compared(unit, degrees, one.tensor_parallel)
    if found.far_below and found.narrow is not None and found.share_ratio is not None:
        return (
            f"TP {one.tensor_parallel} loses {1 - found.share_ratio:.0%} a GPU against TP "
            f"{found.narrow.tensor_parallel}, where all-reduces over PCIe take 20 to 30%: fewer "
            "GPUs each, and more replicas"
        )
    smallest = min(degree.tensor_parallel for degree in degrees) == one.tensor_parallel
    return "" if smallest else found.why
