"""Splitting a model over GPUs: what TP, PP, DP and EP cost, and which TP degrees exist. Pure.

Source: guide chapter 5; text 003, tensor against pipeline parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kneewatch.diagnose.catalogue.inputs import SizingError, not_negative, positive, within

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
    positive("attention_heads", attention_heads)
    positive("kv_heads", kv_heads)
    positive("domain_gpus", domain_gpus)
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


@dataclass(frozen=True, slots=True)
class Split:
    """How one model copy lies on GPUs."""

    tensor_parallel: int
    pipeline_parallel: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of one copy."""
        return self.tensor_parallel * self.pipeline_parallel


def lowest_split(
    *, min_gpus: int, attention_heads: int, kv_heads: int, layers: int, domain_gpus: int
) -> Split:
    """The smallest split of at least `min_gpus` GPUs: TP within a node first, then PP over nodes.

    Raises:
        SizingError: not even one layer per stage gives that many GPUs.
    Source: guide 5.1 and 5.5.
    """
    positive("min_gpus", min_gpus)
    choices = tensor_parallel_choices(
        attention_heads=attention_heads, kv_heads=kv_heads, domain_gpus=domain_gpus
    )
    for degree in choices:
        if degree >= min_gpus:
            return Split(degree)
    stages = math.ceil(min_gpus / choices[-1])
    if stages > layers:
        raise SizingError(
            f"min_gpus is {min_gpus}: {layers} layers over TP {choices[-1]} end at "
            f"{layers * choices[-1]} GPUs",
            name="min_gpus",
        )
    return Split(choices[-1], stages)


def replicas_per_node(*, node_gpus: int, gpus_per_replica: int) -> int:
    """Whole model copies on one node; 0 where a copy spans nodes (guide 5.1 and 5.3)."""
    positive("node_gpus", node_gpus)
    positive("gpus_per_replica", gpus_per_replica)
    return node_gpus // gpus_per_replica


def allreduce_bytes(
    *, tokens: float, hidden_size: int, gpus: int, bytes_per_element: float = 2.0
) -> float:
    """Bytes that each GPU sends in one ring all-reduce of a step's activations.

    2 x (gpus - 1) / gpus of the message; the message is tokens x hidden size x bytes.
    Source: text 003, Q4 (the message); ring: Patarasuk and Yuan 2009.
    """
    positive("tokens", tokens)
    positive("hidden_size", hidden_size)
    positive("gpus", gpus)
    return 2 * (gpus - 1) / gpus * tokens * hidden_size * bytes_per_element


def allreduce_s(
    *,
    tokens: float,
    hidden_size: int,
    layers: int,
    gpus: int,
    bandwidth_bytes_per_s: float,
    latency_s: float = 0.0,
    bytes_per_element: float = 2.0,
) -> float:
    """Seconds of all-reduce in one step; `bandwidth_bytes_per_s` is of one direction.

    `latency_s` is the fixed cost of one all-reduce, which dominates small decode batches.
    Source: guide 5.1 and 5.6.
    """
    positive("layers", layers)
    positive("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    not_negative("latency_s", latency_s)
    sent_bytes = allreduce_bytes(
        tokens=tokens, hidden_size=hidden_size, gpus=gpus, bytes_per_element=bytes_per_element
    )
    once_s = sent_bytes / bandwidth_bytes_per_s + (latency_s if gpus > 1 else 0.0)
    return ALLREDUCES_PER_LAYER * layers * once_s


def overhead_ratio(*, compute_s: float, communication_s: float) -> float:
    """Share of a step that goes into communication, nothing overlapped (guide 5.1)."""
    positive("compute_s", compute_s)
    not_negative("communication_s", communication_s)
    return communication_s / (compute_s + communication_s)


def planned_overhead_ratio(*, link: str, tensor_parallel: int) -> float:
    """Share of a step to plan for all-reduces: the guide's figures, a ring's between and beyond.

    With 2 (n - 1) / n of the message to send and 1 / n of the compute, communication over compute
    grows as n - 1; it is anchored at TP 8.

    Raises:
        SizingError: an unknown link; the choices are listed.
    Source: guide 5.6.
    """
    if link not in TP_OVERHEAD_RATIO:
        choices = tuple(TP_OVERHEAD_RATIO)
        message = f"link is {link!r}; choose one of {', '.join(choices)}"
        raise SizingError(message, name="link", choices=choices)
    positive("tensor_parallel", tensor_parallel)
    by_degree = TP_OVERHEAD_RATIO[link]
    if tensor_parallel in by_degree:
        return by_degree[tensor_parallel]
    sent_to_computed = by_degree[8] / (1 - by_degree[8]) / (8 - 1) * (tensor_parallel - 1)
    return sent_to_computed / (1 + sent_to_computed)


def tensor_parallel_speedup(*, tensor_parallel: int, overhead_ratio: float) -> float:
    """How many times faster a step is than on one GPU, given the share lost to communication.

    Source: guide 5.1 and 5.6.
    """
    positive("tensor_parallel", tensor_parallel)
    within("overhead_ratio", overhead_ratio, low=0.0, high=1.0)
    return tensor_parallel * (1 - overhead_ratio)


def pipeline_bubble_ratio(*, stages: int, micro_batches: int) -> float:
    """Share of GPU time that a pipeline idles: (stages - 1) / (micro_batches + stages - 1).

    Source: guide 5.2.
    """
    positive("stages", stages)
    positive("micro_batches", micro_batches)
    return (stages - 1) / (micro_batches + stages - 1)


def micro_batches_for_bubble(*, stages: int, bubble_ratio: float) -> int:
    """The fewest micro-batches in flight that keep the bubble at or below `bubble_ratio`.

    Source: guide 5.2, solved for the micro-batches.
    """
    positive("stages", stages)
    positive("bubble_ratio", bubble_ratio)
    within("bubble_ratio", bubble_ratio, low=0.0, high=1.0)
    # a bubble that is met exactly must not cost one more micro-batch
    return max(1, math.ceil((stages - 1) * (1 - bubble_ratio) / bubble_ratio - 1e-9))
