"""The reading of the GPU sources, as a job."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

GPU_JOB = "\0gpus"
"""No target's name: these are printable."""


class Collects(Protocol):
    """The GPU sources, as their job sees them."""

    def collect(self, now_s: float) -> None:
        """Read what is due."""
        ...


class GpuJob:
    """Reads the GPU sources, whichever they are then."""

    def __init__(self, sources: Collects, wall: Callable[[], float] = time.time) -> None:
        self._sources, self._wall = sources, wall

    def cycle(self) -> float | None:
        """Read them once."""
        self._sources.collect(self._wall())
        return None

    def crashed(self, error: Exception) -> float | None:
        """Their states and readings stay as they were, and age."""
        del error
        return None
