"""Causes that lie in what is asked for, as PromQL. Pure."""

from __future__ import annotations

from kneewatch.dashboards.prometheus.causes.model import CauseQuery
from kneewatch.dashboards.prometheus.model import Plan, number, recorded
from kneewatch.dashboards.prometheus.odds import Term
from kneewatch.diagnose.causes import (
    workload,
)
from kneewatch.rules.model import Severity


def runaway_generation(plan: Plan) -> CauseQuery:
    """More answers than before end at their limit."""
    points = recorded("finished_length_drift_points")
    longer = f"({recorded('output_tokens_mean')} / ({recorded('output_tokens_mean:baseline')} > 0))"
    bound = number(workload.LONGER_OUTPUTS)
    return CauseQuery(
        "runaway_generation",
        f"({points} >= {number(workload.LENGTH_POINTS)}) and"
        f" ({recorded('completed_per_s')} * {number(plan.window_s)}"
        f" >= {number(workload.REQUESTS_MIN)})",
        (
            Term(points, number(workload.LENGTH_POINTS), 1.5),
            Term(longer, bound, 1.2, f"{longer} >= {bound}"),
            Term(longer, bound, -1.0, f"{longer} < {bound}", below=True),
        ),
        -0.3,
        ((Severity.WARNING, ""),),
        "Far more requests than before run into their output limit",
        "Look for prompts that make the model ramble or repeat; cap outputs per use case.",
        ("9.4",),
    )
