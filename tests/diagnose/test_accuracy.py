"""Expected against given over the labelled recordings: right causes, no false pages, in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from kneewatch.diagnose.verdict import Verdict
from tests.accuracy import PhaseVerdict, first_cause, judge, stage_of
from tests.incidents.shares import above_whole
from tests.lab.scenarios import SCENARIOS
from tests.recordings import CAPTURES, FIRST_CAUSES, LAB, NOT_JUDGED, phases

RIGHT_SHARE = 0.9
DELAY_MAX_S = 30.0
CALM_AFTER_S = 60.0
SURE_FROM = 0.9
PREEMPTING = ("kv_pressure_cascade",)

Told = Mapping[Path, Sequence[Verdict]]
Judged = tuple[Sequence[PhaseVerdict], Told]


@pytest.fixture(scope="module")
def judged() -> Judged:
    """Verdicts on all phases, and all that was said: each recording is parsed once."""
    return judge(CAPTURES)


def faulty(judged: Judged) -> list[PhaseVerdict]:
    """Verdicts on the phases with a fault."""
    return [verdict for verdict in judged[0] if verdict.phase.first_causes]


def named(verdict: PhaseVerdict) -> str:
    """A verdict in words, for a test that fails."""
    return (
        f"{verdict.phase.capture.name} {verdict.phase.name}: {verdict.share:.2f} {verdict.stages}"
    )


def test_the_recordings_have_what_they_are_judged_by() -> None:
    every = list(phases())
    states = {phase.state for phase in every}
    real_states = {phase.state for scenario in SCENARIOS for phase in scenario.phases}
    assert set(FIRST_CAUSES) <= states | real_states
    assert not states & NOT_JUDGED
    assert {phase.capture for phase in every} <= set(CAPTURES.glob("*.jsonl.gz"))
    assert len([phase for phase in every if phase.first_causes]) >= 14
    assert len([phase for phase in every if not phase.first_causes]) >= 30


def test_nine_of_ten_faulty_phases_are_told_right(judged: Judged) -> None:
    wrong = [named(verdict) for verdict in faulty(judged) if not verdict.right]
    assert len(wrong) <= (1 - RIGHT_SHARE) * len(faulty(judged)), wrong


def test_every_kind_of_fault_is_told_right_somewhere(judged: Judged) -> None:
    right = {verdict.phase.state for verdict in faulty(judged) if verdict.right}
    recorded = {phase.state for phase in phases() if phase.first_causes}
    assert right == recorded


def test_no_quiet_phase_has_a_page(judged: Judged) -> None:
    quiet = [verdict for verdict in judged[0] if not verdict.phase.first_causes]
    assert sum(bool(verdict.judged) for verdict in quiet) >= 15
    assert [named(verdict) for verdict in quiet if not verdict.right] == []


def test_the_right_cause_comes_soon(judged: Judged) -> None:
    late = [
        named(verdict)
        for verdict in faulty(judged)
        if verdict.delay_s is None or verdict.delay_s > DELAY_MAX_S
    ]
    assert late == []


@pytest.mark.parametrize("capture", PREEMPTING)
def test_stage_two_comes_with_the_first_counted_preemption(judged: Judged, capture: str) -> None:
    diagnoses = [
        d for d in judged[1][CAPTURES / f"{capture}.jsonl.gz"] if d.stage.number is not None
    ]
    counted = next(
        n for n, d in enumerate(diagnoses) if (d.values.get("preemption_per_s") or 0) > 0
    )
    staged = next(n for n, d in enumerate(diagnoses) if stage_of(d) >= 2)
    assert 0 <= staged - counted <= 2


@pytest.mark.parametrize("capture", PREEMPTING)
def test_stage_zero_comes_soon_after_the_load(judged: Judged, capture: str) -> None:
    diagnoses = judged[1][CAPTURES / f"{capture}.jsonl.gz"]
    last = max(n for n, d in enumerate(diagnoses) if stage_of(d) >= 2)
    loaded = max(
        n for n, d in enumerate(diagnoses[: last + 1]) if (d.values.get("waiting") or 0) > 0
    )
    calm = next(d for d in diagnoses[last:] if stage_of(d) == 0)
    assert calm.t_s - diagnoses[loaded].t_s <= CALM_AFTER_S
    assert {stage_of(d) for d in diagnoses if d.t_s > calm.t_s} <= {0, 1}


def test_no_stage_above_filling_where_nothing_is_preempted(judged: Judged) -> None:
    staged = {
        path.name
        for path, diagnoses in judged[1].items()
        for diagnosis in diagnoses
        if stage_of(diagnosis) >= 2
    }
    assert staged == {f"{capture}.jsonl.gz" for capture in PREEMPTING}


def test_what_is_told_with_confidence_is_right(judged: Judged) -> None:
    sure = [
        first_cause(diagnosis) in verdict.phase.first_causes
        for verdict in judged[0]
        for diagnosis in verdict.judged
        if diagnosis.causes
        and diagnosis.causes[0].id != "engine_restarted"
        and diagnosis.causes[0].confidence >= SURE_FROM
    ]
    assert len(sure) > 100, "a claim that is hardly ever made proves nothing"
    assert sum(sure) >= RIGHT_SHARE * len(sure)


def test_no_sentence_has_a_share_above_100_percent(judged: Judged) -> None:
    assert {text for said in judged[1].values() for each in said for text in above_whole(each)} == (
        set()
    )


def test_causes_do_not_flap_while_a_fault_lasts(judged: Judged) -> None:
    for verdict in faulty(judged):
        begun = [
            not verdict.phase.first_causes.isdisjoint(cause.id for cause in diagnosis.causes)
            for diagnosis in verdict.judged
        ]
        steps = list(pairwise(begun[begun.index(True) :]))
        ends = sum(was and not now for was, now in steps)
        assert ends <= 1, named(verdict)


def test_incidents_made_on_a_real_vllm_are_reported_right() -> None:
    verdicts, told = judge(LAB)
    name = {verdict.phase: verdict.phase.capture.name.partition(".")[0] for verdict in verdicts}
    assert [(name[v.phase], v.phase.name) for v in verdicts if not v.right] == []
    assert len(verdicts) == 53
    assert {text for said in told.values() for each in said for text in above_whole(each)} == set()
