"""Draft heads: EAGLE's, and the prediction layers that a checkpoint brings."""

from __future__ import annotations

from typing import Any

import pytest

from kneewatch.diagnose.catalogue.layers import FullAttention, Layers
from kneewatch.diagnose.catalogue.models import Model, model, model_from_config

HEAD: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4096,
    "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "draft_vocab_size": 32000,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
MLP = 3 * 4096 * 14336
ATTENTION = 2 * 4096 * 4096 + 2 * 4096 * 1024
NORMS = 2 * 4096


def total(draft: Model) -> float:
    """Its parameters."""
    assert draft.parameters is not None
    return draft.parameters.total


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        pytest.param(
            {},
            MLP + ATTENTION + 4096 * (4096 + 2 * 1024) + 3 * 4096 * 4096 + 32000 * 4096 + NORMS,
            id="EAGLE 3: queries and keys from two hidden sizes, three states joined, its own head",
        ),
        pytest.param(
            {"num_aux_hidden_states": 5},
            MLP + ATTENTION + 4096 * (4096 + 2 * 1024) + 5 * 4096 * 4096 + 32000 * 4096 + NORMS,
            id="of five states",
        ),
        pytest.param(
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
            MLP + ATTENTION + 4096 * (4096 + 2 * 1024) + 2 * 4096 * 4096 + 32000 * 4096 + NORMS,
            id="of the two layers that it names",
        ),
        pytest.param(
            {"architectures": ["EagleLlamaForCausalLM"], "draft_vocab_size": None},
            MLP + ATTENTION + 2 * 4096 * 4096 + NORMS,
            id="EAGLE: one layer and what joins embedding and state; both tables are the target's",
        ),
    ],
)
def test_a_heads_parameters(changed: dict[str, Any], expected: float) -> None:
    parsed = model_from_config("head", HEAD | changed)

    assert total(parsed) == expected
    assert parsed.target_hidden_size == 4096
    assert parsed.layers == (Layers(FullAttention(8, 128, 128), 1),)


def test_a_published_head_weighs_what_its_file_does() -> None:
    # EAGLE-3 for Llama-3.1-8B-Instruct: a file of 850 MB in 16 bit (from memory).
    assert total(model_from_config("head", HEAD)) * 2 == pytest.approx(850e6, rel=0.005)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        pytest.param("deepseek-ai/DeepSeek-R1", 11.6, id="11.5 published as unique to the module"),
        pytest.param(
            "zai-org/GLM-4.5-Air", 2.38, id="128 experts of 3 x 4096 x 1408, and the rest"
        ),
    ],
)
def test_own_prediction_layers(name: str, billions: float) -> None:
    own_draft = model(name).own_draft
    assert own_draft is not None
    assert total(own_draft) == pytest.approx(billions * 1e9, rel=0.01)
    assert sum(part.count for part in own_draft.layers) == 1
    assert own_draft.own_draft is None


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-8B-Instruct", "moonshotai/Kimi-K2-Thinking"]
)
def test_most_models_bring_none(name: str) -> None:
    assert model(name).own_draft is None
    assert model(name).target_hidden_size == 0
