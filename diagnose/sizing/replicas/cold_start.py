"""How long a new instance takes, and what must be warm meanwhile. Pure. Guide 2.1, 9.2, 9.5."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kneewatch.diagnose.catalogue.inputs import SizingError, not_negative, positive
from kneewatch.diagnose.sizing.arithmetic import Step, exact, figure

START_HIGH_S = 300.0
"""Longest usual cold start in seconds, from order to first request (guide 9.2: 2-5 minutes)."""


@dataclass(frozen=True, slots=True)
class StoragePath:
    """Where weights come from, and how fast they arrive: lowest and highest bytes per second."""

    name: str
    low_bytes_per_s: float
    high_bytes_per_s: float
    source: str


STORAGE_PATHS = (
    StoragePath("local-nvme", 12.5e9, 12.5e9, "guide 2.1 and 5.6"),
    StoragePath("nvme-drive", 7.0e9, 7.0e9, "guide 7.6: one enterprise drive, sequential"),
    StoragePath("nvme-loader", 70e9 / 60, 70e9 / 30, "guide 9.2: 70 GB in 30-60 s"),
    StoragePath("network-10gbe", 1.1e9, 1.1e9, "guide 2.1"),
    # The rates behind the four times of the guide's row; its column of 0.5-1.0 GB/s gives half.
    StoragePath("object-storage", 70e9 / 300, 70e9 / 120, "guide 2.1: 70 GB in 2-5 min"),
)


def storage_path(name: str) -> StoragePath:
    """The storage path with this name.

    Raises:
        SizingError: there is none; the names are its choices.
    """
    for path in STORAGE_PATHS:
        if path.name == name:
            return path
    choices = tuple(path.name for path in STORAGE_PATHS)
    raise SizingError(
        f"unknown storage path {name!r}; choose one of {', '.join(choices)}",
        name="storage_path",
        choices=choices,
    )


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Seconds until an instance serves: moving the weights, and all of it."""

    transfer_low_s: float
    transfer_high_s: float
    total_low_s: float
    total_high_s: float
    steps: tuple[Step, ...]


def cold_start(
    *, weights_bytes: float, path: StoragePath, provision_s: float = 0.0, initialise_s: float = 0.0
) -> ColdStart:
    """Seconds from order to first request for weights that come over a storage path.

    `provision_s` is getting the machine and the container, `initialise_s` what the engine does
    after loading (compile, graphs, warm-up); both as measured. `weights_bytes` are those of the
    whole instance: its GPUs share the path.

    Raises:
        SizingError: a number is not positive, or negative.
    Source: guide 2.1 (times by path), 9.5 (measure per hardware tier).
    """
    positive("weights_bytes", weights_bytes)
    not_negative("provision_s", provision_s)
    not_negative("initialise_s", initialise_s)
    fastest = weights_bytes / path.high_bytes_per_s
    slowest = weights_bytes / path.low_bytes_per_s
    around = provision_s + initialise_s
    rates = sorted({path.low_bytes_per_s / 1e9, path.high_bytes_per_s / 1e9}, reverse=True)
    step = Step(
        title=f"Cold start from {path.name}",
        formula="provisioning + weights / bandwidth + initialisation",
        values=f"{figure(provision_s)} s + {figure(weights_bytes / 1e9)} GB / "
        f"{' to '.join(figure(rate) for rate in rates)} GB/s + {figure(initialise_s)} s",
        result=f"{figure(fastest + around)} s"
        + ("" if len(rates) == 1 else f" to {figure(slowest + around)} s"),
        source=path.source,
    )
    return ColdStart(fastest, slowest, fastest + around, slowest + around, (step,))


@dataclass(frozen=True, slots=True)
class WarmMinimum:
    """Instances that stay up at the quietest hour, and those of them beyond its own load."""

    instances: int
    standby: int
    steps: tuple[Step, ...]


def warm_minimum(
    *,
    lowest_requests_per_s: float,
    usable_requests_per_s: float,
    burst_ratio: float = 2.0,
    standby: int = 1,
) -> WarmMinimum:
    """Fewest instances to keep warm: the trough times a burst, and at least `standby` to spare.

    A burst arrives within a cold start, so what it needs must be running already.

    Raises:
        SizingError: the trough is negative, the burst below 1, or another number not positive.
    Source: guide 9.2 (one instance always available), 8.2 (bursts of 2-3 times).
    """
    not_negative("lowest_requests_per_s", lowest_requests_per_s)
    positive("usable_requests_per_s", usable_requests_per_s)
    if burst_ratio < 1 or standby < 0:
        raise SizingError(
            f"burst_ratio is {burst_ratio:g} and standby {standby}; a burst is 1 or more times the "
            "load, standby 0 or more instances",
            name="burst_ratio" if burst_ratio < 1 else "standby",
        )
    lowest, usable = exact(lowest_requests_per_s), exact(usable_requests_per_s)
    base = math.ceil(lowest / usable)
    instances = max(math.ceil(lowest * exact(burst_ratio) / usable), base + standby)
    step = Step(
        title="Warm minimum",
        formula="max(ceil(lowest RPS x burst / usable), ceil(lowest RPS / usable) + standby)",
        values=f"max(ceil({figure(lowest_requests_per_s)} x {figure(burst_ratio)} / "
        f"{figure(usable_requests_per_s)}), {base} + {standby})",
        result=f"{instances} instances",
        source="guide 9.2, 8.2",
    )
    return WarmMinimum(instances, instances - base, (step,))


@dataclass(frozen=True, slots=True)
class AutoscalingLead:
    """How early to order: `lead_s` before the load needs it.

    While an instance starts, `growth_requests_per_s` arrive on top; that many must be free, which
    is `spare_instances` of them, or an order at `order_at_ratio` of the present capacity (0: load
    grows faster than this fleet can follow, so it must be scheduled ahead).
    """

    lead_s: float
    growth_requests_per_s: float
    spare_instances: int
    order_at_ratio: float
    steps: tuple[Step, ...]


def autoscaling_lead(
    *,
    cold_start_s: float,
    growth_per_s_per_s: float,
    usable_requests_per_s: float,
    instances: int,
    reaction_s: float = 0.0,
) -> AutoscalingLead:
    """When to order an instance so that it serves before the load needs it.

    `growth_per_s_per_s` is the steepest rise of requests/s per second; `reaction_s` is what the
    autoscaler takes to see it (scrape, average, stabilisation).

    Raises:
        SizingError: a number is not positive, or negative.
    Source: guide 9.2 (reactive scaling arrives after the spike), 9.5 (lead time per tier).
    """
    positive("usable_requests_per_s", usable_requests_per_s)
    positive("instances", instances)
    for name, value in (
        ("cold_start_s", cold_start_s),
        ("growth_per_s_per_s", growth_per_s_per_s),
        ("reaction_s", reaction_s),
    ):
        not_negative(name, value)
    lead = cold_start_s + reaction_s
    growth = lead * growth_per_s_per_s
    capacity = instances * usable_requests_per_s
    order_at = max(0.0, 1 - growth / capacity)
    steps = (
        Step(
            title="Lead time",
            formula="reaction + cold start",
            values=f"{figure(reaction_s)} + {figure(cold_start_s)}",
            result=f"{figure(lead)} s",
            source="guide 9.2, 9.5",
        ),
        Step(
            title="Order the next instance at",
            formula="1 - lead x growth / capacity",
            values=f"1 - {figure(lead)} s x {figure(growth_per_s_per_s)} /s² / {figure(capacity)}",
            result=f"{order_at:.0%} of capacity",
            source="guide 9.2",
        ),
    )
    spare = math.ceil(exact(growth) / exact(usable_requests_per_s))
    return AutoscalingLead(lead, growth, spare, order_at, steps)
