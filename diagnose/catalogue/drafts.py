"""Draft heads: EAGLE's, which read the target's hidden states, and a model's own. Pure.

Source: vllm/model_executor/models/llama_eagle.py, llama_eagle3.py, deepseek_mtp.py and
glm4_moe_mtp.py, and vllm/v1/spec_decode/llm_base_proposer.py (0.32), which shares the tables.
"""

from __future__ import annotations

from dataclasses import replace

from kneewatch.diagnose.catalogue.census import head_dim, kv_heads
from kneewatch.diagnose.catalogue.config import Config
from kneewatch.diagnose.catalogue.parameters import Parameters

# Families whose checkpoints hold prediction layers that vLLM drafts with, each one an expert
# layer of the model.
_OWN_LAYERS = frozenset({"deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa"})
# EAGLE 3 reads the hidden states of three layers unless it says otherwise.
_HIDDEN_STATES = 3
_PER_LAYER = (
    "layer_types", "layer_types_count", "mlp_layer_types", "mlp_only_layers", "indexer_types",
)  # fmt: skip


def is_head(config: Config) -> bool:
    """Whether the configuration is an EAGLE head's: no model that runs alone."""
    return "eagle" in config.architecture.lower()


def target_hidden_size(config: Config) -> int:
    """The hidden size of the model that a head drafts for."""
    return config.positive("target_hidden_size", "hidden_size")


def head_parameters(config: Config, body: Parameters) -> Parameters:
    """A head's parameters, from those of its layers as a model of their own.

    The embedding is the target's. EAGLE 3 has an output projection of its own, often for fewer
    tokens, and its first layer sees embedding and hidden state side by side.
    """
    hidden, size = config.positive("hidden_size"), head_dim(config)
    if "eagle3" not in config.architecture.lower():
        # Embedding and hidden state into one; the output projection is the target's.
        joined = 2.0 * hidden * hidden
        return replace(body, embedding=0.0, head=0.0, replicated=body.replicated + joined)
    kv = 2.0 * hidden * kv_heads(config) * size
    queries = float(hidden * config.positive("num_attention_heads") * size)
    states = config.count("num_aux_hidden_states", default=0) or _stated_layers(config)
    return replace(
        body,
        attention=body.attention + queries + kv,
        kv=body.kv + kv,
        replicated=body.replicated + float(states * target_hidden_size(config) * hidden),
        embedding=0.0,
        head=float(config.positive("draft_vocab_size", "vocab_size") * hidden),
    )


def _stated_layers(config: Config) -> int:
    section = config.section("eagle_config")
    layers = section.counts("eagle_aux_hidden_state_layer_ids") if section else ()
    return len(layers) or _HIDDEN_STATES


def own_layers(config: Config) -> Config | None:
    """The prediction layers of a checkpoint as a configuration of their own; None: it has none."""
    layers = config.count("num_nextn_predict_layers", default=0)
    if not layers or config.model_type not in _OWN_LAYERS:
        return None
    kept = {key: value for key, value in config.fields.items() if key not in _PER_LAYER}
    stated = {"num_hidden_layers": layers, "first_k_dense_replace": 0}
    own = {**kept, **stated, "num_nextn_predict_layers": 0}
    return Config(f"{config.name} (its own prediction layers)", own, own)


def own_parameters(config: Config, body: Parameters) -> Parameters:
    """Their parameters: the tables are the model's, and each joins embedding and hidden state."""
    hidden = config.positive("hidden_size")
    joined = 2.0 * hidden * hidden * config.positive("num_hidden_layers")
    return replace(body, embedding=0.0, head=0.0, small=body.small + joined)
