"""Replicas that are slower than their peers with the same work: guide 9.3. Pure."""

from __future__ import annotations

from kneewatch.diagnose.case import Case, Facts
from kneewatch.diagnose.causes.record import Term, Terms, term
from kneewatch.diagnose.fleet.judging import Engine
from kneewatch.diagnose.fleet.spread import middle
from kneewatch.diagnose.fleet.verdict import FleetCause, Tier, names_of
from kneewatch.rules.model import Severity
from kneewatch.rules.quantities import Signal

SLOWER = 1.5
SAME_ARRIVALS = 1.3
PEERS_MIN = 3
"""Of fewer replicas no median says what is usual."""

CLOCK_BELOW = 0.85
HOTTER_C = 10.0

SLOW, SHARE = Signal("itl_p50_over_peers"), Signal("arrival_over_peers")
TAIL_ALONE = Signal("itl_p99_worst_s")
CLOCK, CLOCK_LOW = Signal("gpu_clock_over_peers"), Signal("gpu_clock_low_over_peers")
XID, HOTTER = Signal("gpu_xid"), Signal("gpu_hotter_than_peers_c")
"""An engine beside the median of its peers. The second clock is known only where it is low while
the engine works."""

TERMS: tuple[Term, ...] = (
    term(
        SLOW,
        SLOWER,
        1.8,
        "its tokens take {value:.1f}x as long as on the median replica",
        when=SLOW >= SLOWER,
        signal="itl_p50_s",
    ),
    term(
        SLOW,
        SLOWER,
        -1.0,
        "its tokens take {value:.1f}x as long as on the median replica",
        when=SLOW < SLOWER,
        signal="itl_p50_s",
    ),
    term(
        SHARE,
        None,
        0.6,
        "it gets {value:.1f}x the usual requests",
        when=SHARE <= SAME_ARRIVALS,
        signal="arrival_per_s",
    ),
    term(
        TAIL_ALONE,
        None,
        0.4,
        "ITL P99 is {value:ms} there, at most {itl_p99_of_others_s:ms} elsewhere",
        signal="itl_p99_s",
    ),
    term(
        CLOCK_LOW,
        CLOCK_BELOW,
        1.6,
        "its GPU runs at {value:%} of its peers' clock",
        below=True,
        signal="gpu_sm_clock_hz",
    ),
    term(XID, None, 1.0, "its driver reports XID {value}", when=XID > 0.0),
    term(
        HOTTER,
        HOTTER_C,
        0.6,
        "it is {value} degrees C hotter than its peers",
        when=HOTTER >= HOTTER_C,
        signal="gpu_temperature_c",
    ),
    term(
        CLOCK,
        None,
        -0.4,
        "its GPU's clock is like its peers'",
        when=~CLOCK_LOW.known & ~(XID > 0.0).assume(unknown=False),
        signal="gpu_sm_clock_hz",
    ),
)
"""The evidence, for `diagnose --prometheus` and for the exported rule alike."""

_EVIDENCE = Terms(TERMS)


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
    case = Case(
        "bad_node",
        f"{member.name}{where} is slower than its peers and makes the tier's P99.",
        "Take it out of the pool, look at its GPU (clocks, XID, temperature, power) and replace it "
        "before its peers.",
        ("9.3",),
        Severity.WARNING,
        log_odds=-1.0,
    )
    _EVIDENCE.weigh(case, _beside_peers(engine, tier))
    cause = case.close()
    return None if cause is None else FleetCause(cause, tier.pool, tier.tier, names_of([engine]))


def _beside_peers(engine: Engine, tier: Tier) -> Facts:
    """The engine's signals against those of the middle engine of its tier."""
    own_s = engine.get("itl_p99_s")
    others_s = [
        value for e in tier.engines if e is not engine and (value := e.get("itl_p99_s")) is not None
    ]
    heat_c = engine.gpus.get("temperature_c")
    usual_c = middle(e.gpus.get("temperature_c") for e in tier.engines)
    worst = own_s is not None and bool(others_s) and own_s > max(others_s)
    clock, usual_mhz = (
        engine.gpus.get("sm_clock_mhz"),
        middle(e.gpus.get("sm_clock_mhz") for e in tier.engines),
    )
    values = {
        SLOW.key: over(engine, tier, "itl_p50_s"),
        SHARE.key: over(engine, tier, "arrival_per_s"),
        TAIL_ALONE.key: own_s if worst else None,
        "itl_p99_of_others_s": max(others_s, default=None),
        CLOCK.key: clock / usual_mhz if clock is not None and usual_mhz else None,
        CLOCK_LOW.key: _clock_low(engine, tier),
        XID.key: engine.gpus.get("xid"),
        HOTTER.key: heat_c - usual_c if heat_c is not None and usual_c is not None else None,
    }
    return Facts.of_moment(values)


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
