"""What must not page anybody, and what must: cases that an attack on the program brought up."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.causes import availability as observer
from kneewatch.diagnose.causes.evidence import ReplacedProcess
from kneewatch.diagnose.ranking import BY_ID
from kneewatch.rules.facts import Targets
from kneewatch.rules.lifecycle import Cascade
from kneewatch.rules.rule import Bound, Severity
from tests.diagnose.situations import CALM, NOW_S
from tests.rules.cascade_run import KV_EVICT

STILL = CALM.but(running=8.0, waiting=2.0)

RESTARTS = [
    pytest.param((10.0,), Severity.INFO, id="one restart is noted"),
    pytest.param((300.0, 10.0), Severity.WARNING, id="two in ten minutes"),
    pytest.param((500.0, 300.0, 200.0), Severity.CRITICAL, id="a crash loop"),
    pytest.param((900.0, 10.0), Severity.INFO, id="the first one is long ago"),
]


@pytest.mark.parametrize(("ago_s", "severity"), RESTARTS)
def test_a_crash_loop_is_more_than_a_restart(ago_s: tuple[float, ...], severity: Severity) -> None:
    facts = replace(CALM, restarts=tuple(ReplacedProcess(NOW_S - ago) for ago in ago_s)).facts()
    cause = observer.engine_restarted(facts)
    assert cause is not None
    assert cause.severity == severity


@pytest.mark.parametrize(
    ("count", "broke_off", "severity"),
    [
        pytest.param(3, True, Severity.WARNING, id="three crashes in an hour"),
        pytest.param(5, True, Severity.CRITICAL, id="five crashes in an hour"),
        pytest.param(5, False, None, id="five deployments in an hour"),
        pytest.param(2, True, None, id="two crashes in an hour"),
    ],
)
def test_a_slow_crash_loop_is_told_from_deployments(
    count: int, broke_off: bool, severity: Severity | None
) -> None:
    ends = [
        ReplacedProcess(NOW_S - 100 - 640 * at, 600.0, "8 running, KV 99%", broke_off)
        for at in reversed(range(count))
    ]
    cause = observer.engine_restarted(replace(CALM, restarts=tuple(ends)).facts())
    assert (cause.severity if cause else None) == severity
    if cause is not None:
        assert f"{count} times in 60 min" in cause.summary
        assert (
            "ended under load after 10 min; its last page: 8 running, KV 99%"
            in cause.evidence[1].text
        )


def test_a_single_restart_is_forgotten_after_a_minute() -> None:
    assert (
        observer.engine_restarted(replace(CALM, restarts=(ReplacedProcess(NOW_S - 61),)).facts())
        is None
    )


@pytest.mark.parametrize(
    ("scale", "stalled_s", "severity"),
    [
        pytest.param(1.0, 30.0, Severity.CRITICAL, id="half a minute"),
        pytest.param(0.25, 29.0, Severity.INFO, id="a short window does not shorten the bound"),
        pytest.param(0.25, 30.0, Severity.CRITICAL, id="short window, half a minute"),
    ],
)
def test_a_stall_is_half_a_minute_whoever_watches(
    scale: float, stalled_s: float, severity: Severity
) -> None:
    still = replace(STILL, scale=scale).lasting(stalled=stalled_s)
    cause = BY_ID["engine_stalled"].examine(still.facts())
    assert cause is not None
    assert cause.severity == severity


@pytest.mark.parametrize(
    ("counted", "severity"), [(1.0, Severity.INFO), (2.9, Severity.INFO), (3.0, Severity.CRITICAL)]
)
def test_a_lone_preemption_is_noted_whatever_its_rate(counted: float, severity: Severity) -> None:
    cascade = Cascade(scale=1.0, targets=Targets(), evicting=KV_EVICT)
    values = {
        "kv_usage_ratio": 0.9,
        "running": 2.0,
        "preemption_ratio_per_s": 0.5,
        "preempted_in_window": counted,
    }
    stage = cascade.judge(NOW_S, values, preempted=1.0)
    assert (stage.number, stage.severity) == (2, severity)


def test_thresholds_of_evictions_are_the_settings() -> None:
    values = {"kv_usage_ratio": 0.9, "running": 2.0, "preemption_ratio_per_s": 0.5}
    for warning, critical, expected in (
        (0.1, 9.0, Severity.WARNING),
        (0.1, 0.2, Severity.CRITICAL),
        (5.0, 9.0, Severity.INFO),
    ):
        bounds = (
            Bound(Severity.WARNING, warning, "a setting"),
            Bound(Severity.CRITICAL, critical, "a setting"),
        )
        stated = replace(KV_EVICT, bounds=bounds)
        cascade = Cascade(scale=1.0, targets=Targets(), evicting=stated)
        assert cascade.judge(NOW_S, values, preempted=1.0).severity == expected
