"""Causes of a useless prefix cache: off, reuse lost, evicted early. Guide 7.2, 7.3, 7.7. Pure."""

from __future__ import annotations

from kneewatch.collector.engines.engine_kind import BLOCK_SIZE, NO_PREFIX_CACHE
from kneewatch.diagnose.account_signals import HIT_SPREAD
from kneewatch.diagnose.causes.common_conditions import (
    ARRIVALS,
    BATCH_MOST,
    FIRST_TOKENS_VERY_LATE,
    GIANTS_BLOCK,
    KV_USAGE,
    PREFILL_BUSY,
    SERVED,
    TTFT_DRIFT,
    WINDOW_S,
    queued_for,
)
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import Form, Term, cause, term
from kneewatch.rules.conditions import ALWAYS, FirstOf, Number
from kneewatch.rules.formatting import duration, percent
from kneewatch.rules.quantities import BaselineValue, Configured, Live, Minimum, Recent, Watched
from kneewatch.rules.rule import Severity

WAS_SHARED_FROM = 0.3
"""From this quiet hit ratio (of prompt tokens) on, a workload counts as sharing prefixes."""

COMPUTED, GENERATED = Live("computed_prompt_tokens_per_s"), Live("generation_tokens_per_s")
WORK_RATIO = COMPUTED / GENERATED.otherwise(0.0).at_least(1e-9)
"""Computed prompt tokens per generated token; from 4 on, prefill is most of the work."""

PREFILL_SHARE = Live("prefill_service_ratio").otherwise(0.0)
BUSY = PREFILL_BUSY.otherwise(0.0)
TAKES_TIME = (Live("prefill_mean_s") >= 0.05).assume(unknown=True)
"""A mean prefill is long enough for callers to notice it."""

BY_SHARE = PREFILL_SHARE >= 0.05
BY_WORK = ~Live("prefill_service_ratio").known & ~PREFILL_BUSY.known & (Live("waiting_avg") >= 1.0)
"""Requests wait, and none ended in the window, so prefill times are unknown.

If prompts become much more work, answers are the first thing to stop.
"""

BY_WAIT = (TTFT_DRIFT >= 2.0).assume(unknown=False)
PREFILL_IS_HEAVY = (WORK_RATIO >= 4.0) & TAKES_TIME & (BY_SHARE | (BUSY >= 0.3) | BY_WORK | BY_WAIT)
"""Prefill is enough work for a prefix cache to matter.

It takes callers' time, and it is a large share of each request's service time; or, if many requests
decode for long, of the engine's time; or first tokens take twice as long as usual.
"""

CACHING = ~Configured("enable_prefix_caching", "False").assume(unknown=False)
HIT_RATIO, QUIET_HIT_RATIO = Live("prefix_hit_ratio"), BaselineValue("prefix_hit_ratio")
RECENT_HIT_RATIO = Recent("prefix_hit_ratio")
HITS = Minimum(HIT_RATIO, RECENT_HIT_RATIO)
"""The lower hit ratio of the whole window and its newest part, which shows a loss first."""
FEW_HITS = term(HITS, 0.02, 0.3, "hit ratio {value:%}", below=True)

HIT_TOKENS = Minimum(Live("prefix_hit_tokens_mean"), Recent("prefix_hit_tokens_mean"))
QUIET_HIT_TOKENS = BaselineValue("prefix_hit_tokens_mean")
SHARED = QUIET_HIT_RATIO >= WAS_SHARED_FROM

TURNOVER_S = (
    Live("kv_capacity_tokens")
    * (1.0 - KV_USAGE.otherwise(0.0))
    / (COMPUTED.otherwise(0.0) + GENERATED.otherwise(0.0))
)
"""Seconds until new blocks have replaced all blocks that no running request holds.

That is how long LRU keeps an unused block.
"""

TURNOVER_IS_SHORT = TURNOVER_S < 60.0

FILLED = Watched(Number(2.0)) & ~(Live("awake_min") < 1.0).assume(unknown=False)
"""The cache has had time to fill. It is empty in a new process and after an engine wakes up."""

NO_HITS = CACHING & (HITS <= 0.02)
MANY_MISSED = (
    NO_HITS
    & (QUIET_HIT_RATIO >= 0.9)
    & (ARRIVALS * WINDOW_S >= 16.0)
    & ~(Live("awake_min") < 1.0).assume(unknown=False)
)
"""None of many requests since the start has hit, although nearly whole prompts were shared before:
the second of two equal prompts would hit."""

NEVER_HIT = (
    NO_HITS
    & (WORK_RATIO >= 4.0)
    & ~SHARED.assume(unknown=False)
    & (PREFILL_SHARE >= 0.3)
    & TAKES_TIME
    & FILLED
)
"""Caching is on and prefill is heavy, but there are almost no hits."""

BLOCK_TOKENS, PROMPT_TOKENS = Live("prefix_block_tokens"), Live("prompt_tokens_p95")
LOOKED_UP = Live("prefix_query_per_s")
MEAN_PROMPT_TOKENS = Live("prompt_tokens_mean")
NEW_PROMPT_TOKENS = MEAN_PROMPT_TOKENS.otherwise(0.0).at_least(
    LOOKED_UP.otherwise(0.0) / (SERVED.otherwise(0.0) + BATCH_MOST.at_least(1e-9) / WINDOW_S)
)
"""Mean prompt of the requests that ended, or of those that were admitted: if that is more, long
prompts are under way. Each admitted request has ended or is running."""

LONGER_TOKENS = NEW_PROMPT_TOKENS - QUIET_HIT_TOKENS / QUIET_HIT_RATIO
LOSS_MATTERS = (
    (QUIET_HIT_TOKENS <= 0.0) | (QUIET_HIT_TOKENS - HIT_TOKENS >= 0.5 * LONGER_TOKENS)
).assume(unknown=True)
"""The lost hits are at least a third of what more is computed of a prompt: where prompts became far
longer, hits would hardly shorten the prefill. Unknown if a hit ratio is stated but not measured."""

LOST = QUIET_HIT_RATIO - HITS
QUIET_LOOKED_UP = BaselineValue("prefix_query_per_s")
PROMPTS_PER_S = FirstOf((LOOKED_UP * QUIET_HIT_RATIO / QUIET_HIT_TOKENS, ARRIVALS))
"""Prompts/s at their quiet length. They are looked up at their admission, before a first token."""

BEYOND_CHANCE = (
    LOST * LOST * PROMPTS_PER_S * WINDOW_S >= 9.0 * QUIET_HIT_RATIO * (1.0 - QUIET_HIT_RATIO)
).assume(unknown=True)
"""Hits fell by three standard deviations: more than so few prompts vary if each hits or misses by
chance."""

BUCKET_STEP = 2.5
"""A quantile may exceed the true value by the ratio of neighbouring bucket bounds; a mean is
exact."""

LARGE_BLOCK = BLOCK_TOKENS >= 256.0
"""Blocks are larger than attention alone needs: 16 to 128 tokens.

The state of recurrent layers makes blocks of 528 to 8,320 tokens.
"""

IN_A_BLOCK = LARGE_BLOCK & (
    (PROMPT_TOKENS <= BLOCK_TOKENS)
    | ((MEAN_PROMPT_TOKENS <= BLOCK_TOKENS) & (PROMPT_TOKENS <= BUCKET_STEP * BLOCK_TOKENS))
).assume(unknown=False)
IN_FEW_BLOCKS = LARGE_BLOCK & (PROMPT_TOKENS <= 4.0 * BLOCK_TOKENS)
"""Nearly all prompts are shorter than four blocks of a hybrid model.

For such prompts the model keeps its state only at the last block boundary. Hits need this boundary
to be inside the shared part.
"""

SAVED = Live("prefix_saved_ratio")


def _prefill_terms(weight: float) -> tuple[Term, Term]:
    """Evidence that prefill is heavy: its share of service time or, if that is small, its load."""
    return (
        term(
            PREFILL_SHARE,
            0.05,
            weight,
            "prefill takes {value:%} of request service time",
            when=BY_SHARE,
        ),
        term(
            BUSY,
            0.3,
            weight,
            "{value:.1f} prompts are under prefill on average",
            when=~BY_SHARE & ~BY_WORK,
        ),
    )


def _other_tier(facts: Facts) -> str:
    external = facts.values.get("external_hit_ratio")
    ratio = "" if external is None else f" (hit ratio there {percent(external)})"
    return (
        f"{percent(facts.get('prefix_saved_ratio'))} of prompt tokens are not computed: another "
        f"cache tier serves them{ratio}"
    )


ANOTHER_TIER = term(SAVED, None, -0.6, _other_tier, when=SAVED - HIT_RATIO >= 0.1)
"""Compares ratios of the whole window; its newest part alone may have a lower hit ratio."""

WHOLE_HITS, MISSES = Live("prefill_hit_share"), Live("prefill_miss_share")
"""Shares of requests that computed almost nothing, or almost all, of a median prompt."""

GAP_S, IDLE_S = Live("kv_reuse_gap_s"), Live("kv_idle_before_evict_s")
NEAR_EVICTION_S = 0.4 * IDLE_S
"""From this mean reuse gap (seconds) on, many blocks are evicted before they are reused.

vLLM reports no gap for blocks that were evicted before their reuse.
"""

HIT_SPREAD_SIGMAS = Live(HIT_SPREAD)
ALL_HIT_ALIKE = (HIT_SPREAD_SIGMAS <= -2.3).assume(unknown=False)
"""Hits vary little between prompts.

If prompts hit fully or missed fully, so little variation would occur by chance once in a hundred
times.
"""

IN_TURNS = (
    (HIT_SPREAD_SIGMAS >= 2.3)
    & ((RECENT_HIT_RATIO >= 1.3 * HIT_RATIO) | (RECENT_HIT_RATIO <= 0.3 * HIT_RATIO))
).assume(unknown=False)
"""Prompts hit in one part of the window and not in the other: the prompts changed. Evicted prefixes
are missed at any time, by chance."""

WHOLE_PART = 0.7
"""If prompts hit fully or miss fully, the full hits make up at least this share of the hit
ratio."""

ONLY_HEADS_HIT = (QUIET_HIT_RATIO >= 0.8) & (
    (WHOLE_HITS <= WHOLE_PART * HIT_RATIO).assume(unknown=False) | ALL_HIT_ALIKE
)
"""Prompts used to hit almost fully, and now only their first tokens hit.

If whole prefixes were evicted instead, full hits would account for the hit ratio, and the ratio
would vary by chance.
"""

REUSED_LATE = GAP_S >= NEAR_EVICTION_S
TAILS_EVICTED = (
    ONLY_HEADS_HIT & TURNOVER_IS_SHORT & ((LOOKED_UP >= 1.3 * QUIET_LOOKED_UP) | REUSED_LATE)
).assume(unknown=False)
"""The first blocks of prompts stay cached because all requests use them; later blocks are evicted.

More prompt tokens are looked up than the cache held in quiet times, or blocks are reused about as
late as they are evicted.
"""

PROMPTS_DIFFER = (ONLY_HEADS_HIT & ~TAILS_EVICTED).assume(unknown=False)
"""Prompts differ after the tokens that hit."""

GIANTS_QUEUE = GIANTS_BLOCK & queued_for(10.0)
"""Requests queue because they do not fit beside each other.

Faster prefill would not help.
"""

POOLS = ((GENERATED <= 0.0) & (SERVED > 0.0)).assume(unknown=False)
"""Requests end without a token: embeddings, scores. vLLM caches no prefix for many such models."""

PREFIX_CACHE_OFF = cause(
    "prefix_cache_off",
    Form(
        gate=Configured("enable_prefix_caching", "False") & PREFILL_IS_HEAVY,
        start=Number(0.3),
        terms=(
            term(WORK_RATIO, 4.0, 1.2, "{value} prompt tokens computed per generated token"),
            *_prefill_terms(1.0),
        ),
        levels=((Severity.WARNING, ~GIANTS_QUEUE & ~POOLS),),
        severity=Severity.INFO,
        apart=GIANTS_QUEUE,
        say="Prefix caching is off while prefill is heavy. Whether prompts share prefixes "
        "is unknown while it is off.",
        lever=f"Remove {NO_PREFIX_CACHE} (vLLM caches by default) and watch the hit ratio.",
    ),
)


def _first_difference(facts: Facts) -> str:
    """Where to look for the difference that keeps prompts from sharing a prefix."""
    if (facts.values.get("prefix_hit_tokens_mean") or 0.0) >= 1.0:
        return (
            "Look at what follows the tokens that hit: a date, an id or a reordered template there "
            "ends the match. It belongs behind the shared part."
        )
    return (
        "Open: each prompt may be new, something unique (a nonce, a date) may stand first, or the "
        "router may send like prompts to other replicas. Compare two prompts from their first "
        "token, and the replicas with `kneewatch diagnose --prometheus`."
    )


_turnover_s, _turnover_is_short = TURNOVER_S.read(), TURNOVER_IS_SHORT.python()


def _reuse_lever(facts: Facts) -> str:
    """What to look at first; if the cache would keep no prefix for a minute, also at its size."""
    other = "compare vLLM's version and flags."
    if _turnover_is_short(facts):
        other = (
            "more of them may be in use than the KV cache holds: new blocks replace its free part "
            f"in {duration(_turnover_s(facts) or 0.0)}. Then route by session, or enlarge it."
        )
    return (
        "Check what changed at the start of the prompts (a date, an id, a reordered template) and "
        "the router's session affinity. The shared prefix must come first, byte for byte. If "
        f"prompts and router are as before, {other}"
    )


def _smaller_block(facts: Facts) -> str:
    """How to make blocks smaller, depending on why they are large."""
    if facts.config.get("user_specified_block_size") == "True":
        return f"Lower {BLOCK_SIZE}: it was set by hand."
    state = facts.config.get("mamba_ssm_cache_dtype")
    dtype = f" (now {state})" if state else ""
    return (
        "The recurrent state sets the block size: store it in 16 bits with "
        f"--mamba-ssm-cache-dtype float16{dtype} and draft fewer tokens. An FP8 KV cache makes "
        "blocks longer. Where that is not enough, size prefill as if there were no prefix cache."
    )


PREFIX_BLOCK_TOO_LARGE = cause(
    "prefix_block_too_large",
    Form(
        gate=(NO_HITS & PREFILL_IS_HEAVY & IN_A_BLOCK) | (NEVER_HIT & IN_FEW_BLOCKS),
        start=Number(0.2),
        terms=(
            term(
                FirstOf((MEAN_PROMPT_TOKENS, PROMPT_TOKENS)),
                BLOCK_TOKENS,
                1.8,
                "prompts have {value} tokens, a block {block_tokens}: only whole blocks are cached",
                when=IN_A_BLOCK,
                below=True,
            ),
            term(
                PROMPT_TOKENS,
                None,
                0.3,
                "95% of prompts have at most {value} tokens, a block {block_tokens}: only the "
                "last whole block of a prompt can be found again",
                when=~IN_A_BLOCK,
            ),
            FEW_HITS,
        ),
        severity=Severity.INFO,
        instead=(
            (
                IN_A_BLOCK,
                "The prefix cache cannot hit: a block has {block_tokens} tokens, and prompts "
                "are shorter. Whether they share prefixes is unknown.",
            ),
        ),
        say="The prefix cache does not hit, perhaps because of its blocks of "
        "{block_tokens} tokens: prompts are {prompt_tokens} tokens long. Whether they "
        "share prefixes is unknown.",
        words=(("block_tokens", BLOCK_TOKENS), ("prompt_tokens", PROMPT_TOKENS)),
        lever=_smaller_block,
        apart=~IN_A_BLOCK,
    ),
)

PREFIX_REUSE_LOST = cause(
    "prefix_reuse_lost",
    Form(
        gate=PREFILL_IS_HEAVY
        & CACHING
        & SHARED
        & (FILLED | MANY_MISSED)
        & ~IN_A_BLOCK
        & (HITS <= 0.5 * QUIET_HIT_RATIO)
        & BEYOND_CHANCE
        & ((HITS <= 0.08) | ~TURNOVER_IS_SHORT | PROMPTS_DIFFER)
        & (HIT_TOKENS <= 0.5 * QUIET_HIT_TOKENS).assume(unknown=True)
        & LOSS_MATTERS,
        start=Number(0.5),
        terms=(
            term(
                HITS,
                0.5 * QUIET_HIT_RATIO,
                2.0,
                "hit ratio {window_hits:%} over the window, {newest_hits:%} in its newest "
                "part; baseline {quiet:%}",
                below=True,
            ),
            term(
                HIT_TOKENS,
                0.5 * QUIET_HIT_TOKENS,
                0.0,
                "{value} tokens hit per request, baseline {quiet_tokens}",
                when=QUIET_HIT_TOKENS.known,
                below=True,
            ),
            term(
                HITS,
                0.08,
                -0.8,
                "some prefixes still hit: the others may be evicted, not missing",
                when=(HITS > 0.08) & ~PROMPTS_DIFFER,
            ),
            term(
                HIT_TOKENS,
                None,
                0.5,
                "requests hit their first {value} tokens, each about as many: prompts differ "
                "behind them",
                when=PROMPTS_DIFFER,
            ),
            *_prefill_terms(0.8),
            ANOTHER_TIER,
        ),
        levels=((Severity.CRITICAL, FIRST_TOKENS_VERY_LATE),),
        say="Prompts share fewer prefixes than they should: hit ratio {hits:%}, baseline "
        "{quiet:%}.",
        words=(
            ("hits", HITS),
            ("window_hits", HIT_RATIO),
            ("newest_hits", RECENT_HIT_RATIO),
            ("quiet", QUIET_HIT_RATIO),
            ("quiet_tokens", QUIET_HIT_TOKENS),
        ),
        summary="Prompts stopped sharing prefixes",
        lever=_reuse_lever,
    ),
    Form(
        gate=NEVER_HIT & ~IN_FEW_BLOCKS.assume(unknown=False),
        start=Number(0.2),
        terms=(FEW_HITS,),
        severity=Severity.INFO,
        instead=(
            (
                HIT_TOKENS >= 1.0,
                "Prompts share only their first {hit_tokens} tokens on average, and prefill is "
                "heavy.",
            ),
        ),
        say="Prompts share no prefixes so far, and prefill is heavy.",
        words=(("hit_tokens", HIT_TOKENS),),
        summary="Prompts share no prefixes so far, and prefill is heavy",
        lever=_first_difference,
        guide=("7.2",),
        apart=ALWAYS,
    ),
)

REUSED = Live("block_reuse_per_s") > 0.0
ALL_OR_NOTHING = (
    (MISSES >= 0.1) & (WHOLE_HITS + MISSES >= 0.75) & (WHOLE_HITS > WHOLE_PART * HIT_RATIO)
)
"""Prompts hit fully or miss fully, and the full hits account for the hit ratio.

The second part is needed if all prompts share a short beginning: a few short prompts then seem to
hit fully.
"""

DROPPED = (
    SHARED
    & (HIT_RATIO <= 0.75 * QUIET_HIT_RATIO)
    & (HIT_TOKENS <= 0.75 * QUIET_HIT_TOKENS).assume(unknown=True)
    & LOSS_MATTERS
)
HITS_AGAIN = (
    (SHARED & (RECENT_HIT_RATIO >= 0.9 * QUIET_HIT_RATIO))
    | (~SHARED.assume(unknown=False) & (RECENT_HIT_RATIO >= 0.85))
).assume(unknown=False)
"""The hit ratio has recovered: earlier misses came from a cold cache."""

RECOMPUTED = (
    SHARED
    & (1.0 - HIT_RATIO >= 2.0 * (1.0 - QUIET_HIT_RATIO))
    & (WORK_RATIO >= 2.0)
    & (BUSY >= 0.5)
).assume(unknown=False)
"""At least half of the computed prompt tokens would have hit in quiet times.

Also, prefill runs at least half of the time: that is heavy even if answers are as much work.
"""

PREFIX_CHURN = cause(
    "prefix_churn",
    Form(
        gate=(PREFILL_IS_HEAVY | RECOMPUTED)
        & CACHING
        & (HIT_RATIO > 0.08)
        & TURNOVER_IS_SHORT
        & ~HITS_AGAIN
        & ~PROMPTS_DIFFER
        & ~IN_TURNS
        & (
            (DROPPED & FILLED)
            | ((HIT_RATIO >= 0.1) & (HIT_RATIO <= 0.8) & (REUSED | ALL_OR_NOTHING))
        ),
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
                "hit ratio {value:%} over the window, baseline {quiet:%}",
                when=DROPPED,
                below=True,
            ),
            term(
                Live("block_eviction_per_s").otherwise(0.0),
                5.0,
                1.0,
                "{value} blocks/s are evicted",
                when=REUSED,
            ),
            term(
                Live("prefill_tokens_p95").otherwise(0.0),
                None,
                0.8,
                "prompts hit fully or miss fully: shared prefixes are being evicted",
                when=ALL_OR_NOTHING,
            ),
            term(
                GAP_S,
                NEAR_EVICTION_S,
                0.8,
                "blocks are reused after {value:s} and evicted after {idle_s:s} unused",
                when=REUSED_LATE,
            ),
            term(
                LOOKED_UP,
                1.3 * QUIET_LOOKED_UP,
                0.5,
                "{value} prompt tokens/s are looked up, {quiet_looked_up} in quiet times; "
                "requests hit their first {hit_tokens} tokens, and what follows is evicted",
                when=TAILS_EVICTED & QUIET_LOOKED_UP.known,
            ),
            term(
                GAP_S,
                None,
                -0.4,
                "blocks are reused after {value:s} and evicted only after {idle_s:s} unused",
                when=(IDLE_S > 0.0) & (GAP_S < NEAR_EVICTION_S),
            ),
            ANOTHER_TIER,
        ),
        levels=((Severity.CRITICAL, FIRST_TOKENS_VERY_LATE),),
        say="Prefixes are evicted before reuse: hit ratio {prefix_hit_ratio:%}, a cached "
        "block lasts about {turnover_s:s}.",
        words=(
            ("turnover_s", TURNOVER_S),
            ("quiet", QUIET_HIT_RATIO),
            ("idle_s", IDLE_S),
            ("quiet_looked_up", QUIET_LOOKED_UP),
            ("hit_tokens", HIT_TOKENS),
        ),
        lever="Route by prefix so that each replica serves fewer prefixes, or enlarge the KV "
        "cache.",
    ),
)
