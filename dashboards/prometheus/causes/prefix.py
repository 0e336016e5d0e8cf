"""Causes that lie in the prefix cache, as PromQL. Pure."""

from __future__ import annotations

from kneewatch.dashboards.prometheus.causes.model import CauseQuery
from kneewatch.dashboards.prometheus.model import Plan, duration, number, recorded
from kneewatch.dashboards.prometheus.odds import Term, value
from kneewatch.diagnose.causes import prefix
from kneewatch.rules.model import Severity


def prefix_cache_off(plan: Plan) -> CauseQuery:
    """Prompts are most of the work and none may be reused."""
    off = plan.dialect.series("cache_config_info", extra='enable_prefix_caching="False"')
    return CauseQuery(
        "prefix_cache_off",
        f"{_prefill_heavy()} and on ({plan.process}, engine) {off}",
        (
            Term(_work_ratio(), number(prefix.WORK_RATIO), 1.2),
            Term(_heaviness(), "1", 1.0),
        ),
        0.3,
        ((Severity.WARNING, ""),),
        "Prefix caching is off while prompts are most of the work",
        "Remove --no-enable-prefix-caching (caching is vLLM's default) and watch the hit ratio.",
        ("7.2", "8.5"),
    )


def prefix_reuse_lost(_plan: Plan) -> CauseQuery:
    """The hit ratio has fallen from what it was in quiet times."""
    hits, quiet = recorded("prefix_hit_fewest_ratio"), recorded("prefix_hit_quiet_ratio")
    tokens = recorded(f"{prefix.HIT_TOKENS}:baseline")
    as_many = f"{recorded('prefix_hit_fewest_tokens_mean')} > {number(prefix.HALVED)} * {tokens}"
    return CauseQuery(
        "prefix_reuse_lost",
        f"({_prefill_heavy()} and ({quiet} >= {number(prefix.WAS_SHARED_FROM)})"
        f" and ({hits} <= {number(prefix.HALVED)} * {quiet})"
        f" and ({hits} <= {number(prefix.RESIDUAL_HITS)})) unless ({as_many})",
        (
            Term(hits, f"{number(prefix.HALVED)} * {quiet}", 2.0, below=True),
            Term(_heaviness(), "1", 0.8),
        ),
        0.5,
        ((Severity.WARNING, ""),),
        "Prompts stopped sharing prefixes",
        "Look at what changed in front of the prompt (a date, an id, a reordered template) and at "
        "the router's stickiness.",
        ("7.2", "7.3", "9.3"),
    )


def prefix_never_shared(plan: Plan) -> CauseQuery:
    """Prompts never shared a prefix: a note."""
    hits, quiet = recorded("prefix_hit_fewest_ratio"), recorded("prefix_hit_quiet_ratio")
    seen = f"({recorded('running')} offset {duration(2 * plan.window_s)})"
    return CauseQuery(
        "prefix_reuse_lost",
        f"({_prefill_heavy()} and ({hits} <= {number(prefix.NEVER_HITS)})"
        f" and ({recorded('prefill_service_ratio')} >= {number(prefix.NEVER_SHARE)})"
        f" and {seen})"
        f" unless ({quiet} >= {number(prefix.WAS_SHARED_FROM)})",
        (Term(hits, number(prefix.NEVER_HITS), 0.3, below=True),),
        0.2,
        ((Severity.INFO, ""),),
        "Prompts share no prefix, as far as can be seen; prefill is a large part of the work",
        "Nothing is broken. If prompts have a common part, put it first.",
        ("7.2",),
        "never",
    )


def _work_ratio() -> str:
    made = f"clamp_min({value('generation_tokens_per_s')}, 1e-9)"
    return f"({recorded('computed_prompt_tokens_per_s')} / {made})"


def _prefill_heavy() -> str:
    share = recorded("prefill_service_ratio")
    return (
        f"(({_work_ratio()} >= {number(prefix.WORK_RATIO)})"
        f" and ({recorded('computed_prompt_tokens_per_s')} > 0)"
        f" and (({share} >= {number(prefix.PREFILL_SHARE)}) or"
        f" ({recorded('prefill_busy_ratio')} >= {number(prefix.PREFILL_BUSY)})))"
    )


def _heaviness() -> str:
    """How heavy prompts are for their requests, or for the engine where that says more: over its
    bound."""
    share = f"({value('prefill_service_ratio')} / {number(prefix.PREFILL_SHARE)})"
    busy = f"({value('prefill_busy_ratio')} / {number(prefix.PREFILL_BUSY)})"
    return f"(({share} >= 1) or ({busy} > {share}) or {share})"
