"""The page's view: what is gathered for it, and what is said where something is missing."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.agent.api.responses import Problem
from kneewatch.agent.api.service import Service
from kneewatch.agent.api.triage import NO_HISTORY, page_request, page_view
from kneewatch.reports.triage.view_model import SINCE_DEFAULT, TriageView
from tests.agent.api.memory_history import reader
from tests.agent.api.serving import SICK_NAME, SICK_STATE, WELL_STATE, asking, service_of, state_of
from tests.agent.api.test_metrics import Stats
from tests.reports.diagnoses import HEALTHY, NOW_S, SICK


@pytest.fixture
def service() -> Service:
    """Two targets with an hour's history, one that has had no cycle."""
    past = reader(SICK_STATE, WELL_STATE)
    return service_of(SICK_STATE, WELL_STATE, names=["r9"], reader=past)


def view(service: Service, **query: str) -> TriageView:
    """The view for some parameters."""
    return page_view(service, page_request(NOW_S, **query))


def test_all_targets_now(service: Service) -> None:
    page = view(service)
    assert [target.name for target in page.targets] == [SICK_NAME, "r1", "r9"]
    assert page.targets[0].engines[0].diagnosis.health == "critical"
    assert page.targets[0].last_s == NOW_S
    assert page.targets[0].sources[0].name == "page"
    assert page.targets[2].error == (
        "not scraped yet: waiting for http://gpu-7:8000/metrics, up to 13 s"
    )
    assert page.targets[2].last_s is None
    assert (page.at_s, page.since_s, page.until_s) == (None, NOW_S - 3 * 3600, NOW_S)
    assert page.refresh_s == 5.0
    assert page.single is False
    assert page.notices == []


def test_the_timeline_is_there_for_all_and_charts_for_one(service: Service) -> None:
    overview, charted = view(service), view(service, target=SICK_NAME)
    for page in (overview, charted):
        kinds = [interval.kind for interval in page.targets[0].engines[0].intervals]
        assert kinds == ["stage", "cause"]
    assert overview.targets[0].engines[0].series == {}
    series = charted.targets[0].engines[0].series
    assert {"kv_usage_ratio", "preemption_ratio_per_s"} <= series.keys()
    assert len(charted.targets[0].engines[0].times) == len(series["kv_usage_ratio"]) == 61
    assert charted.single is True


def test_the_same_of_a_past_moment(service: Service) -> None:
    page = view(service, at="-30m", since="15m")
    assert page.at_s == page.until_s == NOW_S - 1800
    assert page.since_s == NOW_S - 2700
    assert page.targets[0].engines[0].diagnosis.t_s == NOW_S - 1800
    assert page.targets[0].last_s == NOW_S - 1800
    assert page.targets[0].sources == ()
    assert page.targets[2].error == "nothing is stored of that moment"


def test_a_target_that_is_no_longer_watched_has_a_past() -> None:
    gone = service_of(WELL_STATE, reader=reader(SICK_STATE))
    page = view(gone, at="-30m")
    assert [target.name for target in page.targets] == ["r1", SICK_NAME]
    assert page.targets[1].engines[0].diagnosis.health == "critical"
    assert view(gone, target=SICK_NAME, at="-30m").targets[0].engines
    assert view(gone, target=SICK_NAME).targets[0].error.startswith("no longer watched")


def test_a_target_that_is_the_only_one_is_shown_whole() -> None:
    alone = service_of(SICK_STATE, reader=reader(SICK_STATE))
    for query in ({}, {"target": SICK_NAME}, {"at": "-30m"}):
        page = view(alone, **query)
        assert (page.single, page.others) == (True, False)
        assert page.targets[0].engines[0].series
    assert view(service_of(SICK_STATE, reader=reader(SICK_STATE, WELL_STATE)), at="-30m").others


def test_an_unknown_target_is_a_problem(service: Service) -> None:
    with pytest.raises(Problem, match="no such target"):
        view(service, target="nope")


@pytest.mark.parametrize("query", [{"at": "x"}, {"at": "9999999999"}, {"since": "?"}])
def test_a_wrong_parameter_is_said_on_a_page_of_now(
    service: Service, query: dict[str, str]
) -> None:
    page = view(service, **query)
    assert page.at_s is None
    assert page.since == SINCE_DEFAULT
    assert len(page.notices) == 1
    assert "write unix seconds" in page.notices[0] or "future" in page.notices[0]


@pytest.mark.parametrize(
    ("text", "since"), [("24h", "24h"), ("-20m", "1h"), ("-30d", "7d"), ("", SINCE_DEFAULT)]
)
def test_how_much_of_the_past(service: Service, text: str, since: str) -> None:
    assert view(service, since=text).since == since


def test_what_is_wrong_with_the_history_is_said() -> None:
    assert view(service_of(WELL_STATE)).notices == [NO_HISTORY]
    broken = service_of(WELL_STATE, reader=reader(WELL_STATE), store=Stats("disk full"))
    (notice,) = view(broken).notices
    assert notice.startswith("The history is not written since 00:05:40 UTC (60 s): ")


def test_engines_that_had_the_same_name_one_after_the_other() -> None:
    old, new = state_of("r1", replace(HEALTHY, t_s=NOW_S - 100)), state_of("r1", SICK)
    page = view(service_of(new, reader=reader(old, new)), target="r1")
    assert page.targets[0].engines[0].times[-1] == NOW_S


def test_the_page_is_served(service: Service) -> None:
    with asking(service) as client:
        for query in ("", "?target=http%3A%2F%2Fgpu-7%3A8000", "?at=-30m", "?at=x", "?since=24h",
                      "?at=2026-11-21T00:03&zone=UTC"):  # fmt: skip
            page = client.get(f"/triage{query}")
            assert page.status_code == 200
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            assert "kv_pressure" in page.text
        assert client.get("/triage?target=nope").status_code == 404
        leads = client.get(f"/triage/{SICK_NAME}?at=-1h")
        assert client.get("/").headers["location"] == "triage"
        style, script = client.get("/triage/triage.css"), client.get("/triage/triage.js")
    assert leads.status_code == 307
    assert leads.headers["location"] == "../../../triage?target=http%3A%2F%2Fgpu-7%3A8000&at=-1h"
    assert style.headers["content-type"] == "text/css; charset=utf-8"
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
