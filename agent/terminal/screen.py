"""The screen: textual draws, reads keys and gives the terminal back; what is drawn is made
elsewhere."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical

from kneewatch.agent.terminal import listing
from kneewatch.agent.terminal.details import Frame, details
from kneewatch.agent.terminal.glyphs import PLAIN_TONES, TONES, Glyphs, toned
from kneewatch.agent.terminal.pace import Pace
from kneewatch.agent.terminal.wall import EngineKey, Kind, Row, Trail, Wall
from kneewatch.agent.terminal.widgets import Help, Lines, Pane, Stdout, Targets
from kneewatch.reports.text import who
from kneewatch.reports.words import clock

REFRESH_S = 0.5
WIDE, LIST_WIDE = 150, 62
"""So wide, and the list stands beside the details; so wide it is then."""

LIST_SHARE, LIST_LEAST = 3, 4
CHART_ROWS = ((50, 6), (36, 4), (0, 3))
"""Rows of the charts by the terminal's height."""


class View(App[None]):
    """The live view. `where` says where the numbers come from; `over` whether all must end."""

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
        wall: Wall,
        pace: Pace,
        *,
        where: str,
        glyphs: Glyphs,
        colour: bool,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(driver_class=Stdout, ansi_color=True)
        self.animation_level = "none"  # each step would be a screen more over SSH
        self._wall, self._pace, self._where, self._over = wall, pace, where, over
        self.bug: Exception | None = None
        self._glyphs = glyphs
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
        """The parts, from top to bottom."""
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
        """Begin to draw; what ends a program gives the terminal back first."""
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
        """Show where keys go."""
        self._draw_rule()

    def _handle_exception(self, error: Exception) -> None:
        """A bug is told once the screen has gone; textual would print local variables with it."""
        if self.is_headless:
            super()._handle_exception(error)
        elif self.bug is None:
            self.bug = error
            self.exit()

    def draw(self) -> None:
        """Draw what is new."""
        if self._over():
            self.exit()
        if self._held is None:
            self._rows, self._notes = self._wall.rows(), self._wall.daemon_notes()
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
        """The list above the details, or beside them; none for a single engine."""
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
        seen = max(1, self._targets.size.height)
        top = min(self._top, max(0, len(self._rows) - seen))
        self._top = top = max(min(top, at), at - seen + 1)
        last = min(top + seen, len(self._rows))
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
        trail = self._wall.trail(row.key) if self._held is None else self._held[row.key]
        self._lines["details"].put(details(row, trail, Frame(width, rows, self._glyphs)))
        if row.key != self._shown:
            self._shown = row.key
            self._pane.scroll_home(animate=False)

    def _draw_rule(self) -> None:
        """The line above the details, once it is known how much of them is seen."""
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
        """Choose another engine of the list."""
        row = self._selected()
        if row is not None:
            at = self._rows.index(row) + by
            self._chosen = self._rows[max(0, min(len(self._rows) - 1, at))].key
            self.draw()

    def action_follow(self) -> None:
        """Show the worst engine, whichever it is."""
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
        """Let the screen stand still, or go on."""
        paused = self._held is None
        self._pace.pause(paused)
        self._held = {row.key: self._wall.trail(row.key) for row in self._rows} if paused else None
        self.draw()

    def action_speed(self, factor: float) -> None:
        """Play recordings faster or slower."""
        self._pace.change_speed(factor)
        self.draw()

    def action_help(self) -> None:
        """Say what the keys do."""
        self.push_screen(Help())


def _title(row: Row | None) -> str:
    if row is None:
        return "nothing to show yet"
    return who(row.diagnosis) if row.diagnosis else row.name
