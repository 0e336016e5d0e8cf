"""Causes of routing that ignores prefixes or GPU types: guide 7.3, 9.5. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.diagnose.causes.evidence import Case
from kneewatch.diagnose.fleet.engine_state import Engine
from kneewatch.diagnose.fleet.tier import FleetCause, Tier, middle, names_of
from kneewatch.rules.rule import Severity

PROMPTS_PER_S = 200.0
"""Prompt tokens/s from which on a prefix cache's hit ratio is meaningful."""

HIT_WHOLE = 0.25
MISSED = 0.75
"""A prompt counts as a hit where at most this share of a median prompt is computed for it, and as a
miss from MISSED on."""

LOST_BELOW = 0.75
"""Hits count as lost below this share of what repeated prefixes would give."""

MOST_OF = 0.6
"""Least share of replicas: routing affects most of them; what few show has another cause."""

SHORT_LIFE_S = 120.0
LONG_LIFE_S = 1800.0
ALIKE = 1.5


def routing_dilution(tier: Tier) -> FleetCause | None:
    """The cause where hit ratios are low on most replicas although their prompts repeat."""
    engines = [e for e in tier.engines if (e.get("prefix_query_per_s") or 0.0) >= PROMPTS_PER_S]
    diluted = [engine for engine in engines if _loses_repeats(engine)]
    replicas = len({engine.member.replica for engine in engines})
    if replicas < 2 or len(diluted) < max(2, MOST_OF * len(engines)):
        return None
    hits = middle(engine.get("prefix_hit_ratio") for engine in diluted) or 0.0
    possible = middle(map(reuse_possible, diluted)) or 1.0
    case = Case(
        "routing_dilution",
        f"Routing ignores prefixes: {len(diluted)} of {len(engines)} engines miss prefixes that "
        f"repeat. Hit ratio {hits:.0%}, {possible:.0%} possible, {replicas} replicas.",
        "Route by prefix or session (consistent hashing on the start of the prompt, or a "
        "cache-aware router), so that each replica serves a share of the prefixes.",
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
        f"replicas get {got:.0%} of the hits that repeated prefixes would give",
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
            f"{others} of {len(engines)} engines do hit: there is some affinity",
        )
    return _closed(case, tier, diluted)


def reuse_possible(engine: Engine) -> float | None:
    """The hit ratio of an engine if every repeated prefix hit; None where no prompt repeats.

    What the best tenth of the prompts still computes is new in each prompt, the rest repeats. The
    quiet baseline from recording rules, if any, is a ratio that was once reached.
    """
    fewest, prompt = engine.get("prefill_tokens_p10"), engine.get("prompt_tokens_p50")
    seen = engine.get("prefix_hit_quiet_ratio")
    if fewest is None or not prompt or fewest > HIT_WHOLE * prompt:
        return seen
    return max(1 - fewest / prompt, seen or 0.0)


def _loses_repeats(engine: Engine) -> bool:
    """Whether prompts hit fully or miss fully, and too many miss."""
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
            f"prompts hit fully or miss fully (computed tokens P10 {fewest:.0f}, P90 {most:.0f}): "
            "prefixes do repeat",
        )


def _weigh_chance(case: Case, got: float, replicas: int) -> None:
    chance = 1 / replicas
    near = got <= ALIKE * chance
    case.weigh(
        "prefix_hit_ratio",
        got,
        None,
        0.8 if near else -0.2,
        f"random routing over {replicas} replicas would give {chance:.0%} of the possible hits; "
        f"measured {got:.0%}",
    )


def _weigh_life(case: Case, engines: Sequence[Engine]) -> None:
    """Add the lifetime of a cached block: a prefix that stays for long reaches every replica's
    cache."""
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
        f"a cached block lasts {life_s / 60:.0f} min: every replica can cache all prefixes",
    )


def block_life_s(engine: Engine) -> float | None:
    """Seconds until new blocks have replaced all blocks that no running request holds."""
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
    """The cause where GPU types of one pool get the same share of requests and one is far
    slower."""
    known = [tier for tier in tiers if tier.tier and _arrivals(tier)]
    if len(known) < 2:
        return None
    compared = [row for key in ("ttft_p99_s", "itl_p99_s") if (row := _extremes(known, key))]
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
        ("9.5",),
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
        f"a {slow.tier} replica gets {share:.0%} of the requests of a {fast.tier} replica"
        + ("" if evenly else ": the router does distinguish them"),
    )
    return _closed(case, slow, slow.engines)


def _extremes(tiers: Sequence[Tier], signal: str) -> tuple[float, str, Tier, Tier] | None:
    """The slowest tier's value over the fastest's, the signal, and both tiers (slowest first)."""
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
