"""Where a target's pages come from: its server, or a capture that is played. I/O edge."""

from __future__ import annotations

from typing import Protocol

from kneewatch.agent.daemon.player import Player
from kneewatch.agent.source import TargetStream
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.base import CaptureError, CollectError
from kneewatch.collector.http.address import metrics_url
from kneewatch.collector.http.fetch import Fetcher
from kneewatch.collector.samples import Page


class Pages(Protocol):
    """A target's pages, one at a time."""

    def take(self, stream: TargetStream, now_s: float) -> Page | CollectError:
        """The page at `now_s` as the stream reads it, or why there is none."""
        ...

    def due_in_s(self) -> float | None:
        """Seconds until the next page; None where one can be had at any time."""
        ...

    def close(self) -> None:
        """Let go of what is held open."""
        ...


class LivePages:
    """A server's page, one GET each."""

    def __init__(self, spec: TargetSpec) -> None:
        self._fetcher = Fetcher(metrics_url(spec.address), spec.settings.fetch())

    def take(self, stream: TargetStream, now_s: float) -> Page | CollectError:
        """The page as it is now, or why there is none."""
        return stream.fetch(self._fetcher, now_s)

    def due_in_s(self) -> float | None:
        """None: a server answers at any time."""
        return None

    def close(self) -> None:
        """Close the connection."""
        self._fetcher.close()


class PlayedPages:
    """A capture's pages; each time it starts over, the stream forgets what it saw."""

    def __init__(self, spec: TargetSpec) -> None:
        self._player = Player(spec.address)
        self._begun = 0

    def take(self, stream: TargetStream, now_s: float) -> Page | CollectError:
        """The page that is due, or why there is none."""
        try:
            page = self._player.take(stream, now_s)
        except CaptureError as error:
            return CollectError(str(error), kind="recorded", hint="Put the recording back.")
        if self._player.begun > max(self._begun, 1):
            stream.begin_anew()
        self._begun = self._player.begun
        return page

    def due_in_s(self) -> float | None:
        """Seconds until the next page of the recording."""
        return self._player.due_in_s

    def close(self) -> None:
        """Nothing is held open."""


def pages_of(spec: TargetSpec) -> Pages:
    """Where the target's pages come from.

    Raises:
        CaptureError: it is a capture that cannot be played.
    """
    return PlayedPages(spec) if spec.played else LivePages(spec)
