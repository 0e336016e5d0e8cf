"""What is known about a server from its page."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.deployment.deployment import Stated, deployment
from kneewatch.diagnose.deployment.vllm_flags import parse_command
from kneewatch.diagnose.recommend.demand import demand
from tests.diagnose.recommend.scenes import FULL, LLAMA, PAGE
from tests.diagnose.streams import bodies, pages_config


def test_a_real_page() -> None:
    server = deployment(pages_config("kv_pressure_cascade"))
    assert (server.launch.block_tokens, server.blocks, server.blocks_override) == (32, 160, 160)
    assert server.capacity_tokens == 159 * 32
    assert server.launch.max_model_len == 2048  # 5,120 tokens at a concurrency of 2.5
    assert server.kv_memory_bytes == 2**30
    assert server.launch.prefix_caching is True
    assert server.version == (0, 24, 0)  # the labels say so much
    assert bodies("kv_pressure_cascade")


def test_an_empty_page_says_nothing() -> None:
    server = deployment({})
    assert server.capacity_tokens is None
    assert server.launch.max_num_seqs is None
    assert server.usd_per_hour is None


@pytest.mark.parametrize("text", ["None", "", "nan", "-3", "inf", "many"])
def test_labels_that_are_no_numbers(text: str) -> None:
    assert deployment({**PAGE, "num_gpu_blocks": text}).blocks is None


def test_the_command_line_fills_what_the_page_lacks() -> None:
    launch = parse_command("vllm serve m --max-num-seqs 64 -tp 4", origin="f")
    server = deployment(PAGE, Stated(command_line=launch, usd_per_gpu_hour=2.0))
    assert (server.launch.max_num_seqs, server.stated.degree, server.usd_per_hour) == (64, 4, 8.0)


@pytest.mark.parametrize(
    ("flags", "flag", "value"),
    [
        ("--max-loras 4", "--max-loras", 4),
        ("--block-size 32", "--block-size", 32),
        ("--max-num-seqs 64", "--max-num-seqs", 64),
        ("--async-scheduling", "--async-scheduling", ""),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype", None),
        ("", "--max-loras", None),
        ("", "--of-no-vllm", None),
    ],
)
def test_every_flag_of_the_command_line_is_in_force(flags: str, flag: str, value: object) -> None:
    launch = parse_command(f"vllm serve m {flags}", origin="f")
    assert (deployment({}, Stated(command_line=launch)).in_force(flag) or None) == (value or None)


def test_a_label_of_the_page_is_in_force() -> None:
    page = {"kv_offloading_size": "8.0", "gpu_memory_utilization": "0.8"}
    stated = Stated(
        command_line=parse_command("vllm serve m --gpu-memory-utilization 0.9", origin="f")
    )
    server = deployment(page, stated)
    assert server.in_force("--kv-offloading-size") == 8
    assert server.in_force("--gpu-memory-utilization") == 0.8
    assert deployment({}, stated).in_force("--gpu-memory-utilization") == 0.9


def test_defaults_count_only_where_the_whole_command_line_is_known() -> None:
    launch = parse_command("vllm serve m", origin="f")
    stated = Stated(command_line=launch, gpu=LLAMA.gpu, version=(0, 32, 0))
    assert deployment(PAGE, stated).launch.max_num_seqs == 1024
    assert deployment(PAGE, Stated(gpu=LLAMA.gpu, version=(0, 32, 0))).launch.max_num_seqs is None


def test_a_model_gives_the_layout() -> None:
    server = deployment(PAGE, LLAMA)
    assert server.layout is not None
    assert server.layout.block_bytes == 16 * 131_072
    assert deployment(PAGE, Stated(model=LLAMA.model)).layout is None  # of how many GPUs?


@pytest.mark.parametrize(("flags", "has_tower"), [("", True), ("--language-model-only", False)])
def test_a_server_without_its_tower_is_sized_without_it(flags: str, has_tower: bool) -> None:
    seeing = replace(
        LLAMA,
        model=model("Qwen/Qwen3-VL-30B-A3B-Instruct"),
        command_line=parse_command(f"vllm serve m {flags}", origin="f"),
    )
    launch = deployment(PAGE, seeing).sized_launch
    assert launch is not None
    assert launch.model.multimodal == has_tower


def test_a_full_cache_does_not_hide_the_demand() -> None:
    wanted = demand(FULL.values, deployment(PAGE))
    assert wanted.held_tokens == 1600  # 160,000 tokens, 100 requests
    assert wanted.requests == 160
    assert wanted.tokens == 256_000


def test_lengths_count_where_the_gauge_shows_less() -> None:
    values = {**FULL.values, "kv_usage_avg_ratio": 0.5}
    assert demand(values, deployment(PAGE)).held_tokens == 1200 + 784 / 2 + 8


def test_a_request_with_windows_takes_the_blocks_that_it_keeps_in_decode() -> None:
    """gpt-oss: 100 blocks of 16 tokens where attention is full, 9 for a window of 128 tokens."""
    server = deployment(PAGE, replace(LLAMA, model=model("openai/gpt-oss-20b")))
    wanted = demand({**FULL.values, "kv_usage_avg_ratio": 0.1}, server).held_tokens
    assert wanted == pytest.approx(109 / 10_001 * 160_000)


def test_shared_prefixes_take_less_than_lengths_say() -> None:
    values = {**FULL.values, "kv_usage_avg_ratio": 0.5, "prefix_saved_ratio": 0.6}
    assert demand(values, deployment(PAGE)).held_tokens == 800


def test_arrivals_are_those_served_and_those_that_queue_up() -> None:
    values = {**FULL.values, "completed_per_s": 8.0, "waiting_slope_per_s": 6.0}
    assert demand(values, deployment(PAGE)).arrival_per_s == 14


def test_every_format_of_a_running_servers_cache_is_judged() -> None:
    stated = replace(LLAMA, gpu=gpu("b200"))
    for dtype in ("nvfp4", "int8_per_token_head", "turboquant_4bit_nc"):
        server = deployment({**PAGE, "cache_dtype": dtype}, stated)
        assert server.kv_is_quantized
        assert server.layout is not None
        assert not server.misfit
    unknown = deployment({**PAGE, "cache_dtype": "of_next_year"}, stated)
    assert (unknown.layout, unknown.misfit) == (None, "")
