"""What a verdict rests on, in a word."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.causes.evidence import Cause
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.rules.rule import Finding, Severity
from tests.recordings import CAPTURES, diagnoses


@pytest.fixture(scope="module")
def said() -> Diagnosis:
    """A diagnosis with a rule over its bound."""
    all_diagnoses = diagnoses(CAPTURES / "kv_pressure_cascade.jsonl.gz")
    return max(all_diagnoses, key=lambda diagnosis: max(f.severity for f in diagnosis.findings))


def note() -> Cause:
    """A cause that stands for weeks."""
    return Cause("tp_overhead", 0.9, Severity.INFO, "The split costs half.", (), (), (), "Less.")


def quiet(diagnosis: Diagnosis) -> list[Finding]:
    """Its findings that are no trouble."""
    return [finding for finding in diagnosis.findings if finding.severity < Severity.WARNING]


def test_the_first_cause_is_the_headline(said: Diagnosis) -> None:
    assert said.headline == said.causes[0].id
    assert replace(said, causes=[]).headline == ""
    assert replace(said, causes=[note()], findings=quiet(said), stage=None).headline == (
        "tp_overhead"
    )


def test_a_note_is_not_the_headline_of_something_worse(said: Diagnosis) -> None:
    worst = max(said.findings, key=lambda finding: finding.severity)
    assert worst.severity >= Severity.WARNING
    assert replace(said, causes=[note()]).headline == worst.rule.id
    assert said.stage is not None
    staged = replace(said, causes=[note()], findings=quiet(said))
    assert staged.severity >= Severity.WARNING
    assert staged.headline == ""
