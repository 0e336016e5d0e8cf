"""Speculation as it is: what is drafted at a time, what of it is accepted, and what that is worth.
Pure. Guide 6.6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kneewatch.diagnose.sizing.speed.speculation import per_token_acceptance_ratio

DRAFT_COST_RATIO = 0.1
"""One step of a small draft over one of its target (guide 6.6); n-grams cost about nothing."""

NGRAM_COST_RATIO = 0.02
PAYS_FROM = 0.5
"""Below it the guide says to switch speculation off or to retune it (9.3)."""

WORTH_SPEEDUP = 1.02
WORTH_AT_BEST = 1.1
"""Where verifying is taken to cost nothing, for its cost is not known, a gain of less than a tenth
is none: docs/lab.md has a best case of 1.01 that was 0.9 times the speed."""

LONGEST_DRAFT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens drafted at a time, and what of them is accepted.

    `accepted` is the mean number accepted when so many are drafted, at each number up to that;
    `verify` what a verification of so many takes over a plain step: 1 while bandwidth binds, more
    the larger the batch. Shapes: both (tokens + 1,). `by_position`: accepted was counted so, and
    not worked out as if each token had the same chance. `worth`: the least speedup that is a gain.
    """

    tokens: int
    accepted: Sequence[float]
    cost_ratio: float
    verify: Sequence[float]
    by_position: bool
    worth: float

    def share(self, tokens: int) -> float:
        """Accepted over drafted tokens at a length of the draft."""
        return self.accepted[tokens] / tokens

    def speedup(self, tokens: int) -> float:
        """Against no speculation (guide 6.6)."""
        return (1 + self.accepted[tokens]) / (self.verify[tokens] + tokens * self.cost_ratio)

    @property
    def best(self) -> int:
        """The length that pays most, 1 at least."""
        return max(range(1, self.tokens + 1), key=self.speedup)

    @property
    def shorter(self) -> int | None:
        """Of the shorter drafts that are accepted well enough the best, where it pays more than
        this one; else None."""
        wanted = [some for some in range(1, self.tokens) if self.share(some) >= PAYS_FROM]
        best = max(wanted, key=self.speedup, default=self.tokens)
        least = max(self.speedup(self.tokens), self.worth)
        return best if best < self.tokens and self.speedup(best) > least else None


def drafts_of(
    values: Mapping[str, float | None],
    *,
    tokens: int | None = None,
    cost_ratio: float = DRAFT_COST_RATIO,
    verify: Sequence[float] = (),
) -> Drafts | None:
    """From vLLM's counts by position where they are there, else as if each token had one chance.

    `tokens` is the stated length of a draft; None takes the measured one. `verify` is 1 throughout
    unless it is given. None where nothing is drafted, or no length makes sense.
    """
    share = values.get("spec_acceptance_ratio")
    per_draft = values.get("spec_accepted_per_draft_tokens")
    if tokens is None and share and per_draft:
        # A share next to nothing would make any length of it.
        tokens = round(min(per_draft / share, LONGEST_DRAFT_TOKENS + 1))
    if share is None or tokens is None or not 1 <= tokens <= LONGEST_DRAFT_TOKENS:
        return None
    counts = [values.get(f"spec_acceptance_pos{at}_ratio") for at in range(tokens)]
    known = [count for count in counts if count is not None]
    by_position = len(known) == tokens
    if not by_position:
        one = per_token_acceptance_ratio(
            accepted_share_ratio=min(1.0, max(0.0, share)), draft_tokens=tokens
        )
        known = [one ** (at + 1) for at in range(tokens)]
    measured = len(verify) == tokens + 1
    return Drafts(
        tokens,
        tuple(accumulate(known, initial=0.0)),
        cost_ratio,
        verify if measured else (1.0,) * (tokens + 1),
        by_position,
        WORTH_SPEEDUP if measured else WORTH_AT_BEST,
    )
