"""A capture played as if it were live. I/O edge."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kneewatch.agent.source import TargetStream
from kneewatch.collector.base import CaptureError, CollectError
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.captures.entries import Entry
from kneewatch.collector.samples import Layout, Page

LEAST_GAP_S = 0.01
PAUSE_S = 1.0
"""Between the end and the start over, where the recording's own pace is not slower."""

STARTS = ("_created", "process_start_time_seconds")
"""Ends of the names of metrics that are times of the process."""


class Player:
    """The pages of a capture at their own pace, with their times moved to now.

    At its end it starts over, as a new process: `begun` counts the starts.

    Raises:
        CaptureError: there is nothing in it to play.
    """

    def __init__(self, path: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = Path(path), clock
        self.begun = 0
        self._entries: Iterator[Entry] = iter(())
        self._next = self._open()
        self._due_s = clock()
        self._shift_s = 0.0
        self._fresh = True
        self._starts: tuple[Layout, list[int]] | None = None

    def take(self, stream: TargetStream, now_s: float) -> Page | CollectError:
        """The page that is due at `now_s`, as the stream's parser reads it; those that were missed
        are left out.

        Raises:
            CaptureError: the file can no longer be read.
        """
        entry = self._next
        if self._fresh:
            self._fresh, self._shift_s = False, now_s - entry.t_s
            self.begun += 1
        page = stream.read(entry)
        while True:
            following = next(self._entries, None)
            if following is None:
                self._start_over()
                break
            self._next = following
            self._due_s += max(following.t_s - entry.t_s, 0.0)
            if self._due_s > self._clock():
                break
            entry, page = following, stream.read(following)
        return self._moved(page) if isinstance(page, Page) else page

    @property
    def due_in_s(self) -> float:
        """Seconds until the next page."""
        return max(self._due_s - self._clock(), LEAST_GAP_S)

    def _start_over(self) -> None:
        self._due_s = max(self._due_s, self._clock()) + PAUSE_S
        self._next, self._fresh = self._open(), True

    def _open(self) -> Entry:
        self._entries = iter(CaptureReader(self._path))
        first = next(self._entries, None)
        if first is None:
            raise CaptureError(f"{self._path}: there is nothing in it to play")
        return first

    def _moved(self, page: Page) -> Page:
        """The page with the process's times moved as well: each start over is a new process."""
        if self._starts is None or self._starts[0] is not page.layout:
            at = [
                index
                for index, series in enumerate(page.layout.series)
                if series.name.endswith(STARTS)
            ]
            self._starts = (page.layout, at)
        for index in self._starts[1]:
            page.values[index] += self._shift_s
        return page
