"""The `watch` command: feeds for targets or a daemon, and the screen. I/O edge."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kneewatch.agent.console import NO_DATA
from kneewatch.agent.printing import status
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stated_deployment import stated
from kneewatch.agent.stream import TargetStream, capture_names, gpu_stream
from kneewatch.agent.targets import target_name
from kneewatch.agent.watch.feeds import (
    PATH,
    Feed,
    FeedThreads,
    GpuFeed,
    Pace,
    RecordingFeed,
    ServerFeed,
    daemon_feed,
)
from kneewatch.agent.watch.glyphs import glyphs_for
from kneewatch.agent.watch.screen import View
from kneewatch.agent.watch.state import Row, ScreenState
from kneewatch.collector.captures.capture import CaptureReader, is_capture
from kneewatch.collector.errors import SettingsError
from kneewatch.collector.http.address import metrics_url
from kneewatch.collector.http.fetch import Fetcher
from kneewatch.diagnose.doc_links import OWN_DOCS
from kneewatch.diagnose.engine.engine_monitor import SCRAPES_IN_WINDOW, Catalogue
from kneewatch.rules.rule import Severity


def run(
    targets: Sequence[str],
    settings: Settings,
    *,
    attach: str | None,
    token_file: Path | None,
    speed: float,
) -> int:
    """Show targets, or a daemon's targets, until the user quits. Returns the exit status.

    Raises:
        SettingsError: there is nothing to show, or no terminal to show it on.
        CaptureError: a recording cannot be read.
        CollectError: a target cannot be a server.
    """
    if (attach is None) == (not targets):
        raise SettingsError(
            "nothing to watch: name servers or captures, or a daemon with --attach URL"
            if attach is None
            else "--attach shows the daemon's own targets: do not name targets as well"
        )
    feeds = target_feeds(targets, settings)
    where, docs_url = "", settings.docs_url
    if attach is not None:
        daemon = daemon_feed(attach, settings, token_file)
        feeds, where = [daemon], f"daemon {daemon.name}"
        docs_url = docs_url or f"{daemon.name.removesuffix(PATH)}{OWN_DOCS}"
    check_terminal()
    return show(feeds, Pace(speed), where=where, docs_url=docs_url)


def check_terminal() -> None:
    """Check that stdin and stdout are a terminal.

    Raises:
        SettingsError: they are not; the message names the alternative.
    """
    hint = "`kneewatch diagnose TARGET` prints the same as text"
    for name, stream in (("stdout", sys.stdout), ("stdin", sys.stdin)):
        if stream is None or not stream.isatty():
            raise SettingsError(f"watch needs a terminal, but {name} is not one; {hint}")
    if os.environ.get("TERM") == "dumb":
        raise SettingsError(f"watch needs a terminal with cursor control, not TERM=dumb; {hint}")


def target_feeds(targets: Sequence[str], settings: Settings) -> list[Feed]:
    """A feed for each server and each capture; a target that is named twice is watched once.

    Raises:
        CaptureError: a recording cannot be read.
        CollectError: a target cannot be a server.
    """
    servers = [target for target in targets if not is_capture(target)]
    captures = [target for target in targets if is_capture(target)]
    return [
        *server_feeds(list(dict.fromkeys(servers)), settings),
        *recording_feeds(list(dict.fromkeys(captures)), settings),
    ]


def server_feeds(targets: Sequence[str], settings: Settings) -> list[Feed]:
    """A feed for each server, with scrapes spread over the interval, and one for their GPU page
    where it is set.

    Raises:
        CollectError: a target cannot be a server.
    """
    interval_s, limits = settings["interval_s"], settings.limits()
    window_s = max(settings["window_s"], SCRAPES_IN_WINDOW * interval_s)
    profile = settings.profile(window_s=window_s, stated=stated(settings))
    catalogue = Catalogue.of(profile)
    gpus = gpu_stream(targets, settings, window_s)
    feeds: list[Feed] = [GpuFeed(gpus)] if gpus else []
    for index, (name, target) in enumerate({target_name(t): t for t in targets}.items()):
        stream = TargetStream(name, profile, limits, catalogue)
        stream.gpus = gpus.monitor if gpus else None
        fetcher = Fetcher(metrics_url(target), settings.fetch())
        offset_s = interval_s * index / len(targets)
        feeds.append(ServerFeed(name, stream, fetcher, interval_s, offset_s))
    return feeds


def recording_feeds(captures: Sequence[str], settings: Settings) -> list[Feed]:
    """A feed for each capture.

    Raises:
        CaptureError: a recording cannot be read.
    """
    profile, limits = settings.profile(stated=stated(settings)), settings.limits()
    return [
        RecordingFeed(name, TargetStream(name, profile, limits), CaptureReader(path))
        for name, path in zip(capture_names(captures), captures, strict=True)
    ]


def show(feeds: Sequence[Feed], pace: Pace, *, where: str, docs_url: str = "") -> int:
    """Show the feeds' diagnoses until the user quits. Returns the exit status."""
    state = ScreenState()
    threads = FeedThreads(feeds, state, pace)
    colour = not os.environ.get("NO_COLOR")
    glyphs = glyphs_for(os.environ, sys.stdout.encoding)
    view = View(
        state,
        pace,
        where=where,
        glyphs=glyphs,
        colour=colour,
        docs_url=docs_url,
        over=lambda: threads.bug is not None,
    )
    # End with the terminal even if the parent process ignores SIGHUP: otherwise textual would loop
    # on the end of its input.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    threads.start()
    try:
        view.run(mouse=False)
    finally:
        threads.stop()
    for bug in (view.bug, threads.bug):
        if bug is not None:
            raise bug
    return exit_status(state.rows())


def exit_status(rows: Iterable[Row]) -> int:
    """The exit status for the last state; an unknown engine counts as no data, never as ok."""
    diagnoses = [row.diagnosis for row in rows if row.diagnosis is not None]
    worst = max((diagnosis.severity for diagnosis in diagnoses), default=Severity.OK)
    is_unknown = not diagnoses or any(row.health == "unknown" for row in rows)
    return NO_DATA if is_unknown and worst < Severity.WARNING else status(worst, diagnoses)
