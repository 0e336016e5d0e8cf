"""Notifications: sends kneewatch's findings and forwarded alerts to all receivers. I/O edge."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from kneewatch.agent.notify.alert_state import StateFile, state_path
from kneewatch.agent.notify.channel import Channel, NotifierStats, RetryPolicy
from kneewatch.agent.notify.forward import DiagnosedAlert
from kneewatch.agent.notify.receivers import Receiver, receivers
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.target_state import TargetState

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
