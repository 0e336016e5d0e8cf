"""The bytes of a model's weights on one GPU. Pure.

Source: guide 2.1 and 4.1 to 4.2; what stays in 16 bit and what is copied over the ranks as vLLM
0.11 to 0.32 loads it; held against start-up logs in tests/diagnose/sizing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kneewatch.diagnose.catalogue.layers import FullAttention, SlidingAttention
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.catalogue.parameters import Parameters
from kneewatch.diagnose.catalogue.quantization import FULL_BITS, Scheme
from kneewatch.diagnose.sizing.inputs import SizingError

_BITS = 8
# vLLM pads MXFP4 experts to what its kernels take.
_MXFP4_HIDDEN, _MXFP4_WIDTH = 256, 64


@dataclass(frozen=True, slots=True)
class Parallel:
    """How a replica is spread: `experts` is True with `--enable-expert-parallel`."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    experts: bool = False

    @property
    def gpus(self) -> int:
        """GPUs of one replica, its data-parallel engines included."""
        return self.tensor * self.pipeline * self.data


ONE_GPU = Parallel()


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes on the fullest GPU, by what they are."""

    attention_bytes: float
    mlp_bytes: float
    experts_bytes: float
    tables_bytes: float
    small_bytes: float
    vision_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of them."""
        return (
            self.attention_bytes
            + self.mlp_bytes
            + self.experts_bytes
            + self.tables_bytes
            + self.small_bytes
            + self.vision_bytes
        )


def parameters_of(model: Model) -> Parameters:
    """The model's parameter counts.

    Raises:
        SizingError: its configuration does not say enough to count them.
    """
    if model.parameters is None:
        raise SizingError(
            f"{model.id}: the configuration does not say enough to count the parameters; "
            "state the weights",
            name="weights_gib",
        )
    return model.parameters


def weights_per_gpu(model: Model, scheme: Scheme, parallel: Parallel) -> Weights:
    """Bytes that the fullest GPU holds.

    Projections, experts and tables are split over the tensor-parallel group; KV projections no
    further than the KV heads go; MLA's down-projections, norms, routers and vision towers are on
    every GPU. Pipeline stages hold a share of the layers.

    Raises:
        SizingError: the parameters cannot be counted.
    """
    parameters = parameters_of(model)
    tp, stage = parallel.tensor, ceil(model.depth / parallel.pipeline) / model.depth
    attention_bits = scheme.attention_bits_of(mixture=bool(model.experts.count))
    kv_ranks = min(tp, fewest_kv_heads(model))
    split = (parameters.attention - parameters.kv) / tp + parameters.kv / kv_ranks
    whole = parameters.replicated
    ranks = tp * parallel.data if parallel.experts else tp
    tables = (parameters.embedding + parameters.head) / tp
    if parallel.pipeline > 1:
        # The first stage holds the input table, the last the output projection.
        tables = max(parameters.embedding, parameters.head) / tp
    return Weights(
        attention_bytes=(split + whole) * stage * attention_bits / _BITS,
        mlp_bytes=parameters.mlp * stage / tp * scheme.linear_bits / _BITS,
        experts_bytes=_experts(model, parameters, scheme, tp=tp)
        * stage
        / ranks
        * scheme.expert_bits
        / _BITS,
        tables_bytes=tables * FULL_BITS / _BITS,
        small_bytes=parameters.small * stage * FULL_BITS / _BITS,
        vision_bytes=parameters.vision * FULL_BITS / _BITS,
    )


def _experts(model: Model, parameters: Parameters, scheme: Scheme, *, tp: int) -> float:
    if scheme.id != "mxfp4" or not parameters.experts:
        return parameters.experts
    width = model.intermediate_size / tp
    padded = ceil(width / _MXFP4_WIDTH) * _MXFP4_WIDTH / width
    hidden = model.hidden_size
    return parameters.experts * padded * ceil(hidden / _MXFP4_HIDDEN) * _MXFP4_HIDDEN / hidden


def fewest_kv_heads(model: Model) -> int:
    """KV heads of the layer that has the fewest; 1 where attention has none of its own."""
    heads = [
        part.kind.kv_heads
        for part in model.layers
        if isinstance(part.kind, FullAttention | SlidingAttention)
    ]
    return min(heads, default=1)
