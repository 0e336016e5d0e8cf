"""Where the screen's numbers come from: servers and recordings, each in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from kneewatch.agent.source import GpuStream, TargetStream
from kneewatch.agent.terminal.pace import Pace
from kneewatch.agent.terminal.wall import Kind, Wall
from kneewatch.collector.base import CaptureError
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.http.fetch import Fetcher

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

    def run(self, wall: Wall, pace: Pace) -> None:
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

    def run(self, wall: Wall, pace: Pace) -> None:
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

    def run(self, wall: Wall, pace: Pace) -> None:
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

    def run(self, wall: Wall, pace: Pace) -> None:
        """Scrape; the servers' streams read it."""
        del wall
        due_s = time.monotonic()
        with closing(self.stream):
            while pace.until(due_s):
                self.stream.scrape()
                due_s = max(due_s + GPU_INTERVAL_S, time.monotonic())


class Feeds:
    """All feeds at work. `bug` is what went wrong in one that should not have."""

    def __init__(self, feeds: Sequence[Feed], wall: Wall, pace: Pace) -> None:
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
