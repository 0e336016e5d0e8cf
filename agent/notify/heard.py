"""Which of Alertmanager's alerts a receiver has been told of. Pure.

Alertmanager repeats what goes on, and two of a pair may both post it: an alert is told once for
each state it takes. One that fires anew has a new start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

MARKS_MOST = 10_000


class Mark(NamedTuple):
    """What an alert is known by."""

    fingerprint: str
    status: str
    starts_s: float


class Heard:
    """The newest mark of each alert. Not safe between threads."""

    def __init__(self) -> None:
        self._told: dict[str, Mark] = {}
        self._going: dict[str, Mark] = {}
        self.is_changed = False

    def take(self, mark: Mark) -> bool:
        """Whether an alert is to be told; if so it is on its way from now on."""
        known = self._going.get(mark.fingerprint) or self._told.get(mark.fingerprint)
        if known == mark:
            return False
        self._going[mark.fingerprint] = mark
        return True

    def done(self, mark: Mark, *, delivered: bool) -> None:
        """An alert was delivered, or given up: then Alertmanager's next word of it is told."""
        if self._going.get(mark.fingerprint) == mark:
            del self._going[mark.fingerprint]
        if delivered:
            self._told.pop(mark.fingerprint, None)
            self._told[mark.fingerprint] = mark
            while len(self._told) > MARKS_MOST:
                del self._told[next(iter(self._told))]
            self.is_changed = True

    def rows(self) -> list[Mark]:
        """What must be known after a restart, ready for JSON."""
        self.is_changed = False
        return list(self._told.values())

    def restore(self, rows: Iterable[Any]) -> None:
        """Take what `rows` gave before a restart.

        Raises:
            TypeError, ValueError: they are not what it gave.
        """
        for fingerprint, status, starts_s in rows:
            mark = Mark(str(fingerprint), str(status), float(starts_s))
            self._told[mark.fingerprint] = mark
