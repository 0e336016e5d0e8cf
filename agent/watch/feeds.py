"""Terminal view: the sources of data for the screen (servers, recordings or a running daemon). I/O
edge."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stream import GPU_INTERVAL_S, GpuStream, TargetStream
from kneewatch.agent.watch.state import Kind, ScreenState
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.errors import CaptureError, CollectError
from kneewatch.collector.http.address import METRICS_PATH, FetchSettings, parse_target
from kneewatch.collector.http.fetch import Fetcher
from kneewatch.collector.packaged import decoder
from kneewatch.diagnose.verdict import Verdict
from kneewatch.diagnose.verdict_json import DocumentError, decode
from kneewatch.rules.wire import UnixTime

SLOWEST, FASTEST = 1 / 8, 128.0
GAP_MAX_S = 60.0
"""Maximum seconds between two pages when a recording is played. A longer gap is shortened to
this."""


class Playback:
    """Playing speed, pause and stop. The feeds and the screen share it. Thread-safe."""

    def __init__(self, speed: float = 1.0) -> None:
        self._changed = threading.Condition()
        self._speed = min(FASTEST, max(SLOWEST, speed))
        self._paused = False
        self._stopped = False

    @property
    def speed(self) -> float:
        """Seconds of a recording that are played per second of real time."""
        return self._speed

    def change_speed(self, factor: float) -> None:
        """Multiply the playing speed of recordings by `factor`, within SLOWEST and FASTEST."""
        with self._changed:
            self._speed = min(FASTEST, max(SLOWEST, self._speed * factor))
            self._changed.notify_all()

    def pause(self, paused: bool) -> None:
        """Pause or resume recordings. Servers are scraped even during a pause."""
        with self._changed:
            self._paused = paused
            self._changed.notify_all()

    def stop(self) -> None:
        """End all waits at once, so that the feeds stop."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def ticks(self, interval_s: float, offset_s: float = 0.0) -> Iterator[None]:
        """Yields once per interval, for the first time after `offset_s`, until the program stops.
        Ticks that a slow caller missed are skipped."""
        due_s = time.monotonic() + offset_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, max(0.0, due_s - time.monotonic()))
            if self._stopped:
                return
            yield
            due_s = max(due_s + interval_s, time.monotonic())

    def play(self, span_s: float) -> bool:
        """Wait while `span_s` seconds of a recording pass. Returns False if the program stops."""
        left_s = min(span_s, GAP_MAX_S)
        with self._changed:
            while left_s > 0 and not self._stopped:
                if self._paused:
                    self._changed.wait()
                    continue
                speed, began_s = self._speed, time.monotonic()
                self._changed.wait(left_s / speed)
                left_s -= (time.monotonic() - began_s) * speed
            return not self._stopped


# --- Servers and recordings -----------------------------------------------------------------------


ENDED = "end of the recording: this is its last state"
LEAVE_S = 0.5
"""Seconds that `stop` waits for threads. A thread that hangs on a server is abandoned."""

INTERVALS_MISSED = 3
PATIENCE_S = 10.0


class Feed(Struct, frozen=True):
    """A source of diagnoses. `run` puts them on the screen until the program stops. The source
    counts as stale if it sends no data for `patience_s(interval_s)` seconds; a recording never
    does."""

    name: str
    kind: Kind
    interval_s: float
    run: Callable[[ScreenState, Playback], None]


def server_feed(
    name: str, stream: TargetStream, fetcher: Fetcher, interval_s: float, offset_s: float = 0.0
) -> Feed:
    """The feed of a live server that is scraped at each interval, first after `offset_s`."""

    def run(screen: ScreenState, pace: Playback) -> None:
        with closing(fetcher):
            for _ in pace.ticks(interval_s, offset_s):
                if diagnoses := stream.scrape(fetcher):
                    screen.put(name, diagnoses, now_s=diagnoses[0].t_s)

    return Feed(name, Kind.SERVER, interval_s, run)


def recording_feed(name: str, stream: TargetStream, reader: CaptureReader) -> Feed:
    """The feed of a capture, played at the speed at which it was recorded."""

    def run(screen: ScreenState, pace: Playback) -> None:
        last_s: float | None = None
        try:
            for entry in reader:
                if last_s is not None and not pace.play(entry.t_s - last_s):
                    return
                last_s = entry.t_s
                if diagnoses := stream.replay(entry):
                    screen.put(name, diagnoses, now_s=entry.t_s)
        except CaptureError as error:
            screen.set_note(name, str(error))
        else:
            screen.set_note(name, ENDED)

    return Feed(name, Kind.RECORDING, 0.0, run)


def gpu_feed(stream: GpuStream) -> Feed:
    """The feed of the page with the servers' GPUs. It has no row on the screen: the servers'
    streams read it."""

    def run(_screen: ScreenState, pace: Playback) -> None:
        with closing(stream):
            for _ in pace.ticks(GPU_INTERVAL_S):
                stream.scrape()

    return Feed("GPUs", Kind.GPUS, GPU_INTERVAL_S, run)


def patience_s(interval_s: float) -> float:
    """Seconds without new data after which a source counts as stale. Computed from its scrape
    interval."""
    return max(INTERVALS_MISSED * interval_s, PATIENCE_S)


# --- A running daemon -----------------------------------------------------------------------------


SCHEMA = "kneewatch.triage/1"
PATH = "/api/v1/triage"
PAGES = (PATH, "/triage", METRICS_PATH)
"""Paths that are removed from a daemon's URL, because people copy the URL of a page."""

SECRETS = ("bearer_token_file", "bearer_token_env", "headers", "header_files", "header_envs")


HINTS = {
    "refused": "check that `kneewatch run` listens on this address; its default port is 9877",
    "auth": "pass the file with the daemon's token: --token-file FILE",
    "not_found": "check that this is the URL of a kneewatch daemon",
    "not_metrics": "check that this is the URL of a kneewatch daemon",
}
"""Hints by kind of error, for errors of the daemon. The usual hints are about scraping vLLM."""


class TriageDocument(Struct, frozen=True):
    """The document `kneewatch.triage/1`; its verdicts are not decoded yet."""

    schema: Literal["kneewatch.triage/1"]
    t_s: UnixTime = msgspec.field(name="t")
    targets: list[msgspec.Raw]
    watching: list[dict[str, Any]] = []
    pending: list[str] = []

    @property
    def late(self) -> frozenset[str]:
        """The targets whose data is old."""
        return frozenset(str(row.get("target")) for row in self.watching if row.get("late"))

    def verdicts(self) -> tuple[list[Verdict], str]:
        """The verdicts that can be read, and why one cannot."""
        verdicts: list[Verdict] = []
        problem = ""
        for row in self.targets:
            try:
                verdicts.append(decode(bytes(row)))
            except DocumentError as error:
                problem = str(error)
        return verdicts, problem


TRIAGE = decoder(TriageDocument)


def read_triage(body: bytes) -> TriageDocument:
    """Decode a triage document.

    Raises:
        DocumentError: the body is not a triage document.
    """
    try:
        return TRIAGE.decode(body)
    except msgspec.ValidationError as exc:
        raise DocumentError(
            f"the answer is not a {SCHEMA} document; check the daemon's version"
        ) from exc
    except msgspec.DecodeError as exc:
        raise DocumentError(
            "the answer is not JSON; check that the URL is a kneewatch daemon's"
        ) from exc


def daemon_feed(url: str, settings: Settings, token_file: Path | None) -> Feed:
    """The feed of the triage endpoint of the daemon at `url`.

    Raises:
        CollectError: the URL is invalid.
    """
    address = parse_target(url)
    prefix = address.path.partition("?")[0].rstrip("/")
    for page in PAGES:
        prefix = prefix.removesuffix(page)
    endpoint = replace(address, path=prefix + PATH)
    fetcher = Fetcher(endpoint.full_url(), access(settings, token_file))
    interval_s: float = settings["interval_s"]

    def run(screen: ScreenState, pace: Playback) -> None:
        with closing(fetcher):
            for _ in pace.ticks(interval_s):
                _poll(endpoint.url, fetcher, screen)

    return Feed(endpoint.url, Kind.DAEMON, interval_s, run)


def _poll(name: str, fetcher: Fetcher, screen: ScreenState) -> None:
    try:
        triage = read_triage(fetcher.get().body)
    except CollectError as error:
        hint = HINTS.get(error.kind, error.hint)
        screen.set_note(name, f"{error}; try: {hint}" if hint else str(error))
    except DocumentError as error:
        screen.set_note(name, f"{name}: {error}")
    else:
        verdicts, problem = triage.verdicts()
        screen.put(name, verdicts, now_s=triage.t_s, late=triage.late, pending=triage.pending)
        if problem or not (verdicts or triage.pending):
            screen.set_note(name, problem or "the daemon watches no target")


def access(settings: Settings, token_file: Path | None) -> FetchSettings:
    """The settings for requests to the daemon. Tokens and headers are used only from the command
    line: those in the file or environment are meant for the scraped servers."""
    scraping = settings.fetch()
    from_flags: dict[str, Any] = {
        key: getattr(scraping, key)
        for key in SECRETS
        if settings.origin(f"fetch.{key}").startswith("flag ")
    }
    fetch = replace(scraping.without_secrets(), **from_flags)
    if token_file is not None:
        fetch = replace(fetch, bearer_token_file=str(token_file), bearer_token_env=None)
    return replace(fetch, headers={**fetch.headers, "Accept": "application/json"})


# --- The threads of all feeds ---------------------------------------------------------------------


class FeedThreads:
    """Runs each feed in a thread. `bug` is the unexpected exception that one of them raised; None
    if there was none."""

    def __init__(self, feeds: Sequence[Feed], screen: ScreenState, pace: Playback) -> None:
        self.bug: BaseException | None = None
        self._screen, self._pace = screen, pace
        for feed in feeds:
            screen.expect(feed.name, feed.kind, patience_s=patience_s(feed.interval_s))
        self._threads = [
            threading.Thread(target=self._run, args=(feed,), name="kneewatch-feed", daemon=True)
            for feed in feeds
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads. A thread that hangs is abandoned."""
        self._pace.stop()
        until_s = time.monotonic() + LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self, feed: Feed) -> None:
        try:
            feed.run(self._screen, self._pace)
        except BaseException as bug:  # noqa: BLE001 - raised again once the screen has closed
            self.bug = bug
