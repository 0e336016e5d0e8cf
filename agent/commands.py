"""What the commands do, apart from reading their flags."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from datetime import datetime
from importlib.resources import files
from pathlib import Path

import click
import orjson
from click.shell_completion import get_completion_class

from kneewatch.agent.settings import Settings
from kneewatch.agent.source import TargetStream, capture_name, ticks
from kneewatch.collector.address import metrics_url
from kneewatch.collector.base import CaptureError, CollectError, SettingsError
from kneewatch.collector.capture import CaptureReader, CaptureWriter, is_capture
from kneewatch.collector.entries import Entry
from kneewatch.collector.fetch import Fetcher
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.diagnose.monitor import Catalogue
from kneewatch.diagnose.profile import Profile
from kneewatch.reports import timeline
from kneewatch.reports.document import document
from kneewatch.reports.text import Style, markdown, text
from kneewatch.rules.model import Severity

DEMO = "kv_pressure_cascade.jsonl.gz"
DEMO_WINDOW_S = 15.0
"""The shipped recording's phases last half a minute each: a window of a minute would blur them."""


def diagnose(target: str, settings: Settings, *, form: str, gpu_metrics: str | None) -> int:
    """Watch a target, then print the diagnosis. Returns the exit status."""
    if is_capture(target):
        profile = settings.profile()
        stream = TargetStream(capture_name(target), profile, settings.limits())
        last: list[Diagnosis] = []
        for entry in _entries([target], None, None):
            last = stream.replay(entry[1]) or last
        return _print(last, form)
    watch_s, window_s = settings["watch_s"], settings["window_s"]
    profile = settings.profile(window_s=min(watch_s, window_s))
    url = metrics_url(target)
    stream = TargetStream(target, profile, settings.limits())
    with closing(Fetcher(url, settings.fetch())) as fetcher:
        return _print(_watch(stream, fetcher, settings), form)


def _watch(stream: TargetStream, fetcher: Fetcher, settings: Settings) -> list[Diagnosis]:
    last: list[Diagnosis] = []
    seen = False
    for elapsed_s in ticks(settings["interval_s"], settings["watch_s"]):
        last = stream.scrape(fetcher) or last
        seen = seen or any(diagnosis.stage is not None for diagnosis in last)
        if not seen and stream.monitor.last_error is not None:
            # A server that has never answered is a wrong address, not an incident: say so at once.
            raise stream.monitor.last_error
        _progress(last, elapsed_s, settings["watch_s"])
    _progress([], 0.0, 0.0)
    return last


def _progress(diagnoses: Sequence[Diagnosis], elapsed_s: float, watch_s: float) -> None:
    if not sys.stderr.isatty():
        return
    line = timeline.progress(diagnoses, elapsed_s, watch_s) if diagnoses else ""
    click.echo(f"\r\x1b[K{line}", nl=False, err=True)


def replay(
    captures: Sequence[str],
    settings: Settings,
    *,
    form: str,
    from_time: str | None,
    to_time: str | None,
) -> int:
    """Print the diagnosis of every recorded scrape. Returns the exit status."""
    found = _replayed(captures, settings.profile(), settings, _moment(from_time), _moment(to_time))
    return _tell(found, form)


def _replayed(
    captures: Sequence[str],
    profile: Profile,
    settings: Settings,
    from_s: float | None,
    to_s: float | None,
) -> Iterator[list[Diagnosis]]:
    catalogue, limits = Catalogue.of(profile), settings.limits()
    streams = [TargetStream(capture_name(path), profile, limits, catalogue) for path in captures]
    for at, entry in _entries(captures, from_s, to_s):
        yield streams[at].replay(entry)


def _entries(
    captures: Sequence[str], from_s: float | None, to_s: float | None
) -> Iterator[tuple[int, Entry]]:
    """Entries of several captures in the order of time, each with its capture's index."""
    readers = [CaptureReader(path, from_s=from_s, to_s=to_s) for path in captures]
    if len(readers) == 1:
        merged: Iterable[tuple[int, Entry]] = ((0, entry) for entry in readers[0])
    else:
        numbered = [_numbered(at, entries) for at, entries in enumerate(readers)]
        merged = heapq.merge(*numbered, key=lambda item: item[1].t_s)
    yield from merged
    for entries in readers:
        if entries.damaged:
            click.echo(
                f"kneewatch: {entries.path}: {entries.damaged} damaged entries left out; "
                f"the first: {entries.first_damage}",
                err=True,
            )


def _numbered(at: int, entries: Iterable[Entry]) -> Iterator[tuple[int, Entry]]:
    return ((at, entry) for entry in entries)


def _tell(found: Iterable[list[Diagnosis]], form: str) -> int:
    if form == "json":
        return _tell_json(found)
    told = timeline.Timeline(_style())
    for diagnoses in found:
        for line in told.lines(diagnoses):
            click.echo(line)
    if not told.last:
        raise CaptureError("no scrape in the time asked for")
    click.echo(told.close(markdown if form == "markdown" else lambda ds: text(ds, _style())))
    return _status(told.worst)


def _tell_json(found: Iterable[list[Diagnosis]]) -> int:
    worst, out, told = Severity.OK, sys.stdout.buffer, False
    for diagnoses in found:
        for diagnosis in diagnoses:
            told = True
            worst = max(worst, diagnosis.severity)
            out.write(orjson.dumps(document(diagnosis), option=orjson.OPT_APPEND_NEWLINE))
    out.flush()
    if not told:
        raise CaptureError("no scrape in the time asked for")
    return _status(worst)


def _print(diagnoses: Sequence[Diagnosis], form: str) -> int:
    if not diagnoses:
        raise CaptureError("no scrape could be judged")
    if form == "json":
        for diagnosis in diagnoses:
            click.echo(orjson.dumps(document(diagnosis)).decode())
    else:
        click.echo(markdown(diagnoses) if form == "markdown" else text(diagnoses, _style()))
    return _status(max(diagnosis.severity for diagnosis in diagnoses))


def _status(worst: Severity) -> int:
    return 1 if worst >= Severity.WARNING else 0


def demo(settings: Settings, *, form: str) -> int:
    """Replay the shipped recording. Returns the exit status."""
    recording = files("kneewatch.agent") / "demo" / DEMO
    window_s = min(settings["window_s"], DEMO_WINDOW_S)
    profile = settings.profile(window_s=window_s)
    found = _replayed([str(recording)], profile, settings, None, None)
    if form == "text":
        click.echo(
            "A real vLLM 0.32.0 server on CPU, 160 KV blocks: healthy, nearly full, preempting, "
            f"queueing, drained.\nScraped every 2 s, judged with a window of {window_s:.0f} s.\n"
        )
    return _tell(found, form)


def record(url: str, file: Path, settings: Settings, *, for_s: float | None) -> int:
    """Write a capture until the time is up or Ctrl-C. Returns the exit status."""
    pages = failures = 0
    with (
        closing(Fetcher(metrics_url(url), settings.fetch())) as fetcher,
        CaptureWriter(file) as out,
    ):
        try:
            for _ in ticks(settings["interval_s"], for_s):
                entry = _recorded(fetcher)
                if entry.error and not pages + failures:
                    click.echo(f"kneewatch: {entry.error} (recorded; going on)", err=True)
                out.write(entry)
                pages, failures = pages + (not entry.error), failures + bool(entry.error)
        except KeyboardInterrupt:
            pass
    click.echo(f"kneewatch: {file}: {pages} pages, {failures} failed scrapes", err=True)
    return 0 if pages else 2


def _recorded(fetcher: Fetcher) -> Entry:
    from time import time  # the clock belongs to this edge alone

    t_s = round(time(), 3)
    try:
        fetched = fetcher.get()
    except CollectError as error:
        return Entry(t_s, None, str(error))
    body = fetched.body.decode("utf-8", "replace")
    return Entry(t_s, body, "", fetched.status, fetched.content_type)


def config(settings: Settings) -> int:
    """Print effective settings as TOML with their origins. Returns the exit status."""
    for setting, effective in settings.rows():
        shown = "(not set)" if effective.value is None else orjson.dumps(effective.value).decode()
        click.echo(f"{setting.key} = {shown}  # {effective.origin}; {setting.help}")
    for rule, bounds in settings.thresholds.items():
        for severity, threshold in bounds.items():
            click.echo(f"rules.{rule}.{severity} = {threshold}  # file")
    settings.profile().rules()
    return 0


def completion(cli: click.Command, shell: str) -> int:
    """Print a shell completion script. Returns the exit status."""
    made = get_completion_class(shell)
    if made is None:
        raise SettingsError(f"no completion for {shell}")
    click.echo(made(cli, {}, "kneewatch", "_KNEEWATCH_COMPLETE").source())
    return 0


def _moment(text_: str | None) -> float | None:
    if text_ is None:
        return None
    try:
        return float(text_)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text_).timestamp()
    except ValueError as exc:
        raise SettingsError(f"{text_!r} is neither unix seconds nor an ISO 8601 time") from exc


def _style() -> Style:
    import os

    return Style(colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
