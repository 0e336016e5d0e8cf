"""Speculative decoding: tokens per pass, speedup, and break-even acceptance. Pure.

Acceptance is the chance that one drafted token is accepted, given that all before it were accepted.

Source: guide 6.6; the expectation: Leviathan, Kalman and Matias 2023, equation 1 and theorem 3.8.
"""

from __future__ import annotations

from collections.abc import Callable

from kneewatch.diagnose.catalogue.inputs import not_negative, positive, within

_BISECTIONS = 60  # beyond the precision of a double on 0..1


def tokens_per_pass(*, acceptance_ratio: float, draft_tokens: int) -> float:
    """Expected output tokens of one verification: accepted tokens and the target's own token.

    1 + a + a^2 + ... + a^k: from 1 (nothing accepted) to k + 1 (all accepted).
    """
    within("acceptance_ratio", acceptance_ratio, low=0.0, high=1.0)
    not_negative("draft_tokens", draft_tokens)
    return sum(acceptance_ratio**accepted for accepted in range(draft_tokens + 1))


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

    return _reached(speedup, 1.0) if speedup(1.0) >= 1 else None


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


def per_token_acceptance_ratio(*, accepted_share_ratio: float, draft_tokens: int) -> float:
    """Acceptance per token, computed from the measured share of drafted tokens that were accepted.

    vLLM counts tokens after a rejected token as drafted. So the share is (a + a^2 + ... + a^k) / k,
    which is below the acceptance a.
    """
    within("accepted_share_ratio", accepted_share_ratio, low=0.0, high=1.0)
    positive("draft_tokens", draft_tokens)

    def share(ratio: float) -> float:
        tokens = tokens_per_pass(acceptance_ratio=ratio, draft_tokens=draft_tokens)
        return (tokens - 1) / draft_tokens

    return _reached(share, accepted_share_ratio)


def _reached(rising: Callable[[float], float], target: float) -> float:
    """The ratio in 0..1 at which an increasing function reaches `target`."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) >= target else (middle, high)
    return high
