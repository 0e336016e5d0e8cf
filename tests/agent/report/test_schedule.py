"""Reports on a schedule: when they are due, who makes them, where they are kept, who gets them."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from kneewatch.agent.report.command import prune
from kneewatch.agent.report.schedule import CHECK_S, NEVER_S, ReportJob, cron_of, with_names
from kneewatch.agent.settings.effective import Settings, load
from kneewatch.collector.errors import SettingsError
from tests.agent.notify.mail_server import MailServer
from tests.agent.notify.web import Reply, Taker
from tests.agent.report.receivers import team
from tests.waiting import PATIENCE_S, until
from tests.weeks import DAY_S, START_S

TO_S = START_S + 7 * DAY_S
BERLIN = ZoneInfo("Europe/Berlin")


def settings(folder: Path, text: str) -> Settings:
    """Settings of a file."""
    file = folder / "kneewatch.toml"
    file.write_text(text)
    return load(file=file, environ={}, flags={})


def due(folder: Path, expression: str, after: datetime, zone: str = "Europe/Berlin") -> datetime:
    """When a report is due after a time."""
    stated = settings(folder, f'[report]\ncron = "{expression}"\ntimezone = "{zone}"\n')
    cron = cron_of(stated)
    assert cron is not None
    return datetime.fromtimestamp(cron.after_s(after.timestamp()), ZoneInfo(zone))


@pytest.mark.parametrize(
    ("expression", "after", "wanted"),
    [
        ("0 6 * * mon", "2026-11-18T12:00", "2026-11-23T06:00"),
        ("0 6 * * 1", "2026-11-18T12:00", "2026-11-23T06:00"),
        ("30 7 * * 0", "2026-11-18T12:00", "2026-11-22T07:30"),
        ("30 7 * * 7", "2026-11-18T12:00", "2026-11-22T07:30"),
        ("0 6 1 * *", "2026-11-18T12:00", "2026-12-01T06:00"),
        pytest.param("0 6 * * mon", "2026-10-25T12:00", "2026-10-26T06:00", id="clocks went back"),
        pytest.param(
            "30 2 * * sun", "2026-03-23T00:00", "2026-03-29T03:30", id="a time that is left out"
        ),
    ],
)
def test_when_it_is_due(tmp_path: Path, expression: str, after: str, wanted: str) -> None:
    since = datetime.fromisoformat(after).replace(tzinfo=BERLIN)
    due_at = due(tmp_path, expression, since)
    assert due_at == datetime.fromisoformat(wanted).replace(tzinfo=BERLIN)


@pytest.mark.parametrize(
    ("expression", "after", "wanted"),
    [
        pytest.param("30 2 * * *", "00:31", "2026-10-26T01:30Z", id="once a day"),
        pytest.param("30 1-3 * * *", "00:31", "2026-10-25T02:30Z", id="at hours that are named"),
        pytest.param("0 3 * * *", "01:10", "2026-10-25T02:00Z", id="asked in the hour repeated"),
        pytest.param("*/30 * * * *", "00:31", "2026-10-25T01:00Z", id="every hour"),
        pytest.param("30 */2 * * *", "00:31", "2026-10-25T01:30Z", id="every other hour"),
    ],
)
def test_a_time_that_comes_twice_is_due_once(
    tmp_path: Path, expression: str, after: str, wanted: str
) -> None:
    """At 03:00, which is 01:00 UTC, the clock in Berlin goes back to 02:00."""
    due_at = due(tmp_path, expression, datetime.fromisoformat(f"2026-10-25T{after}Z"))
    assert due_at.timestamp() == datetime.fromisoformat(wanted).timestamp()


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ("*", "*"), ("1-5", "mon,tue,wed,thu,fri"), ("5-7", "sun,fri,sat"), ("sun-tue",
        "sun,mon,tue"), ("*/2", "sun,tue,thu,sat"), ("1,3", "mon,wed"), ("FRI", "fri"),
        ("sat-mon", "sun,mon,sat"),
    ],
)  # fmt: skip
def test_weekdays_are_counted_as_cron_does(field: str, wanted: str) -> None:
    assert with_names(f"0 6 * * {field}") == f"0 6 * * {wanted}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('cron = "0 6 * *"', "4 fields instead of 5"),
        ('cron = "61 6 * * mon"', "not a cron expression"),
        ('cron = "0 0 30 2 *"', "never fires"),
        ('cron = "0 6 * * someday"', "'someday' is not a weekday"),
        ('cron = "0 6 * * mon"\ntimezone = "Mars/Olympus"', "not a time zone"),
        ('cron = "0 6 * * mon"\nsend = ["nobody"]', "no receiver is named 'nobody'"),
    ],
)
def test_what_cannot_be_planned_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        ReportJob(settings(tmp_path, f"[report]\n{text}\n"), tmp_path / "x.db")


def test_without_the_libraries_a_plan_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SettingsError, match=r"kneewatch.toml.*report.cron.*pandas.*EXTRAS=\[rep"):
        cron_of(settings(tmp_path, '[report]\ncron = "0 6 * * mon"\n'))
    assert cron_of(settings(tmp_path, "")) is None


def test_without_an_expression_nothing_is_planned(tmp_path: Path) -> None:
    job = ReportJob(settings(tmp_path, ""), tmp_path / "x.db")
    assert (job.due_s, job.cycle()) == (NEVER_S, CHECK_S)


def test_a_clock_that_is_set_delays_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports are due each day at 06:00; the clock is set back by a day, forward by three."""
    made = list[float]()
    now = {"s": datetime(2026, 11, 18, 5, 59, tzinfo=UTC).timestamp()}
    stated = settings(tmp_path, '[report]\ncron = "0 6 * * *"\ntimezone = "UTC"\n')
    job = ReportJob(stated, tmp_path / "x.db", clock=lambda: now["s"])
    monkeypatch.setattr(job, "make", lambda: made.append(now["s"]))
    began_s = now["s"]
    for passed_s, due_in_s in (
        (0.0, CHECK_S), (50.0, 10.0), (10.0, CHECK_S), (-DAY_S - 65.0, CHECK_S), (65.0, CHECK_S),
        (3 * DAY_S, CHECK_S), (60.0, CHECK_S),
    ):  # fmt: skip
        now["s"] += passed_s
        assert job.cycle() == due_in_s
    day_before = began_s - DAY_S + 60.0
    assert made == [began_s + 60.0, day_before, day_before + 3 * DAY_S]


@pytest.mark.parametrize("before_s", [10.0, 0.9, 0.0, -5.0])
def test_a_reload_around_the_time_of_a_report_skips_and_repeats_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_s: float
) -> None:
    """The report of 06:00 may still wait for its turn when the settings are read again."""
    made = list[float]()
    due_s = datetime(2026, 11, 18, 6, tzinfo=UTC).timestamp()
    now = {"s": due_s - 60.0}
    stated = settings(tmp_path, '[report]\ncron = "0 6 * * *"\ntimezone = "UTC"\n')
    job = ReportJob(stated, tmp_path / "x.db", clock=lambda: now["s"])
    monkeypatch.setattr(job, "make", lambda: made.append(now["s"]))
    now["s"] = due_s - before_s
    job.adopt(stated)
    now["s"] = due_s + 5.5
    job.cycle()
    job.adopt(stated)
    job.cycle()
    assert made == [due_s + 5.5]
    assert job.due_s == due_s + DAY_S


@pytest.fixture
def web() -> Iterator[Taker]:
    taker = Taker(Reply())
    yield taker
    taker.close()


def test_a_report_is_made_kept_and_sent(
    made_store: Path, tmp_path: Path, mail: MailServer, web: Taker
) -> None:
    folder = tmp_path / "kept"
    stated = settings(
        tmp_path,
        f"""
        slo.ttft_p99_s = 5.0
        [report]
        cron = "0 6 * * mon"
        folder = "{folder}"
        timezone = "Europe/Berlin"
        send = ["team", "chat"]
        {team(mail)}
        [[notify]]
        kind = "webhook"
        name = "chat"
        url = "{web.url}"
        """,
    )
    job = ReportJob(stated, made_store, clock=lambda: TO_S)
    assert f"{datetime.fromtimestamp(job.due_s, BERLIN):%a %H:%M}" == "Mon 06:00"
    job.due_s = TO_S
    job.cycle()
    until(lambda: web.posts and mail.mails)
    page, data = folder / "report-2026-11-16-0100.html", folder / "report-2026-11-16-0100.json"
    assert json.loads(data.read_text())["schema"] == "kneewatch.report/1"
    assert "<html" in page.read_text()
    (post,) = web.posts
    assert post.body["status"] == "report"
    assert post.body["severity"] == "critical"
    assert len(post.body["events"][0]["verdicts"]) == 3
    (taken,) = mail.mails
    assert taken.recipients == ["owner@example.org"]
    assert b"report-2026-11-16-0100.html" in taken.data
    assert b"Subject: [kneewatch] Weekly health report Mon 9 Nov 2026" in taken.data
    assert b"3 tiers: 2 critical, 1 warning." in taken.data


def test_what_went_wrong_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = ReportJob(settings(tmp_path, ""), tmp_path / "none.db")
    job.make()
    assert "report failed" in caplog.text
    assert "none.db" in caplog.text


def test_one_that_takes_too_long_is_ended(
    made_store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = ReportJob(settings(tmp_path, ""), made_store, limit_s=0.05)
    job.make()
    assert "report timed out" in caplog.text


def test_the_end_does_not_wait_for_a_report(
    made_store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = ReportJob(settings(tmp_path, ""), made_store)
    working = threading.Thread(target=job.make)
    with caplog.at_level(logging.INFO):
        working.start()
        time.sleep(0.2)
        job.stop()
        working.join(PATIENCE_S)
        assert not working.is_alive()
        job.make()
    assert not caplog.records, "what was stopped is no error, and nothing begins any more"


def test_the_newest_reports_stay(tmp_path: Path) -> None:
    for day in range(10, 20):
        for ending in ("html", "json"):
            (tmp_path / f"report-2026-11-{day}-0600.{ending}").write_text("x")
    (tmp_path / "notes.html").write_text("mine")
    prune(tmp_path, keep=3)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["notes.html", *(f"report-2026-11-{day}-0600.{ending}" for day in (17, 18, 19)
                    for ending in ("html", "json"))]  # fmt: skip
