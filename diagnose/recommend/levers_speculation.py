"""Speculation: turn it on or off, shorten drafts, or what to watch. Guide 6.6, 9.3. Pure."""

from __future__ import annotations

import json
from typing import cast

from kneewatch.collector.engines.engine_kind import SPECULATION
from kneewatch.diagnose.causes.bottleneck import bound_of, has_spare_compute
from kneewatch.diagnose.causes.optional_features import (
    DRAFT_COST_RATIO,
    NGRAM_COST_RATIO,
    WORTH_SPEEDUP,
    Drafts,
    drafts_of,
    has_fallen,
    newest_acceptance,
)
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.recommend.context import SETTLE_WORDS, LeverContext, advice
from kneewatch.diagnose.recommend.prediction import computed_costs, tails_now
from kneewatch.diagnose.recommend.queueing import at_most
from kneewatch.diagnose.sizing.speed.performance import step_model
from kneewatch.diagnose.sizing.speed.roofline_inputs import on_gpu
from kneewatch.rules.formatting import percent


def _config(context: LeverContext) -> tuple[str | None, dict[str, object]]:
    launch = context.server.stated.command_line
    text = None if launch is None else launch.text(SPECULATION)
    try:
        parsed: object = json.loads(text) if text else {}
    except ValueError:
        parsed = {}
    return text, cast("dict[str, object]", parsed) if isinstance(parsed, dict) else {}


def _drafts(context: LeverContext) -> Drafts | None:
    facts, (_, config) = context.facts, _config(context)
    values, newest = facts.values, newest_acceptance(facts)
    given = config.get("num_speculative_tokens")
    cost = NGRAM_COST_RATIO if config.get("method") == "ngram" else DRAFT_COST_RATIO
    stated = given if isinstance(given, int) else None
    plain = drafts_of(values, newest=newest, tokens=stated, cost_ratio=cost)
    if plain is None:
        return None
    verify = _verify_ratios(context, plain.tokens)
    return drafts_of(values, newest=newest, tokens=plain.tokens, cost_ratio=cost, verify=verify)


def _verify_ratios(context: LeverContext, tokens: int) -> tuple[float, ...]:
    """Time of a step that verifies 0 to `tokens` draft tokens, divided by a step without a draft.

    Shape: (tokens + 1,). Computed with the roofline at the measured batch; empty if unknown.
    """
    launch, demand = context.server.sized_launch, context.demand
    costs, batch = computed_costs(launch), context.get("running_avg")
    if launch is None or costs is None or not demand.input_tokens or batch < 1:
        return ()
    context_tokens = demand.input_tokens + (demand.output_tokens or 0.0) / 2
    times_s = [
        step_model(
            costs,
            on_gpu(launch.gpu),
            context_tokens=context_tokens,
            prompt_context_tokens=context_tokens,
            tokens_per_sequence=1.0 + draft_tokens,
        ).total_s(batch)
        for draft_tokens in range(tokens + 1)
    ]
    return tuple(time_s / times_s[0] for time_s in times_s)


def _batch_words(context: LeverContext, drafts: Drafts) -> str:
    """The batch that the estimate applies to, as the end of a sentence."""
    batch, bound = context.get("running_avg"), bound_of(context.facts)
    more = 100 * (drafts.verify[-1] - 1)
    if more < 1 and bound is not None and bound.kind == "compute":
        return " at best, and less here, because the GPU is compute-bound"
    if more >= 1 or _verify_ratios(context, drafts.tokens):
        return f" at the present batch of {batch:.0f}, where verification takes {more:.0f}% longer"
    return " at small batches"


FIRST_DRAFT_TOKENS = 3
"""Draft tokens to start with: wrong short drafts cost little."""


def speculation(context: LeverContext) -> Advice | None:
    """Turn speculation on, if few requests decode slowly and the GPU has spare compute."""
    facts, (text, _) = context.facts, _config(context)
    drafting = text is not None or facts.values.get("spec_draft_tokens_per_s") is not None
    if drafting or not has_spare_compute(facts):
        return None
    config = {
        "method": "ngram",
        "num_speculative_tokens": FIRST_DRAFT_TOKENS,
        "prompt_lookup_max": 4,
    }
    return advice(
        context,
        "spec-on",
        [(SPECULATION, None, json.dumps(config))],
        f"Only {context.get('running_avg'):.0f} requests run and the GPU has compute to spare: "
        f"speculation verifies several tokens in a step that otherwise yields one. N-grams "
        "need no second model and suit answers that repeat their prompt (code, summaries, RAG); "
        "for other traffic use a draft model or EAGLE head made for this model.",
        before={key: context.get(key) for key in ("itl_mean_s", "running_avg")},
    )


def shorter_draft(context: LeverContext) -> Advice | None:
    """Fewer draft tokens, if the measured acceptance favours a shorter draft."""
    drafts = _drafts(context)
    if drafts is None or has_fallen(context.facts):
        return None
    tokens, best = drafts.tokens, drafts.shorter
    if best is None:
        return None
    text, config = _config(context)
    to = json.dumps({**config, "num_speculative_tokens": best})
    change = (
        (SPECULATION, text, to)
        if config
        else (f"{SPECULATION}.num_speculative_tokens", tokens, best)
    )
    return advice(
        context,
        "spec-shorter",
        [change],
        f"Of {best} draft tokens {percent(drafts.share(best))} would be accepted: estimated "
        f"{drafts.speedup(best):.2f}x the speed without speculation"
        f"{_batch_words(context, drafts)}.",
        before=_draft_numbers(context, drafts, tokens),
        predicted=_draft_numbers(context, drafts, best),
        verify=[
            f"spec_acceptance_ratio rises to about {drafts.share(best):.2f} and tpot_mean_s does "
            f"not rise {SETTLE_WORDS}"
        ],
    )


def _draft_numbers(context: LeverContext, drafts: Drafts, tokens: int) -> dict[str, float]:
    return {
        "draft_tokens": tokens,
        "accepted_tokens": drafts.accepted[tokens],
        "spec_acceptance_ratio": drafts.share(tokens),
        "speedup_at_most_ratio": drafts.speedup(tokens),
        "verification_longer_ratio": drafts.verify[tokens] - 1,
        "running": context.get("running_avg"),
    }


def no_speculation(context: LeverContext) -> Advice | None:
    """Turn speculation off, if the accepted tokens do not pay for drafting."""
    if has_fallen(context.facts):  # the window's mean is that of another acceptance
        return None
    drafts, (text, _) = _drafts(context), _config(context)
    before: dict[str, float] = {}
    why = "Almost no draft token is accepted: verifying the drafts only costs time."
    if drafts is None:
        per_draft = context.facts.values.get("spec_accepted_per_draft_tokens")
        if per_draft is None or 1 + per_draft > WORTH_SPEEDUP:
            return None
    else:
        if drafts.speedup(drafts.tokens) > drafts.worth:
            retuned = shorter_draft(context) is not None
            return None if retuned else _watched_speculation(context, drafts)
        before = _draft_numbers(context, drafts, drafts.tokens)
        never = 1 + drafts.tokens < drafts.verify[-1] + drafts.tokens * drafts.cost_ratio
        needed = "; even a draft that is always right would not pay" if never else ""
        is_slower = drafts.speedup(drafts.tokens) < 1
        lost = "more time than" if is_slower else "about as much time as"
        why = (
            f"Checking the drafts takes {lost} the accepted ones save"
            f"{_batch_words(context, drafts)}{needed}."
        )
    return advice(
        context,
        "spec-off",
        [(SPECULATION, text, None)],
        why,
        before={**before, **tails_now(context)},
        # A step without drafts to verify takes no longer.
        predicted={"draft_tokens": 0, "speedup_at_most_ratio": 1.0, **at_most(tails_now(context))},
    )


def _watched_speculation(context: LeverContext, drafts: Drafts) -> Advice:
    """A recommendation without a change: speculation still pays; what to watch."""
    tokens = drafts.tokens
    return advice(
        context,
        "spec-watch",
        [],
        "Retune the draft for this traffic instead of turning it off. The accepted drafts save "
        f"more time than checking them takes{_batch_words(context, drafts)}.",
        before=_draft_numbers(context, drafts, tokens),
    )
