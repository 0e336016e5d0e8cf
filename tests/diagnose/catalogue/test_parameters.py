"""The census of parameters, against published totals and against the model classes themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from kneewatch.diagnose.catalogue.models import model, model_from_config
from kneewatch.diagnose.catalogue.parameters import Experts, Parameters
from tests.diagnose.catalogue.configurations import (
    DEEPSEEK_V3,
    GEMMA_3N,
    GRANITE_H_SMALL,
    HUNYUAN_V4,
    JAMBA,
    LFM2,
    QWEN3_NEXT,
    ZAMBA2,
    llama,
)

_FIXTURE = Path(__file__).parents[2] / "fixtures" / "models" / "parameters.json"
COUNTED: dict[str, int] = json.loads(_FIXTURE.read_text("utf-8"))["parameters"]


def parameters(document: dict[str, Any]) -> Parameters:
    """The parameters of a configuration."""
    counts = model_from_config("m", document).parameters
    assert counts is not None
    return counts


@pytest.mark.parametrize("name", sorted(COUNTED))
def test_language_model_as_its_class_has_it(name: str) -> None:
    counts = model(name).parameters
    assert counts is not None
    # Biases and the norms of heads are not counted: most in OPT-350M, the smallest with both.
    assert counts.total - counts.vision == pytest.approx(COUNTED[name], rel=0.005)


def test_newest_families_to_the_norms() -> None:
    """Compressors, indexers and mixed residual streams are a thousandth of such a model."""
    for name in ("deepseek-ai/DeepSeek-V4-Pro", "deepseek-ai/DeepSeek-V4-Flash"):
        counts = model(name).parameters
        assert counts is not None
        assert counts.total == pytest.approx(COUNTED[name], rel=1e-6)
    # The defaults of its configuration class, built as those of the fixture.
    assert parameters(HUNYUAN_V4).total == pytest.approx(58278193133, rel=2e-6)


def test_every_family_of_the_catalogue_that_has_a_class_is_counted() -> None:
    assert len(COUNTED) >= 180
    assert all(model(name).id == name for name in COUNTED)


def test_dense_decoder_by_hand() -> None:
    counts = parameters(llama())

    assert counts.attention == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert counts.kv == 32 * 2 * 4096 * 1024
    assert counts.mlp == 32 * 3 * 4096 * 14336
    assert counts.embedding == counts.head == 128256 * 4096
    assert (counts.experts, counts.replicated, counts.vision) == (0, 0, 0)
    assert counts.total == pytest.approx(8030261248, rel=1e-4)


def test_tied_head_is_not_counted_twice() -> None:
    tied, free = parameters(llama(tie_word_embeddings=True)), parameters(llama())

    assert free.total - tied.total == 128256 * 4096
    assert tied.head == 0


def test_latent_attention_by_hand() -> None:
    counts = parameters(DEEPSEEK_V3)

    split = 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    assert counts.attention == 61 * split
    assert counts.replicated == 61 * 7168 * (1536 + 512 + 64)
    assert counts.experts == 58 * 256 * 3 * 7168 * 2048
    assert counts.mlp == 58 * 3 * 7168 * 2048 + 3 * 3 * 7168 * 18432
    assert counts.total == pytest.approx(671.03e9, rel=1e-3)


def test_layers_that_read_an_earlier_cache_have_no_keys_or_values() -> None:
    shared = parameters(GEMMA_3N)
    own = parameters({**GEMMA_3N, "num_kv_shared_layers": 0})

    assert own.attention - shared.attention == 10 * 2 * 2048 * 2 * 256
    assert own.kv - shared.kv == 10 * 2 * 2048 * 2 * 256


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        pytest.param(llama(), Experts(), id="dense"),
        pytest.param(DEEPSEEK_V3, Experts(256, 8, 58), id="deepseek: 61 - 3 dense"),
        pytest.param(JAMBA, Experts(16, 2, 16), id="jamba: every 2nd of 32"),
        pytest.param(QWEN3_NEXT, Experts(512, 10, 48), id="qwen3-next: all 48"),
        pytest.param(GRANITE_H_SMALL, Experts(72, 10, 40), id="granite hybrid"),
        pytest.param(
            {**QWEN3_NEXT, "mlp_only_layers": [0, 47]}, Experts(512, 10, 46), id="48 - 2 named"
        ),
        pytest.param(
            {**QWEN3_NEXT, "decoder_sparse_step": 2}, Experts(512, 10, 24), id="every 2nd of 48"
        ),
        pytest.param(
            llama(
                model_type="ernie4_5_moe",
                moe_num_experts=64,
                moe_k=6,
                moe_layer_start_index=1,
                moe_intermediate_size=1536,
            ),
            Experts(64, 6, 31),
            id="ernie: from layer 1 of 32",
        ),
        pytest.param(
            llama(
                model_type="llama4",
                num_local_experts=128,
                num_experts_per_tok=1,
                interleave_moe_layer_step=2,
                intermediate_size_mlp=16384,
            ),
            Experts(128, 1, 16),
            id="llama 4: every 2nd of 32",
        ),
        pytest.param(
            llama(num_experts=8, num_experts_per_tok=2, enable_moe_block=False),
            Experts(),
            id="switched off",
        ),
    ],
)
def test_experts(document: dict[str, Any], expected: Experts) -> None:
    assert model_from_config("m", document).experts == expected


def test_layers_that_are_an_mlp_alone() -> None:
    blocks = ["mamba", "mlp", "attention", "mlp"]
    counts = parameters(
        llama(
            model_type="nemotron_h",
            num_hidden_layers=4,
            layers_block_type=blocks,
            mamba_num_heads=64,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=8,
            conv_kernel=4,
        )
    )

    assert counts.mlp == 2 * 2 * 4096 * 14336


def test_output_gate_as_the_file_has_it() -> None:
    gated, plain = parameters(QWEN3_NEXT), parameters({**QWEN3_NEXT, "attn_output_gate": False})

    assert gated.attention - plain.attention == 12 * 2048 * 16 * 256


def test_adjusted_width() -> None:
    # 12288 * 2 / 3 is 8192, a whole number of blocks of 256.
    assert parameters(LFM2).mlp == 16 * 3 * 2048 * 8192


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(ZAMBA2, id="zamba2: blocks shared and adapted"),
        pytest.param(llama(num_attention_heads_per_layer=[48, 64] * 16), id="laguna: uneven heads"),
    ],
)
def test_weights_of_uneven_layers_are_not_guessed(document: dict[str, Any]) -> None:
    parsed = model_from_config("m", document)

    assert parsed.parameters is None
    assert any("--weights-gib" in note for note in parsed.notes)


@pytest.mark.parametrize(
    ("tower", "published", "band"),
    [
        pytest.param(
            {
                "model_type": "siglip_vision_model",
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "num_channels": 3,
            },
            412e6,
            0.1,
            id="SigLIP So400m",
        ),
        pytest.param(
            {
                "model_type": "qwen2_5_vl",
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "out_hidden_size": 4096,
            },
            676e6,
            0.03,
            id="Qwen2.5-VL 7B",
        ),
        pytest.param(
            {
                "model_type": "qwen3_vl",
                "depth": 27,
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "out_hidden_size": 4096,
                "num_position_embeddings": 2304,
                "deepstack_visual_indexes": [8, 16, 24],
            },
            576e6,
            0.03,
            id="Qwen3-VL 8B",
        ),
        pytest.param(
            {
                "vt_hidden_size": 1152,
                "vt_intermediate_size": 4304,
                "vt_num_hidden_layers": 27,
                "patch_size": 14,
                "merge_kernel_size": [2, 2],
            },
            27 * (4 * 1152**2 + 2 * 1152 * 4304) + 3 * 14**2 * 1152 + 4608**2 + 4608 * 4096,
            1e-9,
            id="Kimi K2.5, by hand",
        ),
    ],
)
def test_vision_tower_by_its_configuration(
    tower: dict[str, Any], published: float, band: float
) -> None:
    parsed = model_from_config("m", {"text_config": llama(), "vision_config": tower})

    assert parsed.parameters is not None
    assert parsed.parameters.vision == pytest.approx(published, rel=band)
    assert parsed.multimodal
    assert any("estimated from its configuration" in note for note in parsed.notes)


@pytest.mark.parametrize(
    "outer",
    [
        pytest.param({"vision_config": {"model_type": "odd", "side": 1152}}, id="odd"),
        pytest.param({"audio_config": {"d_model": 1280}}, id="audio"),
    ],
)
def test_tower_of_other_fields_is_said_not_to_be_counted(outer: dict[str, Any]) -> None:
    parsed = model_from_config("m", {"text_config": llama(), **outer})

    assert parsed.multimodal
    assert cast("Parameters", parsed.parameters).vision == 0
    assert any("exclude vision and audio towers" in note for note in parsed.notes)
