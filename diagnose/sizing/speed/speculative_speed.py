"""Speculative decoding in a plan: its speedup, break-even acceptance and best draft. Pure."""

from __future__ import annotations

from kneewatch.diagnose.catalogue.inputs import not_negative, positive, within
from kneewatch.diagnose.speculation import reached_ratio, tokens_per_pass


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
