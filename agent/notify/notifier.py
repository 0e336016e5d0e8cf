"""Notifications: sends kneewatch's findings and forwarded alerts to all receivers. I/O edge."""

from __future__ import annotations

import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Condition, Lock, Thread

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.notify import events
from kneewatch.agent.notify.alert_state import AlertState, StateFile, Stored, state_path
from kneewatch.agent.notify.delivery import SendError, send
from kneewatch.agent.notify.events import DiagnosedAlert, Event, Groups, SentAlerts, forwarded
from kneewatch.agent.notify.message import HEADLINE_MAX, Message, escape_plain
from kneewatch.agent.notify.receivers import ALERTMANAGER, TEXTS, Receiver, receivers
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.target_state import TargetState

# --- The message queue of one receiver, with retries, and the thread that delivers its messages ---


QUEUE_MAX, GIVEN_UP_MAX = 256, 64
FAILING_ATTEMPTS = 5
"""A receiver is reported as a problem after this many failed attempts in a row."""


class RetryPolicy(Struct, frozen=True):
    """Exponential backoff: `first_s` seconds, doubled at each failure up to `most_s`.

    A random part of up to half is subtracted, so that many daemons do not retry at the same moment.
    """

    first_s: float = 1.0
    most_s: float = 300.0

    def wait_s(self, failures: int) -> float:
        """Seconds to wait after this many failures."""
        whole_s = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 32))
        return whole_s * random.uniform(0.5, 1.0)

    def after_s(self, failures: int, error: SendError) -> float:
        """Seconds to wait after an error. What the receiver asks for counts up to `most_s`, so that
        one answer cannot silence it for years."""
        return max(self.wait_s(failures), min(error.after_s or 0.0, self.most_s))


class NotifierStats(Struct):
    """Counts of messages: delivered, failed attempts, in the queue now, and given up."""

    sent: int = 0
    failed: int = 0
    queued: int = 0
    dropped: int = 0


class Outgoing(Struct):
    """A queued message. `done` is called with True when the message is delivered, with False when
    it is given up."""

    message: Message
    done: Callable[[bool], object]
    born_s: float
    due_s: float
    failures: int = 0


class Outbox:
    """A queue that keeps the order of messages: a message that waits for a retry blocks all later
    ones.

    All times are monotonic. `given_up` are the messages that were given up last; `retry_given_up`
    queues them again.
    """

    def __init__(self, *, retry: RetryPolicy, give_up_s: float) -> None:
        self._retry, self._give_up_s = retry, give_up_s
        self._waiting: deque[Outgoing] = deque()
        self.given_up: deque[Outgoing] = deque(maxlen=GIVEN_UP_MAX)
        self._trying: Outgoing | None = None
        self._counts = NotifierStats()

    def put(self, message: Message, done: Callable[[bool], object], now_s: float) -> bool:
        """Queue a message. Returns False if the oldest one was dropped to make room."""
        had_room = self.has_room
        if not had_room:
            self._drop(self._waiting.popleft())
        self._waiting.append(Outgoing(message, done, now_s, now_s))
        return had_room

    @property
    def attempts(self) -> int:
        """Failed attempts to send the message that is due next."""
        return self._waiting[0].failures if self._waiting else 0

    @property
    def has_room(self) -> bool:
        """Whether the queue takes a message without dropping one."""
        return len(self._waiting) < QUEUE_MAX

    def due_s(self) -> float | None:
        """Monotonic time at which the next message is due; None if the queue is empty."""
        return self._waiting[0].due_s if self._waiting else None

    def next(self) -> Outgoing:
        """Remove the next message from the queue, to be sent now."""
        self._trying = self._waiting.popleft()
        return self._trying

    def delivered(self, outgoing: Outgoing) -> None:
        self._trying = None
        self._counts.sent += 1
        outgoing.done(True)

    def failed(self, outgoing: Outgoing, error: SendError, now_s: float) -> float | None:
        """Return a message to the queue after a failed attempt. Returns the seconds until the
        retry; None if the message is given up."""
        self._trying = None
        self._counts.failed += 1
        outgoing.failures += 1
        left_s = outgoing.born_s + self._give_up_s - now_s
        if error.final or left_s <= 0:
            self._drop(outgoing)
            return None
        wait_s = min(self._retry.after_s(outgoing.failures, error), left_s)
        outgoing.due_s = now_s + wait_s
        self._waiting.appendleft(outgoing)
        return wait_s

    def drop_current(self) -> None:
        """Give up the message that is being sent, if any."""
        if self._trying is not None:
            self._counts.failed += 1
            self._drop(self._trying)
            self._trying = None

    def stats(self) -> NotifierStats:
        """The counts since the start."""
        return replace(self._counts, queued=len(self._waiting) + (self._trying is not None))

    def retry_given_up(self, now_s: float) -> None:
        """Queue the messages that were given up again, before all others."""
        for outgoing in reversed(self.given_up):
            outgoing.born_s = outgoing.due_s = now_s
            outgoing.failures = 0
            self._waiting.appendleft(outgoing)
        self.given_up.clear()

    def _drop(self, outgoing: Outgoing) -> None:
        self._counts.dropped += 1
        outgoing.done(False)
        self.given_up.append(outgoing)


# --- The channel ----------------------------------------------------------------------------------


def failing(attempts: int) -> str:
    """The problem of a receiver whose last attempts all failed; empty if they are few."""
    if attempts < FAILING_ATTEMPTS:
        return ""
    return f"{attempts} attempts in a row failed; kneewatch's log says why"


REPEAT_S = 60.0
"""Seconds after which Alertmanager gets the active alerts again. It resolves an alert that it does
not receive for its `resolve_timeout` (default: 5 minutes)."""


class Channel:
    """One receiver: its alert state, which is saved in the state file, its queue, and the thread
    that sends to it. Public methods take a lock, which is never held while sending.

    A receiver that keeps incidents gets a message for each problem, others one for similar
    problems. Alertmanager gets the active problems again every `repeat_s` seconds.
    """

    def __init__(
        self,
        receiver: Receiver,
        state_file: StateFile,
        retry: RetryPolicy,
        clock: Callable[[], float],
        *,
        repeat_s: float = REPEAT_S,
    ) -> None:
        self.receiver = receiver
        self._state_file, self._clock = state_file, clock
        self._settled: list[Path] = []
        """Files of the outbox folder whose messages are delivered."""
        self._state, self._sent_alerts = AlertState(receiver), SentAlerts()
        self._changed = Condition()
        self._close_at_s = math.inf
        self._restore()
        self._groups = Groups(wait_s=receiver.group_wait_s, hold_s=receiver.hold_s)
        self._repeat_s = repeat_s if receiver.kind == ALERTMANAGER else math.inf
        self._repeat_at_s = time.monotonic() + self._repeat_s
        self._repeating: deque[Event] = deque()
        if receiver.kind == ALERTMANAGER:  # it resolves alerts while nothing is tried
            retry = replace(retry, most_s=min(retry.most_s, repeat_s))
        self._outbox = Outbox(retry=retry, give_up_s=receiver.give_up_s)
        self._formatting, self._storing = 0, Lock()
        self._stored: deque[Path] = deque()
        """Files of messages for which the queue has no room, oldest first."""
        for file, stored in state_file.outbox.waiting(receiver.name):
            # Alertmanager may have repeated an alert, in a message that was delivered.
            if [key for key in stored.keys if self._sent_alerts.take(key)]:
                self._queue_forwarded(stored, file)
            else:
                self._settled.append(file)
        self._thread = Thread(target=self._run, name=f"notify-{receiver.name}", daemon=True)
        self._thread.start()

    def active_targets(self) -> list[str]:
        """The names of targets that have active problems."""
        with self._changed:
            return self._state.targets()

    def set_watched(self, targets: Iterable[str], t_s: float) -> None:
        """Set the watched targets: the problems of all others are closed."""
        with self._changed:
            for target in sorted(set(self._state.targets()).difference(targets)):
                self._queue(self._state.drop(target, t_s))

    def close(self, deadline_s: float) -> None:
        """Ask the thread to end by `deadline_s`. Until then it tries once to send each remaining
        message. Active problems stay active."""
        with self._changed:
            self._close_at_s = deadline_s
            self._changed.notify()

    def join(self) -> None:
        """Wait until the thread ends, at most until its deadline. In the state file, messages that
        were not sent count as unsent."""
        self._thread.join(max(0.0, self._close_at_s - time.monotonic()))
        self._keep()

    def _restore(self) -> None:
        stored = self._state_file.get(self.receiver.name)
        try:
            self._state.restore(stored.get("troubles", ()))
            self._sent_alerts.restore(stored.get("alerts", ()))
        except (KeyError, TypeError, ValueError) as exc:
            log.warning(
                "notify: alert state is malformed and was dropped receiver=%s error=%s",
                self.receiver.name, type(exc).__name__,
            )  # fmt: skip

    def _keep(self) -> None:
        with self._changed:
            if not self._is_changed():
                return
            state = {"troubles": self._state.rows(), "alerts": self._sent_alerts.rows()}
            settled, self._settled = self._settled, []
        self._state_file.keep(self.receiver.name, state)
        for file in settled:  # only now: a crash in between sends a message twice, never loses it
            with suppress(OSError):
                file.unlink()

    def _is_changed(self) -> bool:
        return self._state.is_changed or self._sent_alerts.is_changed

    def _is_closing(self) -> bool:
        return self._close_at_s < math.inf

    def offer(self, state: TargetState) -> None:
        """Queue the events that follow from a target's newest state."""
        with self._changed:
            self._queue(self._state.update(state))

    def forward(self, alerts: Sequence[DiagnosedAlert], now_s: float) -> int:
        """Forward the alerts that this receiver did not get yet. Returns their number."""
        with self._storing:  # an alert that is repeated meanwhile is answered once it is stored
            with self._changed:
                new = [alert for alert in alerts if self._sent_alerts.take(alert.key)]
            if not new:
                return 0
            message = forwarded(
                new,
                receiver=self.receiver.name,
                base=self.receiver.triage_url,
                now_s=now_s,
                docs_url=self.receiver.docs_url,
            )
            keys = tuple(alert.key for alert in new)
            stored = Stored(self.receiver.name, now_s, keys, message)
            file = self._state_file.outbox.add(stored)
            with self._changed:
                self._queue_forwarded(stored, file)
                self._changed.notify()
        return len(new)

    def _queue_forwarded(self, stored: Stored, file: Path | None) -> None:
        if file is not None and (self._stored or not self._outbox.has_room):
            self._stored.append(file)
        else:
            self._put_forwarded(stored, file)

    def _load_stored(self) -> None:
        """Queue stored messages while there is room."""
        while self._stored and self._outbox.has_room:
            file = self._stored.popleft()
            stored = self._state_file.outbox.read(file)
            if stored is not None:
                self._put_forwarded(stored, file)

    def _put_forwarded(self, stored: Stored, file: Path | None) -> None:
        def done(is_delivered: bool) -> None:
            for key in stored.keys:
                self._sent_alerts.done(key, delivered=is_delivered)
            if is_delivered and file is not None:
                self._settled.append(file)

        self._put(stored.message, done)

    def retry(self) -> None:
        """Try messages again that were given up."""
        with self._changed:
            self._outbox.retry_given_up(time.monotonic())
            self._changed.notify()

    def problem(self) -> str:
        """The number of messages that were given up, or of failed attempts."""
        count = len(self._outbox.given_up)
        given_up = f"{count} messages given up; a reload tries them again" if count else ""
        with self._changed:
            return given_up or failing(self._outbox.attempts)

    def stats(self) -> NotifierStats:
        """The counts since the start. Events that wait in a group count as queued."""
        with self._changed:
            stats = self._outbox.stats()
            return replace(
                stats,
                queued=stats.queued + len(self._groups) + len(self._stored) + self._formatting,
            )

    def _queue(self, new_events: Sequence[Event]) -> None:
        self._groups.gather(new_events, time.monotonic())
        if new_events or self._is_changed():
            self._changed.notify()

    def _put(self, message: Message, done: Callable[[bool], object]) -> None:
        if not self._outbox.put(message, done, time.monotonic()):
            log.error("notify: queue full, oldest message dropped receiver=%s", self.receiver.name)

    def _run(self) -> None:
        while True:
            try:
                self._keep()
                self._make_message()
                self._repeat()
                outgoing = self._next()
                # A receiver that is down gets one attempt while closing, no retries.
                if outgoing is not None and not self._try(outgoing) and self._is_closing():
                    return
                if outgoing is None and self._is_closing() and not self._groups:
                    return
            except Exception:
                # A message that cannot be formatted or sent must not block the others.
                log.exception("notify: message dropped receiver=%s", self.receiver.name)
                with self._changed:
                    self._outbox.drop_current()

    def _make_message(self) -> None:
        """Queue a message for the first group that is due. While the channel closes, all groups are
        due."""
        with self._changed:
            due = self._groups.take(math.inf if self._is_closing() else time.monotonic())
            due = [event for event in due if self._state.sent(event)]
            if not due:  # resolved before it was sent
                return
            self._formatting = 1
        try:
            is_pager = self.receiver.kind not in TEXTS
            for batch in [[event] for event in due] if is_pager else [due]:
                self._put_events(batch, partial(self._settle, batch))
        finally:
            self._formatting = 0

    def _put_events(self, batch: Sequence[Event], done: Callable[[bool], object]) -> None:
        receiver = self.receiver
        message = events.message(
            batch, receiver=receiver.name, base=receiver.triage_url, docs_url=receiver.docs_url
        )
        with self._changed:
            self._put(message, done)

    def _repeat(self) -> None:
        """Queue active problems again that Alertmanager would else resolve, once nothing else is
        queued."""
        with self._changed:
            if self._repeat_in_s() == 0.0 and not self._repeating:
                self._repeat_at_s = time.monotonic() + self._repeat_s
                self._repeating.extend(self._state.repeated())
        while self._repeating and self._outbox.has_room:
            self._put_events([self._repeating.popleft()], lambda _: None)

    def _repeat_in_s(self) -> float | None:
        """Seconds until active problems are repeated; None if they are not, or not before the queue
        is empty."""
        if self._repeat_s == math.inf or self._outbox.due_s() is not None or self._is_closing():
            return None
        return max(0.0, self._repeat_at_s - time.monotonic()) if self._state.repeated() else None

    def _settle(self, batch: Sequence[Event], is_delivered: bool) -> None:
        if is_delivered:
            self._state.delivered(*batch)

    def _next(self) -> Outgoing | None:
        """Wait for the next message that is due. Returns None if something else changed before
        that."""
        with self._changed:
            self._load_stored()
            now_s, due_s = time.monotonic(), self._outbox.due_s()
            if self._is_closing():
                ready = due_s is not None and now_s < self._close_at_s
                return self._outbox.next() if ready else None
            if due_s is not None and due_s <= now_s:
                return self._outbox.next()
            if not self._is_changed():
                moments = [moment for moment in (due_s, self._groups.due_s()) if moment is not None]
                waits_s = [max(0.0, moment - now_s) for moment in moments]
                if (repeat_s := self._repeat_in_s()) is not None:
                    waits_s.append(repeat_s)
                self._changed.wait(min(waits_s, default=None))
            return None

    def _try(self, outgoing: Outgoing) -> bool:
        timeout_s = min(self.receiver.timeout_s, self._close_at_s - time.monotonic())
        try:
            send(self.receiver, outgoing.message, timeout_s=timeout_s, now_s=self._clock())
        except SendError as exc:
            with self._changed:
                retry_s = self._outbox.failed(outgoing, exc, time.monotonic())
            level, outcome = (
                (logging.ERROR, "given up")
                if retry_s is None
                else (logging.WARNING, f"not delivered again_s={retry_s:.0f}")
            )
            log.log(level, "notify: %s receiver=%s error=%s", outcome, self.receiver.name, exc)
            return False
        with self._changed:
            self._outbox.delivered(outgoing)
        headline = escape_plain(outgoing.message.headline, HEADLINE_MAX)
        level = logging.DEBUG if self.receiver.kind == ALERTMANAGER else logging.INFO
        log.log(level, "notify: sent receiver=%s message=%s", self.receiver.name, headline)
        return True


# --- The notifier: one channel for each receiver --------------------------------------------------


log = logging.getLogger(__name__)

RETRY = RetryPolicy()
CHANGE_S = 1.0
"""Seconds that a changed or removed receiver gets to send its queue."""


class Notifier:
    """All receivers. Each has its own thread, so a receiver that hangs delays nothing else.

    The notifier is false in a boolean context if there are no receivers. The alert state is saved
    in `state_file`; with None it is kept only in memory.

    Raises:
        SettingsError: a secret of a receiver cannot be read.
    """

    def __init__(
        self,
        configured: Sequence[Receiver],
        *,
        state_file: Path | None,
        retry: RetryPolicy = RETRY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for receiver in configured:
            receiver.check()
        self._state_file, self._retry, self._clock = StateFile(state_file), retry, clock
        self._is_failing = False
        self._watched: Collection[str] | None = None
        self._channels = [self._channel(receiver) for receiver in configured]

    @classmethod
    def of(cls, settings: Settings, *, store: Path | None) -> Notifier:
        """The notifier for these settings. Its state file is in the folder of the store.

        Raises:
            SettingsError: a receiver's settings are wrong.
        """
        state_file = state_path(store) if store is not None else None
        return cls(receivers(settings), state_file=state_file)

    def __bool__(self) -> bool:
        """Whether there are receivers."""
        return bool(self._channels)

    def adopt(self, configured: Sequence[Receiver]) -> None:
        """Replace the receivers. Unchanged receivers continue, and try again what was given up. A
        changed receiver gets `CHANGE_S` seconds to send its queue; its alert state, identified by
        its name, is kept.

        Raises:
            SettingsError: a secret of a receiver cannot be read; then nothing changes.
        """
        for receiver in configured:
            receiver.check()
        unchanged = {
            item.receiver.name: item for item in self._channels if item.receiver in configured
        }
        for channel in unchanged.values():
            channel.retry()
        left = [item for item in self._channels if item.receiver.name not in unchanged]
        self._close(left, CHANGE_S)
        self._channels = [unchanged.get(item.name) or self._channel(item) for item in configured]
        if left or len(unchanged) < len(configured):
            log.info("notify: receivers changed now=%s", ",".join(item.name for item in configured))
        if self._watched is not None:
            self.set_watched(self._watched)

    def offer(self, state: TargetState) -> None:
        """Queue the events that follow from a target's newest state. Never blocks and never
        raises."""
        try:
            for channel in self._channels:
                if channel.receiver.own:
                    channel.offer(state)
        except Exception:
            # The calling cycle must go on; a bug here is logged once.
            if not self._is_failing:
                log.exception("notify: cannot process the state target=%s", state.name)
            self._is_failing = True

    def set_watched(self, targets: Collection[str]) -> None:
        """Set the names of all watched targets. Call this at the start and after each change.
        Problems of other targets are closed as "no longer watched"."""
        self._watched = tuple(targets)
        for channel in self._channels:
            channel.set_watched(targets, self._clock())

    def active_targets(self) -> set[str]:
        """The names of targets that have an active problem for at least one receiver."""
        return {name for channel in self._channels for name in channel.active_targets()}

    def forward(self, alerts: Sequence[DiagnosedAlert], now_s: float) -> dict[str, int]:
        """Forward alerts to the receivers that match them. Returns the number of alerts by
        receiver."""
        sent: dict[str, int] = {}
        for channel in self._channels:
            receiver = channel.receiver
            matching = [
                alert
                for alert in alerts
                if any(receiver.matches(*target) for target in alert.targets)
            ]
            if receiver.alerts:
                sent[receiver.name] = channel.forward(matching, now_s)
        return sent

    def problems(self) -> list[str]:
        """A line for each receiver for which messages were given up, and one if messages cannot be
        stored."""
        given_up = [
            f"notify: {channel.receiver.name}: {problem}"
            for channel in self._channels
            if (problem := channel.problem())
        ]
        unstored = self._state_file.outbox.problem()
        return [*given_up, f"notify: {unstored}"] if unstored else given_up

    def stats_by_receiver(self) -> dict[str, NotifierStats]:
        """The counts since the start, by receiver name."""
        return {channel.receiver.name: channel.stats() for channel in self._channels}

    def close(self, timeout_s: float) -> None:
        """Send queued messages for at most `timeout_s` seconds. The rest is sent after the next
        start if the problem is still active."""
        self._close(self._channels, timeout_s)

    def _channel(self, receiver: Receiver) -> Channel:
        return Channel(receiver, self._state_file, self._retry, self._clock)

    def _close(self, channels: Sequence[Channel], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for channel in channels:
            channel.close(deadline_s)
        for channel in channels:
            channel.join()
