"""Speculation by position and by load: keep, shorten, retune, disable."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.causes.optional_features import drafts_of
from kneewatch.diagnose.deployment.deployment import NOTHING, Stated
from kneewatch.diagnose.deployment.vllm_flags import parse_command
from kneewatch.diagnose.verdict import Cause
from kneewatch.rules.rule import Severity
from tests.diagnose.recommend.scenes import LLAMA, advised, changes
from tests.diagnose.situations import CALM, Situation

COMPUTE = {"gpu_tensor_active_ratio": 0.85, "gpu_dram_active_ratio": 0.4}


def drafting(each: Sequence[float], *, running: float = 4.0, **more: float) -> Situation:
    """An engine that drafts as many tokens, accepted at each position so."""
    return CALM.but(
        spec_acceptance_ratio=sum(each) / len(each),
        spec_accepted_per_draft_tokens=sum(each),
        spec_draft_tokens_per_s=200.0,
        running_avg=running,
        prompt_tokens_mean=1000.0,
        output_tokens_mean=200.0,
        **{f"spec_acceptance_pos{at}_ratio": share for at, share in enumerate(each)},
        **more,
    )


def draft_cause(situation: Situation) -> Cause | None:
    return situation.causes().get("spec_decode_poor")


GOOD, LONG, FLAT, NONE = (0.9, 0.8, 0.7), (0.9, 0.8, 0.05, 0.02), (0.45,) * 4, (0.1, 0.02, 0.01)


@pytest.mark.parametrize(
    ("each", "severity", "lever"),
    [
        pytest.param(LONG, Severity.INFO, "Draft 2 tokens at a time, not 4.", id="shorten"),
        pytest.param(FLAT, Severity.INFO, "Keep it at this batch", id="keep, retune"),
        pytest.param((0.5, 0.2, 0.0), Severity.INFO, "Draft 1 token at a time", id="to one"),
        pytest.param(NONE, Severity.WARNING, "no draft length pays", id="disable"),
    ],
)
def test_what_to_do_follows_from_the_positions(
    each: Sequence[float], severity: Severity, lever: str
) -> None:
    cause = draft_cause(drafting(each))
    assert cause is not None
    assert cause.severity == severity
    assert cause.lever.startswith(lever) or lever in cause.lever
    shares = ", ".join(f"{100 * share:.0f}%" for share in each)
    assert f"accepted by position: {shares}" in [evidence.text for evidence in cause.evidence]


def test_what_is_accepted_well_is_kept() -> None:
    assert draft_cause(drafting(GOOD)) is None


def test_the_same_acceptance_no_longer_pays_in_a_large_batch() -> None:
    small, large = draft_cause(drafting(FLAT)), draft_cause(drafting(FLAT, running=256.0))
    assert small is not None
    assert large is not None
    assert (small.severity, large.severity) == (Severity.INFO, Severity.WARNING)


@pytest.mark.parametrize(
    ("each", "speedup"),
    [((0.5, 0.2, 0.0), "1.31x"), ((0.5, 0.1, 0.05, 0.05), "1.21x"), ((0.8, 0.4, 0.1), "1.77x")],
)
def test_an_estimated_gain_is_never_told_as_a_loss(each: Sequence[float], speedup: str) -> None:
    cause = draft_cause(drafting(each))
    assert cause is not None
    assert cause.severity == Severity.INFO
    assert speedup in cause.summary
    assert "not pay" not in cause.summary


def test_a_compute_bound_gpu_asks_for_the_guides_sixty_per_cent() -> None:
    each = (0.7, 0.55, 0.4)
    assert draft_cause(drafting(each)) is None
    bound = draft_cause(drafting(each, **COMPUTE))
    assert bound is not None
    assert bound.severity == Severity.WARNING
    assert bound.evidence[0].threshold == 0.6
    assert any("compute-bound" in evidence.text for evidence in bound.evidence)
    assert draft_cause(drafting((0.8, 0.7, 0.6), **COMPUTE)) is None


def test_a_fall_in_the_newest_part_is_not_excused_by_the_drafts_before_it() -> None:
    fallen = CALM.but(**{key: value for key, value in drafting(GOOD).values.items() if value})
    cause = draft_cause(Situation(values=fallen.values, recent={"spec_acceptance_ratio": 0.1}))
    assert cause is not None
    assert cause.severity == Severity.WARNING


def test_half_a_window_from_before_a_fall_is_no_excuse() -> None:
    falling = drafting((0.46,) * 4, arrival_per_s=2.0)
    fell, steady = (
        draft_cause(replace(falling, recent={"spec_acceptance_ratio": recent}))
        for recent in (0.1, 0.42)
    )
    assert fell is not None
    assert steady is not None
    assert (fell.severity, steady.severity) == (Severity.WARNING, Severity.INFO)


def test_a_fall_that_many_requests_prove_is_a_note_while_drafts_still_pay() -> None:
    falling = drafting((0.46,) * 4, arrival_per_s=40.0)
    cause = draft_cause(replace(falling, recent={"spec_acceptance_ratio": 0.42}))
    assert cause is not None
    assert cause.severity == Severity.INFO
    assert "still pays" in cause.summary


def test_without_counts_by_position_each_token_has_one_chance() -> None:
    values = {"spec_acceptance_ratio": 0.4, "spec_accepted_per_draft_tokens": 1.2}
    drafts = drafts_of(values)
    assert drafts is not None
    assert (drafts.tokens, drafts.by_position) == (3, False)
    assert drafts.accepted[-1] == pytest.approx(1.2)
    shares = [
        now - before for before, now in zip(drafts.accepted, drafts.accepted[1:], strict=False)
    ]
    assert shares == sorted(shares, reverse=True)
    assert drafts_of({"spec_acceptance_ratio": None}) is None
    assert drafts_of({"spec_acceptance_ratio": 0.001}, tokens=999) is None


@pytest.mark.parametrize(
    ("running", "lever"),
    [
        pytest.param(2.0, "spec-watch", id="two requests: verifying is free"),
        pytest.param(400.0, "spec-off", id="four hundred: each drafted token is computed"),
    ],
)
def test_the_measured_batch_decides_with_a_stated_gpu(running: float, lever: str) -> None:
    levers = advised("spec_decode_poor", situation=drafting(FLAT, running=running), stated=LLAMA)
    assert list(levers) == [lever]
    assert f"at the present batch of {running:.0f}" in levers[lever].summary


NGRAMS = parse_command(
    """vllm serve m -sc '{"method": "ngram", "num_speculative_tokens": 4}'""", origin="f"
)


@pytest.mark.parametrize(
    ("stated", "first", "lever"),
    [
        pytest.param(NOTHING, 0.14, "spec-off", id="1.06 at best, verifying not known"),
        pytest.param(NOTHING, 0.25, "spec-watch", id="1.16 at best"),
        pytest.param(LLAMA, 0.14, "spec-watch", id="1.06 with what verifying takes"),
    ],
)
def test_a_best_case_of_a_few_per_cent_is_no_gain(stated: Stated, first: float, lever: str) -> None:
    poor = drafting((first, 0.01, 0.0, 0.0), running=2.0)
    levers = advised(
        "spec_decode_poor", situation=poor, stated=replace(stated, command_line=NGRAMS)
    )
    assert list(levers) == [lever]


@pytest.mark.parametrize(("running", "tokens"), [(2.0, 3), (192.0, 1)])
def test_a_larger_batch_wants_a_shorter_draft(running: float, tokens: int) -> None:
    each = (0.85, 0.6, 0.3, 0.05, 0.0)
    levers = advised("spec_decode_poor", situation=drafting(each, running=running), stated=LLAMA)
    ((_, to),) = changes(levers["spec-shorter"]).values()
    assert to == tokens


@pytest.mark.parametrize("stated", [NOTHING, LLAMA])
def test_a_gpu_that_is_seen_to_be_compute_bound_is_told(stated: Stated) -> None:
    poor = drafting(FLAT, **COMPUTE)
    summary = advised("spec_decode_poor", situation=poor, stated=stated)["spec-watch"].summary
    assert "less here, because the GPU is compute-bound" in summary
