"""Which layers keep what: published configurations in, the shapes that vLLM allocates out."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kneewatch.diagnose.catalogue.families import is_known_family, refuse_unmodelled
from kneewatch.diagnose.catalogue.hf_config import read_config
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.layers import (
    CompressedAttention,
    FullAttention,
    LatentAttention,
    LayerKind,
    Layers,
    Recurrent,
    SlidingAttention,
    SlidingStates,
)
from kneewatch.diagnose.catalogue.models import model, model_from_config
from tests.diagnose.catalogue.configurations import (
    BAMBA,
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    DEEPSEEK_V41,
    FALCON_H1,
    GEMMA_3N,
    GRANITE_H_SMALL,
    HUNYUAN_V4,
    JAMBA,
    LFM2,
    MINIMAX,
    QWEN3_NEXT,
    ZAMBA2,
    llama,
)

FULL_128 = FullAttention(8, 128, 128)


def kept(document: dict[str, Any]) -> dict[LayerKind, int]:
    """How many layers of which kind a configuration has."""
    layers = model_from_config("m", document).layers
    assert len({part.kind for part in layers}) == len(layers)
    return {part.kind: part.count for part in layers}


# Shapes: MambaStateShapeCalculator of vllm/model_executor/layers/mamba/mamba_utils.py, 0.32.
@pytest.mark.parametrize(
    ("document", "expected"),
    [
        pytest.param(llama(), {FULL_128: 32}, id="llama: 32 full, 4096/32 a head"),
        pytest.param(
            GRANITE_H_SMALL,
            {
                Recurrent((128 * 64 + 2 * 128) * 3, 128 * 64 * 128, 2.0, 128 * 64 + 2 * 128): 36,
                FULL_128: 4,
            },
            id="granite hybrid: 36 Mamba2, 4 full",
        ),
        pytest.param(
            BAMBA,
            {Recurrent((8192 + 2 * 128) * 3, 8192 * 128, 2.0, 8192 + 2 * 128): 29, FULL_128: 3},
            id="bamba: auto head is 2*4096/128",
        ),
        pytest.param(
            FALCON_H1,
            {
                FullAttention(4, 128, 128): 72,
                Recurrent((4096 + 2 * 2 * 256) * 3, 4096 * 256, 2.0, 4096 + 2 * 2 * 256): 72,
            },
            id="falcon h1: both in each of 72",
        ),
        pytest.param(
            JAMBA,
            {Recurrent(8192 * 3, 8192 * 16, 2.0): 28, FULL_128: 4},
            id="jamba: Mamba1, full at 4, 12, 20, 28",
        ),
        pytest.param(
            ZAMBA2,
            {
                Recurrent((5120 + 2 * 64) * 3, 5120 * 64, 2.0, 5120 + 2 * 64): 54,
                FullAttention(32, 160, 160): 9,
            },
            id="zamba2: Mamba2 in all 54, attention before 9",
        ),
        pytest.param(
            LFM2,
            {Recurrent(2048 * 2, 0, 2.0, 2048): 10, FullAttention(8, 64, 64): 6},
            id="lfm2: short convolutions of 3",
        ),
        pytest.param(
            MINIMAX,
            {Recurrent(0, 64 * 128 * 128, 2.0): 70, FULL_128: 10},
            id="minimax: lightning 7 of 8",
        ),
        pytest.param(
            QWEN3_NEXT,
            {
                Recurrent((2 * 2048 + 4096) * 3, 32 * 128 * 128, 2.0, 2 * 2048 + 4096): 36,
                FullAttention(2, 256, 256): 12,
            },
            id="qwen3-next: full every 4th",
        ),
        pytest.param(
            DEEPSEEK_V3,
            {LatentAttention(512, 64, 0): 61},
            id="deepseek v3: 61 latent, the draft head not counted",
        ),
        pytest.param(
            {
                **DEEPSEEK_V3,
                "model_type": "deepseek_v32",
                "index_head_dim": 128,
                "index_n_heads": 64,
            },
            {LatentAttention(512, 64, 128, 64): 61},
            id="deepseek v3.2: with an indexer",
        ),
        pytest.param(
            {
                **DEEPSEEK_V3,
                "model_type": "glm_moe_dsa",
                "index_head_dim": 128,
                "index_n_heads": 32,
                "index_topk": 2048,
                "index_topk_freq": 4,
            },
            # Layers 0, 1, 5, 9, ... 57 have an indexer of their own.
            {
                LatentAttention(512, 64, 128, 32): 16,
                LatentAttention(512, 64, 0, shares_index=True): 45,
            },
            id="glm 5: an indexer in every fourth layer",
        ),
        pytest.param(
            {
                **DEEPSEEK_V3,
                "model_type": "glm_moe_dsa",
                "index_head_dim": 128,
                "index_n_heads": 32,
                "index_topk": 2048,
                "index_topk_pattern": "FFSS" * 15 + "F",
            },
            {
                LatentAttention(512, 64, 128, 32): 31,
                LatentAttention(512, 64, 0, shares_index=True): 30,
            },
            id="glm 5: indexers by a pattern",
        ),
        pytest.param(
            llama(
                model_type="kimi_linear",
                num_hidden_layers=4,
                layer_types=["linear_attention"] * 3 + ["full_attention"],
                linear_num_heads=32,
                linear_head_dim=128,
                linear_conv_kernel_dim=4,
                kv_lora_rank=512,
                qk_rope_head_dim=64,
                qk_nope_head_dim=128,
                v_head_dim=128,
            ),
            {Recurrent(3 * 4096 * 3, 4096 * 128, 4.0, 3 * 4096): 3, LatentAttention(512, 64): 1},
            id="kimi linear: state in 32 bit",
        ),
        pytest.param(
            llama(
                model_type="nemotron_h",
                num_hidden_layers=...,
                layers_block_type=["mamba", "moe", "attention", "mlp"],
                mamba_num_heads=64,
                mamba_head_dim=64,
                ssm_state_size=128,
                n_groups=8,
                conv_kernel=4,
                mamba_ssm_cache_dtype="float32",
            ),
            {
                Recurrent((4096 + 2 * 8 * 128) * 3, 4096 * 128, 4.0, 4096 + 2 * 8 * 128): 1,
                FULL_128: 1,
            },
            id="nemotron-h: as many layers as are listed",
        ),
        pytest.param(
            GEMMA_3N,
            {SlidingAttention(2, 256, 256, 512): 16, FullAttention(2, 256, 256): 4},
            id="gemma 3n: 30 layers, the last 10 read the cache of earlier ones",
        ),
    ],
)
def test_kept_by_layer(document: dict[str, Any], expected: dict[LayerKind, int]) -> None:
    assert kept(document) == expected


@pytest.mark.parametrize("heads", [{}, {"num_key_value_heads": 1}])
def test_gemma_4_as_newer_transformers_write_it_is_the_same(heads: dict[str, int]) -> None:
    """Since 5.15 an entry for each layer with full attention, in place of two fields."""
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    text = llama(model_type="gemma4_unified_text", num_hidden_layers=12, layer_types=kinds)
    before = {"global_head_dim": 512, **{f"num_global_{key[4:]}": heads[key] for key in heads}}
    after = {f"{at:02d}": {"head_dim": 512, **heads} for at in (5, 11)}

    def kept_with(fields: dict[str, Any]) -> dict[LayerKind, int]:
        return kept({"model_type": "gemma4_unified", "text_config": {**text, **fields}})

    assert kept_with({"per_layer_config": after}) == kept_with(before)
    with pytest.raises(SizingError, match="per_layer_config"):
        kept_with({"per_layer_config": {**after, "02": {"head_dim": 512}}})


SLIDING_4096 = SlidingAttention(8, 128, 128, 4096)


@pytest.mark.parametrize(
    ("fields", "sliding"),
    [
        pytest.param({"model_type": "mistral"}, 32, id="mistral: all"),
        pytest.param({"model_type": "mistral", "sliding_window": None}, 0, id="mistral: null"),
        pytest.param({"model_type": "qwen2"}, 0, id="qwen2: not switched on"),
        pytest.param(
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 20},
            12,
            id="qwen2: 32 - 20",
        ),
        pytest.param({"model_type": "gemma2"}, 16, id="gemma 2: every 2nd full"),
        pytest.param({"model_type": "gemma3_text"}, 27, id="gemma 3: every 6th full, 32 - 5"),
        pytest.param(
            {"model_type": "cohere2", "sliding_window_pattern": 4}, 24, id="cohere2: 3 of 4"
        ),
        pytest.param(
            {"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, 24, id="exaone: LLLG"
        ),
        pytest.param({"model_type": "gpt_oss", "head_dim": 128}, 16, id="gpt-oss: every 2nd full"),
        pytest.param(
            {"layer_types": ["sliding_attention"] * 30 + ["full_attention"] * 2},
            30,
            id="any: as layer_types say",
        ),
        pytest.param(
            {"model_type": "deepseek_v3", **{k: DEEPSEEK_V3[k] for k in DEEPSEEK_V3 if "_" in k}},
            0,
            id="latent attention has no window",
        ),
    ],
)
def test_sliding_layers(fields: dict[str, Any], sliding: int) -> None:
    document = llama(**{"sliding_window": 4096, **fields})
    sliding_counts = [c for kind, c in kept(document).items() if isinstance(kind, SlidingAttention)]

    assert sum(sliding_counts) == sliding


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        pytest.param({"num_key_value_heads": 8}, 8, id="grouped"),
        pytest.param({"num_key_value_heads": ...}, 32, id="none said: as many as queries"),
        pytest.param(
            {"model_type": "gpt_bigcode", "num_key_value_heads": ..., "multi_query": True},
            1,
            id="multi-query",
        ),
        pytest.param(
            {"model_type": "gpt_bigcode", "num_key_value_heads": ...}, 1, id="its class's default"
        ),
        pytest.param(
            {
                "model_type": "falcon",
                "num_key_value_heads": ...,
                "num_kv_heads": 16,
                "multi_query": True,
                "new_decoder_architecture": True,
            },
            16,
            id="falcon 40B means its groups",
        ),
        pytest.param(
            {"model_type": "falcon", "num_key_value_heads": ..., "multi_query": True},
            1,
            id="falcon 7B",
        ),
        pytest.param(
            {
                "model_type": "chatglm",
                "num_key_value_heads": ...,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
            },
            2,
            id="chatglm",
        ),
    ],
)
def test_key_value_heads(fields: dict[str, Any], heads: int) -> None:
    assert kept(llama(**fields)) == {FullAttention(heads, 128, 128): 32}


def test_older_names_of_the_same_fields() -> None:
    gpt2 = {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    parsed = model_from_config("gpt2", gpt2)

    assert parsed.layers == model("openai-community/gpt2").layers
    assert parsed.parameters == model("openai-community/gpt2").parameters
    assert (parsed.depth, parsed.hidden_size, parsed.attention_heads) == (12, 768, 12)
    assert parsed.max_context_tokens == 1024


def test_dbrx_keeps_its_fields_in_parts() -> None:
    document = {
        "model_type": "dbrx",
        "n_layers": 40,
        "d_model": 6144,
        "n_heads": 48,
        "max_seq_len": 32768,
        "vocab_size": 100352,
        "attn_config": {"kv_n_heads": 8},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    }
    parsed = model_from_config("dbrx", document)
    listed = model("databricks/dbrx-instruct")

    assert (parsed.layers, parsed.parameters) == (listed.layers, listed.parameters)
    assert (parsed.experts.count, parsed.experts.per_token) == (16, 4)


def without_sources() -> dict[str, Any]:
    """DeepSeek V4.1 whose layers' vectors nobody owns."""
    return {
        **DEEPSEEK_V41,
        "text_config": {**DEEPSEEK_V41["text_config"], "kv_source_layer_ids": []},
    }


@pytest.mark.parametrize(
    ("document", "named"),
    [
        pytest.param(llama(model_type="deepseek_v41"), "compress_ratios", id="DeepSeek V4.1"),
        pytest.param(without_sources(), "kv_source_layer_ids", id="V4.1: no sources"),
        pytest.param(llama(model_type="dots3_note"), "indexer's keys", id="dots 3"),
        pytest.param({**DEEPSEEK_V4, "compress_ratios": [4]}, "compress_ratios", id="V4: one"),
        pytest.param({**DEEPSEEK_V4, "head_dim": 256}, "head_dim", id="V4: other vectors"),
        pytest.param(
            llama(model_type="minimax_m3_text"), "sparse_attention_config", id="MiniMax M3"
        ),
        pytest.param(llama(model_type="glm5_next"), "recurrent states", id="GLM 5.3 Flash"),
        pytest.param(llama(model_type="kimi_k3"), "recurrent states", id="Kimi K3"),
        pytest.param(
            {"model_type": "kimi_k3", "text_config": llama(model_type="kimi_linear")},
            "kimi_k3 keeps",
            id="Kimi K3 with a text part of Kimi Linear",
        ),
        pytest.param(llama(model_type="qwen4_exp"), "recurrent states", id="Qwen4"),
        pytest.param(llama(model_type="inkling_mm_model"), "convolution", id="Inkling"),
        pytest.param(llama(model_type="phi4flash"), "YOCO", id="one cache for many layers"),
        pytest.param(llama(use_cla=True), "use_cla", id="cross-layer attention"),
        pytest.param(
            llama(model_type="gemma4", per_layer_config={"05": {"head_dim": 512}}),
            "per_layer_config",
            id="heads by layer",
        ),
        pytest.param(llama(num_kv_shared_layers=4), "num_kv_shared_layers", id="shared elsewhere"),
        pytest.param(llama(model_type="mamba"), "no attention layers", id="Mamba alone"),
        pytest.param(llama(model_type="bert"), "not a decoder", id="encoder"),
        pytest.param(llama(is_encoder_decoder=True), "not a decoder", id="encoder and decoder"),
        pytest.param({"_class_name": "FluxPipeline"}, "diffusion pipeline", id="images"),
        pytest.param(llama(model_type="llada"), "by diffusion", id="text by diffusion"),
        pytest.param(llama(kv_lora_rank=512), "kv_lora_rank", id="latent attention unheard of"),
        pytest.param(llama(mamba_d_state=16), "mamba_d_state", id="a Llama with a state"),
        pytest.param(
            {**DEEPSEEK_V3, "model_type": "deepseek_v32"}, "index_head_dim", id="indexer unstated"
        ),
        pytest.param(
            llama(layer_types=["linear_attention", "full_attention"] * 16),
            "recurrent layers of llama",
            id="a Llama with linear attention",
        ),
        pytest.param(llama(layer_types=["wavelet"] * 32), "'wavelet'", id="layer of a new kind"),
        pytest.param(llama(layer_types=["full_attention"] * 3), "layer_types", id="too few layers"),
        pytest.param(
            {**QWEN3_NEXT, "layer_types": ["linear_attention"] * 48}, "no layer", id="none"
        ),
        pytest.param(
            llama(model_type="nemotron_h", hybrid_override_pattern="M*?"), "'?'", id="letter"
        ),
        *(
            pytest.param(llama(model_type="novel", **{field: value}), field, id=f"novel: {field}")
            for field, value in {
                "sliding_window": 4096,
                "ssm_cfg": {"d": 16},
                "mamba_expand": 2,
                "conv_kernel": 4,
                "compress_ratios": [4, 128],
                "recurrent_block": True,
                "state_size": 16,
                "kv_lora_rank": 512,
                "hybrid_layer_pattern": [0, 1],
                "attn_type_list": [0, 1],
                "swa_num_key_value_heads": 4,
                "num_key_value_heads": ...,
            }.items()
        ),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(document: dict[str, Any], named: str) -> None:
    with pytest.raises(SizingError, match=r"^m: ") as caught:
        model_from_config("m", document)

    assert named in str(caught.value)
    assert caught.value.name == "model"


def test_novel_family_of_the_usual_kind_is_taken_and_said() -> None:
    parsed = model_from_config("m", llama(model_type="novel"))

    assert parsed.layers == model_from_config("m", llama()).layers
    assert any("novel is not in the catalogue" in note for note in parsed.notes)


_LIST = Path(__file__).parents[2] / "fixtures" / "models" / "architectures.json"
ARCHITECTURES: dict[str, tuple[str, str]] = json.loads(_LIST.read_text("utf-8"))["architectures"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_of_vllm_is_sized_refused_or_said_to_be_assumed(
    architecture: str,
) -> None:
    """One of vLLM's list cannot fall from one kind into another unnoticed."""
    family, expected = ARCHITECTURES[architecture]
    config = read_config("m", {**llama(model_type=family), "architectures": [architecture]})
    if expected == "refused":
        with pytest.raises(SizingError, match=re.escape(config.model_type)):
            refuse_unmodelled(config)
        return
    refuse_unmodelled(config)
    assert is_known_family(config) == (expected == "sized")


def test_most_of_vllms_architectures_are_sized() -> None:
    counts = Counter(kind for _, kind in ARCHITECTURES.values())
    assert len(ARCHITECTURES) > 120
    assert counts["sized"] > 3 * counts["refused"]


def test_refusal_says_what_to_do_instead() -> None:
    with pytest.raises(SizingError, match="Start it once: vLLM logs the capacity of its KV cache"):
        model_from_config("m", llama(model_type="kimi_k3"))


def test_compressed_attention_keeps_windows_vectors_and_what_compressors_have_not_finished() -> (
    None
):
    described = model_from_config("m", DEEPSEEK_V4)

    vectors = {
        (part.kind.vector_bytes, part.kind.tokens_per_vector): part.count
        for part in described.layers
        if isinstance(part.kind, CompressedAttention)
    }
    states = {
        (part.kind.vector_bytes, part.kind.window_tokens, part.kind.block_tokens): part.count
        for part in described.layers
        if isinstance(part.kind, SlidingStates)
    }
    # 448 elements in FP8, 64 in 16 bit and 8 scales; 128 elements of an index key and a scale.
    assert vectors == {(584, 4): 21, (132, 4): 21, (584, 128): 20}
    # A state and its score in float32, twice where the windows of 4 tokens overlap.
    assert states == {
        (584, 128, 64): 43,
        (2 * 2 * 512 * 4, 8, 4): 21,
        (2 * 2 * 128 * 4, 8, 4): 21,
        (2 * 512 * 4, 128, 8): 20,
    }
    assert (described.quantization, described.adapters) == ("fp8-mxfp4", None)


def test_layers_of_deepseek_v41_read_the_vectors_of_the_last_source_before_them() -> None:
    described = model_from_config("m", DEEPSEEK_V41)

    vectors = {
        (part.kind.vector_bytes, part.kind.tokens_per_vector, part.kind.readers): part.count
        for part in described.layers
        if isinstance(part.kind, CompressedAttention)
    }
    states = {
        (part.kind.vector_bytes, part.kind.window_tokens, part.kind.block_tokens): part.count
        for part in described.layers
        if isinstance(part.kind, SlidingStates)
    }
    # Sources 2, 8 and 14 pool 2 tokens for 6 layers each, 20 keeps every token for the last 20.
    assert vectors == {(584, 2, 6): 3, (132, 2, 1): 3, (584, 1, 20): 1, (132, 1, 5): 1}
    assert states == {(584, 128, 32): 40, (2 * 512 * 4, 0, 8): 3}
    assert described.quantization == "fp8-mxfp4"
    assert any("n-grams take 189 GiB of host memory" in note for note in described.notes)


def blocks(*layers: tuple[int | None, float]) -> dict[str, Any]:
    """A model whose layers were searched: queries a KV head serves, None without attention, and
    the MLP's multiple."""
    return {
        **llama(model_type="nemotron-nas", num_hidden_layers=len(layers)),
        "num_key_value_heads": None,
        "intermediate_size": None,
        "block_configs": [
            {
                "attention": {"n_heads_in_group": group, "no_op": group is None},
                "ffn": {"ffn_mult": multiple, "no_op": not multiple},
            }
            for group, multiple in layers
        ],
    }


NO_HEADS: dict[str, dict[str, int]] = {"attention": {}, "ffn": {}}


def test_layers_with_heads_and_widths_of_their_own() -> None:
    document = blocks((8, 2.625), (None, 1.0), (8, 0.0), (16, 1.3125))
    described = model_from_config("m", document)
    # 32 query heads of 128.
    assert kept(document) == {FullAttention(4, 128, 128): 2, FullAttention(2, 128, 128): 1}
    assert described.parameters is not None
    # Two thirds of the multiple times 4,096, rounded up to 256.
    assert described.parameters.mlp == 3 * 4096 * (7168 + 2816 + 3584)
    assert described.parameters.kv == 2 * 4096 * 128 * (4 + 4 + 2)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"num_hidden_layers": 3}, id="fewer blocks than layers"),
        pytest.param({"block_configs": [1, 2]}, id="no objects"),
        pytest.param({"block_configs": [NO_HEADS] * 2}, id="no heads"),
        pytest.param(
            {"block_configs": [{"attention": {"replace_with_linear": True}, "ffn": {}}] * 2},
            id="a linear map",
        ),
    ],
)
def test_blocks_that_cannot_be_read_are_named(changed: dict[str, Any]) -> None:
    with pytest.raises(SizingError, match=r"block_configs|n_heads_in_group"):
        model_from_config("m", {**blocks((8, 1.0), (8, 1.0)), **changed})


def test_a_cache_of_expanded_keys_has_every_head() -> None:
    described = model("openbmb/MiniCPM3-4B")
    # 64 elements and 32 of the position; vLLM pads values of 64 to them.
    assert described.layers == (Layers(FullAttention(40, 96, 96), 62),)


def test_fp8_experts_of_compressed_attention_are_stated() -> None:
    document = {**DEEPSEEK_V4, "expert_dtype": "fp8"}
    assert model_from_config("m", document).quantization == "fp8"


def test_hunyuan_v4_shares_indexers_and_says_which_layers_choose_tokens() -> None:
    described = model_from_config("m", HUNYUAN_V4)
    assert [(part.kind, part.count) for part in described.layers] == [
        (LatentAttention(512, 64, index_dim=128, index_heads=16), 10),
        (LatentAttention(512, 64, shares_index=True), 24),
    ]
    mixed = {**HUNYUAN_V4, "layer_types": ["full_attention", *["sparse_attention"] * 33]}
    assert model_from_config("m", mixed).layers == (
        Layers(LatentAttention(512, 64, index_dim=128, index_heads=16), 9),
        Layers(LatentAttention(512, 64, shares_index=True), 24),
        Layers(LatentAttention(512, 64), 1),
    )
    own = {**HUNYUAN_V4, "indexer_types": ["full"] * 34}
    assert [part.count for part in model_from_config("m", own).layers] == [34]
    dense = {key: value for key, value in HUNYUAN_V4.items() if key != "layer_types"}
    assert model_from_config("m", dense).layers == (Layers(LatentAttention(512, 64), 34),)


def test_windows_with_heads_of_their_own() -> None:
    mimo = model("XiaomiMiMo/MiMo-V2-Flash").layers
    assert mimo == (
        Layers(FullAttention(4, 192, 128), 9),
        Layers(SlidingAttention(8, 192, 128, 128), 39),
    )
    step = llama(
        model_type="step3p5",
        num_key_value_heads=...,
        num_attention_groups=8,
        sliding_window=512,
        layer_types=["full_attention", *["sliding_attention"] * 3] * 8,
        attention_other_setting={
            "attention_type": "sliding_attention",
            "num_attention_heads": 96,
            "num_attention_groups": 4,
            "head_dim": 64,
        },
    )
    described = model_from_config("m", step)
    assert described.layers == (
        Layers(FullAttention(8, 128, 128), 8),
        Layers(SlidingAttention(4, 64, 64, 512), 24),
    )
    assert described.parameters is not None
    assert described.parameters.attention == 4096 * (
        8 * (2 * 32 * 128 + 2 * 8 * 128) + 24 * (2 * 96 * 64 + 2 * 4 * 64)
    )


def test_blocks_of_keys_are_chosen_by_an_index_of_16_bit_beside_plain_attention() -> None:
    assert model("MiniMaxAI/MiniMax-M3").layers == (
        Layers(FullAttention(4, 128, 128), 60),
        Layers(CompressedAttention(256), 57),
    )
