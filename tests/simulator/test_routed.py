"""`routing_dilution` on simulated pools: quiet where routing is good, in time where it breaks."""

from __future__ import annotations

import pytest

from kneewatch.rules.rule import Severity
from tests.routing_accuracy import IN_TIME_S, confusion, judged
from tests.simulator.routed import AGENTS, CHAT, LARGE, NOTHING, RAG, SMALL, SYSTEMS, RoutedCase

SEED = 3


@pytest.mark.parametrize(
    "case",
    [
        RoutedCase(CHAT, 2, "sticky", SMALL),
        RoutedCase(CHAT, 4, "sticky", LARGE, "restarts"),
        RoutedCase(CHAT, 2, "sticky", LARGE, "scale-out"),
        RoutedCase(CHAT, 2, "sticky", SMALL, "load x2"),
        RoutedCase(CHAT, 4, "sticky", LARGE, young=True),
        RoutedCase(RAG, 2, "prefix", LARGE),
        RoutedCase(AGENTS, 2, "sticky", LARGE, young=True),
        RoutedCase(SYSTEMS, 2, "sticky", LARGE, "to round robin"),
        RoutedCase(SYSTEMS, 2, "sticky", LARGE, "nonce"),
        RoutedCase(NOTHING, 2, "sticky", SMALL, young=True),
    ],
    ids=lambda case: f"{case.workload.name}, {case.change or 'no change'}",
)
def test_no_warning_without_harm_by_routing(case: RoutedCase) -> None:
    verdict = judged(case, SEED)
    assert not verdict.harmed
    assert verdict.worst < Severity.WARNING


@pytest.mark.parametrize(
    "case",
    [
        RoutedCase(CHAT, 4, "sticky", SMALL, "to round robin"),
        RoutedCase(CHAT, 2, "sticky", LARGE, "to least loaded"),
        RoutedCase(RAG, 4, "prefix", LARGE, "to round robin"),
        RoutedCase(AGENTS, 2, "sticky", LARGE, "to round robin"),
    ],
    ids=lambda case: f"{case.workload.name}, {case.change}",
)
def test_broken_routing_is_reported_in_time(case: RoutedCase) -> None:
    verdict = judged(case, SEED)
    assert verdict.harmed
    after_s = verdict.warned_after_s("routing_dilution")
    assert after_s is not None
    assert after_s <= IN_TIME_S
    assert confusion([verdict]).endswith("1 of 1 harmed pools reported within 180 s")
