"""What is known of model families: which layers they mix tokens with, and what is refused. Pure.

Source: the model classes of vLLM 0.32 (vllm/model_executor/models) and the configuration classes
of transformers 5.19; families that 0.32 has dropped (MiniMax-Text, Llama 3.2 Vision, Bamba) from
memory of the versions that had them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kneewatch.diagnose.catalogue.hf_config import Config
from kneewatch.diagnose.catalogue.inputs import SizingError

# Decoders whose every layer is attention, of the usual fields.
PLAIN = frozenset({
    "afmoe", "apertus", "arcee", "baichuan", "bailing_moe", "bloom", "chatglm", "codellama",
    "cohere", "dbrx", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "falcon", "gemma", "glm",
    "glm4", "glm4_moe", "glm4v", "glm4v_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gptj",
    "granite", "granitemoe", "granitemoeshared", "hunyuan_v1_dense", "internlm2", "internlm3",
    "llama", "llama4", "llava", "llava_next", "minicpm", "minimax_m2", "ministral3", "mllama",
    "nemotron", "olmo", "olmo2", "olmoe", "opt", "phi", "qwen2_5_omni", "qwen2_audio",
    "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe", "seed_oss", "smollm3", "smolvlm", "solar",
    "stablelm",
})  # fmt: skip
# Families whose layers all slide where `sliding_window` is set.
ALL_SLIDING = frozenset({"mistral", "starcoder2", "phi3", "phi4mm", "mixtral", "phimoe"})
# Families that have a `sliding_window` and switch it on with `use_sliding_window`.
SWITCHED_SLIDING = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_5_vl"})
# Families whose full layers come at fixed steps: every how many layers, by default.
PATTERNED_SLIDING: Mapping[str, int] = {
    "gemma2": 2,
    "gemma3": 6,
    "cohere2": 4,
    "olmo3": 4,
    "exaone4": 4,
    "gpt_oss": 2,
}
# Families that say by `layer_types` alone which layers slide.
LISTED_SLIDING = frozenset({"gemma3n", "gemma4", "ministral", "exaone_moe"})
# Families of latent attention: vLLM caches the latent for these only.
LATENT = frozenset({
    "axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
    "hy_v4", "kimi_k2", "kimi_linear", "pangu_ultra_moe", "sarvam_mla",
})  # fmt: skip
# Families of those with an indexer in front of the attention: they must state its size.
INDEXED = frozenset({"deepseek_v32", "glm_moe_dsa", "hy_v4"})
# Families of compressed attention states.
COMPRESSED = frozenset({"deepseek_v4"})
# Families with an indexer's keys beside keys and values of the usual kind.
BLOCK_INDEXED = frozenset({"minimax_m3", "minimax_m3_vl"})
# Families whose sliding layers have heads of their own.
OWN_SLIDING_HEADS = frozenset({"mimo_v2", "mimo_v2_flash", "step3p5"})
# Families with recurrent layers, and the kind of recurrence.
RECURRENCES: Mapping[str, str] = {
    "qwen3_next": "gated_delta",
    "qwen3_5": "gated_delta",
    "qwen3_5_moe": "gated_delta",
    "kimi_linear": "kimi_delta",
    "minimax": "lightning",
    "minimax_text_01": "lightning",
    "minimax_m1": "lightning",
    "bamba": "mamba2",
    "falcon_h1": "mamba2",
    "granitemoehybrid": "mamba2",
    "nemotron_h": "mamba2",
    "zamba2": "mamba2",
    "jamba": "mamba1",
    "lfm2": "short_conv",
    "lfm2_moe": "short_conv",
}
# Families in whose layers the last `num_kv_shared_layers` read the cache of earlier ones.
SHARED_KV = frozenset({"gemma3n", "gemma4"})

_INDEXED_STATES = "keeps an indexer's keys beside recurrent states, which is not modelled"
_CONVOLUTIONS = "keeps convolution states beside its attention, which is not modelled"
_LOOPED = "runs its layers several times, with a cache for each, which is not modelled"
_REFUSED: Mapping[str, str] = {
    "deepseek_v41": "keeps tables of word groups beside its attention, which is not modelled",
    "glm5_next": _INDEXED_STATES,
    "kimi_k3": _INDEXED_STATES,
    "qwen4_exp": _INDEXED_STATES,
    "inkling_mm": _CONVOLUTIONS,
    "inkling": _CONVOLUTIONS,
    "dots3_note": "keeps an indexer's keys beside its attention, which is not modelled for it",
    "bailing_moe_v3": "keeps latent vectors beside recurrent states of its own, not modelled",
    "hrm_text": _LOOPED,
    "iquestloopcoder": _LOOPED,
    "k2_horizon": "has two kinds of attention with heads of their own, which is not modelled",
    "longcat_flash_ngram": "has two attentions a layer, which is not modelled",
    "nemotron_h_puzzle": "has experts of another width in every layer, which is not modelled",
    "pangu_pro_moe_v2": "keeps sinks of its own beside its attention, which is not modelled",
    "phi4flash": "shares one layer's cache among the later ones (YOCO), which is not modelled",
    "hunyuan": "shares caches among layers (CLA), which is not modelled",
    "longcat_flash": "has two attentions a layer, which is not modelled",
    "minicpm3": "expands its latent attention into keys of its own, which is not modelled",
    "nemotron-nas": "has other heads in every layer, which is not modelled",
    "olmo_hybrid": "has recurrent layers of its own kind, which are not modelled",
    "plamo2": "has recurrent layers of its own kind, which are not modelled",
    "bailing_hybrid": "has recurrent layers of its own kind, which are not modelled",
    "recurrent_gemma": "has recurrent layers of its own kind, which are not modelled",
    "diffusion_gemma": "generates by diffusion, which is not modelled",
    "llada": "generates by diffusion, which is not modelled",
    "dream": "generates by diffusion, which is not modelled",
}
_ATTENTION_FREE = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv6", "rwkv7", "xlstm"})
_ENCODERS = frozenset({
    "albert", "bart", "bert", "camembert", "clip", "deberta", "deberta-v2", "distilbert",
    "electra", "ernie", "eurobert", "gte", "jina_bert", "m2m_100", "mbart", "modernbert",
    "mpnet", "mt5", "nllb-moe", "nomic_bert", "pegasus", "roberta", "siglip", "siglip2",
    "speech_to_text", "t5", "t5gemma", "umt5", "vit", "wav2vec2", "whisper", "xlm-roberta",
})  # fmt: skip
_ENCODER_CLASSES = ("ForMaskedLM", "ForImageClassification", "ForTokenClassification")

# Fields that speak of a memory of its own kind, wherever they turn up...
_MEMORY = re.compile(r"ssm|mamba|recurr|compress|rwkv|retention|yoco|kv_shar|share_kv|cla_|use_cla")
# ...and those that a family which is not known here must not have.
_DOUBTFUL = re.compile(
    r"slid|window|swa|conv|state|linear_|lightning|delta|hybrid|block_type|block_config|layer_type"
    r"|pattern|shared_layer|cross_|lru|index|latent|memory|lora_rank|layers_type|attn_type"
)
_HARMLESS = frozenset({
    "add_cross_attention", "attention_chunk_size", "audio_token_index", "compression_config",
    "image_token_index", "layer_types", "layer_types_count", "max_window_layers",
    "num_kv_shared_layers", "output_hidden_states", "pad_token_index", "projector_hidden_act",
    "quantization_config", "return_hidden_states", "sliding_window", "sliding_window_pattern",
    "use_mamba_kernels", "use_mambapy", "use_sliding_window", "video_token_index",
})  # fmt: skip


def refusal_reason(family: str) -> str:
    """Why no model of that family can be sized; "" where it can, as far as its name says."""
    if family in _ATTENTION_FREE:
        return "has no attention layers, which is not modelled"
    return _REFUSED.get(family, "")


def known(config: Config) -> bool:
    """Whether the layers of this model family are known."""
    family = config.model_type
    return (
        family in PLAIN | ALL_SLIDING | SWITCHED_SLIDING | LISTED_SLIDING | LATENT
        or family in COMPRESSED | BLOCK_INDEXED | OWN_SLIDING_HEADS
        or family in PATTERNED_SLIDING
        or family in RECURRENCES
    )


def refuse_unmodelled(config: Config) -> None:
    """Check that the model can be sized.

    Raises:
        SizingError: it is no decoder, or it keeps what is not modelled; the message names it.
    """
    family = config.model_type
    reason = refusal_reason(family)
    if reason:
        raise _refusal(config, f"{family} {reason}")
    encoder = family in _ENCODERS or config.architecture.endswith(_ENCODER_CLASSES)
    if encoder or config.flag("is_encoder_decoder", default=False):
        what = family or config.architecture
        raise _refusal(config, f"{what} is no decoder: it has no cache that grows with a request")
    if "_class_name" in config.outer:
        raise _refusal(config, "this configures a diffusion pipeline, not a decoder")
    if family not in SHARED_KV and config.count("num_kv_shared_layers", default=0):
        raise _refusal(config, f"num_kv_shared_layers is not modelled for {family or 'this model'}")
    if config.has("kv_lora_rank") and family not in LATENT:
        raise _refusal(config, f"kv_lora_rank is not modelled for {family or 'this model'}")
    if config.has("per_layer_config") and not config.has("global_head_dim"):
        raise _refusal(config, "per_layer_config gives layers heads of their own, not modelled")
    _refuse_fields(config)


def _refuse_fields(config: Config) -> None:
    family = config.model_type
    if family in RECURRENCES or family in COMPRESSED:
        return
    strange = not known(config)
    for key, value in config.fields.items():
        if not value or key in _HARMLESS or key.startswith("vision_"):
            continue
        if _MEMORY.search(key) or (strange and _DOUBTFUL.search(key)):
            raise _refusal(config, f"{key} is not modelled for {family or 'this model'}")
    if strange and not config.has("num_key_value_heads"):
        raise config.missing("num_key_value_heads")


def _refusal(config: Config, reason: str) -> SizingError:
    return SizingError(
        f"{config.name}: {reason}; it cannot be sized. Start it once: vLLM logs what its KV cache "
        "holds",
        name="model",
    )
