"""Facts of several sources: precedence, conflicts, contradictions, what is missing."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import GIB, gpu
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.deployment.deployment import NOT_REPORTED, NOTHING, Stated, deployment
from kneewatch.diagnose.deployment.server_facts import SourceReading, merge
from kneewatch.diagnose.deployment.vllm_flags import CommandLine, parse_command
from kneewatch.diagnose.sizing.memory.budget import memory
from kneewatch.diagnose.verdict import KnownFact, Server, Value

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
CONFIG = {
    "block_size": "16",
    "num_gpu_blocks": "1000",
    "cache_dtype": "auto",
    "gpu_memory_utilization": "0.9",
    "enable_prefix_caching": "True",
}


def merged(
    stated: Stated = NOTHING,
    *readings: SourceReading,
    config: Mapping[str, str] = CONFIG,
    models: tuple[str, ...] = ("chat",),
) -> tuple[Server, Stated]:
    return merge(stated, readings, config=config, model_names=models, settings_s=1.0, page_s=9.0)


def server(**values: Value) -> SourceReading:
    return SourceReading("server", 5.0, values)


def process(line: str) -> SourceReading:
    return SourceReading("process", 6.0, command_line=parse_command(line, origin="test"))


def test_a_server_and_its_process_complete_what_is_not_set() -> None:
    facts, stated = merged(
        NOTHING,
        process(f"vllm serve {LLAMA} --max-num-seqs 64"),
        server(vllm_version="0.32.0", model_path=LLAMA, max_model_len=8192),
    )
    assert stated.model == model(LLAMA)
    assert (stated.version, stated.degree, stated.seats) == ((0, 32, 0), 1, 64)
    assert stated.reported.max_model_len == 8192
    by_name = {fact.name: fact for fact in facts.facts}
    assert by_name["vllm_version"] == KnownFact("vllm_version", "0.32.0", "server", read_s=5.0)
    assert by_name["tensor_parallel"] == KnownFact("tensor_parallel", 1, "process", read_s=6.0)
    assert by_name["num_gpu_blocks"] == KnownFact("num_gpu_blocks", 1000, "page", read_s=9.0)
    assert facts.notes == ()
    assert [row.name for row in facts.unknown] == ["gpu", "replicas"]
    assert not stated.reported.in_pod
    pod = replace(process(f"vllm serve {LLAMA} --max-num-seqs 64"), source="pod")
    assert merged(NOTHING, pod)[1].reported.in_pod


def test_a_setting_wins_and_the_conflict_is_a_note() -> None:
    stated = Stated(model=model("Qwen/Qwen3-8B"), version=(0, 30, 0), tensor_parallel=2)
    facts, completed = merged(
        stated,
        server(vllm_version="0.32.0", model_path=LLAMA),
        process(f"vllm serve {LLAMA} -tp 4"),
    )
    assert (completed.model, completed.version, completed.degree) == (
        stated.model,
        (0, 30, 0),
        2,
    )
    for name, both in (
        ("vllm_version", ("0.30.0", "0.32.0")),
        ("model", ("Qwen/Qwen3-8B", LLAMA)),
        ("tensor_parallel", ("2", "4")),
    ):
        note = next(
            note
            for note in facts.notes
            if "from setting is used" in note and note.startswith(f"{name}: ")
        )
        assert all(value in note for value in both)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--num-gpu-blocks-override 10", "num_gpu_blocks_override"),
        ("--gpu-memory-utilization 0.5", "gpu_memory_utilization"),
        ("--kv-cache-dtype fp8", "kv_cache_dtype"),
    ],
)
def test_a_flag_that_contradicts_the_page_is_dropped(flags: str, name: str) -> None:
    config = CONFIG | {"num_gpu_blocks_override": "1000", "cache_dtype": "bfloat16"}
    facts, stated = merged(NOTHING, process(f"vllm serve {LLAMA} {flags}"), config=config)
    assert any(
        note.startswith(f"{name}: ") and "from process is ignored" in note for note in facts.notes
    )
    assert facts.value(name) == next(
        f.value for f in facts.facts if f.source == "page" if f.name == name
    )
    assert stated.command_line is not None
    assert not stated.command_line.complete, "the rest of that line is doubtful"
    assert not any(flag in stated.command_line.flags for flag in flags.split()[:1])


def test_a_block_size_that_vllm_adjusts_leaves_the_launch_whole() -> None:
    facts, stated = merged(NOTHING, process(f"vllm serve {LLAMA} --block-size 32"))
    assert facts.value("block_size") == 16
    assert stated.command_line == CommandLine(LLAMA)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3"])
def test_two_names_of_one_type_are_no_conflict(dtype: str) -> None:
    line = f"vllm serve {LLAMA} --kv-cache-dtype {dtype}"
    facts, _ = merged(NOTHING, process(line), config=CONFIG | {"cache_dtype": "fp8"})
    assert facts.notes == ()


def test_a_version_that_lacks_the_labels_of_the_page_is_dropped() -> None:
    config = CONFIG | {"kv_cache_size_tokens": "16000"}
    facts, stated = merged(NOTHING, server(vllm_version="0.20.0"), config=config)
    assert stated.version is None
    assert facts.value("vllm_version") is None
    (note,) = facts.notes
    assert note == (
        "vllm_version: 0.20.0 from server is ignored, because the page has labels of 0.24.0 or "
        "later"
    )


def test_secrets_of_a_command_line_are_no_facts() -> None:
    line = f"vllm serve {LLAMA} --api-key hunter2 --hf-token=hunter2 --ssl-keyfile hunter2"
    facts, _ = merged(NOTHING, process(line))
    assert "hunter2" not in repr(facts)


def test_a_path_needs_the_configuration_beside_it() -> None:
    path = server(model_path="/models/mine")
    assert merged(NOTHING, path)[1].model is None
    config_reading = SourceReading("config.json", 7.0, model=model(LLAMA))
    facts, stated = merged(NOTHING, path, config_reading)
    assert stated.model == model(LLAMA)
    assert next(fact.source for fact in facts.facts if fact.name == "model") == "config.json"


def test_several_models_on_one_page_have_no_model_in_common() -> None:
    _, stated = merged(NOTHING, server(model_path=LLAMA), models=("chat", "other"))
    assert stated.model is None


def test_a_line_that_may_have_more_flags_has_no_default_degree() -> None:
    _, stated = merged(NOTHING, process(f"vllm serve {LLAMA} --config /etc/vllm.yaml"))
    assert stated.degree is None


def test_what_is_unknown_says_how_to_supply_it() -> None:
    facts, stated = merged(Stated(gpu=gpu("h100-sxm")))
    assert stated == Stated(gpu=gpu("h100-sxm"))
    assert {row.name: row.supply for row in facts.unknown}.keys() == {
        "model",
        "tensor_parallel",
        "vllm_version",
        "launch",
        "replicas",
    }
    assert "--model" in {row.name: row.supply for row in facts.unknown}["model"]


def test_notes_of_sources_are_kept_once() -> None:
    reading = SourceReading("server", 5.0, notes=("GET /version: no",))
    assert merged(NOTHING, reading, reading)[0].notes == ("GET /version: no",)


GPU = gpu("h100-sxm")
LOGGED = {"weights_gib": 15.5, "available_kv_gib": 50.0}


def of_log(**values: Value) -> SourceReading:
    return SourceReading(
        "log", 7.0, values, command_line=parse_command(f"vllm serve {LLAMA}", origin="log")
    )


def test_the_sizing_uses_the_servers_own_weights_and_kv_memory() -> None:
    _, stated = merged(Stated(gpu=GPU), of_log(**LOGGED))
    sized = deployment(CONFIG, stated).sized_launch
    assert sized is not None
    available = memory(sized).available_bytes
    assert (available.low, available.high) == pytest.approx((50 * GIB, 50 * GIB))
    # The same overhead at another utilization: 0.05 of the memory more.
    wider = memory(replace(sized, gpu_memory_utilization=0.95)).available_bytes.expected
    assert wider == pytest.approx(50 * GIB + 0.05 * GPU.memory_bytes)
    predicted = deployment(CONFIG, replace(stated, reported=NOT_REPORTED)).sized_launch
    assert predicted is not None
    assert memory(predicted).available_bytes.expected != pytest.approx(50 * GIB, rel=0.01)


def test_kv_bytes_that_the_user_set_say_nothing_about_the_overhead() -> None:
    config = CONFIG | {"kv_cache_memory_bytes": str(10 * GIB)}
    _, stated = merged(
        Stated(gpu=GPU), of_log(weights_gib=15.5, available_kv_gib=10.0), config=config
    )
    sized = deployment(config, stated).sized_launch
    assert sized is not None
    assert sized.overhead_excess_bytes is None


def test_the_logged_capacity_is_that_of_a_page_without_one() -> None:
    config = {"block_size": "16", "cache_dtype": "auto"}
    _, stated = merged(NOTHING, of_log(kv_cache_size_tokens=12345), config=config)
    assert deployment(config, stated).capacity_tokens == 12345


@pytest.mark.parametrize(
    ("logged", "answered", "of_another_start"),
    [
        ({"num_gpu_blocks": 999}, {}, True),
        ({"num_gpu_blocks": 1000}, {}, False),
        ({"vllm_version": "0.31.0"}, {"vllm_version": "0.32.0"}, True),
        ({"vllm_version": "0.32.0"}, {"vllm_version": "0.32.0"}, False),
        ({"max_model_len": 4096}, {"max_model_len": 8192}, True),
        ({"block_size": 32}, {}, False),
    ],
)
def test_a_log_of_another_start_is_not_used(
    logged: Mapping[str, Value], answered: Mapping[str, Value], *, of_another_start: bool
) -> None:
    facts, stated = merged(NOTHING, of_log(**LOGGED, **logged), server(**answered))
    assert (stated.reported.weights_bytes is None) == of_another_start
    assert any("the log is from another start" in note for note in facts.notes) == of_another_start


@pytest.mark.parametrize(("gpu_id", "noted"), [("a100-80gb", True), ("h100-sxm", False)])
def test_fp8_on_a_gpu_without_its_arithmetic_is_noted(gpu_id: str, noted: bool) -> None:
    line = f"vllm serve {LLAMA} --quantization fp8"
    facts, _ = merged(Stated(gpu=gpu(gpu_id)), process(line))
    assert any("has no FP8 arithmetic" in note for note in facts.notes) == noted
