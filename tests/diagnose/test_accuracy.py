"""Expected against given over the labelled recordings: right causes, no false pages, in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from kneewatch.diagnose.engine.diagnosis import Diagnosis
from tests.accuracy import Verdict, first_cause, judge, stage_of
from tests.lab.scenarios import SCENARIOS
from tests.recordings import CAPTURES, FIRST_CAUSES, LAB, NOT_JUDGED, phases

RIGHT_SHARE = 0.9
DELAY_MAX_S = 30.0
CALM_AFTER_S = 60.0
SURE_FROM = 0.9
PREEMPTING = ("kv_pressure_cascade",)

Told = Mapping[Path, Sequence[Diagnosis]]
Judged = tuple[Sequence[Verdict], Told]


@pytest.fixture(scope="module")
def judged() -> Judged:
    """Verdicts on all phases, and all that was said: each recording is parsed once."""
    return judge(CAPTURES)


def faulty(judged: Judged) -> list[Verdict]:
    """Verdicts on the phases with a fault."""
    return [found for found in judged[0] if found.phase.first_causes]


def named(found: Verdict) -> str:
    """A verdict in words, for a test that fails."""
    return f"{found.phase.capture.name} {found.phase.name}: {found.share:.2f} {found.stages}"


def test_the_recordings_have_what_they_are_judged_by() -> None:
    every = list(phases())
    states = {phase.state for phase in every}
    made = {phase.state for scenario in SCENARIOS for phase in scenario.phases}
    assert set(FIRST_CAUSES) <= states | made
    assert not states & NOT_JUDGED
    assert {phase.capture for phase in every} <= set(CAPTURES.glob("*.jsonl.gz"))
    assert len([phase for phase in every if phase.first_causes]) >= 14
    assert len([phase for phase in every if not phase.first_causes]) >= 30


def test_nine_of_ten_faulty_phases_are_told_right(judged: Judged) -> None:
    wrong = [named(found) for found in faulty(judged) if not found.right]
    assert len(wrong) <= (1 - RIGHT_SHARE) * len(faulty(judged)), wrong


def test_every_kind_of_fault_is_told_right_somewhere(judged: Judged) -> None:
    right = {found.phase.state for found in faulty(judged) if found.right}
    recorded = {phase.state for phase in phases() if phase.first_causes}
    assert right == recorded


def test_no_quiet_phase_has_a_page(judged: Judged) -> None:
    quiet = [found for found in judged[0] if not found.phase.first_causes]
    assert sum(bool(found.judged) for found in quiet) >= 15
    assert [named(found) for found in quiet if not found.right] == []


def test_the_right_cause_comes_soon(judged: Judged) -> None:
    late = [
        named(found)
        for found in faulty(judged)
        if found.delay_s is None or found.delay_s > DELAY_MAX_S
    ]
    assert late == []


@pytest.mark.parametrize("capture", PREEMPTING)
def test_stage_two_comes_with_the_first_counted_preemption(judged: Judged, capture: str) -> None:
    told = [d for d in judged[1][CAPTURES / f"{capture}.jsonl.gz"] if d.stage is not None]
    counted = next(n for n, d in enumerate(told) if (d.values.get("preemption_per_s") or 0) > 0)
    staged = next(n for n, d in enumerate(told) if stage_of(d) >= 2)
    assert 0 <= staged - counted <= 2


@pytest.mark.parametrize("capture", PREEMPTING)
def test_stage_zero_comes_soon_after_the_load(judged: Judged, capture: str) -> None:
    told = judged[1][CAPTURES / f"{capture}.jsonl.gz"]
    last = max(n for n, d in enumerate(told) if stage_of(d) >= 2)
    loaded = max(n for n, d in enumerate(told[: last + 1]) if (d.values.get("waiting") or 0) > 0)
    calm = next(d for d in told[last:] if stage_of(d) == 0)
    assert calm.t_s - told[loaded].t_s <= CALM_AFTER_S
    assert {stage_of(d) for d in told if d.t_s > calm.t_s} <= {0, 1}


def test_no_stage_above_filling_where_nothing_is_preempted(judged: Judged) -> None:
    staged = {
        path.name
        for path, told in judged[1].items()
        for diagnosis in told
        if stage_of(diagnosis) >= 2
    }
    assert staged == {f"{capture}.jsonl.gz" for capture in PREEMPTING}


def test_what_is_told_with_confidence_is_right(judged: Judged) -> None:
    sure = [
        first_cause(diagnosis) in found.phase.first_causes
        for found in judged[0]
        for diagnosis in found.judged
        if diagnosis.causes
        and diagnosis.causes[0].id != "engine_restarted"
        and diagnosis.causes[0].confidence >= SURE_FROM
    ]
    assert len(sure) > 100, "a claim that is hardly ever made proves nothing"
    assert sum(sure) >= RIGHT_SHARE * len(sure)


def test_causes_do_not_flap_while_a_fault_lasts(judged: Judged) -> None:
    for found in faulty(judged):
        begun = [
            not found.phase.first_causes.isdisjoint(cause.id for cause in diagnosis.causes)
            for diagnosis in found.judged
        ]
        steps = list(pairwise(begun[begun.index(True) :]))
        ends = sum(was and not now for was, now in steps)
        assert ends <= 1, named(found)


def test_incidents_made_on_a_real_vllm_are_reported_right() -> None:
    verdicts, _ = judge(LAB)
    name = {found.phase: found.phase.capture.name.partition(".")[0] for found in verdicts}
    assert [(name[v.phase], v.phase.name) for v in verdicts if not v.right] == []
    assert len(verdicts) == 30
