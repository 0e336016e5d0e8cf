"""The textual screen: its widgets, keys and refresh."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.drivers.linux_driver import LinuxDriver
from textual.screen import ModalScreen
from textual.widgets import Static

from kneewatch.agent.watch import listing
from kneewatch.agent.watch.details import Frame, details
from kneewatch.agent.watch.feeds import Pace
from kneewatch.agent.watch.glyphs import PLAIN_TONES, TONES, Glyphs, Line, toned
from kneewatch.agent.watch.listing import HELP
from kneewatch.agent.watch.state import EngineKey, Kind, Row, ScreenState, Trail
from kneewatch.reports.diagnosis_text import who
from kneewatch.reports.formatting import clock

Size = tuple[int, int]


class Stdout(LinuxDriver):
    """A driver that draws on stdout: textual uses stderr, which may be a file."""

    def __init__(
        self, app: App[Any], *, debug: bool = False, mouse: bool = True, size: Size | None = None
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)  # pyright: ignore[reportUnknownMemberType]
        self._file = sys.__stdout__


class Lines(Static):
    """Lines with tones; `styles_of` maps tones to styles. Unchanged lines are not redrawn."""

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
    """A scrolling pane without a scrollbar, which would need more than ASCII."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", show=False),
        Binding("k", "scroll_up", show=False),
        Binding("space", "page_down", show=False),
        Binding("g", "scroll_home", show=False),
        Binding("G", "scroll_end", show=False),
    ]


class Targets(Pane):
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
        """The help text."""
        with Pane():
            yield Static(HELP, markup=False)


# --- The screen -----------------------------------------------------------------------------------


REFRESH_S = 0.5
WIDE, LIST_WIDE = 150, 62
"""From `WIDE` columns on, the list is beside the details and has `LIST_WIDE` columns."""

LIST_SHARE, LIST_LEAST = 3, 4
CHART_ROWS = ((50, 6), (36, 4), (0, 3))
"""Rows of the charts by the terminal's height."""


class View(App[None]):
    """The live view.

    `where` names the source of the data, `docs_url` is the base of links to the causes' pages, and
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
        pace: Pace,
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
        self._rows: list[Row] = []
        self._notes: list[str] = []
        self._chosen: EngineKey | None = None
        self._shown: EngineKey | None = None
        self._zoomed, self._top = False, 0
        self._held: dict[EngineKey, Trail] | None = None
        tones = TONES if colour else PLAIN_TONES
        names = ("header", "notes", "heads", "rows", "rule", "details", "keys")
        self._lines = {name: Lines(tones, name) for name in names}
        self._targets, self._pane = Targets(id="targets"), Pane(id="pane")
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
        """Start drawing. SIGTERM and SIGINT restore the terminal before they end the program."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.exit)
        self._targets.focus()
        self.set_interval(REFRESH_S, self.draw)
        self.draw()

    def on_resize(self) -> None:
        """Draw for the new size."""
        self.call_after_refresh(self.draw)

    def on_descendant_focus(self) -> None:
        """Show the focus."""
        self._draw_rule()

    def _handle_exception(self, error: Exception) -> None:
        """Keep an exception until the screen is closed; textual would print local variables."""
        if self.is_headless:
            super()._handle_exception(error)
        elif self.bug is None:
            self.bug = error
            self.exit()

    def draw(self) -> None:
        """Redraw what changed."""
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

    def _selected(self) -> Row | None:
        chosen = [row for row in self._rows if row.key == self._chosen]
        return next(iter(chosen or self._rows), None)

    def _lay_out(self) -> None:
        """Place the list above or beside the details; hide it for a single engine."""
        wide = self.size.width >= WIDE
        self._body.set_class(wide, "wide")
        listed = len(self._rows) > 1 and not self._zoomed
        if listed != self._left.display:
            self._left.display = listed
            (self._targets if listed else self._pane).focus()
        rows = max(LIST_LEAST, self.size.height // LIST_SHARE)
        self._left.styles.height = "100%" if wide else min(len(self._rows) + 1, rows)

    def _draw_list(self, selected: Row | None) -> None:
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

    def _draw_details(self, row: Row | None) -> None:
        if row is None:
            self._lines["details"].put([])
            return
        rows = next(rows for height, rows in CHART_ROWS if self.size.height >= height)
        beside = self._left.display and self.size.width >= WIDE
        width = self.size.width - (LIST_WIDE + 2 if beside else 0)
        trail = self._screen_state.trail(row.key) if self._held is None else self._held[row.key]
        frame = Frame(width, rows, self._glyphs, self._docs_url)
        self._lines["details"].put(details(row, trail, frame))
        if row.key != self._shown:
            self._shown = row.key
            self._pane.scroll_home(animate=False)

    def _draw_rule(self) -> None:
        """Draw the line above the details, once their visible height is known."""
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
        """Select another engine."""
        row = self._selected()
        if row is not None:
            at = self._rows.index(row) + by
            self._chosen = self._rows[max(0, min(len(self._rows) - 1, at))].key
            self.draw()

    def action_follow(self) -> None:
        """Follow the worst engine."""
        self._chosen = None
        self.draw()

    def action_page(self, by: int) -> None:
        """Scroll the details by a page."""
        self._pane.scroll_relative(y=by * max(1, self._pane.size.height - 2), animate=False)
        self.call_after_refresh(self._draw_rule)

    def action_zoom(self, zoomed: bool | None = None) -> None:
        """Show the details alone, or both again."""
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
        """Show the help screen."""
        self.push_screen(Help())


def _title(row: Row | None) -> str:
    if row is None:
        return "no data yet"
    return who(row.diagnosis) if row.diagnosis else row.name
