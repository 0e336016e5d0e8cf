"""Reading a `config.json`: nested parts, class defaults, and every wrong thing named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kneewatch.diagnose.catalogue.hf_config import read_config
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.layers import FullAttention, SlidingAttention
from kneewatch.diagnose.catalogue.models import Model, model, model_from_config
from tests.diagnose.catalogue.configurations import (
    DEEPSEEK_V3,
    GEMMA_3N,
    GRANITE_H_SMALL,
    JAMBA,
    LFM2,
    LLAMA,
    QWEN3_NEXT,
    llama,
)
from tests.examples import examples


def test_nested_part_is_completed_by_its_class() -> None:
    # As google/gemma-3-4b-it publishes it: what equals the class's default is left out.
    document = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "patch_size": 14,
        },
    }
    parsed = model_from_config("gemma", document)
    listed = model("google/gemma-3-4b-it")

    assert {layers.kind: layers.count for layers in parsed.layers} == {
        SlidingAttention(4, 256, 256, 1024): 29,
        FullAttention(4, 256, 256): 5,
    }
    assert parsed.parameters is not None
    assert listed.parameters is not None
    assert parsed.parameters.total == pytest.approx(listed.parameters.total, rel=0.01)
    assert parsed.parameters.head == 0
    assert parsed.multimodal


def test_text_part_of_a_part() -> None:
    config = read_config("m", {"thinker_config": {"text_config": LLAMA}})

    assert config.count("hidden_size") == 4096


def test_null_in_the_file_counts_before_a_default() -> None:
    text = {"model_type": "mistral", "vocab_size": 32064, "sliding_window": None}
    parsed = model_from_config("llava", {"model_type": "llava_next", "text_config": text})

    assert [layers.kind for layers in parsed.layers] == [FullAttention(8, 128, 128)]


def test_top_level_file_is_not_completed_where_it_must_speak() -> None:
    for field in ("num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
        with pytest.raises(SizingError, match=f"m: the configuration has no {field}"):
            model_from_config("m", llama(**{field: ...}))


def test_without_hidden_size_the_weights_must_be_stated() -> None:
    parsed = model_from_config("m", llama(hidden_size=..., head_dim=128))

    assert parsed.parameters is None
    assert any("--weights-gib" in note for note in parsed.notes)


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        pytest.param(None, 32768, id="none"),
        pytest.param({"rope_type": "llama3", "factor": 8.0}, 32768, id="llama3: stated already"),
        pytest.param(
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            131072,
            id="yarn: 4 x 32768",
        ),
        pytest.param({"type": "linear", "factor": 2}, 65536, id="linear: 2 x 32768"),
        pytest.param({"type": "longrope", "short_factor": [1.0]}, 32768, id="longrope"),
    ],
)
def test_longest_context(scaling: object, tokens: int) -> None:
    document = llama(max_position_embeddings=32768, rope_scaling=scaling)

    assert model_from_config("m", document).max_context_tokens == tokens


@pytest.mark.parametrize("document", [None, 3, "text", [], [LLAMA]], ids=repr)
def test_no_object_is_refused(document: object) -> None:
    with pytest.raises(SizingError, match="is a JSON object"):
        model_from_config("m", document)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_hidden_layers": 20_000}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": 4096.5}, "hidden_size"),
        ({"hidden_size": 1 << 70}, "hidden_size"),
        ({"num_attention_heads": 8192, "num_key_value_heads": ...}, "num_attention_heads"),
        ({"num_key_value_heads": [8]}, "num_key_value_heads"),
        ({"layer_types": 7}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types_count": {"full_attention": 10**12}}, "layer_types_count"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"n_routed_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"n_routed_experts": 8}, "num_experts_per_tok"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e300}}, "factor"),
        ({"rope_scaling": 4}, "rope_scaling"),
        ({"vision_config": 4}, "vision_config"),
    ],
    ids=repr,
)
def test_wrong_field_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(SizingError, match=named) as caught:
        model_from_config("m", llama(**fields))

    assert len(str(caught.value)) < 300


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**13), 10**13)
    | st.floats()
    | st.sampled_from(["auto", "full_attention", "sliding_attention", "mamba", "M*E-", "float32"])
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
_SEEDS = (LLAMA, DEEPSEEK_V3, GEMMA_3N, GRANITE_H_SMALL, JAMBA, LFM2, QWEN3_NEXT)
_KEYS = sorted(
    {key for seed in _SEEDS for key in seed}
    | {"text_config", "vision_config", "rope_scaling", "quantization_config", "attn_config"}
    | {"layer_types_count", "hybrid_override_pattern", "linear_attn_config", "num_kv_shared_layers"}
    | {
        "sliding_window",
        "sliding_window_pattern",
        "use_sliding_window",
        "n_layer",
        "global_head_dim",
    }
    | {"attn_layer_indices", "attn_type_list", "full_attention_interval", "mamba_ssm_dtype"}
)


@examples(300)
@given(
    seed=st.sampled_from(_SEEDS),
    changes=st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=4),
)
@example(seed=LLAMA, changes={"sliding_window": 4096, "sliding_window_pattern": ""})
@example(seed=GRANITE_H_SMALL, changes={"hidden_size": 1, "mamba_d_head": "auto"})
@example(seed=LLAMA, changes={"rope_scaling": {"type": "yarn", "factor": float("nan")}})
def test_any_object_gives_a_model_or_says_what_is_wrong(
    seed: dict[str, Any], changes: dict[str, Any]
) -> None:
    parsed = taken({**seed, **changes})

    assert parsed is None or len({part.kind for part in parsed.layers}) == len(parsed.layers) > 0
    assert parsed is None or parsed.parameters is None or parsed.parameters.total >= 0


@examples(100)
@given(document=st.dictionaries(st.sampled_from(_KEYS) | st.text(max_size=8), _JSON, max_size=8))
def test_nonsense_is_told_apart(document: dict[str, Any]) -> None:
    taken(document)


def taken(document: dict[str, Any]) -> Model | None:
    """The model of a configuration, None where it is refused as a user would have it told."""
    try:
        return model_from_config("m", document)
    except SizingError as error:
        message = str(error)
    assert message.startswith("m: ")
    return None
