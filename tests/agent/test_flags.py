"""Each row of flags.toml is read from a command line, and reaches sizing, help and HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct, convert
from msgspec.structs import fields as fields_of
from msgspec.structs import replace

from kneewatch.agent.api.openapi import size_inputs
from kneewatch.agent.cli import size_command
from kneewatch.agent.settings.effective import load
from kneewatch.agent.settings.table import SIZE_FLAGS as OF_SIZE
from kneewatch.agent.size_command import ignored_flags, sized, stated_question, with_launch
from kneewatch.agent.stated_deployment import stated
from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.deployment.deployment import Stated, deployment
from kneewatch.diagnose.deployment.server_facts import launch_values, merge
from kneewatch.diagnose.deployment.vllm_flags import (
    FLAGS,
    VLLM,
    CommandLine,
    Flag,
    command_values,
    parse_command,
)
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.memory.weights import Adapters, Parallel
from kneewatch.diagnose.sizing.plan.thirteen_steps import plan
from kneewatch.diagnose.sizing.plan.workload_profile import read_profile
from tests.diagnose.workloads import SMALLEST

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
TEXTS = {"text": "fp8", "bytes": "8G", "sizes": "1 2 4", "limits": "image=2"}
VALUES = {"count": "3", "number": "0.5", "gib": "2", "switch": "", **TEXTS}
READ = {"count": 3, "number": 0.5, "gib": 2, "switch": True, **TEXTS}
UNSET = {flag.parameter: flag.default for flag in OF_SIZE}


def launched(name: str, flag: Flag) -> CommandLine:
    """A command line with a flag, by one of its spellings."""
    return parse_command(f"vllm serve m {name} {VALUES[flag.kind]}".strip(), origin="test")


@pytest.mark.parametrize("flag", VLLM.values(), ids=lambda flag: flag.launch)
def test_a_row_is_read_from_a_command_line_and_counted_or_named(flag: Flag) -> None:
    for name in (flag.launch, *flag.short):
        launch = launched(name, flag)
        assert flag.read(launch) == READ[flag.kind]
        assert bool(ignored_flags(launch)) != bool(flag.help) or not flag.may_change
    is_read = flag.help or flag.since or flag.shown or flag.may_change or flag.printed or flag.until
    is_checked = flag.needs or flag.excludes or flag.keys or flag.members or flag.lengthens
    is_checked = is_checked or flag.least is not None
    assert is_read or is_checked, "the row has no use"


@pytest.mark.parametrize("flag", VLLM.values(), ids=lambda flag: flag.launch)
def test_a_row_can_be_stated_over_the_command_line(flag: Flag, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"vllm serve m {flag.launch} 7 --port 1\n")
    own = {flag.launch.removeprefix("--"): VALUES[flag.kind]}
    given = {"launch_file": str(script), "launch_flags": own}
    command = stated(load(file=None, flags=given, environ={})).command
    assert flag.read(command) == READ[flag.kind]


@pytest.mark.parametrize("flag", OF_SIZE, ids=lambda flag: flag.name)
def test_a_row_of_size_is_in_help_http_and_the_launch(flag: Flag) -> None:
    assert flag.parameter in {option.name for option in size_command.params}
    assert flag.names_file != (flag.parameter in size_inputs()["properties"])
    if flag.launch and flag.parameter not in ("max_loras", "max_lora_rank"):
        text, read = VALUES[flag.kind], READ[flag.kind]
        if flag.choices and text not in flag.choices.split():
            text = read = flag.choices.split()[-1]
        given = with_launch(UNSET | {"launch": f"vllm serve m {flag.launch} {text}"})
        assert given[flag.parameter] == read
    if flag.field:
        place, _, name = flag.field.rpartition(".")
        records: dict[str, type[Struct]] = {
            "": Launch,
            "parallel": Parallel,
            "adapters": Adapters,
        }
        assert name in {field.name for field in fields_of(records[place])}


IN_PROFILE = READ | {"seconds": 0.5}


@pytest.mark.parametrize("flag", [flag for flag in OF_SIZE if flag.profile_key])
def test_a_row_of_the_launch_has_a_key_in_a_profile(flag: Flag) -> None:
    value = ["h200"] if flag.name == "--gpu" else IN_PROFILE[flag.kind]
    table, _, key = flag.profile_key.partition(".")
    record: Any = getattr(read_profile(SMALLEST, stated={table: {key: value}}), table)
    read = getattr(record, key, None) or record.flags[flag.parameter]
    assert read == (tuple(value) if isinstance(value, list) else value)


ON_THE_PLAN = {
    "gpu_memory_utilization": ("0.8", 0.8),
    "max_num_batched_tokens": ("4096", 4096),
    "enforce_eager": ("true", True),
    "block_size": ("32", 32),
    "kv_cache_memory_bytes": ('"20G"', 20 * 2**30),
}


@pytest.mark.parametrize("key", ON_THE_PLAN)
def test_a_plan_takes_every_flag_of_the_launch(key: str) -> None:
    text, value = ON_THE_PLAN[key]
    fleet = plan(read_profile(f"{SMALLEST}{key} = {text}\n"))
    launch = parse_command(str(fleet.step(13).output["launch"]), origin="test")
    assert command_values(launch)[key] in (value, f"{value}")


SIZED = (
    "--quantization fp8",
    "--kv-cache-dtype fp8",
    "--gpu-memory-utilization 0.7",
    "--max-model-len 4096",
    "--max-num-seqs 64",
    "--max-num-batched-tokens 4096",
    "--cpu-offload-gb 2",
    "--kv-offloading-size 8",
    "--limit-mm-per-prompt image=2",
    "--cudagraph-capture-sizes 1 2 4",
    "--max-cudagraph-capture-size 64",
    """--compilation-config '{"cudagraph_capture_sizes": [1, 2]}'""",
    "--block-size 32",
    "--enable-lora",
    "--enable-lora --max-loras 4 --max-lora-rank 64",
    "--enforce-eager",
    "--no-enable-prefix-caching",
    "--enable-prefix-caching",
    "--disable-hybrid-kv-cache-manager",
    "-dcp 1 -tp 2",
)


@pytest.mark.parametrize("flags", SIZED)
def test_size_and_a_live_server_read_a_command_line_alike(flags: str) -> None:
    text = f"vllm serve {MODEL} {flags}"
    asked = stated_question(with_launch(UNSET | {"launch": text, "gpu": "h100-sxm"}), model).launch
    command_line = parse_command(text, origin="test")
    stated = Stated(model=model(MODEL), gpu=gpu("h100-sxm"), command_line=command_line)
    live = deployment({}, replace(stated, tensor_parallel=asked.parallel.tensor)).sized_launch
    assert live is not None
    assert replace(live, model=asked.model) == replace(asked, other_flags=())
    assert asked != Launch(asked.model, asked.gpu)


def test_a_live_server_is_sized_with_what_its_page_says() -> None:
    text = f"vllm serve {MODEL} -tp 1 --enable-prefix-caching --gpu-memory-utilization 0.7"
    command_line = parse_command(text, origin="test")
    stated = Stated(model=model(MODEL), gpu=gpu("h100-sxm"), command_line=command_line)
    page = {"enable_prefix_caching": "False", "gpu_memory_utilization": "0.8", "cache_dtype": "fp8"}
    page |= {"kv_offloading_size": "8.0", "block_size": "32"}
    launch = deployment(page, stated).sized_launch
    assert launch is not None
    assert (launch.prefix_caching, launch.utilization, launch.kv_cache_dtype) == (False, 0.8, "fp8")
    assert (launch.kv_offloading_bytes, launch.block_tokens) == (8 * 2**30, 32)


def test_the_document_has_the_flags_and_no_secrets() -> None:
    text = f"vllm serve {MODEL} -tp 2 --enforce-eager --api-key secret --load-format dummy"
    answer = sized(UNSET | {"launch": text, "gpu": "h100-sxm"}).document()
    assert answer["inputs"]["flags"] == {
        "--tensor-parallel-size": 2, "--enforce-eager": True, "--load-format": "dummy"
    }  # fmt: skip


def test_facts_are_those_of_rows_that_are_shown() -> None:
    words = " ".join(
        f"{name} {VALUES[flag.kind]}"
        for name, flag in VLLM.items()
        if not name.startswith("--no-")  # contradicts the other
    )
    facts = launch_values(parse_command(f"vllm serve m {words} --api-key x", origin="test"))
    shown = {flag.launch for flag in FLAGS if flag.launch and (flag.shown or flag.help)}
    assert "kv_transfer_config" not in facts
    assert "api_key" not in facts
    assert {"cpu_offload_gb", "async_scheduling"} <= facts.keys()
    assert len(facts) <= len(shown) + 1


def test_a_row_with_an_unknown_column_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown"):
        convert({"name": "--x", "helps": "?"}, Flag)


def test_a_flag_with_a_label_is_a_fact_of_the_page() -> None:
    stated = {flag.parameter: flag.label for flag in VLLM.values() if flag.label}
    config = dict.fromkeys(stated.values(), "7")
    facts, _ = merge(Stated(), [], config=config, model_names=(), settings_s=0.0, page_s=0.0)
    on_page = {fact.name for fact in facts.facts if fact.source == "page"}
    assert {"kv_offloading_size", "kv_cache_dtype", "num_gpu_blocks_override"} <= on_page
    assert on_page == stated.keys() - {"no_enable_prefix_caching"}
