"""Replicas unlike their peers: slower, busier, new or idle. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.diagnose.causes.evidence import Case, Facts
from kneewatch.diagnose.causes.record import Term, Terms, term
from kneewatch.diagnose.fleet.engine_state import Engine
from kneewatch.diagnose.fleet.tier import FleetCause, Tier, middle, names_of
from kneewatch.rules.quantities import Signal
from kneewatch.rules.rule import Severity

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


# --- Replicas that carry more than their share, that are new, or hardly used ----------------------


BUSIER = 2.0
MORE_REQUESTS = 4.0
"""A replica carries more than its share with twice the median's requests and four more."""

COLD_S = 600.0
IDLE_RUNNING = 0.5
"""Mean of running requests over an hour below which a replica is idle (rule IDLE-HOURS)."""

IDLE_SHARE = 0.25


def replica_imbalance(tier: Tier) -> FleetCause | None:
    """Some engines hold far more requests than the others because they get more."""
    known = [(load, e) for e in tier.engines if (load := e.in_flight) is not None]
    if len(known) < 2:
        return None
    # With two the lower one is what is usual, with more the middle one.
    loads = sorted(load for load, _ in known)
    usual = loads[(len(loads) - 1) // 2]
    hot = [
        e
        for load, e in known
        if load >= BUSIER * usual and load - usual >= MORE_REQUESTS and not is_slow(e, tier)
    ]
    if not hot:
        return None
    most = max(hot, key=lambda e: e.in_flight or 0.0)
    load, of_one = most.in_flight or 0.0, len({e.member.replica for e in tier.engines}) == 1
    what = "data-parallel engines of one replica" if of_one else "engines"
    case = Case(
        "replica_imbalance",
        f"{len(hot)} of {len(known)} {what} carry far more than the others: "
        f"{most.member.name} holds {load:.0f} requests, the usual is {usual:.0f}.",
        "Balance by load (fewest requests in flight, or KV usage), not in turn; with sticky "
        "routing, limit how much one replica may get.",
        ("3.5", "9.3"),
        _harm(hot),
        log_odds=-0.6,
    )
    times = load / usual if usual else load
    case.weigh("running_avg", times, BUSIER, 1.4, f"{times:.1f} times the usual requests in flight")
    _weigh_arrivals(case, most, tier)
    usage, others = (
        most.get("kv_usage_ratio"),
        middle(e.get("kv_usage_ratio") for e in tier.engines),
    )
    if usage is not None and others is not None and usage - others >= 0.1:
        case.weigh(
            "kv_usage_ratio",
            usage,
            None,
            0.5,
            f"its KV cache is {100 * usage:.0f} % full, the middle one {100 * others:.0f} %",
        )
    waiting = most.get("waiting") or 0.0
    room = sum(1 for e in tier.engines if not e.get("waiting"))
    if waiting >= 1 and room:
        case.weigh("waiting", waiting, 1.0, 0.8, f"{waiting:.0f} wait there, none on {room} others")
    return _closed(case, tier, hot)


def _harm(hot: Sequence[Engine]) -> Severity:
    """An imbalance that makes requests wait is a fault, another one is a note."""
    harmed = any((e.get("waiting") or 0.0) >= 1 or (e.stage or 0) >= 2 for e in hot)
    return Severity.WARNING if harmed else Severity.INFO


def _weigh_arrivals(case: Case, engine: Engine, tier: Tier) -> None:
    share = over(engine, tier, "arrival_per_s")
    if share is None:
        return
    more = share > SAME_ARRIVALS
    case.weigh(
        "arrival_per_s",
        share,
        SAME_ARRIVALS if more else None,
        1.0 if more else -0.6,
        f"it gets {share:.1f} times the usual requests"
        + ("" if more else ": longer ones, or it is slow"),
    )


def cold_replicas(tier: Tier) -> FleetCause | None:
    """Replicas that have just started in a tier that has not, and their empty caches."""
    cold = [e for e in tier.engines if (age_s := e.get("age_s")) is not None and age_s < COLD_S]
    warm = [e for e in tier.engines if (e.get("age_s") or 0.0) >= COLD_S]
    if not cold or len(cold) > len(warm):
        return None
    youngest = min(cold, key=lambda e: e.get("age_s") or 0.0)
    case = Case(
        "cold_replica",
        f"{len(cold)} of {len(tier.engines)} engines started within {COLD_S / 60:.0f} min: "
        f"{youngest.member.name} {youngest.get('age_s') or 0.0:.0f} s ago. Their caches are empty.",
        "Wait, or warm new replicas before they take their whole share; scale earlier than the "
        "start-up takes.",
        ("9.5",),
        Severity.INFO,
        log_odds=0.3,
    )
    for signal, words, lower in (
        ("prefix_hit_ratio", "hits of the prefix cache", True),
        ("ttft_p99_s", "TTFT P99", False),
    ):
        own, usual = (
            middle(e.get(signal) for e in cold),
            middle(e.get(signal) for e in warm),
        )
        if own is None or not usual:
            continue
        worse = own / usual < 0.75 if lower else own / usual > SLOWER
        case.weigh(
            signal,
            own / usual,
            None,
            0.8 if worse else -0.2,
            f"{words}: {own / usual:.2f} times that of warm ones",
        )
    return _closed(case, tier, cold)


def underused(tier: Tier) -> FleetCause | None:
    """A part of a tier that hardly a request has run on for an hour."""
    # A mean of the last hour is one only where the hour has been seen.
    seen = [e for e in tier.engines if e.get("running_hour_ago") is not None]
    known = [(r, e) for e in seen if (r := e.get("running_hour_avg")) is not None]
    idle = [e for running, e in known if running < IDLE_RUNNING]
    if not known or len(idle) < IDLE_SHARE * len(known):
        return None
    mean = sum(running for running, _ in known) / len(known)
    peak = max((e.get("running_hour_max") or 0.0) for _, e in known)
    case = Case(
        "underused",
        f"{len(idle)} of {len(known)} engines ran hardly a request in the last hour "
        f"(mean of all {mean:.1f}, most at one moment {peak:.0f}).",
        "Consolidate, fill the hours with batch work, or keep fewer replicas warm; look at a week "
        "before giving hardware back.",
        ("9.2", "9.3"),
        Severity.INFO,
        log_odds=0.0,
    )
    share = len(idle) / len(known)
    case.weigh(
        "running_hour_avg", share, IDLE_SHARE, 1.2, f"{100 * share:.0f} % of the engines are idle"
    )
    stressed = [e for _, e in known if (e.stage or 0) >= 2 or (e.get("waiting") or 0.0) >= 1]
    if stressed:
        case.weigh(
            "waiting",
            float(len(stressed)),
            None,
            -0.8,
            f"{len(stressed)} others have queues: the balance is wrong, not the number",
        )
    return _closed(case, tier, idle)


def _closed(case: Case, tier: Tier, engines: Sequence[Engine]) -> FleetCause | None:
    cause = case.close()
    return None if cause is None else FleetCause(cause, tier.pool, tier.tier, names_of(engines))
