"""Counterfactuals: signal values at which a cause would no longer be concluded. Pure.

Each signal of the evidence is varied alone, and the cause is examined again. Bisection finds the
value at which the cause is no longer concluded. A signal that cannot change the conclusion alone
has no counterfactual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.gpu_clocks import BRAKES, HEATS, POWERS, full_clock_hz
from kneewatch.diagnose.deployment.server_state import GpuState
from kneewatch.diagnose.halving import end_of
from kneewatch.diagnose.ranking import BY_ID
from kneewatch.diagnose.verdict import Cause, Counterfactual, Evidence
from kneewatch.rules.rule import MORE_IS_BETTER

CLOCK = "gpu_sm_clock_ratio"
CLOCKS = ("gpu_sm_clock_hz", "gpu_sm_clock_most_hz")

NAMES = {
    "gpu_thermal_throttle_ratio": HEATS,
    "gpu_power_brake_ratio": BRAKES,
    "gpu_power_throttle_ratio": POWERS,
}
"""Evidence whose value is the greatest of several signals."""


def on_gpus(signal: str, gpus: Sequence[GpuState]) -> bool:
    """Whether the evidence's signal is measured per GPU."""
    names = CLOCKS if signal == CLOCK else NAMES.get(signal, (signal,))
    return any(name in gpu.values for gpu in gpus for name in names)


def with_gpu_signal(signal: str, value: float, gpus: Sequence[GpuState]) -> tuple[GpuState, ...]:
    """The GPUs, with a signal limited to at most `value`.

    For clocks, `value` is a share of the full clock, and lower clocks are raised to it.
    """
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


# --- Search ---------------------------------------------------------------------------------------

Stands = Callable[[Facts], bool]
"""Whether a cause is concluded."""

HALVINGS = 12
"""Number of bisection steps; enough for three significant digits."""

FAR = 4.0
"""How far a signal is raised if low values are the evidence: this times its threshold or value."""

BARELY = 1.001
"""An earlier counterfactual is kept if the cause is still concluded just inside it, by this
factor."""


def with_counterfactuals(facts: Facts, first: Cause, before: Cause | None) -> Cause:
    """The first cause with its counterfactuals; `before` is the last one that got them.

    During its clear time, those of the last scrape at which the cause was concluded.
    """
    points = before.unless if before is not None and before.id == first.id else ()
    if first.seen_s == facts.now_s:
        points = counterfactuals(BY_ID[first.id].stands, facts, first, points)
    return replace(first, unless=points)


def counterfactuals(
    stands: Stands, facts: Facts, cause: Cause, before: Sequence[Counterfactual] = ()
) -> tuple[Counterfactual, ...]:
    """The counterfactuals of a cause that these facts conclude: at most one per signal, in the
    order of its evidence.

    `before` has the counterfactuals of the same cause at the previous scrape. One that is still
    valid is not computed again.
    """
    earlier = {point.signal: point for point in before}
    points: dict[str, Counterfactual] = {}
    for evidence in cause.evidence:
        if evidence.signal not in points:
            point = _turning(stands, facts, evidence, earlier.get(evidence.signal))
            if point is not None:
                points[evidence.signal] = point
    return tuple(points.values())


def _turning(
    stands: Stands, facts: Facts, evidence: Evidence, before: Counterfactual | None
) -> Counterfactual | None:
    # Then the cause was concluded from the value of the window's newest part, or of one GPU.
    of_part = evidence.signal in facts.recent or on_gpus(evidence.signal, facts.gpus)
    now = evidence.value if of_part else facts.values.get(evidence.signal)
    stands_at = _tried(stands, facts, evidence.signal)
    if now is None or (of_part and not stands_at(now)):
        # The cause needs both the window's value and that of its newest part, which differ.
        return None
    high = FAR * max(abs(now), abs(evidence.threshold or 0.0), 1e-9)
    if evidence.signal.endswith("_ratio") and now <= 1:
        high = 1.0
    if before is not None:
        inside = before.at / BARELY if before.above else before.at * BARELY
        if (now < before.at) == before.above and stands_at(inside) and not stands_at(before.at):
            return replace(before, now=now)
    # Recovery first: the other end may be no better, only another cause.
    for end in (high, 0.0) if evidence.signal in MORE_IS_BETTER else (0.0, high):
        if not stands_at(end):
            at = end_of(stands_at, holds=now, falls=end, halvings=HALVINGS)
            return Counterfactual(evidence.signal, now, at, above=end > now)
    return None


def _tried(stands: Stands, facts: Facts, signal: str) -> Callable[[float], bool]:
    """A function that takes a value of `signal` and returns whether the cause is still concluded.

    Everything else stays as it is.
    """
    if on_gpus(signal, facts.gpus):
        gpus = facts.gpus
        return lambda value: stands(replace(facts, gpus=with_gpu_signal(signal, value, gpus)))
    # One copy of the facts is enough for all values tried.
    values, recent = dict(facts.values), dict(facts.recent)
    copied = replace(facts, values=values, recent=recent)

    def stands_at(value: float) -> bool:
        values[signal] = value
        if signal in recent:
            recent[signal] = value
        return stands(copied)

    return stands_at
