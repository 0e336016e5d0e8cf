"""`kneewatch inspect`: prints the facts about a server. I/O edge."""

from __future__ import annotations

import time
from contextlib import closing

import click
import msgspec

from kneewatch.agent.captures import capture_name
from kneewatch.agent.console import OK, say
from kneewatch.agent.printing import style
from kneewatch.agent.server.log import facts_of_log
from kneewatch.agent.server.watch import page_watch, server_watch
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stated_deployment import stated
from kneewatch.agent.stream import TargetStream
from kneewatch.agent.targets import target_name
from kneewatch.collector.captures.capture import CaptureReader, is_capture
from kneewatch.collector.errors import CaptureError
from kneewatch.collector.http.address import metrics_url
from kneewatch.collector.http.fetch import Fetcher
from kneewatch.diagnose.deployment.deployment import stated_of
from kneewatch.diagnose.verdict import Server
from kneewatch.reports.lines import printable, wrapped
from kneewatch.rules.formatting import span

SCHEMA = "kneewatch.server/1"


def inspect(target: str, settings: Settings, *, form: str) -> int:
    """Print the facts about a server, after one scrape or from the last page of a capture. If the
    page cannot be read, the facts come from the log alone. Returns the exit status.

    Raises:
        CollectError: the page cannot be read, and no log is known.
        CaptureError: the capture has no readable page.
    """
    played = is_capture(target)
    name = capture_name(target) if played else target_name(target)
    stream = TargetStream(name, settings.profile(stated=stated(settings)), settings.limits())
    now_s = _read_capture(target, stream, settings) if played else _read(target, stream, settings)
    facts = stream.monitor.server
    server = Server() if facts is None else facts.at(now_s)
    if form == "json":
        document = {
            "schema": SCHEMA,
            "t": round(now_s, 3),
            "target": name,
            **msgspec.to_builtins(server),
        }
        click.echo(msgspec.json.encode(document).decode())
    else:
        click.echo("\n".join(_lines(name, server)))
    return OK


def _read(target: str, stream: TargetStream, settings: Settings) -> float:
    stream.server = watch = server_watch(target, settings) or page_watch(target, settings)
    with closing(Fetcher(metrics_url(target), settings.fetch())) as fetcher:
        stream.scrape(fetcher)
    error = stream.monitor.last_error
    log = watch.log
    if error is not None and (log is None or not log.log.facts):
        raise error
    now_s = time.time()
    if error is not None and log is not None:
        say(f"{error}: only the settings and {log.path} are used")
        stated = stated_of(stream.monitor.profile.stated)
        stream.monitor.set_server(*facts_of_log(stated, log.log, now_s))
    return now_s


def _read_capture(path: str, stream: TargetStream, settings: Settings) -> float:
    stream.server = page_watch(path, settings)
    last_s: float | None = None
    for entry in CaptureReader(path):
        stream.replay(entry)
        if stream.monitor.last_error is None:
            last_s = entry.t_s
    if last_s is None:
        raise CaptureError(f"{path}: no readable page")
    return last_s


def _lines(name: str, server: Server) -> list[str]:
    names_width = max((len(fact.name) for fact in server.facts), default=0)
    sources_width = max((len(fact.source) for fact in server.facts), default=0)
    width = style().width
    lines = [printable(name), ""]
    for fact in server.facts:
        age = span(fact.age_s or 0.0)
        left = f"{fact.name:<{names_width}}  {fact.source:<{sources_width}}  {age:>6}  "
        lines += wrapped(
            printable(left + str(fact.value)), width=max(width, len(left) + 20), more=len(left)
        )
    for heading, rows in (
        ("notes:", server.notes),
        ("unknown:", [f"{fact.name}: {fact.supply}" for fact in server.unknown]),
    ):
        if rows:
            lines += ["", heading]
        for row in rows:
            lines += wrapped(printable(row), width=width, indent=3)
    return lines
