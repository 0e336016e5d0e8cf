"""Tiers: routed and cascaded traffic and cost, on the guide's figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.replicas.tiers import (
    ROUTER_HIGH_S,
    ModelTier,
    TierLoad,
    cascaded_loads,
    routed_loads,
    routing_advice,
)

SMALL, LARGE = (
    ModelTier("7B", 0.7, 0.1),
    ModelTier("70B", 0.3, 1.0),
)  # guide 1.5: about 10x lower cost


def shown(loads: tuple[TierLoad, ...]) -> list[tuple[str, float]]:
    return [(load.name, round(load.peak_requests_per_s, 6)) for load in loads]


def test_routed_tiers_share_the_peak() -> None:
    loads = routed_loads(tiers=[SMALL, LARGE], peak_requests_per_s=120)
    assert shown(loads) == [("7B", 84), ("70B", 36)]


def test_a_cascade_sends_all_through_the_small_tier() -> None:
    two = cascaded_loads(names=["7B", "70B"], escalation_ratios=[0.3], peak_requests_per_s=120)
    assert shown(two) == [("7B", 120), ("70B", 36)]
    three = cascaded_loads(
        names=["a", "b", "c"], escalation_ratios=[0.4, 0.5], peak_requests_per_s=100
    )
    assert shown(three) == [("a", 100), ("b", 40), ("c", 20)]


@pytest.mark.parametrize(
    ("gpus", "simple", "acceptable", "ttft_s", "worth_it", "reason"),
    [
        pytest.param(16, 0.7, True, 1.0, True, "70% of requests", id="guide 1.5: worth it"),
        pytest.param(8, 0.7, True, 1.0, False, "not above 8", id="guide 1.5: a small fleet"),
        pytest.param(16, 0.0, True, 1.0, False, "simple enough", id="guide 1.5: homogeneous"),
        pytest.param(16, 0.7, False, 1.0, False, "acceptable", id="guide 1.5: quality unknown"),
        pytest.param(16, 0.7, True, 0.15, False, "13% of the TTFT", id="guide 1.5: tight TTFT"),
        pytest.param(16, 0.7, True, 0.2, True, "70%", id="guide 1.5: 20 of 200 ms is just 10 %"),
    ],
)
def test_when_to_route(
    gpus: int, simple: float, acceptable: bool, ttft_s: float, worth_it: bool, reason: str
) -> None:
    advice = routing_advice(
        large_model_gpus=gpus,
        simple_share_ratio=simple,
        small_model_acceptable=acceptable,
        ttft_budget_s=ttft_s,
        router_s=ROUTER_HIGH_S,
    )
    assert advice.worth_it is worth_it
    assert any(reason in said for said in advice.reasons)


def test_shares_must_add_up() -> None:
    with pytest.raises(SizingError, match=r"add up to 0\.7, not 1"):
        routed_loads(tiers=[SMALL], peak_requests_per_s=1)


def test_a_ratio_for_each_tier_but_the_last() -> None:
    with pytest.raises(SizingError, match="0 escalation ratios for 2 tiers"):
        cascaded_loads(names=["a", "b"], escalation_ratios=[], peak_requests_per_s=1)
    with pytest.raises(SizingError, match=r"escalation_ratios is 1\.5"):
        cascaded_loads(names=["a", "b"], escalation_ratios=[1.5], peak_requests_per_s=1)


@given(shares=st.lists(st.integers(1, 100), min_size=1, max_size=5), peak=st.floats(0.1, 1e4))
def test_routing_loses_no_request(shares: list[int], peak: float) -> None:
    tiers = [ModelTier(f"t{i}", share / sum(shares), 1.0) for i, share in enumerate(shares)]
    loads = routed_loads(tiers=tiers, peak_requests_per_s=peak)
    assert sum(load.peak_requests_per_s for load in loads) == pytest.approx(peak)
