"""When routing to a small model pays, by the guide's table."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.sizing.plan.workload_profile import (
    Routing,
    Slo,
    example_profile,
    read_profile,
)
from kneewatch.diagnose.sizing.plan.workload_steps import against_tiers, routing_step


@pytest.mark.parametrize(
    ("gpus", "simple", "acceptable", "ttft_s", "worth_it", "reason"),
    [
        pytest.param(16, 0.7, True, 1.0, True, "70% of requests", id="guide 1.5: worth it"),
        pytest.param(8, 0.7, True, 1.0, False, "pays above 8", id="guide 1.5: a small fleet"),
        pytest.param(16, 0.0, True, 1.0, False, "simple enough", id="guide 1.5: homogeneous"),
        pytest.param(16, 0.7, False, 1.0, False, "acceptable", id="guide 1.5: quality unknown"),
        pytest.param(16, 0.7, True, 0.15, False, "13% of the TTFT", id="guide 1.5: tight TTFT"),
        pytest.param(16, 0.7, True, 0.2, True, "70%", id="guide 1.5: 20 of 200 ms is just 10 %"),
    ],
)
def test_when_to_route(
    gpus: int, simple: float, acceptable: bool, ttft_s: float, worth_it: bool, reason: str
) -> None:
    profile = replace(
        read_profile(example_profile()),
        tiers=(),
        routing=Routing(simple_ratio=simple, small_model_acceptable=acceptable),
        slo=Slo(ttft_p99_s=ttft_s),
    )
    against = against_tiers(profile, gpus)
    assert (not against) is worth_it
    step = routing_step(profile, large_gpus=gpus, against=against)
    assert any(reason in note for note in step.notes)
