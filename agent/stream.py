"""A target's stream: scrapes in, live or recorded, diagnoses out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from kneewatch.collector.captures.format import Entry
from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition.grammar import Limits
from kneewatch.collector.exposition.parser import PageParser
from kneewatch.collector.gpu.dcgm_exporter import DcgmCollector
from kneewatch.collector.http.connection import FetchSettings
from kneewatch.collector.http.fetch import Fetcher
from kneewatch.collector.samples import Page
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.engine.engine_monitor import Catalogue
from kneewatch.diagnose.engine.target_monitor import TargetMonitor
from kneewatch.diagnose.gpu.monitor import NO_GPUS, GpuMonitor, GpuReading
from kneewatch.reports.formatting import span

STATUS_OK = 200

STALE_AFTER_S = 300.0
"""A sample that says to be of another time than this is none of now: after so long Prometheus takes
a series for stale."""


class GpuSource(Protocol):
    """Tells what the GPUs of a target say."""

    def reading(self, now_s: float) -> GpuReading:
        """The newest GPU signals."""
        ...


class PageReader:
    """One target's pages, live or recorded, read in their order."""

    def __init__(self, limits: Limits) -> None:
        self._parser = PageParser(limits)

    def read(self, entry: Entry) -> Page | CollectError:
        """The page of a recorded scrape, or why there is none."""
        if entry.body is None:
            return CollectError(entry.error or "the scrape failed", kind="recorded")
        return self.page(entry.t_s, entry.body, entry.content_type, entry.status)

    def page(
        self, t_s: float, body: str | bytes, content_type: str, status: int | None
    ) -> Page | CollectError:
        """The page that a body holds, or why it is none of that moment."""
        if status not in (None, STATUS_OK):
            return CollectError(f"HTTP status {status}", kind="http_status")
        try:
            page = self._parser.parse(body, content_type=content_type)
        except CollectError as error:
            return error
        return _stale_error(page, t_s) or page


class TargetStream:
    """One target's pages and monitor."""

    def __init__(
        self, name: str, profile: Profile, limits: Limits, catalogue: Catalogue | None = None
    ) -> None:
        self.monitor = TargetMonitor(name, profile, catalogue)
        self.gpus: GpuSource | None = None
        self._pages, self._catalogue = PageReader(limits), catalogue

    def begin_anew(self) -> None:
        """Forget what was seen: from now on another process is watched."""
        self.monitor = TargetMonitor(self.monitor.name, self.monitor.profile, self._catalogue)

    def take(
        self, t_s: float, body: str | bytes, content_type: str, status: int | None = None
    ) -> list[Diagnosis]:
        """The diagnoses after a page; one that cannot be read counts as a failed scrape."""
        return self.judge(t_s, self._pages.page(t_s, body, content_type, status))

    def replay(self, entry: Entry) -> list[Diagnosis]:
        """The diagnoses after a recorded scrape."""
        return self.judge(entry.t_s, self.read(entry))

    def read(self, entry: Entry) -> Page | CollectError:
        """The page of a recorded scrape, or why there is none. Pages are read in their order."""
        return self._pages.read(entry)

    def judge(self, t_s: float, page: Page | CollectError) -> list[Diagnosis]:
        """The diagnoses after a page that was read, or after a scrape that gave none."""
        if isinstance(page, CollectError):
            return self.monitor.failed(t_s, page)
        return self.monitor.page(t_s, page, self.gpus.reading(t_s) if self.gpus else NO_GPUS)

    def scrape(self, fetcher: Fetcher) -> list[Diagnosis]:
        """The diagnoses after one GET of a live page."""
        t_s = time.time()
        return self.judge(t_s, self.fetch(fetcher, t_s))

    def fetch(self, fetcher: Fetcher, t_s: float) -> Page | CollectError:
        """The page after one GET at `t_s`, or why there is none."""
        try:
            fetched = fetcher.get()
        except CollectError as error:
            return error
        return self._pages.page(t_s, fetched.body, fetched.content_type, None)


def _stale_error(page: Page, t_s: float) -> CollectError | None:
    """Why a page tells nothing of now: vLLM stamps no samples, but what passes its page on may hand
    out an old one with the times at which it was read. None where it does tell."""
    for position, at_s in page.timestamps_s.items():
        name = page.layout.series[position].name
        if abs(at_s - t_s) > STALE_AFTER_S and "vllm" in name:
            way = "before" if at_s < t_s else "after"
            return CollectError(
                f"{name} carries a time {span(abs(at_s - t_s))} {way} the scrape: the page does "
                "not tell what is now",
                kind="stale",
                hint="See what passes the page on, and the clocks on the way.",
            )
    return None


class GpuStream:
    """A DCGM exporter page beside a target."""

    def __init__(self, url: str, settings: FetchSettings, limits: Limits, window_s: float) -> None:
        self.monitor = GpuMonitor(window_s=window_s)
        self._collector = DcgmCollector(url, settings, limits)

    def scrape(self) -> None:
        """One GET; what goes wrong is said with the target's diagnosis, it stops nothing."""
        t_s = time.time()
        try:
            self.monitor.take(t_s, self._collector.collect())
        except CollectError as error:
            self.monitor.failed(str(error))

    def close(self) -> None:
        """Close the connection."""
        self._collector.close()


def capture_name(path: str | Path) -> str:
    """A target's name from a capture's file name: `cascade.r0.jsonl.gz` is `cascade.r0`."""
    return Path(path).name.removesuffix(".gz").removesuffix(".jsonl")


def ticks(interval_s: float, for_s: float | None, *, least: int = 1) -> Iterator[float]:
    """Yields at once and then each interval until `for_s` has passed: seconds since the start.

    A tick that took longer than the interval is followed at once; lost ticks are not made up for.
    There are at least `least` of them, however long they take.
    """
    start_s = due_s = time.monotonic()
    for ticked in itertools.count(1):
        yield time.monotonic() - start_s
        due_s = max(due_s + interval_s, time.monotonic())
        if for_s is not None and due_s - start_s > for_s + 0.01 and ticked >= least:
            return
        time.sleep(max(0.0, due_s - time.monotonic()))
