"""An answer of `size --search` has one figure for each quantity, wherever it is written."""

from __future__ import annotations

import random
import re
import shlex

import pytest

from tests.agent.test_size import document, size

MODELS = (
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-8B-FP8",
    "meta-llama/Llama-3.3-70B-Instruct",
    "google/gemma-3-27b-it",
    "openai/gpt-oss-120b",
    "deepseek-ai/DeepSeek-V3",
)
GPUS = ("h100-sxm", "h200", "b200", "l40s", "a100-80gb", "rtx-4090", "mi300x")
STATED = {
    "--quantization": ("fp8",),
    "--kv-cache-dtype": ("fp8",),
    "--max-model-len": ("16384", "32768"),
    "--context": ("8000", "12000"),
    "--max-num-seqs": ("32", "64"),
    "--tp": ("2", "4"),
    "--safety": ("1", "2"),
    "--gpus": ("8", "64"),
}


def drawn(seed: int) -> list[str]:
    """The flags of a random search."""
    draw = random.Random(seed)
    flags = ["--model", draw.choice(MODELS), "--search"]
    flags += ["--input-tokens", str(draw.choice((200, 1000, 2000, 6000)))]
    flags += ["--output-tokens", str(draw.choice((50, 200, 500, 1500)))]
    if draw.random() < 0.5:
        flags += ["--gpu", draw.choice(GPUS)]
    else:
        flags += ["--gpus-allowed", ",".join(draw.sample(GPUS, 3))]
    if draw.random() < 0.75:
        flags += ["--rate", str(draw.choice((0.5, 3, 12, 45)))]
    if draw.random() < 0.6:
        flags += ["--slo-ttft", draw.choice(("500ms", "1s", "3s"))]
    if draw.random() < 0.6:
        flags += ["--slo-itl", draw.choice(("25ms", "40ms", "80ms"))]
    for flag in draw.sample(sorted(STATED), draw.choice((0, 0, 1, 2))):
        flags += [flag, draw.choice(STATED[flag])]
    return flags


# Its ITL target is assumed: 13 replicas stood beside 15.
ASSUMED_ITL = [
    *("--model", "Qwen/Qwen3-32B", "--gpu", "mi300x", "--search", "--rate", "40"),
    *("--input-tokens", "2000", "--output-tokens", "500", "--slo-ttft", "5s"),
]


@pytest.mark.parametrize("flags", [*map(drawn, range(12)), ASSUMED_ITL], ids=str)
def test_text_json_command_and_list_agree(flags: list[str]) -> None:
    status, answer = document(*flags)
    done = size(*flags, brief=True)
    assert done.returncode == status, done.stderr
    if not answer["search"]["best"]:
        assert status == 1
        return
    assert status == 0
    text = " ".join(done.stdout.split())
    best, inputs = answer["search"]["best"][0], answer["inputs"]
    replicas, gpus = best["replicas"], best["gpus"]
    # The JSON: one launch and one number of replicas.
    for key in (
        "gpu", "tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel",
        "quantization", "kv_cache_dtype", "max_model_len",
    ):  # fmt: skip
        assert inputs[key] == best[key], key
    assert answer["meets_targets"] is not False
    assert inputs["replicas"] == replicas
    assert inputs["concurrency"] == best["concurrency"] * replicas
    assert answer["performance"]["itl_s"] == pytest.approx(best["itl_s"], rel=1e-3)
    assert answer["performance"]["ttft_s"] == pytest.approx(best["ttft_s"], rel=1e-3)
    if "--rate" in flags:
        assert answer["fleet"]["deployed_instances"] == replicas
        assert answer["fleet"]["gpus"] == gpus
    cost = answer["cost"]["usd_per_million_output_tokens"]
    assert cost == pytest.approx(best["usd_per_million_output_tokens"], rel=1e-3)
    assert answer["cost"]["usd_per_year"] == pytest.approx(best["usd_per_hour"] * 8760, rel=1e-3)
    # The text: every count of replicas is that one.
    body, _, table = text.partition(" configurations meet the targets")
    counts = {int(count) for count in re.findall(r"\b(\d+) replicas?\b(?! of )", body)}
    assert counts <= {replicas}, body
    row = re.search(r"1\. (\d+) replicas? on (\S+) TP (\d+)(.*?), (\S+) weights, ", table)
    assert row is not None
    assert row.group(1, 2, 3, 5) == (
        str(replicas), best["gpu"], str(best["tensor_parallel"]), best["quantization"],
    )  # fmt: skip
    # The command is the launch.
    command = next(line for line in done.stdout.splitlines() if line.startswith("run: "))
    assert command == f"run: {answer['command']}"
    words = shlex.split(command.partition("  # ")[0])
    ranks = words[words.index("--tensor-parallel-size") + 1] if best["tensor_parallel"] > 1 else "1"
    assert ranks == str(best["tensor_parallel"])
    # What the search changed is said in the first lines.
    first = " ".join(" ".join(done.stdout.splitlines()[:8]).split())
    for note in best["notes"]:
        assert note in first or not re.search("changed from|rejected", note), note
    own = (
        "mxfp4"
        if "gpt-oss" in flags[1]
        else "fp8"
        if re.search("FP8|DeepSeek", flags[1])
        else "bf16"
    )
    changes_weights = best["quantization"] != own and "--quantization" not in flags
    assert ("weights changed from" in first) == changes_weights, first
