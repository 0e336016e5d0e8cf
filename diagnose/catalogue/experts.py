"""The routed and shared experts of a model. Pure.

Source: the published configurations and the model classes of vLLM that read them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kneewatch.diagnose.catalogue.config import Config
from kneewatch.diagnose.catalogue.order import depth


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts: `count` in each of `layers` layers, `per_token` of them see a token."""

    count: int = 0
    per_token: int = 0
    layers: int = 0


def expert_census(config: Config) -> Experts:
    """The model's routed experts; all 0 for a dense model.

    Raises:
        SizingError: experts without the number that a token sees.
    """
    count = config.count("n_routed_experts", default=0)
    if count <= 1 or not config.flag("enable_moe_block", default=True):
        return Experts()
    per_token = config.positive("num_experts_per_tok")
    if per_token > count:
        raise config.wrong("num_experts_per_tok", per_token, f"{count} (the experts) or fewer")
    return Experts(count, per_token, _expert_layers(config))


def _expert_layers(config: Config) -> int:
    pattern = config.word("hybrid_override_pattern")
    if pattern:
        return pattern.count("E")
    layers = depth(config)
    for key in ("layers_block_type", "mlp_layer_types"):
        kinds = config.words(key)[:layers]
        if "moe" in kinds or "sparse" in kinds:
            return kinds.count("moe") + kinds.count("sparse")
    if config.has("expert_layer_period"):
        offset = config.count("expert_layer_offset", default=0)
        return len(range(offset, layers, config.positive("expert_layer_period")))
    first = config.count("first_k_dense_replace", "num_dense_layers", default=0)
    first = config.count("moe_layer_start_index", default=first)
    # Llama 4 puts experts into every second layer of its larger model.
    step = config.positive(
        "interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval", default=1
    )
    dense = config.indices("mlp_only_layers", below=layers)
    return max(0, (layers - first) // step - len(dense))


def shared_width(config: Config) -> int:
    """The width of a layer's shared experts together, 0 where it has none."""
    stated = config.count(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        default=0,
    )
    if stated:
        return stated
    # Llama 4 has one shared expert and no field for it.
    if config.model_type == "llama4":
        return config.positive("intermediate_size")
    shared = config.count("n_shared_experts", default=0)
    return shared * config.positive("moe_intermediate_size") if shared else 0
