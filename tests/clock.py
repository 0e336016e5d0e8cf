"""A clock that a test moves: what happens in seconds then happens at once, on any machine."""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    """Stands in for the module `time`. Sleeping moves it and takes no time."""

    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        self.now_s = now_s
        self._actions: list[tuple[float, Callable[[], object]]] = []

    def time(self) -> float:
        """The wall clock, in seconds."""
        return self.now_s

    monotonic = time

    def sleep(self, seconds: float) -> None:
        """Move by `seconds`, and do what is due by then."""
        self.now_s += seconds
        due = [action for at_s, action in self._actions if at_s <= self.now_s]
        self._actions = [entry for entry in self._actions if entry[0] > self.now_s]
        for action in due:
            action()

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Do something once the clock has moved by `seconds`."""
        self._actions.append((self.now_s + seconds, action))
