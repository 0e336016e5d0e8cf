"""Whether an engine gets less done at the load it had: the last stage of the cascade. Pure.

Throughput of neighbouring windows swings, so nothing is compared with a single best window: the
reference is the median over the last five windows that had at most the present load, the newest
window left out, and a fall counts once it has lasted for half a window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

FALLS_TO = 0.7
"""Tokens per second below 70 % of the reference are a fall."""

GPU_IDLE_BELOW = 0.5
"""The other signature: GPU activity below half of the reference."""

LOAD_HOLDS_AT = 0.8
"""Load holds while it is at least 80 % of what it was then."""

SAMPLES_MIN = 3
SAMPLES_KEPT = 10
"""Half windows that are remembered."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A window's tokens per second, requests in flight, and GPU activity (None: not known)."""

    t_s: float
    tokens_per_s: float
    in_flight: float
    gpu_active: float | None


class UsefulWork:
    """What one engine got done lately. `window_s` is the short window."""

    def __init__(self, *, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_KEPT)
        self._fallen_since_s: float | None = None

    def forget(self) -> None:
        """The process was replaced."""
        self._samples.clear()
        self._fallen_since_s = None

    def judge(self, now_s: float, values: Mapping[str, float | None]) -> str | None:
        """Why useful work has fallen while the load holds; None where it has not."""
        tokens_per_s = values.get("generation_tokens_per_s")
        if tokens_per_s is None:
            return None
        in_flight = (values.get("running_avg") or 0.0) + (values.get("waiting_avg") or 0.0)
        now = Sample(now_s, tokens_per_s, in_flight, values.get("gpu_engine_active_ratio"))
        reason = self._reason(now)
        if reason is None:
            self._fallen_since_s = None
        elif self._fallen_since_s is None:
            self._fallen_since_s = now_s
        due = not self._samples or now_s - self._samples[-1].t_s >= self._window_s / 2
        if due and reason is None:
            # A fall is not learned: it would become the reference and so end by itself.
            self._samples.append(now)
        since_s = self._fallen_since_s
        return reason if since_s is not None and now_s - since_s >= self._window_s / 2 else None

    def _reason(self, now: Sample) -> str | None:
        then = [
            sample
            for sample in self._samples
            if sample.t_s <= now.t_s - self._window_s
            and 0 < LOAD_HOLDS_AT * sample.in_flight <= now.in_flight
        ]
        if len(then) < SAMPLES_MIN:
            return None
        if now.tokens_per_s < FALLS_TO * median(sample.tokens_per_s for sample in then):
            return "generated tokens fall while the load holds"
        active = [sample.gpu_active for sample in then if sample.gpu_active is not None]
        if now.gpu_active is None or len(active) < SAMPLES_MIN:
            return None
        if now.gpu_active < GPU_IDLE_BELOW * median(active):
            return "the GPU falls idle while the load holds"
        return None
