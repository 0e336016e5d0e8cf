"""Traffic that ends from one scrape to the next, on a server that is not idle otherwise."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import Severity
from tests.incidents.incident import BEGUN_S, Incident, said
from tests.incidents.pages import SERVING, Load

ENDS_S = 660.0
IDLE = Load(generated_per_s=0.0)


def diagnoses(
    load_after: Load, *, pauses_every_s: float = 0.0, drains_s: float = 0.0
) -> list[Verdict]:
    """A healthy server whose traffic ends; with pauses of 25 s before, or an end that drains."""

    def load_at(at_s: float) -> Load:
        if at_s >= ENDS_S + drains_s:
            return load_after
        if at_s >= ENDS_S:
            left = 1 - (at_s - ENDS_S) / drains_s
            return replace(SERVING, running=round(4 * left), generated_per_s=100 * left,
                           first_tokens_per_s=2 * left, finished_per_s=2 * left)  # fmt: skip
        paused = pauses_every_s and at_s % pauses_every_s < 25.0
        return load_after if paused else SERVING

    incident = Incident(
        name="", source="", load_at=load_at, lasts_s=ENDS_S + 150.0, judged_from_s=0.0,
        first_cause="",
    )  # fmt: skip
    return list(said(incident).diagnoses)


def noted(given: list[Verdict]) -> list[float]:
    """Seconds since the end of traffic at which it was noted."""
    return [
        each.t_s - BEGUN_S - ENDS_S
        for each in given
        if any(line.startswith("traffic: ") for line in each.unknown)
    ]


def test_an_end_at_once_is_noted_and_nothing_more() -> None:
    given = diagnoses(IDLE)
    at_s = noted(given)
    assert 15.0 <= at_s[0] <= 30.0
    assert at_s[-1] == 150.0
    assert max(each.severity for each in given) < Severity.WARNING


@pytest.mark.parametrize(
    ("pauses_every_s", "drains_s"),
    [(200.0, 0.0), (0.0, 40.0)],
    ids=["it pauses often", "it drains"],
)
def test_a_usual_end_is_not_noted(pauses_every_s: float, drains_s: float) -> None:
    at_s = noted(diagnoses(IDLE, pauses_every_s=pauses_every_s, drains_s=drains_s))
    assert [seconds for seconds in at_s if seconds <= 60.0] == []


def test_a_server_that_goes_on_is_not_noted() -> None:
    assert noted(diagnoses(SERVING)) == []
