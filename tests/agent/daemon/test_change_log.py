"""What the log is told of a target: each change once, and nothing else."""

from __future__ import annotations

import logging
from itertools import groupby

import pytest
from msgspec.structs import replace

from kneewatch.agent.daemon.cycle import LINES_MAX, LINES_S, ChangeLog
from kneewatch.collector.errors import CollectError
from kneewatch.diagnose.engine.target_monitor import ENGINES_MAX
from kneewatch.diagnose.verdict import UNKNOWN_STAGE, Verdict
from kneewatch.rules.rule import Severity
from tests.agent.running import capture
from tests.recordings import diagnoses
from tests.reports.diagnoses import SICK

ERROR = CollectError("connection refused", kind="refused", hint="start it")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def test_every_change_of_stage_and_causes_once(said: pytest.LogCaptureFixture) -> None:
    changes = ChangeLog("t")
    verdicts = diagnoses(capture("kv_pressure_cascade"))
    for diagnosis in verdicts:
        changes.diagnosed([diagnosis])
    stages = [verdict.stage.number for verdict in verdicts if verdict.stage.number is not None]
    expected = [number for number, _ in groupby([0, *stages])][1:]
    logged = [record.args for record in said.records if record.msg.startswith("stage changed")]
    assert [args[4] for args in logged if isinstance(args, tuple)] == expected
    begins = [record for record in said.records if record.msg.startswith("cause began")]
    ends = [record for record in said.records if record.msg.startswith("cause resolved")]
    assert 1 <= len(begins) <= 6
    assert len(begins) == len(ends), "it ended well"


def test_a_cause_that_gets_worse_is_logged_once(said: pytest.LogCaptureFixture) -> None:
    changes = ChangeLog("t")
    (first, *_) = SICK.causes
    severities = [Severity.INFO, Severity.CRITICAL, Severity.INFO, Severity.CRITICAL]
    for severity in severities:
        changes.diagnosed(
            [replace(SICK, stage=UNKNOWN_STAGE, causes=(replace(first, severity=severity),))]
        )
    logged = [(r.levelname, *r.getMessage().split(" target=t ")) for r in said.records]
    assert [(level, what) for level, what, _ in logged] == [
        ("INFO", "cause began"),
        ("WARNING", "cause worsened"),
    ]
    assert f"cause={first.id} severity=critical" in logged[1][2]


def test_down_and_up(said: pytest.LogCaptureFixture) -> None:
    changes = ChangeLog("t")
    for interval_s in (5.0, 5.0, 10.0, 20.0, 40.0, 55.0, 60.0, 50.0, 60.0):
        changes.scraped(ERROR, interval_s)
    for _ in range(3):
        changes.scraped(None, 5.0)
    changes.scraped(ERROR, 5.0)
    lines = [record.getMessage() for record in said.records]
    assert lines == [
        "target down target=t error=connection refused hint=start it",
        "target still down, backing off target=t interval_s=10.0 failed_scrapes=3",
        "target still down, backing off target=t interval_s=20.0 failed_scrapes=4",
        "target still down, backing off target=t interval_s=40.0 failed_scrapes=5",
        "target still down, backing off target=t interval_s=55.0 failed_scrapes=6",
        "target up again target=t failed_scrapes=9",
        "target down target=t error=connection refused hint=start it",
    ]


def test_a_cause_that_a_restart_ended_is_not_resolved(said: pytest.LogCaptureFixture) -> None:
    changes = ChangeLog("t")
    changes.diagnosed([replace(SICK, t_s=1000.0)])
    key = (SICK.model, SICK.engine)
    changes.diagnosed([replace(SICK, t_s=1005.0, causes=(), stage=UNKNOWN_STAGE)], {key})
    assert f"cause gone with a restart target=t model=llama engine=0 cause={SICK.causes[0].id}" in (
        said.text
    )
    assert "cause resolved" not in said.text


def test_what_cannot_be_read_ends_no_cause(said: pytest.LogCaptureFixture) -> None:
    changes = ChangeLog("t")
    verdicts = diagnoses(capture("restart_mid_run"))
    for diagnosis in verdicts:
        changes.diagnosed([diagnosis])
    assert "target_down" not in said.text, "that it is down is told as such"


def test_a_cause_that_an_unreadable_page_hides_goes_on_without_a_line(
    said: pytest.LogCaptureFixture,
) -> None:
    changes = ChangeLog("t")
    unread = replace(SICK, health="unknown", stage=UNKNOWN_STAGE, causes=(), values={})
    for t_s, diagnosis in ((0.0, SICK), (5.0, unread), (10.0, unread), (15.0, SICK)):
        changes.diagnosed([replace(diagnosis, t_s=1000.0 + t_s)])
    begun = [line for line in said.messages if line.startswith("cause")]
    assert len(begun) == len(SICK.causes)
    assert len(said.messages) == len(begun) + 1, "its stage is logged once, too"
    changes.diagnosed([replace(SICK, t_s=2000.0, causes=())])
    assert f"cause unwatched target=t model=llama engine=0 cause={SICK.causes[0].id}" in said.text


def flood(number: int, t_s: float) -> list[Verdict]:
    """A cycle of engines that nobody saw before, each with a cause."""
    return [
        replace(SICK, engine=f"{number}.{engine}", t_s=t_s, stage=UNKNOWN_STAGE)
        for engine in range(ENGINES_MAX)
    ]


def test_labels_that_change_with_every_scrape_do_not_fill_the_log(
    said: pytest.LogCaptureFixture,
) -> None:
    changes = ChangeLog("t")
    for number in range(10):
        changes.diagnosed(flood(number, 1000.0 + 5.0 * number))
    assert said.messages[-1].startswith("too many changes, suppressing further log lines")
    assert len(said.records) == LINES_MAX + 1
    said.clear()
    changes.diagnosed([replace(SICK, engine="a", t_s=1000.0 + LINES_S, stage=UNKNOWN_STAGE)])
    lines = [record.getMessage() for record in said.records]
    left_out = 10 * ENGINES_MAX - LINES_MAX
    assert lines[0] == f"log lines suppressed target=t lines={left_out}"
    assert lines[1].startswith("cause began target=t model=llama engine=a")


def test_no_more_engines_are_remembered_than_a_target_may_have() -> None:
    changes = ChangeLog("t")
    for number in range(5):
        changes.diagnosed(flood(number, 1000.0 + 5.0 * number))
    remembered = changes._books  # pyright: ignore[reportPrivateUsage]
    assert len(remembered) <= 2 * ENGINES_MAX


def test_a_clock_that_is_set_back_does_not_silence_the_log(said: pytest.LogCaptureFixture) -> None:
    changes = ChangeLog("t")
    changes.diagnosed(flood(0, 9000.0))
    said.clear()
    changes.diagnosed([replace(SICK, engine="a", t_s=1000.0, stage=UNKNOWN_STAGE)])
    assert "cause began target=t model=llama engine=a" in said.text
