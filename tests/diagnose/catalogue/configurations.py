"""Configurations as published, cut to the fields that matter, for the tests of the catalogue."""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def llama(**fields: object) -> dict[str, Any]:
    """Llama 3.1 8B with other fields; a field set to `...` is left out."""
    return {key: value for key, value in {**LLAMA, **fields}.items() if value is not ...}


GRANITE_H_SMALL = llama(
    architectures=["GraniteMoeHybridForCausalLM"],
    model_type="granitemoehybrid",
    num_hidden_layers=40,
    intermediate_size=768,
    vocab_size=100352,
    tie_word_embeddings=True,
    num_local_experts=72,
    num_experts_per_tok=10,
    shared_intermediate_size=1536,
    layer_types=["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    mamba_n_heads=128,
    mamba_d_head=64,
    mamba_d_state=128,
    mamba_n_groups=1,
    mamba_d_conv=4,
    mamba_expand=2,
)
BAMBA = llama(
    model_type="bamba",
    attn_layer_indices=[9, 18, 27],
    mamba_n_heads=128,
    mamba_d_head="auto",
    mamba_d_state=128,
    mamba_n_groups=1,
    mamba_d_conv=4,
    mamba_expand=2,
)
FALCON_H1 = llama(
    model_type="falcon_h1",
    num_hidden_layers=72,
    hidden_size=5120,
    num_attention_heads=20,
    num_key_value_heads=4,
    head_dim=128,
    mamba_n_heads=32,
    mamba_d_head=128,
    mamba_d_ssm=4096,
    mamba_d_state=256,
    mamba_n_groups=2,
    mamba_d_conv=4,
)
JAMBA = llama(
    model_type="jamba",
    num_experts=16,
    num_experts_per_tok=2,
    attn_layer_period=8,
    attn_layer_offset=4,
    expert_layer_period=2,
    expert_layer_offset=1,
    mamba_d_state=16,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_dt_rank=256,
    vocab_size=65536,
)
ZAMBA2 = llama(
    model_type="zamba2",
    num_hidden_layers=54,
    hidden_size=2560,
    num_key_value_heads=32,
    attention_head_dim=160,
    layers_block_type=["hybrid" if layer % 6 == 5 else "mamba" for layer in range(54)],
    n_mamba_heads=80,
    mamba_headdim=64,
    mamba_d_state=64,
    mamba_ngroups=1,
    mamba_d_conv=4,
    mamba_expand=2,
)
LFM2 = llama(
    model_type="lfm2",
    num_hidden_layers=16,
    hidden_size=2048,
    block_ff_dim=12288,
    intermediate_size=...,
    vocab_size=65536,
    full_attn_idxs=[2, 5, 8, 10, 12, 14],
    conv_L_cache=3,
    conv_dim=2048,
    tie_word_embeddings=True,
)
MINIMAX = llama(
    model_type="minimax_text_01",
    num_hidden_layers=80,
    hidden_size=6144,
    num_attention_heads=64,
    head_dim=128,
    intermediate_size=9216,
    num_local_experts=32,
    num_experts_per_tok=2,
    attn_type_list=[0, 0, 0, 0, 0, 0, 0, 1] * 10,
)
QWEN3_NEXT = llama(
    model_type="qwen3_next",
    num_hidden_layers=48,
    hidden_size=2048,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    linear_num_value_heads=32,
    linear_num_key_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
)
DEEPSEEK_V3 = llama(
    model_type="deepseek_v3",
    num_hidden_layers=61,
    hidden_size=7168,
    num_attention_heads=128,
    num_key_value_heads=128,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    vocab_size=129280,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    num_nextn_predict_layers=1,
)
GEMMA_3N = llama(
    model_type="gemma3n",
    num_hidden_layers=30,
    hidden_size=2048,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    intermediate_size=[8192] * 30,
    vocab_size=262400,
    sliding_window=512,
    num_kv_shared_layers=10,
    layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 6,
    tie_word_embeddings=True,
)
