"""What would undo a cause: set a signal there, and it falls; a hair before, it stands."""

from __future__ import annotations

from copy import deepcopy

import pytest
from msgspec.structs import replace

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine import judge
from kneewatch.diagnose.engine.counterfactual import counterfactuals
from kneewatch.diagnose.ranking import BY_ID, conclude
from kneewatch.diagnose.verdict import Cause
from kneewatch.reports.diagnosis_text import unless_words
from kneewatch.rules.rule import MORE_IS_BETTER
from kneewatch.rules.wire import rounded
from tests.diagnose.situations import CONCLUSIVE
from tests.recordings import CAPTURES, WINDOW_S


def concluded(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Facts, Cause]]:
    """Each cause that a recording shows, with the facts of its scrape."""
    conclusions: list[tuple[Facts, Cause]] = []

    def noting(facts: Facts) -> list[Cause]:
        causes = conclude(facts)
        conclusions.extend((facts, cause) for cause in causes)
        return causes

    monkeypatch.setattr(judge, "conclude", noting)
    stream = TargetStream(name, Profile(window_s=WINDOW_S), Limits())
    for entry in CaptureReader(CAPTURES / f"{name}.jsonl.gz"):
        stream.replay(entry)
    return conclusions


@pytest.mark.parametrize(
    ("recording", "cause_id", "signal"),
    [
        ("spec_bad", "spec_decode_poor", "spec_acceptance_ratio"),
        ("prefix_off", "prefix_cache_off", "computed_prompt_tokens_per_s"),
        ("queue_overload", "admission_limit", "expected_wait_s"),
        ("itl_spikes_no_chunked", "prefill_interference", "itl_stall_time_ratio"),
    ],
)
def test_a_turning_point_turns(
    recording: str, cause_id: str, signal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row for row in concluded(recording, monkeypatch) if row[1].id == cause_id]
    assert rows
    for facts, cause in rows:
        record = BY_ID[cause_id]
        points = {turn.signal: turn for turn in counterfactuals(record.stands, facts, cause)}
        point = points[signal]
        for share, stands in ((0.0, True), (0.99, True), (1.0, False), (1.01, False)):
            value = point.now + share * (point.at - point.now)
            recent = {**facts.recent, **({signal: value} if signal in facts.recent else {})}
            moved = replace(facts, values={**facts.values, signal: value}, recent=recent)
            assert (record.examine(moved) is not None) == stands, (share, point)
            assert record.stands(moved) == stands


@pytest.mark.parametrize("cause_id", ["prefix_churn", "spec_decode_poor"])
def test_where_low_values_are_the_trouble_higher_ones_undo_it(cause_id: str) -> None:
    facts = CONCLUSIVE[cause_id].facts()
    cause = BY_ID[cause_id].examine(facts)
    assert cause is not None
    points = counterfactuals(BY_ID[cause_id].stands, facts, cause)
    better = [point for point in points if point.signal in MORE_IS_BETTER]
    assert better
    assert all(point.above for point in better)
    words = unless_words(replace(cause, unless=tuple(better)))
    assert words.startswith("clears if ")
    assert "rises above" in words


def test_the_first_cause_of_a_diagnosis_carries_its_turning_points() -> None:
    stream = TargetStream("spec", Profile(window_s=WINDOW_S), Limits())
    entries = CaptureReader(CAPTURES / "spec_bad.jsonl.gz")
    diagnoses = [
        diagnosis for entry in entries for diagnosis in stream.replay(entry) if diagnosis.causes
    ]
    assert diagnoses
    assert all(
        diagnosis.causes[0].unless[0].signal == "spec_acceptance_ratio" for diagnosis in diagnoses
    )
    assert all(not cause.unless for diagnosis in diagnoses for cause in diagnosis.causes[1:])


def stands_at(facts: Facts, cause_id: str, signal: str, value: float) -> bool:
    """Whether a cause is concluded of the same facts with another value of a signal."""
    recent = {**facts.recent, **({signal: value} if signal in facts.recent else {})}
    moved = replace(facts, values={**facts.values, signal: value}, recent=recent)
    return BY_ID[cause_id].examine(moved) is not None


@pytest.mark.parametrize(
    ("recording", "lingering", "turning"),
    [
        ("queue_overload", "admission_limit", True),
        ("knee_sweep", "queue_saturation", True),
        ("prefix_lost", "prefix_reuse_lost", True),
        ("prefix_churn", "prefix_churn", True),
        ("lora_thrash", "adapter_thrash", False),
    ],
)
def test_a_verdict_is_of_one_snapshot(
    recording: str, lingering: str, turning: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[float, tuple[Facts, dict[str, Cause]]] = {}

    def noting(facts: Facts) -> list[Cause]:
        causes = conclude(facts)
        # The baseline goes on learning.
        snapshot = replace(facts, baseline=deepcopy(facts.baseline))
        seen[facts.now_s] = snapshot, {cause.id: cause for cause in causes}
        return causes

    monkeypatch.setattr(judge, "conclude", noting)
    stream = TargetStream(recording, Profile(window_s=WINDOW_S), Limits())
    entries = CaptureReader(CAPTURES / f"{recording}.jsonl.gz")
    diagnoses = [diagnosis for entry in entries for diagnosis in stream.replay(entry)]
    kept: list[Cause] = []
    for diagnosis in diagnoses:
        for cause in diagnosis.causes:
            assert cause.since_s is not None
            assert cause.seen_s is not None
            assert cause.since_s <= cause.seen_s <= diagnosis.t_s
            facts, concluded = seen[cause.seen_s]
            then = concluded[cause.id].rounded()
            assert (cause.summary, cause.confidence) == (then.summary, then.confidence)
            assert (cause.evidence, cause.against) == (then.evidence, then.against)
            if cause.seen_s < diagnosis.t_s:
                assert cause.id not in seen[diagnosis.t_s][1], "it only lingers"
                kept += [cause] if cause.id == lingering else []
            for point in cause.unless:
                values = [item.value for item in cause.evidence if item.signal == point.signal]
                of_window = facts.values[point.signal]
                assert point.now == (
                    values[0] if point.signal in facts.recent else rounded(of_window)
                )
                assert stands_at(facts, cause.id, point.signal, point.now), point
                gap = point.now - point.at
                assert point.above == (gap < 0)
                step = min(abs(gap), max(0.01 * abs(gap), 0.002 * abs(point.at)))
                inside = point.at + (step if gap > 0 else -step)
                assert stands_at(facts, cause.id, point.signal, inside), point
                assert not stands_at(facts, cause.id, point.signal, point.at), point
    assert kept
    assert any(cause.unless for cause in kept) == turning


def test_evidence_that_decides_nothing_alone_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = concluded("kv_pressure_cascade", monkeypatch)
    sure = [(facts, cause) for facts, cause in rows if cause.confidence > 0.97]
    assert sure
    assert any(counterfactuals(BY_ID[cause.id].stands, facts, cause) == () for facts, cause in sure)
