"""What a GPU at work waits for: its memory, its arithmetic, or the host. Guide 3.2, 3.3, 8.4. Pure.

Decode reads all weights for few tokens and keeps the memory busy; prefill keeps the tensor pipes
busy; a GPU that rests while requests run is not fed. How busy the engine is says nothing of which.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from kneewatch.diagnose.case import Case, Facts

MEMORY_FROM, COMPUTE_FROM = 0.6, 0.5
"""Shares of cycles in which DRAM or the tensor pipes move, from which they are what is short."""

MBU_FROM, MFU_FROM = 0.55, 0.4
"""The same as shares of the GPU's peak, which nobody reaches."""

FED_FROM = 0.6
"""The guide wants a serving GPU busy for 60 % of the time at least (9.3)."""

Kind = Literal["memory", "compute", "host"]
WORDS: dict[Kind, str] = {
    "memory": "memory-bound",
    "compute": "compute-bound",
    "host": "starved by the host: the GPU rests while requests run",
}


SHORT: tuple[tuple[Kind, str, float], ...] = (
    ("memory", "gpu_dram_active_ratio", MEMORY_FROM),
    ("compute", "gpu_tensor_active_ratio", COMPUTE_FROM),
    ("memory", "mbu_ratio", MBU_FROM),
    ("compute", "mfu_ratio", MFU_FROM),
)
SHARES = (
    ("gpu_dram_active_ratio", "memory busy"),
    ("gpu_tensor_active_ratio", "tensor pipes"),
    ("gpu_sm_active_ratio", "SMs"),
    ("gpu_sm_occupancy_ratio", "their occupancy"),
    ("gpu_engine_active_ratio", "engine"),
    ("mbu_ratio", "MBU"),
    ("mfu_ratio", "MFU"),
)


class Bound(NamedTuple):
    """What is short, the signal that shows it, its value and bound, and all that is known."""

    kind: Kind
    signal: str
    value: float
    threshold: float
    text: str


def bound_of(facts: Facts) -> Bound | None:
    """What the GPUs wait for, from DCGM's or NVML's activity or from vLLM's own estimate of its
    work; None where neither is known or nothing is short, and of GPUs that may be another's."""
    if facts.get("running_avg") < 1 or facts.gpus_guessed:
        return None
    engine = facts.values.get("gpu_engine_active_ratio")
    over = [one for one in SHORT if facts.get(one[1]) >= one[2]]
    if over:
        kind, signal, threshold = max(over, key=lambda one: facts.get(one[1]) / one[2])
        value = facts.get(signal)
    elif engine is not None and engine < FED_FROM:
        kind, signal, value, threshold = "host", "gpu_engine_active_ratio", engine, FED_FROM
    else:
        return None
    return Bound(kind, signal, value, threshold, f"{WORDS[kind]} ({_shares(facts)})")


def weigh_bound(case: Case, facts: Facts, *, wanted: Kind) -> Kind | None:
    """Add what is short as evidence: for the case where it is what the cause says, else against.

    Returns what is short.
    """
    bound = bound_of(facts)
    if bound is None:
        return None
    weight = 0.6 if bound.kind == wanted else -0.6
    low = bound.kind == "host"
    case.weigh(bound.signal, bound.value, bound.threshold, weight, bound.text, below=low)
    return bound.kind


def _shares(facts: Facts) -> str:
    known = [(words, facts.values.get(signal)) for signal, words in SHARES]
    return ", ".join(f"{words} {100 * share:.0f} %" for words, share in known if share is not None)
