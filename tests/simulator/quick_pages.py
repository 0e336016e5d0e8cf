"""Pages of an engine without their text: the values go where the first page's text had them."""

from __future__ import annotations

from kneewatch.collector.exposition import Limits, PageParser
from kneewatch.collector.page import Page
from tests.simulator.page import NEWEST, START_S, PageWriter
from tests.simulator.shown import Shown


class QuickPages:
    """The pages of one engine; those with adapters, which come and go, are read as text."""

    def __init__(self, engine: Shown, *, form: str = NEWEST, started_s: float = START_S) -> None:
        self._writer = PageWriter(engine, model="served", form=form, started_s=started_s)
        self._parser, self._text = PageParser(Limits()), bool(engine.launch.max_loras)
        self._layout = self._parser.parse(self._writer.page()).layout

    def page(self) -> Page:
        """The page now."""
        if self._text:
            return self._parser.parse(self._writer.page())
        return Page(self._layout, self._writer.samples())
