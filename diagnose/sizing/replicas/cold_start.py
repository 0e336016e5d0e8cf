"""How long a new instance takes, and what must be warm meanwhile. Pure. Guide 2.1, 9.2, 9.5."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.arithmetic import Step, exact, figure

START_HIGH_S = 300.0
"""Longest usual cold start in seconds, from order to first request (guide 9.2: 2-5 minutes)."""
_BURST_RATIO = 2.0
"""Requests in a burst over the usual rate (guide 8.2: 2-3 times)."""


@dataclass(frozen=True, slots=True)
class StoragePath:
    """A place that weights are loaded from, with its lowest and highest bytes per second."""

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
    by_name = {path.name: path for path in STORAGE_PATHS}
    if name not in by_name:
        raise SizingError(
            f"unknown storage path {name!r}; choose one of {', '.join(by_name)}",
            name="storage_path",
            choices=tuple(by_name),
        )
    return by_name[name]


def cold_start(
    *, weights_bytes: float, path: StoragePath, provision_s: float = 0.0, initialise_s: float = 0.0
) -> tuple[float, Step]:
    """The longest seconds from order to first request, for weights loaded over a storage path.

    `provision_s` is getting the machine and the container, `initialise_s` what the engine does
    after loading (compile, graphs, warm-up); both as measured. `weights_bytes` are those of the
    whole instance: its GPUs share the path.
    Source: guide 2.1 (times by path), 9.5 (measure per hardware tier).
    """
    around = provision_s + initialise_s
    fastest = weights_bytes / path.high_bytes_per_s + around
    slowest = weights_bytes / path.low_bytes_per_s + around
    rates = sorted({path.low_bytes_per_s / 1e9, path.high_bytes_per_s / 1e9}, reverse=True)
    return slowest, Step(
        title=f"Cold start from {path.name}",
        formula="provisioning + weights / bandwidth + initialization",
        values=f"{figure(provision_s)} s + {figure(weights_bytes / 1e9)} GB / "
        f"{' to '.join(figure(rate) for rate in rates)} GB/s + {figure(initialise_s)} s",
        result=f"{figure(fastest)} s" + ("" if len(rates) == 1 else f" to {figure(slowest)} s"),
        source=path.source,
    )


def warm_minimum(
    *, lowest_requests_per_s: float, usable_requests_per_s: float, burst_ratio: float = _BURST_RATIO
) -> tuple[int, Step]:
    """Fewest instances to keep warm: enough for a burst at the quietest hour, and one to spare.

    A burst arrives within a cold start, so what it needs must be running already.
    Source: guide 9.2 (one instance always available), 8.2 (bursts of 2-3 times).
    """
    lowest, usable = exact(lowest_requests_per_s), exact(usable_requests_per_s)
    base = math.ceil(lowest / usable)
    instances = max(math.ceil(lowest * exact(burst_ratio) / usable), base + 1)
    return instances, Step(
        title="Warm minimum",
        formula="max(ceil(lowest RPS x burst / usable), ceil(lowest RPS / usable) + standby)",
        values=f"max(ceil({figure(lowest_requests_per_s)} x {figure(burst_ratio)} / "
        f"{figure(usable_requests_per_s)}), {base} + 1)",
        result=f"{instances} instances",
        source="guide 9.2, 8.2",
    )


def scale_up_ratio(
    *,
    cold_start_s: float,
    growth_per_s_per_s: float,
    usable_requests_per_s: float,
    instances: int,
) -> tuple[float, tuple[Step, ...]]:
    """Share of the fleet's capacity at which to order an instance so that it serves in time.

    While an instance starts, load grows by `growth_per_s_per_s` requests/s each second. 0: load
    grows faster than this fleet can follow, so instances must be scheduled ahead.
    Source: guide 9.2 (reactive scaling arrives after the spike), 9.5 (lead time per tier).
    """
    capacity = instances * usable_requests_per_s
    order_at = max(0.0, 1 - cold_start_s * growth_per_s_per_s / capacity)
    lead = figure(cold_start_s)
    return order_at, (
        Step(
            "Lead time of an instance",
            "reaction + cold start",
            f"0 + {lead}",
            f"{lead} s",
            "guide 9.2, 9.5",
        ),
        Step(
            title="Order the next instance at",
            formula="1 - lead time x growth / capacity",
            values=f"1 - {lead} s x {figure(growth_per_s_per_s)} /s² / {figure(capacity)}",
            result=f"{order_at:.0%} of capacity",
            source="guide 9.2",
        ),
    )
