"""The commands of `size` and of plans: a real vLLM takes every flag and value in them.

`tests/fixtures/serve_flags.json` is what vLLM's own parser takes (tests/lab/serve_flags.py).
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kneewatch.agent.settings.table import SIZE_FLAGS as FLAGS
from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.catalogue.gpu_specs import GIB, gpu
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.catalogue.quantization import schemes
from kneewatch.diagnose.deployment.vllm_flags import effect_of, parse_command
from kneewatch.diagnose.sizing.launch_command import flag_values, sized_command
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.memory.weights import RANKS, Adapters, Draft, Parallel
from kneewatch.diagnose.sizing.plan.workload_profile import example_profile
from tests import plan_choices
from tests.agent.test_size import size

FIXTURE = Path(__file__).parents[2] / "fixtures" / "serve_flags.json"
TAKEN: dict[str, Any] = json.loads(FIXTURE.read_text())["flags"]
LLAMA = Launch(model("meta-llama/Llama-3.1-8B-Instruct"), gpu("h100-sxm"))
BY_CHECKPOINT = {
    "bf16": LLAMA.model,
    "fp8": model("deepseek-ai/DeepSeek-V3"),
    "int4-experts": model("moonshotai/Kimi-K2-Thinking"),
    "mxfp4": model("openai/gpt-oss-120b"),
}


def refused(line: str) -> list[str]:
    """The words of a command that vLLM's parser would refuse."""
    words = shlex.split(line, comments=True)
    assert words[:2] == ["vllm", "serve"]
    assert not words[2].startswith("-"), "the model comes first"
    bad: list[str] = []
    left = words[3:]
    while left:
        flag = left.pop(0)
        row = TAKEN.get(flag)
        if row is None:
            bad.append(flag)
            continue
        if row["takes"] == 0:
            continue
        value = left.pop(0) if left else ""
        if not value or value.startswith("--") or value not in row.get("choices", [value]):
            bad.append(f"{flag} {value}")
    return bad


def test_a_sized_launch() -> None:
    launch = replace(
        LLAMA,
        parallel=Parallel(tensor=2),
        kv_cache_dtype="fp8",
        max_num_seqs=64,
        enforce_eager=True,
    )
    assert sized_command(launch) == (
        "vllm serve meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 2 "
        "--kv-cache-dtype fp8 --max-num-seqs 64 --enforce-eager"
    )


WHOLE = replace(
    LLAMA,
    parallel=Parallel(tensor=2, pipeline=2, data=2, experts=True),
    decode_context_parallel=2,
    quantization="fp8",
    dtype="half",
    kv_cache_dtype="fp8",
    gpu_memory_utilization=0.85,
    kv_cache_memory_bytes=8 * GIB,
    language_model_only=True,
    max_model_len=8192,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    block_tokens=32,
    prefix_caching=False,
    hybrid_pool=False,
    enforce_eager=True,
    cudagraph_capture_sizes=(1, 2, 4),
    max_cudagraph_capture_size=4,
    limit_mm_per_prompt=(("image", 2),),
    cpu_offload_bytes=4.5 * GIB,
    kv_offloading_bytes=16 * GIB,
    adapters=Adapters(8, 16),
    draft=Draft(LLAMA.model, 4),
)


def test_vllm_takes_every_flag_that_a_size_can_set() -> None:
    line = sized_command(WHOLE)
    assert refused(line) == []
    assert line.count(" --") == 27
    assert refused(sized_command(replace(WHOLE, prefix_caching=True))) == []


def test_a_flag_of_size_that_is_vllms_is_in_the_command() -> None:
    """Each of them changes what starts, so the command must not lose it."""
    done = size(
        "vllm serve Qwen/Qwen3-VL-30B-A3B-Instruct --language-model-only --max-model-len 4096 "
        "--kv-cache-memory-bytes 8G --no-enable-prefix-caching", "--gpu", "h100-sxm",
    )  # fmt: skip
    line = next(text for text in done.stdout.splitlines() if text.startswith("run: "))
    words = line.removeprefix("run: ").split()
    sets = {flag.launch for flag in FLAGS if flag.launch} - {"--no-enable-prefix-caching"}
    sets -= {"--cudagraph-capture-sizes"}  # in --compilation-config, which every version has
    assert sets <= set(flag_values(WHOLE)) | {"--enable-prefix-caching"}
    assert {"--language-model-only", "--no-enable-prefix-caching", "8589934592"} <= set(words)


def test_what_every_flag_of_vllm_may_change_is_told() -> None:
    counted = {flag.launch for flag in FLAGS}
    lines = (parse_command(f"vllm serve m {flag} 1", origin="a test") for flag in TAKEN)
    read = {name for line in lines for name in line.flags}
    unknown = effect_of("--such-flag")
    assert [flag for flag in read - counted if effect_of(flag) == unknown] == []
    assert effect_of("--port") == ""
    assert "experts" in effect_of("--no-enable-eplb") == effect_of("--enable-eplb")


@pytest.mark.parametrize("name", schemes())
@pytest.mark.parametrize("checkpoint", BY_CHECKPOINT)
def test_a_scheme_is_a_method_of_vllm_or_a_checkpoint(name: str, checkpoint: str) -> None:
    """vLLM refuses `--quantization nvfp4`: such weights come with their checkpoint."""
    launch = replace(LLAMA, model=BY_CHECKPOINT[checkpoint], quantization=name)
    line = sized_command(launch)
    assert refused(line) == []
    is_own = launch.scheme.id == launch.model.quantization
    loads = name == "fp8" and checkpoint == "bf16"
    assert ("--quantization" in line) == loads
    assert ("# needs a checkpoint in" in line) == (not is_own and not loads)


@pytest.mark.parametrize(
    ("version", "tensor", "loads"),
    [
        pytest.param((0, 14, 0), 1, False, id="141 GB first, on 85 GB"),
        pytest.param((0, 14, 0), 4, True, id="35 GB first"),
        pytest.param((0, 15, 0), 1, True, id="layer by layer"),
    ],
)
def test_weights_are_quantized_at_load_where_they_fit_meanwhile(
    version: tuple[int, int, int], tensor: int, loads: bool
) -> None:
    served = model("meta-llama/Llama-3.3-70B-Instruct")
    setup = replace(LLAMA, model=served, quantization="fp8", version=version)
    line = sized_command(replace(setup, parallel=Parallel(tensor=tensor)))
    assert ("--quantization fp8" in line) == loads
    assert line.endswith("# needs a checkpoint in fp8") != loads


def test_vllm_takes_the_caches_and_ranks_that_are_sized() -> None:
    formats = packaged_tables("diagnose.sizing.memory", "kv_formats.toml")
    lines = [sized_command(replace(LLAMA, kv_cache_dtype=name)) for name in formats]
    lines += [sized_command(replace(LLAMA, adapters=Adapters(2, rank))) for rank in RANKS]
    assert [words for line in lines for words in refused(line)] == []


@pytest.mark.parametrize("seed", range(24))
def test_vllm_takes_the_launch_of_a_plan(seed: int) -> None:
    text = example_profile() if seed == 0 else plan_choices.profile_text(seed)
    found = plan_choices.planned(text)
    if found is None:
        return
    lines = [str(v) for k, v in found.step(13).output.items() if k.endswith("launch")]
    assert lines
    assert [words for line in lines for words in refused(line)] == []
