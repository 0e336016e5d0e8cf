"""Pages of a target: fetched from its server, or played from a capture. I/O edge."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from kneewatch.agent.stream import TargetStream
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.errors import CaptureError, CollectError
from kneewatch.collector.http.address import metrics_url
from kneewatch.collector.http.fetch import Fetcher
from kneewatch.collector.samples import Layout, Page

log = logging.getLogger(__name__)

LEAST_GAP_S = 0.01
PAUSE_S = 1.0
"""Minimum pause between the end of a recording and its restart."""

STARTS = ("_created", "process_start_time_seconds")
"""Suffixes of metrics that hold start times of the process."""


class Player:
    """Plays the pages of a capture in real time, with their times shifted to now.

    At the end it restarts, as a new process: `begun` counts the starts.

    Raises:
        CaptureError: the capture is empty.
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
        """The page that is due at `now_s`, parsed by the stream; missed pages are skipped.

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
            raise CaptureError(f"{self._path}: the capture is empty")
        return first

    def _moved(self, page: Page) -> Page:
        """The page with shifted process start times, so that each restart is a new process."""
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


# --- Sources of pages -----------------------------------------------------------------------------


class Pages(Protocol):
    """A target's pages, one at a time."""

    def take(self, stream: TargetStream, now_s: float) -> Page | CollectError:
        """The page at `now_s`, or the error."""
        ...

    def due_in_s(self) -> float | None:
        """Seconds until the next page; None if a page is always available."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...


class LivePages:
    """Pages of a live server, one GET each."""

    def __init__(self, spec: TargetSpec) -> None:
        self._fetcher = Fetcher(metrics_url(spec.address), spec.settings.fetch())

    def take(self, stream: TargetStream, now_s: float) -> Page | CollectError:
        """The current page, or the error."""
        return stream.fetch(self._fetcher, now_s)

    def due_in_s(self) -> float | None:
        """None: a server can be scraped at any time."""
        return None

    def close(self) -> None:
        """Close the connection."""
        self._fetcher.close()


class PlayedPages:
    """Pages of a capture; the stream is reset at each restart."""

    def __init__(self, spec: TargetSpec) -> None:
        self._player, self._name = Player(spec.address), spec.name
        self._begun = 0

    def take(self, stream: TargetStream, now_s: float) -> Page | CollectError:
        """The due page, or the error."""
        try:
            page = self._player.take(stream, now_s)
        except CaptureError as error:
            return CollectError(str(error), kind="recorded", hint="Restore the recording.")
        if self._player.begun > max(self._begun, 1):
            log.info("recording starts again target=%s", self._name)
            stream.reset()
        self._begun = self._player.begun
        return page

    def due_in_s(self) -> float | None:
        """Seconds until the next page of the recording."""
        return self._player.due_in_s

    def close(self) -> None:
        """Nothing to release."""


def open_pages(spec: TargetSpec) -> Pages:
    """The source of the target's pages.

    Raises:
        CaptureError: the target is a capture that cannot be played.
    """
    return PlayedPages(spec) if spec.played else LivePages(spec)
