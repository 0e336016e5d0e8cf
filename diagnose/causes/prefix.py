"""Causes around the prefix cache: off, lost, churning: guide 7.2, 7.3, 7.7. Pure."""

from __future__ import annotations

from kneewatch.diagnose.case import Case, Cause, Facts
from kneewatch.rules.model import Severity

WORK_RATIO = 4.0
"""Prompt tokens computed per token generated from which prefill is the larger part of the work."""

PREFILL_SHARE = 0.05
"""Of the time that a request is served: a queue makes prefill no lighter."""

PREFILL_BUSY = 0.3
"""Of the engine's time: a large model that decodes many requests at once, each of them for long,
may compute prompts for half of it, and yet prefill is little of a request's time."""

WAS_SHARED_FROM = 0.3
HALVED, DROPPED = 0.5, 0.75
RESIDUAL_HITS = 0.08
"""Below this nothing matches any more; above it prefixes still repeat and some survive."""

NEVER_HITS = 0.02
NEVER_SHARE = 0.3
"""Prompts that share nothing, where prefill is this share of their service, are worth a note."""

HIT_TOKENS = "prefix_hit_tokens_mean"
SHORT_RESIDENCY_S = 60.0
PARTIAL_HITS = (0.1, 0.8)
HITS_AGAIN = 0.85
SIDES_MIN = 0.1
ALL_OR_NOTHING_FROM = 0.75
NEAR_EVICTION = 0.4
"""Blocks that are used again after so much of the time that an unused one lasts: about as many are
used again too late, for those that are do not report a gap."""

ANOTHER_TIER = 0.1
LEVER_ROOM = (
    "Show each replica fewer prefixes (route by prefix) or give the KV cache more room; "
    "a prefix that "
    "most requests share should not be evicted by those that do not."
)


def prefill_is_heavy(facts: Facts) -> bool:
    """Whether prompts make enough work for a prefix cache to matter."""
    computed_per_s = facts.get("computed_prompt_tokens_per_s")
    ratio = computed_per_s / max(facts.get("generation_tokens_per_s"), 1e-9)
    return (
        computed_per_s > 0
        and ratio >= WORK_RATIO
        and (
            facts.get("prefill_service_ratio") >= PREFILL_SHARE
            or facts.get("prefill_busy_ratio") >= PREFILL_BUSY
        )
    )


def prefix_cache_off(facts: Facts) -> Cause | None:
    """Prefix caching is disabled while prefill is much of the work."""
    if facts.config.get("enable_prefix_caching") != "False" or not prefill_is_heavy(facts):
        return None
    work = _work_ratio(facts)
    case = Case(
        "prefix_cache_off",
        "Prefix caching is off while prompts are most of the work; whether prompts repeat "
        "cannot be "
        "seen while it is off.",
        "Remove --no-enable-prefix-caching (caching is vLLM's default) and watch the hit ratio.",
        ("7.2", "8.5"),
        Severity.WARNING,
        log_odds=0.3,
    )
    case.weigh(
        "computed_prompt_tokens_per_s",
        work,
        WORK_RATIO,
        1.2,
        f"{work:.0f} prompt tokens are computed for each token generated",
    )
    _weigh_prefill(case, facts, 1.0)
    return case.close()


def prefix_reuse_lost(facts: Facts) -> Cause | None:
    """Prompts stopped sharing prefixes, or (a note) never shared any."""
    hits, quiet = _fewest(facts, "prefix_hit_ratio"), facts.baseline.get("prefix_hit_ratio")
    if hits is None or not _caching(facts) or not prefill_is_heavy(facts):
        return None
    if quiet is None or quiet < WAS_SHARED_FROM:
        return _never_shared(facts, hits)
    if hits > HALVED * quiet or (hits > RESIDUAL_HITS and _turnover_short(facts)):
        return None
    if not _fewer_a_request(facts, HALVED):
        return None
    case = Case(
        "prefix_reuse_lost",
        f"Prompts stopped sharing prefixes: {100 * hits:.0f} % of prompt tokens hit the cache, "
        f"{100 * quiet:.0f} % when all was well.",
        "Look at what changed in front of the prompt (a date, an id, a reordered template) "
        "and at the "
        "router's stickiness; the shared part must come first, byte for byte.",
        ("7.2", "7.3", "9.3"),
        Severity.WARNING,
        log_odds=0.5,
    )
    case.weigh(
        "prefix_hit_ratio",
        hits,
        HALVED * quiet,
        2.0,
        f"hit ratio {100 * hits:.0f} % against {100 * quiet:.0f} % in quiet times",
        below=True,
    )
    _tell_hits_a_request(case, facts)
    if hits > RESIDUAL_HITS:
        case.weigh(
            "prefix_hit_ratio", hits, RESIDUAL_HITS, -0.8, "some prefixes still hit: maybe churn"
        )
    _weigh_prefill(case, facts)
    _weigh_tiers(case, facts, hits)
    return case.close()


def _never_shared(facts: Facts, hits: float) -> Cause | None:
    share = facts.get("prefill_service_ratio")
    if hits > NEVER_HITS or share < NEVER_SHARE or facts.observed_s < 2 * facts.window_s:
        return None
    case = Case(
        "prefix_reuse_lost",
        "Prompts share no prefix, as far as we have seen; prefill is a large part of the work.",
        "Nothing is broken. If prompts have a common part, put it first.",
        ("7.2",),
        Severity.INFO,
        log_odds=0.2,
    )
    case.weigh(
        "prefix_hit_ratio", hits, NEVER_HITS, 0.3, f"hit ratio {100 * hits:.0f} %", below=True
    )
    return case.close()


def prefix_churn(facts: Facts) -> Cause | None:
    """Prefixes are evicted before they are used again."""
    hits, quiet = facts.values.get("prefix_hit_ratio"), facts.baseline.get("prefix_hit_ratio")
    if hits is None or not _caching(facts) or not prefill_is_heavy(facts):
        return None
    if hits <= RESIDUAL_HITS or not _turnover_short(facts) or _hits_again(facts):
        return None
    dropped = (
        quiet is not None
        and quiet >= WAS_SHARED_FROM
        and hits <= DROPPED * quiet
        and _fewer_a_request(facts, DROPPED)
    )
    reused = facts.get("block_reuse_per_s") > 0
    mixed = _all_or_nothing(facts)
    if not dropped and not (PARTIAL_HITS[0] <= hits <= PARTIAL_HITS[1] and (reused or mixed)):
        return None
    residency_s = turnover_s(facts) or 0.0
    case = Case(
        "prefix_churn",
        f"Prefixes are evicted before they are used again: only {100 * hits:.0f} % of prompt "
        "tokens "
        f"hit, a cached block lasts about {residency_s:.0f} s.",
        LEVER_ROOM,
        ("7.3", "7.4", "7.7"),
        Severity.WARNING,
        log_odds=-0.3,
    )
    case.weigh(
        "kv_residency_s",
        residency_s,
        SHORT_RESIDENCY_S,
        1.2,
        f"new blocks replace the whole free cache in about {residency_s:.0f} s",
        below=True,
    )
    if dropped and quiet is not None:
        case.weigh(
            "prefix_hit_ratio",
            hits,
            DROPPED * quiet,
            1.5,
            f"hit ratio {100 * hits:.0f} % against {100 * quiet:.0f} % in quiet times",
            below=True,
        )
    if reused:
        rate = facts.get("block_eviction_per_s")
        case.weigh(
            "block_eviction_per_s", rate, 5.0, 1.0, f"{rate:.0f} blocks a second are evicted"
        )
    if mixed:
        case.weigh(
            "prefill_tokens_p95",
            facts.get("prefill_tokens_p95"),
            None,
            0.8,
            "prompts hit whole or miss whole: the same prefixes, sometimes evicted",
        )
    _weigh_gaps(case, facts)
    _weigh_tiers(case, facts, hits)
    return case.close()


def _weigh_gaps(case: Case, facts: Facts) -> None:
    """What --kv-cache-metrics tells: whether blocks go when they would soon be used again."""
    gap_s, idle_s = facts.values.get("kv_reuse_gap_s"), facts.values.get("kv_idle_before_evict_s")
    if gap_s is None or not idle_s:
        return
    near = gap_s >= NEAR_EVICTION * idle_s
    case.weigh(
        "kv_reuse_gap_s",
        gap_s,
        NEAR_EVICTION * idle_s if near else None,
        0.8 if near else -0.4,
        f"blocks are used again after {gap_s:.1f} s and go once unused for {idle_s:.1f} s"
        + ("" if near else ": what is used again is mostly still there"),
    )


def _weigh_tiers(case: Case, facts: Facts, hits: float) -> None:
    """Tokens that the GPU's cache missed and another tier had: they are not computed either."""
    saved = facts.values.get("prefix_saved_ratio")
    if saved is None or saved - hits < ANOTHER_TIER:
        return
    external = facts.values.get("external_hit_ratio")
    tier = "" if external is None else f" (it hits {100 * external:.0f} % of what it is asked)"
    case.weigh(
        "prefix_saved_ratio",
        saved,
        None,
        -0.6,
        f"{100 * saved:.0f} % of prompt tokens are not computed: another tier has them{tier}",
    )


def turnover_s(facts: Facts) -> float | None:
    """Seconds until newly computed blocks have replaced all that live requests do not hold.

    capacity x (1 - usage) / tokens written per second: how long LRU keeps a block that nobody uses.
    """
    capacity = facts.values.get("kv_capacity_tokens")
    written_per_s = facts.get("computed_prompt_tokens_per_s") + facts.get("generation_tokens_per_s")
    if capacity is None or written_per_s <= 0:
        return None
    return capacity * (1 - facts.get("kv_usage_avg_ratio")) / written_per_s


def _turnover_short(facts: Facts) -> bool:
    residency_s = turnover_s(facts)
    return residency_s is not None and residency_s < SHORT_RESIDENCY_S


def _all_or_nothing(facts: Facts) -> bool:
    hit, miss = facts.values.get("prefill_hit_share"), facts.values.get("prefill_miss_share")
    if hit is None or miss is None:
        return False
    return min(hit, miss) >= SIDES_MIN and hit + miss >= ALL_OR_NOTHING_FROM


def _fewest(facts: Facts, signal: str) -> float | None:
    """A signal on the window or on its newest quarter: a loss shows there first."""
    both = (facts.values.get(signal), facts.recent.get(signal))
    return min((value for value in both if value is not None), default=None)


def _fewer_a_request(facts: Facts, share: float) -> bool:
    """Whether a request hits at most this share of the tokens that it hits in quiet times; true
    where that is not known. Longer prompts with the same prefix hit as many, of more."""
    now, quiet = _fewest(facts, HIT_TOKENS), facts.baseline.get(HIT_TOKENS)
    return now is None or quiet is None or now <= share * quiet


def _tell_hits_a_request(case: Case, facts: Facts) -> None:
    now, quiet = _fewest(facts, HIT_TOKENS), facts.baseline.get(HIT_TOKENS)
    if now is None or quiet is None:
        return
    text = f"a request hits {now:.0f} tokens, {quiet:.0f} in quiet times"
    case.weigh(HIT_TOKENS, now, HALVED * quiet, 0.0, text, below=True)


def _hits_again(facts: Facts) -> bool:
    """Whether the newest quarter of the window hits: what missed before was a cold cache."""
    now, quiet = facts.recent.get("prefix_hit_ratio"), facts.baseline.get("prefix_hit_ratio")
    usual = HITS_AGAIN if quiet is None or quiet < WAS_SHARED_FROM else 0.9 * quiet
    return now is not None and now >= usual


def _caching(facts: Facts) -> bool:
    return facts.config.get("enable_prefix_caching", "True") != "False"


def _work_ratio(facts: Facts) -> float:
    computed_per_s = facts.get("computed_prompt_tokens_per_s")
    return computed_per_s / max(facts.get("generation_tokens_per_s"), 1e-9)


def _weigh_prefill(case: Case, facts: Facts, weight: float = 0.8) -> None:
    """How heavy prompts are, for their requests or for the engine: whichever says more."""
    share, busy = facts.get("prefill_service_ratio"), facts.get("prefill_busy_ratio")
    if share / PREFILL_SHARE >= busy / PREFILL_BUSY or share >= PREFILL_SHARE:
        text = f"prefill is {100 * share:.0f} % of the time that requests are served"
        case.weigh("prefill_service_ratio", share, PREFILL_SHARE, weight, text)
    else:
        text = f"prompts are computed for {100 * min(busy, 1.0):.0f} % of the engine's time"
        case.weigh("prefill_busy_ratio", busy, PREFILL_BUSY, weight, text)
