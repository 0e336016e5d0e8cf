"""Step 9 of a plan: token budget, speculation and P/D pools. Pure.

Guide 6 and 9.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import STEP_TOKENS
from kneewatch.diagnose.catalogue.gpu_specs import LINK_BYTES_PER_S
from kneewatch.diagnose.catalogue.inputs import not_negative, positive, within
from kneewatch.diagnose.sizing.arithmetic import Step, seconds
from kneewatch.diagnose.sizing.plan.plan_result import Part, PlanStep, Pool, Value
from kneewatch.diagnose.sizing.plan.replica_curve import (
    GAIN_RATIO,
    Serving,
    at,
    best_point,
    tuned,
    usable_per_s,
)
from kneewatch.diagnose.sizing.plan.workload_profile import Speculation
from kneewatch.diagnose.sizing.speed.performance import Drafting
from kneewatch.diagnose.speculation import reached_ratio, tokens_per_pass
from kneewatch.rules.formatting import figure

# --- Speculative decoding in a plan ---------------------------------------------------------------


def speculative_speedup(
    *,
    acceptance_ratio: float,
    draft_tokens: int,
    draft_cost_ratio: float,
    verify_cost_ratio: float = 1.0,
) -> float:
    """Speed divided by the speed without speculation; below 1 speculation makes output slower.

    - `draft_cost_ratio`: one draft step divided by one target step. While bandwidth is the limit,
      this is the ratio of the parameters that each reads; about 0 for n-grams.
    - `verify_cost_ratio`: the verification divided by a plain step. It is 1 while bandwidth is the
      limit, and approaches draft_tokens + 1 once compute is.

    Source: guide 6.6.
    """
    within("acceptance_ratio", acceptance_ratio, low=0.0, high=1.0)
    not_negative("draft_tokens", draft_tokens)
    not_negative("draft_cost_ratio", draft_cost_ratio)
    positive("verify_cost_ratio", verify_cost_ratio)
    tokens = tokens_per_pass(acceptance_ratio=acceptance_ratio, draft_tokens=draft_tokens)
    return tokens / (verify_cost_ratio + draft_tokens * draft_cost_ratio)


def break_even_acceptance_ratio(
    *, draft_tokens: int, draft_cost_ratio: float, verify_cost_ratio: float = 1.0
) -> float | None:
    """The acceptance at which speculation neither helps nor hurts; None if it always hurts.

    Source: guide 6.6 (acceptance is the critical variable).
    """
    positive("draft_tokens", draft_tokens)

    def speedup(ratio: float) -> float:
        return speculative_speedup(
            acceptance_ratio=ratio,
            draft_tokens=draft_tokens,
            draft_cost_ratio=draft_cost_ratio,
            verify_cost_ratio=verify_cost_ratio,
        )

    return reached_ratio(speedup, 1.0) if speedup(1.0) >= 1 else None


def best_draft_tokens(
    *, acceptance_ratio: float, draft_cost_ratio: float, max_draft_tokens: int = 16
) -> int:
    """Drafted tokens per pass with the highest speedup; 0 if no number gives a speedup."""
    return max(
        range(max_draft_tokens + 1),
        key=lambda count: speculative_speedup(
            acceptance_ratio=acceptance_ratio,
            draft_tokens=count,
            draft_cost_ratio=draft_cost_ratio,
        ),
    )


SAVING_RATIO = 0.2
"""Smallest saving of GPUs that justifies two pools; the roofline is not more accurate than that."""


def transfer(pool: Pool, replica: Serving) -> Part:
    """The part of the plan on what pools for prefill and decode would spare and cost a request: a
    prefill chunk's stall and, if a network is stated, the transfer of a prompt's KV cache."""
    if replica.limit < 1:
        return Part()
    best = best_point(replica)
    predicted = at(replica, best.concurrency if best else 1)
    stall_s = max(predicted.prefill_step.total_s - predicted.decode_step.total_s, 0.0)
    part = Part(output={"prefill_stall_s": stall_s})
    network = pool.profile.hosting.network
    if network is None:
        return part
    move_s = part.sheet.line(
        f"KV of a P95 prompt over {network}",
        "{KV cache per GPU:GB} / {bandwidth per GPU:GB/s}",
        # Each GPU moves its own share.
        (
            replica.memory.layout.request_bytes(pool.lengths.input_p95_tokens),
            LINK_BYTES_PER_S[network],
        ),
        result=f"{{:s}} (a prefill chunk stalls decode for {seconds(stall_s)})",
        source="guide 6.5",
    )
    part.output |= {"kv_transfer_s": move_s, "disaggregation_gain_s": stall_s - move_s}
    return part


def configured(pool: Pool, replica: Serving) -> tuple[Serving, tuple[Part, ...]]:
    """The replica with the token budget and the speculation that step 9 chooses, and why."""
    chunk, replica = _budget(replica)
    draft, replica = _speculation(pool, replica)
    return replica, (chunk, draft)


def batching_step(pool: Pool, replica: Serving, chosen: Sequence[Part]) -> PlanStep:
    """Step 9 (batching and speculation): what was chosen for the replica."""
    decided = [part.decision for part in chosen] + [f"{pool.phase} alone"] * bool(pool.phase)
    step = PlanStep(
        number=9,
        title="Configure batching and decode acceleration",
        decision="; ".join(("continuous batching", *decided)),
        tier=pool.name,
    )
    for part in chosen:
        step.add(part)
    step.output["disaggregate"] = bool(pool.phase)
    if not pool.phase:
        step.add(transfer(pool, replica))
    step.notes += _priorities(pool)
    return step


def _priorities(pool: Pool) -> list[str]:
    """How requests that may wait, or that are long, can let others go first (guide 1.4, 6.2)."""
    later = "--scheduling-policy priority serves requests with a lower `priority` value first"
    if pool.profile.traffic.kind == "batch":
        return [f"batch work: a fleet of its own, or one with online traffic where {later}"]
    mixed = pool.lengths.are_mixed
    return [f"short and long prompts share this fleet: {later}"] if mixed else []


def _budget(replica: Serving) -> tuple[Part, Serving]:
    """The part of the plan on the token budget per step, and the replica with the chosen budget.

    It is vLLM's own budget, or a smaller one if that serves more within the targets.
    """
    own, (best, tried) = replica.launch.batched_tokens, tuned(replica)
    taken = best.launch.batched_tokens
    part = Part(
        decision=f"chunked prefill with vLLM's budget of {own:,} tokens",
        output={"max_num_batched_tokens": taken},
        to_measure=["ITL P99 at this budget while long prompts arrive"],
    )
    if "max_num_batched_tokens" in replica.pool.deployment.flags:
        part.decision = f"chunked prefill with {own:,} tokens, as set"
    if taken != own:
        part.decision = f"{STEP_TOKENS} {taken} (default {own})"
    for tokens, usable in tried:
        title, values = f"Token budget of {tokens:,} per step", "predicted at C_max"
        result = f"{figure(usable)} requests/s"
        part.sheet.text(Step(title, "usable RPS", values, result, "guide 6.4"))
    return part, best


def _speculation(pool: Pool, replica: Serving) -> tuple[Part, Serving]:
    stated = pool.profile.speculation
    if stated is None:
        note = "speculation was not considered: no acceptance ratio is set"
        return Part(decision="no speculation", notes=[note]), replica
    drafting = Drafting(
        tokens=stated.draft_tokens,
        acceptance_ratio=stated.acceptance_ratio,
        cost_ratio=stated.draft_cost_ratio,
    )
    tried = replace(replica, drafting=drafting)
    before, after = usable_per_s(replica), usable_per_s(tried)
    taken = after > before * GAIN_RATIO
    part = Part(
        decision=f"speculation with {stated.draft_tokens} tokens" if taken else "no speculation",
        output={"speculation": taken},
        to_measure=["acceptance on production requests: turn speculation off below 50%"],
    )
    part.add(_alone(stated))
    part.sheet.text(
        Step(
            title="Usable RPS with speculation",
            formula="within the targets, without and with speculation",
            values=f"{figure(before)} and {figure(after)} requests/s",
            result="on" if taken else "off: no gain at this concurrency",
            source="roofline",
        )
    )
    return part, tried if taken else replica


def _alone(stated: Speculation) -> Part:
    """The part of the plan on the effect of speculation on a single request in an idle replica."""
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
    part = Part(output=output)
    passed = "(1 - {a}^({k} + 1)) / (1 - {a})" if accepted < 1 else "{a} x ({k} + 1)"
    part.sheet.line(
        "Speculation for one request",
        f"{passed} / (1 + {{k}} x {{draft cost}})",
        (accepted, tokens, cost),
        result="{}x",
        source="guide 6.6; Leviathan et al. 2023",
    )
    return part
