"""The catalogue of models: its ids, how a name is found, and totals against published ones."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import pytest
from msgspec.structs import replace

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.catalogue.hf_config import Config, read_config
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import (
    known_model,
    model,
    model_from_config,
    model_ids,
)
from kneewatch.diagnose.catalogue.quantization import schemes
from tests.diagnose.catalogue.configurations import DEEPSEEK_V3, llama

_TEXT = files("kneewatch.diagnose.catalogue").joinpath("models.json").read_text("utf-8")
ENTRIES: dict[str, dict[str, Any]] = json.loads(_TEXT)
# Published totals that the census does not meet, and why.
EXCEPTIONS = {
    "Qwen/Qwen3.5-27B": "the total has the draft head, which plain serving leaves out",
    "Qwen/Qwen3.5-27B-FP8": "as above",
}
MEASURED = (
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3.5-9B",
    "codellama/CodeLlama-34b-Instruct-hf",
    "mistralai/Mixtral-8x7B-v0.1",
    "zai-org/GLM-4.5-Air",
    "zai-org/GLM-4.6-FP8",
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8",
)


def published(name: str) -> float | None:
    """The published total of an entry or of its base."""
    entry = ENTRIES[name]
    return {**ENTRIES.get(entry.get("base", ""), {}), **entry}.get("total_parameters")


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_is_whole_and_meets_its_published_total(name: str) -> None:
    entry = model(name)

    assert entry.id == name
    assert entry.source
    assert entry.quantization in schemes()
    assert entry.layers
    # A layer may both attend and recur, and may do neither.
    assert 0 < entry.depth <= 200
    total = published(name)
    if total is None or name in EXCEPTIONS:
        return
    assert entry.parameters is not None
    assert entry.parameters.total == pytest.approx(total, rel=0.01)


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exceptions_are_still_needed(name: str) -> None:
    counts, total = model(name).parameters, published(name)

    assert counts is not None
    assert total is not None
    assert 0.01 < abs(counts.total / total - 1) < 0.03


def test_file_has_one_model_a_line_with_its_source() -> None:
    lines = _TEXT.strip().splitlines()

    assert len(lines) == len(ENTRIES) + 2
    for name, entry in ENTRIES.items():
        assert entry["source"], name
        assert ("total_parameters" in entry) == ("total_source" in entry), name
        assert "config" in entry or "base" in entry, name
        assert "base" not in ENTRIES.get(entry.get("base", ""), {}), name


def test_the_measured_models_come_first_in_the_file() -> None:
    assert tuple(ENTRIES)[: len(MEASURED)] == MEASURED
    assert len(ENTRIES) >= 300


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "Qwen3-8B", "qwen3-8b"], ids=repr
)
def test_case_and_organisation_are_forgiven(name: str) -> None:
    assert model(name).id == "Qwen/Qwen3-8B"


def test_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(SizingError, match="is not in the catalogue") as caught:
        model("Qwen/Qwen3-8C")

    assert caught.value.name == "model"
    assert "Qwen/Qwen3-8B" in caught.value.choices


def test_the_nearest_of_an_unknown_release_are_of_its_family() -> None:
    with pytest.raises(SizingError, match=r"hf download baidu/ERNIE-5\.0 config\.json") as caught:
        model("baidu/ERNIE-5.0")

    assert {each.partition("-")[0] for each in caught.value.choices} == {"baidu/ERNIE"}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("mistralai/Mistral-Large-4", "mistralai/Mistral-Large-Instruct-2411"),
        ("deepseek-ai/DeepSeek-V4-Flash-2", "deepseek-ai/DeepSeek-V4-Flash"),
        ("upstage/Solar-Open-2-100B", "upstage/Solar-Open-100B"),
        ("LGAI-EXAONE/EXAONE-4.5-33B", "LGAI-EXAONE/EXAONE-4.0-32B"),
        (
            "nvidia/NVIDIA-Nemotron-4-Ultra-550B-A55B",
            "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
        ),
    ],
)
def test_a_release_of_its_own_is_not_guessed(name: str, near: str) -> None:
    with pytest.raises(SizingError, match=f"hf download {name} config") as refused:
        model(name)
    assert near in refused.value.choices


def test_the_nearest_of_a_name_of_no_family_are_of_its_size() -> None:
    with pytest.raises(SizingError, match="hf download someone/Ornith-") as caught:
        model("someone/Ornith-1.5-397B")

    assert "Qwen/Qwen3.5-397B-A17B" in caught.value.choices


MISSPELLED = {
    "qwen3-32": "Qwen3-32B",
    "qwen-3-32b": "Qwen3-32B",
    "Qwen3 32B": "Qwen3-32B",
    "quen3-32b": "Qwen3-32B",
    "qwen3-33b": "Qwen3-32B",
    "qwen3-30b-a3": "Qwen3-30B-A3B",
    "qwen3-moe-30b": "Qwen3-30B-A3B",
    "qwen3-coder-30": "Qwen3-Coder-30B-A3B-Instruct",
    "qwen-2.5-7b": "Qwen2.5-7B",
    "qwen2.5 vl 7b": "Qwen2.5-VL-7B-Instruct",
    "lama-3.3-70b-instruct": "Llama-3.3-70B-Instruct",
    "llama 3.1 8b": "Llama-3.1-8B",
    "llama-8b": "Llama-3.1-8B",
    "llama-4-scot-17b": "Llama-4-Scout-17B-16E-Instruct",
    "code-llama-34b": "CodeLlama-34b-Instruct-hf",
    "deepseekv3": "DeepSeek-V3",
    "deepseak-r1": "DeepSeek-R1",
    "deepseek": "DeepSeek-V3",
    "deepseek-coder-v2": "DeepSeek-Coder-V2-Lite-Instruct",
    "gpt-oss120b": "gpt-oss-120b",
    "gptoss-20b": "gpt-oss-20b",
    "oss-120b": "gpt-oss-120b",
    "gemma-27b": "gemma-3-27b-it",
    "gema-3-27b-it": "gemma-3-27b-it",
    "mixtral-8x7": "Mixtral-8x7B-Instruct-v0.1",
    "mistral-8x7b": "Mixtral-8x7B-Instruct-v0.1",
    "mistral7b": "Mistral-7B-Instruct-v0.3",
    "glm4.5-air": "GLM-4.5-Air",
    "nemotron-super-49b": "Llama-3_3-Nemotron-Super-49B-v1",
    "minimax2.5": "MiniMax-M2.5",
}


@pytest.mark.parametrize("name", MISSPELLED)
def test_a_misspelled_name_lists_what_is_meant(name: str) -> None:
    with pytest.raises(SizingError) as caught:
        model(name)
    assert MISSPELLED[name] in [each.split("/")[-1] for each in caught.value.choices]


@pytest.mark.parametrize(
    ("name", "what"),
    [("mlx-community/Qwen3.6-27B-4bit", "MLX"), ("someone/Qwen3-32B-exl3", "EXL3")],
)
def test_weights_in_a_format_of_another_engine_are_refused(name: str, what: str) -> None:
    with pytest.raises(SizingError, match=f"{name}: vLLM does not load {what} weights") as caught:
        model(name)

    assert any(each.startswith("Qwen/Qwen3") for each in caught.value.choices)


def test_a_gguf_name_without_a_type_says_which_is_assumed() -> None:
    for name, is_said in (("unsloth/Qwen3.6-27B-GGUF", True), ("unsloth/Qwen3-8B-Q4_K_M", False)):
        assert any("q4_k is assumed" in note for note in model(name).notes) == is_said


def test_name_of_two_organisations_is_not_unique() -> None:
    with pytest.raises(SizingError, match="matches several models") as caught:
        model("Ministral-3-14B-Instruct-2512")

    assert caught.value.choices == (
        "mistralai/Ministral-3-14B-Instruct-2512",
        "RedHatAI/Ministral-3-14B-Instruct-2512",
    )


def test_variant_takes_everything_but_its_own_from_its_base() -> None:
    base, variant = model("Qwen/Qwen3-32B"), model("Qwen/Qwen3-32B-AWQ")

    assert variant.parameters == base.parameters
    assert variant.layers == base.layers
    assert (base.quantization, variant.quantization) == ("bf16", "awq")


def test_prediction_layers_of_a_configuration_are_not_counted_but_known() -> None:
    without = {key: value for key, value in DEEPSEEK_V3.items() if "nextn" not in key}
    plain, own = model_from_config("m", without), model_from_config("m", DEEPSEEK_V3)

    assert plain.own_draft is None
    assert plain == replace(own, own_draft=None)


def test_cross_attention_says_which_engine_it_is_true_of() -> None:
    entry = model("meta-llama/Llama-3.2-11B-Vision")

    assert sum(layers.count for layers in entry.layers) == 40
    assert any("V0" in note for note in entry.notes)


def test_configuration_in_the_catalogue_and_in_a_file_agree() -> None:
    listed, read = model("meta-llama/Llama-3.1-8B-Instruct"), model_from_config("m", llama())

    assert (listed.layers, listed.parameters) == (read.layers, read.parameters)
    assert listed.max_context_tokens == read.max_context_tokens == 131072


def test_a_model_is_found_without_counting_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def note(name: str, document: object) -> Config:
        read.append(name)
        return read_config(name, document)

    monkeypatch.setattr("kneewatch.diagnose.catalogue.models.read_config", note)

    assert model("Qwen/Qwen3-8B").id == "Qwen/Qwen3-8B"
    assert set(read) <= {"Qwen/Qwen3-8B"}


@pytest.mark.parametrize(
    ("name", "entry", "quantization"),
    [
        ("Qwen/Qwen3.6-27B", "Qwen/Qwen3.5-27B", "bf16"),
        ("nvidia/Qwen3.8-27B-NVFP4", "Qwen/Qwen3.5-27B", "nvfp4-mlp"),
        ("qwen3.6-27b-autoround-int4", "Qwen/Qwen3.5-27B", "int4"),
        ("zai-org/GLM-5.1-FP8", "zai-org/GLM-5-FP8", "fp8"),
        ("zai-org/GLM-5.2-FP8", "nvidia/GLM-5.2-NVFP4", "fp8"),
        ("moonshotai/Kimi-K2.6", "moonshotai/Kimi-K2.5", "int4-experts"),
        ("deepseek-ai/DeepSeek-V4-Flash-0731", "deepseek-ai/DeepSeek-V4-Flash", "fp8-mxfp4"),
        (
            "nvidia/Nemotron-3-Super-NVFP4",
            "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
            "nvfp4",
        ),
    ],
)
def test_a_release_of_a_known_architecture_is_sized_with_it(
    name: str, entry: str, quantization: str
) -> None:
    named, known = model(name), model(entry)

    assert named.id == name
    assert named.layers == known.layers
    assert named.quantization == quantization
    assert any(known.id.split("-")[0] in note for note in named.notes)
    # Judgements of a running server never rest on an entry that only resembles its name.
    assert known_model(name) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("moonshotai/Kimi-K3", "checkpoints of its recurrent states"),
        ("zai-org/GLM-5-Next-FP8", "indexer's keys beside recurrent states"),
        ("zai-org/GLM-5.3-Flash", "indexer's keys beside recurrent states"),
        ("Qwen/Qwen4-32B", "indexer's keys beside recurrent states"),
        ("GSAI-ML/LLaDA-8B-Instruct", "generates by diffusion"),
        ("mistralai/Mamba-Codestral-7B-v0.1", "has no attention layers"),
    ],
)
def test_a_model_that_is_not_modelled_says_why_by_its_name(name: str, why: str) -> None:
    """Its config.json would be refused with the same words: nothing to download."""
    with pytest.raises(
        SizingError, match=f"{name}: it cannot be sized, because .*{why}"
    ) as refused:
        model(name)
    assert "vLLM logs the capacity" in str(refused.value)
    assert refused.value.choices == ()


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-235B-A22B-Thinking-2507-FP8", "Qwen/Qwen3-4B-Instruct-2507-FP8"],
)
def test_a_release_has_the_context_of_its_own(name: str) -> None:
    assert model(name).max_context_tokens == 262_144


@pytest.mark.parametrize("name", ["BAAI/bge-m3", "openai/whisper-large-v3", "google/siglip-base"])
def test_an_encoder_says_what_serves_it(name: str) -> None:
    with pytest.raises(SizingError, match=r"it is not a decoder .* holds its weights .* serves it"):
        model(name)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("nvidia/MiniMax-M2.5-NVFP4", "fp8"),
        ("gittensor-model-hub/Qwen3.8-27B-NVFP4-RTX5090", "fp8"),
        ("nvidia/Gemma-4-31B-IT-NVFP4", "fp8"),
        ("MiniMaxAI/MiniMax-M2.5", "auto"),
    ],
)
def test_a_checkpoint_may_ask_for_its_kv_cache(name: str, dtype: str) -> None:
    assert model(name).kv_cache_dtype == dtype


@pytest.mark.parametrize("name", model_ids())
def test_a_model_can_be_a_key(name: str) -> None:
    """Results on live servers are kept by launch; a vision tower that was no key ended them."""
    assert hash(model(name)) == hash(model(name))


def test_names_of_refused_models_name_a_family_and_no_entry() -> None:
    unmodelled = packaged_tables("diagnose.catalogue", "model_names.toml")["unmodelled"]
    families = packaged_tables("diagnose.catalogue", "families.toml")["refused"]
    assert set(unmodelled.values()) <= families.keys() | {"encoders"}
    ids = [name.lower().split("/")[-1] for name in model_ids()]
    assert [name for name in ids for rule in unmodelled if re.match(rule, name)] == []


def test_another_size_of_a_known_release_is_not_guessed() -> None:
    with pytest.raises(SizingError, match=r"hf download Qwen/Qwen3\.6-99B config\.json") as refused:
        model("Qwen/Qwen3.6-99B")
    assert any("Qwen3.5" in near for near in refused.value.choices)


@pytest.mark.parametrize(
    ("name", "entry", "quantization"),
    [
        ("unsloth/Qwen3.6-35B-A3B-GGUF:Q5_K_M", "Qwen3.5-35B-A3B", "q5_k"),
        ("Qwen3.6-27B-UD-Q4_K_XL.gguf", "Qwen/Qwen3.5-27B", "q4_k"),
        ("bartowski/Qwen_Qwen3.6-27B-GGUF", "Qwen/Qwen3.5-27B", "q4_k"),
        ("models--Qwen--Qwen3.6-27B", "Qwen/Qwen3.5-27B", "bf16"),
        ("QWEN/QWEN3.6-27B-FP8/", "Qwen/Qwen3.5-27B", "fp8"),
        ("Qwen/Qwen3.6-27B@main", "Qwen/Qwen3.5-27B", "bf16"),
        ("someone/Qwen3.8-27B-Someones-Distilled", "Qwen/Qwen3.5-27B", "bf16"),
        ("zai-org/GLM-5.2", "nvidia/GLM-5.2-NVFP4", "bf16"),
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", "Qwen3.5-35B-A3B", "nvfp4-mlp"),
        ("nvidia/Gemma-4-26B-A4B-NVFP4", "google/gemma-4-26B-A4B", "nvfp4-experts"),
        ("mistralai/Mistral-Medium-3.5", "mistralai/Mistral-Medium-3.5-128B", "fp8"),
        ("llama3.3:70b", "meta-llama/Llama-3.3-70B-Instruct", "bf16"),
        ("deepseek-r1:32b", "DeepSeek-R1-Distill-Qwen-32B", "bf16"),
        ("inclusionAI/Ring-1T-FP8", "inclusionAI/Ling-1T", "fp8"),
        ("NousResearch/Hermes-4-14B", "Qwen/Qwen3-14B", "bf16"),
        ("tencent/Hunyuan-Hy3", "tencent/Hy3", "bf16"),
        ("tencent/Hunyuan-A13B-2", "tencent/Hunyuan-A13B-Instruct", "bf16"),
        ("cyankiwi/Qwen3-Next-80B-A3B-AWQ-4bit", "Qwen3-Next-80B-A3B", "int4-experts"),
        # Bits stated in ways that were read as 16, or as 4 where they are 8.
        ("RedHatAI/Llama-3.3-70B-Instruct-quantized.w4a16", "Llama-3.3-70B", "int4"),
        ("someone/Llama-3.1-8B-Instruct-GPTQ-Int8", "meta-llama/Llama-3.1-8B", "int8"),
        ("moonshotai/Kimi-K2-Base", "moonshotai/Kimi-K2-Instruct", "fp8"),
        # Without a size, or with a part of it, where only one is meant.
        ("mistralai/Mistral-Small-4", "mistralai/Mistral-Small-4-119B-2603", "fp8"),
        ("qwen3:30b", "Qwen/Qwen3-30B-A3B", "bf16"),
        ("deepseek-v3.1:671b", "deepseek-ai/DeepSeek-V3.1", "fp8"),
        ("nvidia/Nemotron-3-Super", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B", "bf16"),
        # Releases of this year, and tunings with their base at the end.
        ("Qwen/Qwen3.8-Max", "Qwen/Qwen3.8-2.4T-A95B", "bf16"),
        ("inclusionAI/Ring-2.5-1T", "inclusionAI/Ling-2.5-1T", "bf16"),
        ("ibm-granite/granite-4.1-30b-FP8", "ibm-granite/granite-4.1-30b", "fp8"),
        ("allenai/Olmo-3.1-32B-Instruct", "allenai/Olmo-3-32B-Think", "bf16"),
        ("tiiuae/Falcon-H1R-7B", "tiiuae/Falcon-H1-7B-Instruct", "bf16"),
        ("dphn/Dolphin3.0-Llama3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "bf16"),
        ("microsoft/Fara-7B", "Qwen/Qwen2.5-VL-7B-Instruct", "bf16"),
        ("sakamakismile/Carnice-V2-27b-NVFP4", "Qwen/Qwen3.5-27B", "nvfp4-mlp"),
        ("cyankiwi/OmniCoder-9B-AWQ-4bit", "Qwen/Qwen3.5-9B", "awq-32"),
        ("Kwaipilot/KAT-Dev", "Qwen/Qwen3-32B", "bf16"),
        ("zai-org/GLM-5.3-FP8", "nvidia/GLM-5.2-NVFP4", "fp8"),
        ("nex-agi/DeepSeek-V3.1-Nex-N1", "deepseek-ai/DeepSeek-V3.1", "fp8"),
        # Makers whose recipe keeps more in 16 bit.
        ("nvidia/Gemma-4-31B-IT-NVFP4", "google/gemma-4-31B", "nvfp4-ffn"),
        ("AEON-7/Qwen3.6-27B-NVFP4", "Qwen/Qwen3.5-27B", "nvfp4-hybrid"),
        # 18.77 GiB logged.
        ("gittensor-model-hub/Qwen3.8-27B-NVFP4-RTX5090", "Qwen/Qwen3.5-27B", "nvfp4-linear"),
        ("nvidia/Kimi-K2.6-NVFP4", "moonshotai/Kimi-K2.5", "nvfp4-experts"),
        ("nvidia/DeepSeek-V4-Flash-NVFP4", "deepseek-ai/DeepSeek-V4-Flash", "fp8-nvfp4"),
        # Their maker's words in front of the size, or a name of its own.
        ("elyza/Llama-3-ELYZA-JP-8B", "meta-llama/Meta-Llama-3-8B", "bf16"),
        ("LGAI-EXAONE/EXAONE-Deep-32B", "EXAONE-3.5-32B", "bf16"),
        ("nvidia/OpenReasoning-Nemotron-32B", "DeepSeek-R1-Distill-Qwen-32B", "bf16"),
    ],
)
def test_a_name_as_people_write_it_is_sized_with_its_architecture(
    name: str, entry: str, quantization: str
) -> None:
    found = model(name)

    assert found.quantization == quantization
    assert any("sized with the architecture of" in note and entry in note for note in found.notes)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3.6-27B-DFlash",
        "someone/Qwen3-8B-EAGLE3",
        "Qwen/Qwen3-14B-Embedding",
        "llava-hf/llava-llama-3-8b",
        "someone/DeepSeek-V3-7B",
        "cerebras/GLM-4.5-Air-REAP-82B-A12B",
        "Qwen3",
        "someone/Qwen3-8B-Voice",
    ],
)
def test_a_model_that_only_begins_like_a_known_one_is_not_guessed(name: str) -> None:
    with pytest.raises(SizingError, match="not in the catalogue"):
        model(name)


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("gemma-3-27b", "google/gemma-3-27b-it"),
        ("meta-llama/llama-3.3-70b", "meta-llama/llama-3.3-70b"),
        ("mistral-small", "mistral-small"),
        ("llama-3.1-70b-fp8", "llama-3.1-70b-fp8"),
    ],
)
def test_a_name_that_lacks_its_last_word_only_has_the_whole_id(short: str, whole: str) -> None:
    assert model(short).id == whole
