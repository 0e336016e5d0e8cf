"""What is known of cached blocks and tiers, and what better hits would save."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.causes.evidence import Cause
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.rules.rule import Severity
from tests.diagnose.recommend.scenes import LLAMA, advised
from tests.diagnose.situations import CONCLUSIVE, Situation
from tests.diagnose.streams import bodies
from tests.recordings import CAPTURES, WINDOW_S, diagnoses

CHURN, LOST = CONCLUSIVE["prefix_churn"], CONCLUSIVE["prefix_reuse_lost"]


def cause(situation: Situation, cause_id: str) -> Cause:
    return situation.causes()[cause_id]


def test_blocks_that_go_when_they_would_be_used_again_speak_for_churn() -> None:
    plain = cause(CHURN, "prefix_churn").confidence
    near = cause(CHURN.but(kv_reuse_gap_s=6.0, kv_idle_before_evict_s=8.0), "prefix_churn")
    far = cause(CHURN.but(kv_reuse_gap_s=1.0, kv_idle_before_evict_s=60.0), "prefix_churn")
    assert near.confidence > plain > far.confidence
    assert near.evidence[-1].text == "blocks are reused after 6.0 s and evicted after 8.0 s unused"
    assert [one.signal for one in far.against] == ["kv_reuse_gap_s"]
    assert cause(CHURN.but(kv_reuse_gap_s=6.0), "prefix_churn").confidence == plain, "no evictions"


def test_gaps_are_read_off_a_recorded_page() -> None:
    assert any("kv_block_reuse_gap_seconds" in body for body in bodies("prefix_churn")[:60])
    told = diagnoses(CAPTURES / "prefix_churn.jsonl.gz")
    gaps = [gap for one in told if (gap := one.values.get("kv_reuse_gap_s")) is not None]
    assert gaps
    assert 1 < min(gaps) < max(gaps) < 30


@pytest.mark.parametrize("cause_id", ["prefix_churn", "prefix_reuse_lost"])
def test_a_tier_that_has_what_the_gpu_missed_speaks_against(cause_id: str) -> None:
    plain = CONCLUSIVE[cause_id]
    beside = cause(plain.but(prefix_saved_ratio=0.9, external_hit_ratio=0.88), cause_id)
    assert beside.confidence < cause(plain, cause_id).confidence
    assert "another cache tier serves them (hit ratio there 88%)" in beside.against[-1].text
    hits = plain.values["prefix_hit_ratio"]
    assert (
        cause(plain.but(prefix_saved_ratio=hits), cause_id).against
        == cause(plain, cause_id).against
    )


def test_a_fresh_loss_is_not_laid_to_another_tier() -> None:
    lost = {"prefix_hit_ratio": 0.0, "prefix_hit_tokens_mean": 0.0}
    half = LOST.but(prefix_hit_ratio=0.44, prefix_hit_tokens_mean=90.0, prefix_saved_ratio=0.44)
    told = cause(replace(half, recent=lost), "prefix_reuse_lost")
    assert "prefix_saved_ratio" not in [one.signal for one in told.against]


@pytest.mark.parametrize(
    ("quiet_ratio", "whole_share", "cause_id"),
    [
        pytest.param(0.9, 0.05, "prefix_reuse_lost", id="all hit their first tokens"),
        pytest.param(0.9, 0.17, "prefix_churn", id="some hit whole, others not at all"),
        pytest.param(0.9, None, "prefix_churn", id="what requests compute is unknown"),
        pytest.param(0.6, 0.05, "prefix_churn", id="nothing ever hit nearly whole"),
    ],
)
def test_a_changed_prompt_hits_its_head_and_an_evicted_one_nothing(
    quiet_ratio: float, whole_share: float | None, cause_id: str
) -> None:
    few = CHURN.but(
        prefix_hit_ratio=0.2,
        prefix_hit_tokens_mean=40.0,
        prefill_hit_share=whole_share,
        prefill_miss_share=0.6,
    )
    causes = replace(few, quiet={**few.quiet, "prefix_hit_ratio": quiet_ratio}).causes()
    assert {"prefix_reuse_lost", "prefix_churn"} & set(causes) == {cause_id}
    if cause_id == "prefix_reuse_lost":
        texts = [piece.text for piece in causes[cause_id].evidence]
        assert any(text.startswith("5% of requests hit nearly whole") for text in texts)


UNSHARED = replace(
    LOST.but(
        prefix_hit_ratio=0.2,
        prefix_saved_ratio=0.2,
        computed_prompt_tokens_per_s=8000.0,
        prefill_mean_s=0.4,
        ttft_mean_s=0.5,
        prompt_tokens_mean=2000.0,
        output_tokens_mean=200.0,
        itl_mean_s=0.012,
    ),
    quiet={**LOST.quiet, "prefix_hit_ratio": 0.8},
)


def test_what_old_hits_would_save_in_ttft_is_measured() -> None:
    told = advised("prefix_reuse_lost", situation=UNSHARED)["prompt-order"]
    assert told.before["ttft_s"] == 0.5
    # A quarter of the prefill is left: 0.3 s less.
    assert told.predicted["prefill_mean_s"] == pytest.approx(0.1)
    assert told.predicted["ttft_s"] == pytest.approx(0.2)
    assert "USD" not in told.summary


def test_what_old_hits_would_save_in_money_follows_from_model_and_gpu() -> None:
    told = advised(
        "prefix_reuse_lost", situation=UNSHARED, stated=replace(LLAMA, usd_per_gpu_hour=4.0)
    )
    summary = told["prompt-order"].summary
    # 6,000 tokens/s of 2 x 7.0e9 FLOP over 989e12 x 0.365: 23.3 % of a GPU of 4 USD.
    assert "Restoring it would free 23% of the GPU time, 0.93 USD/h per replica." in summary
    assert told["prefix-routing"].predicted["prefix_hit_ratio"] == 0.8


def test_a_router_without_a_better_time_to_point_at_promises_nothing() -> None:
    told = advised("prefix_reuse_lost", situation=replace(UNSHARED, quiet={}), stated=LLAMA)
    assert told["prefix-routing"].predicted == {}


@pytest.mark.parametrize(
    ("expected_ratio", "severity"),
    [
        pytest.param(None, Severity.INFO, id="no sharing is no fault by itself"),
        pytest.param(0.6, Severity.WARNING, id="sharing that is known and was never there"),
    ],
)
def test_known_reuse_makes_a_ratio_that_never_changed_a_finding(
    expected_ratio: float | None, severity: Severity
) -> None:
    profile = Profile(window_s=WINDOW_S, expected_prefix_hit_ratio=expected_ratio)
    stream = TargetStream("page", profile, Limits())
    recording = CaptureReader(CAPTURES / "long_prompt_prefill_heavy.jsonl.gz")
    told = [found for entry in recording for found in stream.replay(entry)]
    said = [c.severity for one in told for c in one.causes if c.id == "prefix_reuse_lost"]
    assert max(said) == severity
    found = [f for one in told for f in one.findings if f.rule.id == "PREFIX-HIT"]
    assert any(f.severity for f in found) == (expected_ratio is not None)
