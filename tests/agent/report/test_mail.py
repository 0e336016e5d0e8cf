"""A report by mail: a short body that is read whole, the page attached."""

from __future__ import annotations

from email import policy
from email.parser import BytesParser
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kneewatch.agent.report.schedule import (
    TIERS_MOST,
    message_of,
    receivers_of,
    send_report,
    summary,
)
from kneewatch.agent.settings.effective import load
from kneewatch.reports.weekly.verdict import NOT_WATCHED
from tests.agent.notify.mail_server import MailServer
from tests.agent.report.receivers import team
from tests.reports.weekly.page import examples

CUT_BYTES = 102 * 1024
"""Mail programs show no more of a body (Gmail: "message clipped")."""


@pytest.mark.parametrize("tiers", [1, 200])
def test_the_body_is_short_and_the_page_attached(
    tmp_path: Path, mail: MailServer, tiers: int
) -> None:
    (tmp_path / "kneewatch.toml").write_text(f'report.send = ["team"]\n{team(mail)}')
    settings = load(file=tmp_path / "kneewatch.toml", environ={}, flags={})
    page = tmp_path / "report-1.html"
    page.write_text("<!doctype html>" + "x" * 3 * CUT_BYTES)
    assert send_report(receivers_of(settings), examples.many(tiers), page) == {}
    (taken,) = mail.mails
    parsed = BytesParser(policy=policy.default).parsebytes(taken.data)
    for kind in ("plain", "html"):
        body = parsed.get_body((kind,))
        assert body is not None
        assert len(body.as_bytes()) < CUT_BYTES / 2
    (attached,) = parsed.iter_attachments()
    assert attached.get_filename() == "report-1.html"
    assert attached.get_content_disposition() == "attachment"
    assert attached.get_content().strip() == page.read_text()


def test_of_many_tiers_the_worst_are_told() -> None:
    message = message_of(examples.many(200), "report-1.html")
    first, changes, *rest = (part.title for part in message.parts)
    assert (first, changes) == ("Do first", "Changed against the period before")
    assert len(message.parts[0].lines) == 3
    titles = list(rest)
    assert len(titles) == TIERS_MOST + 1
    assert titles[-1] == f"{200 - TIERS_MOST} more tiers: see the report"
    words = [title.rpartition(": ")[2] for title in titles[:-1]]
    assert words == sorted(words, key=["critical", "warning", "unknown", "info", "ok"].index)
    assert len(cast("Any", message.events[0])["verdicts"]) == 200, "programs get all of them"


def test_the_summary_is_what_the_message_says() -> None:
    report = examples.fleet()
    words = " ".join(summary(report, "text").split())
    assert words.startswith(
        "Weekly health report Mon 9 Nov to Sun 15 Nov 2026: 2 tiers: 1 critical, 1 healthy."
    )
    assert "--kv-cache-dtype fp8. Store the KV cache in fp8." in words
    assert "Run 1 replica instead of 2." in words
    assert "takes a restart of 4 engines; saves 8,760 USD a month" in words
    for part in message_of(report, "report-1.html").parts:
        assert part.title in words
        assert all(" ".join(line.plain().split()) in words for line in part.lines)
    many = examples.many(200)
    words = summary(many, "text")
    assert all(f"\n{tier.id}: " in words for tier in many.tiers), "all tiers"


@pytest.mark.parametrize("form", ["text", "markdown", "html"])
def test_what_is_the_same_for_all_tiers_stands_once(form: str) -> None:
    report = examples.many(4)
    same = replace(report.verdicts[0], money_text="unknown: no price")
    words = summary(
        replace(report, verdicts=[replace(same, tier=t.id) for t in report.tiers]), form
    )
    assert words.count("unknown: no price") == 1
    assert words.startswith("<!DOCTYPE html>") == (form == "html")


def test_a_week_that_nobody_watched_is_unknown_and_said_once() -> None:
    report = examples.fleet()
    unwatched = replace(
        report.verdicts[0],
        health="unknown",
        health_text=NOT_WATCHED,
        size_text=f"unknown: {NOT_WATCHED}",
        money_text=f"unknown: {NOT_WATCHED}",
    )
    verdicts = [replace(unwatched, tier=tier.id) for tier in report.tiers]
    message = message_of(replace(report, verdicts=verdicts))
    assert message.headline.endswith("2 tiers: 2 unknown."), "not: no incident"
    lines = [line.plain() for part in message.parts for line in part.lines]
    assert [line for line in lines if NOT_WATCHED in line] == [f"health: {NOT_WATCHED}"]
