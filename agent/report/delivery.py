"""Sends a report to receivers: the verdicts as a message, the file attached to mail. I/O edge.

The page is an attachment, not the body: mail programs cut bodies of more than about 100 kB.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from kneewatch.agent.notify.delivery import SendError, deliver, post
from kneewatch.agent.notify.message import Line, Message, Part, email, identity, slack, webhook
from kneewatch.agent.notify.receivers import ALERTMANAGER, SLACK, Receiver, Web, receivers
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.errors import SettingsError
from kneewatch.reports.formatting import plural

if TYPE_CHECKING:
    from kneewatch.reports.weekly.report import Verdict, WeeklyReport

STATUS = "report"
TIERS_MOST = 12
"""A message has at most this many verdicts, the worst ones; the report has all."""

UNKNOWN = 1.5
"""The rank of unknown health: above info, because somebody must look, and below warning."""

WAITS_S = (5.0, 60.0)
"""Pauses before the second and the third attempt."""


def receivers_of(settings: Settings) -> tuple[Receiver, ...]:
    """The receivers that report.send names.

    Raises:
        SettingsError: no receiver has that name, or it is an Alertmanager.
    """
    by_name = {receiver.name: receiver for receiver in receivers(settings)}
    for name in settings["report.send"] or ():
        if name not in by_name:
            there = ", ".join(by_name) or "none"
            raise SettingsError(
                f"{settings.origin('report.send')}: report.send: no receiver is named {name!r}; "
                f"the [[notify]] tables have {there}"
            )
        if by_name[name].kind == ALERTMANAGER:
            raise SettingsError(
                f"{settings.origin('report.send')}: report.send: {name!r} is an Alertmanager, "
                "which accepts alerts but no reports"
            )
    return tuple(by_name[name] for name in dict.fromkeys(settings["report.send"] or ()))


def message_of(report: WeeklyReport, file: str) -> Message:
    """The message about a report: one part per tier, the worst first."""
    # Lazy: the daemon knows who gets reports, and makes none itself.
    from kneewatch.reports.weekly.report import document
    from kneewatch.reports.weekly.verdict import SEVERITY

    zone = ZoneInfo(report.timezone)
    first, last = (
        datetime.fromtimestamp(t_s, zone).strftime("%-d %b")
        for t_s in (report.period.from_s, report.period.to_s)
    )
    serious = sum(incident.severity in ("warning", "critical") for incident in report.incidents)
    incidents = plural(serious, "incident") if serious else "no incident"
    order = sorted(report.verdicts, key=lambda verdict: -SEVERITY.get(verdict.health, UNKNOWN))
    parts = tuple(_part(verdict) for verdict in order[:TIERS_MOST])
    if len(order) > TIERS_MOST:
        parts = (*parts, Part(f"{plural(len(order) - TIERS_MOST, 'more tier')}: see the report"))
    notices = tuple(Line("", notice) for notice in report.notices)
    if notices:
        parts = (Part("Before you read", notices), *parts)
    return Message(
        id=identity(STATUS, report.period.from_s, report.period.to_s, report.made_s),
        status=STATUS,
        severity=report.severity,
        t_s=report.made_s,
        headline=f"Report {first} to {last}: {incidents}",
        parts=parts,
        more=f"The report is {file}: attached to a mail, open it in a browser.",
        events=({"verdicts": document(report)["verdicts"], "file": file},),
    )


def _part(verdict: Verdict) -> Part:
    lines = [
        Line("health", verdict.health_text),
        Line("size", verdict.size_text),
        Line("money", verdict.money_text),
    ]
    if verdict.action is not None:
        flags = " ".join(
            f"{change.flag} {change.after}" for change in verdict.action.changes
            if change.flag.startswith("--")
        )  # fmt: skip
        lines.append(Line("do", verdict.action.text, flags))
    return Part(f"{verdict.tier}: {verdict.health}", tuple(lines))


def send(
    to: Sequence[Receiver], report: WeeklyReport, file: Path, *, waits_s: Sequence[float] = WAITS_S
) -> dict[str, str]:
    """Send a report to each receiver, with up to three attempts. Returns the error of each receiver
    that did not get it."""
    message = message_of(report, file.name)
    failed: dict[str, str] = {}
    for receiver in to:
        for wait_s in (*waits_s, None):
            try:
                _hand_over(receiver, message, file)
                failed.pop(receiver.name, None)
                break
            except SendError as exc:
                failed[receiver.name] = str(exc)
                if exc.final or wait_s is None:
                    break
                time.sleep(min(exc.after_s or wait_s, max(waits_s)))
    return failed


def _hand_over(receiver: Receiver, message: Message, file: Path) -> None:
    endpoint = receiver.endpoint
    if isinstance(endpoint, Web):
        body = slack(message) if receiver.kind == SLACK else webhook(message)
        post(endpoint, body, timeout_s=receiver.timeout_s, now_s=message.t_s)
        return
    mail = email(message, sender=endpoint.sender, recipients=endpoint.recipients)
    mail.add_attachment(file.read_bytes(), maintype="text", subtype="html", filename=file.name)
    deliver(endpoint, mail, timeout_s=receiver.timeout_s)
