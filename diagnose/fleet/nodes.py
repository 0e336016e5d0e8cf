"""Replicas that are slower than their peers with the same work: guide 9.3. Pure."""

from __future__ import annotations

from kneewatch.diagnose.case import Case
from kneewatch.diagnose.fleet.judging import Engine
from kneewatch.diagnose.fleet.spread import middle
from kneewatch.diagnose.fleet.verdict import FleetCause, Tier, names_of
from kneewatch.rules.model import Severity

SLOWER = 1.5
SAME_ARRIVALS = 1.3
PEERS_MIN = 3
"""Of fewer replicas no median says what is usual."""

CLOCK_BELOW = 0.85
HOTTER_C = 10.0


def bad_nodes(tier: Tier) -> list[FleetCause]:
    """Replicas that are slower than their peers with the same work, or whose GPU is unwell."""
    if len(tier.engines) < PEERS_MIN:
        return []
    found = [_bad_node(engine, tier) for engine in tier.engines if _suspect(engine, tier)]
    return [one for one in found if one is not None]


def _suspect(engine: Engine, tier: Tier) -> bool:
    return is_slow(engine, tier) or _clock_low(engine, tier) is not None


def is_slow(engine: Engine, tier: Tier) -> bool:
    """Whether tokens come far slower than on its peers though it gets no more requests.

    The median of a histogram moves from one bucket's middle to the next one's where tokens cross
    its edge, so the mean has to say the same where it is known.
    """
    slower, mean = over(engine, tier, "itl_p50_s"), over(engine, tier, "itl_mean_s")
    alike = (over(engine, tier, "arrival_per_s") or 1.0) <= SAME_ARRIVALS
    if len(tier.engines) < PEERS_MIN or slower is None or not alike:
        return False
    return slower >= SLOWER and (mean is None or mean >= SLOWER)


def _bad_node(engine: Engine, tier: Tier) -> FleetCause | None:
    member = engine.member
    where = f" (node {member.node})" if member.node else ""
    slower, clock = over(engine, tier, "itl_p50_s"), _clock_low(engine, tier)
    xid = engine.gpus.get("xid") or 0.0
    case = Case(
        "bad_node",
        f"{member.name}{where} is slower than its peers and makes the tier's P99.",
        "Take it out of the pool, look at its GPU (clocks, XID, temperature, power) and replace it "
        "before its peers.",
        ("9.3",),
        Severity.WARNING,
        log_odds=-1.0,
    )
    if slower is not None:
        case.weigh(
            "itl_p50_s",
            slower,
            SLOWER,
            1.8 if slower >= SLOWER else -1.0,
            f"its tokens take {slower:.1f} times as long as on the middle replica",
        )
    share = over(engine, tier, "arrival_per_s")
    if share is not None and share <= SAME_ARRIVALS:
        case.weigh("arrival_per_s", share, None, 0.6, f"with {share:.1f} times the usual requests")
    _weigh_tail(case, engine, tier)
    if clock is not None:
        case.weigh(
            "gpu_sm_clock_hz",
            clock,
            CLOCK_BELOW,
            1.6,
            f"its GPU runs at {100 * clock:.0f} % of its peers' clock",
            below=True,
        )
    if xid:
        case.weigh("gpu_xid", xid, None, 1.0, f"its driver reports XID {xid:.0f}")
    _weigh_heat(case, engine, tier)
    if engine.gpus and clock is None and not xid:
        case.weigh("gpu_sm_clock_hz", 1.0, None, -0.4, "its GPU's clock is as its peers'")
    cause = case.close()
    return None if cause is None else FleetCause(cause, tier.pool, tier.tier, names_of([engine]))


def _weigh_tail(case: Case, engine: Engine, tier: Tier) -> None:
    own = engine.get("itl_p99_s")
    others = [
        value for e in tier.engines if e is not engine and (value := e.get("itl_p99_s")) is not None
    ]
    if own is not None and others and own > max(others):
        case.weigh(
            "itl_p99_s",
            own,
            None,
            0.4,
            f"ITL P99 is {1000 * own:.0f} ms there, at most {1000 * max(others):.0f} ms elsewhere",
        )


def _weigh_heat(case: Case, engine: Engine, tier: Tier) -> None:
    own, usual = (
        engine.gpus.get("temperature_c"),
        middle(e.gpus.get("temperature_c") for e in tier.engines),
    )
    if own is not None and usual is not None and own - usual >= HOTTER_C:
        case.weigh(
            "gpu_temperature_c", own - usual, HOTTER_C, 0.6, f"{own - usual:.0f} degrees hotter"
        )


def _clock_low(engine: Engine, tier: Tier) -> float | None:
    """Its GPUs' clock against its peers', where that is low while it works."""
    own, usual = (
        engine.gpus.get("sm_clock_mhz"),
        middle(e.gpus.get("sm_clock_mhz") for e in tier.engines),
    )
    if own is None or not usual or (engine.in_flight or 0.0) < 1:
        return None
    return own / usual if own / usual <= CLOCK_BELOW else None


def over(engine: Engine, tier: Tier, signal: str) -> float | None:
    """A signal against the middle one of the tier."""
    own, usual = engine.get(signal), middle(e.get(signal) for e in tier.engines)
    return own / usual if own is not None and usual else None
