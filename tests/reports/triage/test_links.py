"""Links: relative, to the page itself, and they keep what is shown."""

from __future__ import annotations

from urllib.parse import parse_qs

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.reports.triage.page import Links
from kneewatch.reports.triage.view_model import EngineView
from tests.reports.diagnoses import HEALTHY, NOW_S
from tests.reports.triage import views

PAGE = views.view(views.target("http://gpu-7:8000/a?b", EngineView(HEALTHY)))


def query(link: str) -> dict[str, list[str]]:
    assert link.startswith("?")
    return parse_qs(link[1:])


def test_a_target_whose_name_is_an_address() -> None:
    assert query(Links(PAGE).page()) == {"target": ["http://gpu-7:8000/a?b"]}
    assert Links(PAGE).page(target="") == "?"
    assert Links(PAGE).document("json") == (
        "api/v1/triage/http%3A%2F%2Fgpu-7%3A8000%2Fa%3Fb?format=json"
    )


def test_the_moment_and_the_timeline_are_kept() -> None:
    links = Links(replace(PAGE, at_s=NOW_S - 60.5, since="24h"))
    assert query(links.here(target="b")) == {
        "target": ["b"], "at": ["2026-11-21T00:05:40Z"], "since": ["24h"],
    }  # fmt: skip
    assert "at=" in links.document("text")
    assert query(links.here(since="7d"))["at"] == ["2026-11-21T00:05:40Z"]


def test_there_is_no_step_into_the_future() -> None:
    assert [bool(href) for _, href in Links(PAGE).time_steps()] == [True, True, False, False]
    past = replace(PAGE, at_s=PAGE.now_s - 1800)
    assert [bool(href) for _, href in Links(past).time_steps()] == [True, True, True, False]


def test_a_link_to_a_beginning_shows_what_began() -> None:
    links = Links(PAGE)
    assert query(links.moment(NOW_S))["at"] == ["2026-11-21T00:06:40Z"]
    assert query(links.moment(NOW_S + 0.001))["at"] == ["2026-11-21T00:06:41Z"]


@given(st.text(min_size=1))
def test_any_name_comes_back(name: str) -> None:
    page = replace(PAGE, targets=[replace(PAGE.targets[0], name=name)])
    assert query(Links(page).page()) == {"target": [name]}
