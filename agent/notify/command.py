"""`kneewatch notify`: lists who gets what, and sends test messages. I/O edge."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import click
from msgspec.structs import replace

from kneewatch.agent.console import FOUND, OK
from kneewatch.agent.daemon.discovery import Discovery
from kneewatch.agent.notify.delivery import SendError, send
from kneewatch.agent.notify.events import NAMED_MAX
from kneewatch.agent.notify.message import TEST_S, Line, Message, Part, identity, link
from kneewatch.agent.notify.receivers import ALERTMANAGER, PAGERS, TEXTS, Mail, Receiver, receivers
from kneewatch.agent.settings.effective import Effective, Settings
from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.fleet.verdict import FLEET
from kneewatch.reports.lines import printable, wrapped
from kneewatch.rules.formatting import duration, listed, plural, stated_duration
from kneewatch.rules.rule import Severity

STATUS = "test"
NOBODY = (
    "Nobody is notified: the settings have no [[notify]] table. Write one (kind, url_file, "
    "triage_url; see alerting.md), and give the file with --config."
)


Labels = Mapping[str, str]


def notify(
    arguments: Sequence[str], settings: Settings, *, prometheus: str | None, test: bool
) -> int:
    """List who gets what, or send each receiver a test message. Returns the exit status: 1 if a
    critical finding of a target reaches nobody, or a test message was not delivered."""
    configured = receivers(settings)
    if not configured:
        click.echo(NOBODY)
        return FOUND
    if test:
        delivered = [_test(receiver) for receiver in configured]
        return OK if all(delivered) else FOUND
    targets = _targets(arguments, settings)
    if prometheus is not None:
        targets[FLEET] = {}
    reports = set[str](settings["report.send"] or ())
    for receiver in configured:
        click.echo(f"{printable(receiver.name)}: {receiver.kind} at {_place(receiver)}")
        for line in (*_content(receiver, targets, reports=receiver.name in reports), ""):
            click.echo("\n".join(wrapped(line, indent=2)))
    click.echo("Not sent to anybody")
    usable = [receiver for receiver in configured if not _mistake(receiver)]
    for line in _unsent_lines(usable, targets):
        click.echo("\n".join(wrapped(line, indent=2)))
    is_covered = all(_is_sent(usable, Severity.CRITICAL, *target) for target in targets.items())
    return OK if usable and is_covered else FOUND


def _targets(arguments: Sequence[str], settings: Settings) -> dict[str, Labels]:
    """The labels of the targets, by name. Pods are left out: listing them needs the cluster."""
    without_pods = settings.with_values({"kubernetes.pods": Effective(None, "default")})
    discovery = Discovery(arguments, without_pods, may_be_empty=True)
    return {spec.name: spec.labels for spec in discovery.specs()}


# --- Who gets what --------------------------------------------------------------------------------


def _content(receiver: Receiver, targets: Mapping[str, Labels], *, reports: bool) -> Iterator[str]:
    if mistake := _mistake(receiver):
        yield f"GETS NOTHING: `run` does not start: {mistake}"
    yield f"findings: {_findings(receiver)}"
    if receiver.own:
        again = f"every {stated_duration(receiver.repeat_s)}" if receiver.repeat_s else "never"
        yield (
            "when: at any hour; a problem begins, gets worse, ends (absent for "
            f"{duration(receiver.hold_s)}); repeated {again}"
        )
    yield f"targets: {_matched(receiver, targets)}"
    if receiver.alerts:
        yield "also: Alertmanager's alerts posted to /api/v1/alerts, with a diagnosis"
    if reports:
        yield "also: the reports that `run` makes"
    if not receiver.triage_url:
        yield "links: none, set triage_url"


def _findings(receiver: Receiver) -> str:
    if not receiver.own:
        return "none (own = false)"
    return "critical" if receiver.severity == Severity.CRITICAL else "warning and critical"


def _matched(receiver: Receiver, targets: Mapping[str, Labels]) -> str:
    labels = [f"{name}={pattern}" for name, pattern in receiver.labels.items()]
    filters = " and ".join(
        words
        for words in (
            f"named {' or '.join(receiver.targets)}" if receiver.targets else "",
            f"with labels {', '.join(labels)}" if labels else "",
        )
        if words
    )
    if not targets:
        return f"{filters or 'all'} (the settings name none)"
    matched = [name for name, labels in targets.items() if receiver.matches(name, labels)]
    if not matched:
        return f"{filters}: NONE of {plural(len(targets), 'target')}"
    return f"{filters or 'all'}: {listed(matched, NAMED_MAX)}"


def _place(receiver: Receiver) -> str:
    """The receiver's address without path and query, which may be secret."""
    endpoint = receiver.endpoint
    if isinstance(endpoint, Mail):
        return f"{endpoint.host}:{endpoint.port} to {', '.join(endpoint.recipients)}"
    try:
        return replace(endpoint.address(), path="").url
    except SettingsError:
        return "an unknown address"


def _mistake(receiver: Receiver) -> str:
    """Why the receiver's secrets cannot be used; empty if they can."""
    try:
        receiver.check()
    except SettingsError as error:
        return str(error)
    return ""


def _is_sent(usable: Sequence[Receiver], severity: Severity, target: str, labels: Labels) -> bool:
    return any(
        receiver.own and receiver.severity <= severity and receiver.matches(target, labels)
        for receiver in usable
    )


def _unsent_lines(usable: Sequence[Receiver], targets: Mapping[str, Labels]) -> Iterator[str]:
    for severity, way_out in (
        (Severity.CRITICAL, "NOBODY IS PAGED: add a receiver whose targets and labels match"),
        (Severity.WARNING, 'a receiver with severity = "warning" gets them'),
    ):
        unsent = [each for each in targets.items() if not _is_sent(usable, severity, *each)]
        if not targets and not any(each.own and each.severity <= severity for each in usable):
            yield f"{severity.word} findings ({way_out})"
        if unsent:
            everywhere = len(unsent) == len(targets)
            who = "all targets" if everywhere else listed([name for name, _ in unsent], NAMED_MAX)
            yield f"{severity.word} findings of {who} ({way_out})"
    yield "info findings, and a warning of a queue that ends within its first minute"


# --- Test messages --------------------------------------------------------------------------------


def _test(receiver: Receiver) -> bool:
    """Send a test message and print the result. Returns whether it was delivered."""
    now_s = time.time()
    try:
        message = _test_message(receiver, now_s)
        send(receiver, message, timeout_s=receiver.timeout_s, now_s=now_s)
    except SendError as error:
        click.echo(f"{printable(receiver.name)}: NOT DELIVERED: {error}")
        if error.hint:
            click.echo(f"  try: {error.hint}")
        return False
    click.echo(
        f"{printable(receiver.name)}: delivered to {_place(receiver)} in "
        f"{duration(time.time() - now_s)}{_after(receiver)}"
    )
    return True


def _after(receiver: Receiver) -> str:
    if receiver.kind in PAGERS:
        return " (an incident, closed at once; it may have paged whoever is on call)"
    if receiver.kind != ALERTMANAGER:
        return ""
    return (
        f" (alert KneewatchTest, {receiver.severity.word}, ends in {duration(TEST_S)}; who is "
        "notified depends on its routes)"
    )


def _test_message(receiver: Receiver, now_s: float) -> Message:
    line = Line("this receiver gets", f"{_findings(receiver)} findings, with what to do first")
    if not receiver.own:
        line = Line("this receiver gets", "no findings of kneewatch's own (own = false)")
    return Message(
        id=identity(STATUS, receiver.name, now_s),
        status=STATUS,
        # The mildest that the receiver gets, so that the route is that of a real incident.
        severity=(Severity.INFO if receiver.kind in TEXTS else receiver.severity).word,
        t_s=now_s,
        headline=f"TEST: kneewatch reaches {receiver.name}. Nothing is wrong",
        parts=(
            Part("Sent by `kneewatch notify --test`", (line,), link(receiver.triage_url, FLEET)),
        ),
    )
