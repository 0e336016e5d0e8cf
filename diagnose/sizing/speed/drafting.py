"""A stated draft in the roofline: what it costs over a step of its target. Pure.

Source: guide 6.6; the draft's steps run inside the target's, so the host's part comes once.
"""

from __future__ import annotations

from kneewatch.diagnose.sizing.memory.kv_cache import kv_element_bytes
from kneewatch.diagnose.sizing.memory.setup import Setup
from kneewatch.diagnose.sizing.question import Question
from kneewatch.diagnose.sizing.speed.costs import Costs, costs
from kneewatch.diagnose.sizing.speed.efficiency import Efficiency
from kneewatch.diagnose.sizing.speed.roofline import Drafting
from kneewatch.diagnose.sizing.speed.step_time import step_model


def drafting_of(question: Question, setup: Setup, target: Costs) -> Drafting | None:
    """How the question's draft works on that launch; None where its acceptance is not stated."""
    draft, accepted, gpu = setup.draft, question.acceptance_ratio, setup.gpu
    inputs, outputs = question.input_tokens, question.output_tokens
    if draft is None or accepted is None or gpu is None or inputs is None or outputs is None:
        return None
    own = costs(
        draft.model,
        gpu,
        tensor_parallel=setup.parallel.tensor,
        kv_bytes_per_element=kv_element_bytes(setup.kv_cache_dtype),
    )
    ratio = cost_ratio(
        own,
        target,
        context_tokens=inputs + outputs / 2,
        sequences=question.concurrency_per_engine,
        efficiency=question.efficiency,
    )
    return Drafting(tokens=draft.tokens, acceptance_ratio=accepted, cost_ratio=ratio)


def cost_ratio(
    draft: Costs,
    target: Costs,
    *,
    context_tokens: float,
    sequences: float,
    efficiency: Efficiency,
) -> float:
    """One decode step of the draft over one of its target, the draft's without the host's part."""
    times = [
        step_model(
            each,
            efficiency,
            context_tokens=context_tokens,
            prompt_context_tokens=context_tokens,
        ).parts(sequences)
        for each in (draft, target)
    ]
    return (times[0].total_s - times[0].host_s) / times[1].total_s
