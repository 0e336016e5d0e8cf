"""The `record` command, and reading several captures in order of time. I/O edge."""

from __future__ import annotations

import gc
import heapq
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import time

from kneewatch.agent.console import NO_DATA, OK, say
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
"""New objects until Python's garbage collector runs (default: 700)."""


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
                    say(
                        f"{entry.error} (recorded; continuing){hint}"
                        if failing
                        else "the server answers again"
                    )
    except KeyboardInterrupt:
        pass
    say(f"{file}: {pages} pages, {failures} failed scrapes")
    return OK if pages else NO_DATA


def _scrape_entry(fetcher: Fetcher) -> tuple[Entry, str]:
    """A scrape as an entry of a capture, and a hint if it failed, else ""."""
    t_s = round(time(), 3)
    try:
        fetched = fetcher.get()
    except CollectError as error:
        return Entry(t_s, None, str(error)), f"; try: {error.hint}" if error.hint else ""
    body = fetched.body.decode("utf-8", "replace")
    return Entry(t_s, body, "", fetched.status, fetched.content_type), ""


@contextmanager
def sigint_blocked() -> Generator[None]:
    """A context that delays Ctrl-C, so that a written page is also counted."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def infrequent_gc() -> Generator[None]:
    """A context with rare garbage collection: parsed pages have no reference cycles."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def capture_names(paths: Sequence[str]) -> list[str]:
    """A target name for each capture; files with equal names are distinguished by their paths."""
    names = [capture_name(path) for path in paths]
    counts = Counter(names)
    return [
        name if counts[name] == 1 else str(Path(path).with_name(name))
        for name, path in zip(names, paths, strict=True)
    ]


class Captures:
    """Several captures, merged in order of time. Calls `on_message` about unreadable parts.

    `unusable` is the number of captures without a readable entry; if that is all of them, iterating
    raises CaptureError.

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
        """The number of captures."""
        return len(self._readers)

    def __iter__(self) -> Iterator[Numbered]:
        """Yields entries, each with its capture's index."""
        self.unusable = 0
        numbered = [self._numbered(index, reader) for index, reader in enumerate(self._readers)]
        merged: Iterable[Numbered] = numbered[0]
        if len(numbered) > 1:
            merged = heapq.merge(*numbered, key=lambda item: item[1].t_s)
        yield from merged
        for reader in self._readers:
            if reader.damaged:
                self.on_message(
                    f"{reader.path}: {reader.damaged} damaged entries skipped; "
                    f"the first: {reader.first_damage}"
                )

    def batches(self) -> Iterator[list[Numbered]]:
        """Yields entries in batches: processing many in a row keeps CPU caches warm."""
        batch: list[Numbered] = []
        try:
            for numbered in self:
                batch.append(numbered)
                if len(batch) == BATCH_ENTRIES:
                    yield batch
                    batch = []
        except CaptureError:
            yield batch  # the entries before the error come first
            raise
        yield batch

    def _numbered(self, index: int, reader: CaptureReader) -> Iterator[Numbered]:
        try:
            for entry in reader:
                yield index, entry
        except CaptureError as error:
            self.unusable += 1
            if self.unusable == len(self._readers):
                raise
            self.on_message(str(error))
