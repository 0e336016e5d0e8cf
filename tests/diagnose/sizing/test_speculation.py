"""Speculative decoding against a simulation and the guide's claims."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.sizing.plan.split_choice import (
    best_draft_tokens,
    break_even_acceptance_ratio,
    speculative_speedup,
)
from kneewatch.diagnose.speculation import per_token_acceptance_ratio, tokens_per_pass

DRAFT_3B, DRAFT_8B = 3 / 70, 8 / 70  # of a 70B target, while bandwidth binds

ratios = st.floats(0, 1)
drafts = st.integers(1, 12)


@pytest.mark.parametrize(
    ("acceptance", "drafted", "expected"),
    [
        pytest.param(0.0, 5, 1.0, id="guide 6.6: nothing accepted is one token"),
        pytest.param(1.0, 5, 6.0, id="text 004: all of K accepted are K + 1, not K"),
        pytest.param(0.7, 4, 2.773, id="guide 6.6: 70 %, 4 drafted"),
        pytest.param(0.8, 4, 3.362, id="guide 6.6: three or four on average"),
        pytest.param(0.9, 4, 4.095, id="guide 6.6: 90 %, 4 drafted"),
        pytest.param(0.9, 8, 6.126, id="guide 6.6: 90 %, 8 drafted"),
        pytest.param(0.5, 0, 1.0, id="no draft"),
    ],
)
def test_tokens_per_pass(acceptance: float, drafted: int, expected: float) -> None:
    tokens = tokens_per_pass(acceptance_ratio=acceptance, draft_tokens=drafted)
    assert tokens == pytest.approx(expected, abs=1e-3)


def test_figure_6_6_accepts_three_and_yields_four() -> None:
    # t1 to t3 accepted, t4 corrected by the target: the figure says "3 tokens from one pass"
    accepted, corrected = 3, 1
    assert tokens_per_pass(acceptance_ratio=1.0, draft_tokens=accepted) == accepted + corrected


def test_the_expectation_is_what_rejection_gives() -> None:
    dice = random.Random(11)
    acceptance, drafted, runs = 0.7, 5, 20_000
    produced = 0
    for _ in range(runs):
        accepted = 0
        while accepted < drafted and dice.random() < acceptance:
            accepted += 1
        produced += accepted + 1
    expected = tokens_per_pass(acceptance_ratio=acceptance, draft_tokens=drafted)
    assert produced / runs == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("acceptance", "drafted", "draft_cost", "low", "high"),
    [
        pytest.param(0.7, 5, DRAFT_3B, 2.0, 4.0, id="guide 6.6: 70 % with 3B is 2-4x: 2.4"),
        pytest.param(0.9, 5, DRAFT_3B, 2.0, 4.0, id="guide 6.6: 90 % with 3B is 2-4x: 3.9"),
        pytest.param(0.7, 5, DRAFT_8B, 1.8, 1.95, id="8B for 70B misses 2x at 70 %: 1.9"),
        pytest.param(0.1, 5, DRAFT_3B, 0.0, 1.0, id="guide 6.6: a poor draft is slower"),
    ],
)
def test_speedup(
    acceptance: float, drafted: int, draft_cost: float, low: float, high: float
) -> None:
    speedup = speculative_speedup(
        acceptance_ratio=acceptance, draft_tokens=drafted, draft_cost_ratio=draft_cost
    )
    assert low < speedup < high


def test_the_worst_case_is_below_baseline() -> None:
    # guide 6.6, step 3 says "never worse than baseline"; the draft was still paid
    worst = speculative_speedup(acceptance_ratio=0, draft_tokens=5, draft_cost_ratio=DRAFT_3B)
    assert worst == pytest.approx(0.82, abs=0.01)
    assert speculative_speedup(acceptance_ratio=0, draft_tokens=5, draft_cost_ratio=0) == 1


@pytest.mark.parametrize(
    ("draft_cost", "expected"),
    [
        pytest.param(DRAFT_3B, 0.176, id="3B, bandwidth-bound: far below the 50 % of 9.3"),
        pytest.param(DRAFT_8B, 0.365, id="8B, bandwidth-bound"),
        pytest.param(1.5, None, id="a draft that costs more than it can ever save"),
    ],
)
def test_break_even_acceptance(draft_cost: float, expected: float | None) -> None:
    ratio = break_even_acceptance_ratio(draft_tokens=5, draft_cost_ratio=draft_cost)
    assert ratio == (None if expected is None else pytest.approx(expected, abs=1e-3))


def test_vllms_acceptance_is_lower_than_the_per_token_one() -> None:
    shown = (tokens_per_pass(acceptance_ratio=0.7, draft_tokens=5) - 1) / 5
    assert shown == pytest.approx(0.388, abs=1e-3)
    per_token_ratio = per_token_acceptance_ratio(accepted_share_ratio=shown, draft_tokens=5)
    assert per_token_ratio == pytest.approx(0.7)


def test_a_hopeless_draft_is_best_left_out() -> None:
    assert best_draft_tokens(acceptance_ratio=0.05, draft_cost_ratio=0.2) == 0
    assert best_draft_tokens(acceptance_ratio=0.7, draft_cost_ratio=DRAFT_8B) in range(2, 5)


@given(acceptance=ratios, drafted=drafts, cost=st.floats(0, 1))
def test_speedup_rises_with_acceptance_and_falls_with_cost(
    acceptance: float, drafted: int, cost: float
) -> None:
    def at(ratio: float, draft_cost: float) -> float:
        return speculative_speedup(
            acceptance_ratio=ratio, draft_tokens=drafted, draft_cost_ratio=draft_cost
        )

    assert at(min(1.0, acceptance + 0.1), cost) >= at(acceptance, cost)
    assert at(acceptance, cost + 0.1) <= at(acceptance, cost)
    assert 1 <= tokens_per_pass(acceptance_ratio=acceptance, draft_tokens=drafted) <= drafted + 1


@given(drafted=drafts, cost=st.floats(0, 2))
def test_the_break_even_breaks_even(drafted: int, cost: float) -> None:
    ratio = break_even_acceptance_ratio(draft_tokens=drafted, draft_cost_ratio=cost)
    if ratio is None:
        assert drafted + 1 < 1 + drafted * cost
    else:
        speedup = speculative_speedup(
            acceptance_ratio=ratio, draft_tokens=drafted, draft_cost_ratio=cost
        )
        assert speedup == pytest.approx(1.0, abs=1e-6)


@given(acceptance=ratios, drafted=drafts)
def test_the_measured_share_gives_the_acceptance_back(acceptance: float, drafted: int) -> None:
    share = (tokens_per_pass(acceptance_ratio=acceptance, draft_tokens=drafted) - 1) / drafted
    per_token_ratio = per_token_acceptance_ratio(
        accepted_share_ratio=min(1.0, share), draft_tokens=drafted
    )
    assert per_token_ratio == pytest.approx(acceptance, abs=1e-6)


@given(acceptance=ratios, cost=st.floats(0.001, 1))
def test_the_best_draft_is_no_worse_than_any(acceptance: float, cost: float) -> None:
    def at(count: int) -> float:
        return speculative_speedup(
            acceptance_ratio=acceptance, draft_tokens=count, draft_cost_ratio=cost
        )

    best = best_draft_tokens(acceptance_ratio=acceptance, draft_cost_ratio=cost)
    assert at(best) >= max(at(count) for count in range(17))
