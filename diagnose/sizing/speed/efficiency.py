"""How much of a GPU's peaks vLLM reaches: the roofline's efficiencies, and their defaults. Pure.

The defaults are fitted to some 100 published points of vLLM 0.10 to 0.17 on H100, 15 models from
7B to 357B, bursts and steady loads together, with no term for any model or family. `python -m
tests.throughput` prints what they are worth. Other GPUs take the same shares: an assumption.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Final

from kneewatch.diagnose.sizing.inputs import not_negative, positive, within


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the peaks that a step reaches, and the time that no peak explains.

    mfu_ratio             of the compute peak, in matrix products
    attention_mfu_ratio   of the 16-bit compute peak, in attention
    mbu_ratio             of the memory bandwidth
    expert_mbu_ratio      of the memory bandwidth, reading routed experts
    link_ratio            of the link between GPUs
    allreduce_latency_s   fixed cost of one all-reduce, or of passing on to the next stage
    layer_s               between the kernels of one layer
    sequence_s            one sequence of the batch: sampling, block tables, detokenization
    host_s                scheduling and input preparation of a step
    prompt_step_s         more for a step with prompt tokens, which no full CUDA graph replays

    The first five can be measured on a live server; `dataclasses.replace(DEFAULT, ...)` takes
    what is known.
    """

    mfu_ratio: float = 0.32
    attention_mfu_ratio: float = 0.37
    mbu_ratio: float = 0.92
    expert_mbu_ratio: float = 0.58
    link_ratio: float = 0.7
    allreduce_latency_s: float = 4e-6
    layer_s: float = 13e-6
    sequence_s: float = 40e-6
    host_s: float = 1.7e-3
    prompt_step_s: float = 15e-3

    def check(self) -> None:
        """Refuse shares that are not above 0 and at most 1, and negative times.

        Raises:
            SizingError: with the field's name and its value.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_ratio"):
                positive(field.name, value)
                within(field.name, value, low=0.0, high=1.0)
            else:
                not_negative(field.name, value)


def with_shares(
    base: Efficiency, *, mfu_ratio: float | None = None, mbu_ratio: float | None = None
) -> Efficiency:
    """`base` with a measured share of the compute peak, of the bandwidth, or of both.

    Who measures one share knows one for all kernels of a kind: it counts for attention and for
    routed experts as well.
    """
    if mfu_ratio is not None:
        base = replace(base, mfu_ratio=mfu_ratio, attention_mfu_ratio=mfu_ratio)
    if mbu_ratio is not None:
        base = replace(base, mbu_ratio=mbu_ratio, expert_mbu_ratio=mbu_ratio)
    return base


DEFAULT: Final = Efficiency()

BANDS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "mfu_ratio": (0.25, 0.32),
        "mbu_ratio": (0.80, 0.92),
        "expert_mbu_ratio": (0.45, 0.92),
        "sequence_s": (14e-6, 40e-6),
        "host_s": (0.9e-3, 1.8e-3),
        "prompt_step_s": (10e-3, 15e-3),
    }
)
"""Lowest and highest over the fit and those that leave one of the 15 models out. Single servers
lie further out: on 32K prompts, MFU is from 0.1 (GLM-4.5-Air, vLLM 0.11) to 0.5 (Qwen3.5-9B)."""

SOURCE: Final = "fitted to published points of vLLM on H100 (tests/throughput.py)"
