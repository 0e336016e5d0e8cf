"""Which rules a fleet is judged by: on one moment, by recorded alerts, or not, with the reason."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.diagnosis import diagnose
from kneewatch.diagnose.fleet.engine_state import MOMENT_S, coverage
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Severity
from tests.diagnose.fleet.example_fleets import pod, verdict

PROFILES = {
    "plain": Profile(),
    "with targets": Profile(targets=Targets(ttft_p99_s=1.0, itl_p99_s=0.1)),
}
RECORDED = ("ttft_p99_p50_drift_ratio", "running_avg", "kv_transfer_drift_ratio")


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
@pytest.mark.parametrize("recorded", [(), RECORDED], ids=["no rules loaded", "rules loaded"])
def test_judged_and_left_out_are_all_rules(profile: Profile, recorded: tuple[str, ...]) -> None:
    covered = coverage(profile, recorded)
    judged = [rule.id for rule in (*covered.moment, *covered.recorded)]
    assert sorted([*judged, *covered.left_out]) == sorted(rule.id for rule in profile.rules())
    assert all(covered.left_out.values()), "each with its reason"
    assert len(covered.moment) >= 12


def test_the_signals_that_are_asked_for_are_those_of_the_rules() -> None:
    covered = coverage(PROFILES["with targets"])
    derived = {"cascade_stage", "preempted_in_window", "errors_in_window"}
    for rule in covered.moment:
        assert rule.for_s <= MOMENT_S
        if rule.signal in {"kv_residency_s", "rejected_per_s", "itl_stall_time_ratio"}:
            assert rule.signal in covered.signals, rule.id
        for guard in rule.guards:
            assert guard.signal in {*covered.signals, *derived}, rule.id


def test_a_rule_that_needs_a_past_is_judged_by_its_alert() -> None:
    assert "TTFT-TAIL" in coverage(Profile()).left_out
    assert "TTFT-TAIL" in {rule.id for rule in coverage(Profile(), RECORDED).recorded}


def test_an_alert_that_fires_is_a_finding() -> None:
    diagnosis = verdict((pod("a"), {"ttft_p99_p50_drift_ratio": 3.0}), (pod("b"), {}))
    first = next(engine for engine in diagnosis.engines if engine.member.labels["pod"] == "a")
    observed = replace(
        diagnosis.observed,
        recorded=RECORDED,
        alerts={first.member.key: {"TTFT-TAIL": Severity.INFO}},
    )
    engines = {e.member.labels["pod"]: e for e in diagnose(observed, Profile()).engines}
    assert [finding.rule.id for finding in engines["a"].findings] == ["TTFT-TAIL"]
    assert engines["b"].findings == ()


def test_severity_of_the_stage_follows_the_users_thresholds() -> None:
    evicting = {"kv_usage_ratio": 0.99, "kv_usage_avg_ratio": 0.99, "preemption_per_s": 2.0,
                "preemption_ratio_per_s": 0.25, "waiting_by_capacity": 0.0}  # fmt: skip
    stated = Profile(thresholds={"KV-EVICT": {"critical": 0.6, "warning": 0.5}})
    by_default, by_statement = (
        verdict((pod("a"), evicting), profile=profile).engines[0] for profile in (Profile(), stated)
    )
    assert by_default.stage == by_statement.stage == 2
    assert by_default.severity == Severity.CRITICAL
    assert by_statement.severity == Severity.INFO, "as the sidecar says"
