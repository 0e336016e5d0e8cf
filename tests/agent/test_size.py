"""`kneewatch size` as its user types it."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import pytest

from kneewatch.agent import cli
from kneewatch.diagnose.sizing.plan.workload_profile import example_profile
from kneewatch.diagnose.sizing.speed.roofline_inputs import DEFAULT
from kneewatch.reports.json_schemas import schema as schema_of
from tests.waiting import PATIENCE_S

SCHEMA = schema_of("size")
LLAMA = ("--model", "meta-llama/Llama-3.3-70B-Instruct", "--gpu", "h100-sxm")


def size(
    *flags: str, home: Path | None = None, brief: bool = False
) -> subprocess.CompletedProcess[str]:
    """The command with those flags, run in this process, with its arithmetic."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    environ = patch.dict(os.environ, environment(home), clear=True)
    ends = pytest.raises(SystemExit)
    with environ, redirect_stdout(out), redirect_stderr(err), ends as exited:
        cli.main(["size", *([] if brief else ["--explain"]), *flags])
    assert isinstance(exited.value.code, int)
    texts = list[str]()
    for stream in (out, err):
        stream.seek(0)
        texts.append(stream.read())
    return subprocess.CompletedProcess(flags, exited.value.code, *texts)


def environment(home: Path | None = None) -> dict[str, str]:
    """The environment of the command."""
    return {"PATH": "/usr/bin:/bin", "HOME": str(home or "/nonexistent")}


def document(*flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status and the validated JSON."""
    done = size(*flags, "--format", "json")
    answer = json.loads(done.stdout)
    jsonschema.validate(answer, SCHEMA)
    return done.returncode, answer


def test_what_fits_exits_0_and_shows_its_arithmetic() -> None:
    done = size(*LLAMA, "--tp", "4", "--max-model-len", "32768")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("FITS: holds ")
    assert "80 x 2 x (128 + 128) x 2" in done.stdout
    assert "81,920 B on each GPU" in done.stdout
    assert "one GPU, 79.18 GiB: [###" in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (
            (
                *LLAMA,
                "--tp",
                "4",
                "--concurrency",
                "8",
                "--input-tokens",
                "9",
                "--output-tokens",
                "9",
            ),
            0,
        ),
        (("--plan", "example"), 0),
    ],
    ids=["launch", "plan"],
)
def test_without_explain_the_answer_is_ten_lines_and_the_command(
    flags: tuple[str, ...], status: int
) -> None:
    done = size(*flags, brief=True)
    lines = done.stdout.splitlines()
    assert done.returncode == status
    assert len(lines) <= 12
    assert any("vllm serve meta-llama/Llama-3.3-70B-Instruct" in line for line in lines)
    assert "arithmetic: --explain" in lines[-1]
    whole = size(*flags).stdout
    assert all(line in whole for line in lines[:-1])
    assert len(whole.splitlines()) > 2 * len(lines)


def test_a_process_of_its_own_prints_the_same() -> None:
    flags = (*LLAMA, "--max-model-len", "8192", "--format", "json")
    command = [sys.executable, "-m", "kneewatch.agent.cli", "size", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=environment()
    )
    here = size(*flags)
    assert (done.returncode, done.stdout, done.stderr) == (1, here.stdout, here.stderr)


def test_what_does_not_fit_exits_1_and_says_how_many_gpus_would() -> None:
    status, answer = document(*LLAMA, "--max-model-len", "8192")
    assert status == 1
    assert answer["fits"] is answer["memory"]["fits"] is False
    assert answer["memory"]["kv_available_bytes_per_gpu"]["expected"] < 0
    assert answer["min_gpus"] == 2


def test_the_guides_fleet_is_52_gpus() -> None:
    status, answer = document(
        *LLAMA, "--tp", "4", "--quantization", "fp8", "--context", "1200", "--concurrency", "48",
        "--peak-rps", "120", "--usable-rps", "12", "--safety", "1.3",
        "--usd-per-gpu-hour", "3", "--input-tokens", "1000", "--output-tokens", "200",
    )  # fmt: skip
    assert status == 0
    assert answer["fleet"] == {
        "instances": 10, "deployed_instances": 13, "gpus": 52, "headroom_ratio": 0.3
    }  # fmt: skip
    assert answer["cost"]["usd_per_year"] == 52 * 3 * 8760
    assert answer["performance"]["itl_s"] > 0


def test_stated_kv_needs_no_gpu() -> None:
    status, answer = document(
        "--model", "openai/gpt-oss-120b", "--tp", "4", "--available-kv-gib", "45.32",
        "--max-model-len", "16384", "--max-num-batched-tokens", "2048", "--vllm-version", "0.10.1",
    )  # fmt: skip
    assert status == 0
    assert answer["memory"]["max_concurrency"]["expected"] == pytest.approx(284.25, rel=1e-3)
    assert answer["memory"]["kv_capacity_tokens"]["expected"] == pytest.approx(2_640_144, rel=1e-3)
    assert answer["memory"]["weights_bytes_per_gpu"] is None


def test_context_ranks_are_sized() -> None:
    status, answer = document(
        "--model", "moonshotai/Kimi-K2-Instruct", "--gpu", "b200", "--tp", "8", "--dcp", "8",
        "--input-tokens", "1000", "--output-tokens", "100",
    )  # fmt: skip
    assert status == 0
    assert answer["inputs"]["decode_context_parallel"] == 8
    assert any("--dcp" in note for note in answer["notes"])


CHAT = ("--input-tokens", "1000", "--output-tokens", "200", "--concurrency", "64")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param(("--gpu", "l40s", "--tp", "4"), "runs over PCIe", id="5.6: PCIe"),
        pytest.param(
            ("--gpu", "h100-sxm", "--tp", "4", "--gpu-memory-utilization", "0.97"),
            "leaves 3% for spikes",
            id="2.6",
        ),
        pytest.param(
            ("--gpu", "a100-80gb", "--tp", "2", "--quantization", "fp8"),
            "no FP8 arithmetic",
            id="9.5",
        ),
        pytest.param(("--gpu", "h100-sxm", "--tp", "4", "--pp", "2"), "stages are idle", id="5.2"),
        pytest.param(
            ("--gpu", "h100", "--tp", "16"),
            "on 2 nodes, and every all-reduce crosses infiniband-ndr",
            id="5.6",
        ),
        pytest.param(
            ("--gpu", "h100-sxm", "--tp", "8", "--pp", "2", "--network", "ethernet-100"),
            "every step crosses ethernet-100: measure its latency, which TCP makes longer",
            id="5.5",
        ),
        pytest.param(("--gpu", "h100", "--tp", "4"), "h100 is taken as h100-sxm", id="a variant"),
        pytest.param(
            ("--gpu", "h100-sxm", "--tp", "4", "--peak-rps", "120", "--usable-rps", "12"),
            "exceed the predicted",
            id="8.3: above the prediction",
        ),
    ],
)
def test_a_launch_that_the_guide_warns_of_is_noted(flags: tuple[str, ...], expected: str) -> None:
    _, answer = document("--model", "meta-llama/Llama-3.3-70B-Instruct", *CHAT, *flags)
    assert any(expected in note for note in answer["notes"])


def test_expert_parallelism_shows_what_its_gpus_exchange() -> None:
    launch = ("--model", "deepseek-ai/DeepSeek-V3", "--gpu", "h200", "--tp", "8")
    _, spread = document(*launch, *CHAT, "--expert-parallel")
    assert any("all-to-all" in step["title"] for step in spread["steps"])
    assert any("busiest GPU computes 1.36 times" in note for note in spread["notes"])
    _, dense = document(*launch, *CHAT)
    assert not any("all-to-all" in step["title"] for step in dense["steps"])


def test_a_launch_says_what_binds_decode_and_from_which_batch_compute_would() -> None:
    llama = ("--model", "meta-llama/Llama-3.3-70B-Instruct", "--gpu", "h100-sxm", "--tp", "4")
    _, answer = document(*llama, *CHAT)
    speed = answer["performance"]
    assert speed["ridge_flop_per_byte"] == pytest.approx(989 / 3.35, rel=1e-3)
    # 2 x 70.6e9 x 64 over 139 GB and 64 x 1,100 tokens of 327,680 bytes: 54 FLOP per byte.
    assert speed["decode_flop_per_byte"] == pytest.approx(54.1, rel=0.01)
    assert 900 < speed["batch_at_ridge"] < 1500


def test_cost_per_token_is_at_the_peaks_utilization_or_the_stated_average() -> None:
    fleet = (
        *("--model", "meta-llama/Llama-3.3-70B-Instruct", "--gpu", "h100-sxm", "--tp", "4"),
        *(*CHAT, "--peak-rps", "100", "--usable-rps", "5"),
    )
    _, peak = document(*fleet)
    _, half = document(*fleet, "--utilization", "0.5")
    # 20 instances x 1.3 are 26, which 100 of 130 requests/s keep busy.
    assert peak["cost"]["utilization_ratio"] == pytest.approx(100 / 130, rel=1e-3)
    assert "at the peak" in peak["cost"]["utilization_source"]
    assert half["cost"]["utilization_source"] == "the stated average"
    ratio = (
        half["cost"]["usd_per_million_output_tokens"]
        / (peak["cost"]["usd_per_million_output_tokens"])
    )
    assert ratio == pytest.approx(100 / 130 / 0.5, rel=1e-3)


def test_gpus_and_cost_come_before_the_arithmetic() -> None:
    text = size(
        *("--model", "meta-llama/Llama-3.3-70B-Instruct", "--gpu", "h100-sxm", "--tp", "4"),
        *(*CHAT, "--peak-rps", "100"),
    ).stdout
    assert text.index("USD a year, ") < text.index("one GPU, ") < text.index("Decode step:")


def test_what_a_replica_serves_within_the_targets_is_said_beside_the_replicas() -> None:
    """The speed of one request in flight says nothing of a fleet."""
    asked = (
        *("--model", "Qwen/Qwen3-8B", "--gpu", "l4", "--max-model-len", "8192"),
        *("--input-tokens", "500", "--output-tokens", "200", "--peak-rps", "5"),
    )
    text = " ".join(size(*asked, "--ttft-slo", "1s").stdout.split())
    assert re.search(
        r"Predicted usable within the targets \(means, not P99\), for one replica: "
        r"[\d.]+ requests/s with \d+ in flight; (\d) replicas with a safety factor of 1.3 "
        r"\(TTFT predicted up to [\d.]+ ms for a target of 1 s\)",
        text,
    )
    alone = size(*asked, "--ttft-slo", "1s", "--concurrency", "8").stdout
    assert "Predicted usable" not in alone


@pytest.mark.parametrize("model", ["Qwen/Qwen3-32B", "vllm serve Qwen/Qwen3-32B --enforce-eager"])
def test_a_rate_with_targets_and_no_split_names_the_search_that_can_be_pasted(model: str) -> None:
    asked = (
        *(model, "--gpu", "h100-sxm", "--input-tokens", "1000", "--output-tokens"),
        *("200", "--rate", "20", "--slo-ttft", "2s", "--slo-itl", "50ms"),
    )
    said = "--search compares splits and precisions: kneewatch "
    text = " ".join(size(*asked).stdout.split()[:90])
    assert said in text
    command = shlex.split(text.partition(said)[2].partition(" With ")[0])
    assert command[0] == "size"
    assert size(*command[1:]).stdout == size(*asked, "--search").stdout
    for stated in (("--tp", "2"), ("--search",), ("--concurrency", "8")):
        assert said not in " ".join(size(*asked, *stated).stdout.split())


def test_the_length_of_requests_is_no_limit_of_the_launch_and_said_so() -> None:
    launch = ("meta-llama/Llama-3.3-70B-Instruct", "--gpu", "h100-sxm", "--tp", "2")
    text = " ".join(size(*launch, "--context", "4096").stdout.split())
    assert "131,072 tokens, the default of --max-model-len, which --context and" in text
    assert "Fewest GPUs for one replica without such a change, at --max-model-len 131072: 4" in text
    stated = " ".join(size(*launch, "--max-model-len", "4096").stdout.split())
    assert "FITS" in stated
    assert "Fewest GPUs for one replica: 2" in stated


def test_the_latencies_at_a_rate_are_those_of_its_share_on_each_replica() -> None:
    asked = ("--model", "Qwen/Qwen3-8B", "--gpu", "l4", "--max-model-len", "8192",
             "--input-tokens", "500", "--output-tokens", "200")  # fmt: skip
    _, answer = document(*asked, "--slo-ttft", "1s", "--rate", "5")
    replicas, speed = answer["fleet"]["deployed_instances"], answer["performance"]
    _, loop = document(*asked, "--concurrency", str(speed["running_peak"]))
    assert loop["performance"]["requests_per_s"] == pytest.approx(5 / replicas, rel=0.01)
    assert loop["performance"]["itl_s"] == pytest.approx(speed["itl_peak_s"], rel=0.01)
    assert loop["performance"]["ttft_s"] == pytest.approx(speed["ttft_peak_s"], rel=0.01)
    assert speed["ttft_peak_s"] < 1


def test_a_rate_that_is_not_served_says_how_many_replicas_it_takes() -> None:
    asked = ("--model", "Qwen/Qwen3-8B", "--gpu", "l4", "--max-model-len", "8192",
             "--input-tokens", "500", "--output-tokens", "200")  # fmt: skip
    text = " ".join(size(*asked, "--rate", "50").stdout.split())
    said = re.search(
        r"At 50 requests/s on 1 replica: NOT SERVED, ([\d.]+) requests/s at most. Without a target "
        r"it takes (\d+) replicas or more \(\2 GPUs\) with a safety factor of 1.3",
        text,
    )
    assert said
    assert (int(said[2]) - 1) * float(said[1]) * 0.98 <= 65 <= int(said[2]) * float(said[1]) * 1.02


def test_a_rate_is_answered_with_the_fewest_gpus_where_the_launch_does_not_start() -> None:
    asked = ("--model", "meta-llama/Llama-3.3-70B-Instruct", "--gpu", "h100-sxm")
    load = (*CHAT[:4], "--peak-rps", "20", "--ttft-slo", "1s")
    alone, split = size(*asked, *load), size(*asked, *load, "--tp", "4")
    assert alone.returncode == 1
    replicas = r"in flight; (\d+ replicas with a safety factor of 1.3)"
    texts = [" ".join(done.stdout.split()) for done in (alone, split)]
    found = [re.findall(replicas, text) for text in texts]
    assert found[0] == found[1] != []
    assert "With 4 GPUs each: At 20 requests/s on" in texts[0]
    assert "With 4 GPUs each" not in texts[1]


def test_stated_replicas_are_told_from_those_of_the_peak() -> None:
    peak = ("--gpus", "8", "--peak-rps", "40", "--usable-rps", "6")
    text = " ".join(size(*LLAMA, "--tp", "4", "--max-model-len", "8192", *peak).stdout.split())
    assert "on 2 replicas, each 4 x NVIDIA H100" in text
    assert "10 replicas, 40 GPUs for the peak: " in text
    assert "the peak can grow by 50%" in text


def test_a_stated_kv_cache_has_no_other_estimate_beside_it() -> None:
    done = size(*LLAMA, "--tp", "4", "--max-model-len", "8192", "--available-kv-gib", "30")
    assert "Fewest GPUs" not in done.stdout


def test_gpus_beyond_one_replica_make_more_of_them() -> None:
    _, answer = document(*LLAMA, "--tp", "4", "--gpus", "8", "--max-model-len", "8192")
    assert answer["inputs"]["replicas"] == 2
    assert answer["cost"]["gpus"] == 8


@pytest.mark.parametrize(
    ("flags", "hints"),
    [
        (("--model", "lama-3", "--gpu", "h100-sxm"), ("--list-models", "config.json")),
        (("--model", "Llama-3.3-70B-Instruct", "--gpu", "h1000"), ("--gpu", "h100-sxm")),
        ((*LLAMA, "--tp", "3"), ("--tensor-parallel", "choices: 1, 2, 4")),
        ((*LLAMA, "--tp", "0"), ("--tensor-parallel",)),
        ((*LLAMA, "--gpus", "6", "--tp", "4"), ("--gpus", "choices: 4, 8")),
        ((*LLAMA, "--kv-cache-dtype", "fp3"), ("--kv-cache-dtype", "fp8")),
        ((*LLAMA, "--quantization", "q4_k_m"), ("--quantization", "awq")),
        ((*LLAMA, "--gpu-memory-utilization", "9"), ("--gpu-memory-utilization",)),
        ((*LLAMA, "--max-model-len", "-1"), ("--max-model-len",)),
        ((*LLAMA, "--concurrency", "nan"), ("--concurrency",)),
        ((*LLAMA, "--overhead", "none"), ("--overhead", "guide")),
        ((*LLAMA, "--weights-gib", "-3"), ("--weights-gib",)),
        (
            (*LLAMA, "--safety", "0.2"),
            ("--safety", "from 1 to 10"),
        ),
        ((*LLAMA, "--utilization", "0"), ("--utilization",)),
        ((*LLAMA, "--input-tokens", "100"), ("--output-tokens",)),
        ((*LLAMA, "--vllm-version", "new"), ("--vllm-version", "0.20.1")),
        (("--gpu", "h100-sxm"), ("--model",)),
        (("--model", "Llama-3.3-70B-Instruct"), ("--gpu",)),
        (("--model", "/nowhere/config.json"), ("--model", "/nowhere/config.json")),
        ((*LLAMA, "--max-loras", "0"), ("--max-loras",)),
        ((*LLAMA, "--max-lora-rank", "16"), ("--max-loras",)),
        ((*LLAMA, "--max-loras", "2", "--max-lora-rank", "24"), ("--max-lora-rank", "16, 32")),
        ((*LLAMA, "--draft-model", "Llama-3.2-1B"), ("--num-speculative-tokens",)),
        ((*LLAMA, "--num-speculative-tokens", "3"), ("--draft-model", "n-gram")),
        (
            (*LLAMA, "--draft-model", "no-such-model", "--num-speculative-tokens", "3"),
            ("--draft-model", "config.json"),
        ),
        (
            (*LLAMA, "--draft-model", "mtp", "--num-speculative-tokens", "1"),
            ("--draft-model", "no MTP layers"),
        ),
        ((*LLAMA, "--acceptance", "0.7"), ("--acceptance", "needs a draft model")),
        ((*LLAMA, "--mfu", "1.5"), ("--mfu", "from 0.001 to 1")),
        ((*LLAMA, "--mbu", "0"), ("--mbu", "above 0")),
        ((*LLAMA, "--mbu", "nan"), ("--mbu",)),
    ],
)
def test_bad_input_names_the_flag_and_the_way_out(
    flags: tuple[str, ...], hints: tuple[str, ...]
) -> None:
    done = size(*flags)
    assert done.returncode == 2
    assert done.stdout == ""
    for words in hints:
        assert words in done.stderr
    assert "Traceback" not in done.stderr


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip


def test_a_model_is_read_from_a_file_a_folder_and_the_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / ".cache/huggingface/hub/models--me--mine/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    for name in (str(snapshot / "config.json"), str(snapshot), "me/mine"):
        done = size("--model", name, "--gpu", "h100-sxm", "--max-model-len", "16000", home=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "14.99 GiB" in done.stdout


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"model_type": "llama"}', "\x00", "[" * 100_000])
def test_a_bad_configuration_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    done = size("--model", str(path), "--gpu", "h100-sxm")
    assert done.returncode == 2
    assert "--model" in done.stderr
    assert "Traceback" not in done.stderr


def test_markdown_is_a_table() -> None:
    done = size(*LLAMA, "--tp", "4", "--format", "markdown")
    assert done.stdout.startswith("# FITS")
    assert "| step | formula | values | result | source |" in done.stdout


LOAD = ("--input-tokens", "1000", "--output-tokens", "200", "--ttft-slo", "2s", "--itl-slo", "50ms")


def test_the_search_answers_with_the_cheapest_launch_and_why() -> None:
    status, answer = document(*LLAMA, "--search", *LOAD, "--peak-rps", "120")
    assert status == 0
    best = answer["search"]["best"]
    assert best[0]["usd_per_hour"] <= best[1]["usd_per_hour"]
    assert answer["inputs"]["gpu"] == best[0]["gpu"] == "h100-sxm"
    assert answer["inputs"]["tensor_parallel"] == best[0]["tensor_parallel"]
    assert answer["fleet"]["gpus"] == best[0]["gpus"]
    assert answer["performance"]["itl_s"] <= 0.05
    assert any(each["configurations"] for each in answer["search"]["rejections"])


def test_a_search_that_finds_nothing_exits_1_and_says_why() -> None:
    load = [*LOAD[:-1], "1ms"]
    status, answer = document(*LLAMA, "--search", *load)
    assert status == 1
    assert answer["search"]["best"] == []
    assert answer["memory"] is None
    assert any("ITL" in each["reason"] for each in answer["search"]["rejections"])
    done = size(*LLAMA, "--search", *load)
    assert "Why other configurations fail" in done.stdout


def test_the_example_plan_has_the_guides_thirteen_steps() -> None:
    status, answer = document("--plan", "example")
    assert status == 0
    assert sorted({step["number"] for step in answer["plan"]["steps"]}) == list(range(1, 14))
    done = size("--plan", "example")
    assert "13. " in done.stdout


def test_a_plan_that_misses_a_requirement_exits_with_1(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(example_profile().replace("ttft_p99_s = 2.0", "ttft_p99_s = 0.002"))
    done = size("--plan", str(path))
    assert done.returncode == 1
    assert "NOT MET: " in done.stdout.splitlines()[0]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags, id=flags[0])
        for flags in (
            ("--concurrency", "4"), ("--max-loras", "4"), ("--mfu", "0.4"), ("--context", "100"),
            ("--search",), ("--safety", "2"),
        )
    ],
)  # fmt: skip
def test_a_plan_refuses_what_it_would_not_read(flags: tuple[str, ...]) -> None:
    done = size("--plan", "example", *flags)
    assert done.returncode == 2
    assert flags[0] in done.stderr
    assert "docs/how-to/plan.md" in done.stderr


def test_a_plan_with_a_wrong_key_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(example_profile().replace("input_p50_tokens", "input_p50_token"))
    done = size("--plan", str(path))
    assert done.returncode == 2
    assert "input_p50_tokens" in done.stderr


def test_a_benchmark_gives_the_usable_rps(tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    path.write_text(
        "concurrency,requests_per_s,ttft_p99_s,itl_p99_s\n"
        "8,3,0.3,0.02\n16,5.5,0.5,0.02\n32,9,0.9,0.03\n48,12,1.9,0.04\n64,14,4.0,0.06\n"
    )
    status, answer = document(
        *LLAMA, "--tp", "4", "--quantization", "fp8", "--context", "1200", "--concurrency", "48",
        "--benchmark", str(path), "--ttft-slo", "2s", "--peak-rps", "120",
        "--input-tokens", "1000", "--output-tokens", "300",
    )  # fmt: skip
    assert status == 0
    assert not any("check them with a benchmark" in note for note in answer["notes"])
    assert answer["operating_point"]["c_max"]["concurrency"] == 48
    shares = [answer["operating_point"][f"{name}_ratio"] for name in ("mbu", "predicted_mbu")]
    assert all(0 < share < 1 for share in shares)
    assert answer["inputs"]["usable_requests_per_s"] == 12
    assert answer["fleet"]["gpus"] == 52


@pytest.mark.parametrize("flag", ["--plan", "--benchmark"])
def test_a_file_that_is_not_there_is_named(flag: str) -> None:
    done = size(*LLAMA, flag, "/nowhere/file")
    assert done.returncode == 2
    assert "/nowhere/file" in done.stderr


def test_flags_win_over_a_plans_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(example_profile().partition("[[tiers]]")[0])
    for card in ("h200", "b200"):
        _, answer = document("--plan", str(path), "--model", "Qwen/Qwen3-32B", "--gpu", card)
        assert answer["plan"]["steps"][1]["output"]["gpu"] == card
    _, answer = document("--plan", str(path), "--pp", "2")
    assert answer["plan"]["steps"][5]["output"]["pipeline_parallel"] == 2


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("--tp", "2", "--dcp", "4"), "--dcp"),
        (("--tp", "8", "--dcp", "3"), "--dcp"),
        (("--pp", "200"), "--pp"),
        (("--block-size", "0"), "--block-size"),
        (("--block-size", str(1 << 63)), "--block-size"),
        (("--max-num-seqs", str(1 << 63)), "--max-num-seqs"),
        (("--max-num-batched-tokens", "100", "--max-num-seqs", "256"), "--max-num-batched-tokens"),
        (("--peak-rps", "1e-308"), "--peak-rps"),
        (("--search", "--dp", "4"), "--dp"),
        (("--search", "--concurrency", "5000"), "--concurrency"),
        (("--search", "--tp", "0"), "--tensor-parallel"),
        (("--plan", "/dev/zero"), "--plan"),
        (
            ("--model", "Qwen3-Next-80B-A3B-Instruct", "--disable-hybrid-kv-cache-manager"),
            "--disable-hybrid-kv-cache-manager: ",
        ),
        (("--benchmark", "/dev/zero"), "--benchmark"),
    ],
)
def test_what_no_launch_can_be_is_refused(flags: tuple[str, ...], hint: str) -> None:
    done = size(*LLAMA, *flags, "--input-tokens", "100", "--output-tokens", "10")
    assert done.returncode == 2
    assert hint in done.stderr
    assert "Traceback" not in done.stderr


def test_stated_usable_rps_without_a_target_is_held_against_a_full_replica() -> None:
    """One request in flight, the default, is no load that a fleet is sized at."""
    launch = (*LLAMA, "--tp", "4", "--input-tokens", "1000", "--output-tokens", "300")

    said = [size(*launch, "--usable-rps", rate).stdout for rate in ("2", "500")]

    assert "usable requests/s" not in said[0]
    assert "exceed the predicted" in said[1]
    assert "with as many requests as it holds" in " ".join(said[1].split())


def test_predicted_usable_rps_shows_where_it_comes_from() -> None:
    launch = (*LLAMA, "--tp", "4", "--input-tokens", "1000", "--output-tokens", "200")
    done = size(*launch, "--peak-rps", "40", "--ttft-slo", "2s")
    usable = re.search(r"Usable RPS of one replica: .*?= ([0-9.]+) requests/s", done.stdout, re.S)
    assert usable
    assert f"ceil(40 / {usable[1]})" in done.stdout
    assert "Usable RPS" not in size(*launch, "--peak-rps", "40", "--usable-rps", "4").stdout


def test_the_verdict_counts_whole_requests_and_names_no_guide() -> None:
    done = size("--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "h100-sxm")
    assert done.stdout.startswith("FITS: holds 3 requests of 131,072 tokens\n")
    assert "= 3.43 (3.255 to 3.542) [vLLM's start-up line]" in done.stdout
    assert "guide" not in done.stdout


def test_a_launch_that_would_not_start_names_the_change_once() -> None:
    text = " ".join(size(*LLAMA).stdout.split())
    assert text.startswith("DOES NOT FIT: vLLM would not start: weights and overhead leave no room")
    assert "split the model over 4 GPUs" in text
    assert text.count("would not start") == 1
    assert "= 0 blocks [" in text


@pytest.mark.parametrize(("running", "waiting"), [(256, "244 of 500 wait"), (500, "")])
def test_requests_beyond_max_num_seqs_wait(running: int, waiting: str) -> None:
    launch = ("--model", "Qwen/Qwen3-0.6B", "--gpu", "h200", "--context", "2048")
    done = size(*launch, "--concurrency", "500", "--max-num-seqs", str(running))
    first = " ".join(done.stdout.split("run:")[0].split())
    assert first.startswith("FITS: holds 5")
    assert waiting in first
    assert ("wait" in first) == bool(waiting)


def test_a_benchmark_in_waves_waits_longer_for_its_first_tokens() -> None:
    """32 prompts of 4,096 tokens at once are 16 steps: in the mean a prompt waits for half."""
    launch = ("--model", "Qwen/Qwen3-8B", "--gpu", "h100-sxm", "--max-model-len", "8192")
    load = ("--input-tokens", "4096", "--output-tokens", "512", "--concurrency", "32")
    _, given = document(*launch, *load)
    speed = given["performance"]
    full_step_s = 8192 / speed["prefill_tokens_per_s"]
    assert speed["ttft_wave_s"] == pytest.approx((16 + 1) / 2 * full_step_s, rel=0.15)
    assert speed["ttft_wave_s"] > 3 * speed["ttft_s"]
    assert speed["output_tokens_wave_per_s"] == pytest.approx(speed["decode_tokens_per_s"], rel=0.2)
    text = " ".join(size(*launch, *load).stdout.split())
    assert "with steady arrivals" in text
    assert "A benchmark that starts 32 at once (--max-concurrency): TTFT" in text
    assert "with 10 times as many prompts (--num-prompts): TTFT" in text
    assert speed["ttft_s"] < speed["ttft_rounds_s"] < speed["ttft_wave_s"]
    assert speed["itl_wave_s"] < speed["itl_rounds_s"]


@pytest.mark.parametrize("stated_gib", ["2", "0.001"])
def test_a_stated_kv_cache_says_nothing_about_other_numbers_of_gpus(stated_gib: str) -> None:
    done = size(*LLAMA, "--tp", "2", "--available-kv-gib", stated_gib)
    verdict = " ".join(done.stdout.split("one GPU")[0].split())
    assert verdict.startswith("DOES NOT FIT: vLLM would not start:")
    assert "split" not in verdict
    assert "Fewest GPUs" not in verdict


def test_answers_stand_before_the_arithmetic_in_the_same_figures() -> None:
    done = size(
        "--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "h100-sxm", "--search",
        "--input-tokens", "1000", "--output-tokens", "200", "--itl-slo", "50ms", "--peak-rps", "20",
    )  # fmt: skip
    answer, arithmetic = done.stdout.split("one GPU, ")
    assert "configurations meet the targets" in answer
    assert "auto (16-bit) KV cache" in answer
    itl = re.search(r"ITL ([0-9.]+) ms, KV cache", " ".join(answer.split()))
    assert itl
    exact = re.search(r"= ([0-9.]+) ms \[share = ", arithmetic)
    assert exact
    assert round(float(exact[1])) == round(float(itl[1]))


def test_the_gpus_are_listed_on_request() -> None:
    done = size("--list-gpus")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(
        r"^h100-sxm +NVIDIA H100 SXM5 80GB +80 GB \(79\.2 GiB usable\)$", done.stdout, re.MULTILINE
    )
    lines = done.stdout.splitlines()
    assert len(lines) >= 36
    assert len({line.index(" GB (") for line in lines}) == 1, "in columns"


def test_the_models_are_listed_on_request() -> None:
    done = size("--list-models")
    assert (done.returncode, done.stderr) == (0, "")
    ids = done.stdout.splitlines()
    assert "meta-llama/Llama-3.1-8B-Instruct" in ids
    assert ids == sorted(ids, key=str.casefold)


def test_both_names_of_tensor_parallel_are_one_flag() -> None:
    assert size(*LLAMA, "--tensor-parallel", "4").stdout == size(*LLAMA, "--tp", "4").stdout


def test_cost_follows_the_usable_rps() -> None:
    """12 requests/s of 200 tokens on 4 GPUs at 3 USD/h: 12 / (2,400 x 3,600) x 1e6."""
    _, answer = document(
        *LLAMA, "--tp", "4", "--quantization", "fp8", "--usable-rps", "12", "--input-tokens",
        "1000", "--output-tokens", "200", "--usd-per-gpu-hour", "3",
    )  # fmt: skip
    assert answer["cost"]["usd_per_million_output_tokens"] == pytest.approx(1.3889, rel=1e-3)


def test_a_peak_without_target_or_concurrency_is_no_fleet() -> None:
    _, answer = document(
        *LLAMA, "--tp", "4", "--input-tokens", "1000", "--output-tokens", "200", "--peak-rps", "40"
    )
    assert answer["fleet"]["gpus"] is None
    assert any("no fleet" in note for note in answer["notes"])


def test_requests_are_counted_at_their_own_length() -> None:
    """A launch for long contexts may hold many short requests."""
    status, answer = document(
        "--model", "Qwen/Qwen3-32B", "--gpu", "h100-sxm", "--quantization", "fp8",
        "--concurrency", "60", "--input-tokens", "1000", "--output-tokens", "200",
    )  # fmt: skip
    assert status == 0
    assert answer["inputs"]["context_tokens"] == 1200
    assert answer["min_gpus"] == 1


def test_a_fit_that_is_not_for_certain_says_so() -> None:
    done = size(
        "--model", "Qwen/Qwen3-235B-A22B-FP8", "--gpu", "h100-sxm", "--tp", "4",
        "--max-model-len", "32768", "--context", "8192", "--concurrency", "26",
    )  # fmt: skip
    assert done.stdout.startswith("PROBABLY FITS")
    assert "may not fit: at the low end of the estimate only" in done.stdout


def test_a_launch_that_does_not_start_is_not_said_to_fit_perhaps() -> None:
    done = size(
        "--model", "openai/gpt-oss-120b", "--gpu", "h100-sxm",
        "--input-tokens", "1000", "--output-tokens", "300", "--concurrency", "16",
    )  # fmt: skip
    assert done.stdout.startswith("DOES NOT FIT: vLLM would not start")
    assert "may not fit" not in done.stdout
    peak = size(
        "--model", "zai-org/GLM-5", "--gpu", "b200", "--tp", "8", "--peak-rps", "30",
        "--input-tokens", "1000", "--output-tokens", "300", "--ttft-slo", "2s",
    )  # fmt: skip
    assert "note: no fleet: the launch does not fit\n" in peak.stdout


def test_the_accuracy_of_an_unmeasured_gpu_is_not_claimed() -> None:
    load = ("--input-tokens", "1000", "--output-tokens", "300", "--concurrency", "16")
    noted = [
        " ".join(size("--model", "Qwen/Qwen3-8B", "--gpu", chip, *load).stdout.split())
        for chip in ("h100-sxm", "b200")
    ]
    assert ["few were on b200" in text for text in noted] == [False, True]
    assert "TTFT 0.46 to 3.58x the prediction; few were on b200" in noted[1]


def test_data_parallel_engines_work_together() -> None:
    load = ("--input-tokens", "1000", "--output-tokens", "200")
    _, single = document(*LLAMA, "--tp", "4", "--concurrency", "32", *load)
    _, four = document(*LLAMA, "--tp", "4", "--dp", "4", "--concurrency", "128", *load)
    assert four["performance"]["decode_tokens_per_s"] == pytest.approx(
        4 * single["performance"]["decode_tokens_per_s"], rel=1e-3
    )
    assert four["cost"]["usd_per_million_output_tokens"] == pytest.approx(
        single["cost"]["usd_per_million_output_tokens"], rel=1e-3
    )


def test_what_does_not_start_names_the_longest_that_would() -> None:
    done = size("--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "rtx-4090")
    assert done.returncode == 1
    assert "--max-model-len" in done.stdout


def test_adapters_and_a_draft_take_their_memory() -> None:
    launch = (*LLAMA, "--tp", "4", "--max-model-len", "8192")
    _, plain = document(*launch)
    _, answer = document(
        *launch, "--max-loras", "4", "--max-lora-rank", "32", "--draft-model", "Llama-3.2-1B",
        "--num-speculative-tokens", "3",
    )  # fmt: skip
    memory, before = answer["memory"], plain["memory"]

    assert memory["adapter_bytes_per_gpu"] > 1e9
    assert memory["draft_bytes_per_gpu"] == pytest.approx(1.236e9 * 2 / 4, rel=0.01)
    assert memory["weights_bytes_per_gpu"] == pytest.approx(
        before["weights_bytes_per_gpu"]
        + memory["adapter_bytes_per_gpu"]
        + memory["draft_bytes_per_gpu"],
        abs=2,
    )
    assert memory["kv_bytes_per_token_per_gpu"] == 81_920 + 8_192
    assert memory["draft_kv_bytes_per_token_per_gpu"] == 8_192
    assert answer["inputs"]["max_loras"] == 4
    assert answer["inputs"]["draft_model"] == "meta-llama/Llama-3.2-1B"
    assert memory["max_concurrency"]["expected"] < before["max_concurrency"]["expected"]
    assert {"LoRA adapters on each GPU", "KV cache per token, draft model"} <= {
        step["title"] for step in answer["steps"]
    }


def test_the_picture_shows_them() -> None:
    done = size(
        *LLAMA, "--tp", "4", "--max-model-len", "8192", "--max-loras", "4", "--draft-model",
        "Llama-3.2-1B", "--num-speculative-tokens", "3",
    )  # fmt: skip
    assert "a adapters" in done.stdout
    assert "d draft" in done.stdout
    assert "4 adapter slots of rank 16, 3 tokens drafted by meta-llama/Llama-3.2-1B" in " ".join(
        done.stdout.split()
    )


IN_FLIGHT = ("--tp", "4", "--input-tokens", "1000", "--output-tokens", "200", "--concurrency", "32")


def test_measured_shares_take_the_place_of_the_defaults() -> None:
    _, plain = document(*LLAMA, *IN_FLIGHT)
    _, slow = document(*LLAMA, *IN_FLIGHT, "--mfu", "0.16", "--mbu", "0.46")

    assert plain["inputs"]["mfu_ratio"] == DEFAULT.mfu_ratio
    assert slow["inputs"]["mbu_ratio"] == 0.46
    assert slow["performance"]["itl_s"] > 1.4 * plain["performance"]["itl_s"]
    assert (
        slow["performance"]["prefill_tokens_per_s"]
        < 0.6 * (plain["performance"]["prefill_tokens_per_s"])
    )
    assert any("--mfu and --mbu" in note for note in plain["notes"])
    assert not any("--mfu" in note for note in slow["notes"])


def test_a_search_takes_measured_shares() -> None:
    search = ("--search", "--gpu", "h100-sxm", "--itl-slo", "30ms", "--peak-rps", "20")
    asked = ("--model", "Qwen/Qwen3-32B", "--input-tokens", "1000", "--output-tokens", "200")
    _, plain = document(*asked, *search)
    _, slow = document(*asked, *search, "--mbu", "0.4", "--mfu", "0.15")

    assert slow["cost"]["gpus"] > plain["cost"]["gpus"]


SERVE = (
    "VLLM_USE_V1=1 vllm serve nvidia/Qwen3.8-27B-NVFP4 --quantization modelopt \\\n"
    "  --kv-cache-dtype=fp8 --max-model-len 128k --max-num-seqs 1 --max_num_batched_tokens 4096 "
    """--speculative-config '{"method": "mtp", "num_speculative_tokens": 2}' """
    """--limit-mm-per-prompt '{"image": 1, "video": 0}' --cudagraph-capture-sizes 1 2"""
)


def test_a_whole_command_line_is_the_question() -> None:
    stated = (
        "--model", "nvidia/Qwen3.8-27B-NVFP4", "--kv-cache-dtype", "fp8",
        "--max-model-len", "128000", "--max-num-seqs", "1", "--max-num-batched-tokens", "4096",
        "--draft-model", "mtp", "--num-speculative-tokens", "2",
        "--limit-mm-per-prompt", "image=1,video=0", "--cudagraph-capture-sizes", "1,2",
    )  # fmt: skip
    _, by_flags = document(*stated, "--gpu", "rtx-5090")

    for line in (("--launch", SERVE), (SERVE,)):
        _, by_line = document(*line, "--gpu", "rtx-5090")
        assert by_line["memory"] == by_flags["memory"]
    _, other = document(SERVE, "--gpu", "rtx-5090", "--max-model-len", "4096")
    assert other["inputs"]["max_model_len"] == 4096


def test_a_command_line_is_taken_unquoted_and_from_docker() -> None:
    docker = "docker run --gpus all -e A=b vllm/vllm-openai:v0.27.0 --model Qwen/Qwen3-8B -tp 2"
    done = size("--gpu", "l4", "--max-model-len", "8192", "--", *docker.split())

    assert "Qwen/Qwen3-8B" in done.stdout
    assert "(TP 2, PP 1)" in " ".join(done.stdout.split())
    assert "vLLM 0.27.0" in " ".join(done.stdout.split())
    assert "or `MODEL 8xh200`" in size("--gpu", "l4", "ls -la").stderr


IN_SHELL = "exec vllm serve Qwen/Qwen3-8B --max-model-len 16k -tp 2 --kv-cache-dtype fp8"
_, _, _, *WORDS = IN_SHELL.split()


@pytest.mark.parametrize(
    ("pasted", "version"),
    [
        (
            "kind: Deployment\nspec: {template: {spec: {containers: [{image: "
            f"'vllm/vllm-openai:v0.18.0', command: [sh, -c], args: ['{IN_SHELL}']}}]}}}}}}",
            "0.18.0",
        ),
        (f"- image: vllm/vllm-openai:v0.19.1\n  args: [{', '.join(WORDS)}]", "0.19.1"),
        (
            "services:\n  vllm:\n    image: vllm/vllm-openai:v0.19.1\n    command: >\n"
            "      --model Qwen/Qwen3-8B --max-model-len 16k\n      -tp 2 --kv-cache-dtype fp8\n",
            "0.19.1",
        ),
        (json.dumps(["--model", *WORDS]).replace('"2"', "2"), "0.33.0"),
        ("command: [vllm, serve]\nargs:\n" + "".join(f"- {word}\n" for word in WORDS), "0.33.0"),
    ],
    ids=["shell", "args", "compose", "json", "command"],
)
def test_a_containers_manifest_is_the_question(pasted: str, version: str) -> None:
    _, answer = document("--gpu", "h100-sxm", "--launch", pasted)
    _, same = document(IN_SHELL, "--gpu", "h100-sxm", "--vllm-version", version)
    for part in ("inputs", "memory", "command", "notes"):
        assert answer[part] == same[part]


def test_a_count_is_written_as_vllm_reads_it() -> None:
    launch = ("Qwen3-8B", "h100-sxm", "--max-model-len", "40000")
    _, binary = document(*launch, "--context", "32K")
    _, decimal = document(*launch, "--context", "32k")
    assert binary["inputs"]["context_tokens"] == 32_768
    assert decimal["inputs"]["context_tokens"] == 32_000
    for wrong in ("1.5", "k", "many"):
        assert "--context" in size(*launch, "--context", wrong).stderr


@pytest.mark.parametrize(
    "words", [("Qwen3-32B", "8xh200"), ("Qwen3-32B on 8 x H200",), ("Qwen3-32B", "--gpu", "8xh200")]
)
def test_a_model_and_its_gpus_are_a_question(words: tuple[str, ...]) -> None:
    _, answer = document(*words, "--tp", "4")
    _, spelled = document("--model", "Qwen3-32B", "--gpu", "h200", "--gpus", "8", "--tp", "4")

    assert answer == spelled


def test_a_format_that_is_no_scheme_says_what_is_assumed() -> None:
    assert "gguf names a format and not a scheme: sized as q4_k" in " ".join(
        size("Qwen3-8B", "h200", "--quantization", "gguf", "--explain").stdout.split()
    )


@pytest.mark.parametrize(
    ("line", "counted", "noted"),
    [
        (
            "vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct -tp 4 --tool-call-parser hermes "
            '--speculative-config \'{"method":"qwen3_next_mtp","num_speculative_tokens":2}\'',
            """--speculative-config '{"method": "mtp", "num_speculative_tokens": 2}'""",
            "the draft takes KV cache memory",
        ),
        (
            "vllm serve zai-org/GLM-4.6-FP8 -tp 4 --speculative-config.method mtp "
            "--speculative-config.num_speculative_tokens 1",
            """'{"method": "mtp", "num_speculative_tokens": 1}'""",
            "the draft takes KV cache memory",
        ),
        (
            "vllm serve Qwen/Qwen3-8B --cudagraph-capture-sizes 1 2 4 --block-size 32 "
            "--no-enable-prefix-caching --mamba-ssm-cache-dtype float32",
            """--block-size 32 --no-enable-prefix-caching --compilation-config """
            """'{"cudagraph_capture_sizes": [1, 2, 4]}'""",
            "not counted: --mamba-ssm-cache-dtype (the size of recurrent states)",
        ),
        (
            "vllm serve Qwen/Qwen3-8B --fancy-new-flag 3 --port 8001 --api-key secret",
            "vllm serve Qwen/Qwen3-8B",
            "not counted, unknown to kneewatch: --fancy-new-flag",
        ),
        (
            "vllm serve Qwen/Qwen3-8B --speculative-config "
            '\'{"model":"me/no-such-head","method":"eagle3","num_speculative_tokens":3}\'',
            "--speculative-config "
            """'{"model":"me/no-such-head","method":"eagle3","num_speculative_tokens":3}'""",
            "sized without its draft: model 'me/no-such-head' is not in the catalogue",
        ),
        (
            "vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct -tp 4 --spec-method mtp --spec-tokens 2",
            """--speculative-config '{"method": "mtp", "num_speculative_tokens": 2}'""",
            "the draft takes KV cache memory",
        ),
        (
            "vllm serve Qwen/Qwen3-8B -O3 -O.cudagraph_mode=PIECEWISE -ac.backend FLASHINFER",
            "--optimization-level 3 --compilation-config.cudagraph-mode PIECEWISE "
            "--attention-config.backend FLASHINFER",
            "--attention-config (block size, KV layout and speed)",
        ),
        (
            "vllm serve google/gemma-3-27b-it --limit-mm-per-prompt.image 2 --no-enable-eplb "
            "--no-async-scheduling",
            """--limit-mm-per-prompt '{"image": 2}'""",
            "--no-async-scheduling (",
        ),
    ],
)
def test_flags_of_a_command_line_are_kept_or_named(line: str, counted: str, noted: str) -> None:
    status, answer = document("--gpu", "h200", "--launch", line)
    assert status == 0
    assert counted in answer["command"]
    assert any(noted in note for note in answer["notes"])
    assert not any("--port" in note or "--tool-call-parser" in note for note in answer["notes"])


def test_a_target_that_only_its_margin_misses_is_said_with_the_margin() -> None:
    """An L4 reads 16 GB in 54 ms, and few benchmarks are of L4."""
    flags = ("--model", "Qwen/Qwen3-8B", "--gpu", "l4", "--max-model-len", "8192")
    lengths = ("--input-tokens", "1000", "--output-tokens", "200", "--peak-rps", "5")
    _, answer = document(*flags, *lengths, "--itl-slo", "80ms")
    assert answer["fleet"]["gpus"] is None
    assert any("ITL predicted up to 50.31 ms for a target of 80 ms" in n for n in answer["notes"])


def test_any_gpu_is_sized_by_its_memory_and_bandwidth() -> None:
    launch = ("--model", "Qwen/Qwen3-8B", "--max-model-len", "8192")
    _, listed = document(*launch, "--gpu", "l4")
    _, stated = document(*launch, "--gpu-memory-gib", "23.5", "--gpu-bandwidth", "300")
    _, more = document(*launch, "--gpu", "l4", "--gpu-memory-gib", "32")

    held = [
        answer["memory"]["kv_available_bytes_per_gpu"]["expected"]
        for answer in (listed, stated, more)
    ]
    assert held == sorted(held)
    assert any("the GPU most like it" in note for note in stated["notes"])
    assert "--gpu-memory-gib" in size(*launch, "--gpu", "my-gpu").stderr


def test_memory_of_the_host_and_a_fixed_cache_are_counted() -> None:
    launch = ("--model", "Qwen/Qwen3-8B", "--gpu", "l4", "--max-model-len", "8192")
    plain, offloaded, fixed = (
        document(*launch, *flags)[1]["memory"]["kv_available_bytes_per_gpu"]["expected"]
        for flags in ((), ("--cpu-offload-gb", "4"), ("--kv-cache-memory-bytes", "4G"))
    )

    assert offloaded - plain == pytest.approx(4 * 2**30)
    assert fixed == 4 * 2**30
    kept = size(*launch, "--kv-offloading-size", "8").stdout
    assert "host memory keeps the KV cache of 58,254 evicted tokens" in " ".join(kept.split())


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--kv-cache-memory-bytes", "much"),
        ("--limit-mm-per-prompt", "none"),
        ("--cudagraph-capture-sizes", "few"),
        ("--gpu-bandwidth", "0"),
    ],
)
def test_a_wrong_value_names_its_flag(flag: str, value: str) -> None:
    done = size("--model", "Qwen/Qwen3-8B", "--gpu", "l4", flag, value)

    assert done.returncode == 2
    assert flag in done.stderr


def test_a_gpu_that_shares_the_hosts_memory_is_not_filled() -> None:
    launch = ("--model", "Qwen/Qwen3-8B", "--gpu", "gb10", "--max-model-len", "8192")
    told = "vLLM does not start where 92% of it is not free"

    plain = size(*launch).stdout
    assert "run: vllm serve Qwen/Qwen3-8B --gpu-memory-utilization 0.85" in plain
    assert "not free" not in plain
    higher = size(*launch, "--gpu-memory-utilization", "0.92").stdout
    assert told in " ".join(higher.split())
    _, answer = document(*launch, "--gpu-memory-utilization", "0.3", "--concurrency", "99")
    shares = [lever["change"] for lever in answer["levers"] if "utilization" in lever["change"]]
    assert shares
    assert all("--gpu-memory-utilization 0.85" in change for change in shares)


@pytest.mark.parametrize(
    ("question", "wanted", "unwanted"),
    [
        pytest.param(
            ("--model", "mistralai/Mistral-Large-3", "--gpu", "8xa100-80gb"),
            "--tensor-parallel-size 8 --pipeline-parallel-size 2",
            "--tensor-parallel-size 16",
            id="stages over nodes, not ranks",
        ),
        pytest.param(
            ("--model", "Qwen/Qwen3.8-27B-FP8", "--gpu", "rtx-5090", "--max-model-len", "131072"),
            "nvfp4 weights --kv-cache-dtype fp8",
            "fp8 weights",
            id="half of the bits of an 8-bit checkpoint",
        ),
    ],
)
def test_a_lever_is_what_people_would_start(
    question: tuple[str, ...], wanted: str, unwanted: str
) -> None:
    _, answer = document(*question)
    changes = [lever["change"] for lever in answer["levers"]]
    assert wanted in changes
    assert not any(change.startswith(unwanted) for change in changes)


def test_a_larger_gpu_that_is_named_is_one_that_vllm_has_kernels_for() -> None:
    """Of those with more memory, as fast, V100 would be the next."""
    _, answer = document("--model", "Qwen/Qwen3-14B", "--gpu", "rtx-3090")
    larger = [lever["change"] for lever in answer["levers"] if "--gpu " in lever["change"]]
    assert larger == ["--gpu a100-40gb-pcie"]


def test_the_command_keeps_the_flags_that_do_not_count() -> None:
    line = (
        "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 8192 --api-key sk-1 "
        "--tool-call-parser hermes --async-scheduling --lora-modules a=x b=y"
    )
    _, answer = document("--gpu", "h100-sxm", "--launch", line)
    command = answer["command"]
    assert command.startswith("vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 8192 ")
    assert command.endswith('--api-key "$API_KEY" --tool-call-parser hermes --async-scheduling')
    assert any("--lora-modules" in note for note in answer["notes"])


QWEN_8K = ("--model", "Qwen/Qwen3-32B", "--gpu", "h200", "--tp", "1",
        "--input-tokens", "8000", "--output-tokens", "700")  # fmt: skip
MISSED = "FITS IN MEMORY, MISSES THE TARGETS: "


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--users", "20"), "20 users: " + MISSED + "ITL "),
        (
            ("--rate", "5", "--slo-itl", "18ms"),
            MISSED.replace("MISSES", "MAY MISS")
            + "no number of replicas surely meets them: for one "
            "request alone ITL",
        ),
        (("--concurrency", "20"), MISSED + "ITL "),
    ],
)
def test_missed_targets_are_the_verdict(flags: tuple[str, ...], words: str) -> None:
    done = size(*QWEN_8K, "--slo-itl", "5ms", *flags)
    assert done.returncode == 1
    assert " ".join(done.stdout.split()).startswith(words)
    assert "no number of replicas surely meets them" in " ".join(done.stdout.split())
    status, answer = document(*QWEN_8K, "--slo-itl", "5ms", *flags)
    assert (status, answer["fits"], answer["meets_targets"]) == (1, True, False)


def test_missed_targets_stand_beside_what_does_not_fit() -> None:
    text = " ".join(size(*QWEN_8K, "--users", "40", "--slo-itl", "5ms").stdout.split())
    assert text.startswith("DOES NOT FIT: holds 29 requests")
    assert "40 requested; MISSES THE TARGETS: ITL " in text


def test_targets_that_are_met_or_not_stated_leave_the_verdict() -> None:
    met = document(*QWEN_8K, "--concurrency", "2", "--slo-itl", "500ms")
    assert (met[0], met[1]["meets_targets"]) == (0, True)
    unstated = document(*QWEN_8K, "--concurrency", "2")
    assert (unstated[0], unstated[1]["meets_targets"]) == (0, None)


@pytest.mark.parametrize(
    ("gpus", "gpu", "count"),
    [("mi300x", "mi300x", 1), ("1xmi300x", "mi300x", 1), ("2xmi325x", "mi325x", 2)],
)
def test_a_gpu_whose_name_ends_in_x_is_counted_in_front_only(
    gpus: str, gpu: str, count: int
) -> None:
    for words in (("Qwen/Qwen3-32B", gpus), ("--model", "Qwen/Qwen3-32B", "--gpu", gpus)):
        _, answer = document(*words)
        assert answer["inputs"]["gpu"] == gpu
        assert answer["inputs"]["tensor_parallel"] == count


@pytest.mark.parametrize(
    ("flag", "warning"),
    [
        ("--max-modle-len 8192", "--max-modle-len (did you mean --max-model-len?)"),
        ("--gpu-memory-utilisation 0.9", "(did you mean --gpu-memory-utilization?)"),
        ("--zzz-foo 3", "unknown to kneewatch: --zzz-foo"),
        (
            "--max-model-len 200000 --hf-overrides {}",
            "another flag lets vLLM start, and answers beyond may be wrong",
        ),
    ],
)
def test_what_the_command_line_gets_wrong_stands_under_the_verdict(flag: str, warning: str) -> None:
    for more in ((), ("--explain",), ("--format", "markdown")):
        done = size(f"vllm serve Qwen/Qwen3-8B {flag}", "--gpu", "h200", *more)
        first = " ".join(" ".join(done.stdout.splitlines()[1:4]).split())
        assert warning in first
        assert " ".join(done.stdout.split()).count(warning) == 1


def test_a_command_has_the_whole_id_of_a_short_name() -> None:
    text = size("llama-3.3-70b", "4xh100").stdout
    assert "run: vllm serve meta-llama/Llama-3.3-70B-Instruct " in text


@pytest.mark.parametrize(
    ("line", "flag", "words"),
    [
        ("Qwen/Qwen3-8B --enable-expert-parallel", "--expert-parallel", "no routed experts"),
        ("Qwen/Qwen3-8B --block-size 7", "--block-size", "a multiple of 16"),
        (
            "Qwen/Qwen3-8B --no-enable-chunked-prefill --max-num-batched-tokens 2048",
            "--max-num-batched-tokens", "without chunked prefill, because a request may have",
        ),
        ("Qwen/Qwen3-8B --cpu-offload-gb -3", "--cpu-offload-gb", "vLLM refuses '-3'"),
        ("Qwen/Qwen3-8B --max-num-seqs=-5", "--max-num-seqs", "vLLM refuses '-5'"),
        ("Qwen/Qwen3-8B --tensor-parallel-size two", "--tensor-parallel", "vLLM refuses 'two'"),
        ("Qwen/Qwen3-8B --dtype fp16", "--dtype", "'fp16'; choices: auto, bfloat16, float"),
        ("Qwen/Qwen3-8B --enable-auto-tool-choice", "--enable-auto-tool-choice",
         "it without --tool-call-parser"),
        ("Qwen/Qwen3-8B --enable-eplb", "--enable-eplb", "it without --enable-expert-parallel"),
        (
            "Qwen/Qwen3-30B-A3B --enable-expert-parallel --enable-eplb",
            "--enable-eplb",
            "it without --data-parallel-size or --tensor-parallel-size",
        ),
        (
            "Qwen/Qwen3-8B --max-cudagraph-capture-size 64 --cudagraph-capture-sizes 1 2 4",
            "--max-cudagraph-capture-size",
            "64 beside sizes up to 4",
        ),
        ("Qwen/Qwen3-8B --enable-per-request-metrics --disable-log-stats",
         "--enable-per-request-metrics", "it beside --disable-log-stats"),
        ("""Qwen/Qwen3-8B --kv-transfer-config '{"kv_connector":"NixlConnector"}'""",
         "--kv-transfer-config", "it without kv_role"),
        ("Qwen/Qwen3-8B --stream-interval 0", "--stream-interval", "'0'"),
        ("Qwen/Qwen3-30B-A3B --enable-dbo", "--enable-dbo", "it without --all2all-backend"),
        ("Qwen/Qwen3-8B -dp 2 --data-parallel-hybrid-lb", "--data-parallel-hybrid-lb",
         "it without --data-parallel-size-local"),
        ("""Qwen/Qwen3-8B --speculative-config '{"num_speculative_tokens":4}'""", "--draft-model",
         "without a draft model or a method"),
        ("""Qwen/Qwen3-8B --speculative-config '{"method":"ngram"}'""", "--num-speculative-tokens",
         "ngram without num_speculative_tokens"),
        ("Qwen/Qwen3-8B --quantization int8", "--quantization", "vLLM refuses 'int8'"),
        ("Qwen/Qwen3-8B --hf-overrides {rope", "--hf-overrides", "vLLM refuses '{rope'"),
        ("Qwen/Qwen3-8B --attention-backend FLASH_ATN", "--attention-backend",
         "'FLASH_ATN'; choices: flash_attn"),
        ("Qwen/Qwen3-8B --reasoning-parser qwen", "--reasoning-parser", "choices: qwen3"),
        ("""Qwen/Qwen3-8B --compilation-config '{"cudagraph_mod":"FULL"}'""",
         "--compilation-config", "the key 'cudagraph_mod'"),
        ("Qwen/Qwen3-8B --enable-lora --max-loras 8 --max-cpu-loras 4", "--max-cpu-loras", "'4'"),
        ("Qwen/Qwen3-30B-A3B -dp 2 --data-parallel-external-lb", "--data-parallel-external-lb",
         "it without --data-parallel-rank or --nnodes"),
        (
            "Qwen/Qwen3-Next-80B-A3B-Instruct -tp 4 --no-enable-chunked-prefill",
            "--enable-prefix-caching", "set --no-enable-prefix-caching",
        ),
    ],
)  # fmt: skip
def test_what_vllm_refuses_is_refused(line: str, flag: str, words: str) -> None:
    done = size("--gpu", "h100-sxm", f"vllm serve {line}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"kneewatch: {flag}: "), done.stderr
    assert words in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "Qwen/Qwen3-30B-A3B --enable-expert-parallel -tp 2",
        "Qwen/Qwen3-8B --block-size 48",
        "Qwen/Qwen3-8B --no-enable-chunked-prefill",
        "Qwen/Qwen3-8B --no-enable-chunked-prefill --max-num-batched-tokens 2k --max-model-len 2k",
        "Qwen/Qwen3-8B --max-model-len -1",
        "Qwen/Qwen3-8B --attention-backend FLASHINFER --reasoning-parser qwen3",
        "Qwen/Qwen3-8B --reasoning-parser mine --reasoning-parser-plugin mine.py",
        "Qwen/Qwen3-30B-A3B -tp 2 --data-parallel-external-lb --nnodes 2",
        "Qwen/Qwen3-8B --max-model-len auto --max-num-seqs $SEATS",
        "Qwen/Qwen2.5-VL-7B-Instruct --max-model-len 8k --limit-mm-per-prompt '{}'",
        "Qwen/Qwen3-8B --gpu-memory-utilization .95 -tp {{ .Values.tp }} --cpu-offload-gb 1.",
        "Qwen/Qwen3-8B --dtype half --quantization fp8 --hf-overrides '{{ .Values.overrides }}'",
    ],
)
def test_what_vllm_accepts_is_sized(line: str) -> None:
    done = size("--gpu", "h100-sxm", f"vllm serve {line}")
    assert done.stdout.startswith("FITS"), done.stderr


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("Qwen/Qwen3-8B --max-model-len 80000", "--max-model-len is above the model's 40,960"),
        ("Qwen/Qwen3-8B --quantization bitsandbytes", "later have no bitsandbytes weights"),
    ],
)
def test_a_launch_that_vllm_refuses_does_not_fit(line: str, why: str) -> None:
    done = size("--gpu", "h200", f"vllm serve {line}")
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert text.startswith("DOES NOT FIT: vLLM would not start: ")
    assert why in text


@pytest.mark.parametrize(
    "words",
    [
        ("--vllm-version", "0.31.0", "Qwen/Qwen3-8B --quantization bitsandbytes"),
        ("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve Qwen/Qwen3-8B --max-model-len 80000",),
        # Sized by its name: its own context may be longer.
        ("vllm serve someone/Qwen3-8B-Mine --max-model-len 80000",),
    ],
)
def test_a_launch_that_vllm_may_take_is_sized(words: tuple[str, ...]) -> None:
    *flags, line = words
    line = line if "vllm serve" in line else f"vllm serve {line}"
    done = size("--gpu", "h200", *flags, line)
    assert done.stdout.startswith("FITS"), done.stdout + done.stderr


def test_gguf_says_which_plugin_vllm_needs() -> None:
    text = " ".join(size("unsloth/Qwen3-8B-GGUF:Q4_K_M", "h200").stdout.split())
    assert "vLLM has no q4_k weights of its own any more: pip install vllm-gguf-plugin" in text


def test_a_checkpoint_that_asks_for_an_fp8_cache_gets_it_as_in_vllm() -> None:
    """vLLM 0.14 and later, b200 with MiniMax-M2.5-NVFP4: 769,888 tokens, which only FP8 gives."""
    asked = ("--gpu", "b200", "vllm serve nvidia/MiniMax-M2.5-NVFP4 -tp 2")
    new, old = document(*asked)[1], document("--vllm-version", "0.13.0", *asked)[1]
    assert new["inputs"]["kv_cache_dtype"] == "fp8"
    held = [each["memory"]["kv_capacity_tokens"]["expected"] for each in (new, old)]
    assert held[0] > 1.8 * held[1]
    assert "KV cache in fp8: the checkpoint asks for it" in " ".join(size(*asked).stdout.split())
    stated = document(*asked[:2], f"{asked[2]} --kv-cache-dtype bfloat16")[1]
    assert stated["inputs"]["kv_cache_dtype"] == "bfloat16"


def test_variables_of_a_container_are_read() -> None:
    for listed in (
        "env: [{name: VLLM_USE_DEEP_GEMM, value: '0'}, {name: A, valueFrom: {}}]",
        "environment: {VLLM_USE_DEEP_GEMM: 0}",
        "environment: [VLLM_USE_DEEP_GEMM=0]",
    ):
        pasted = f"image: vllm/vllm-openai:v0.20.0\n{listed}\nargs: [--model, Qwen/Qwen3-8B]\n"
        text = size("--gpu", "h100", "--launch", pasted).stdout
        assert "run: VLLM_USE_DEEP_GEMM=0 vllm serve Qwen/Qwen3-8B" in text


def test_whole_prompts_take_a_budget_of_the_longest() -> None:
    """As in EngineArgs of vLLM 0.32: the default budget holds the longest request."""
    _, answer = document(
        "--gpu", "h100-sxm", "vllm serve Qwen/Qwen3-8B --no-enable-chunked-prefill"
    )
    assert answer["inputs"]["max_num_batched_tokens"] == 40_960


@pytest.mark.parametrize(
    ("flags", "line", "said"),
    [
        ((), "-tp 2 --tensor-parallel-size 4",
         "--tensor-parallel-size 2 and --tensor-parallel-size 4 are given: vLLM takes the last"),
        ((), "--no-enable-prefix-caching --enable-prefix-caching",
         "--no-enable-prefix-caching and --enable-prefix-caching are given: vLLM takes the last"),
        ((), "--gpu-memory-utilization 0.5 --kv-cache-memory-bytes 8G",
         "--gpu-memory-utilization has no effect beside --kv-cache-memory-bytes"),
        ((), "--enforce-eager --cudagraph-capture-sizes 1 2 4",
         "--cudagraph-capture-sizes has no effect beside --enforce-eager"),
        ((), "--disable-log-requests",
         "vLLM has no --disable-log-requests any more and refuses it: not in run"),
        ((), "--swap-space 4", "vLLM has no --swap-space any more and refuses it: not in run"),
        ((), "--task generate", "vLLM has no --task any more and refuses it: not in run"),
        (("--vllm-version", "0.12.0"), "--swap-space 4", ""),
        (("--tp", "2"), "-tp 4", "--tp 2 goes before --tensor-parallel-size 4 of the command line"),
        ((), "-tp 2 --tensor-parallel-size 2", ""),
        (("--tp", "2"), "-tp 2", ""),
    ],
)  # fmt: skip
def test_contradictory_flags_are_settled_under_the_verdict(
    flags: tuple[str, ...], line: str, said: str
) -> None:
    asked = (*flags, "--gpu", "h100-sxm", f"vllm serve Qwen/Qwen3-8B {line}")
    text = " ".join(size(*asked, brief=True).stdout.split())
    warnings = text.partition(" run: ")[0].partition("warning: ")[2]
    assert warnings == said
    assert not said or said in document(*asked)[1]["notes"]
