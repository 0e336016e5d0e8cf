"""An engine that stands still, as PromQL. Pure."""

from __future__ import annotations

from kneewatch.dashboards.prometheus.causes.model import CauseQuery
from kneewatch.dashboards.prometheus.model import Plan, duration, recorded
from kneewatch.dashboards.prometheus.odds import Term
from kneewatch.diagnose.causes import (
    observer,
)
from kneewatch.rules.model import Severity


def engine_stalled(plan: Plan) -> CauseQuery:
    """Requests are in flight and nothing moves."""
    dialect, stalled = plan.dialect, duration(observer.STALLED_S)
    still = " and ".join(
        f"({dialect.sum(f'increase({series}[{stalled}])')} == 0)"
        for series in (
            dialect.series("generation_tokens", "_total"),
            dialect.series("prompt_tokens", "_total"),
        )
    )
    moved = dialect.sum(f"changes({dialect.series('kv_cache_usage_perc')}[{stalled}])")
    in_flight = f"({recorded('running')} + {recorded('waiting')})"
    step = duration(plan.interval_s)
    return CauseQuery(
        "engine_stalled",
        f"(min_over_time({in_flight}[{stalled}:{step}]) >= 1) and {still} and ({moved} == 0)",
        (Term(in_flight, None, 1.5), Term(in_flight, "1", 0.8)),
        0.8,
        ((Severity.CRITICAL, ""),),
        "Requests are in flight and no token comes out",
        "Restart the engine once its log is saved; a request that can never fit waits for ever.",
        ("9.4",),
    )
