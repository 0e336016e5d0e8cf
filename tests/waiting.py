"""Waiting for what other threads and processes do, on machines of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""Far longer than any wait takes on a busy machine: only what never happens fails by it."""


def until(holds: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Return once a condition holds. Fails after `patience_s`."""
    give_up_s = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < give_up_s, f"not reached within {patience_s:g} s"
        time.sleep(0.005)
