"""A receiver's settings, and waiting until it was told."""

from __future__ import annotations

from kneewatch.agent.notify.notifier import Notifier, NotifierStats
from tests.agent.notify.factories import healthy, state
from tests.agent.notify.web import Taker
from tests.waiting import until

WAIT_S = 0.15
"""How long these tests gather what is alike."""


LONG_WAIT_S = 600.0
"""Longer than a test: only closing sends what was gathered."""


def webhook(taker: Taker, more: str = "", *, wait_s: float = WAIT_S, hold_s: float = 20.0) -> str:
    """A receiver's table."""
    return (
        f'[[notify]]\nkind = "webhook"\nurl = "{taker.url}"\ngroup_wait_s = {wait_s}\n'
        f"hold_s = {hold_s}\ntimeout_s = 300\n{more}\n"
    )


def settle(notifier: Notifier) -> None:
    """Wait until nothing is left to send."""
    until(lambda: not any(stats.queued for stats in notifier.stats_by_receiver().values()))


def stats_of(notifier: Notifier) -> NotifierStats:
    """The counts of its one receiver."""
    (stats,) = notifier.stats_by_receiver().values()
    return stats


def ended(notifier: Notifier, name: str = "r0", from_s: float = 10.0) -> None:
    """The target is well again, and stays so for longer than the hold time."""
    for after_s in (from_s, from_s + 10, from_s + 21):
        notifier.offer(state(healthy(), name=name, after_s=after_s))
