"""Speculation: shorter drafts, none, or what to watch. Guide 6.6, 9.3. Pure."""

from __future__ import annotations

import json
from typing import cast

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.causes.bottleneck import bound_of
from kneewatch.diagnose.causes.optional_features import (
    DRAFT_COST_RATIO,
    NGRAM_COST_RATIO,
    WORTH_SPEEDUP,
    Drafts,
    drafts_of,
)
from kneewatch.diagnose.recommend.context import SETTLE_WORDS, Scene, advice
from kneewatch.diagnose.recommend.prediction import costs_of
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.sizing.speed.performance import step_model
from kneewatch.diagnose.sizing.speed.roofline_inputs import DEFAULT
from kneewatch.diagnose.sizing.speed.speculation import break_even_acceptance_ratio


def _config(scene: Scene) -> tuple[str | None, dict[str, object]]:
    launch = scene.server.stated.launch
    text = None if launch is None else launch.text("--speculative-config")
    try:
        parsed: object = json.loads(text) if text else {}
    except ValueError:
        parsed = {}
    return text, cast("dict[str, object]", parsed) if isinstance(parsed, dict) else {}


def _drafts(scene: Scene) -> Drafts | None:
    values, (_, config) = scene.facts.values, _config(scene)
    given = config.get("num_speculative_tokens")
    cost = NGRAM_COST_RATIO if config.get("method") == "ngram" else DRAFT_COST_RATIO
    stated = given if isinstance(given, int) else None
    plain = drafts_of(values, tokens=stated, cost_ratio=cost)
    if plain is None:
        return None
    verify = _verify_ratios(scene, plain.tokens)
    return drafts_of(values, tokens=plain.tokens, cost_ratio=cost, verify=verify)


def _verify_ratios(scene: Scene, tokens: int) -> tuple[float, ...]:
    """What verifying 0 to `tokens` drafted tokens takes over a plain step, at the measured batch.

    By the roofline of the stated model and GPU; nothing where it is not known.
    """
    setup, demand = scene.server.setup, scene.demand
    batch = scene.get("running_avg")
    if setup is None or setup.gpu is None or not demand.input_tokens or batch < 1:
        return ()
    context = demand.input_tokens + (demand.output_tokens or 0.0) / 2
    try:
        known = costs_of(setup)
    except SizingError:
        return ()
    times_s = [
        step_model(
            known,
            DEFAULT,
            context_tokens=context,
            prompt_context_tokens=context,
            tokens_per_sequence=1.0 + drafted,
        ).total_s(batch)
        for drafted in range(tokens + 1)
    ]
    return tuple(time_s / times_s[0] for time_s in times_s)


def _batch_words(scene: Scene, drafts: Drafts) -> str:
    """How far the batch is taken into account."""
    batch, bound = scene.get("running_avg"), bound_of(scene.facts)
    more = 100 * (drafts.verify[-1] - 1)
    if more < 1 and bound is not None and bound.kind == "compute":
        return f" at best, and less here: the GPU is {bound.text}"
    if _verify_ratios(scene, drafts.tokens):
        return f" at the present batch of {batch:.0f}, where verifying takes {more:.0f} % longer"
    return " while the batch is small"


def shorter_draft(scene: Scene) -> Recommendation | None:
    """Fewer drafted tokens, where a shorter draft pays by the acceptance that is measured."""
    drafts = _drafts(scene)
    if drafts is None:
        return None
    tokens, best = drafts.tokens, drafts.shorter
    if best is None:
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
        f"speculation{_batch_words(scene, drafts)}.",
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
        if drafts.speedup(drafts.tokens) > drafts.worth:
            retuned = shorter_draft(scene) is not None
            return None if retuned else _watched_speculation(scene, drafts)
        before = _draft_numbers(drafts, drafts.tokens)
        even = break_even_acceptance_ratio(
            draft_tokens=drafts.tokens,
            draft_cost_ratio=drafts.cost_ratio,
            verify_cost_ratio=drafts.verify[-1],
        )
        needed = (
            "; not even drafts that are always right would pay"
            if even is None
            else f"; it breaks even at {100 * even:.0f} % a token"
        )
        why = (
            f"{drafts.accepted[-1]:.2f} of {drafts.tokens} drafted tokens are accepted: "
            f"{drafts.speedup(drafts.tokens):.2f} times the speed without speculation"
            f"{_batch_words(scene, drafts)}{needed}."
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
        f"{drafts.speedup(tokens):.2f} times the speed without speculation"
        f"{_batch_words(scene, drafts)}. Retune the draft for this traffic rather than switch it "
        "off.",
        before=_draft_numbers(drafts, tokens),
        checks=["tokens a second and stream at your usual batch, with and without"],
        risk="Where compute binds (large batches) verifying costs more than it gives.",
        verify=["spec_acceptance_ratio above 0.5, or tpot_mean_s below that without speculation"],
        guide=("6.6", "9.3"),
    )
