"""Replicas that carry more than their share, that are new, or hardly used. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.diagnose.case import Case
from kneewatch.diagnose.fleet.judging import Engine
from kneewatch.diagnose.fleet.nodes import SAME_ARRIVALS, SLOWER, is_slow, over
from kneewatch.diagnose.fleet.spread import middle
from kneewatch.diagnose.fleet.verdict import FleetCause, Tier, names_of
from kneewatch.rules.model import Severity

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
