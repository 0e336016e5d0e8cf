"""Where the data on screen comes from: servers, recordings or a running daemon."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import orjson

from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stream import GpuStream, TargetStream
from kneewatch.agent.terminal.state import Kind, ScreenState
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.errors import CaptureError, CollectError
from kneewatch.collector.http.address import METRICS_PATH, parse_target
from kneewatch.collector.http.connection import FetchSettings
from kneewatch.collector.http.fetch import Fetcher
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.reports.diagnosis_json import DocumentError, diagnosis_of

SLOWEST, FASTEST = 1 / 8, 128.0
GAP_MAX_S = 60.0
"""A longer gap in a recording is played as one of this length."""


class Pace:
    """Shared by the feeds and the screen. Safe between threads."""

    def __init__(self, speed: float = 1.0) -> None:
        self._changed = threading.Condition()
        self._speed = min(FASTEST, max(SLOWEST, speed))
        self._paused = False
        self._stopped = False

    @property
    def speed(self) -> float:
        """How many seconds of a recording are played in one."""
        return self._speed

    @property
    def stopped(self) -> bool:
        """Whether all has ended."""
        return self._stopped

    def change_speed(self, factor: float) -> None:
        """Play recordings faster or slower."""
        with self._changed:
            self._speed = min(FASTEST, max(SLOWEST, self._speed * factor))
            self._changed.notify_all()

    def pause(self, paused: bool) -> None:
        """Stop playing recordings, or go on. Servers are scraped all the same."""
        with self._changed:
            self._paused = paused
            self._changed.notify_all()

    def stop(self) -> None:
        """End every wait."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def until(self, due_s: float) -> bool:
        """Wait for a moment of the monotonic clock; False once all has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, max(0.0, due_s - time.monotonic()))
            return not self._stopped

    def play(self, span_s: float) -> bool:
        """Wait for so much of a recording to pass; False once all has ended."""
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


# --- Where the screen's numbers come from: servers and recordings, each in a thread of its own ----


ENDED = "the recording has ended: this is how it was at its end"
LEAVE_S = 0.5
"""How long the end waits for threads; one that hangs on a server is left behind."""

GPU_INTERVAL_S = 10.0
INTERVALS_MISSED = 3
PATIENCE_S = 10.0


class Feed(Protocol):
    """One source; `run` tells the wall until the pace says that all has ended."""

    @property
    def name(self) -> str:
        """The source's name on the wall."""
        ...

    @property
    def kind(self) -> Kind:
        """What it is."""
        ...

    @property
    def patience_s(self) -> float:
        """After so long without news what it told is the past."""
        ...

    def run(self, wall: ScreenState, pace: Pace) -> None:
        """Tell the wall."""
        ...


@dataclass(frozen=True, slots=True)
class ServerFeed:
    """A live server, scraped each interval; the first scrape comes after `offset_s`."""

    name: str
    stream: TargetStream
    fetcher: Fetcher
    interval_s: float
    offset_s: float = 0.0
    kind: Kind = Kind.SERVER

    @property
    def patience_s(self) -> float:
        """After so long without news what it told is the past."""
        return patience_s(self.interval_s)

    def run(self, wall: ScreenState, pace: Pace) -> None:
        """Scrape and tell."""
        due_s = time.monotonic() + self.offset_s
        with closing(self.fetcher):
            while pace.until(due_s):
                diagnoses = self.stream.scrape(self.fetcher)
                if diagnoses:
                    wall.put(self.name, diagnoses, now_s=diagnoses[0].t_s)
                due_s = max(due_s + self.interval_s, time.monotonic())


@dataclass(frozen=True, slots=True)
class RecordingFeed:
    """A capture, played at the pace it was recorded at."""

    name: str
    stream: TargetStream
    reader: CaptureReader
    kind: Kind = Kind.RECORDING
    patience_s: float = 0.0

    def run(self, wall: ScreenState, pace: Pace) -> None:
        """Play and tell."""
        last_s: float | None = None
        try:
            for entry in self.reader:
                if last_s is not None and not pace.play(entry.t_s - last_s):
                    return
                last_s = entry.t_s
                diagnoses = self.stream.replay(entry)
                if diagnoses:
                    wall.put(self.name, diagnoses, now_s=entry.t_s)
        except CaptureError as error:
            wall.say(self.name, str(error))
        else:
            wall.say(self.name, ENDED)


@dataclass(frozen=True, slots=True)
class GpuFeed:
    """The page of the servers' GPUs: it has no line of its own, their diagnoses tell of it."""

    stream: GpuStream
    name: str = "GPUs"
    kind: Kind = Kind.GPUS
    patience_s: float = 0.0

    def run(self, wall: ScreenState, pace: Pace) -> None:
        """Scrape; the servers' streams read it."""
        del wall
        due_s = time.monotonic()
        with closing(self.stream):
            while pace.until(due_s):
                self.stream.scrape()
                due_s = max(due_s + GPU_INTERVAL_S, time.monotonic())


class Feeds:
    """All feeds at work. `bug` is what went wrong in one that should not have."""

    def __init__(self, feeds: Sequence[Feed], wall: ScreenState, pace: Pace) -> None:
        self.bug: BaseException | None = None
        self._wall, self._pace = wall, pace
        for feed in feeds:
            wall.expect(feed.name, feed.kind, patience_s=feed.patience_s)
        self._threads = [
            threading.Thread(target=self._run, args=(feed,), name="kneewatch-feed", daemon=True)
            for feed in feeds
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End; what hangs is left behind."""
        self._pace.stop()
        until_s = time.monotonic() + LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self, feed: Feed) -> None:
        try:
            feed.run(self._wall, self._pace)
        except BaseException as bug:  # noqa: BLE001 - it is raised again where the screen has gone
            self.bug = bug


def patience_s(interval_s: float) -> float:
    """How long a source may be silent before what it told is the past."""
    return max(INTERVALS_MISSED * interval_s, PATIENCE_S)


# --- A running daemon as a source: its triage endpoint, asked again and again ---------------------


SCHEMA = "kneewatch.triage/1"
PATH = "/api/v1/triage"
PAGES = (PATH, "/triage", METRICS_PATH)
"""What may stand at the end of a daemon's address: people copy the address of a page."""

SECRETS = ("bearer_token_file", "bearer_token_env", "headers", "header_files", "header_envs")


HINTS = {
    "refused": "is `kneewatch run` up there, and listening on this address? Its port is 9877 by "
    "default",
    "auth": "give the file with the daemon's token: --token-file FILE",
    "not_found": "is this the address of a kneewatch daemon?",
    "not_metrics": "is this the address of a kneewatch daemon?",
}
"""What to try, where the hints of a scrape would speak of vLLM."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a daemon told: its time, the diagnoses, the targets that it calls late, those that it
    has not scraped yet, and what of all that could not be read."""

    t_s: float
    diagnoses: list[Diagnosis]
    late: frozenset[str]
    pending: list[str]
    trouble: str


@dataclass(frozen=True, slots=True)
class DaemonFeed:
    """A daemon's triage endpoint."""

    name: str
    fetcher: Fetcher
    interval_s: float
    kind: Kind = Kind.DAEMON

    @property
    def patience_s(self) -> float:
        """After so long without news what it told is the past."""
        return patience_s(self.interval_s)

    def run(self, wall: ScreenState, pace: Pace) -> None:
        """Ask and tell."""
        due_s = time.monotonic()
        with closing(self.fetcher):
            while pace.until(due_s):
                self._ask(wall)
                due_s = max(due_s + self.interval_s, time.monotonic())

    def _ask(self, wall: ScreenState) -> None:
        try:
            told = read(self.fetcher.get().body)
        except CollectError as error:
            hint = HINTS.get(error.kind, error.hint)
            wall.say(self.name, f"{error}; try: {hint}" if hint else str(error))
        except DocumentError as error:
            wall.say(self.name, f"{self.name}: {error}")
        else:
            wall.put(
                self.name, told.diagnoses, now_s=told.t_s, late=told.late, pending=told.pending
            )
            if told.trouble or not (told.diagnoses or told.pending):
                wall.say(self.name, told.trouble or "the daemon watches no target")


def read(body: bytes) -> Told:
    """What a triage document tells; one diagnosis that cannot be read does not hide the others.

    Raises:
        DocumentError: it is no triage document.
    """
    try:
        document: object = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise DocumentError("the answer is not JSON; is this a kneewatch daemon?") from exc
    whole = cast("dict[str, Any]", document) if isinstance(document, dict) else {}
    t_s = whole.get("t")
    numeric = isinstance(t_s, int | float) and not isinstance(t_s, bool)
    if whole.get("schema") != SCHEMA or not numeric or not isinstance(whole.get("targets"), list):
        raise DocumentError(f"the answer is no {SCHEMA} document; is the daemon another version?")
    found: list[Diagnosis] = []
    trouble = ""
    for row in _rows(whole, "targets"):
        try:
            found.append(diagnosis_of(cast("Mapping[str, Any]", row)))
        except DocumentError as error:
            trouble = str(error)
    watching = [cast("dict[str, Any]", row) for row in _rows(whole, "watching") if _is_object(row)]
    late = frozenset(str(row.get("target")) for row in watching if row.get("late") is True)
    pending = [name for name in _rows(whole, "pending") if isinstance(name, str)]
    return Told(float(cast("float", t_s)), found, late, pending, trouble)


def _rows(whole: Mapping[str, Any], key: str) -> list[object]:
    rows: object = whole.get(key)
    return cast("list[object]", rows) if isinstance(rows, list) else []


def _is_object(row: object) -> bool:
    return isinstance(row, dict)


def daemon_feed(url: str, settings: Settings, token_file: str | None) -> DaemonFeed:
    """The feed of the daemon at a URL.

    Raises:
        CollectError: the URL cannot be one.
    """
    address = parse_target(url)
    prefix = address.path.partition("?")[0].rstrip("/")
    for page in PAGES:
        prefix = prefix.removesuffix(page)
    asked = replace(address, path=prefix + PATH)
    fetch = access(settings, token_file)
    return DaemonFeed(asked.url, Fetcher(asked.full_url(), fetch), settings["interval_s"])


def access(settings: Settings, token_file: str | None) -> FetchSettings:
    """How the daemon is asked: of tokens and headers only what the command line gives; a file's or
    the environment's are meant for the servers that are scraped."""
    given = settings.fetch()
    own: dict[str, Any] = {
        key: getattr(given, key)
        for key in SECRETS
        if settings.origin(f"fetch.{key}").startswith("flag ")
    }
    fetch = replace(given.without_secrets(), **own)
    if token_file is not None:
        fetch = replace(fetch, bearer_token_file=token_file, bearer_token_env=None)
    return replace(fetch, headers={**fetch.headers, "Accept": "application/json"})
