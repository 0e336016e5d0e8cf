"""A server that is slower than its peers with the same work, as PromQL: diagnose/fleet/nodes.py
with two guards more, for nobody looks before an alert rings. Pure.

Peers are the engines whose labels agree in all but what is a replica's own. Where many of them are
slow it is another kind of GPU or another load, no node; and routers take a while to even out.
"""

from __future__ import annotations

from kneewatch.dashboards.prometheus.gpus.joined import ENGINE_CLOCK, ENGINE_HEAT, ENGINE_XID
from kneewatch.dashboards.prometheus.hourly import NAMES
from kneewatch.dashboards.prometheus.model import Plan, Record
from kneewatch.dashboards.prometheus.query import CauseQuery, Spelled, scored
from kneewatch.diagnose.causes import BY_ID
from kneewatch.diagnose.fleet.nodes import (
    CLOCK_BELOW,
    PEERS_MIN,
    SAME_ARRIVALS,
    SLOWER,
    TERMS,
)
from kneewatch.rules.facts import number, recorded
from kneewatch.rules.model import Severity

FEW_RATIO = 0.25
"""No more of the peers may be behind; one always may."""

HOLDS_WINDOWS = 5.0
"""Before it is told: routers take a minute to even out."""

SLOW, SHARE, BEHIND = (
    recorded(key) for key in ("itl_p50_over_peers", "arrival_over_peers", "behind_peers")
)
TAIL = recorded("itl_p99_s")


def peer_records(plan: Plan) -> list[Record]:
    """An engine against the middle one of its peers, and 1 for each that is behind them."""
    slow = (
        f"({SLOW} >= {number(SLOWER)}) and ({_over(plan, recorded('itl_mean_s'))}"
        f" >= {number(SLOWER)}) unless ({SHARE} > {number(SAME_ARRIVALS)})"
    )
    behind = f"({slow}) or ({_clock_low(plan)})" if plan.gpu_join else slow
    return [
        Record(SLOW, _over(plan, recorded("itl_p50_s"))),
        Record(SHARE, _over(plan, recorded("arrival_per_s"))),
        Record(BEHIND, f"({behind}) * 0 + 1"),
    ]


def bad_node(plan: Plan) -> CauseQuery:
    """Its tokens come far slower though it gets no more requests, or its GPU's clock is low."""
    pool, beside = _pool(plan), _beside_peers(plan)
    peers = f"count by ({pool}) ({recorded('running')})"
    few = f"count by ({pool}) ({BEHIND}) <= clamp_min({number(FEW_RATIO)} * {peers}, 1)"
    return CauseQuery(
        BY_ID["bad_node"],
        f"{BEHIND} and on ({pool}) ({peers} >= {PEERS_MIN}) and on ({pool}) ({few})",
        tuple(made for each in TERMS if (made := scored(beside, each)) is not None),
        -1.0,
        ((Severity.WARNING, ""),),
        "It is slower than its peers with the same work",
        "Take it out of the pool, look at its GPU (clocks, XID, temperature, power) and replace it "
        "before its peers.",
        ("9.3",),
        for_s=HOLDS_WINDOWS * plan.window_s,
    )


def _beside_peers(plan: Plan) -> Spelled:
    """The signals of diagnose/fleet/nodes.py as expressions."""
    pool = _pool(plan)
    worst = f"({TAIL} == on ({pool}) group_left () max by ({pool}) ({TAIL}))"
    alone = f"count by ({pool}) {worst} == 1 and count by ({pool}) ({TAIL}) > 1"
    of_gpus = {
        "gpu_clock_over_peers": ENGINE_CLOCK,
        "gpu_clock_low_over_peers": _clock_low(plan),
        "gpu_xid": ENGINE_XID,
        "gpu_hotter_than_peers_c": _over(plan, ENGINE_HEAT, "-"),
    }
    return Spelled(
        {
            "itl_p50_over_peers": SLOW,
            "arrival_over_peers": SHARE,
            "itl_p99_worst_s": f"({worst} and on ({pool}) ({alone}))",
            **(of_gpus if plan.gpu_join else {}),
        }
    )


def _clock_low(plan: Plan) -> str:
    """Its GPUs' clock against its peers', where that is low while it works."""
    works = f"({recorded('running_avg')} + {recorded('waiting')}) >= 1"
    return f"({_over(plan, ENGINE_CLOCK)} <= {number(CLOCK_BELOW)}) and ({works})"


def _over(plan: Plan, series: str, sign: str = "/") -> str:
    """A series against the middle one of the peers."""
    pool = _pool(plan)
    middle = f"quantile by ({pool}) (0.5, {series}) > 0"
    return f"({series} {sign} on ({pool}) group_left () ({middle}))"


def _pool(plan: Plan) -> str:
    """The labels that peers share."""
    return ", ".join(label for label in plan.labels if label in NAMES)
