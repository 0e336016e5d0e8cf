"""What the log is told of a target: each change once, and nothing else."""

from __future__ import annotations

import logging
from itertools import groupby

import pytest

from kneewatch.agent.daemon.changes import Changes
from kneewatch.collector.base import CollectError
from tests.agent.running import capture
from tests.recordings import diagnoses

ERROR = CollectError("connection refused", kind="refused", hint="start it")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def test_every_change_of_stage_and_causes_once(said: pytest.LogCaptureFixture) -> None:
    changes = Changes("t")
    found = diagnoses(capture("kv_pressure_cascade"))
    for diagnosis in found:
        changes.judged([diagnosis])
    stages = [one.stage.number for one in found if one.stage]
    expected = [number for number, _ in groupby([0, *stages])][1:]
    told = [record.args for record in said.records if record.msg.startswith("stage changes")]
    assert [args[4] for args in told if isinstance(args, tuple)] == expected
    begins = [record for record in said.records if record.msg.startswith("cause begins")]
    ends = [record for record in said.records if record.msg.startswith("cause ends")]
    assert 1 <= len(begins) <= 6
    assert len(begins) == len(ends), "it ended well"


def test_down_and_up(said: pytest.LogCaptureFixture) -> None:
    changes = Changes("t")
    for interval_s in (5.0, 5.0, 10.0, 20.0, 40.0, 55.0, 60.0, 50.0, 60.0):
        changes.scraped(ERROR, interval_s)
    for _ in range(3):
        changes.scraped(None, 5.0)
    changes.scraped(ERROR, 5.0)
    lines = [record.getMessage() for record in said.records]
    assert lines == [
        "target does not answer target=t error=connection refused try=start it",
        "target is left alone for longer target=t interval_s=10.0 failed=3",
        "target is left alone for longer target=t interval_s=20.0 failed=4",
        "target is left alone for longer target=t interval_s=40.0 failed=5",
        "target is left alone for longer target=t interval_s=55.0 failed=6",
        "target answers again target=t failed=9",
        "target does not answer target=t error=connection refused try=start it",
    ]


def test_what_cannot_be_read_ends_no_cause(said: pytest.LogCaptureFixture) -> None:
    changes = Changes("t")
    found = diagnoses(capture("restart_mid_run"))
    for diagnosis in found:
        changes.judged([diagnosis])
    assert "target_down" not in said.text, "that it is down is told as such"
