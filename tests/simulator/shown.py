"""An engine, as far as its page shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Protocol

from tests.simulator.counters import Counters
from tests.simulator.scheduler import Launch


class Cache(Protocol):
    """A KV cache, as its page shows it."""

    @property
    def usage_ratio(self) -> float:
        """The share that live requests hold."""
        ...


class Books(Protocol):
    """A scheduler's books, as its page shows them."""

    @property
    def waiting(self) -> Sized:
        """Requests in the queue."""
        ...

    @property
    def running(self) -> Sized:
        """Requests in the batch."""
        ...

    @property
    def deferred(self) -> int:
        """Those that wait for something else than room."""
        ...

    @property
    def blocks(self) -> Cache:
        """The KV cache."""
        ...

    @property
    def queried_tokens(self) -> float:
        """Prompt tokens looked for in the prefix cache."""
        ...

    @property
    def hit_tokens(self) -> float:
        """Those found there."""
        ...


class Shown(Protocol):
    """An engine, as its page shows it."""

    @property
    def launch(self) -> Launch:
        """Its settings."""
        ...

    @property
    def asleep(self) -> bool:
        """Whether it was put to sleep, with its weights in the host's memory."""
        ...

    @property
    def scheduler(self) -> Books:
        """Who runs and who waits."""
        ...

    @property
    def counters(self) -> Counters:
        """What it has counted."""
        ...

    @property
    def adapters_seen(self) -> Mapping[str, float]:
        """When adapters, by their names together, were last seen."""
        ...
