"""A recording that never ends: its pages over and over, counters going on from turn to turn."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import dropwhile

from kneewatch.collector.captures.capture import CaptureReader
from tests.recordings import CAPTURES

FRESH_PAGES = 5
"""Pages before the first request: some series are not on them yet."""

STEP_S = 2.0
"""The recordings were scraped so often."""

COUNTED = ("_total", "_sum", "_count", "_bucket")
"""Ends of the names of counters, histogram parts among them."""


def counters(body: str) -> dict[str, float]:
    """The page's counters, histogram parts among them, by name and labels as they stand there."""
    samples = (line.rpartition(" ") for line in body.splitlines() if not line.startswith("#"))
    return {
        series: float(value)
        for series, _, value in samples
        if series.partition("{")[0].endswith(COUNTED)
    }


def raised(body: str, gained: Mapping[str, float], turns: int) -> str:
    """The page with its counters higher by what they gain in so many turns."""
    lines: list[str] = []
    for line in body.splitlines():
        series, _, value = line.rpartition(" ")
        added = turns * gained.get(series, 0.0)
        lines.append(f"{series} {float(value) + added!r}" if added else line)
    return "\n".join(lines) + "\n"


class Growing:
    """The pages of a recording, or of a part of it, without end. Each is made once a turn."""

    def __init__(self, name: str, begin: int = FRESH_PAGES, end: int | None = None) -> None:
        entries = CaptureReader(CAPTURES / f"{name}.jsonl.gz")
        bodies = [entry.body for entry in entries if entry.body is not None][begin:end]
        last = counters(bodies[-1])
        # A series that came later would be missing again at the beginning of each turn.
        self._bodies = list(dropwhile(lambda body: len(counters(body)) < len(last), bodies))
        first = counters(self._bodies[0])
        self._gained = {series: last[series] - value for series, value in first.items()}
        self._made: dict[int, tuple[int, bytes]] = {}

    def page(self, step: int) -> bytes:
        """The page of a step from 0 on."""
        turn, at = divmod(step, len(self._bodies))
        turn_and_page = self._made.get(at)
        if turn_and_page is None or turn_and_page[0] != turn:
            turn_and_page = turn, raised(self._bodies[at], self._gained, turn).encode()
            self._made[at] = turn_and_page
        return turn_and_page[1]
