"""The dense MLPs of a model: how many matrices, layers, and how wide. Pure.

Source: the published configurations and the model classes of vLLM that read them.
"""

from __future__ import annotations

from kneewatch.diagnose.catalogue.config import Config
from kneewatch.diagnose.catalogue.experts import Experts
from kneewatch.diagnose.catalogue.order import depth, shared_layers

# Families whose MLPs have two matrices instead of three (no gate).
_UNGATED = frozenset({
    "apertus", "arcee", "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj",
    "nemotron", "nemotron_h", "opt", "phi", "starcoder2",
})  # fmt: skip
# Families whose MLP is four times the hidden size where no field says.
_FOURFOLD = frozenset({"bloom", "falcon", "gpt2", "gpt_bigcode", "gptj"})


def matrices(config: Config) -> int:
    """Matrices of one MLP or expert: up and down, and a gate where it has one."""
    return 2 if config.model_type in _UNGATED else 3


def dense_layers(config: Config, experts: Experts) -> int:
    """Layers with a dense MLP."""
    # Nemotron-H counts its MLPs as layers of their own.
    pattern = config.word("hybrid_override_pattern")
    if pattern:
        return pattern.count("-")
    if config.model_type == "nemotron_h":
        return config.words("layers_block_type").count("mlp")
    # Gemma 4's expert layers keep their dense MLP beside the experts.
    if config.model_type.startswith("gemma"):
        return depth(config)
    return depth(config) - experts.layers


def layer_widths(config: Config) -> tuple[int, ...]:
    """The width of each layer's MLP where `intermediate_size` lists them, as Gemma 3n does.

    Raises:
        SizingError: it is no list of a width for every layer.
    """
    widths = config.counts("intermediate_size")
    if len(widths) < depth(config):
        raise config.wrong("intermediate_size", list(widths), "a width for every layer")
    return widths


def dense_widths(config: Config, layers: int, hidden: int) -> int:
    """The widths of the dense MLPs, added up."""
    if not layers:
        return 0
    if config.model_type == "granitemoehybrid":
        return layers * config.positive("shared_intermediate_size")
    if isinstance(config.fields.get("intermediate_size"), list):
        return sum(layer_widths(config)[:layers])
    fourfold = 4 * hidden if config.model_type in _FOURFOLD else None
    width = config.positive("intermediate_size_mlp", "intermediate_size", default=fourfold)
    if config.model_type == "lfm2" and config.flag("block_auto_adjust_ff_dim", default=True):
        width = _adjusted(config, width)
    # Gemma 4's small models widen the layers that save on keys and values.
    doubled = config.flag("use_double_wide_mlp", default=False)
    return width * (layers + (shared_layers(config) if doubled else 0))


def _adjusted(config: Config, width: int) -> int:
    """LFM2's stated width, cut to two thirds and rounded up to its block."""
    block = config.positive("block_multiple_of", default=256)
    return -(-(2 * width // 3) // block) * block
