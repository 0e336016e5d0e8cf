"""Splitting a model over GPUs: what TP, PP, DP and EP cost, and which TP degrees exist. Pure.

Source: guide chapter 5; text 003, tensor against pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kneewatch.diagnose.catalogue.inputs import SizingError

ALLREDUCES_PER_LAYER = 2
"""One behind attention and one behind the MLP (text 003, Q4; guide 5.1 counts one)."""

TP_OVERHEAD_RATIO: Mapping[str, Mapping[int, float]] = MappingProxyType(
    {
        # guide 5.6 gives 2-9 % over TP 2 to 8; TP 4 lies between by the ring's arithmetic
        "nvlink": MappingProxyType({1: 0.0, 2: 0.02, 4: 0.04, 8: 0.09}),
        "pcie": MappingProxyType({1: 0.0, 2: 0.08, 4: 0.25, 8: 0.38}),
    }
)
"""Share of a step spent on all-reduces, to plan with (guide 5.6)."""


def tensor_parallel_choices(
    *, attention_heads: int, kv_heads: int, domain_gpus: int
) -> tuple[int, ...]:
    """TP degrees that split the heads evenly and stay within one NVLink domain, smallest first.

    Query heads must divide; KV heads divide, or are replicated a whole number of times.
    Source: guide 5.1, 5.2 and 5.6; heads: vLLM, model_executor/layers/linear.py (QKV projection).
    """
    return tuple(
        degree
        for degree in range(1, domain_gpus + 1)
        if attention_heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)
    )


def check_tensor_parallel(
    *, tensor_parallel: int, attention_heads: int, kv_heads: int, domain_gpus: int
) -> None:
    """Refuse a TP degree that the model or the node cannot have.

    Raises:
        SizingError: names what it breaks and lists the degrees that would do.
    """
    choices = tensor_parallel_choices(
        attention_heads=attention_heads, kv_heads=kv_heads, domain_gpus=domain_gpus
    )
    if tensor_parallel in choices:
        return
    if tensor_parallel < 1:
        reason = "it must be 1 or more"
    elif tensor_parallel > domain_gpus:
        reason = f"one NVLink domain has {domain_gpus} GPUs"
    elif attention_heads % tensor_parallel:
        reason = f"it does not divide {attention_heads} attention heads"
    else:
        reason = f"{kv_heads} KV heads neither divide by it nor into it"
    listed = ", ".join(str(choice) for choice in choices)
    raise SizingError(
        f"tensor_parallel is {tensor_parallel}: {reason}; choose one of {listed}",
        name="tensor_parallel",
        choices=tuple(str(choice) for choice in choices),
    )


def planned_overhead_ratio(*, link: str, tensor_parallel: int) -> float:
    """Share of a step to plan for all-reduces: the guide's figures, a ring's between and beyond.

    `link` is nvlink or pcie. With 2 (n - 1) / n of the message to send and 1 / n of the compute,
    communication over compute grows as n - 1; it is anchored at TP 8. Source: guide 5.6.
    """
    by_degree = TP_OVERHEAD_RATIO[link]
    if tensor_parallel in by_degree:
        return by_degree[tensor_parallel]
    sent_to_computed = by_degree[8] / (1 - by_degree[8]) / (8 - 1) * (tensor_parallel - 1)
    return sent_to_computed / (1 + sent_to_computed)


def all_to_all_bytes(
    *,
    tokens: float,
    hidden_size: int,
    experts_per_token: int,
    gpus: int,
    bytes_per_element: float = 2.0,
) -> float:
    """Bytes that leave their GPU in one MoE layer, dispatch and return, over the whole group.

    Source: guide 5.4; a token's expert is on another GPU with probability 1 - 1/gpus.
    """
    moved = tokens * experts_per_token * hidden_size * bytes_per_element
    return 2 * moved * (1 - 1 / gpus)
