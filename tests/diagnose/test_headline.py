"""What a verdict rests on, in a word."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.agent.notify.events import problems
from kneewatch.diagnose.verdict import UNKNOWN_STAGE, Cause, Verdict
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Finding, Severity
from tests.agent.notify.factories import state
from tests.recordings import CAPTURES, NO_TARGETS, diagnoses


@pytest.fixture(scope="module")
def said() -> Verdict:
    """A diagnosis with a rule over its bound."""
    all_diagnoses = diagnoses(CAPTURES / "kv_pressure_cascade.jsonl.gz")
    return max(all_diagnoses, key=lambda diagnosis: max(f.severity for f in diagnosis.findings))


def note() -> Cause:
    """A cause that stands for weeks."""
    return Cause(
        id="tp_overhead",
        confidence=0.9,
        severity=Severity.INFO,
        summary="The split costs half.",
        evidence=(),
        against=(),
        guide=(),
        lever="Less.",
    )


def quiet(diagnosis: Verdict) -> list[Finding]:
    """Its findings that are no trouble."""
    return [finding for finding in diagnosis.findings if finding.severity < Severity.WARNING]


def test_the_first_cause_is_the_headline(said: Verdict) -> None:
    assert said.headline == said.causes[0].id
    assert replace(said, causes=[]).headline == ""
    assert replace(said, causes=[note()], findings=quiet(said), stage=UNKNOWN_STAGE).headline == (
        "tp_overhead"
    )


def test_a_note_is_not_the_headline_of_something_worse(said: Verdict) -> None:
    worst = max(said.findings, key=lambda finding: finding.severity)
    assert worst.severity >= Severity.WARNING
    assert replace(said, causes=[note()]).headline == worst.rule
    assert said.stage.number is not None
    staged = replace(said, causes=[note()], findings=quiet(said))
    assert staged.severity >= Severity.WARNING
    assert staged.headline == ""


@pytest.mark.parametrize(
    ("name", "rule"), [("lora_thrash", "TTFT P50"), ("kv_pressure_cascade", "vLLM preempts")]
)
def test_the_first_cause_is_as_severe_as_the_verdict(name: str, rule: str) -> None:
    """The message that it becomes, the page and the metrics say one severity."""
    targets = Targets(ttft_p99_s=0.5, itl_p99_s=0.1) if name == "lora_thrash" else NO_TARGETS
    raised = 0
    for verdict in diagnoses(CAPTURES / f"{name}.jsonl.gz", targets=targets):
        first = next(iter(verdict.causes), None)
        if first is None or first.severity < Severity.WARNING:
            continue
        assert first.severity.word == verdict.severity.word
        found = problems(state(verdict), Severity.WARNING).values()
        assert max(event.severity for event in found) == verdict.severity
        if first.evidence[0].text.startswith(rule):
            raised += 1
            assert first.severity == Severity.CRITICAL
            now = verdict.values[first.evidence[0].signal]
            assert first.evidence[0].value == pytest.approx(now, rel=1e-4)
    assert raised
