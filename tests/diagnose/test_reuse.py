"""What is known of cached blocks and tiers, and what better hits would save."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from statistics import median

import pytest
from msgspec.structs import replace

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.learned.derived_signals import spread_sigmas
from kneewatch.diagnose.verdict import Cause
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
    assert [evidence.signal for evidence in far.against] == ["kv_reuse_gap_s"]
    assert cause(CHURN.but(kv_reuse_gap_s=6.0), "prefix_churn").confidence == plain, "no evictions"


def test_gaps_are_read_off_a_recorded_page() -> None:
    assert any("kv_block_reuse_gap_seconds" in body for body in bodies("prefix_churn")[:60])
    all_diagnoses = diagnoses(CAPTURES / "prefix_churn.jsonl.gz")
    gaps = [
        gap
        for diagnosis in all_diagnoses
        if (gap := diagnosis.values.get("kv_reuse_gap_s")) is not None
    ]
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
    lost_cause = cause(replace(half, recent=lost), "prefix_reuse_lost")
    assert "prefix_saved_ratio" not in [evidence.signal for evidence in lost_cause.against]


FEW_HITS = replace(
    CHURN.but(prefix_hit_ratio=0.2, prefix_hit_tokens_mean=40.0, prefix_query_per_s=400.0),
    quiet={**CHURN.quiet, "prefix_hit_ratio": 0.9, "prefix_query_per_s": 400.0},
)
HEADS_ALONE = {"prefill_hit_share": 0.05, "prefill_miss_share": 0.6}
THREE_TIMES = {"prefix_query_per_s": 1200.0, "arrival_per_s": 6.0, "completed_per_s": 6.0}
"""Three times as many requests of the same length."""


@pytest.mark.parametrize(
    ("situation", "cause_id"),
    [
        pytest.param(FEW_HITS.but(**HEADS_ALONE), "prefix_reuse_lost", id="none hits whole"),
        pytest.param(
            FEW_HITS.but(prefix_hit_spread_sigmas=-3.0), "prefix_reuse_lost", id="all hit alike"
        ),
        pytest.param(
            FEW_HITS.but(prefill_hit_share=0.17, prefill_miss_share=0.6),
            "prefix_churn",
            id="some hit whole, others not at all",
        ),
        pytest.param(
            FEW_HITS.but(prefix_hit_spread_sigmas=-1.0), "prefix_churn", id="hits vary by chance"
        ),
        pytest.param(FEW_HITS, "prefix_churn", id="how requests hit is unknown"),
        pytest.param(
            replace(FEW_HITS, quiet=CHURN.quiet).but(**HEADS_ALONE),
            "prefix_churn",
            id="nothing ever hit nearly whole",
        ),
        pytest.param(
            FEW_HITS.but(**HEADS_ALONE, **THREE_TIMES),
            "prefix_churn",
            id="three times the tokens are looked up",
        ),
        pytest.param(
            FEW_HITS.but(**HEADS_ALONE, kv_reuse_gap_s=6.0, kv_idle_before_evict_s=8.0),
            "prefix_churn",
            id="blocks are reused as late as they are evicted",
        ),
        pytest.param(
            FEW_HITS.but(**HEADS_ALONE, **THREE_TIMES, kv_capacity_tokens=1e6),
            "prefix_reuse_lost",
            id="blocks last for minutes",
        ),
    ],
)
def test_a_changed_prompt_hits_its_head_and_an_evicted_one_nothing(
    situation: Situation, cause_id: str
) -> None:
    assert {"prefix_reuse_lost", "prefix_churn"} & set(situation.causes()) == {cause_id}


def test_longer_prompts_of_another_caller_are_no_lost_prefix() -> None:
    longer = CHURN.but(prefix_query_per_s=1200.0, prefix_hit_ratio=0.1, prefix_hit_tokens_mean=60.0)
    for situation in (longer, longer.but(kv_capacity_tokens=1e6)):
        assert {"prefix_reuse_lost", "prefix_churn"}.isdisjoint(situation.causes())


def test_prompts_that_are_broken_for_less_than_a_window_are_no_churn_afterwards() -> None:
    causes = {
        cause.id
        for verdict in diagnoses(CAPTURES / "prefix_lost.jsonl.gz", window_s=60.0)
        for cause in verdict.causes
    }
    assert "prefix_churn" not in causes


def test_what_tells_a_changed_prompt_from_an_evicted_tail_is_said() -> None:
    changed = cause(FEW_HITS.but(**HEADS_ALONE), "prefix_reuse_lost")
    assert "requests hit their first 40 tokens, each about as many: prompts differ behind them" in [
        piece.text for piece in changed.evidence
    ]
    evicted = cause(FEW_HITS.but(**HEADS_ALONE, **THREE_TIMES), "prefix_churn")
    assert evicted.evidence[-1].text.startswith("1,200 prompt tokens/s are looked up, 400 in quiet")


def counted(hits: Iterable[Sequence[float]]) -> list[tuple[float, float, float]]:
    """Tokens looked up, tokens that hit and requests, by scrape; `hits` are the hits of each
    scrape's prompts of 1,000 tokens."""
    counts = [(0.0, 0.0, 0.0)]
    for each in hits:
        looked_up, hit, requests = counts[-1]
        counts.append((looked_up + 1000.0 * len(each), hit + sum(each), requests + len(each)))
    return counts


def test_hits_of_prompts_that_hit_whole_or_not_at_all_vary_by_chance() -> None:
    rng = Random(7)
    spreads = [
        spread_sigmas(
            counted([[1000.0 * (rng.random() < 0.3) for _ in range(5)] for _ in range(12)])
        )
        for _ in range(300)
    ]
    assert sum(spread is not None and spread <= -2.3 for spread in spreads) <= 9
    assert -1.0 < median(spread for spread in spreads if spread is not None) < 1.0


def test_hits_of_prompts_that_share_their_head_vary_less() -> None:
    rng = Random(7)
    alike = counted([[rng.uniform(100.0, 300.0) for _ in range(5)] for _ in range(12)])
    assert (spread_sigmas(alike) or 0.0) < -2.3
    assert spread_sigmas(alike[:4]) is None, "too few scrapes"
    assert spread_sigmas(alike[5:] + alike[:5]) is None, "the counters were reset"
    assert spread_sigmas(counted([[0.0] * 5] * 12)) is None, "no hits"


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
    advice = advised("prefix_reuse_lost", situation=UNSHARED)["prompt-order"]
    assert advice.before["ttft_s"] == 0.5
    # A quarter of the prefill is left: 0.3 s less.
    assert advice.predicted["prefill_mean_s"] == pytest.approx(0.1)
    assert advice.predicted["ttft_s"] == pytest.approx(0.2)
    assert "USD" not in advice.summary


def test_a_router_reaches_the_hits_of_quiet_times() -> None:
    levers = advised("prefix_reuse_lost", situation=UNSHARED, stated=LLAMA)
    assert levers["prefix-routing"].predicted["prefix_hit_ratio"] == 0.8


def test_a_router_without_a_better_time_to_point_at_promises_nothing() -> None:
    levers = advised("prefix_reuse_lost", situation=replace(UNSHARED, quiet={}), stated=LLAMA)
    assert levers["prefix-routing"].predicted == {}


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
    all_diagnoses = [diagnosis for entry in recording for diagnosis in stream.replay(entry)]
    said = [
        c.severity
        for diagnosis in all_diagnoses
        for c in diagnosis.causes
        if c.id == "prefix_reuse_lost"
    ]
    assert max(said) == severity
    findings = [
        f for diagnosis in all_diagnoses for f in diagnosis.findings if f.rule == "PREFIX-HIT"
    ]
    assert any(f.severity for f in findings) == (expected_ratio is not None)
