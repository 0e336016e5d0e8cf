"""Speculation: shorter drafts, none, or what to watch. Guide 6.6, 9.3. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.recommend.scene import SETTLE_WORDS, Scene, advice
from kneewatch.diagnose.sizing.speed.speculation import (
    break_even_acceptance_ratio,
    per_token_acceptance_ratio,
)

DRAFT_COST_RATIO = 0.1
"""One step of a small draft over one of its target (guide 6.6); n-grams cost about nothing."""

NGRAM_COST_RATIO = 0.02
PAYS_FROM = 0.5
"""Below it the guide says to switch speculation off (9.3)."""

WORTH_SPEEDUP = 1.02
LONGEST_DRAFT_TOKENS = 64


def _config(scene: Scene) -> tuple[str | None, dict[str, object]]:
    launch = scene.server.stated.launch
    text = None if launch is None else launch.text("--speculative-config")
    try:
        parsed: object = json.loads(text) if text else {}
    except ValueError:
        parsed = {}
    return text, cast("dict[str, object]", parsed) if isinstance(parsed, dict) else {}


@dataclass(frozen=True, slots=True)
class Drafts:
    """Speculation as it is: tokens drafted at a time, and what of them is accepted.

    `accepted` is the mean number accepted when so many are drafted, at each number up to that.
    """

    tokens: int
    accepted: tuple[float, ...]
    cost_ratio: float

    def share(self, tokens: int) -> float:
        """Accepted over drafted tokens at a length of the draft."""
        return self.accepted[tokens] / tokens

    def speedup(self, tokens: int) -> float:
        """Against no speculation, while bandwidth binds (guide 6.6)."""
        return (1 + self.accepted[tokens]) / (1 + tokens * self.cost_ratio)


def _drafts(scene: Scene) -> Drafts | None:
    """From vLLM's counts by position where they are there, else as if each token had one chance."""
    values, (_, config) = scene.facts.values, _config(scene)
    share, per_draft = (
        values.get("spec_acceptance_ratio"),
        values.get("spec_accepted_per_draft_tokens"),
    )
    given = config.get("num_speculative_tokens")
    tokens = given if isinstance(given, int) else None
    if tokens is None and share and per_draft:
        # A share next to nothing would make any length of it.
        tokens = round(min(per_draft / share, LONGEST_DRAFT_TOKENS + 1))
    if share is None or tokens is None or not 1 <= tokens <= LONGEST_DRAFT_TOKENS:
        return None
    cost = NGRAM_COST_RATIO if config.get("method") == "ngram" else DRAFT_COST_RATIO
    counts = [values.get(f"spec_acceptance_pos{at}_ratio") for at in range(tokens)]
    known = [count for count in counts if count is not None]
    if len(known) < tokens:
        one = per_token_acceptance_ratio(
            accepted_share_ratio=min(1.0, max(0.0, share)), draft_tokens=tokens
        )
        known = [one ** (at + 1) for at in range(tokens)]
    return Drafts(tokens, tuple(accumulate(known, initial=0.0)), cost)


def shorter_draft(scene: Scene) -> Recommendation | None:
    """Fewer drafted tokens, where a shorter draft pays by the acceptance that is measured."""
    drafts = _drafts(scene)
    if drafts is None:
        return None
    tokens = drafts.tokens
    best = max(range(1, tokens + 1), key=drafts.speedup)
    if best == tokens or drafts.share(best) < PAYS_FROM or drafts.speedup(best) < WORTH_SPEEDUP:
        return None
    text, config = _config(scene)
    to = json.dumps({**config, "num_speculative_tokens": best})
    change = (
        ("--speculative-config", text, to)
        if config
        else ("--speculative-config.num_speculative_tokens", tokens, best)
    )
    return advice(
        scene,
        "spec-shorter",
        [change],
        f"Of a draft of {best} token{'s' if best > 1 else ''} {100 * drafts.share(best):.0f} % "
        f"would be accepted, of {tokens} it is {100 * drafts.share(tokens):.0f} %: "
        f"{drafts.speedup(best):.2f} against {drafts.speedup(tokens):.2f} times the speed without "
        "speculation.",
        before=_draft_numbers(drafts, tokens),
        predicted=_draft_numbers(drafts, best),
        checks=["tokens a second and stream at your usual batch, with and without"],
        risk="Where compute binds (large batches) even short drafts cost more than they give.",
        verify=[
            f"spec_acceptance_ratio rises to about {drafts.share(best):.2f} and tpot_mean_s does "
            f"not rise {SETTLE_WORDS}"
        ],
        guide=("6.6", "9.3"),
    )


def _draft_numbers(drafts: Drafts, tokens: int) -> dict[str, float]:
    return {
        "draft_tokens": tokens,
        "spec_acceptance_ratio": drafts.share(tokens),
        "speedup_at_most_ratio": drafts.speedup(tokens),
    }


def no_speculation(scene: Scene) -> Recommendation | None:
    """Speculation off, where what is accepted does not pay for what is drafted; else retuned."""
    drafts, (text, _) = _drafts(scene), _config(scene)
    before: dict[str, float] = {}
    why = "Next to none of the drafted tokens is accepted: verifying them only costs."
    if drafts is None:
        per_draft = scene.facts.values.get("spec_accepted_per_draft_tokens")
        if per_draft is None or 1 + per_draft > WORTH_SPEEDUP:
            return None
    else:
        if drafts.speedup(drafts.tokens) > WORTH_SPEEDUP:
            retuned = shorter_draft(scene) is not None
            return None if retuned else _watched_speculation(scene, drafts)
        before = _draft_numbers(drafts, drafts.tokens)
        even = break_even_acceptance_ratio(
            draft_tokens=drafts.tokens, draft_cost_ratio=drafts.cost_ratio
        )
        needed = "" if even is None else f"; it breaks even at {100 * even:.0f} % a token"
        why = (
            f"{drafts.accepted[-1]:.2f} of {drafts.tokens} drafted tokens are accepted: at best "
            f"{drafts.speedup(drafts.tokens):.2f} times the speed without speculation, and less "
            f"the larger the batch{needed}."
        )
    return advice(
        scene,
        "spec-off",
        [("--speculative-config", text, None)],
        why,
        before=before,
        predicted={"draft_tokens": 0, "speedup_at_most_ratio": 1.0},
        checks=["tokens a second and stream at your usual batch, with and without"],
        risk="Traffic that does repeat loses its gain.",
        verify=[f"tpot_mean_s does not rise, generation_tokens_per_s does not fall {SETTLE_WORDS}"],
        guide=("6.6", "9.3"),
    )


def _watched_speculation(scene: Scene, drafts: Drafts) -> Recommendation:
    """Speculation kept while it pays, with what to look at."""
    tokens = drafts.tokens
    return advice(
        scene,
        "spec-watch",
        [],
        f"{drafts.accepted[-1]:.2f} of {tokens} drafted tokens are accepted: up to "
        f"{drafts.speedup(tokens):.2f} times the speed without speculation while the batch is "
        "small. Retune the draft for this traffic rather than switch it off.",
        before=_draft_numbers(drafts, tokens),
        checks=["tokens a second and stream at your usual batch, with and without"],
        risk="Where compute binds (large batches) verifying costs more than it gives.",
        verify=["spec_acceptance_ratio above 0.5, or tpot_mean_s below that without speculation"],
        guide=("6.6", "9.3"),
    )
