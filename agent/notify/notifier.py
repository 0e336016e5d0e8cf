"""Telling people and programs what kneewatch finds, and what Alertmanager asks about."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from kneewatch.agent.notify.alert_state import Memory, memory_file
from kneewatch.agent.notify.channel import Channel, NotifierStats, Patience
from kneewatch.agent.notify.forward import Answered
from kneewatch.agent.notify.receivers import Receiver, receivers
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.target_state import TargetState

__all__ = ["Notifier", "NotifierStats"]

log = logging.getLogger(__name__)

PATIENCE = Patience()
CHANGE_S = 1.0
"""A receiver that is changed or taken out has so long to send what it held."""


class Notifier:
    """All receivers; without any it is false. Each has a thread of its own: one that hangs keeps
    no other waiting, and no cycle. What they were told is kept in `memory`; None: for as long as
    this lives.

    Raises:
        SettingsError: a secret of a receiver cannot be read.
    """

    def __init__(
        self,
        told: Sequence[Receiver],
        *,
        memory: Path | None,
        patience: Patience = PATIENCE,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for receiver in told:
            receiver.check()
        self._kept, self._patience, self._clock = Memory(memory), patience, clock
        self._is_failing = False
        self._watched: Collection[str] | None = None
        self._channels = [self._channel(receiver) for receiver in told]

    @classmethod
    def of(cls, settings: Settings, *, store: Path | None) -> Notifier:
        """The notifier that the settings ask for, its memory beside the store.

        Raises:
            SettingsError: a receiver is not set as it must be.
        """
        memory = memory_file(store) if store is not None else None
        return cls(receivers(settings), memory=memory)

    def __bool__(self) -> bool:
        """Whether anybody is told."""
        return bool(self._channels)

    def adopt(self, told: Sequence[Receiver]) -> None:
        """Tell these from now on. One that is as it was goes on; one that differs begins with what
        its name was told before, once the old one has had a moment to send what it held.

        Raises:
            SettingsError: a secret of a receiver cannot be read; nothing has changed then.
        """
        for receiver in told:
            receiver.check()
        going_on = {one.receiver.name: one for one in self._channels if one.receiver in told}
        left = [one for one in self._channels if one.receiver.name not in going_on]
        self._close(left, CHANGE_S)
        self._channels = [going_on.get(one.name) or self._channel(one) for one in told]
        if left or len(going_on) < len(told):
            log.info("notify: receivers changed now=%s", ",".join(one.name for one in told))
        if self._watched is not None:
            self.watching(self._watched)

    def offer(self, state: TargetState) -> None:
        """Take a target's newest state, after each cycle. It waits for nothing and never raises."""
        try:
            for channel in self._channels:
                if channel.receiver.own:
                    channel.offer(state)
        except Exception:
            # The cycle that calls must go on; a bug here is told once.
            if not self._is_failing:
                log.exception("notify: a state could not be judged target=%s", state.name)
            self._is_failing = True

    def watching(self, targets: Collection[str]) -> None:
        """Take the names of all targets that are watched now, at the start and when they change:
        receivers that were told of trouble elsewhere learn that nobody looks any more."""
        self._watched = tuple(targets)
        for channel in self._channels:
            channel.watching(targets, self._clock())

    def held(self) -> set[str]:
        """The names of the targets that some receiver was told of and has not heard the end of."""
        return {name for channel in self._channels for name in channel.held()}

    def pass_on(self, answered: Sequence[Answered], now_s: float) -> dict[str, int]:
        """Send on alerts to those who are to have them and have not; how many, by receiver."""
        sent: dict[str, int] = {}
        for channel in self._channels:
            receiver = channel.receiver
            wanted = [
                one for one in answered if any(receiver.wants(*target) for target in one.targets)
            ]
            if receiver.alerts:
                sent[receiver.name] = channel.pass_on(wanted, now_s)
        return sent

    def stats(self) -> NotifierStats:
        """How it went so far, for all receivers."""
        return sum(self.stats_by_receiver().values(), NotifierStats())

    def stats_by_receiver(self) -> dict[str, NotifierStats]:
        """The same for each receiver, by its name."""
        return {channel.receiver.name: channel.stats() for channel in self._channels}

    def close(self, timeout_s: float) -> None:
        """Send what is left, within `timeout_s`; what does not get out is told after the next
        start, if it still holds."""
        self._close(self._channels, timeout_s)

    def _channel(self, receiver: Receiver) -> Channel:
        return Channel(receiver, self._kept, self._patience, self._clock)

    def _close(self, channels: Sequence[Channel], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for channel in channels:
            channel.close(deadline_s)
        for channel in channels:
            channel.join()
