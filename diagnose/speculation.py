"""Speculative decoding: tokens per pass and acceptance per token. Pure.

Acceptance is the chance that one drafted token is accepted, given that all before it were accepted.

Source: guide 6.6; the expectation: Leviathan, Kalman and Matias 2023, equation 1 and theorem 3.8.
"""

from __future__ import annotations

from collections.abc import Callable

from kneewatch.diagnose.halving import end_of

_HALVINGS = 60  # beyond the precision of a double on 0..1


def tokens_per_pass(*, acceptance_ratio: float, draft_tokens: int) -> float:
    """Expected output tokens of one verification: accepted tokens and the target's own token.

    1 + a + a^2 + ... + a^k: from 1 (nothing accepted) to k + 1 (all accepted).
    """
    return sum(acceptance_ratio**accepted for accepted in range(draft_tokens + 1))


def per_token_acceptance_ratio(*, accepted_share_ratio: float, draft_tokens: int) -> float:
    """Acceptance per token, computed from the measured share of drafted tokens that were accepted.

    vLLM counts tokens after a rejected token as drafted. So the share is (a + a^2 + ... + a^k) / k,
    which is below the acceptance a.
    """

    def share(ratio: float) -> float:
        tokens = tokens_per_pass(acceptance_ratio=ratio, draft_tokens=draft_tokens)
        return (tokens - 1) / draft_tokens

    return reached_ratio(share, accepted_share_ratio)


def reached_ratio(rising: Callable[[float], float], target: float) -> float:
    """The ratio in 0..1 at which an increasing function reaches `target`."""
    return end_of(lambda at: rising(at) < target, holds=0.0, falls=1.0, halvings=_HALVINGS)
