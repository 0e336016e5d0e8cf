"""Captures: recorded, and read in order of time. I/O edge."""

from __future__ import annotations

import heapq
import signal
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kneewatch.agent.console import NO_DATA, OK, say, ticks
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.settings.table import BY_KEY
from kneewatch.collector.captures.capture import CaptureReader, CaptureWriter
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.errors import CaptureError, CollectError, SettingsError
from kneewatch.collector.exposition import Limits, PageParser
from kneewatch.collector.http.address import FetchSettings, metrics_url, parse_target, shown_url
from kneewatch.collector.page import Page
from kneewatch.rules.formatting import duration, span

if TYPE_CHECKING:
    from kneewatch.agent.server.process import HostReader
    from kneewatch.collector.http.fetch import Fetcher

STATUS_OK = 200

STALE_AFTER_S = 300.0
"""Maximum difference in seconds between the timestamp of a sample and the time of the scrape.
Prometheus considers a series stale after the same time."""


# --- Pages of captures, in order of time ----------------------------------------------------------


Numbered = tuple[int, Entry]


def capture_name(path: str | Path) -> str:
    """The name of a target, derived from the file name of its capture: `cascade.r0.jsonl.gz`
    becomes `cascade.r0`."""
    return Path(path).name.removesuffix(".gz").removesuffix(".jsonl")


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
    """Several captures, merged in order of time. Unreadable parts are reported on stderr.

    `unusable` is the number of captures without a readable entry. If no capture has one, iterating
    raises CaptureError.

    Raises:
        CaptureError: a file does not exist or may not be read.
    """

    def __init__(
        self, paths: Sequence[str], *, from_s: float | None = None, to_s: float | None = None
    ) -> None:
        self._readers = [CaptureReader(path, from_s=from_s, to_s=to_s) for path in paths]
        self.unusable = 0

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
                say(
                    f"{reader.path}: {reader.damaged} damaged entries skipped; "
                    f"the first: {reader.first_damage}"
                )

    def _numbered(self, index: int, reader: CaptureReader) -> Iterator[Numbered]:
        try:
            for entry in reader:
                yield index, entry
        except CaptureError as error:
            self.unusable += 1
            if self.unusable == len(self._readers):
                raise
            say(str(error))


class PageReader:
    """Parses the pages of one target, live or recorded. Pages must be read in order."""

    def __init__(self, limits: Limits) -> None:
        self._parser, self._gpus = PageParser(limits), PageParser(limits)

    def read(self, entry: Entry) -> Page | CollectError:
        """The page of a recorded scrape, or the error of that scrape."""
        if entry.body is None:
            return CollectError(entry.error or "the scrape failed", kind="recorded")
        page = self.page(entry.t_s, entry.body, entry.content_type, entry.status)
        if isinstance(page, CollectError) or not (entry.host or entry.dcgm):
            return page
        gpus = None
        if entry.dcgm:
            with suppress(CollectError):  # an exporter that fails must not hide the server's page
                gpus = self._gpus.parse(entry.dcgm)
        return replace(page, host=entry.host, gpus=gpus)

    def page(
        self, t_s: float, body: str | bytes, content_type: str, status: int | None
    ) -> Page | CollectError:
        """Parse a page. Returns an error if the page is invalid or stale."""
        if status not in (None, STATUS_OK):
            return CollectError(f"HTTP status {status}", kind="http_status")
        try:
            page = self._parser.parse(body, content_type=content_type)
        except CollectError as error:
            return error.detached()
        return _stale_error(page, t_s) or page


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


# --- The command record ---------------------------------------------------------------------------


def record(url: str, file: Path, settings: Settings, *, for_s: float | None) -> int:
    """Record a server into a capture until `for_s` has passed or Ctrl-C is pressed. Returns the
    exit status."""
    # Lazy: replays need no HTTP.
    from kneewatch.collector.http.fetch import Fetcher

    pages = failures = 0
    failing = False
    fetcher = Fetcher(metrics_url(url), settings.fetch())
    host = _RecordedHost(url) if settings["server.probe"] else None
    gpus = _RecordedGpus(url, settings)
    try:
        with closing(fetcher), closing(gpus), CaptureWriter(file) as out:
            until = "Ctrl-C ends it" if for_s is None else f"for {duration(for_s)}"
            say(f"{shown_url(url)} every {duration(settings['interval_s'])} to {file}; {until}")
            for _ in ticks(settings["interval_s"], for_s):
                entry, hint = _scrape_entry(fetcher)
                entry = entry if host is None else host.added(entry)
                entry = gpus.added(entry)
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
            from kneewatch.agent.server.process import HostReader, read_process

            _, server = read_process(self._url, entry.t_s)
            self._reader = None if server is None else HostReader(server.pid)
            self._is_due = False
        return entry if self._reader is None else replace(entry, host=self._reader.read())


def gpu_page(settings: Settings) -> str | None:
    """URL of the configured GPU page. None for the values `nvml` and `none`, which only the daemon
    uses."""
    value: str | None = settings["gpu_metrics"]
    return None if value in BY_KEY["gpu_metrics"].choices else value


def gpu_access(targets: Sequence[str], settings: Settings) -> tuple[str, FetchSettings] | None:
    """The URL of the GPU page that is configured for these targets, and how to fetch it; None if
    none is configured. The targets' credentials are sent only if the page is on their server."""
    url, fetch = gpu_page(settings), settings.fetch()
    if url is None or not targets:
        return None
    if any(parse_target(target).origin != parse_target(url).origin for target in targets):
        fetch = fetch.without_secrets()
    return metrics_url(url), fetch


class _RecordedGpus:
    """Adds the page of a DCGM exporter to recorded scrapes, if the setting `gpu_metrics` names one.

    Raises:
        SettingsError: the setting is no address.
    """

    def __init__(self, url: str, settings: Settings) -> None:
        self._fetcher: Fetcher | None = None
        self._failed = False
        if settings["gpu_metrics"] is None:
            return
        # Lazy: replays need no HTTP.
        from kneewatch.collector.http.fetch import Fetcher

        page = gpu_access([url], settings)
        if page is None:
            raise SettingsError("record reads GPUs from a page: gpu_metrics must be its address")
        self._fetcher = Fetcher(*page)

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()

    def added(self, entry: Entry) -> Entry:
        """A copy of the entry with the page; the entry itself without a page or an answer."""
        if self._fetcher is None:
            return entry
        try:
            body = self._fetcher.get().body.decode("utf-8", "replace")
        except CollectError as error:
            if not self._failed:
                say(f"{error} (continuing without the GPUs' page)")
            self._failed = True
            return entry
        self._failed = False
        return replace(entry, dcgm=body)


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
