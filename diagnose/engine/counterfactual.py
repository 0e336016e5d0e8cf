"""The value at which a cause would no longer be concluded. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kneewatch.diagnose.causes.evidence import Cause, Counterfactual, Evidence, Facts
from kneewatch.diagnose.causes.gpu_clocks import BRAKES, HEATS, POWERS, full_clock_hz
from kneewatch.diagnose.gpu.health import GpuState

CLOCK = "gpu_sm_clock_ratio"
CLOCKS = ("gpu_sm_clock_hz", "gpu_sm_clock_most_hz")

NAMES = {
    "gpu_thermal_throttle_ratio": HEATS,
    "gpu_power_brake_ratio": BRAKES,
    "gpu_power_throttle_ratio": POWERS,
}
"""Evidence that is the most of several signals."""


def on_gpus(signal: str, gpus: Sequence[GpuState]) -> bool:
    """Whether a signal of evidence is read off single GPUs."""
    names = CLOCKS if signal == CLOCK else NAMES.get(signal, (signal,))
    return any(name in gpu.values for gpu in gpus for name in names)


def moved(signal: str, value: float, gpus: Sequence[GpuState]) -> tuple[GpuState, ...]:
    """The GPUs with the signal at most at a value, their clocks at least at one."""
    if signal == CLOCK:
        return tuple(_faster(gpu, value) for gpu in gpus)
    names = NAMES.get(signal, (signal,))
    return tuple(
        replace(
            gpu,
            values={
                name: min(now, value) if name in names and now is not None else now
                for name, now in gpu.values.items()
            },
        )
        for gpu in gpus
    )


def _faster(gpu: GpuState, share: float) -> GpuState:
    full_hz = full_clock_hz(gpu)
    if full_hz is None:
        return gpu
    clocks = {
        name: max(now, share * full_hz)
        for name in CLOCKS
        if (now := gpu.values.get(name)) is not None
    }
    return replace(gpu, values={**gpu.values, **clocks})


# What would have to be different for a cause not to be concluded: its evidence, turned back.
# Pure.
#
# Each signal that the evidence cites is moved by itself towards where it says nothing, and the
# cause is examined again: the value at which it falls is found by halving. A signal that alone
# decides nothing has no such value, and is not told.


Stands = Callable[[Facts], bool]
"""Whether a cause is concluded."""

HALVINGS = 12
"""Enough for three digits."""

FAR = 4.0
"""How many times its threshold (or its value) a signal is raised that speaks by being low."""

BARELY = 1.001
"""A turning point of the scrape before is still one where the cause stands this much inside it."""


def counterfactuals(
    stands: Stands, facts: Facts, cause: Cause, before: Sequence[Counterfactual] = ()
) -> tuple[Counterfactual, ...]:
    """The turning points of a cause's evidence, in the evidence's order, each signal once.

    `before` are those of the same cause a scrape earlier: one that still holds is not searched for
    anew.
    """
    earlier = {point.signal: point for point in before}
    points: dict[str, Counterfactual] = {}
    for evidence in cause.evidence:
        now = facts.values.get(evidence.signal)
        if evidence.signal in facts.recent or on_gpus(evidence.signal, facts.gpus):
            # The number that the cause was concluded from: of the newest part, or of one GPU.
            now = evidence.value
        if now is None or evidence.signal in points:
            continue
        point = _turning(stands, facts, evidence, now, earlier.get(evidence.signal))
        if point is not None:
            points[evidence.signal] = point
    return tuple(points.values())


def _turning(
    stands: Stands, facts: Facts, evidence: Evidence, now: float, before: Counterfactual | None
) -> Counterfactual | None:
    high = FAR * max(abs(now), abs(evidence.threshold or 0.0), 1e-9)
    if evidence.signal.endswith("_ratio") and now <= 1:
        high = 1.0
    stands_at = _tried(stands, facts, evidence.signal)
    if not stands_at(now):
        # Window and newest part differ, and it takes both.
        return None
    if before is not None:
        inside = before.at / BARELY if before.above else before.at * BARELY
        if (now < before.at) == before.above and stands_at(inside) and not stands_at(before.at):
            return replace(before, now=now)
    for end in (0.0, high):
        if not stands_at(end):
            at = _halved(stands_at, holds=now, falls=end)
            return Counterfactual(evidence.signal, now, at, above=end > now)
    return None


def _halved(stands: Callable[[float], bool], *, holds: float, falls: float) -> float:
    for _ in range(HALVINGS):
        middle = (holds + falls) / 2
        if stands(middle):
            holds = middle
        else:
            falls = middle
    return falls


def _tried(stands: Stands, facts: Facts, signal: str) -> Callable[[float], bool]:
    """Whether the cause stands with a signal at some value and all else as it is."""
    if on_gpus(signal, facts.gpus):
        gpus = facts.gpus
        return lambda value: stands(replace(facts, gpus=moved(signal, value, gpus)))
    # One copy of the facts serves all values that are tried.
    values, recent = dict(facts.values), dict(facts.recent)
    copied = replace(facts, values=values, recent=recent)

    def stands_at(value: float) -> bool:
        values[signal] = value
        if signal in recent:
            recent[signal] = value
        return stands(copied)

    return stands_at
