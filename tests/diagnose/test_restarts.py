"""A process that is replaced, a clock that is set back: what was before does not count."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest

from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import Severity
from tests.diagnose.streams import INTERVAL_S, Target, alarming, bodies, cause_ids, recording
from tests.pages import multiprocess, restarted, without_process
from tests.recordings import diagnoses

WINDOWS = pytest.mark.parametrize("window_s", [15.0, 60.0, 300.0])
RESTART = "restart_mid_run"
PREEMPTING = slice(0, 60)
"""The cascade's recording from its start into its preempting phases."""


@cache
def replayed(window_s: float) -> list[Verdict]:
    """All that is said of the recording with a crash in it."""
    return diagnoses(recording(RESTART), window_s=window_s)


def up_again_s() -> float:
    """When the first page of the new process was scraped."""
    entries = list(CaptureReader(recording(RESTART)))
    down = max(at for at, entry in enumerate(entries) if entry.body is None)
    return entries[down + 1].t_s


@WINDOWS
def test_a_restart_is_noted_and_pages_nobody(window_s: float) -> None:
    noted = [d for d in replayed(window_s) if "engine_restarted" in cause_ids(d)]
    assert noted[0].t_s == up_again_s()
    for diagnosis in noted:
        (cause,) = (c for c in diagnosis.causes if c.id == "engine_restarted")
        assert cause.severity == Severity.INFO
        assert cause.since_s == up_again_s()
    assert noted[-1].t_s - noted[0].t_s <= window_s
    after = [d for d in replayed(window_s) if d.t_s >= up_again_s()]
    assert alarming(after) == []


@WINDOWS
def test_while_it_is_down_it_is_down(window_s: float) -> None:
    down = [d for d in replayed(window_s) if not d.was_read]
    assert len(down) == 18
    assert {tuple(cause_ids(d)) for d in down} == {("target_down",)}
    assert [d.health for d in down[:3]] == ["unknown", "warning", "critical"]
    assert {d.engine for d in down} == {"0"}
    assert all(d.values == {} for d in down)


@WINDOWS
def test_no_signal_spans_a_restart(window_s: float) -> None:
    after = [d for d in replayed(window_s) if d.t_s >= up_again_s()]
    first, second = after[:2]
    assert first.values["running"] is not None
    assert first.values["generation_tokens_per_s"] is None, "one scrape of the new process"
    assert first.values["ttft_p99_s"] is None
    assert first.values["kv_usage_slope_per_s"] is None
    assert second.values["generation_tokens_per_s"] is not None
    for diagnosis in after[1:]:
        assert diagnosis.window_s == pytest.approx(min(window_s, diagnosis.t_s - up_again_s()))


@WINDOWS
@pytest.mark.parametrize("capture", [RESTART, "kv_pressure_cascade"])
def test_no_rate_or_ratio_is_negative_or_no_number(capture: str, window_s: float) -> None:
    wrong = [
        (diagnosis.t_s, key, value)
        for diagnosis in diagnoses(recording(capture), window_s=window_s)
        for key, value in diagnosis.values.items()
        if value is not None
        and not (math.isfinite(value) and (value >= 0 or key.endswith(("slope_per_s", "_points"))))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(str, restarted, id="by its start time"),
        pytest.param(multiprocess, multiprocess, id="by counters alone"),
    ],
)
def test_what_was_wrong_with_the_old_process_is_not_said_of_the_new(
    old: Callable[[str], str], new: Callable[[str], str]
) -> None:
    pages = bodies("kv_pressure_cascade")
    target = Target(window_s=15.0)
    sick = target.one(*map(old, pages[PREEMPTING]))
    assert cause_ids(sick)[0] == "kv_pressure"
    assert sick.stage.level >= 2
    fresh = target.one(new(pages[0]))
    assert cause_ids(fresh) == ["engine_restarted"]
    assert alarming([fresh]) == []
    assert fresh.stage.number is None, "one scrape of the new process"
    second = target.one(new(pages[1]))
    assert second.stage
    assert (second.stage.number, second.stage.since_s) == (0, fresh.t_s)


def test_findings_of_the_old_process_end_with_it() -> None:
    pages = bodies("queue_overload")
    target = Target(window_s=15.0)
    sick = target.one(*pages[:33])
    over = {f.rule for f in sick.findings if f.severity >= Severity.WARNING}
    assert over & {"QUEUE-SHARE", "QUEUE-GROWS"}
    fresh = [target.one(restarted(body)) for body in pages[:3]]
    assert alarming(fresh) == []


def test_a_clock_set_back_neither_holds_nor_hides_anything() -> None:
    pages = bodies("kv_pressure_cascade")
    target = Target(window_s=15.0)
    sick = target.one(*pages[PREEMPTING])
    assert sick.health == "critical"
    target.now_s -= 3_600
    healthy = bodies("healthy_light")[10:]
    calm = [target.one(without_process(body)) for body in healthy]
    assert alarming(calm) == []
    assert {d.stage.number for d in calm if d.stage.number is not None} == {0}
    assert not [d for d in calm if "engine_restarted" in cause_ids(d)]


def test_after_a_clock_set_back_faults_are_told_as_soon_as_ever() -> None:
    pages = bodies("kv_pressure_cascade")
    straight, stepped = Target(window_s=15.0), Target(window_s=15.0)
    first_s: dict[str, float] = {}
    for name, target, back_s in (("straight", straight, 0.0), ("stepped", stepped, 7_200.0)):
        target.one(*pages[:20])
        target.now_s -= back_s
        for number, body in enumerate(pages[20:60]):
            if "kv_pressure" in cause_ids(target.one(body)):
                first_s[name] = number * INTERVAL_S
                break
    assert first_s["stepped"] == first_s["straight"]


def test_what_the_old_process_showed_last_is_told() -> None:
    target = Target()
    old = bodies("kv_pressure_cascade")[44:50]
    diagnosis = target.one(*old, restarted(old[-1], start_s=1_799_000_000.0))
    (cause,) = (c for c in diagnosis.causes if c.id == "engine_restarted")
    assert "ended under load" in cause.evidence[1].text
    assert "running" in cause.evidence[1].text
    assert "KV" in cause.evidence[1].text
