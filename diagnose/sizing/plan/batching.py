"""Step 9 of a plan: token budget of a step, speculation, two pools or one. Pure. Guide 6."""

from __future__ import annotations

from dataclasses import replace

from kneewatch.diagnose.sizing.plan.apart import Part, disaggregation
from kneewatch.diagnose.sizing.plan.model import PlanStep, Pool, Value
from kneewatch.diagnose.sizing.plan.profile import Speculation
from kneewatch.diagnose.sizing.plan.speed import GAIN_RATIO, Serving, tuned, usable_per_s
from kneewatch.diagnose.sizing.speed.roofline import Drafting
from kneewatch.diagnose.sizing.speed.speculation import (
    best_draft_tokens,
    break_even_acceptance_ratio,
    speculative_speedup,
)
from kneewatch.diagnose.sizing.steps import Step, figure


def batching_step(pool: Pool, instance: Serving) -> tuple[PlanStep, Serving]:
    """Step 9, and the instance with batching and speculation as decided."""
    chunk, instance = _budget(instance)
    draft, instance = _speculation(pool, instance)
    parts = (chunk, draft, disaggregation(pool, instance))
    output: dict[str, Value] = {}
    for part in parts:
        output |= part.output
    scheduler: tuple[str, ...] = ()
    if pool.profile.traffic.kind == "batch":
        scheduler = ("no user waits: keep this fleet apart from online traffic (guide 1.4)",)
    return (
        PlanStep(
            number=9,
            title="Configure batching and decode acceleration",
            decision="continuous batching; " + "; ".join(part.decision for part in parts),
            output=output,
            steps=tuple(step for part in parts for step in part.steps),
            to_measure=tuple(wanted for part in parts for wanted in part.to_measure),
            notes=(*(note for part in parts for note in part.notes), *scheduler),
            tier=pool.name,
        ),
        instance,
    )


def _budget(instance: Serving) -> tuple[Part, Serving]:
    """The token budget of a step: vLLM's own, unless a smaller one carries more at the targets."""
    own, budgets = instance.setup.batched_tokens, tuned(instance)
    taken = budgets.instance.setup.batched_tokens
    steps = tuple(
        Step(
            title=f"Token budget of {tokens:,} a step",
            formula="usable RPS",
            values="at C_max by the roofline",
            result=f"{figure(usable)} requests/s",
            source="guide 6.4",
        )
        for tokens, usable in budgets.tried
    )
    decision = f"chunked prefill with vLLM's budget of {own:,} tokens"
    if taken != own:
        decision = f"--max-num-batched-tokens {taken} (default {own})"
    return (
        Part(
            decision=decision,
            output={"max_num_batched_tokens": taken},
            steps=steps,
            to_measure=("ITL P99 with long prompts arriving, at this budget",),
        ),
        budgets.instance,
    )


def _speculation(pool: Pool, instance: Serving) -> tuple[Part, Serving]:
    stated = pool.profile.speculation
    if stated is None:
        note = "speculation: no acceptance is stated, so it was not weighed"
        return Part(decision="no speculation", output={}, notes=(note,)), instance
    drafting = Drafting(
        tokens=stated.draft_tokens,
        acceptance_ratio=stated.acceptance_ratio,
        cost_ratio=stated.draft_cost_ratio,
    )
    tried = replace(instance, drafting=drafting)
    before, after = usable_per_s(instance), usable_per_s(tried)
    taken = after > before * GAIN_RATIO
    step = Step(
        title="Usable RPS with speculation",
        formula="at the targets, without and with it",
        values=f"{figure(before)}/s, {figure(after)}/s",
        result="on" if taken else "off: it does not pay at this concurrency",
        source="roofline",
    )
    output, alone = _alone(stated)
    return (
        Part(
            decision=f"speculation with {stated.draft_tokens} tokens"
            if taken
            else "no speculation",
            output={"speculation": taken, **output},
            steps=(alone, step),
            to_measure=("acceptance on production's requests: off below 50 %",),
        ),
        tried if taken else instance,
    )


def _alone(stated: Speculation) -> tuple[dict[str, Value], Step]:
    """What speculation does for one request in an empty instance."""
    tokens, accepted, cost = stated.draft_tokens, stated.acceptance_ratio, stated.draft_cost_ratio
    speedup = speculative_speedup(
        acceptance_ratio=accepted, draft_tokens=tokens, draft_cost_ratio=cost
    )
    output: dict[str, Value] = {
        "speculation_speedup_alone": speedup,
        "break_even_acceptance_ratio": break_even_acceptance_ratio(
            draft_tokens=tokens, draft_cost_ratio=cost
        ),
        "best_draft_tokens_alone": best_draft_tokens(
            acceptance_ratio=accepted, draft_cost_ratio=cost
        ),
    }
    step = Step(
        title="Speculation for one request",
        formula="(1 + a + ... + a^k) / (1 + k x draft cost)",
        values=f"a = {figure(accepted)}, k = {tokens}, cost {figure(cost)}",
        result=f"{figure(speedup)} times",
        source="guide 6.6; Leviathan et al. 2023",
    )
    return output, step
