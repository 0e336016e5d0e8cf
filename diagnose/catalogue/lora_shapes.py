"""The matrices of a model that vLLM keeps LoRA buffers for. Pure.

For a matrix, an adapter of rank r has r x (inputs + outputs) elements. vLLM splits one of the two
factors over the tensor-parallel ranks and copies the other to each rank: the input factor is copied
if the matrix is split by outputs, and the reverse. Source: vllm/lora/layers (0.32), whose buffers
are recorded in tests/fixtures/adapters; guide 2.5.
"""

from __future__ import annotations

from dataclasses import dataclass

from kneewatch.diagnose.catalogue.families import in_group
from kneewatch.diagnose.catalogue.hf_config import Config
from kneewatch.diagnose.catalogue.layer_census import (
    FULL,
    LINEAR,
    MAMBA,
    SLIDING,
    head_dim,
    kv_heads,
    layer_words,
)
from kneewatch.diagnose.catalogue.layers import recurrent_parameters
from kneewatch.diagnose.catalogue.parameters import (
    Experts,
    dense_layers,
    dense_widths,
    matrices,
    shared_width,
)

# Projections into a recurrent layer, more or less: queries to gates, and the convolution.
_RECURRENT_INPUTS = 4


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Elements of one adapter per unit of rank, by how they are placed on GPUs.

    whole          copied to every tensor-parallel rank
    split          split over the ranks
    kv             split over the ranks, but no further than the KV heads
    experts_whole  of routed experts, copied to every rank that holds the expert
    experts_split  of routed experts, split over the ranks
    tables         of embedding and output projection, copied to every rank
    head           whether the output projection has an adapter
    """

    whole: float
    split: float
    kv: float
    experts_whole: float
    experts_split: float
    tables: float
    head: bool


def adapter_shape(config: Config, experts: Experts) -> AdapterShape:
    """The shape of an adapter for all adaptable matrices of the language model.

    Raises:
        SizingError: a field that is missing.
    """
    hidden, words = config.positive("hidden_size"), layer_words(config)
    attentions = words.count(FULL) + words.count(SLIDING)
    whole, split, kv = (float(attentions * size) for size in _attention(config, hidden))
    recurrent = words.count(LINEAR) + words.count(MAMBA)
    if recurrent:
        whole += recurrent * (_RECURRENT_INPUTS + 1) * hidden
        split += recurrent * recurrent_parameters(config) / hidden
    mlps = dense_layers(config, experts)
    gates = _gates(config, fused=in_group(config, "fused_gate"))
    shared = shared_width(config)
    whole += (mlps + (experts.layers if shared else 0)) * (gates + 1) * hidden
    split += matrices(config) * (dense_widths(config, mlps, hidden) + shared * experts.layers)
    # The router is adapted as well.
    whole += experts.layers * (hidden + experts.count)
    experts_whole, experts_split = _routed(config, hidden, experts)
    vocab = config.positive("vocab_size")
    head = in_group(config, "lora_tables")
    tables = head + in_group(config, "lora_tables", "lora_input_table")
    return AdapterShape(
        whole=whole,
        split=split,
        kv=kv,
        experts_whole=experts_whole,
        experts_split=experts_split,
        tables=float(tables * (vocab + hidden)),
        head=head,
    )


def _attention(config: Config, hidden: int) -> tuple[int, int, int]:
    """Elements of one attention layer: copied, split, and split no further than the KV heads."""
    heads = config.positive("num_attention_heads")
    if config.has("kv_lora_rank"):
        return *_latent(config, hidden, heads), 0
    size = head_dim(config)
    gated = config.flag("attn_output_gate", default=in_group(config, "gated_attention"))
    inputs = 1 if in_group(config, "fused_attention") else 3
    queries = heads * size * (2 if gated else 1)
    return (inputs + 1) * hidden, queries + heads * size, 2 * kv_heads(config) * size


def _latent(config: Config, hidden: int, heads: int) -> tuple[int, int]:
    rank, rope = config.positive("kv_lora_rank"), config.count("qk_rope_head_dim")
    nope, value = config.positive("qk_nope_head_dim"), config.positive("v_head_dim")
    query_rank = config.count("q_lora_rank", default=0)
    # Down to the ranks on every GPU, up from them over the heads, and out.
    whole = hidden + rank + rope + rank + hidden
    whole += hidden + 2 * query_rank if query_rank else hidden
    split = heads * (nope + rope) + heads * (nope + value) + heads * value
    return whole, split


def _gates(config: Config, *, fused: bool) -> int:
    """Number of matrices from the hidden state into an MLP, as stored in the checkpoint."""
    return 1 if fused else matrices(config) - 1


def _routed(config: Config, hidden: int, experts: Experts) -> tuple[float, float]:
    if not experts.count:
        return 0.0, 0.0
    width = config.positive("moe_intermediate_size", "intermediate_size")
    latent = config.count("moe_latent_size", default=0) or hidden
    inputs = _gates(config, fused=in_group(config, "fused_experts"))
    all_experts = experts.layers * experts.count
    return float(all_experts * (inputs + 1) * latent), float(all_experts * matrices(config) * width)
