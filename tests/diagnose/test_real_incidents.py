"""What is said of incidents from issue threads and from operation."""

from __future__ import annotations

import pytest

from kneewatch.agent.api.metrics import recommended_replicas
from tests.incidents.incident import Incident, said
from tests.incidents.shares import above_whole
from tests.incidents.table import INCIDENTS


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.name)
def test_an_incident_is_said_as_expected(incident: Incident) -> None:
    given = said(incident)
    assert given.wrong == ""
    assert [text for each in given.diagnoses for text in above_whole(each)] == []


def test_a_forecast_reaches_the_autoscaler_before_harm_and_is_taken_back() -> None:
    ramp, ended = (next(i for i in INCIDENTS if name in i.name) for name in ("slow ramp", "ended"))
    climbing, stays = said(ramp), said(ended)
    assert {recommended_replicas(diagnosis, 1) for diagnosis in climbing.judged} == {2.0}
    assert {recommended_replicas(diagnosis, 1) for diagnosis in stays.judged} == {1.0}


def test_an_unknown_speed_has_a_reason_where_requests_are_preempted() -> None:
    (full,) = (each for each in INCIDENTS if each.name == "256 callers, 72 fit")
    for diagnosis in said(full).judged:
        assert diagnosis.values["engine_speed_ratio"] is None
        assert any("no metric counts it" in line for line in diagnosis.unknown)


def test_prompts_from_another_tier_are_not_computed_here() -> None:
    """Before vLLM 0.16 no metric says which prompt tokens were computed."""
    (decodes,) = (each for each in INCIDENTS if each.source == "vllm 40364")
    *_, last = given = said(decodes).diagnoses
    for each, computed_per_s, hits in ((given[40], 0.0, 1.0), (last, 6000.0, 0.5)):
        assert each.values["computed_prompt_tokens_per_s"] == pytest.approx(computed_per_s)
        assert each.values["hits_moved_ratio"] == hits
