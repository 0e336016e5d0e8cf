"""The cases without quiet times are what they are called, and their judges can say no."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import cache

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Severity
from tests.agent.store.factories import cause, diagnosis
from tests.hard_judging import Incident, judge, played, said
from tests.hard_sweeps import headed, with_targets
from tests.simulator.cases import BEGINS_S, Case, cases
from tests.simulator.page import START_S
from tests.simulator.sweeps import (
    ACCEPTED,
    FROM_THE_START,
    LOST,
    NEVER_QUIET,
    SILENCE,
    TROUBLES,
    quietless_cases,
)

NO_TARGETS = Targets()
HARMLESS = "row remap failed"
"""A fault that changes nothing for requests."""


def case_of(group: str, name: str, machine: str = "8B on H100") -> Case:
    """The case with such a name."""
    return next(
        c for c in quietless_cases() if c.group == group and name in c.name and c.machine == machine
    )


@cache
def diagnoses_of(case: Case) -> list[Verdict]:
    """What is said of a case, without targets."""
    return list(said(played(case, 1), NO_TARGETS))


@pytest.mark.parametrize("trouble", [trouble.name for trouble in TROUBLES])
def test_a_server_is_in_trouble_before_the_fault(trouble: str) -> None:
    diagnoses = diagnoses_of(case_of(NEVER_QUIET, f"{trouble}; {HARMLESS}"))
    before = [d for d in diagnoses if d.t_s - START_S <= BEGINS_S]
    assert len(before) == 60
    troubled = [d for d in before[30:] if d.causes or (d.values["waiting_avg"] or 0.0) >= 1]
    assert len(troubled) > len(before[30:]) / 2


def test_a_small_queue_is_small_and_steady() -> None:
    diagnoses = diagnoses_of(case_of(NEVER_QUIET, f"a small steady queue; {HARMLESS}"))
    waiting = [d.values["waiting"] or 0.0 for d in diagnoses[12:]]
    assert sum(1 <= count <= 20 for count in waiting) > 0.9 * len(waiting)


def test_a_fault_from_the_start_is_on_the_first_page() -> None:
    diagnoses = diagnoses_of(case_of(FROM_THE_START, "the draft does not suit"))
    first = next(d for d in diagnoses if d.values.get("spec_acceptance_ratio") is not None)
    assert first.t_s - START_S <= 15.0
    assert (first.values["spec_acceptance_ratio"] or 1.0) < 0.5


@pytest.mark.parametrize("kept_ratio", [0.0, 0.15])
def test_a_prefix_is_lost_under_constant_stalls(kept_ratio: float) -> None:
    diagnoses = diagnoses_of(case_of(LOST, f"to {kept_ratio:g},", "70B on 4 H100"))
    before = [d for d in diagnoses if 120 < d.t_s - START_S <= BEGINS_S]
    after = [d for d in diagnoses if d.t_s - START_S > BEGINS_S + 120]
    assert min(d.values["prefix_hit_ratio"] or 0.0 for d in before) > 0.93
    stalled = [(d.values["itl_stall_time_ratio"] or 0.0) >= 0.05 for d in before]
    assert sum(stalled) > 0.9 * len(stalled)
    hits = [d.values["prefix_hit_ratio"] or 0.0 for d in after]
    assert all(hit == pytest.approx(kept_ratio, abs=0.05) for hit in hits)
    assert all(120 < (d.values["waiting"] or 0.0) < 320 for d in after)
    assert max(d.values["kv_usage_avg_ratio"] or 1.0 for d in after) < 0.5


@pytest.mark.parametrize("machine", ["8B on H100", "70B on 4 H100"])
def test_churn_behind_a_queue_of_short_prompts_is_told(machine: str) -> None:
    case = case_of(NEVER_QUIET, "a small steady queue; more documents", machine)
    diagnoses = diagnoses_of(case)
    shares = {d.values.get("prefill_hit_share") for d in diagnoses}
    assert shares == {None}, "most prompts are short: their share says nothing about tokens"
    verdict = judge(Incident(case), diagnoses, level="none", targets=NO_TARGETS)
    assert verdict.ok
    assert verdict.first == "prefix_churn"


def test_cases_go_to_other_processes() -> None:
    for case in (*cases(), *quietless_cases()):
        copy: Case = pickle.loads(pickle.dumps(case))
        assert (copy.name, copy.wanted, copy.begins_s) == (case.name, case.wanted, case.begins_s)


def test_what_is_accepted_says_why() -> None:
    assert all(row.why and row.words for row in ACCEPTED)
    accepting = [c for c in quietless_cases() if c.group == FROM_THE_START and c.accepted]
    assert {c.faults[0].cause for c in accepting} == {row.cause for row in ACCEPTED}
    assert all(c.wanted or c.accepted for c in quietless_cases())


def judged_as(case: Case, *ids: str, summary: str = "") -> tuple[bool, bool]:
    """Whether a case is right, and its first cause, where these causes are said all the time."""
    causes = [replace(cause(name), summary=summary) for name in ids]
    late = [
        diagnosis(START_S + case.judged_from_s + at, causes=causes, values={}) for at in range(10)
    ]
    verdict = judge(Incident(case), late, level="none", targets=NO_TARGETS)
    return verdict.ok, verdict.first_right


def test_without_a_past_silence_about_lost_prefixes_is_right_and_a_warning_is_not() -> None:
    case = case_of(FROM_THE_START, "a nonce leads each prompt")
    assert SILENCE in case.accepted
    assert judged_as(case) == (True, True)
    assert judged_as(case, "queue_saturation") == (True, True)
    assert judged_as(case, "prefix_reuse_lost") == (False, False)


def test_room_on_a_gpu_that_nobody_measures_is_no_right_claim() -> None:
    case = case_of(FROM_THE_START, "max_num_seqs too low, no GPU page")
    claim = "The batch is pinned at 24 requests while KV and GPU have room; 9 wait."
    assert judged_as(case, "admission_limit", summary=claim) == (False, True)
    assert judged_as(case, "admission_limit", summary="The batch is pinned.") == (True, True)
    assert judged_as(replace(case, gpu_page=True), "admission_limit", summary=claim)[0]
    assert judged_as(case) == (False, False)


def test_a_trouble_may_come_first_but_the_fault_must_be_told() -> None:
    case = case_of(NEVER_QUIET, "a poor draft; caching off")
    assert judged_as(case, "spec_decode_poor", "prefix_cache_off") == (True, True)
    assert judged_as(case, "spec_decode_poor") == (False, True)
    assert not judged_as(case, "kv_pressure", "prefix_cache_off")[0]


def test_a_cause_about_a_missed_target_is_neither_wrong_nor_early() -> None:
    case = next(cases())
    targets = Targets(ttft_p99_s=1.0)

    def early_and_wrong(missed_until_s: float, *ids: str) -> tuple[frozenset[str], frozenset[str]]:
        rows = [
            diagnosis(
                START_S + at_s,
                causes=[cause(name) for name in ids],
                values={"ttft_p99_s": 1.5 if at_s <= missed_until_s else 0.5},
            )
            for at_s in range(5, 660, 5)
        ]
        verdict = judge(Incident(case), rows, level="loose", targets=targets)
        return verdict.early, verdict.wrong

    about = frozenset({"slo_conflict"})
    assert early_and_wrong(660, "kv_pressure", "slo_conflict") == (
        frozenset({"kv_pressure"}),
        frozenset(),
    )
    assert early_and_wrong(255, "slo_conflict") == (frozenset(), about)
    assert early_and_wrong(200, "slo_conflict") == (about, about)


def lost(
    *, first_after_s: float = 30.0, explains: Sequence[str] = ("queue_saturation",),
    severity: Severity = Severity.CRITICAL, until_s: float = 300.0,
) -> bool:  # fmt: skip
    """Whether a head that begins and ends like this, and explains this, is right."""
    case = case_of(LOST, "to 0,", "70B on 4 H100")
    head = replace(cause("prefix_reuse_lost", severity), explains=tuple(explains))
    rest = cause("queue_saturation", Severity.CRITICAL)
    rows = [
        diagnosis(
            START_S + BEGINS_S + after_s,
            causes=[head if first_after_s <= after_s <= until_s else rest],
            values={"waiting": 200.0 if after_s <= 200 else 20.0, "completed_per_s": 1.0},
        )
        for after_s in range(5, 305, 5)
    ]
    return headed(case, rows).right


def test_a_lost_prefix_heads_the_verdict_in_time_and_for_good() -> None:
    assert lost()
    assert not lost(first_after_s=65.0)
    assert not lost(until_s=250.0)
    assert not lost(explains=())
    assert not lost(severity=Severity.WARNING)


def test_targets_are_swept_where_the_fault_is_one_with_them() -> None:
    chosen = {c.faults[0].name: c for c in cases() if c.machine == "8B on H100"}
    levels: list[list[str]] = []
    for name in (HARMLESS, "prompts too long for the TTFT target"):
        incident = played(replace(chosen[name], begins_s=120.0), 1)
        diagnoses = list(said(incident, chosen[name].faults[0].targets))
        levels.append([verdict.level for verdict in with_targets(incident, diagnoses)])
    plain, own = levels
    assert plain == ["loose", "median", "unreachable", "unreachable TTFT", "unreachable ITL"]
    assert own == ["loose", "median", "unreachable", "unreachable TTFT"]
