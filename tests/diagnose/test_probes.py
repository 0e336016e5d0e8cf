"""Incidents of the public threads' kinds with other numbers: cause, advice, message, shares."""

from __future__ import annotations

import pytest

from kneewatch.diagnose.verdict import Cause, Verdict
from kneewatch.rules.rule import Severity
from tests.incidents.messages import first_message
from tests.incidents.probes import PROBES, Probe, heard
from tests.incidents.shares import above_whole


@pytest.mark.parametrize(
    ("probe", "window_s"),
    [
        pytest.param(probe, window_s, id=f"{probe.name}, {window_s:g} s")
        for probe in PROBES
        for window_s in probe.windows_s
    ],
)
def test_a_probe_is_told_right(probe: Probe, window_s: float) -> None:
    said = heard(probe, window_s)
    assert said.wrong == ""
    assert [text for each in said.diagnoses for text in above_whole(each)] == []


def verdict(t_s: float, *causes: Cause) -> Verdict:
    return Verdict(t_s=t_s, target="m", health="ok", causes=causes)


def test_a_message_is_the_first_critical_cause_that_is_no_restart() -> None:
    down, slow, queue = (
        Cause(id=name, severity=severity)
        for name, severity in (
            ("target_down", Severity.CRITICAL),
            ("slow_steps", Severity.WARNING),
            ("queue_saturation", Severity.CRITICAL),
        )
    )
    quiet = [verdict(10.0), verdict(15.0, down), verdict(20.0, slow)]
    assert first_message(quiet) is None
    assert str(first_message([*quiet, verdict(25.0, slow, queue)])) == "15 s queue_saturation"


def test_a_share_above_the_whole_is_found_and_a_demand_is_not() -> None:
    said = verdict(
        0.0,
        Cause(
            id="kv_pressure",
            severity=Severity.WARNING,
            summary="A running request holds 205% of the KV cache.",
            lever="demand is 140% of it at its likely peaks; 100% of the cache",
        ),
    )
    assert above_whole(said) == ["A running request holds 205% of the KV cache."]
