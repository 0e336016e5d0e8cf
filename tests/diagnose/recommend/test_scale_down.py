"""Fewer replicas: for a week's peak with the guide's headroom, or not at all."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.deployment.deployment import Stated, deployment
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.recommend.adviser import Adviser, recommend
from kneewatch.rules.facts import Targets
from tests.diagnose.recommend.scenes import FULL, LLAMA, PAGE, cause, changes
from tests.diagnose.situations import Situation

QUIET = FULL.but(
    running=4.0, running_avg=4.0, running_max=5.0, running_min=2.0, waiting=0.0, waiting_avg=0.0,
    waiting_by_capacity=0.0, kv_usage_ratio=0.04, kv_usage_avg_ratio=0.04, kv_usage_max_ratio=0.05,
    preemption_per_s=0.0, preemption_ratio_per_s=0.0, completed_per_s=0.3, itl_mean_s=0.009,
    itl_p99_s=0.012, ttft_mean_s=0.08, generation_tokens_per_s=250.0,
)  # fmt: skip
"""A replica of 160,000 KV tokens with four requests of some 1,600."""

FLEET = replace(LLAMA, replicas=8)


def scaled_down(
    peak: float | None, *, stated: Stated = FLEET, situation: Situation = QUIET
) -> Advice:
    """What is said of the replicas with such a peak within the week."""
    facts = replace(situation, config=PAGE).facts()
    recommendations = recommend(
        facts, ["underused"], deployment(PAGE, stated), weekly_peak_requests=peak
    )
    (advice,) = recommendations
    assert advice.id == "fewer-replicas"
    return advice


def test_nothing_is_advised_without_a_week() -> None:
    assert scaled_down(None).changes == ()
    assert "weekly peak" in scaled_down(None).summary


def test_the_peak_is_carried_with_half_as_much_again() -> None:
    advice = scaled_down(20.0)
    (before, after) = changes(advice)["replicas"]
    assert before == 8
    assert isinstance(after, int)
    # 20 requests of 1,600 tokens and their spread take a quarter of 160,000.
    assert 8 * 0.20 * 1.5 < after < 8 * 0.32 * 1.5 + 1
    assert advice.predicted["kv_usage_ratio"] * 1.3 <= 1.0
    assert advice.predicted["preemption_per_s"] == 0
    assert advice.cost_usd_per_hour == pytest.approx(
        (after - 8) * advice.before["usd_per_hour"] / 8
    )
    assert "50% headroom" in advice.summary


@pytest.mark.parametrize("peak", [1.0, 5.0, 20.0, 40.0, 60.0, 80.0, 100.0, 1e6])
def test_never_more_load_than_the_headroom_leaves(peak: float) -> None:
    advice = scaled_down(peak)
    if advice.changes:
        (before, after) = changes(advice)["replicas"]
        assert isinstance(after, int)
        assert isinstance(before, int)
        assert 2 <= after < before
        # 1,600 tokens each, on what is left of the replicas.
        assert peak * 1600 * before / after <= 160_000 / 1.3


def test_a_busy_week_keeps_them_all() -> None:
    advice = scaled_down(90.0)
    assert advice.changes == ()
    assert "are needed for 50% headroom" in advice.summary


def test_fewer_seats_than_kv_binds() -> None:
    launch = replace(FLEET, command_line=None)
    roomy, tight = scaled_down(20.0, stated=launch), scaled_down(20.0)
    assert changes(roomy) == changes(tight)


def test_without_a_roofline_none_are_advised_away() -> None:
    advice = scaled_down(20.0, stated=Stated(replicas=8))
    assert advice.changes == ()
    assert "ITL" in advice.summary


def test_a_target_that_the_rest_would_miss_keeps_them() -> None:
    tight = replace(QUIET, targets=Targets(itl_p99_s=0.0121))
    assert scaled_down(40.0, situation=tight).changes == ()
    loose = replace(QUIET, targets=Targets(itl_p99_s=0.5))
    assert scaled_down(40.0, situation=loose).changes != ()


def test_an_adviser_advises_none_away_until_the_week_is_filled_in() -> None:
    facts = replace(QUIET, config=PAGE).facts()
    adviser = Adviser(FLEET)
    (before,) = adviser.advise(facts, [cause("underused")])
    assert before.changes == ()

    watched = Adviser(FLEET)
    watched.weekly_peak_requests = 20.0
    (after,) = watched.advise(facts, [cause("underused")])
    assert after.changes != ()
