"""Speed at equal work on recordings of a real vLLM: slowed engines and loaded ones."""

from __future__ import annotations

from statistics import median

import pytest

from tests.engine_speeds import rows
from tests.recordings import CAPTURES, LAB, Phase, diagnoses, every_phase, phases

WINDOWS_S = (15.0, 30.0, 60.0, 120.0)
SLOW = [phase for phase in phases(LAB) if phase.state in {"slow_steps", "slower_launch"}]
NEAR = 0.2
"""A batch that grew leaves a range of speeds; clients also wait for the API server."""


def test_healthy_and_loaded_engines_have_their_usual_speed() -> None:
    judged = [row for row in rows(CAPTURES, LAB) if row.is_judged]
    assert len(judged) >= 20
    wrong = [(row.phase.capture.name, row.phase.name) for row in judged if not row.is_right]
    assert wrong == []


@pytest.mark.parametrize("window_s", WINDOWS_S)
@pytest.mark.parametrize("phase", SLOW, ids=[phase.capture.name.split(".")[0] for phase in SLOW])
def test_a_slowed_engine_is_told_with_its_speed(phase: Phase, window_s: float) -> None:
    said = diagnoses(phase.capture, window_s=window_s)
    judged = [each for each in said if phase.judged_from_s <= each.t_s <= phase.to_s]
    first = [each.causes[0].id if each.causes else "" for each in judged]
    assert first.count("slow_steps") >= 0.8 * len(judged)
    healthy_s = next(each.itl_mean_s for each in every_phase(LAB) if each.capture == phase.capture)
    speeds = [each.values.get("engine_speed_ratio") for each in judged]
    # Of another launch other things changed as well: its prefills.
    if phase.state == "slow_steps" and healthy_s is not None and phase.itl_mean_s is not None:
        told = median([speed for speed in speeds if speed is not None])
        assert told == pytest.approx(healthy_s / phase.itl_mean_s, abs=NEAR)


def test_an_engine_that_is_slow_from_its_start_on_is_not_called_usual_without_a_word() -> None:
    said = diagnoses(LAB / "slow_from_start.jsonl.gz")
    known = [each for each in said if each.values.get("engine_speed_ratio") is not None]
    assert known
    assert all(any("slow from its start on" in line for line in each.unknown) for each in known)
    assert not any(cause.id == "slow_steps" for each in said for cause in each.causes)
