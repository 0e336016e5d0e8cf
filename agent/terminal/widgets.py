"""The parts of the screen, and how it is put on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.drivers.linux_driver import LinuxDriver
from textual.screen import ModalScreen
from textual.widgets import Static

from kneewatch.agent.terminal.glyphs import Line
from kneewatch.agent.terminal.listing import HELP

Size = tuple[int, int]


class Stdout(LinuxDriver):
    """Textual draws on stderr; here stdout is the terminal, and stderr may be a file."""

    def __init__(
        self, app: App[Any], *, debug: bool = False, mouse: bool = True, size: Size | None = None
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)  # pyright: ignore[reportUnknownMemberType]
        self._file = sys.__stdout__


class Lines(Static):
    """Lines with tones; `styles_of` gives a tone's style. What has not changed is not drawn."""

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
    """A part that scrolls, without a scrollbar: those are drawn with more than ASCII."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", show=False),
        Binding("k", "scroll_up", show=False),
        Binding("space", "page_down", show=False),
        Binding("g", "scroll_home", show=False),
        Binding("G", "scroll_end", show=False),
    ]


class Targets(Pane):
    """The list of engines: keys choose one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "app.choose(1)", show=False),
        Binding("up,k", "app.choose(-1)", show=False),
        Binding("pagedown,space", "app.page(1)", show=False),
        Binding("pageup", "app.page(-1)", show=False),
        Binding("home,g", "app.follow", show=False),
        Binding("end,G", "app.choose(1000000)", show=False),
    ]


class Help(ModalScreen[None]):
    """What the keys do."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,h,enter", "dismiss", show=False)
    ]

    def compose(self) -> ComposeResult:
        """The text."""
        with Pane():
            yield Static(HELP, markup=False)
