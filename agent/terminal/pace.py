"""The time of the feeds: when the next scrape is due, how fast recordings play, when all ends."""

from __future__ import annotations

import threading
import time

SLOWEST, FASTEST = 1 / 8, 128.0
GAP_MAX_S = 60.0
"""A longer gap in a recording is played as one of this length."""


class Pace:
    """Shared by the feeds and the screen. Safe between threads."""

    def __init__(self, speed: float = 1.0) -> None:
        self._changed = threading.Condition()
        self._speed = min(FASTEST, max(SLOWEST, speed))
        self._paused = False
        self._stopped = False

    @property
    def speed(self) -> float:
        """How many seconds of a recording are played in one."""
        return self._speed

    @property
    def stopped(self) -> bool:
        """Whether all has ended."""
        return self._stopped

    def change_speed(self, factor: float) -> None:
        """Play recordings faster or slower."""
        with self._changed:
            self._speed = min(FASTEST, max(SLOWEST, self._speed * factor))
            self._changed.notify_all()

    def pause(self, paused: bool) -> None:
        """Stop playing recordings, or go on. Servers are scraped all the same."""
        with self._changed:
            self._paused = paused
            self._changed.notify_all()

    def stop(self) -> None:
        """End every wait."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def until(self, due_s: float) -> bool:
        """Wait for a moment of the monotonic clock; False once all has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, max(0.0, due_s - time.monotonic()))
            return not self._stopped

    def play(self, span_s: float) -> bool:
        """Wait for so much of a recording to pass; False once all has ended."""
        left_s = min(span_s, GAP_MAX_S)
        with self._changed:
            while left_s > 0 and not self._stopped:
                if self._paused:
                    self._changed.wait()
                    continue
                speed, began_s = self._speed, time.monotonic()
                self._changed.wait(left_s / speed)
                left_s -= (time.monotonic() - began_s) * speed
            return not self._stopped
