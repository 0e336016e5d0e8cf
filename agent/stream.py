"""The stream of a target turns live or recorded scrapes into diagnoses. Also reads and writes
captures. I/O edge."""

from __future__ import annotations

import heapq
import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from kneewatch.agent.console import NO_DATA, OK, say
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.settings.table import BY_KEY
from kneewatch.collector.captures.capture import CaptureReader, CaptureWriter
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.errors import CaptureError, CollectError
from kneewatch.collector.exposition import Limits, PageParser
from kneewatch.collector.http.address import metrics_url, parse_target, shown_url
from kneewatch.collector.http.fetch_settings import FetchSettings
from kneewatch.collector.samples import Page
from kneewatch.diagnose.deployment.server_facts import NO_STATE
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.engine.engine_monitor import Catalogue
from kneewatch.diagnose.engine.target_monitor import TargetMonitor
from kneewatch.diagnose.gpu import NO_GPUS, GpuMonitor, GpuReading
from kneewatch.rules.formatting import span

if TYPE_CHECKING:
    from kneewatch.agent.server.host import HostReader
    from kneewatch.agent.server.watch import ServerWatch
    from kneewatch.collector.http.fetch import Fetched, Fetcher, Scrape

STATUS_OK = 200

STALE_AFTER_S = 300.0
"""Maximum difference in seconds between the timestamp of a sample and the time of the scrape.
Prometheus considers a series stale after the same time."""


class GpuSource(Protocol):
    """The GPUs of a target."""

    def reading(self, now_s: float) -> GpuReading:
        """The newest GPU signals."""
        ...


class PageReader:
    """Parses the pages of one target, live or recorded. Pages must be read in order."""

    def __init__(self, limits: Limits) -> None:
        self._parser = PageParser(limits)

    def read(self, entry: Entry) -> Page | CollectError:
        """The page of a recorded scrape, or the error of that scrape."""
        if entry.body is None:
            return CollectError(entry.error or "the scrape failed", kind="recorded")
        page = self.page(entry.t_s, entry.body, entry.content_type, entry.status)
        return replace(page, host=entry.host) if entry.host and isinstance(page, Page) else page

    def page(
        self, t_s: float, body: str | bytes, content_type: str, status: int | None
    ) -> Page | CollectError:
        """Parse a page. Returns an error if the page is invalid or stale."""
        if status not in (None, STATUS_OK):
            return CollectError(f"HTTP status {status}", kind="http_status")
        try:
            page = self._parser.parse(body, content_type=content_type)
        except CollectError as error:
            return error
        return _stale_error(page, t_s) or page


class TargetStream:
    """One target's parser and monitor."""

    def __init__(
        self, name: str, profile: Profile, limits: Limits, catalogue: Catalogue | None = None
    ) -> None:
        self.monitor = TargetMonitor(name, profile, catalogue)
        self.gpus: GpuSource | None = None
        self.server: ServerWatch | None = None
        self.computing: Callable[[], AbstractContextManager[None]] = nullcontext
        """A context for work that only needs the CPU. The daemon replaces it."""
        self._pages, self._catalogue = PageReader(limits), catalogue
        self._fetch_s: float | None = None
        self.server_state = NO_STATE
        """The state of the server after a failed scrape; NO_STATE after a successful one."""

    def reset(self) -> None:
        """Discard all state, because the next pages come from another process."""
        self.monitor = TargetMonitor(self.monitor.name, self.monitor.profile, self._catalogue)

    def take(
        self, t_s: float, body: str | bytes, content_type: str, status: int | None = None
    ) -> list[Diagnosis]:
        """The diagnoses after a page. An unreadable page counts as a failed scrape."""
        return self.judge(t_s, self._pages.page(t_s, body, content_type, status))

    def replay(self, entry: Entry) -> list[Diagnosis]:
        """The diagnoses after a recorded scrape."""
        return self.judge(entry.t_s, self.read(entry))

    def read(self, entry: Entry) -> Page | CollectError:
        """The page of a recorded scrape, or the error of that scrape. Pages must be read in
        order."""
        return self._pages.read(entry)

    def judge(self, t_s: float, page: Page | CollectError) -> list[Diagnosis]:
        """The diagnoses after a parsed page or, if `page` is an error, after a failed scrape."""
        if self.server is not None:
            self.server.read_log(t_s, self.monitor)
        if isinstance(page, CollectError):
            server = self.server
            state = NO_STATE if server is None else server.state(t_s, page, self.monitor)
            self.server_state = state
            return self.monitor.failed(t_s, page, state)
        self.server_state = NO_STATE
        gpus = self.gpus.reading(t_s) if self.gpus else NO_GPUS
        if page.host:
            self.monitor.set_host(page.host)
        with self.computing():
            diagnoses = self.monitor.page(t_s, page, gpus, fetch_s=self._fetch_s)
        if self.server is not None:
            self.server.update(t_s, self.monitor, gpus)
        return diagnoses

    def scrape(self, fetcher: Fetcher) -> list[Diagnosis]:
        """Scrape a live page once. Returns the diagnoses after that."""
        return self.scraped(fetcher.scrape(time.time()))

    def scraped(self, scrape: Scrape) -> list[Diagnosis]:
        """The diagnoses after a scrape that was fetched earlier."""
        return self.judge(scrape.t_s, self._served(scrape.t_s, scrape.answer))

    def fetch(self, fetcher: Fetcher, t_s: float) -> Page | CollectError:
        """Scrape a live page once at `t_s`. Returns the page, or the error."""
        return self._served(t_s, fetcher.scrape(t_s).answer)

    def _served(self, t_s: float, answer: Fetched | CollectError) -> Page | CollectError:
        if isinstance(answer, CollectError):
            return answer
        self._fetch_s = answer.duration_s
        with self.computing():
            return self._pages.page(t_s, answer.body, answer.content_type, None)


def _stale_error(page: Page, t_s: float) -> CollectError | None:
    """An error if the page is stale, else None.

    vLLM's samples have no timestamps, but a proxy may add them, and may return an old page.
    """
    for position, at_s in page.timestamps_s.items():
        name = page.layout.series[position].name
        if abs(at_s - t_s) > STALE_AFTER_S and "vllm" in name:
            direction = "before" if at_s < t_s else "after"
            return CollectError(
                f"{name} has a timestamp {span(abs(at_s - t_s))} {direction} the scrape: the "
                "page is stale",
                kind="stale",
                hint="Check the proxy or exporter in between, and the clocks.",
            )
    return None


class GpuStream:
    """Reads the DCGM exporter page with a target's GPUs."""

    def __init__(self, url: str, settings: FetchSettings, limits: Limits, window_s: float) -> None:
        # Lazy: recordings need no HTTP.
        from kneewatch.collector.gpu.page import DcgmCollector

        self.monitor = GpuMonitor(window_s=window_s)
        self._collector = DcgmCollector(url, settings, limits)

    def scrape(self) -> None:
        """Read the page once. An error appears in the diagnosis of the target."""
        t_s = time.time()
        try:
            self.monitor.take(t_s, self._collector.collect())
        except CollectError as error:
            self.monitor.failed(str(error))

    def close(self) -> None:
        """Close the connection."""
        self._collector.close()


def gpu_page(settings: Settings) -> str | None:
    """URL of the configured GPU page. None for the values `nvml` and `none`, which only the daemon
    uses."""
    value: str | None = settings["gpu_metrics"]
    return None if value in BY_KEY["gpu_metrics"].choices else value


def gpu_stream(targets: Sequence[str], settings: Settings, window_s: float) -> GpuStream | None:
    """The stream of the GPU page that is configured for these targets; None if none is configured.
    The targets' credentials are sent only if the page is on their server."""
    url, fetch = gpu_page(settings), settings.fetch()
    if url is None or not targets:
        return None
    if any(parse_target(target).origin != parse_target(url).origin for target in targets):
        fetch = fetch.without_secrets()
    return GpuStream(metrics_url(url), fetch, settings.limits(), window_s)


def capture_name(path: str | Path) -> str:
    """The name of a target, derived from the file name of its capture: `cascade.r0.jsonl.gz`
    becomes `cascade.r0`."""
    return Path(path).name.removesuffix(".gz").removesuffix(".jsonl")


def ticks(
    interval_s: float,
    for_s: float | None,
    *,
    least: int = 1,
    longer: Callable[[], bool] = lambda: False,
    passed_s: float = 0.0,
) -> Iterator[float]:
    """Yields ticks: the seconds since the start. The start was `passed_s` seconds ago.

    The first tick comes at once, the next ones every `interval_s`. If the work after a tick takes
    longer than the interval, the next tick comes at once and missed ticks are skipped.

    The ticks end when `for_s` has passed, at least `least` ticks were yielded, and `longer` returns
    false.
    """
    start_s = due_s = time.monotonic() - passed_s
    for count in itertools.count(1):
        yield time.monotonic() - start_s
        due_s = max(due_s + interval_s, time.monotonic())
        over = for_s is not None and due_s - start_s > for_s + 0.01 and count >= least
        if over and not longer():
            return
        time.sleep(max(0.0, due_s - time.monotonic()))


# --- Captures: the command record, and several read in order of time ------------------------------


Numbered = tuple[int, Entry]
BATCH_ENTRIES = 16


def record(url: str, file: Path, settings: Settings, *, for_s: float | None) -> int:
    """Record a server into a capture until `for_s` has passed or Ctrl-C is pressed. Returns the
    exit status."""
    # Lazy: replays need no HTTP.
    from kneewatch.collector.http.fetch import Fetcher

    pages = failures = 0
    failing = False
    fetcher = Fetcher(metrics_url(url), settings.fetch())
    host = _RecordedHost(url) if settings["server.probe"] else None
    try:
        with closing(fetcher), CaptureWriter(file) as out:
            until = "Ctrl-C ends it" if for_s is None else f"for {for_s:g} s"
            say(f"{shown_url(url)} every {settings['interval_s']:g} s to {file}; {until}")
            for _ in ticks(settings["interval_s"], for_s):
                entry, hint = _scrape_entry(fetcher)
                entry = entry if host is None else host.added(entry)
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


class _RecordedHost:
    """Adds host signals to recorded scrapes if the server runs on this node.

    The server's process is looked up at the first page, and again at the first page after a failed
    scrape, because it may be a new process.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._reader: HostReader | None = None
        self._is_due = True

    def added(self, entry: Entry) -> Entry:
        """A copy of the entry with the host signals. For a failed scrape, or a server on another
        node, the entry itself."""
        if entry.error:
            self._is_due = True
            return entry
        if self._is_due:
            # Lazy: most commands read no process.
            from kneewatch.agent.server.host import HostReader
            from kneewatch.agent.server.process import read_process

            _, server = read_process(self._url, entry.t_s)
            self._reader = None if server is None else HostReader(server.pid)
            self._is_due = False
        return entry if self._reader is None else replace(entry, host=self._reader.read())


def _scrape_entry(fetcher: Fetcher) -> tuple[Entry, str]:
    """Scrape once. Returns the scrape as an entry of a capture, and a hint if the scrape failed,
    else ""."""
    t_s = round(time.time(), 3)
    try:
        fetched = fetcher.get()
    except CollectError as error:
        return Entry(t_s, None, str(error)), f"; try: {error.hint}" if error.hint else ""
    body = fetched.body.decode("utf-8", "replace")
    return Entry(t_s, body, "", fetched.status, fetched.content_type), ""


@contextmanager
def sigint_blocked() -> Generator[None]:
    """A context in which Ctrl-C is delayed, so that the number of written pages is counted
    correctly."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def capture_names(paths: Sequence[str]) -> list[str]:
    """A target name for each capture. If files have the same name, their paths distinguish the
    targets."""
    names = [capture_name(path) for path in paths]
    counts = Counter(names)
    return [
        name if counts[name] == 1 else str(Path(path).with_name(name))
        for name, path in zip(names, paths, strict=True)
    ]


class Captures:
    """Several captures, merged in order of time. `on_message` is called with messages about
    unreadable parts.

    `unusable` is the number of captures without a readable entry. If no capture has one, iterating
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
        """Yields all entries, each with the index of its capture."""
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
        """Yields all entries in batches. Processing many in a row is faster, because code and data
        stay in the CPU caches."""
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
