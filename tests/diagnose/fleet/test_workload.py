"""A fleet's last hour against the profile that its size was computed for."""

from __future__ import annotations

from math import inf

import pytest

from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.inventory import Group
from kneewatch.diagnose.fleet.verdict import FleetVerdict
from kneewatch.diagnose.values import Histogram
from tests.diagnose.fleet.example_fleets import Row, causes, fleet, pod, verdict
from tests.diagnose.workloads import stated

PROMPTS, ANSWERS = "prompt_tokens_mean", "output_tokens_mean"
GROUP = ("prod/m", "", "")
FITS: Histogram = {500.0: 6e3, 1000.0: 1.5e4, 5000.0: 2.9e4, inf: 3e4}
LONGER: Histogram = {500.0: 1e3, 1000.0: 3e3, 5000.0: 2.7e4, inf: 3e4}
LARGE, SMALL = "meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"


def drifted(
    now: Histogram,
    *rows: Row,
    group: Group = GROUP,
    signal: str = PROMPTS,
    week_ago: Histogram | None = None,
) -> FleetVerdict:
    """The verdict where a group had these requests in the last hour."""
    return verdict(
        *(rows or fleet(3)),
        recent={group: {signal: now}},
        lengths={group: {signal: (week_ago, now)}} if week_ago else None,
        profile=Profile(stated=Stated(workload=stated())),
    )


def test_requests_as_stated() -> None:
    assert causes(drifted(FITS)) == {}


def test_longer_prompts_than_stated() -> None:
    diagnosis = drifted(LONGER)
    assert causes(diagnosis) == {"workload_drift": ("r0", "r1", "r2")}
    cause = diagnosis.causes[0]
    assert cause.summary == "Against the profile base.toml: prompts are longer."
    (evidence,) = cause.evidence
    assert evidence.signal == "prompt_tokens_shift_ratio"
    assert "90% of prompts in the last hour are above 1000 tokens" in evidence.text
    assert diagnosis.health == "info"


def test_which_of_the_two_says_it_is_told() -> None:
    both = drifted(LONGER, week_ago=FITS).causes[0]
    assert (
        "Prompts are longer than in the same hour a week ago. Against the profile" in both.summary
    )
    assert len(both.evidence) == 2
    week = drifted(LONGER, week_ago=LONGER).causes[0]
    assert "week ago" not in week.summary
    back = drifted(FITS, week_ago=LONGER).causes[0]
    assert "profile" not in back.summary


@pytest.mark.parametrize(
    ("requests", "expected"),
    [pytest.param(6e4, True, id="above"), pytest.param(4e4, False, id="safe")],
)
def test_more_requests_than_the_peak(requests: float, expected: bool) -> None:
    """Ten a second are planned for: 36,000 an hour."""
    diagnosis = drifted({1000.0: 0.5 * requests, inf: requests})
    assert ("workload_drift" in causes(diagnosis)) == expected
    if expected:
        assert "arrivals are 1.7x its peak" in diagnosis.causes[0].summary


def served(name: str, model: str) -> Row:
    return pod(name, model_name=model), {}


@pytest.mark.parametrize(
    ("model", "expected"),
    [pytest.param(LARGE, True, id="the profile's"), pytest.param(SMALL, False, id="another")],
)
def test_of_several_pools_those_that_serve_its_model(model: str, expected: bool) -> None:
    rows = [served("a", LARGE), served("b", SMALL)]
    diagnosis = drifted(LONGER, *rows, group=(f"prod/{model}", "", ""))
    assert ("workload_drift" in causes(diagnosis)) == expected


def test_a_profile_that_is_of_no_pool_is_noted() -> None:
    rows = [served("a", "x"), served("b", "y")]
    diagnosis = drifted(LONGER, *rows, group=("prod/x", "", ""))
    assert "workload_drift" not in causes(diagnosis)
    assert any(
        "no pool serves a model of the profile base.toml" in note for note in diagnosis.notes
    )
    assert not any("base.toml" in note for note in drifted(FITS).notes)


def test_a_prefill_server_answers_with_one_token() -> None:
    rows: list[Row] = [(pod("p", role="prefill"), {}), (pod("d", role="decode"), {})]
    short: Histogram = {1.0: 1e4, inf: 1e4}
    for role, expected in (("prefill", False), ("decode", True)):
        diagnosis = drifted(short, *rows, group=("prod/m", "", role), signal=ANSWERS)
        assert ("workload_drift" in causes(diagnosis)) == expected
