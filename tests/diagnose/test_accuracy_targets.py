"""What is said of the labelled recordings with latency targets set, and how that is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Severity
from tests.accuracy import (
    PhaseVerdict,
    first_word,
    judge,
    mark,
    summary,
    verdict,
    with_targets,
    wrong,
)
from tests.agent.store.factories import cause, diagnosis
from tests.recordings import CAPTURES, Phase
from tests.reports.diagnoses import finding
from tests.target_levels import LOOSE_LEAST_S, completed, is_missed, loose, middle

QUIET = Phase(CAPTURES / "idle.jsonl.gz", "steady", "healthy", 0.0, 100.0, 0.0)
FAULTY = replace(QUIET, state="prefix_hits_lost")
TARGETS = Targets(ttft_p99_s=1.0)

Levels = Mapping[str, Sequence[PhaseVerdict]]


def scrapes(
    *ids: str, ttft_p99_s: float = 0.2, severity: Severity = Severity.WARNING
) -> list[Verdict]:
    """Twenty diagnoses of 100 s that say these causes."""
    causes = [cause(name, severity) for name in ids]
    values = {"ttft_p99_s": ttft_p99_s}
    return [diagnosis(5.0 * turn, causes=causes, values=values) for turn in range(1, 21)]


def test_loose_targets_are_never_missed_by_healthy_scrapes() -> None:
    healthy = [
        diagnosis(0.0, values={"ttft_p99_s": 0.5, "itl_p99_s": 0.01}),
        diagnosis(5.0, values={"ttft_p99_s": 0.3, "itl_p99_s": None}),
    ]
    targets = loose(healthy)
    assert targets == Targets(ttft_p99_s=1.5, itl_p99_s=LOOSE_LEAST_S["itl_p99_s"])
    assert not any(is_missed(scrape, targets) for scrape in healthy)


def test_middle_targets_are_missed_by_half_of_the_scrapes() -> None:
    said = [diagnosis(float(at), values={"ttft_p99_s": float(at)}) for at in range(11)]
    targets = middle(said)
    assert targets.itl_p99_s is None
    assert sum(is_missed(scrape, targets) for scrape in said) == 5


def test_a_recording_without_healthy_scrapes_takes_the_median_of_others() -> None:
    others = [Targets(ttft_p99_s=at) for at in (1.0, 2.0, 9.0)]
    assert completed(loose([]), others) == Targets(ttft_p99_s=2.0)
    assert completed(Targets(ttft_p99_s=5.0), others) == Targets(ttft_p99_s=5.0)


def test_a_warning_of_a_quiet_phase_is_wrong_while_its_targets_are_met() -> None:
    row = verdict(QUIET, scrapes("prefill_bound"), targets=TARGETS, untargeted=scrapes())
    assert not row.missed
    assert not row.right
    assert mark(row) == "NO"


def test_a_missed_target_may_be_told_in_a_quiet_phase() -> None:
    said = scrapes("prefill_bound", ttft_p99_s=1.5)
    row = verdict(QUIET, said, targets=TARGETS, untargeted=scrapes())
    assert row.missed
    assert row.right
    assert mark(row) == "-"
    assert "without an unfounded cause: 1 of 1" in summary([row])


@pytest.mark.parametrize("severity", [Severity.INFO, Severity.CRITICAL])
def test_a_missed_target_is_no_evidence_of_a_root_cause(severity: Severity) -> None:
    said = scrapes("slo_conflict", "kv_pressure", ttft_p99_s=1.5, severity=severity)
    row = verdict(QUIET, said, targets=TARGETS, untargeted=scrapes())
    assert row.unfounded == {"kv_pressure"}
    assert not row.right
    assert "unfounded: kv_pressure" in wrong({"median": [row]})
    same = verdict(QUIET, said, targets=TARGETS, untargeted=scrapes("kv_pressure"))
    assert not same.unfounded


def test_a_latency_cause_must_not_head_the_verdict_on_a_fault() -> None:
    right = scrapes("prefix_reuse_lost", "slo_conflict", ttft_p99_s=1.5)
    assert verdict(FAULTY, right, targets=TARGETS).right
    headed = scrapes("slo_conflict", "prefix_reuse_lost", ttft_p99_s=1.5)
    row = verdict(FAULTY, headed, targets=TARGETS)
    assert row.share == 0.0
    assert not row.right
    assert "slo_conflict 20" in wrong({"median": [row]})


def test_a_missed_target_may_stand_above_a_note() -> None:
    refused = replace(QUIET, state="client_errors")
    note = scrapes("client_errors", ttft_p99_s=1.5, severity=Severity.INFO)
    late = scrapes("prefill_bound", ttft_p99_s=1.5)
    both = [
        replace(missed, causes=[*missed.causes, *other.causes])
        for missed, other in zip(late, note, strict=True)
    ]
    assert verdict(refused, both, targets=TARGETS).right
    assert not verdict(refused, late, targets=TARGETS).right, "the note is missing"
    met = [replace(combined, values={"ttft_p99_s": 0.2}) for combined in both]
    assert not verdict(refused, met, targets=TARGETS).right, "no target is missed"


def test_without_a_cause_the_worst_rule_is_what_is_said() -> None:
    (quiet,) = scrapes()[:1]
    stalled = replace(quiet, findings=[finding("ITL-STALL", "warning", 0.3)])
    assert first_word(quiet) == "-"
    assert first_word(stalled) == "ITL-STALL"
    assert first_word(replace(stalled, causes=[cause("kv_pressure")])) == "kv_pressure"


@pytest.fixture(scope="module")
def by_level() -> Levels:
    """Verdicts on all phases by level of targets."""
    return with_targets(*judge(CAPTURES))


LEVELS = ("loose", "median", "1 s and 60 ms", "unreachable", "unreachable TTFT", "unreachable ITL")


def test_the_levels_are_those_that_are_judged(by_level: Levels) -> None:
    assert set(by_level) == set(LEVELS)
    for verdicts in by_level.values():
        assert sum(bool(row.phase.first_causes) for row in verdicts) >= 14
        assert all(row.judged for row in verdicts)
    missed = {level: sum(v.missed for v in verdicts) for level, verdicts in by_level.items()}
    assert missed["loose"] < missed["1 s and 60 ms"] < missed["median"] < missed["unreachable"]


@pytest.mark.parametrize("level", LEVELS)
def test_no_phase_is_told_wrong_with_targets(by_level: Levels, level: str) -> None:
    wrong_phases = [row.phase for row in by_level[level] if not row.right]
    assert [f"{phase.capture.name} {phase.name}" for phase in wrong_phases] == []


@pytest.mark.parametrize("level", LEVELS)
def test_no_target_makes_up_a_root_cause(by_level: Levels, level: str) -> None:
    assert [row.phase for row in by_level[level] if row.unfounded] == []
