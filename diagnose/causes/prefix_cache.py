"""Causes around the prefix cache: off, lost, churning: guide 7.2, 7.3, 7.7. Pure."""

from __future__ import annotations

from kneewatch.diagnose.causes.common_conditions import KV_USAGE, PREFILL_BUSY, SLOW_PROMPTS
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import CauseRecord, Form, Level, Term, term
from kneewatch.rules.baseline import ITL, PREFIX, TTFT
from kneewatch.rules.conditions import ALWAYS, Number
from kneewatch.rules.quantities import Configured, Least, Named, Recent, Signal, Usually, Watched
from kneewatch.rules.rule import Severity

WAS_SHARED_FROM = 0.3
"""Of prompt tokens, in quiet times: a workload that repeats prefixes."""

COMPUTED, GENERATED = Signal("computed_prompt_tokens_per_s"), Signal("generation_tokens_per_s")
WORK_RATIO = COMPUTED / GENERATED.otherwise(0.0).at_least(1e-9)
"""Prompt tokens computed for each token generated: from 4 on prefill is the larger part."""

PREFILL_SHARE = Signal("prefill_service_ratio").otherwise(0.0)
BUSY = PREFILL_BUSY.otherwise(0.0)
BY_SHARE = PREFILL_SHARE >= 0.05
PREFILL_IS_HEAVY = (COMPUTED > 0.0) & (WORK_RATIO >= 4.0) & (BY_SHARE | (BUSY >= 0.3))
"""Prompts make enough work for a prefix cache to matter: of the time that a request is served, or
of the engine's time where each of many requests decodes for long."""

CACHING = ~Configured("enable_prefix_caching", "False").assume(unknown=False)
HIT_RATIO, QUIET_HIT_RATIO = Signal("prefix_hit_ratio"), Usually("prefix_hit_ratio")
RECENT_HIT_RATIO = Recent("prefix_hit_ratio")
HITS = Named("prefix_hit_fewest_ratio", Least(HIT_RATIO, RECENT_HIT_RATIO))
"""On the window or on its newest part: a loss shows there first."""

HIT_TOKENS = Named(
    "prefix_hit_fewest_tokens_mean",
    Least(Signal("prefix_hit_tokens_mean"), Recent("prefix_hit_tokens_mean")),
)
QUIET_HIT_TOKENS = Usually("prefix_hit_tokens_mean")
SHARED = QUIET_HIT_RATIO >= WAS_SHARED_FROM

TURNOVER_S = (
    Signal("kv_capacity_tokens")
    * (1.0 - KV_USAGE.otherwise(0.0))
    / (COMPUTED.otherwise(0.0) + GENERATED.otherwise(0.0))
)
"""Seconds until new blocks have replaced all that live requests do not hold: how long LRU keeps a
block that nobody uses."""

TURNOVER_IS_SHORT = TURNOVER_S < 60.0

SAVED = Signal("prefix_saved_ratio")
EXPLAINED = (*SLOW_PROMPTS, "queue_saturation", "admission_limit")


def _prefill_terms(weight: float) -> tuple[Term, Term]:
    """How heavy prompts are, for their requests, or where that is little for the engine."""
    return (
        term(
            PREFILL_SHARE,
            0.05,
            weight,
            "prefill takes {value:%} of the time that requests are served",
            when=BY_SHARE,
            signal="prefill_service_ratio",
        ),
        term(
            BUSY,
            0.3,
            weight,
            "prompts are computed for {value:%} of the engine's time",
            when=~BY_SHARE,
            signal="prefill_busy_ratio",
        ),
    )


def _other_tier(facts: Facts) -> str:
    external = facts.values.get("external_hit_ratio")
    tier = "" if external is None else f" (hit ratio there {external:.0%})"
    return (
        f"{facts.get('prefix_saved_ratio'):.0%} of prompt tokens are not computed: another cache "
        f"tier has them{tier}"
    )


ANOTHER_TIER = term(SAVED, None, -0.6, _other_tier, when=SAVED - HIT_RATIO >= 0.1)
"""Both on the window: its newest part may have fewer hits than the window saved tokens."""


PREFIX_CACHE_OFF = CauseRecord(
    id="prefix_cache_off",
    title="Prefix caching off under heavy prefill",
    means="Prefix caching is disabled while prefill is much of the work.",
    forms=(
        Form(
            gate=Configured("enable_prefix_caching", "False") & PREFILL_IS_HEAVY,
            start=Number(0.3),
            terms=(
                term(
                    WORK_RATIO,
                    4.0,
                    1.2,
                    "{value} prompt tokens are computed for each token generated",
                    signal="computed_prompt_tokens_per_s",
                ),
                *_prefill_terms(1.0),
            ),
            levels=(Level(Severity.WARNING),),
            say=(
                (
                    ALWAYS,
                    "Prefix caching is off while prompts are most of the work. Whether prompts "
                    "repeat cannot be seen while it is off.",
                ),
            ),
            summary="Prefix caching is off while prompts are most of the work",
            lever="Remove --no-enable-prefix-caching (caching is vLLM's default) and watch the hit "
            "ratio.",
            guide=("7.2", "8.5"),
        ),
    ),
    explains=EXPLAINED,
    covers=("ITL-STALL", "TTFT-TAIL"),
    moves=(PREFIX, TTFT, ITL),
    levers=("prefix_caching",),
)

PREFIX_REUSE_LOST = CauseRecord(
    id="prefix_reuse_lost",
    title="Prompts stopped sharing prefixes",
    means="Prompts stopped sharing prefixes, or (a note) never shared any.",
    forms=(
        Form(
            gate=PREFILL_IS_HEAVY
            & CACHING
            & SHARED
            & (HITS <= 0.5 * QUIET_HIT_RATIO)
            & ((HITS <= 0.08) | ~TURNOVER_IS_SHORT)
            & (HIT_TOKENS <= 0.5 * QUIET_HIT_TOKENS).assume(unknown=True),
            start=Number(0.5),
            terms=(
                term(
                    HITS,
                    0.5 * QUIET_HIT_RATIO,
                    2.0,
                    "hit ratio {value:%}, {quiet:%} in quiet times",
                    below=True,
                    signal="prefix_hit_ratio",
                ),
                term(
                    HIT_TOKENS,
                    0.5 * QUIET_HIT_TOKENS,
                    0.0,
                    "{value} tokens hit per request, {quiet_tokens} in quiet times",
                    when=QUIET_HIT_TOKENS.known,
                    below=True,
                    signal="prefix_hit_tokens_mean",
                ),
                term(
                    HITS,
                    0.08,
                    -0.8,
                    "some prefixes still hit: they may be evicted, not missing",
                    when=HITS > 0.08,
                    signal="prefix_hit_ratio",
                ),
                *_prefill_terms(0.8),
                ANOTHER_TIER,
            ),
            levels=(Level(Severity.WARNING),),
            say=(
                (
                    ALWAYS,
                    "Prompts stopped sharing prefixes: hit ratio {hits:%}, down from {quiet:%}.",
                ),
            ),
            words=(
                ("hits", HITS),
                ("quiet", QUIET_HIT_RATIO),
                ("quiet_tokens", QUIET_HIT_TOKENS),
            ),
            summary="Prompts stopped sharing prefixes",
            lever="Look at what changed in front of the prompt (a date, an id, a reordered "
            "template) and at the router's stickiness; the shared part must come first, byte for "
            "byte.",
            guide=("7.2", "7.3", "9.3"),
        ),
        Form(
            gate=PREFILL_IS_HEAVY
            & CACHING
            & ~SHARED.assume(unknown=False)
            & (HITS <= 0.02)
            & (PREFILL_SHARE >= 0.3)
            & Watched(Number(2.0)),
            start=Number(0.2),
            terms=(
                term(
                    HITS,
                    0.02,
                    0.3,
                    "hit ratio {value:%}",
                    below=True,
                    signal="prefix_hit_ratio",
                ),
            ),
            levels=(Level(Severity.INFO),),
            say=((ALWAYS, "Prompts share no prefix so far; prefill is a large part of the work."),),
            summary="Prompts share no prefix so far; prefill is a large part of the work",
            lever="Nothing is broken. If prompts have a common part, put it first.",
            guide=("7.2",),
            name="never",
            apart=ALWAYS,
        ),
    ),
    explains=EXPLAINED,
    covers=("PREFIX-HIT", "PREFIX-SAVED", "ITL-STALL", "TTFT-TAIL"),
    moves=(PREFIX, TTFT, ITL),
    levers=("prompt_order", "sticky_routing"),
)

REUSED = Signal("block_reuse_per_s") > 0.0
HIT_SIDE, MISS_SIDE = Signal("prefill_hit_share"), Signal("prefill_miss_share")
ALL_OR_NOTHING = (HIT_SIDE >= 0.1) & (MISS_SIDE >= 0.1) & (HIT_SIDE + MISS_SIDE >= 0.75)
DROPPED = (
    SHARED
    & (HIT_RATIO <= 0.75 * QUIET_HIT_RATIO)
    & (HIT_TOKENS <= 0.75 * QUIET_HIT_TOKENS).assume(unknown=True)
)
HITS_AGAIN = (
    (SHARED & (RECENT_HIT_RATIO >= 0.9 * QUIET_HIT_RATIO))
    | (~SHARED.assume(unknown=False) & (RECENT_HIT_RATIO >= 0.85))
).assume(unknown=False)
"""What missed before was a cold cache."""

GAP_S, IDLE_S = Signal("kv_reuse_gap_s"), Signal("kv_idle_before_evict_s")
NEAR_EVICTION_S = 0.4 * IDLE_S
"""Blocks that are used again after this much of the time that an unused one lasts: about as many
are used again too late, because those that are do not report a gap."""

PREFIX_CHURN = CauseRecord(
    id="prefix_churn",
    title="Prefixes evicted before they were used again",
    means="Prefixes are evicted before they are used again.",
    forms=(
        Form(
            gate=PREFILL_IS_HEAVY
            & CACHING
            & (HIT_RATIO > 0.08)
            & TURNOVER_IS_SHORT
            & ~HITS_AGAIN
            & (DROPPED | ((HIT_RATIO >= 0.1) & (HIT_RATIO <= 0.8) & (REUSED | ALL_OR_NOTHING))),
            start=Number(-0.3),
            terms=(
                term(
                    TURNOVER_S,
                    60.0,
                    1.2,
                    "new blocks replace the whole free cache in {value:s}",
                    below=True,
                    signal="kv_residency_s",
                ),
                term(
                    HIT_RATIO,
                    0.75 * QUIET_HIT_RATIO,
                    1.5,
                    "hit ratio {value:%}, {quiet:%} in quiet times",
                    when=DROPPED,
                    below=True,
                ),
                term(
                    Signal("block_eviction_per_s").otherwise(0.0),
                    5.0,
                    1.0,
                    "{value} blocks/s are evicted",
                    when=REUSED,
                    signal="block_eviction_per_s",
                ),
                term(
                    Signal("prefill_tokens_p95").otherwise(0.0),
                    None,
                    0.8,
                    "prompts hit fully or miss fully: shared prefixes are being evicted",
                    when=ALL_OR_NOTHING,
                    signal="prefill_tokens_p95",
                ),
                term(
                    GAP_S,
                    NEAR_EVICTION_S,
                    0.8,
                    "blocks are reused after {value:.1f} s and evicted after {idle_s:.1f} s unused",
                    when=GAP_S >= NEAR_EVICTION_S,
                ),
                term(
                    GAP_S,
                    None,
                    -0.4,
                    "blocks are reused after {value:.1f} s and evicted only after {idle_s:.1f} s "
                    "unused",
                    when=(IDLE_S > 0.0) & (GAP_S < NEAR_EVICTION_S),
                ),
                ANOTHER_TIER,
            ),
            levels=(Level(Severity.WARNING),),
            say=(
                (
                    ALWAYS,
                    "Prefixes are evicted before they are used again: hit ratio "
                    "{prefix_hit_ratio:%}, a cached block lasts about {turnover_s:s}.",
                ),
            ),
            words=(("turnover_s", TURNOVER_S), ("quiet", QUIET_HIT_RATIO), ("idle_s", IDLE_S)),
            summary="Prefixes are evicted before they are used again",
            lever="Show each replica fewer prefixes (route by prefix) or give the KV cache more "
            "room; a prefix that most requests share should not be evicted by those that do not.",
            guide=("7.3", "7.4", "7.7"),
        ),
    ),
    explains=EXPLAINED,
    covers=("PREFIX-HIT", "PREFIX-SAVED", "KV-RESIDENCY", "ITL-STALL", "TTFT-TAIL"),
    moves=(PREFIX, TTFT, ITL),
    levers=("kv_blocks", "kv_memory_bytes", "kv_fp8", "gpu_memory_utilization", "sticky_routing"),
    sidecar="how long a cached block lasts follows from the KV capacity, a number that stands "
    "inside a label of cache_config_info",
)
