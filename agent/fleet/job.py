"""The daemon's job on a fleet: ask, and tell receivers what was found."""

from __future__ import annotations

from collections.abc import Callable

from kneewatch.agent.fleet.telling import lost_state, states_of
from kneewatch.agent.fleet.watch import FleetWatch
from kneewatch.agent.notify.message import FLEET
from kneewatch.agent.notify.notifier import Notifier


class FleetJob:
    """One verdict an interval, told like the states of targets.

    `names` are the names that it is told under; `on_names` is called whenever they may be others.
    """

    def __init__(
        self, watch: FleetWatch, notifier: Notifier, *, on_names: Callable[[], None]
    ) -> None:
        self._watch, self._notifier, self._on_names = watch, notifier, on_names
        # Until there is an answer nobody knows what of it was told before is still there.
        self.names = frozenset(one for one in notifier.held() if one.split("/")[0] == FLEET)

    def cycle(self) -> float | None:
        """Ask once, and tell. Gives the seconds until the next time where there was no answer."""
        after_s = self._watch.cycle()
        self._tell()
        return after_s

    def crashed(self, error: Exception) -> float | None:
        """There is a bug: what was seen before says nothing of now."""
        after_s = self._watch.crashed(error)
        self._tell()
        return after_s

    def _tell(self) -> None:
        if not self._notifier:
            return
        state = self._watch.state
        if state.failing:
            now_s = self._watch.now_s()
            self._notifier.offer(
                lost_state(state.url, state.error, t_s=now_s, interval_s=state.interval_s)
            )
        elif state.found is not None:
            states = states_of(state.found, interval_s=state.interval_s)
            names = frozenset(one.name for one in states)
            if state.found.partial:  # what is missing in it may be there still
                names |= self.names
            if names != self.names:
                self.names = names
                self._on_names()
            for one in states:
                self._notifier.offer(one)
