"""The `watch` command: its sources of data, and the textual screen with its keys. I/O edge."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.drivers.linux_driver import LinuxDriver
from textual.screen import ModalScreen
from textual.widgets import Static

from kneewatch.agent.captures import capture_names
from kneewatch.agent.console import NO_DATA
from kneewatch.agent.printing import status
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stated_deployment import stated
from kneewatch.agent.stream import TargetStream, gpu_stream, no_gpus
from kneewatch.agent.targets import target_name
from kneewatch.agent.watch import rendering as listing
from kneewatch.agent.watch.feeds import (
    PATH,
    Feed,
    FeedThreads,
    Playback,
    daemon_feed,
    gpu_feed,
    recording_feed,
    server_feed,
)
from kneewatch.agent.watch.rendering import (
    HELP,
    PLAIN_TONES,
    TONES,
    Glyphs,
    Line,
    Screen,
    details,
    glyphs_for,
    toned,
)
from kneewatch.agent.watch.state import Kind, RowKey, ScreenRow, ScreenState, Trail
from kneewatch.collector.captures.capture import CaptureReader, is_capture
from kneewatch.collector.errors import SettingsError
from kneewatch.collector.http.address import metrics_url
from kneewatch.collector.http.fetch import Fetcher
from kneewatch.diagnose.doc_links import OWN_DOCS
from kneewatch.reports.diagnosis_text import who
from kneewatch.rules.formatting import clock
from kneewatch.rules.rule import SCRAPES_IN_WINDOW, Severity

Size = tuple[int, int]


class Stdout(LinuxDriver):
    """A textual driver that draws on stdout. textual's own draws on stderr, which may be a file."""

    def __init__(
        self, app: App[Any], *, debug: bool = False, mouse: bool = True, size: Size | None = None
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)  # pyright: ignore[reportUnknownMemberType]
        self._file = sys.__stdout__


class Lines(Static):
    """A widget with lines of toned text. `styles_of` maps tones to styles. Unchanged lines are not
    redrawn."""

    def __init__(self, styles_of: Mapping[str, str], id: str) -> None:
        super().__init__(id=id, markup=False)
        self._styles_of = styles_of
        self._lines: Sequence[Line] = ()

    def put(self, lines: Sequence[Line]) -> None:
        """Show these lines."""
        if lines != self._lines:
            self._lines = lines
            self.update(Text("\n", no_wrap=True, end="").join(map(self._text, lines)))

    def _text(self, line: Iterable[tuple[str, str]]) -> Text:
        styles_of = self._styles_of
        pieces = [(text, styles_of[tone]) for text, tone in line]
        return Text.assemble(*pieces, no_wrap=True, overflow="crop", end="")


class Pane(VerticalScroll):
    """A scrolling pane. It has no scrollbar, because that needs more than ASCII."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", show=False),
        Binding("k", "scroll_up", show=False),
        Binding("space", "page_down", show=False),
        Binding("g", "scroll_home", show=False),
        Binding("G", "scroll_end", show=False),
    ]


class EngineList(Pane):
    """The list of engines; keys select one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "app.choose(1)", show=False),
        Binding("up,k", "app.choose(-1)", show=False),
        Binding("pagedown,space", "app.page(1)", show=False),
        Binding("pageup", "app.page(-1)", show=False),
        Binding("home,g", "app.follow", show=False),
        Binding("end,G", "app.choose(1000000)", show=False),
    ]


class Help(ModalScreen[None]):
    """The help screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,h,enter", "dismiss", show=False)
    ]

    def compose(self) -> ComposeResult:
        with Pane():
            yield Static(HELP, markup=False)


# --- The screen -----------------------------------------------------------------------------------


REFRESH_S = 0.5
WIDE, LIST_WIDE = 150, 62
"""Minimum width in columns at which the list is beside the details, and the width of the list
then."""

LIST_SHARE, LIST_LEAST = 3, 4
CHART_ROWS = ((50, 6), (36, 4), (0, 3))
"""Minimum height of the terminal and height of a chart, both in lines."""


class View(App[None]):
    """The live view.

    `where` names the source of the data. `docs_url` is the base URL of links to the causes' pages.
    `over` returns whether to exit.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS_PATH = "screen.css"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c,ctrl+q", "quit", show=False, priority=True),
        Binding("q", "quit", show=False),
        Binding("enter", "zoom", show=False),
        Binding("escape", "zoom(False)", show=False),
        Binding("p", "pause", show=False),
        Binding("plus,equals_sign", "speed(2)", show=False),
        Binding("minus", "speed(0.5)", show=False),
        Binding("question_mark,h", "help", show=False),
        Binding("ctrl+z", "suspend_process", show=False),
    ]

    def __init__(
        self,
        screen: ScreenState,
        pace: Playback,
        *,
        where: str,
        glyphs: Glyphs,
        colour: bool,
        docs_url: str = "",
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(driver_class=Stdout, ansi_color=True)
        self.animation_level = "none"  # animations redraw too much over SSH
        self._screen_state, self._pace, self._where, self._over = screen, pace, where, over
        self.bug: Exception | None = None
        self._glyphs, self._docs_url = glyphs, docs_url
        self._rows: list[ScreenRow] = []
        self._notes: list[str] = []
        self._chosen: RowKey | None = None
        self._shown: RowKey | None = None
        self._zoomed, self._top = False, 0
        self._held: dict[RowKey, Trail] | None = None
        tones = TONES if colour else PLAIN_TONES
        names = ("header", "notes", "heads", "rows", "rule", "details", "keys")
        self._lines = {name: Lines(tones, name) for name in names}
        self._targets, self._pane = EngineList(id="targets"), Pane(id="pane")
        self._body, self._left = Container(id="body"), Vertical(id="left")

    def compose(self) -> ComposeResult:
        """The widgets, from top to bottom."""
        yield self._lines["header"]
        yield self._lines["notes"]
        with self._body:
            with self._left:
                yield self._lines["heads"]
                with self._targets:
                    yield self._lines["rows"]
            with Vertical(id="right"):
                yield self._lines["rule"]
                with self._pane:
                    yield self._lines["details"]
        yield self._lines["keys"]

    def on_mount(self) -> None:
        """Start drawing. After SIGTERM or SIGINT the terminal is restored before the program
        ends."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.exit)
        self._targets.focus()
        self.set_interval(REFRESH_S, self.draw)
        self.draw()

    def on_resize(self) -> None:
        """Draw again for the new size."""
        self.call_after_refresh(self.draw)

    def on_descendant_focus(self) -> None:
        """Draw again, to show which pane has the focus."""
        self._draw_rule()

    def _handle_exception(self, error: Exception) -> None:
        """Store an exception until the screen is closed. textual itself would print the values of
        local variables."""
        if self.is_headless:
            super()._handle_exception(error)
        elif self.bug is None:
            self.bug = error
            self.exit()

    def draw(self) -> None:
        """Redraw everything that has changed."""
        if self._over():
            self.exit()
        if self._held is None:
            self._rows, self._notes = self._screen_state.rows(), self._screen_state.daemon_notes()
        row = self._selected()
        self._lay_out()
        width, glyphs, paused = self.size.width, self._glyphs, self._held is not None
        plays = any(row.kind is Kind.RECORDING for row in self._rows)
        where = f"{self._where} playing x{self._pace.speed:g}" if plays else self._where
        now = f"{clock(time.time())} UTC"
        self._lines["header"].put(
            [
                listing.header(
                    self._rows, where=where, clock=now, paused=paused, width=width, glyphs=glyphs
                )
            ]
        )
        notes = [line for note in self._notes for line in glyphs.folded(note, width)]
        self._lines["notes"].put(toned(notes, "warning"))
        self._lines["notes"].display = bool(notes)
        self._lines["keys"].put([listing.keys(plays=plays)])
        self._draw_list(row)
        self._draw_details(row)
        self.call_after_refresh(self._draw_rule)

    def _selected(self) -> ScreenRow | None:
        chosen = [row for row in self._rows if row.key == self._chosen]
        return next(iter(chosen or self._rows), None)

    def _lay_out(self) -> None:
        """Place the list above the details or beside them. Hide the list if there is a single
        engine."""
        wide = self.size.width >= WIDE
        self._body.set_class(wide, "wide")
        listed = len(self._rows) > 1 and not self._zoomed
        if listed != self._left.display:
            self._left.display = listed
            (self._targets if listed else self._pane).focus()
        rows = max(LIST_LEAST, self.size.height // LIST_SHARE)
        self._left.styles.height = "100%" if wide else min(len(self._rows) + 1, rows)

    def _draw_list(self, selected: ScreenRow | None) -> None:
        width = LIST_WIDE if self.size.width >= WIDE else self.size.width
        at = self._rows.index(selected) if selected else 0
        visible = max(1, self._targets.size.height)
        top = min(self._top, max(0, len(self._rows) - visible))
        self._top = top = max(min(top, at), at - visible + 1)
        last = min(top + visible, len(self._rows))
        self._lines["heads"].put(
            [listing.heads(width, first=top + 1, last=last, count=len(self._rows))]
        )
        self._lines["rows"].put(
            [
                listing.line_of(row, width=width, selected=row is selected, glyphs=self._glyphs)
                for row in self._rows[top:last]
            ]
        )

    def _draw_details(self, row: ScreenRow | None) -> None:
        if row is None:
            self._lines["details"].put([])
            return
        rows = next(rows for height, rows in CHART_ROWS if self.size.height >= height)
        beside = self._left.display and self.size.width >= WIDE
        width = self.size.width - (LIST_WIDE + 2 if beside else 0)
        trail = self._screen_state.trail(row.key) if self._held is None else self._held[row.key]
        frame = Screen(width, rows, self._glyphs, self._docs_url)
        self._lines["details"].put(details(row, trail, frame))
        if row.key != self._shown:
            self._shown = row.key
            self._pane.scroll_home(animate=False)

    def _draw_rule(self) -> None:
        """Draw the line above the details. Called when the visible height of the details is
        known."""
        row = self._selected()
        beside = self._left.display and self.size.width >= WIDE
        line = listing.rule(
            _title(row),
            below=int(self._pane.max_scroll_y - self._pane.scroll_y),
            focused=self._pane.has_focus,
            width=self.size.width - (LIST_WIDE + 2 if beside else 0),
            glyphs=self._glyphs,
        )
        self._lines["rule"].put([line])

    def action_choose(self, by: int) -> None:
        """Select the engine `by` rows further down the list."""
        row = self._selected()
        if row is not None:
            at = self._rows.index(row) + by
            self._chosen = self._rows[max(0, min(len(self._rows) - 1, at))].key
            self.draw()

    def action_follow(self) -> None:
        """Select the worst engine, now and whenever another engine becomes the worst."""
        self._chosen = None
        self.draw()

    def action_page(self, by: int) -> None:
        self._pane.scroll_relative(y=by * max(1, self._pane.size.height - 2), animate=False)
        self.call_after_refresh(self._draw_rule)

    def action_zoom(self, zoomed: bool | None = None) -> None:
        """Show only the details, or the list and the details. Without `zoomed`, switch between the
        two."""
        self._zoomed = not self._zoomed if zoomed is None else zoomed
        self.draw()

    def action_pause(self) -> None:
        """Pause or resume the screen and recordings."""
        paused = self._held is None
        self._pace.pause(paused)
        self._held = (
            {row.key: self._screen_state.trail(row.key) for row in self._rows} if paused else None
        )
        self.draw()

    def action_speed(self, factor: float) -> None:
        """Play recordings faster or slower."""
        self._pace.change_speed(factor)
        self.draw()

    def action_help(self) -> None:
        self.push_screen(Help())


def _title(row: ScreenRow | None) -> str:
    if row is None:
        return "no data yet"
    return who(row.diagnosis) if row.diagnosis else row.name


# --- The `watch` command: feeds for targets or a daemon, and the screen. I/O edge -----------------


def run(
    targets: Sequence[str],
    settings: Settings,
    *,
    attach: str | None,
    token_file: Path | None,
    speed: float,
) -> int:
    """Show targets, or the targets of a daemon, until the user quits. Returns the exit status.

    Raises:
        SettingsError: there is nothing to show, or no terminal to show it on.
        CaptureError: a recording cannot be read.
        CollectError: the name of a target is not a server's URL.
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
    return show(feeds, Playback(speed), where=where, docs_url=docs_url)


def check_terminal() -> None:
    """Check that stdin and stdout are a terminal.

    Raises:
        SettingsError: they are not a terminal; the message names the alternative.
    """
    hint = "`kneewatch diagnose TARGET` prints the same as text"
    for name, stream in (("stdout", sys.stdout), ("stdin", sys.stdin)):
        if stream is None or not stream.isatty():
            raise SettingsError(f"watch needs a terminal, but {name} is not one; {hint}")
    if os.environ.get("TERM") == "dumb":
        raise SettingsError(f"watch needs a terminal with cursor control, not TERM=dumb; {hint}")


def target_feeds(targets: Sequence[str], settings: Settings) -> list[Feed]:
    """A feed for each server and each capture. Duplicate targets are watched once.

    Raises:
        CaptureError: a recording cannot be read.
        CollectError: the name of a target is not a server's URL.
    """
    servers = [target for target in targets if not is_capture(target)]
    captures = [target for target in targets if is_capture(target)]
    return [
        *server_feeds(list(dict.fromkeys(servers)), settings),
        *recording_feeds(list(dict.fromkeys(captures)), settings),
    ]


def server_feeds(targets: Sequence[str], settings: Settings) -> list[Feed]:
    """A feed for each server, and one for their GPU page if it is configured. The scrapes of the
    servers are spread over the interval.

    Raises:
        CollectError: the name of a target is not a server's URL.
    """
    interval_s, limits = settings["interval_s"], settings.limits()
    window_s = max(settings["window_s"], SCRAPES_IN_WINDOW * interval_s)
    profile = settings.profile(window_s=window_s, stated=stated(settings))
    gpus = gpu_stream(targets, settings, window_s)
    feeds: list[Feed] = [gpu_feed(gpus)] if gpus else []
    for index, (name, target) in enumerate({target_name(t): t for t in targets}.items()):
        stream = TargetStream(name, profile, limits)
        stream.gpus = gpus.monitor.reading if gpus else no_gpus
        fetcher = Fetcher(metrics_url(target), settings.fetch())
        offset_s = interval_s * index / len(targets)
        feeds.append(server_feed(name, stream, fetcher, interval_s, offset_s))
    return feeds


def recording_feeds(captures: Sequence[str], settings: Settings) -> list[Feed]:
    """A feed for each capture.

    Raises:
        CaptureError: a recording cannot be read.
    """
    profile, limits = settings.profile(stated=stated(settings)), settings.limits()
    return [
        recording_feed(name, TargetStream(name, profile, limits), CaptureReader(path))
        for name, path in zip(capture_names(captures), captures, strict=True)
    ]


def show(feeds: Sequence[Feed], pace: Playback, *, where: str, docs_url: str = "") -> int:
    """Show the diagnoses of the feeds until the user quits. Returns the exit status."""
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


def exit_status(rows: Iterable[ScreenRow]) -> int:
    """The exit status for the last state. An engine whose state is unknown counts as no data, never
    as ok."""
    diagnoses = [row.diagnosis for row in rows if row.diagnosis is not None]
    worst = max((diagnosis.severity for diagnosis in diagnoses), default=Severity.OK)
    is_unknown = not diagnoses or any(row.health == "unknown" for row in rows)
    return NO_DATA if is_unknown and worst < Severity.WARNING else status(worst, diagnoses)
