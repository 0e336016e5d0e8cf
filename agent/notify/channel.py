"""One receiver: its queue with retries, and the thread that delivers. I/O edge."""

from __future__ import annotations

import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread

from kneewatch.agent.notify import events
from kneewatch.agent.notify.alert_state import AlertState, Memory
from kneewatch.agent.notify.dedup import Groups, SentAlerts
from kneewatch.agent.notify.delivery import SendError, deliver, post
from kneewatch.agent.notify.events import Event
from kneewatch.agent.notify.formatting import email, slack, webhook
from kneewatch.agent.notify.forward import Answered, forwarded
from kneewatch.agent.notify.message import Message
from kneewatch.agent.notify.receivers import SLACK, Receiver, Web
from kneewatch.agent.target_state import TargetState

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


# --- One receiver: what waits for it, and the thread that hands it over. I/O edge -----------------


log = logging.getLogger(__name__)


class Channel:
    """One receiver. What others call takes a lock that is never held while something is sent."""

    def __init__(
        self, receiver: Receiver, memory: Memory, patience: Patience, clock: Callable[[], float]
    ) -> None:
        self.receiver = receiver
        self._memory, self._clock = memory, clock
        self._ledger, self._heard = AlertState(receiver), SentAlerts()
        self._groups = Groups(wait_s=receiver.group_wait_s)
        self._outbox = Outbox(patience=patience, give_up_s=receiver.give_up_s)
        self._changed = Condition()
        self._making = 0
        self._close_at_s = math.inf
        self._restore()
        self._thread = Thread(target=self._run, name=f"notify-{receiver.name}", daemon=True)
        self._thread.start()

    def offer(self, state: TargetState) -> None:
        """Take a target's newest state."""
        with self._changed:
            self._gather(self._ledger.update(state))

    def watching(self, targets: Iterable[str], t_s: float) -> None:
        """Take the names of all targets that are watched: what was told of others is closed."""
        with self._changed:
            for target in sorted(set(self._ledger.targets()).difference(targets)):
                self._gather(self._ledger.drop(target, t_s))

    def held(self) -> list[str]:
        """The names of the targets that something is held of."""
        with self._changed:
            return self._ledger.targets()

    def pass_on(self, answered: Sequence[Answered], now_s: float) -> int:
        """Send on the alerts that this receiver has not been told of; how many these are."""
        with self._changed:
            fresh = [one for one in answered if self._heard.take(one.mark)]
        if not fresh:
            return 0
        message = forwarded(
            fresh, receiver=self.receiver.name, base=self.receiver.triage_url, now_s=now_s
        )

        def done(is_delivered: bool) -> None:
            for one in fresh:
                self._heard.done(one.mark, delivered=is_delivered)

        with self._changed:
            self._put(message, done)
            self._changed.notify()
        return len(fresh)

    def stats(self) -> NotifierStats:
        """How it went so far; what is being gathered counts as waiting."""
        with self._changed:
            gathered = NotifierStats(queued=len(self._groups) + self._making)
            return self._outbox.stats() + gathered

    def close(self, deadline_s: float) -> None:
        """Send what is left, each message once, until a moment of the monotonic clock."""
        with self._changed:
            self._close_at_s = deadline_s
            self._changed.notify()

    def join(self) -> None:
        """Wait until that is done or the moment has come. What did not get out is remembered as
        not told."""
        self._thread.join(max(0.0, self._close_at_s - time.monotonic()))
        self._keep()

    def _restore(self) -> None:
        kept = self._memory.get(self.receiver.name)
        try:
            self._ledger.restore(kept.get("troubles", ()))
            self._heard.restore(kept.get("alerts", ()))
        except (KeyError, TypeError, ValueError) as exc:
            log.warning(
                "notify: what was told before cannot be read receiver=%s error=%s",
                self.receiver.name, type(exc).__name__,
            )  # fmt: skip

    def _keep(self) -> None:
        with self._changed:
            if not self._is_changed():
                return
            kept = {"troubles": self._ledger.rows(), "alerts": self._heard.rows()}
        self._memory.keep(self.receiver.name, kept)

    def _is_changed(self) -> bool:
        return self._ledger.is_changed or self._heard.is_changed

    def _gather(self, found: Sequence[Event]) -> None:
        self._groups.gather(found, time.monotonic())
        if found or self._is_changed():
            self._changed.notify()

    def _put(self, message: Message, done: Callable[[bool], None]) -> None:
        if not self._outbox.put(message, done, time.monotonic()):
            log.error("notify: too much waits, the oldest is lost receiver=%s", self.receiver.name)

    def _run(self) -> None:
        while True:
            try:
                self._keep()
                self._make_message()
                outgoing = self._next()
                # A receiver that is down is not asked a second time while we close.
                if outgoing is not None and not self._try(outgoing) and self._is_closing():
                    return
                if outgoing is None and self._is_closing() and not self._groups:
                    return
            except Exception:
                # A message that cannot be made or sent must not keep the others from it.
                log.exception("notify: a message is lost receiver=%s", self.receiver.name)
                with self._changed:
                    self._outbox.lose()

    def _is_closing(self) -> bool:
        return self._close_at_s < math.inf

    def _make_message(self) -> None:
        """Make a message of a group that is due; when closing, all are."""
        with self._changed:
            found = self._groups.take(math.inf if self._is_closing() else time.monotonic())
            found = [event for event in found if self._ledger.sent(event)]
            if not found:  # it was over before it was told
                return
            self._making = 1
        try:
            receiver = self.receiver
            message = events.message(found, receiver=receiver.name, base=receiver.triage_url)
            with self._changed:
                self._put(message, self._teller(found))
        finally:
            self._making = 0

    def _teller(self, found: Sequence[Event]) -> Callable[[bool], None]:
        def done(_is_delivered: bool) -> None:
            for event in found:
                self._ledger.delivered(event)

        return done

    def _next(self) -> Outgoing | None:
        """The next message to try, waited for; None when something else has changed first."""
        with self._changed:
            now_s, due_s = time.monotonic(), self._outbox.due_s()
            if self._is_closing():
                ready = due_s is not None and now_s < self._close_at_s
                return self._outbox.next() if ready else None
            if due_s is not None and due_s <= now_s:
                return self._outbox.next()
            if not self._is_changed():
                moments = [moment for moment in (due_s, self._groups.due_s()) if moment is not None]
                self._changed.wait(max(0.0, min(moments) - now_s) if moments else None)
            return None

    def _try(self, outgoing: Outgoing) -> bool:
        timeout_s = min(self.receiver.timeout_s, self._close_at_s - time.monotonic())
        try:
            self._send(outgoing.message, timeout_s)
        except SendError as exc:
            with self._changed:
                again_s = self._outbox.failed(outgoing, exc, time.monotonic())
            level, then = (
                (logging.ERROR, "given up")
                if again_s is None
                else (logging.WARNING, f"not delivered again_s={again_s:.0f}")
            )
            log.log(level, "notify: %s receiver=%s error=%s", then, self.receiver.name, exc)
            return False
        with self._changed:
            self._outbox.delivered(outgoing)
        return True

    def _send(self, message: Message, timeout_s: float) -> None:
        way = self.receiver.way
        if isinstance(way, Web):
            body = slack(message) if self.receiver.kind == SLACK else webhook(message)
            post(way, body, timeout_s=timeout_s, now_s=self._clock())
        else:
            mail = email(message, sender=way.sender, recipients=way.recipients)
            deliver(way, mail, timeout_s=timeout_s)
