"""Captures: written from a live page, and read one or several in the order of time. I/O edge."""

from __future__ import annotations

import gc
import heapq
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import time

from kneewatch.agent.printing import NO_DATA, OK, say
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stream import capture_name, ticks
from kneewatch.collector.captures.capture import CaptureReader, CaptureWriter
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.errors import CaptureError, CollectError
from kneewatch.collector.http.address import metrics_url, shown_url
from kneewatch.collector.http.fetch import Fetcher

Numbered = tuple[int, Entry]
BATCH_ENTRIES = 16
COLLECT_AFTER = 100_000
"""Objects more than before, until Python looks for cycles among them (its default: 700)."""


def record(url: str, file: Path, settings: Settings, *, for_s: float | None) -> int:
    """Write a capture until the time is up or Ctrl-C. Returns the exit status."""
    pages = failures = 0
    failing = False
    fetcher = Fetcher(metrics_url(url), settings.fetch())
    try:
        with closing(fetcher), CaptureWriter(file) as out:
            until = "Ctrl-C ends it" if for_s is None else f"for {for_s:g} s"
            say(f"{shown_url(url)} every {settings['interval_s']:g} s to {file}; {until}")
            for _ in ticks(settings["interval_s"], for_s):
                entry, hint = _scrape_entry(fetcher)
                with sigint_blocked():
                    out.write(entry)
                    pages, failures = pages + (not entry.error), failures + bool(entry.error)
                if failing != bool(entry.error):
                    failing = not failing
                    say(f"{entry.error} (recorded; going on){hint}" if failing else "answers again")
    except KeyboardInterrupt:
        pass
    say(f"{file}: {pages} pages, {failures} failed scrapes")
    return OK if pages else NO_DATA


def _scrape_entry(fetcher: Fetcher) -> tuple[Entry, str]:
    """A scrape as an entry, and what to try where it failed."""
    t_s = round(time(), 3)
    try:
        fetched = fetcher.get()
    except CollectError as error:
        return Entry(t_s, None, str(error)), f"; try: {error.hint}" if error.hint else ""
    body = fetched.body.decode("utf-8", "replace")
    return Entry(t_s, body, "", fetched.status, fetched.content_type), ""


@contextmanager
def sigint_blocked() -> Generator[None]:
    """Within it Ctrl-C waits: what is written is counted."""
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)


@contextmanager
def infrequent_gc() -> Generator[None]:
    """Within it Python seldom looks for cycles: what is made of a page has none."""
    usual = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def capture_names(paths: Sequence[str]) -> list[str]:
    """A target's name for each capture; files of the same name are told apart by their paths."""
    names = [capture_name(path) for path in paths]
    often = Counter(names)
    return [
        name if often[name] == 1 else str(Path(path).with_name(name))
        for name, path in zip(names, paths, strict=True)
    ]


class Captures:
    """Several captures in the order of time; what cannot be read of them is told, on stderr
    unless `tell` is something else.

    `unusable` counts captures that gave nothing; iterating raises CaptureError where none gave
    anything.

    Raises:
        CaptureError: a file does not exist or may not be read.
    """

    def __init__(
        self, paths: Sequence[str], *, from_s: float | None = None, to_s: float | None = None
    ) -> None:
        self._readers = [CaptureReader(path, from_s=from_s, to_s=to_s) for path in paths]
        self.on_message: Callable[[str], None] = say
        self.unusable = 0

    def __len__(self) -> int:
        """How many captures there are."""
        return len(self._readers)

    def __iter__(self) -> Iterator[Numbered]:
        """Entries, each with its capture's index."""
        self.unusable = 0
        numbered = [self._numbered(at, reader) for at, reader in enumerate(self._readers)]
        merged: Iterable[Numbered] = numbered[0]
        if len(numbered) > 1:
            merged = heapq.merge(*numbered, key=lambda item: item[1].t_s)
        yield from merged
        for reader in self._readers:
            if reader.damaged:
                self.on_message(
                    f"{reader.path}: {reader.damaged} damaged entries left out; "
                    f"the first: {reader.first_damage}"
                )

    def batches(self) -> Iterator[list[Numbered]]:
        """Entries, some at a time: what is done to many in a row is done with warm caches."""
        batch: list[Numbered] = []
        try:
            for numbered in self:
                batch.append(numbered)
                if len(batch) == BATCH_ENTRIES:
                    yield batch
                    batch = []
        except CaptureError:
            yield batch  # what was read before the error is told before it
            raise
        yield batch

    def _numbered(self, at: int, reader: CaptureReader) -> Iterator[Numbered]:
        try:
            for entry in reader:
                yield at, entry
        except CaptureError as error:
            self.unusable += 1
            if self.unusable == len(self._readers):
                raise
            self.on_message(str(error))
