"""How a target stands: the verdict, unless its numbers are too old to trust."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.reports.diagnosis_text import COLOURS
from kneewatch.reports.health import RANKS, counted
from kneewatch.reports.triage.view_model import (
    EngineView,
    Standing,
    standings,
)
from kneewatch.rules.formatting import as_sentence
from kneewatch.rules.rule import Severity
from tests.reports.diagnoses import HEALTHY, NOW_S, SICK, UNREADABLE, changed, finding
from tests.reports.triage import views


def stands(*engines: EngineView, later_s: float = 0.0, **fields: object) -> list[Standing]:
    view = views.view(views.target("t", *engines, **fields))
    view = replace(view, now_s=view.now_s + later_s)
    return standings(view.targets[0], view)


def test_every_state_has_a_rank_and_a_colour() -> None:
    assert set(RANKS) == set(COLOURS)
    assert RANKS["unknown"] > RANKS["info"], "somebody must look"


@pytest.mark.parametrize(
    ("health", "later_s", "shown_health"),
    [
        ("ok", 0.0, "ok"), ("ok", 10.0, "ok"), ("ok", 16.0, "unknown"), ("info", 16.0, "unknown"),
        ("unknown", 0.0, "unknown"), ("warning", 99.0, "warning"), ("critical", 99.0, "critical"),
        ("splendid", 0.0, "unknown"),
    ],
)  # fmt: skip
def test_old_numbers_say_nothing_good(health: str, later_s: float, shown_health: str) -> None:
    (standing,) = stands(EngineView(changed(HEALTHY, health=health)), later_s=later_s)
    assert standing.health == shown_health


def test_a_slow_pace_is_not_late() -> None:
    (standing,) = stands(EngineView(HEALTHY), later_s=100.0, interval_s=60.0)
    assert not standing.late


def test_engines_worst_first() -> None:
    engine_standings = stands(EngineView(HEALTHY), EngineView(SICK))
    assert [standing.health for standing in engine_standings] == ["critical", "ok"]
    assert counted(each.health for each in engine_standings) == [("critical", 1), ("ok", 1)]


def test_headlines() -> None:
    assert stands()[0].headline == "This target has not been scraped yet."
    assert stands(error="not watched then")[0].headline == "Not watched then."
    assert stands(EngineView(SICK))[0].headline == "The KV cache is too small for this load."
    assert stands(EngineView(changed(UNREADABLE, causes=[])))[0].headline == (
        "The page could not be read."
    )
    first = changed(HEALTHY, health="unknown", values={}, unknown=["a: b"])
    assert stands(EngineView(first))[0].headline == (
        "Not enough data to judge. Rates and latencies: the window holds one scrape, they need two."
    )
    note = changed(HEALTHY, health="info", findings=[finding("KV-FULL", "info", 0.93)])
    assert stands(EngineView(note))[0].headline == "KV cache usage is above its target band."
    assert HEALTHY.stage.number is not None
    filling = changed(
        HEALTHY,
        health="info",
        stage=replace(HEALTHY.stage, number=1, name="filling", severity=Severity.INFO),
    )
    assert stands(EngineView(filling))[0].headline == "The KV cache is at stage 1 of 4 (filling)."


@pytest.mark.parametrize(
    ("words", "expected"), [("", ""), (" ab ", "Ab."), ("ab?", "Ab?"), ("Ab.", "Ab."), ("é", "É.")]
)
def test_sentence(words: str, expected: str) -> None:
    assert as_sentence(words) == expected


def test_a_state_that_is_over_is_no_headline() -> None:
    over = finding(
        "KV-EVICT",
        "info",
        0.0,
        clearing_since_s=NOW_S - 9,
        was=0.41,
        was_severity=Severity.CRITICAL,
    )
    (standing,) = stands(EngineView(changed(HEALTHY, health="info", findings=[over])))
    assert standing.headline == (
        "No problem now: share of running requests preempted was 41%/s until 00:06:31 UTC, back "
        "below its threshold for 9 s (0%/s in the last 60 s)."
    )
    note = finding("KV-FULL", "info", 0.93)
    (standing,) = stands(EngineView(changed(HEALTHY, health="info", findings=[over, note])))
    assert standing.headline == "KV cache usage is above its target band."


def test_durations_of_a_target_that_fails_are_counted_to_the_page_s_moment() -> None:
    (failing,) = stands(EngineView(UNREADABLE), last_s=NOW_S - 2, later_s=3.0)
    assert failing.as_of_s == pytest.approx(NOW_S - 2 + 1.4 + 3)
    (late,) = stands(EngineView(UNREADABLE), later_s=600.0)
    assert late.as_of_s == UNREADABLE.t_s
    assert stands()[0].as_of_s == 0.0


def test_a_target_is_named_with_its_program() -> None:
    (standing,) = stands(EngineView(changed(HEALTHY, program="vllm-router", model="", engine="")))
    assert standing.who == "vllm-router"
    (standing,) = stands(EngineView(changed(HEALTHY, program="SGLang", model="m", engine="0")))
    assert standing.who == "SGLang, model m, engine 0"
