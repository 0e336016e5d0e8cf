"""The notifier: sends kneewatch's findings and forwarded alerts to all receivers."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kneewatch.agent.notify import events
from kneewatch.agent.notify.alert_state import StateFile, state_path
from kneewatch.agent.notify.channel import (
    Channel,
    NotifierStats,
    ReceiverThread,
    RetryPolicy,
    failing,
)
from kneewatch.agent.notify.delivery import SendError, post
from kneewatch.agent.notify.events import Event, Key, problems
from kneewatch.agent.notify.forward import DiagnosedAlert
from kneewatch.agent.notify.message import HEADLINE_MAX, escape_plain, text
from kneewatch.agent.notify.receivers import ALERTMANAGER, Receiver, Web, receivers
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.target_state import TargetState
from kneewatch.rules.rule import Severity

log = logging.getLogger(__name__)


# --- Alertmanager, which groups, silences and repeats alerts itself -------------------------------


REPEAT_S = 60.0
"""Seconds after which active alerts are sent again. Alertmanager resolves an alert that it does not
receive for its `resolve_timeout` (default: 5 minutes)."""

BATCH_MAX = 200
"""Maximum number of alerts in one request."""

RESOLVED_MAX = 4096
"""Most ended alerts that wait for an Alertmanager that does not answer."""

LABEL_CHARACTERS = re.compile(r"[^a-zA-Z0-9_]")

Labels = Mapping[str, str]


def alert(event: Event, labels: Labels, *, severity: Severity, base: str) -> dict[str, Any]:
    """An alert in the format of Alertmanager's /api/v2/alerts. It fires, unless the event ended the
    problem.

    `labels` are those of the target. `severity` becomes a label, which is part of the alert's
    identity. `base` is the receiver's triage_url.
    """
    message = events.message([event], receiver="", base=base)
    own = {
        "alertname": alert_name(event.key.id),
        "severity": severity.word,
        "kneewatch": "cause",
        "cause": event.key.id,
        "kneewatch_target": event.key.target,
        "model_name": event.key.model,
        "engine": event.key.engine,
    }
    result: dict[str, Any] = {
        "labels": {**_label_names(labels), **{name: value for name, value in own.items() if value}},
        "annotations": {
            "summary": escape_plain(message.headline, HEADLINE_MAX),
            "description": text(message),
        },
        "startsAt": rfc3339(event.since_s),
    }
    if event.ended_s is not None:
        result["endsAt"] = rfc3339(max(event.ended_s, event.since_s))
    if link := message.parts[0].link:
        result["generatorURL"] = link
    return result


def alert_name(cause: str) -> str:
    """The name of an alert, such as KneewatchCauseKvPressure."""
    return "KneewatchCause" + "".join(part.capitalize() for part in cause.split("_"))


def _label_names(labels: Labels) -> dict[str, str]:
    names = {LABEL_CHARACTERS.sub("_", name): value for name, value in labels.items() if value}
    return {f"_{name}" if name[:1].isdigit() else name: value for name, value in names.items()}


def rfc3339(t_s: float) -> str:
    return datetime.fromtimestamp(t_s, tz=UTC).isoformat(timespec="milliseconds")


class AlertmanagerChannel(ReceiverThread):
    """One Alertmanager, and the thread that sends to it. Has the same methods as a `Channel`.

    New and resolved alerts are sent at once. Active alerts are sent again every `repeat_s` seconds.
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
        super().__init__(receiver, state_file, clock)
        self._retry, self._repeat_s = retry, repeat_s
        self._labels: dict[str, Labels] = {}
        self._newest: dict[Key, Event] = {}
        self._unsent: dict[Key, Event | None] = {}
        self._resolved: dict[tuple[Key, Severity], tuple[dict[str, Any], Event | None]] = {}
        self._sent = self._failed = self._dropped = self._failures = 0
        self._repeat_at_s = self._retry_at_s = 0.0
        self._is_refused = False
        self._thread.start()

    def offer(self, state: TargetState) -> None:
        """Queue the changes that follow from a target's newest state."""
        with self._changed:
            changes = self._state.update(state)
            active = self._state.active(state.name)
            if active or changes:
                self._labels[state.name] = state.labels
                now = problems(state, self.receiver.severity)
                self._newest |= {key: now[key] for key in active if key in now}
            self._queue(changes)

    def forward(self, alerts: Sequence[DiagnosedAlert], now_s: float) -> int:
        """Does nothing and returns 0: the alerts come from an Alertmanager."""
        return 0

    def stats(self) -> NotifierStats:
        """The counts since the start: requests sent and failed, alerts queued and given up."""
        with self._changed:
            queued = len(self._unsent) + len(self._resolved)
            return NotifierStats(self._sent, self._failed, queued, self._dropped)

    def problem(self) -> str:
        """Whether the last request was refused for good, or the last ones failed."""
        if self._is_refused:
            return "alerts given up: it refuses them; see kneewatch's log"
        return failing(self._failures)

    def _queue(self, new_events: Sequence[Event]) -> None:
        for event in new_events:
            key, severity = event.key, event.severity
            if event.kind == "ended":
                self._unsent.pop(key, None)
                self._newest.pop(key, None)
                self._state.sent(event)
                self._resolve(event, severity, event)
            elif event.kind in ("began", "worse"):
                self._state.sent(event)
                self._unsent[key] = event
                self._resolved.pop((key, severity), None)
                if event.before is not None and event.before < severity:
                    # The severity is a label: Alertmanager knows the milder one as another alert.
                    self._resolve(event, event.before, None, ended_s=event.t_s)
        for target in {event.key.target for event in new_events}:
            if not self._state.active(target):
                self._labels.pop(target, None)
        if new_events:
            self._changed.notify()

    def _resolve(
        self, event: Event, severity: Severity, end: Event | None, *, ended_s: float | None = None
    ) -> None:
        labels = self._labels.get(event.key.target)
        if labels is None:  # not seen since a restart: Alertmanager's resolve_timeout ends it
            if end is not None:
                self._state.delivered(end)
            return
        resolved = alert(event, labels, severity=severity, base=self.receiver.triage_url)
        if ended_s is not None:
            resolved["endsAt"] = rfc3339(max(ended_s, event.since_s))
        self._resolved[event.key, severity] = (resolved, end)
        if len(self._resolved) > RESOLVED_MAX:  # Alertmanager has ended the oldest by itself
            self._dropped += 1
            _, oldest = self._resolved.pop(next(iter(self._resolved)))
            if oldest is not None:
                self._state.delivered(oldest)

    def _run(self) -> None:
        while True:
            try:
                with self._changed:
                    while not self._is_closing() and (wait_s := self._wait_s()) != 0.0:
                        self._changed.wait(wait_s)
                    closing = self._is_closing()
                    if not closing and time.monotonic() >= self._repeat_at_s:
                        self._repeat_at_s = time.monotonic() + self._repeat_s
                        for key in self._state.active():
                            if key in self._newest:
                                self._unsent.setdefault(key, None)
                    resolved = dict(list(self._resolved.items())[:BATCH_MAX])
                    unsent = dict(list(self._unsent.items())[: BATCH_MAX - len(resolved)])
                done = not (resolved or unsent) or self._try(resolved, unsent)
                self._keep()
                if closing and (not done or not (self._resolved or self._unsent)):
                    return
            except Exception:
                # An alert that cannot be formatted must not block the others.
                log.exception("notify: alerts dropped receiver=%s", self.receiver.name)
                with self._changed:
                    self._dropped += len(self._unsent) + len(self._resolved)
                    self._unsent.clear()
                    self._resolved.clear()

    def _wait_s(self) -> float | None:
        """Seconds until the next request must be sent; None if nothing has to be sent."""
        if self._unsent or self._resolved:
            due_s = self._retry_at_s
        elif self._newest:
            due_s = max(self._repeat_at_s, self._retry_at_s)
        else:
            return None
        return max(0.0, due_s - time.monotonic())

    def _try(
        self,
        resolved: Mapping[tuple[Key, Severity], tuple[dict[str, Any], Event | None]],
        unsent: Mapping[Key, Event | None],
    ) -> bool:
        endpoint = self.receiver.endpoint
        assert isinstance(endpoint, Web)
        body = [document for document, _ in resolved.values()]
        with self._changed:
            body += [firing for key in unsent if (firing := self._firing(key)) is not None]
        timeout_s = min(self.receiver.timeout_s, self._close_at_s - time.monotonic())
        error: SendError | None = None
        try:
            post(endpoint, body, timeout_s=timeout_s, now_s=self._clock())
        except SendError as exc:
            error = exc
        with self._changed:
            if error is not None:
                self._failed += 1
                self._failures += 1
                retry_s = min(self._repeat_s, self._retry.after_s(self._failures, error))
                self._retry_at_s = time.monotonic() + retry_s
                log.log(
                    logging.ERROR if error.final else logging.WARNING,
                    "notify: %s receiver=%s error=%s",
                    "given up" if error.final else f"not delivered again_s={retry_s:.0f}",
                    self.receiver.name, error,
                )  # fmt: skip
                self._is_refused = error.final
                if not error.final:
                    return False
                self._dropped += len(body)
            else:
                self._sent += 1
                self._failures, self._retry_at_s, self._is_refused = 0, 0.0, False
            for name, (document, end) in resolved.items():
                if name in self._resolved and self._resolved[name][0] is document:
                    del self._resolved[name]
                if end is not None and error is None:
                    self._state.delivered(end)
            for key, event in unsent.items():
                if key in self._unsent and self._unsent[key] is event:
                    del self._unsent[key]
                if event is not None and error is None:
                    self._state.delivered(event)
        return error is None

    def _firing(self, key: Key) -> dict[str, Any] | None:
        """The alert of an active problem. None if the problem was resolved in the meantime."""
        active = self._state.active().get(key)
        problem, labels = self._newest.get(key), self._labels.get(key.target)
        if active is None or problem is None or labels is None:
            return None
        event = replace(
            problem, severity=active.severity, stage=active.stage, since_s=active.since_s
        )
        return alert(event, labels, severity=active.severity, base=self.receiver.triage_url)


# --- All receivers --------------------------------------------------------------------------------


__all__ = ["Notifier", "NotifierStats"]

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

    def _channel(self, receiver: Receiver) -> Channel | AlertmanagerChannel:
        kind = AlertmanagerChannel if receiver.kind == ALERTMANAGER else Channel
        return kind(receiver, self._state_file, self._retry, self._clock)

    def _close(self, channels: Sequence[Channel | AlertmanagerChannel], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for channel in channels:
            channel.close(deadline_s)
        for channel in channels:
            channel.join()
