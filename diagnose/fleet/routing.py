"""Routing that ignores prefixes or kinds of GPU: guide 7.3, 9.5. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.diagnose.causes.evidence import Case
from kneewatch.diagnose.fleet.engine_state import Engine
from kneewatch.diagnose.fleet.tier import FleetCause, Tier, middle, names_of
from kneewatch.rules.rule import Severity

PROMPTS_PER_S = 200.0
"""Fewer prompt tokens a second than this say nothing about a prefix cache."""

HIT_WHOLE = 0.25
MISSED = 0.75
"""A prompt hits whole where at most a quarter of a median prompt is computed for it, and misses
where three quarters are."""

LOST_BELOW = 0.75
"""Hits below this share of what repeats would give are lost ones."""

MOST_OF = 0.6
"""Routing shows on most replicas; what few show is their own."""

SHORT_LIFE_S = 120.0
LONG_LIFE_S = 1800.0
ALIKE = 1.5


def routing_dilution(tier: Tier) -> FleetCause | None:
    """Hit rates are low on most replicas while the prompts that they get do repeat."""
    engines = [e for e in tier.engines if (e.get("prefix_query_per_s") or 0.0) >= PROMPTS_PER_S]
    diluted = [engine for engine in engines if _loses_repeats(engine)]
    replicas = len({engine.member.replica for engine in engines})
    if replicas < 2 or len(diluted) < max(2, MOST_OF * len(engines)):
        return None
    hits = middle(engine.get("prefix_hit_ratio") for engine in diluted) or 0.0
    possible = middle(map(reuse_possible, diluted)) or 1.0
    case = Case(
        "routing_dilution",
        f"{len(diluted)} of {len(engines)} engines miss prefixes that do repeat: "
        f"{100 * hits:.0f} % of prompt tokens hit, {100 * possible:.0f} % could. Routing spreads "
        f"each prefix over {replicas} replicas.",
        "Route by prefix or session (consistent hashing on the prompt's beginning, or a "
        "cache-aware router), so that each replica sees a share of the prefixes.",
        ("7.3", "7.7"),
        Severity.WARNING,
        log_odds=-0.8,
    )
    got = hits / possible
    case.weigh(
        "prefix_hit_ratio",
        got,
        LOST_BELOW,
        1.2,
        f"replicas get {100 * got:.0f} % of the hits that repeats would give",
        below=True,
    )
    _weigh_repeats(case, diluted)
    _weigh_chance(case, got, replicas)
    _weigh_life(case, diluted)
    others = len(engines) - len(diluted)
    if others:
        case.weigh(
            "prefix_hit_ratio",
            others / len(engines),
            None,
            -0.8 * others / len(engines),
            f"{others} of {len(engines)} engines do hit: some affinity is there",
        )
    return _closed(case, tier, diluted)


def reuse_possible(engine: Engine) -> float | None:
    """The hit ratio that an engine would have if each repeat hit; None where no repeat is seen.

    What the luckiest tenth of the prompts computes is new in each; all else was seen before. The
    quiet baseline, where recording rules know one, is a ratio that has been had.
    """
    fewest, prompt = engine.get("prefill_tokens_p10"), engine.get("prompt_tokens_p50")
    seen = engine.get("prefix_hit_quiet_ratio")
    if fewest is None or not prompt or fewest > HIT_WHOLE * prompt:
        return seen
    return max(1 - fewest / prompt, seen or 0.0)


def _loses_repeats(engine: Engine) -> bool:
    """Whether prompts hit whole or miss whole, and too many miss."""
    hits, possible = engine.get("prefix_hit_ratio"), reuse_possible(engine)
    most, prompt = engine.get("prefill_tokens_p90"), engine.get("prompt_tokens_p50")
    if hits is None or possible is None or possible <= 0 or most is None or not prompt:
        return False
    return hits < LOST_BELOW * possible and most >= MISSED * prompt


def _weigh_repeats(case: Case, engines: Sequence[Engine]) -> None:
    fewest = middle(engine.get("prefill_tokens_p10") for engine in engines)
    most = middle(engine.get("prefill_tokens_p90") for engine in engines)
    if fewest is not None and most is not None:
        case.weigh(
            "prefill_tokens_p90",
            most,
            None,
            0.8,
            f"prompts hit whole or miss whole (a tenth computes {fewest:.0f} tokens or fewer, a "
            f"tenth {most:.0f} or more): they do repeat",
        )


def _weigh_chance(case: Case, got: float, replicas: int) -> None:
    chance = 1 / replicas
    near = got <= ALIKE * chance
    case.weigh(
        "prefix_hit_ratio",
        got,
        None,
        0.8 if near else -0.2,
        f"a prompt that meets any of {replicas} replicas by chance hits {100 * chance:.0f} % of "
        f"what it could; it is {100 * got:.0f} %",
    )


def _weigh_life(case: Case, engines: Sequence[Engine]) -> None:
    """A prefix that stays for long is known to every replica in the end."""
    life_s = middle(map(block_life_s, engines))
    if life_s is None:
        return
    if life_s <= LONG_LIFE_S:
        case.weigh(
            "kv_capacity_tokens",
            life_s,
            SHORT_LIFE_S,
            1.0,
            f"a cached block lasts about {life_s:.0f} s: no replica can hold all prefixes",
            below=True,
        )
        return
    case.weigh(
        "kv_capacity_tokens",
        life_s,
        LONG_LIFE_S,
        -1.2,
        f"a cached block lasts {life_s / 60:.0f} min: every replica has time to learn all prefixes",
    )


def block_life_s(engine: Engine) -> float | None:
    """Seconds until new blocks have replaced all that live requests do not hold."""
    capacity = engine.get("kv_capacity_tokens")
    computed_per_s = engine.get("computed_prompt_tokens_per_s")
    if capacity is None or computed_per_s is None:
        return None
    written_per_s = computed_per_s + (engine.get("generation_tokens_per_s") or 0.0)
    usage = engine.get("kv_usage_avg_ratio") or 0.0
    return capacity * (1 - usage) / written_per_s if written_per_s > 0 else None


SLOWER = 1.5
EVENLY = 1.3


def mixed_tiers(tiers: Sequence[Tier]) -> FleetCause | None:
    """Kinds of GPU in one pool that get the same requests at random: the slow one makes the P99."""
    known = [tier for tier in tiers if tier.tier and _arrivals(tier)]
    if len(known) < 2:
        return None
    compared = [one for key in ("ttft_p99_s", "itl_p99_s") if (one := _extremes(known, key))]
    if not compared:
        return None
    slower, signal, slow, fast = max(compared, key=lambda one: one[0])
    if slower < SLOWER:
        return None
    share = (_arrivals(slow) or 0.0) / (_arrivals(fast) or 1.0)
    case = Case(
        "mixed_tiers",
        f"{slow.tier} and {fast.tier} take the same requests, and {slow.tier} sets the P99: "
        f"{signal} is {slower:.1f} times that of {fast.tier}.",
        "Route by what a request needs (length, urgency) to a tier that is sized for it, and judge "
        "each tier by its own targets.",
        ("9.5",),
        Severity.WARNING,
        log_odds=-0.6,
    )
    case.weigh(signal, slower, SLOWER, 1.6, f"the median replica of {slow.tier} is so much slower")
    evenly = 1 / EVENLY <= share <= EVENLY
    case.weigh(
        "arrival_per_s",
        share,
        None,
        1.0 if evenly else -1.2,
        f"a replica of {slow.tier} gets {100 * share:.0f} % of the requests of one of {fast.tier}"
        + ("" if evenly else ": the router does tell them apart"),
    )
    return _closed(case, slow, slow.engines)


def _extremes(tiers: Sequence[Tier], signal: str) -> tuple[float, str, Tier, Tier] | None:
    """How many times the slowest tier's value is that of the fastest, the signal, and both."""
    rows = [(value, tier) for tier in tiers if (value := _middle(tier, signal))]
    if len(rows) < 2:
        return None
    least, most = min(rows, key=lambda row: row[0]), max(rows, key=lambda row: row[0])
    return most[0] / least[0], signal, most[1], least[1]


def _middle(tier: Tier, signal: str) -> float | None:
    return middle(engine.get(signal) for engine in tier.engines)


def _arrivals(tier: Tier) -> float | None:
    return _middle(tier, "arrival_per_s")


def _closed(case: Case, tier: Tier, engines: Sequence[Engine]) -> FleetCause | None:
    cause = case.close()
    return None if cause is None else FleetCause(cause, tier.pool, tier.tier, names_of(engines))
