"""Causes of replicas that differ from their peers: slow, overloaded, cold or idle. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from kneewatch.diagnose.account_signals import DRAINS, STALL
from kneewatch.diagnose.causes.common_conditions import ONE_TOKEN
from kneewatch.diagnose.causes.evidence import Case, Facts
from kneewatch.diagnose.causes.record import Term, term, weigh
from kneewatch.diagnose.fleet.tier import Engine, FleetCause, Tier, closed, middle
from kneewatch.diagnose.ranking import CAUSES, EXPLAINS, may_explain
from kneewatch.diagnose.verdict import Cause
from kneewatch.rules.formatting import about, percent, plural, span
from kneewatch.rules.quantities import Live
from kneewatch.rules.rule import Severity

SLOWER, SLOWER_OF_TWO = 1.5, 2.0
SAME_ARRIVALS = SAME_LENGTHS = 1.3
PEERS_MIN = 3
"""Least number of replicas for a meaningful median."""

SLOWS_TOKENS = frozenset(record.id for record in CAUSES if record.slows_tokens)
"""Causes that explain an engine's slow tokens without comparing it with others."""

PILES_UP = frozenset(("engine_stalled", "gpu_fault", "gpu_throttled"))
"""Causes of an engine that make requests pile up there, although it gets no more of them."""

CLOCK_BELOW = 0.85
HOTTER_C = 10.0

SLOW, SHARE = Live("itl_p50_over_peers"), Live("arrival_over_peers")
TAIL_ALONE = Live("itl_p99_worst_s")
CLOCK, CLOCK_LOW = Live("gpu_clock_over_peers"), Live("gpu_clock_low_over_peers")
XID, HOTTER = Live("gpu_xid"), Live("gpu_hotter_than_peers_c")
"""Values of an engine compared with its tier's median.

CLOCK_LOW has a value only while the clock is low and the engine works.
"""

TERMS: tuple[Term, ...] = (
    term(
        SLOW,
        SLOWER,
        1.8,
        "ITL P50 is {value:.1f}x that of the median replica",
        when=SLOW >= SLOWER,
        signal="itl_p50_s",
    ),
    term(
        SLOW,
        SLOWER,
        -1.0,
        "ITL P50 is {value:.1f}x that of the median replica",
        when=SLOW < SLOWER,
        signal="itl_p50_s",
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
        "its GPU is {value} degrees C hotter than its peers",
        when=HOTTER >= HOTTER_C,
        signal="gpu_temperature_c",
    ),
    term(
        TAIL_ALONE,
        None,
        0.4,
        "ITL P99 is {value:s} there, at most {itl_p99_of_others_s:s} elsewhere",
        signal="itl_p99_s",
    ),
    term(
        SHARE,
        None,
        0.6,
        "it gets {value:.1f}x the median request rate",
        when=SHARE <= SAME_ARRIVALS,
        signal="arrival_per_s",
    ),
    term(
        CLOCK,
        None,
        -0.4,
        "its GPU runs at its peers' clock",
        when=~CLOCK_LOW.known & ~(XID > 0.0).assume(unknown=False),
        signal="gpu_sm_clock_hz",
    ),
)
"""Evidence of a bad node. What its GPU shows stands first: messages have room for little."""


def bad_nodes(tier: Tier) -> list[FleetCause]:
    """A cause for each replica that is slower than its peers at the same load or has a slow GPU."""
    return [
        cause
        for engine in tier.engines
        for peers in (_peers(engine, tier),)
        if is_slow(engine, tier) or _clock_low(engine, peers) is not None
        if (cause := _bad_node(engine, peers)) is not None
    ]


def _peers(engine: Engine, tier: Tier) -> Tier:
    """The tier whose medians an engine is compared with: of two engines, the other one."""
    if len(tier.engines) >= PEERS_MIN:
        return tier
    others = tuple(other for other in tier.engines if other is not engine)
    return replace(tier, engines=others, medians={})


def is_slow(engine: Engine, tier: Tier) -> bool:
    """Whether the engine's ITL is far above its peers', and nothing else explains it.

    The engine must get no more requests than its peers, and none of its own causes may slow its
    tokens. A histogram's median jumps by a whole bucket. So if the mean is known, it must also be
    far above. Of two engines neither is the rule: the slower one must be twice as slow, with
    requests no longer than the other's.
    """
    peers = _peers(engine, tier)
    slower, mean = over(engine, peers, "itl_p50_s"), over(engine, peers, "itl_mean_s")
    beside_idle = peers.median("arrival_per_s") == 0 and engine.get("arrival_per_s")
    if beside_idle or slower is None or _drains(engine):
        return False
    if not _is_asked_alike(engine, peers) or any(map(_slows_tokens, engine.causes)):
        return False
    if peers is tier:
        return slower >= SLOWER and (mean is None or mean >= SLOWER)
    longer = max(over(engine, peers, key) or math.inf for key in LENGTH_MEANS)
    return min(slower, mean or 0.0) >= SLOWER_OF_TWO and longer <= SAME_LENGTHS


def _is_asked_alike(engine: Engine, tier: Tier) -> bool:
    """Whether the engine gets no more requests than its peers."""
    return (over(engine, tier, "arrival_per_s") or 1.0) <= SAME_ARRIVALS


def _slows_tokens(cause: Cause) -> bool:
    """Whether this cause, or a cause reported under it, explains an engine's slow tokens."""
    return may_explain(cause) and not SLOWS_TOKENS.isdisjoint((cause.id, *cause.explains))


def _bad_node(engine: Engine, tier: Tier) -> FleetCause | None:
    member = engine.member
    where = f" (node {member.node})" if member.node else ""
    case = Case(
        "bad_node",
        f"{member.name}{where} is slower than its peers.",
        "Take it out of the pool, check its GPU (clocks, XID, temperature, power) and replace it "
        "if needed.",
        Severity.WARNING,
        log_odds=-1.0,
    )
    weigh(TERMS, case, _beside_peers(engine, tier))
    return closed(case, tier.pool, tier.tier, [engine])


def _beside_peers(engine: Engine, tier: Tier) -> Facts:
    """Facts whose signals are the engine's values divided by those of its tier's median engine."""
    own_s = engine.get("itl_p99_s")
    others_s = [
        value for e in tier.engines if e is not engine and (value := e.get("itl_p99_s")) is not None
    ]
    heat_c = engine.gpus.get("temperature_c")
    usual_c = tier.gpu_median("temperature_c")
    worst = own_s is not None and bool(others_s) and own_s > max(others_s)
    clock, usual_mhz = engine.gpus.get("sm_clock_mhz"), tier.gpu_median("sm_clock_mhz")
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
    return Facts(values)


def _clock_low(engine: Engine, tier: Tier) -> float | None:
    """The clock of the engine's GPUs divided by the tier's median.

    None unless it is low while the engine works.
    """
    own, usual = engine.gpus.get("sm_clock_mhz"), tier.gpu_median("sm_clock_mhz")
    if own is None or not usual or (engine.in_flight or 0.0) < 1:
        return None
    return own / usual if own / usual <= CLOCK_BELOW else None


def over(engine: Engine, tier: Tier, signal: str) -> float | None:
    """A signal divided by the tier's median; None if either is unknown."""
    own, usual = engine.get(signal), tier.median(signal)
    return own / usual if own is not None and usual else None


# --- Imbalance, cold replicas, idle replicas ------------------------------------------------------

BUSIER = 2.0
MORE_REQUESTS = 4.0
"""An overloaded replica has at least this many requests more than the median.

It also has at least BUSIER times as many.
"""

LENGTH_MEANS = ("prompt_tokens_mean", "output_tokens_mean")

FULLER = 0.3
"""A replica is also overloaded if its KV cache is fuller than the median by at least this share.

Its usage must also be BUSIER times the median's. It then has longer requests, though perhaps not
more.
"""

DRAINS_S, DRAINED = 60.0, 0.2
"""A backlog drains if at least this share of it would be gone in so many seconds."""

ROOM_BELOW = 0.8
"""Up to this KV usage, the median replica could take over load."""

TAKES_ALL = 0.8
"""From this share of a tier's requests on, one of its engines takes them all."""

COLD_S = 600.0
IDLE_RUNNING = 0.5
"""A replica is idle if its mean of running requests over an hour is below this.

Rule IDLE-HOURS.
"""

IDLE_SHARE = 0.25


QUEUES = ("waiting", "waiting_avg")
REPAIR = (
    "Repair the router: its endpoint list, weights or sticky sessions send the requests to {}, and "
    "the others idle. More replicas would not help."
)


def replica_imbalance(tier: Tier) -> FleetCause | None:
    """Some engines carry far more load than others because they get more requests or tokens.

    An engine that makes no progress piles requests up without getting more, and so does one whose
    backlog drains: neither carries more load. If the engines queue or preempt while the median
    engine has room, this cause explains their own causes. Otherwise it explains none.
    """
    loaded = [(load, e) for e in tier.engines if (load := e.in_flight) is not None]
    if len(loaded) < 2:
        return None
    # Of two engines the lower load is the usual one, of more the median.
    loads = sorted(load for load, _ in loaded)
    usual = loads[(len(loads) - 1) // 2]
    usages = sorted(u for _, e in loaded if (u := e.get("kv_usage_avg_ratio")) is not None)
    usual_usage = usages[(len(usages) - 1) // 2] if usages else None
    hot = [
        e
        for load, e in loaded
        if (_has_more_requests(load, usual) or _has_more_tokens(e, usual_usage))
        and _gets_more(e, tier)
        and not is_slow(e, tier)
        and not (_clock_low(e, tier) is not None and _is_asked_alike(e, tier))
    ]
    if not hot:
        return _starved(tier)
    most = max(hot, key=lambda e: (e.in_flight or 0.0, e.get("kv_usage_avg_ratio") or 0.0))
    case = _imbalance(tier, hot, most, usual, of=len(loaded))
    _weigh_arrivals(case, most, tier)
    waiting = most.get("waiting") or 0.0
    room = sum(e.get("waiting") == 0 for e in tier.engines)
    if waiting >= 1 and room:
        case.weigh(
            "waiting",
            waiting,
            1.0,
            0.8,
            f"{plural(round(waiting), 'request')} queued there, none on {plural(room, 'other')}",
        )
    spare = 2 * room >= len(tier.engines) and (usual_usage or 0.0) < ROOM_BELOW
    case.apart = not (spare and case.severity >= Severity.WARNING)
    return closed(case, tier.pool, tier.tier, hot)


def _starved(tier: Tier) -> FleetCause | None:
    """Engines that get no request while half of the others or more queue: no engine is beyond the
    median then."""
    idle = [
        e
        for e in tier.engines
        if e.in_flight == 0 == e.get("arrival_per_s") and (e.get("age_s") or 0.0) >= COLD_S
    ]
    queued = [e for e in tier.engines if min(e.get(key) or 0.0 for key in QUEUES) >= 1]
    if not idle or 2 * len(queued) < len(tier.engines) - len(idle):
        return None
    waiting = sum(e.get("waiting") or 0.0 for e in queued)
    words = f"{len(idle)} of {len(tier.engines)} engines get no request"
    case = Case(
        "replica_imbalance",
        f"{words} while {waiting:.0f} requests queue on {plural(len(queued), 'other')}.",
        REPAIR.format("some engines"),
        Severity.WARNING,
        log_odds=-0.6,
    )
    case.weigh("arrival_per_s", 0.0, None, 1.4, words)
    case.weigh("waiting", waiting, 1.0, 0.8, f"{waiting:.0f} requests are queued elsewhere")
    return closed(case, tier.pool, tier.tier, idle)


def _gets_more(engine: Engine, tier: Tier) -> bool:
    """Whether an engine's load comes from what it is sent.

    It generates tokens and its backlog does not drain. It gets more requests than the median or
    longer ones, or more than it serves.
    """
    if engine.get(STALL) or engine.get("generation_tokens_per_s") == 0 or _drains(engine):
        return False
    if any(cause.id in PILES_UP and may_explain(cause) for cause in engine.causes):
        return False
    grows = engine.get("waiting_slope_per_s") or 0.0
    if tier.median("arrival_per_s") == 0:
        return bool(engine.get("arrival_per_s"))
    # The requests of a queue that shrinks get first tokens and fill the cache, and do not arrive.
    asked = (*LENGTH_MEANS, *(() if grows < 0 else ("kv_usage_avg_ratio",)))
    shares = [_share_sent(engine, tier), *(over(engine, tier, key) for key in asked)]
    return (
        grows > 0 or None in shares[:1] or any((share or 0.0) > SAME_ARRIVALS for share in shares)
    )


def _share_sent(engine: Engine, tier: Tier) -> float | None:
    """The requests/s that an engine is sent, divided by the tier's median; None if unknown."""
    own, usual = engine.get("arrival_per_s"), tier.median("arrival_per_s")
    if own is None or not usual:
        return None
    return max(0.0, own + min(0.0, engine.get("waiting_slope_per_s") or 0.0)) / usual


def _drains(engine: Engine) -> bool:
    """Whether the engine serves a backlog that shrinks."""
    grows, waiting = engine.get("waiting_slope_per_s") or 0.0, engine.get("waiting") or 0.0
    return bool(engine.get(DRAINS)) or grows * DRAINS_S <= -DRAINED * waiting < 0


def _has_more_requests(load: float, usual: float) -> bool:
    return load >= BUSIER * usual and load - usual >= MORE_REQUESTS


def _has_more_tokens(engine: Engine, usual: float | None) -> bool:
    usage = engine.get("kv_usage_avg_ratio")
    if usage is None or usual is None:
        return False
    return usage >= BUSIER * usual and usage - usual >= FULLER


def _has_longer_requests(engine: Engine, tier: Tier) -> bool:
    """Whether the engine gets no more requests than its peers, but far longer ones now."""
    now: Mapping[str, float | None] = {} if engine.verdict is None else engine.verdict.values
    usual = {key: tier.median(key) or math.inf for key in LENGTH_MEANS}
    longer = any((now.get(key) or 0.0) >= BUSIER * usual[key] for key in usual)
    return longer and _is_asked_alike(engine, tier)


def _takes_all(engine: Engine, tier: Tier) -> float:
    """The share of the tier's requests that one of several replicas gets, or one of a replica's
    engines, if it gets nearly all; 0 otherwise."""
    own = {engine.member.name} if tier.replicas == 1 else {engine.member.replica}
    rates = [
        (e.get("arrival_per_s") or 0.0, {e.member.name, e.member.replica}) for e in tier.engines
    ]
    arrived = sum(rate for rate, _ in rates)
    share = sum(rate for rate, names in rates if own & names) / arrived if arrived else 0.0
    return share if share >= TAKES_ALL and len(tier.engines) >= PEERS_MIN else 0.0


def _imbalance(tier: Tier, hot: Sequence[Engine], most: Engine, usual: float, *, of: int) -> Case:
    """The case of an imbalance: by requests or, if all have about as many requests, by tokens.

    Idle replicas that were busy within the hour are lost, although none is down: critical, as
    replicas that are down.
    """
    was_busy = (tier.median("running_hour_avg") or 0.0) >= IDLE_RUNNING
    load, of_one = most.in_flight or 0.0, len({e.member.replica for e in tier.engines}) == 1
    usage, others = most.get("kv_usage_avg_ratio"), tier.median("kv_usage_avg_ratio")
    by_requests = _has_more_requests(load, usual)
    figures = figures_in_flight = f"{load:,.0f} requests in flight, the median is {usual:.0f}"
    if not by_requests:
        figures = f"a KV cache {percent(usage or 0.0)} full, the median is {percent(others or 0.0)}"
    what = "data-parallel engines of one replica" if of_one else "engines"
    lever = "Balance by load (fewest requests in flight or KV usage), not round-robin; with sticky "
    lever += "routing, limit the share of one replica."
    if takes := _takes_all(most, tier):
        figures += f"; the router sends it {percent(takes)} of the requests"
        lever = REPAIR.format("one engine")
    case = Case(
        "replica_imbalance",
        f"{len(hot)} of {of} {what} {'carry' if len(hot) > 1 else 'carries'} far more load "
        f"than the others: {most.member.name} has {figures}.",
        lever,
        Severity.CRITICAL if takes and usual < 1 and was_busy else _severity(hot, tier),
        log_odds=-0.6,
    )
    if by_requests:
        times = load / max(usual, 1.0)
        text = f"{about(times)}x the median requests in flight" if usual >= 1 else figures_in_flight
        case.weigh("running_avg", times, BUSIER, 1.4, text)
    if usage is not None and others is not None and usage - others >= 0.1:
        case.weigh(
            "kv_usage_avg_ratio",
            usage,
            None,
            0.5 if by_requests else 1.4,
            f"its KV cache is {percent(usage)} full, the median is {percent(others)}",
        )
    return case


def _severity(hot: Sequence[Engine], tier: Tier) -> Severity:
    """Warning where the overloaded engines queue or preempt requests, or just did, else info.

    Where their requests are longer, not more, the harm is reported by its own causes.
    """
    effects = EXPLAINS["replica_imbalance"]
    harmed = any(
        (e.get("waiting") or 0.0) >= 1
        or (e.stage or 0) >= 2
        or any(own.id in effects and own.severity >= Severity.WARNING for own in e.causes)
        for e in hot
        if not _has_longer_requests(e, tier)
    )
    return Severity.WARNING if harmed else Severity.INFO


def _weigh_arrivals(case: Case, engine: Engine, tier: Tier) -> None:
    own, share = engine.get("arrival_per_s"), _share_sent(engine, tier)
    if own and tier.median("arrival_per_s") == 0:
        text = f"it gets {own:.1f} requests/s, the median engine none"
        case.weigh("arrival_per_s", own, None, 1.0, text)
    if share is None:
        return
    more = share > SAME_ARRIVALS
    case.weigh(
        "arrival_per_s",
        share,
        SAME_ARRIVALS if more else None,
        1.0 if more else -0.6,
        f"it gets {share:.1f}x the median request rate"
        + ("" if more else ": its requests are longer, or it is slow"),
    )


def cold_replicas(tier: Tier) -> FleetCause | None:
    """The cause for replicas that started recently in a tier that has been running for longer."""
    cold = [e for e in tier.engines if (age_s := e.get("age_s")) is not None and age_s < COLD_S]
    warm = [e for e in tier.engines if (e.get("age_s") or 0.0) >= COLD_S]
    if not cold or len(cold) > len(warm):
        return None
    youngest = min(cold, key=lambda e: e.get("age_s") or 0.0)
    case = Case(
        "cold_replica",
        f"{len(cold)} of {len(tier.engines)} engines started within the last {span(COLD_S)} "
        f"({youngest.member.name} {span(youngest.get('age_s') or 0.0)} ago): cold caches.",
        "Wait, or warm up new replicas before they get their full share; scale up earlier, by the "
        "start-up time.",
        Severity.INFO,
        log_odds=0.3,
    )
    for signal, name, lower in (
        ("prefix_hit_ratio", "prefix hit ratio", True),
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
            f"{name} is {own / usual:.2f}x that of warm replicas",
        )
    return closed(case, tier.pool, tier.tier, cold)


def _prefills(engine: Engine, tier: Tier) -> bool:
    """Whether the engine works as the prefill side of a P/D pool: its requests are over before a
    scrape can see many of them."""
    length = engine.get("output_tokens_mean")
    one_token = tier.role == "prefill" or (length is not None and length <= ONE_TOKEN)
    return one_token and bool(engine.get("arrival_per_s"))


def underused(tier: Tier) -> FleetCause | None:
    """The cause for a tier in which a share of the engines was idle over the last hour."""
    # The hourly mean is valid only for engines that were scraped an hour ago.
    seen = [e for e in tier.engines if e.get("running_hour_ago") is not None]
    measured = [(r, e) for e in seen if (r := e.get("running_hour_avg")) is not None]
    idle = [e for running, e in measured if running < IDLE_RUNNING and not _prefills(e, tier)]
    if not measured or len(idle) < IDLE_SHARE * len(measured):
        return None
    mean = sum(running for running, _ in measured) / len(measured)
    peaks = [most for _, e in measured if (most := e.get("running_hour_max")) is not None]
    peak = f", peak {max(peaks):.0f}" if peaks else ""
    case = Case(
        "underused",
        f"{len(idle)} of {plural(len(measured), 'engine')} {'was' if len(idle) == 1 else 'were'} "
        f"idle in the last hour (mean of all engines {mean:.1f} requests running{peak}).",
        "Consolidate, add batch work, or keep fewer replicas warm; check a whole week before you "
        "give hardware back.",
        Severity.INFO,
        log_odds=0.0,
    )
    share = len(idle) / len(measured)
    case.weigh(
        "running_hour_avg", share, IDLE_SHARE, 1.2, f"{percent(share)} of the engines are idle"
    )
    stressed = [e for _, e in measured if (e.stage or 0) >= 2 or (e.get("waiting") or 0.0) >= 1]
    if stressed:
        case.weigh(
            "waiting",
            float(len(stressed)),
            None,
            -0.8,
            f"queue or preemptions on {plural(len(stressed), 'other engine')}: balance the load "
            "first",
        )
    return closed(case, tier.pool, tier.tier, idle)
