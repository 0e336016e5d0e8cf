"""The fields of a configuration under one name, and what its family's class fills in. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import cast

# Names that older families have for the same thing; the first that is there counts.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "hidden_size": ("n_embd", "d_model", "n_embed"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "kv_n_heads", "multi_query_group_num"),
    "head_dim": ("attention_head_dim", "kv_channels"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "block_ff_dim"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "max_sequence_length"),
    "n_routed_experts": ("num_local_experts", "num_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "top_k_experts", "moe_top_k", "moe_k"),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"),
}
# Parts of a configuration whose fields are read as if they stood beside them (DBRX).
_FLATTENED = ("attn_config", "ffn_config")
# What a file at the top level always states; class defaults fill these in nested parts only.
_STATED = {
    "num_hidden_layers", "n_layer", "n_layers", "hidden_size", "n_embd", "d_model", "vocab_size",
    "num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "intermediate_size",
    "ffn_dim", "moe_intermediate_size", "n_routed_experts", "num_experts", "num_local_experts",
    "num_experts_per_tok", "max_position_embeddings", "n_positions", "kv_lora_rank",
    "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim",
    "index_n_heads", "hidden_size_per_layer_input", "vocab_size_per_layer_input",
    "global_head_dim", "sliding_window", "num_kv_shared_layers",
}  # fmt: skip


@cache
def _defaults() -> Mapping[str, Mapping[str, object]]:
    text = files("kneewatch.diagnose.catalogue").joinpath("defaults.toml").read_text("utf-8")
    return cast("Mapping[str, Mapping[str, object]]", tomllib.loads(text))


def mapping(value: object) -> Mapping[str, object] | None:
    """The value where it is a JSON object, else None."""
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else None


def completed(
    fields: Mapping[str, object], *, family: str, outer: Mapping[str, object]
) -> Mapping[str, object]:
    """The fields with what the family's configuration class fills in.

    `outer` is the whole file: in a part nested in it publishers leave out whatever equals the
    class's default, at its top level only what every configuration has.
    """
    flat = dict(fields)
    for key in _FLATTENED:
        flat = {**(mapping(flat.get(key)) or {}), **flat}
    nested = fields is not outer
    return {
        **{
            key: value
            for key, value in _defaults().get(family, {}).items()
            if (nested or key not in _STATED)
            and not _named(key, flat)
            and not (key == "tie_word_embeddings" and key in outer)
        },
        **flat,
    }


def _named(key: str, fields: Mapping[str, object]) -> bool:
    # A null in the file is the file's word; only what it does not name is filled in.
    same = next((group for group in _GROUPS if key in group), (key,))
    return any(name in fields for name in same)


_GROUPS = tuple((name, *also) for name, also in ALIASES.items())
