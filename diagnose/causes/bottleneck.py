"""What a GPU at work waits for: its memory, its arithmetic, or the host. Guide 3.2, 3.3, 8.4. Pure.

Decode reads all weights for few tokens and keeps the memory busy; prefill keeps the tensor pipes
busy; a GPU that rests while requests run is not fed. How busy the engine is says nothing of which.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import Sidecar, SidecarHolds, Term, term
from kneewatch.rules.conditions import Condition

FED_FROM = 0.6
"""The guide wants a serving GPU busy for 60 % of the time at least (9.3)."""

Kind = Literal["memory", "compute", "host"]
WORDS: dict[Kind, str] = {
    "memory": "memory-bound",
    "compute": "compute-bound",
    "host": "starved by the host: the GPU rests while requests run",
}
LEVERS: dict[Kind, str] = {
    "memory": "Weight quantization or an fp8 KV cache to move fewer bytes, or more bandwidth (more "
    "or newer GPUs); a smaller batch helps little.",
    "compute": "A smaller batch (--max-num-seqs or --max-num-batched-tokens), prefill on its own "
    "servers, or more GPUs: arithmetic is what is short.",
    "host": "Look at the host first: CPU cores for the engine and its API servers, their clock, "
    "logging, guided decoding, an eager mode without CUDA graphs.",
}
"""What to do about slow decode, by what the GPU waits for."""

SHORT: tuple[tuple[Kind, str, float], ...] = (
    ("memory", "gpu_dram_active_ratio", 0.6),
    ("compute", "gpu_tensor_active_ratio", 0.5),
    ("memory", "mbu_ratio", 0.55),
    ("compute", "mfu_ratio", 0.4),
)
"""What is short, from which share on: of cycles in which DRAM or the tensor pipes are active, or of
the GPU's peak, which no kernel reaches."""

SHARES = (
    ("gpu_dram_active_ratio", "memory busy"),
    ("gpu_tensor_active_ratio", "tensor pipes"),
    ("gpu_sm_active_ratio", "SMs"),
    ("gpu_sm_occupancy_ratio", "their occupancy"),
    ("gpu_engine_active_ratio", "engine"),
    ("mbu_ratio", "MBU"),
    ("mfu_ratio", "MFU"),
)
WHY = "what the GPUs wait for is read off several sources, of which no label says whose they are"


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
    over = [row for row in SHORT if facts.get(row[1]) >= row[2]]
    if over:
        kind, signal, threshold = max(over, key=lambda row: facts.get(row[1]) / row[2])
        value = facts.get(signal)
    elif engine is not None and engine < FED_FROM:
        kind, signal, value, threshold = "host", "gpu_engine_active_ratio", engine, FED_FROM
    else:
        return None
    return Bound(kind, signal, value, threshold, f"{WORDS[kind]} ({_shares(facts)})")


def is_bound(kind: Kind) -> Condition:
    """Whether the GPUs wait for this; false where nothing tells."""
    return SidecarHolds(lambda facts: _is(facts, kind), WHY, f"the GPUs are {WORDS[kind]}")


def bound_terms(wanted: Kind, weight: float = 0.6, against: float = -0.6) -> tuple[Term, ...]:
    """What is short as evidence: for the cause where it is what the cause says, else against."""
    value = Sidecar(lambda facts: _get(facts, "value"), WHY, "the share that shows what is short")
    bound = Sidecar(lambda facts: _get(facts, "threshold"), WHY, "its bound")
    host = is_bound("host")

    def each(weight: float, when: Condition, *, below: bool = False) -> Term:
        return term(value, bound, weight, _text, when=when, below=below, signal=_signal,
                    sidecar=WHY)  # fmt: skip

    return (
        each(weight, is_bound(wanted)),
        each(against, ~is_bound(wanted) & ~host),
        each(against, host, below=True),
    )


def _is(facts: Facts, kind: Kind) -> bool:
    bound = bound_of(facts)
    return bound is not None and bound.kind == kind


def _get(facts: Facts, name: Literal["value", "threshold"]) -> float | None:
    bound = bound_of(facts)
    return None if bound is None else getattr(bound, name)


def _text(facts: Facts) -> str:
    bound = bound_of(facts)
    return "" if bound is None else bound.text


def _signal(facts: Facts) -> str:
    bound = bound_of(facts)
    return "" if bound is None else bound.signal


def _shares(facts: Facts) -> str:
    shares = [(words, facts.values.get(signal)) for signal, words in SHARES]
    return ", ".join(f"{words} {100 * share:.0f}%" for words, share in shares if share is not None)
