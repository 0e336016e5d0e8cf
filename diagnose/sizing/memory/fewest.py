"""The smallest replica that holds a load. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kneewatch.diagnose.sizing.inputs import SizingError
from kneewatch.diagnose.sizing.memory.budget import memory
from kneewatch.diagnose.sizing.memory.setup import Setup
from kneewatch.diagnose.sizing.memory.weights import Parallel

# Tensor parallel inside a node, then more nodes as pipeline stages.
_SPREADS = tuple(
    Parallel(tensor=tensor, pipeline=pipeline)
    for pipeline in (1, 2, 4)
    for tensor in (1, 2, 4, 8)
    if pipeline == 1 or tensor == 8
)


@dataclass(frozen=True, slots=True)
class FewestGpus:
    """GPUs of the smallest replica that holds the load; None where 32 do not do.

    `low` believes the least overhead, `high` the most; `spread` is the expected one's layout.
    """

    low: int | None
    expected: int | None
    high: int | None
    spread: Parallel | None


def fewest_gpus(setup: Setup, *, concurrency: float) -> FewestGpus:
    """The smallest replica that starts and holds `concurrency` requests of the context's length.

    Weights or KV bytes that were stated for one layout say nothing about another, so both are
    computed here.

    Raises:
        SizingError: an input that cannot be, with its name.
    """
    plain = replace(setup, available_kv_bytes=None, weights_bytes=None)
    found: dict[str, Parallel] = {}
    # What was stated comes first of its size.
    spreads = sorted({setup.parallel: None, **dict.fromkeys(_SPREADS)}, key=lambda each: each.gpus)
    for spread in spreads:
        try:
            answer = memory(replace(plain, parallel=spread))
        except SizingError as error:
            if error.name not in {"tensor_parallel", "draft_model"}:
                raise
            continue
        longest = answer.layout.request_blocks(plain.longest_tokens)
        for bound, free_bytes, requests in (
            ("low", answer.available_bytes.high, answer.concurrency.high),
            ("expected", answer.available_bytes.expected, answer.concurrency.expected),
            ("high", answer.available_bytes.low, answer.concurrency.low),
        ):
            if answer.layout.blocks(free_bytes) > longest and requests >= concurrency:
                found.setdefault(bound, spread)
    best = found.get("expected")
    return FewestGpus(
        low=found["low"].gpus if "low" in found else None,
        expected=best.gpus if best else None,
        high=found["high"].gpus if "high" in found else None,
        spread=best,
    )
