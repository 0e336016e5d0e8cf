"""Rules about GPUs, from a DCGM exporter's series: each GPU by itself, and by engine where labels
are stated that join them. Pure."""

from __future__ import annotations

from kneewatch.dashboards.prometheus.gpus.clocks import clock_alerts, clock_records
from kneewatch.dashboards.prometheus.gpus.faults import fault_alerts, fault_records
from kneewatch.dashboards.prometheus.gpus.joined import joined_group
from kneewatch.dashboards.prometheus.gpus.series import gpu_records
from kneewatch.dashboards.prometheus.model import Group, Plan

__all__ = ["gpu_group", "joined_group"]


def gpu_group(plan: Plan) -> Group:
    """What is recorded of each GPU, and the alerts about it."""
    return Group(
        "kneewatch-gpus",
        (
            *gpu_records(plan),
            *clock_records(),
            *fault_records(plan),
            *clock_alerts(plan),
            *fault_alerts(plan),
        ),
    )
