"""Messages on their way to one receiver, and how often they are tried. Not safe between threads."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kneewatch.agent.notify.message import Message
from kneewatch.agent.notify.sending import SendError

QUEUE_MOST = 256


@dataclass(frozen=True, slots=True)
class Patience:
    """How a message is tried again: after `first_s`, then twice as long each time up to `most_s`,
    less up to half of it by chance, so that many daemons do not come back at one moment."""

    first_s: float = 1.0
    most_s: float = 300.0

    def wait_s(self, failures: int) -> float:
        """How long to wait after so many failures."""
        whole_s = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 32))
        return whole_s * random.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class NotifierStats:
    """Messages delivered, tries that failed, messages waiting now, messages given up."""

    sent: int = 0
    failed: int = 0
    queued: int = 0
    dropped: int = 0

    def __add__(self, other: NotifierStats) -> NotifierStats:
        """Both together."""
        return NotifierStats(
            self.sent + other.sent,
            self.failed + other.failed,
            self.queued + other.queued,
            self.dropped + other.dropped,
        )


@dataclass(slots=True)
class Outgoing:
    """A message on its way. `done` is called once, with whether it was delivered."""

    message: Message
    done: Callable[[bool], None]
    born_s: float
    due_s: float
    failures: int = 0


class Outbox:
    """The messages in the order they were made: one that must wait keeps the later ones waiting.

    Times are of a clock that is never set.
    """

    def __init__(self, *, patience: Patience, give_up_s: float) -> None:
        self._patience, self._give_up_s = patience, give_up_s
        self._waiting: deque[Outgoing] = deque()
        self._trying: Outgoing | None = None
        self._sent = self._failed = self._dropped = 0

    def put(self, message: Message, done: Callable[[bool], None], now_s: float) -> bool:
        """Take a message; False where the oldest had to make room for it."""
        full = len(self._waiting) >= QUEUE_MOST
        if full:
            self._drop(self._waiting.popleft())
        self._waiting.append(Outgoing(message, done, now_s, now_s))
        return not full

    def due_s(self) -> float | None:
        """When the next one is to be tried; None while there is none."""
        return self._waiting[0].due_s if self._waiting else None

    def next(self) -> Outgoing:
        """The next one, to be tried now."""
        self._trying = self._waiting.popleft()
        return self._trying

    def delivered(self, outgoing: Outgoing) -> None:
        """It has arrived."""
        self._trying = None
        self._sent += 1
        outgoing.done(True)

    def failed(self, outgoing: Outgoing, error: SendError, now_s: float) -> float | None:
        """It has not: the seconds until it is tried again, None where it is given up."""
        self._trying = None
        self._failed += 1
        outgoing.failures += 1
        wait_s = self._patience.wait_s(outgoing.failures)
        if error.after_s is not None:
            wait_s = max(wait_s, error.after_s)
        if error.final or now_s + wait_s - outgoing.born_s > self._give_up_s:
            self._drop(outgoing)
            return None
        outgoing.due_s = now_s + wait_s
        self._waiting.appendleft(outgoing)
        return wait_s

    def lose(self) -> None:
        """The one being tried, if any, cannot be sent at all."""
        if self._trying is not None:
            self._failed += 1
            self._drop(self._trying)
            self._trying = None

    def stats(self) -> NotifierStats:
        """How it went so far."""
        waiting = len(self._waiting) + (self._trying is not None)
        return NotifierStats(self._sent, self._failed, waiting, self._dropped)

    def _drop(self, outgoing: Outgoing) -> None:
        self._dropped += 1
        outgoing.done(False)
