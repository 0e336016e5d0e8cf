"""A target's stream: scrapes in, live or recorded, diagnoses out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from kneewatch.collector.base import CollectError
from kneewatch.collector.entries import Entry
from kneewatch.collector.exposition import Limits, PageParser
from kneewatch.collector.fetch import Fetcher
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.diagnose.monitor import Catalogue, TargetMonitor
from kneewatch.diagnose.profile import Profile

STATUS_OK = 200


class TargetStream:
    """One target's parser and monitor."""

    def __init__(
        self, name: str, profile: Profile, limits: Limits, catalogue: Catalogue | None = None
    ) -> None:
        self.monitor = TargetMonitor(name, profile, catalogue)
        self._parser = PageParser(limits)

    def take(
        self, t_s: float, body: str | bytes, content_type: str, status: int | None = None
    ) -> list[Diagnosis]:
        """The diagnoses after a page; one that cannot be read counts as a failed scrape."""
        if status not in (None, STATUS_OK):
            return self.monitor.failed(
                t_s, CollectError(f"HTTP status {status}", kind="http_status")
            )
        try:
            page = self._parser.parse(body, content_type=content_type)
        except CollectError as error:
            return self.monitor.failed(t_s, error)
        return self.monitor.page(t_s, page)

    def replay(self, entry: Entry) -> list[Diagnosis]:
        """The diagnoses after a recorded scrape."""
        if entry.body is None:
            error = CollectError(entry.error or "the scrape failed", kind="recorded")
            return self.monitor.failed(entry.t_s, error)
        return self.take(entry.t_s, entry.body, entry.content_type, entry.status)

    def scrape(self, fetcher: Fetcher) -> list[Diagnosis]:
        """The diagnoses after one GET of a live page."""
        t_s = time.time()
        try:
            fetched = fetcher.get()
        except CollectError as error:
            return self.monitor.failed(t_s, error)
        return self.take(t_s, fetched.body, fetched.content_type)


def capture_name(path: str | Path) -> str:
    """A target's name from a capture's file name: `cascade.r0.jsonl.gz` is `cascade.r0`."""
    return Path(path).name.removesuffix(".gz").removesuffix(".jsonl")


def ticks(interval_s: float, for_s: float | None) -> Iterator[float]:
    """Yields at once and then each interval until `for_s` has passed: seconds since the start.

    A tick that took longer than the interval is followed at once; lost ticks are not made up for.
    """
    start_s = due_s = time.monotonic()
    while True:
        yield time.monotonic() - start_s
        due_s = max(due_s + interval_s, time.monotonic())
        if for_s is not None and due_s - start_s > for_s + 0.01:
            return
        time.sleep(max(0.0, due_s - time.monotonic()))
