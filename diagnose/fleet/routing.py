"""Causes of routing that ignores prefixes or GPU types. Guide 7.3, 9.5. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf, isfinite

from kneewatch.diagnose.causes.evidence import Case
from kneewatch.diagnose.fleet.inventory import Past, Usual
from kneewatch.diagnose.fleet.outliers import COLD_S, SLOWER
from kneewatch.diagnose.fleet.tier import Engine, FleetCause, Tier, closed, middle
from kneewatch.diagnose.recommend.ledger import LEAST_CHANCE, NEAR_CHANCE
from kneewatch.diagnose.values import Histogram
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import percent, span
from kneewatch.rules.quantities import RECENT
from kneewatch.rules.rule import HOUR_S, Severity

PROMPTS_PER_S = 200.0
"""From this rate of looked-up prompt tokens/s on, a prefix cache's hit ratio is meaningful."""

COMPUTED_LEAST = 0.1
"""An engine that computes a smaller share of the tokens that miss receives their KV."""

MOST_OF = 0.6
"""Least share of replicas that must have lost hits: routing affects most replicas at once."""

COMPUTED_MORE = 1.4
"""The loss is harmful from this ratio on: computed prompt tokens now to those at the usual hit
ratio."""

FALLEN_BY = 0.08
"""Least fall of the hit ratio. Near a ratio of 1, small falls multiply the computed tokens by
chance."""

PROMPTS_CHANGED = 0.6
"""If hits are below this share of random routing's hits, the prompts changed and not the
routing."""

SHARED_FROM = 0.02
"""Below this hit ratio, prompts share no prefixes, whichever replica they are sent to."""

STILL_FALLING = 0.88
"""The hit ratio is still falling if the newest one is below this share of the window's."""

LENGTHS_SHIFTED = 0.15
"""How far the median prompt may move, as a share of the last hour's requests.

Beyond this distance from the last hour's median, prompts count as changed.
"""

MORE_LOAD = 1.5
"""From this ratio of looked-up tokens/s to the usual rate on, caches clearly keep fewer
prefixes."""

SLOWER_TTFT = 1.3
HARMFUL_TTFT = 3.0
"""From this ratio of TTFT P50 to its usual value on, users are harmed and the cause is critical."""

SHORT_LIFE_S = 30.0
"""Blocks that are evicted sooner are gone before most sessions send their next turn."""

HIT_WHOLE = 0.25
MISSED = 0.75
LOST_BELOW = 0.75
"""Hits are lost if they are below this share of the hits that repeated prompts allow.

Used if earlier values are unknown. A prompt then counts as a hit if at most HIT_WHOLE of a median
prompt is computed for it, and as a miss from MISSED on.
"""


def routing_dilution(
    tier: Tier, past: Past, targets: Targets, *, expected: float | None = None
) -> FleetCause | None:
    """Most replicas miss prefixes that the pool used to hit, or that its user expects to be hit,
    although prompts did not change. If earlier values are unknown: hit ratios are those of random
    routing."""
    engines = [e for e in tier.engines if _looks_prompts_up(e)]
    usual = past.reuse_of(tier.group, expected)
    if usual is None:
        return _looks_random(tier, engines)
    # A cold cache misses whatever the routing.
    warm = [engine for engine in engines if _age_s(engine) >= COLD_S]
    fallen = [engine for engine in warm if _has_fallen(engine, usual)]
    hits, replicas = _hit_ratio(warm), _replicas(engines)
    if hits is None or _replicas(warm) < 2 or len(fallen) < max(2, MOST_OF * len(warm)):
        return None
    chance = usual.hit_ratio / replicas
    more = computed_more(hits, usual.hit_ratio)
    newest = _hit_ratio(warm, RECENT["prefix_hit_ratio"])
    settled = newest is None or newest >= STILL_FALLING * hits
    if hits < PROMPTS_CHANGED * chance or more < COMPUTED_MORE or not settled:
        return None
    ttft_p50_s = middle(engine.get("ttft_p50_s") for engine in warm)
    slower = ttft_p50_s / usual.ttft_p50_s if ttft_p50_s and usual.ttft_p50_s else None
    late = targets.ttft_p99_s is not None and any(
        (engine.get("ttft_p99_s") or 0.0) > targets.ttft_p99_s for engine in fallen
    )
    critical = late or (slower is not None and slower >= HARMFUL_TTFT)
    basis = "expected" if usual.expected else "usually"
    case = Case(
        "routing_dilution",
        f"Routing ignores prefixes: hit ratio {percent(hits)}, {basis} {percent(usual.hit_ratio)}, "
        f"on {len(fallen)} of {len(warm)} engines. They compute "
        f"{more:.1f}x the prompt tokens.",
        LEVER,
        Severity.CRITICAL if critical else Severity.WARNING,
        log_odds=-0.4,
    )
    case.weigh(
        "prefix_hit_ratio",
        more,
        COMPUTED_MORE,
        1.6,
        f"hit ratio {percent(hits)} instead of {percent(usual.hit_ratio)}: {more:.1f}x the "
        "computed tokens for the same prompts",
    )
    _weigh_chance(case, hits, chance, replicas)
    _weigh_lengths(case, warm, past.recent.get(tier.group, {}).get("prompt_tokens_mean", {}))
    _weigh_load(case, engines, usual)
    _weigh_new_replicas(case, engines)
    life_s = middle(map(block_life_s, warm))
    if life_s is not None and life_s <= SHORT_LIFE_S:
        case.weigh("kv_capacity_tokens", life_s, SHORT_LIFE_S, 0.4, _life(life_s), below=True)
    if slower is not None:
        case.weigh(
            "ttft_p50_s",
            slower,
            None,
            0.6 if slower >= SLOWER_TTFT else -0.4,
            f"TTFT P50 is {slower:.1f}x its usual value",
        )
    _weigh_others(case, len(warm) - len(fallen), len(warm))
    return closed(case, tier.pool, tier.tier, fallen)


LEVER = (
    "Route by prefix or session (consistent hashing on the start of the prompt, or a cache-aware "
    "router), so that each replica serves a share of the prefixes."
)


def computed_more(hits: float, possible: float) -> float:
    """Prompt tokens computed at this hit ratio, divided by those computed at a better one."""
    return (1 - hits) / max(1 - possible, 0.01)


def reuse_possible(engine: Engine, usual: Usual | None = None) -> float | None:
    """The hit ratio of an engine if every repeated prefix hit; None if no prompt repeats.

    If known, it is the pool's usual one. Otherwise it is an upper estimate: the tokens that the
    best tenth of prompts computes are assumed to be new in every prompt, and all others to be
    repeated.
    """
    if usual is not None:
        return usual.hit_ratio
    fewest, prompt = engine.get("prefill_tokens_p10"), engine.get("prompt_tokens_p50")
    if fewest is None or not prompt or fewest > HIT_WHOLE * prompt:
        return None
    return 1 - fewest / prompt


def _looks_prompts_up(engine: Engine) -> bool:
    """Whether an engine looks up many prompt tokens, and computes those that miss: a decode
    replica gets their KV from a prefill replica."""
    queries, hits = engine.get("prefix_query_per_s") or 0.0, engine.get("prefix_hit_ratio") or 0.0
    computed = engine.get("computed_prompt_tokens_per_s")
    received = computed is not None and computed < COMPUTED_LEAST * (1 - hits) * queries
    return queries >= PROMPTS_PER_S and not received


def _has_fallen(engine: Engine, usual: Usual) -> bool:
    hits = engine.get("prefix_hit_ratio")
    return (
        hits is not None
        and hits <= usual.hit_ratio - FALLEN_BY
        and computed_more(hits, usual.hit_ratio) >= COMPUTED_MORE
    )


def _hit_ratio(engines: Sequence[Engine], signal: str = "prefix_hit_ratio") -> float | None:
    """The hit ratio of several engines, weighted by their looked-up tokens."""
    rows = [
        (queries, hits)
        for engine in engines
        if (queries := engine.get("prefix_query_per_s")) is not None
        and (hits := engine.get(signal)) is not None
    ]
    total = sum(queries for queries, _ in rows)
    return sum(queries * hits for queries, hits in rows) / total if total > 0 else None


def _age_s(engine: Engine) -> float:
    """Seconds since the process started; processes of unknown age count as old."""
    return engine.values.get("age_s", inf)


def _replicas(engines: Sequence[Engine]) -> int:
    return len({engine.member.replica for engine in engines})


def _weigh_chance(case: Case, hits: float, chance: float, replicas: int) -> None:
    near = hits <= NEAR_CHANCE * chance
    case.weigh(
        "prefix_hit_ratio",
        hits,
        None,
        0.4 if near else 0.0,
        f"random routing over {replicas} replicas leaves at least {percent(chance)} while blocks "
        f"last; measured {percent(hits)}",
    )


def _weigh_lengths(case: Case, engines: Sequence[Engine], recent: Histogram) -> None:
    """Add evidence on whether prompts are as long as in the last hour: changed prompts share
    less."""
    median_tokens = middle(engine.get("prompt_tokens_p50") for engine in engines)
    below = None if median_tokens is None else share_below(median_tokens, recent)
    if below is None:
        return
    drifted = abs(below - 0.5) > LENGTHS_SHIFTED
    case.weigh(
        "prompt_tokens_p50",
        median_tokens,
        None,
        -1.6 if drifted else 0.4,
        f"the median prompt is longer than {percent(below)} of the last hour's: "
        + ("the prompts have changed" if drifted else "prompt lengths are as before"),
    )


def share_below(value: float, buckets: Histogram) -> float | None:
    """Share of observations below a value, interpolated linearly within its bucket.

    None without observations.
    """
    edges = sorted(buckets)
    if not edges or edges[-1] != inf or buckets[inf] <= 0:
        return None
    at = bisect_left(edges, value)
    low, below = (edges[at - 1], buckets[edges[at - 1]]) if at else (0.0, 0.0)
    width = edges[at] - low
    within = (value - low) / width if isfinite(width) and width > 0 else 0.0
    return (below + within * (buckets[edges[at]] - below)) / buckets[inf]


def _weigh_load(case: Case, engines: Sequence[Engine], usual: Usual) -> None:
    load = sum(engine.get("prefix_query_per_s") or 0.0 for engine in engines) / usual.query_per_s
    if load >= MORE_LOAD:
        case.weigh(
            "prefix_query_per_s",
            load,
            MORE_LOAD,
            -2.4,
            f"the pool gets {load:.1f}x its usual prompt tokens/s: caches hold fewer sessions",
        )


def _weigh_new_replicas(case: Case, engines: Sequence[Engine]) -> None:
    """Add evidence on replicas that started within the hour.

    If a router hashes modulo the number of replicas, a new replica moves almost every session.
    """
    new = [engine for engine in engines if _age_s(engine) < HOUR_S]
    if 0 < len(new) < len(engines):
        case.weigh(
            "age_s",
            float(len(new)),
            None,
            0.4,
            f"{len(new)} of {len(engines)} engines started within the hour: sessions may have "
            "moved",
        )


def _weigh_others(case: Case, others: int, engines: int) -> None:
    if others:
        case.weigh(
            "prefix_hit_ratio",
            others / engines,
            None,
            -0.8 * others / engines,
            f"{others} of {engines} engines still hit: routing keeps some affinity",
        )


def _looks_random(tier: Tier, engines: Sequence[Engine]) -> FleetCause | None:
    """The cause if hits look like random routing's.

    A warning only if blocks are evicted too soon for a session's second turn.
    """
    lost = [engine for engine in engines if _loses_repeats(engine)]
    replicas = _replicas(engines)
    if replicas < 2 or len(lost) < max(2, MOST_OF * len(engines)):
        return None
    hits = middle(engine.get("prefix_hit_ratio") for engine in lost) or 0.0
    possible = middle(map(reuse_possible, lost)) or 1.0
    got, life_s = hits / possible, middle(map(block_life_s, lost))
    if hits < SHARED_FROM:
        return None
    near_chance = LEAST_CHANCE <= got * replicas <= NEAR_CHANCE
    evicted = near_chance and life_s is not None and life_s <= SHORT_LIFE_S
    case = Case(
        "routing_dilution",
        f"Routing {'ignores' if evicted else 'may ignore'} prefixes: {len(lost)} of "
        f"{len(engines)} engines miss prefixes that repeat. Hit ratio {percent(hits)}, at most "
        f"{percent(possible)} possible, {replicas} replicas."
        + ("" if evicted else f" {FIRST_TURNS}"),
        LEVER,
        Severity.WARNING if evicted else Severity.INFO,
        log_odds=-0.8,
    )
    case.weigh(
        "prefix_hit_ratio",
        got,
        LOST_BELOW,
        1.2,
        f"replicas get {percent(got)} of the hits that the best prompts get",
        below=True,
    )
    fewest = middle(engine.get("prefill_tokens_p10") for engine in lost)
    most = middle(engine.get("prefill_tokens_p90") for engine in lost)
    case.weigh(
        "prefill_tokens_p90",
        most,
        None,
        0.8,
        f"prompts hit fully or miss fully (computed tokens P10 {fewest:.0f}, P90 {most:.0f})",
    )
    _weigh_chance(case, hits, possible / replicas, replicas)
    if life_s is not None:
        case.weigh("kv_capacity_tokens", life_s, None, 1.4 if evicted else -0.4, _life(life_s))
    _weigh_others(case, len(engines) - len(lost), len(engines))
    return closed(case, tier.pool, tier.tier, lost)


FIRST_TURNS = "New sessions look the same: the pool's hit ratio over an hour shows which it is."


def _life(life_s: float) -> str:
    return f"a cached block lasts about {span(life_s)}"


def _loses_repeats(engine: Engine) -> bool:
    """Whether prompts hit fully or miss fully, and too many miss."""
    hits, possible = engine.get("prefix_hit_ratio"), reuse_possible(engine)
    fewest, most = engine.get("prefill_tokens_p10"), engine.get("prefill_tokens_p90")
    prompt = engine.get("prompt_tokens_p50")
    if hits is None or not possible or fewest is None or most is None or not prompt:
        return False
    return hits < LOST_BELOW * possible and most >= MISSED * prompt


def block_life_s(engine: Engine) -> float | None:
    """Seconds until new blocks have replaced all blocks that no running request holds."""
    capacity = engine.get("kv_capacity_tokens")
    computed_per_s = engine.get("computed_prompt_tokens_per_s")
    if capacity is None or computed_per_s is None:
        return None
    written_per_s = computed_per_s + (engine.get("generation_tokens_per_s") or 0.0)
    usage = engine.get("kv_usage_avg_ratio") or 0.0
    return capacity * (1 - usage) / written_per_s if written_per_s > 0 else None


EVENLY = 1.3


def mixed_tiers(tiers: Sequence[Tier]) -> FleetCause | None:
    """GPU types of one pool get the same share of requests although one type is far slower."""
    routed = [tier for tier in tiers if tier.tier and _arrivals(tier)]
    if len(routed) < 2:
        return None
    compared = [row for key in ("ttft_p99_s", "itl_p99_s") if (row := _extremes(routed, key))]
    if not compared:
        return None
    slower, signal, slow, fast = max(compared, key=lambda row: row[0])
    if slower < SLOWER:
        return None
    share = (_arrivals(slow) or 0.0) / (_arrivals(fast) or 1.0)
    case = Case(
        "mixed_tiers",
        f"{slow.tier} and {fast.tier} share one pool, and {slow.tier} is slower: its {signal} is "
        f"{slower:.1f}x that of {fast.tier}.",
        "Route requests by length or urgency to the tier that is sized for them, and give each "
        "tier its own targets.",
        Severity.WARNING,
        log_odds=-0.6,
    )
    case.weigh(
        signal,
        slower,
        SLOWER,
        1.6,
        f"{signal} of the median {slow.tier} replica is {slower:.1f}x that of {fast.tier}",
    )
    evenly = 1 / EVENLY <= share <= EVENLY
    case.weigh(
        "arrival_per_s",
        share,
        None,
        1.0 if evenly else -1.2,
        f"a {slow.tier} replica gets {percent(share)} of the requests of a {fast.tier} replica"
        + ("" if evenly else ": the router does distinguish them"),
    )
    return closed(case, slow.pool, slow.tier, slow.engines)


def _extremes(tiers: Sequence[Tier], signal: str) -> tuple[float, str, Tier, Tier] | None:
    """The slowest and the fastest tier by a signal; None with fewer than two values.

    Returns how many times slower the slow one is, the signal, the slow tier and the fast tier.
    """
    rows = [(value, tier) for tier in tiers if (value := tier.median(signal))]
    if len(rows) < 2:
        return None
    least, most = min(rows, key=lambda row: row[0]), max(rows, key=lambda row: row[0])
    return most[0] / least[0], signal, most[1], least[1]


def _arrivals(tier: Tier) -> float | None:
    return tier.median("arrival_per_s")
