"""What users ask `kneewatch size`: the first ten lines hold the answer, what to change, and the
whole command."""

from __future__ import annotations

import re

import pytest

from tests.agent.test_size import document, size

CHAT = ("--input-tokens", "2000", "--output-tokens", "500")
QWEN = ("--model", "Qwen/Qwen3-32B")
LLAMA = ("--model", "meta-llama/Llama-3.3-70B-Instruct")
UNSET = "--kv-cache-memory-bytes unset"
QUESTIONS = {
    "does a 70B fit on one H100": (
        (*LLAMA, "--gpu", "h100-sxm"),
        ["DOES NOT FIT", "weights --kv-cache-dtype fp8", "--tensor-parallel-size 4: "],
    ),
    "does a 32B fit on a 5090": (
        (*QWEN, "--gpu", "rtx-5090"),
        ["DOES NOT FIT", "nvfp4 weights", "test answers", "# needs a checkpoint in "],
    ),
    "what does fp8 KV buy": (
        (*QWEN, "--gpu", "h200", *CHAT, "--compare", "kv-cache-dtype=fp8"),
        ["as stated: ", r"kv-cache-dtype=fp8: \d+; ITL"],
    ),
    "H200 or B200": (
        (*QWEN, "--gpu", "h200", *CHAT, "--concurrency", "32", "--compare", "b200"),
        [r"as stated: .*USD/M", r"b200: .*USD/M"],
    ),
    "TP 2 or two replicas": (
        (*QWEN, "--gpu", "h200", *CHAT, "--concurrency", "64", "--compare", "tp=2,tp=1+gpus=2"),
        [r"tp=2: .*; 2 GPUs", r"tp=1\+gpus=2: .*; 2 GPUs"],
    ),
    "how many users within my targets": (
        (*QWEN, "--gpu", "h200", *CHAT, "--ttft-slo", "1s", "--itl-slo", "40ms"),
        [r"FITS: holds \d+ requests",
         r"means, not P99\), for one replica: \S+ requests/s with \d+ in flight"],
    ),
    "how many GPUs for 500 users": (
        ("--model", "Qwen/Qwen3-32B-FP8", "--gpu", "h100-sxm", *CHAT, "--users", "500"),
        [r"^500 users: 8 GPUs \(4 replicas of 2\)\. FITS"],
    ),
    "how many GPUs for 50 users of a model larger than one": (
        (*LLAMA, "--gpu", "h100-sxm", *CHAT, "--users", "50"),
        [r"^50 users: 4 GPUs \(1 replica of 4\)\. FITS"],
    ),
    "how many users of 32k": (
        (*QWEN, "--gpu", "h100-sxm", "--tp", "2", "--max-model-len", "32768"),
        [r"FITS: holds \d+ requests of 32,768 tokens"],
    ),
    "64 users do not fit": (
        (*QWEN, "--gpu", "h100-sxm", "--concurrency", "64", "--max-model-len", "8192", *CHAT),
        ["DOES NOT FIT: holds", "--kv-cache-dtype fp8", r"--tensor-parallel-size 2: \d+"],
    ),
    "long context on MLA": (
        ("--model", "deepseek-ai/DeepSeek-V3", "--gpu", "h200", "--tp", "8",
         "--context", "100000", "--concurrency", "32"),
        ["DOES NOT FIT", "--decode-context-parallel-size 8: "],
    ),
    "what will my benchmark show": (
        (*QWEN, "--gpu", "h200", *CHAT, "--concurrency", "64"),
        [r"A benchmark that starts 64 at once \(--max-concurrency\): TTFT \d"],
    ),
    "tight on one GPU": (
        ("--model", "Qwen/Qwen3-8B", "--gpu", "l4"),
        ["What would hold more requests of", "--gpu-memory-utilization 0.95"],
    ),
    "how many users on two H200 within my targets": (
        (*QWEN, "--gpu", "h200", "--gpus", "2", *CHAT, "--slo-ttft", "1s", "--slo-itl", "40ms"),
        [r"FITS: holds \d+ requests", r"for one replica: \S+ requests/s with \d+ in flight"],
    ),
    "can I run a 70B on four L40S": (
        (*LLAMA, "--gpu", "l40s", "--gpus", "4"),
        ["DOES NOT FIT: .* use", "--max-model-len 57104", r"4 GPUs, \d+ USD/h"],
    ),
    "what does 128k context cost": (
        (*LLAMA, "--gpu", "h200", "--tp", "2", "--max-model-len", "131072",
         "--compare", "max-model-len=32768"),
        [r"as stated: [\d.]+; 2 GPUs", r"max-model-len=32768: \d+ of 32,768 tokens"],
    ),
    "what latency at 20 requests/s": (
        (*LLAMA, "--gpu", "h100-sxm", "--tp", "4", *CHAT, "--rate", "20",
         "--slo-ttft", "1s", "--slo-itl", "50ms"),
        [r"At 20 requests/s on \d+ replicas .*: TTFT \d+ ms, ITL \d+ ms, \d+ in flight",
         r"\d+ replicas, \d+ GPUs for the peak: [\d,]+ USD a year"],
    ),
    "does one GPU serve one request/s": (
        (*QWEN, "--gpu", "h200", *CHAT, "--rate", "1"),
        [r"At 1 requests?/s on 1 replica .*: TTFT \d+ ms, ITL \d+ ms, \d+ in flight"],
    ),
    "how many replicas without targets": (
        (*LLAMA, "--gpu", "h100-sxm", "--tp", "4", *CHAT, "--rate", "20"),
        [r"NOT SERVED, \S+ requests/s at most", r"takes\s+\d+ replicas or more\s+\(\d+ GPUs\)"],
    ),
    "a rate on a launch that does not start": (
        ("--model", "openai/gpt-oss-120b", "--gpu", "h100", *CHAT, "--rate", "10"),
        ["DOES NOT FIT", r"With 2 GPUs each: At 10 requests/s on \d+ replica"],
    ),
    "DeepSeek-R1 on a node of H200": (
        ("--model", "deepseek-ai/DeepSeek-R1", "--gpu", "h200", "--gpus", "8"),
        [r"FITS: holds \d requests of 163,840 tokens", "--decode-context-parallel-size 8: "],
    ),
    "an 8B on a 4090": (
        ("--model", "Qwen/Qwen3-8B", "--gpu", "rtx-4090"),
        ["DOES NOT FIT", "--max-model-len 36560", "--kv-cache-dtype fp8"],
    ),
    "100 users of a vision model": (
        ("--model", "google/gemma-3-27b-it", "--gpu", "a100-80gb", "--concurrency", "100", *CHAT),
        ["DOES NOT FIT: holds 2", "--tensor-parallel-size 2: ", r"\d+ replicas: 1\d\d"],
    ),
    "TP 2 or two replicas for 4 requests/s": (
        (*QWEN, "--gpu", "h200", *CHAT, "--rate", "4", "--slo-ttft", "2s", "--slo-itl", "50ms",
         "--compare", "tp=2"),
        [r"4 requests/s: \d+ GPUs \(\d+ replicas of 1\)\. FITS", r"as stated: .* USD/M; \d+ GPUs",
         r"tp=2: .* USD/M; \d+ GPUs"],
    ),
    "does a 30B MoE in 4 bit fit on two 4090": (
        ("qwen3-coder-30b-a3b-instruct", "2x4090", "--quantization", "awq"),
        ["DOES NOT FIT: .* use --max-model-len 236816", "--max-num-seqs 16: 1; 2 GPUs"],
    ),
    "does Gemma run on a T4": (
        ("google/gemma-3-4b-it", "t4"),
        ["DOES NOT FIT", "it takes float32, of twice the size", r"--gpu l4: [\d.]+; 1 GPU, "],
    ),
    "what does float32 cost": (
        ("qwen3-8b", "h100", "--context", "8192", "--compare", "dtype=float32"),
        [r"as stated: 4\d; 1 GPU", r"dtype=float32: 1\d; 1 GPU"],
    ),
    "is one GPU enough for the peak": (
        ("qwen3-8b", "l4", "--max-model-len", "8192", *CHAT, "--rate", "0.5"),
        ["DOES NOT SERVE THE RATE", r"NOT (SURELY )?SERVED, 0\.\d requests/s at most",
         r"takes \d replicas or more \(\d GPUs\) with a safety factor of 1\.3"],
    ),
    "one GPU or two": (
        ("qwen3-8b", "1xh100", *CHAT, "--concurrency", "32", "--compare", "tp=2,gpus=2+tp=1"),
        [r"as stated: \d+; ITL", r"tp=2: [\d,]+; ITL .*?2 GPUs", r"gpus=2\+tp=1: \d+; .*?2 GPUs"],
    ),
    "a context beyond the model's": (
        ("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve Qwen/Qwen3-32B --max-model-len 65536 -tp 2",
         "--gpu", "h200"),
        ["^FITS: holds", "lets vLLM start, and answers beyond may be wrong",
         "run: VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve Qwen/Qwen3-32B"],
    ),
    "how much does Llama 4 hold": (
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "8xh200", "--max-model-len", "262144"),
        [r"^FITS: holds 5\d requests of 262,144 tokens"],
    ),
    "what context can I afford": (
        ("vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len auto", "--gpu", "l4"),
        [r"FITS: holds 1 request of 32,\d+ tokens", "--max-model-len auto",
         r"auto: vLLM takes the tokens that fit, about 32,\d+"],
    ),
    "is speculation worth it": (
        ("deepseek-ai/DeepSeek-V3", "8xh200", *CHAT, "--concurrency", "64", "--draft-model",
         "mtp", "--num-speculative-tokens", "1", "--acceptance", "0.8"),
        [r"as stated: \d+; ITL \d+ ms", r"without the draft: \d+; ITL \d+ ms"],
    ),
    "32 adapters": (
        ("llama-3.1-8b-instruct", "h100", "--max-loras", "32", "--max-lora-rank", "64",
         "--concurrency", "64", *CHAT),
        ["FITS: holds", "--enable-lora --max-loras 32 --max-lora-rank 64"],
    ),
    "which users does an MI300X hold": (
        (*QWEN, "--gpu", "mi300x", "--users", "100", *CHAT),
        [r"100 users: 1 GPU \(1 replica of 1\)\. FITS: holds 1\d\d requests"],
    ),
    "what does it cost": (
        (*QWEN, "--gpu", "h200", *CHAT, "--concurrency", "64"),
        [r"USD a year", r"USD per million output tokens"],
    ),
    "Qwen3.8 with its whole context on a 5090": (
        ("vllm serve nvidia/Qwen3.8-27B-NVFP4 --max-model-len 262144 --kv-cache-dtype fp8",
         "--gpu", "rtx-5090"),
        [r"DOES NOT FIT: .* use --max-model-len 1\d+ or split the model over 2 GPUs"],
    ),
    "GLM-5.2 on eight Sparks": (
        ("nvidia/GLM-5.2-NVFP4", "8xgb10"),
        ["KV cache in fp8: the checkpoint asks for it", "--decode-context-parallel-size 8: "],
    ),
    "how many GPUs for 100 agents of MiniMax-M3": (
        ("MiniMaxAI/MiniMax-M3", "h200", "--users", "100", "--input-tokens", "20000",
         "--output-tokens", "1000"),
        [r"^100 users: \d+ GPUs \(\d replicas of 8\)\. FITS"],
    ),
    "a million tokens of DeepSeek-V4-Flash": (
        ("vllm serve deepseek-ai/DeepSeek-V4-Flash -tp 2 --max-model-len 1048576", "--gpu", "h200",
         "--compare", "tp=4"),
        ["FITS: holds 10 requests of 1,048,576", "as stated: 10; 2 GPUs", "tp=4: 20; 4 GPUs"],
    ),
    "how many GPUs for 50 coding agents of Kimi": (
        ("moonshotai/Kimi-K2.6", "h200", "--users", "50", "--input-tokens", "60000",
         "--output-tokens", "1000"),
        [r"^50 users: \d+ GPUs \(\d replicas of 8\)\. FITS: holds \d+ requests of 61,000 tokens"],
    ),
    "128k of Gemma 4 on one H100": (
        ("google/gemma-4-31B-it", "h100", "--max-model-len", "131072"),
        ["DOES NOT FIT: .* or split the model over 2 GPUs"],
    ),
    "30 users of gpt-oss-120b on one workstation": (
        ("openai/gpt-oss-120b", "rtx-pro-6000", "--users", "30", "--input-tokens", "4000",
         "--output-tokens", "800"),
        [r"^30 users: 1 GPU \(1 replica of 1\)\. FITS", r"at 30 requests in flight: TTFT \d+ ms"],
    ),
    "Laguna on one workstation": (
        ("poolside/Laguna-S-2.1-NVFP4", "rtx-pro-6000"),
        ["PROBABLY FITS: holds 1 request of 262,144 tokens", "--gpu-memory-utilization 0.95: 1.5"],
    ),
    "Nemotron 3 Ultra on a node of B200": (
        ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4", "8xb200"),
        [r"FITS: holds \d+ requests of 262,144 tokens", "Fewest GPUs for one replica: 4 "],
    ),
    "a 35B MoE in 4 bit on a 4090": (
        ("cyankiwi/Qwen3.6-35B-A3B-AWQ-4bit", "rtx-4090", "--max-model-len", "65536"),
        ["DOES NOT FIT: .* no room", "--gpu rtx-5090: ", "--tensor-parallel-size 2: "],
    ),
    "H200 or B300 for DeepSeek-V4-Pro": (
        ("deepseek-ai/DeepSeek-V4-Pro", "8xh200", "--input-tokens", "8000", "--output-tokens",
         "1000", "--concurrency", "64", "--compare", "b300"),
        [r"as stated: \d+; ITL .* USD/M", r"b300: [\d,]+; ITL .* USD/M"],
    ),
    "a million tokens of MiMo on four RTX 6000D": (
        ("XiaomiMiMo/MiMo-V2.6-Flash", "4xrtx-6000d", "--max-model-len", "1048576"),
        ["FITS: holds 5 requests of 1,048,576 tokens", "--kv-cache-dtype fp8: 10"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_first_ten_lines_answer(question: str) -> None:
    flags, answers = QUESTIONS[question]
    first = size(*flags).stdout.splitlines()[:10]
    assert sum("vllm serve " in line for line in first) == 1
    text = " ".join(" ".join(first).split())
    assert [words for words in answers if not re.search(words, text)] == []


def test_a_change_is_best_if_it_holds_the_load_for_the_least() -> None:
    status, answer = document(*QUESTIONS["64 users do not fit"][0])
    assert status == 1
    levers = answer["levers"]
    fitting = [lever for lever in levers if lever["fits"]]
    assert levers[: len(fitting)] == fitting
    prices = [lever["usd_per_hour"] for lever in fitting]
    assert prices == sorted(prices)
    assert all(lever["max_concurrency"] >= 64 for lever in fitting)


@pytest.mark.parametrize(
    ("ranks", "stated", "words", "expected"),
    [
        ("4", "2G", "use --max-model-len 26192", {UNSET, "--kv-cache-dtype fp8"}),
        ("1", "8G", "more than the 0 GiB", {"awq weights", "--tensor-parallel-size 2"}),
        ("2", "30G", "more than the 9.092 GiB", {UNSET, "fp8 weights"}),
    ],
)
def test_freed_memory_is_no_kv_cache_where_a_flag_states_its_bytes(
    ranks: str, stated: str, words: str, expected: set[str]
) -> None:
    """A stated KV cache grows by its own flag alone; where the GPU has no room for it, fewer bytes
    of weights let vLLM start."""
    flags = ("--tp", ranks, "--kv-cache-memory-bytes", stated, "--max-model-len", "32768")
    status, answer = document(*LLAMA, "--gpu", "h100-sxm", *flags)
    assert (status, words in " ".join(answer["notes"])) == (1, True)
    changes = {each["change"].partition(" --max-model-len")[0] for each in answer["levers"]}
    assert expected <= changes
    assert any("weights" in change for change in changes) == ("more than" in words)


def test_targets_take_more_gpus_for_the_same_users_and_are_kept() -> None:
    asked = ("--model", "Qwen/Qwen3-32B-FP8", "--gpu", "h100-sxm", *CHAT, "--users", "500")
    _, free = document(*asked)
    _, bound = document(*asked, "--itl-slo", "40ms")
    assert bound["performance"]["itl_s"] <= 0.04 < free["performance"]["itl_s"]
    assert bound["cost"]["usd_per_year"] > free["cost"]["usd_per_year"]
    done = size(*asked, "--gpus", "2")
    assert (done.returncode, "set --concurrency in place of" in done.stderr) == (2, True)


def test_a_launch_that_would_not_start_has_no_price() -> None:
    _, answer = document(*LLAMA, "--gpu", "h100-sxm", *CHAT)
    assert answer["cost"]["usd_per_year"] is None
    assert answer["performance"]["itl_s"] is None


@pytest.mark.parametrize("wrong", ["h300", "tp=two", "colour=red", "plan=x"])
def test_what_cannot_be_compared_is_named(wrong: str) -> None:
    done = size(*QWEN, "--gpu", "h200", "--compare", wrong)
    assert done.returncode == 2
    assert wrong.split("=")[0] in done.stderr


def test_changes_that_do_not_suffice_are_marked_and_last() -> None:
    asked = (*LLAMA, "--gpu", "h100-sxm", "--concurrency", "64")
    text, (_, answer) = size(*asked).stdout, document(*asked)
    assert ", enough first by price, then by tokens held:\n" in text
    short = [lever for lever in answer["levers"][:5] if not lever["fits"]]
    assert text.count("(not enough: 64 wanted)") == len(short) > 0
    held = [lever["max_concurrency"] * lever["context_tokens"] for lever in short]
    assert held == sorted(held, reverse=True)
    fitting = size(*QUESTIONS["64 users do not fit"][0]).stdout
    assert "not enough" not in fitting


LLAMA_ON_L4 = ("--model", "Qwen/Qwen3-8B", "--gpu", "l4", "--max-model-len", "32768",
               "--input-tokens", "2000", "--output-tokens", "300")  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "change", "short"),
    [
        # Cheaper changes hold it and would be too slow.
        (("--concurrency", "30", "--slo-itl", "40ms"), "--gpu ", r"\d of 30 within the targets"),
        # No change alone serves it: the first is one with replicas.
        (("--rate", "3"), ", 2 replicas", r"[\d.]+ of 3.9 requests/s"),
        (("--concurrency", "300"), ", 4 replicas", "300 wanted"),
    ],
)
def test_the_first_change_is_enough_for_the_load_and_the_targets(
    flags: tuple[str, ...], change: str, short: str
) -> None:
    asked = (*LLAMA_ON_L4, *flags)
    text, (_, answer) = size(*asked).stdout, document(*asked)
    first, *others = answer["levers"]
    assert (first["suffices"], change in first["change"]) == (True, True)
    assert f"instead ({first['change']}): " in text
    assert re.search(rf"\(not enough: {short}\)", text)
    prices = [each["usd_per_hour"] for each in others if not each["suffices"] and each["fits"]]
    if "--slo-itl" in flags:
        assert min(prices) < first["usd_per_hour"]


def test_where_no_change_is_enough_the_answer_says_so() -> None:
    asked = (*LLAMA_ON_L4, "--concurrency", "30", "--slo-itl", "3ms")
    text = size(*asked).stdout
    assert ", none of them enough, by tokens held:\n" in text
    assert "instead (" not in text
    assert not any(each["suffices"] for each in document(*asked)[1]["levers"])


def test_a_context_that_is_asked_for_comes_before_a_shorter_one() -> None:
    asked = (*LLAMA, "--gpu", "h100-sxm", "--tensor-parallel", "2", "--max-model-len", "131072")
    text, (_, answer) = size(*asked).stdout, document(*asked)
    assert all("--max-model-len" not in lever["change"] for lever in answer["levers"][:5])
    listed = text.partition("What would hold more")[2].splitlines()[1:6]
    assert not any("--max-model-len" in line for line in listed)


def test_a_rate_that_is_not_served_exits_1() -> None:
    flags, _ = QUESTIONS["how many replicas without targets"]
    status, answer = document(*flags)
    assert (status, answer["fits"], answer["serves_peak"]) == (1, True, False)
    assert size(*flags).stdout.startswith("FITS IN MEMORY, DOES NOT SERVE THE RATE; holds ")
    status, answer = document(*flags[:-1], "2")
    assert (status, answer["serves_peak"]) == (0, True)
    # Stated usable requests/s decide before the prediction.
    status, answer = document(*flags, "--usable-rps", "9")
    assert (status, answer["serves_peak"]) == (0, None)
    assert answer["fleet"]["deployed_instances"] == 4
    assert "NOT SERVED" not in size(*flags, "--usable-rps", "9").stdout


@pytest.mark.parametrize(
    "load",
    [
        ("--rate", "6", "--slo-itl", "50ms"),
        ("--slo-itl", "40ms", "--slo-ttft", "2s"),
        ("--concurrency", "48"),
    ],
)
def test_what_is_compared_has_the_figures_of_the_answer(load: tuple[str, ...]) -> None:
    """A launch beside others is at the load that it is planned for, not at one request."""
    flags = (*QWEN, "--gpu", "h200", *CHAT, *load, "--compare", "b200,quantization=fp8")
    _, answer = document(*flags)
    own = answer["compare"][0]
    expected = answer["cost"]["usd_per_million_output_tokens"]
    assert own["usd_per_million_output_tokens"] == pytest.approx(expected, rel=1e-3)
    assert own["usd_per_hour"] * 8760 == pytest.approx(answer["cost"]["usd_per_year"], rel=1e-3)
    for row, change in zip(answer["compare"][1:], (("b200",), ("h200", "fp8")), strict=True):
        gpu, *scheme = change
        quantized = ("--quantization", scheme[0]) if scheme else ()
        _, alone = document(*QWEN, "--gpu", gpu, *CHAT, *load, *quantized)
        expected = alone["cost"]["usd_per_million_output_tokens"]
        assert row["usd_per_million_output_tokens"] == pytest.approx(expected, rel=1e-3)


def test_what_is_compared_says_where_it_misses() -> None:
    flags = (*QWEN, "--gpu", "h200", *CHAT, "--rate", "2", "--slo-itl", "30ms")
    text = size(*flags, "--compare", "l40s+tp=2").stdout
    assert re.search(r"  l40s\+tp=2: \d+ \(misses the targets\);", text)


@pytest.mark.parametrize("users", [1, 2])
def test_a_few_users_take_one_small_gpu_with_a_shorter_context(users: int) -> None:
    text = size("qwen3-8b", "l4", "--users", str(users), *CHAT, "--explain").stdout
    assert f"{users} user{'s' * (users > 1)}: 1 GPU (1 replica of 1). FITS" in text
    assert re.search(r"run: vllm serve Qwen/Qwen3-8B --max-model-len 2\d{4}\n", text)
    assert "vLLM refuses requests of more than 2" in " ".join(text.split())


def test_engines_of_one_answer_are_counted_together() -> None:
    asked = ("qwen3-32b", "h100", "--tp", "2", *CHAT)
    alone, together = (
        " ".join(size(*asked, *more).stdout.split())
        for more in (("--gpus", "2"), ("--gpus", "8", "--concurrency", "4"))
    )
    (each,), (of_all,) = (re.findall(r"holds (\d+) requests", text) for text in (alone, together))
    assert int(of_all) == 4 * int(each)
    assert f"holds {of_all} requests of 2,500 tokens" in together
    assert "on 4 engines together" in together
    assert "4 engines together: " in together.split("for one engine at 1 request")[1]


def test_launches_are_compared_at_the_rate_that_is_asked_for_also_without_targets() -> None:
    text = size(*QWEN, "--gpu", "h200", *CHAT, "--rate", "1", "--compare", "b200").stdout
    own, other = (line for line in text.splitlines() if line.startswith("  ") and "USD/M" in line)
    asked_itl = re.search(r"At 1 requests?/s .*?ITL ([\d.]+) ms", text, re.DOTALL)
    assert asked_itl is not None
    assert f"ITL {asked_itl[1]} ms" in own
    output_tokens_per_s = int(CHAT[CHAT.index("--output-tokens") + 1])
    assert all(f"{output_tokens_per_s:,} tokens/s" in line for line in (own, other))


def test_the_concurrency_that_vllm_will_log_is_that_of_its_longest_request() -> None:
    launch = "vllm serve google/gemma-3-27b-it --max-model-len 32768"
    flags = (launch, "--gpu", "h200", "--concurrency", "10", "--explain")
    whole, shorter = (size(*flags, *context).stdout for context in ((), ("--context", "8000")))
    logged = re.search(r"maximum\s+concurrency\s+of\s+([\d.]+)\s+for\s+32,768", whole)
    assert logged is not None
    assert f"concurrency of {logged[1]} for 32,768" in " ".join(shorter.split())


LLAMA_8B_ON_L4 = ("--model", "Qwen/Qwen3-8B", "--gpu", "l4", "--max-model-len", "8192",
                  "--input-tokens", "500", "--output-tokens", "200")  # fmt: skip


def test_a_rate_is_served_with_the_safety_factor_also_without_targets() -> None:
    most = re.search(
        r"NOT SERVED, ([\d.]+) requests/s", size(*LLAMA_8B_ON_L4, "--rate", "9").stdout
    )
    assert most is not None
    for share, succeeds in ((0.75, True), (0.9, False)):
        rate = f"{share * float(most[1]):g}"
        status, answer = document(*LLAMA_8B_ON_L4, "--rate", rate)
        assert (status, answer["serves_peak"]) == (1 - succeeds, succeeds)
        # The figures beside other launches are at the rate too.
        compared = size(*LLAMA_8B_ON_L4, "--rate", rate, "--compare", "h100").stdout
        assert bool(re.search(r"as stated: \d+ \(does not serve the rate\)", compared)) != succeeds
    text = " ".join(size(*LLAMA_8B_ON_L4, "--rate", rate).stdout.split())
    assert "NOT SURELY SERVED" in text
    assert "2 replicas or more (2 GPUs) with a safety factor of 1.3" in text


def test_a_launch_that_does_not_serve_the_rate_is_compared_at_the_most_that_it_serves() -> None:
    flags = (*LLAMA_8B_ON_L4, "--rate", "20", "--compare", "h100")
    most = re.search(r"NOT SERVED, ([\d.]+) requests/s", size(*flags).stdout)
    _, answer = document(*flags)
    own = answer["compare"][0]["output_tokens_per_s"]
    assert most is not None
    assert own == pytest.approx(200 * float(most[1]), rel=0.05)


def test_the_levers_of_a_rate_leave_as_many_seats_as_it_takes() -> None:
    _, answer = document(*LLAMA_8B_ON_L4, "--rate", "1.5")
    running = answer["performance"]["running_peak"]
    seats = [
        int(words)
        for lever in answer["levers"]
        for words in re.findall(r"--max-num-seqs (\d+)", lever["change"])
    ]
    assert running > 16
    assert all(number >= running for number in seats)


def test_a_target_is_judged_with_one_margin() -> None:
    """ITL is predicted between what surely meets the target and the target itself."""
    flags = (*QWEN, "--gpu", "h200", "--tp", "1", *CHAT)
    _, plain = document(*flags, "--concurrency", "20")
    target = ("--slo-itl", f"{1050 * plain['performance']['itl_s']:g}ms")
    done = size(*flags, "--concurrency", "20", *target)
    text = " ".join(done.stdout.split())
    assert done.returncode == 1
    assert text.startswith("FITS IN MEMORY, MAY MISS THE TARGETS: ITL ")
    assert "surely meets it" in text
    # The users are spread over replicas until each keeps the margin.
    _, spread = document(*flags, "--users", "20", *target)
    assert spread["meets_targets"]
    assert spread["inputs"]["replicas"] > 1


def test_what_is_compared_runs_no_more_than_its_seats() -> None:
    flags = (*QWEN, "--gpu", "h200", *CHAT, "--concurrency", "32")
    text = size(*flags, "--compare", "max-num-seqs=16").stdout
    assert "  max-num-seqs=16: 16 (not enough: 32 wanted); " in text
    _, answer = document(*flags, "--compare", "max-num-seqs=16")
    assert [row["max_concurrency"] for row in answer["compare"]][1] == 16


def test_another_split_is_compared_on_the_gpus_that_it_takes() -> None:
    _, answer = document("qwen3-8b", "1xh100", *CHAT, "--compare", "tp=2,tp=2+pp=2")
    assert [row["gpus"] for row in answer["compare"]] == [1, 2, 4]
    _, answer = document("qwen3-8b", "h100", "--gpus", "8", "--tp", "1", *CHAT, "--compare", "tp=2")
    assert [row["gpus"] for row in answer["compare"]] == [8, 8]


def test_the_longest_context_is_left_to_vllm() -> None:
    launch = "vllm serve Qwen/Qwen3-14B --max-model-len auto"
    assert "run: " + launch + "\n" in size(launch, "--gpu", "l40s").stdout
    _, plain = document(launch, "--gpu", "a100-40gb", "--kv-cache-memory-bytes", "5G")
    longest = plain["inputs"]["max_model_len"]
    lengths = ("--input-tokens", str(longest), "--output-tokens", "500")
    done = size(launch, "--gpu", "a100-40gb", "--kv-cache-memory-bytes", "5G", *lengths)
    text = " ".join(done.stdout.split())
    assert done.returncode == 1
    assert f"auto takes about {longest:,} tokens, and vLLM refuses a request of" in text
    compared = size(launch, "--gpu", "l4", "--compare", "h100").stdout
    assert re.search(r"  h100: \d", compared)


def test_variables_in_front_of_the_command_are_kept() -> None:
    launch = "vllm serve Qwen/Qwen3-8B --max-model-len 80000"
    secret = "HF_TOKEN=hf_abc VLLM_API_KEY=abc"
    done = size(f"{secret} VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 {launch}", "--gpu", "h100")
    text = " ".join(done.stdout.split())
    hidden = 'HF_TOKEN="$HF_TOKEN" VLLM_API_KEY="$VLLM_API_KEY"'
    assert f"run: {hidden} VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 {launch}" in text
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN lets vLLM start" in text
    assert "abc" not in text
    refused = " ".join(size(launch, "--gpu", "h100").stdout.split())
    assert refused.startswith("DOES NOT FIT: vLLM would not start: --max-model-len is above")
    assert "--max-model-len 40960: " in refused


def test_variables_that_matter_or_are_no_longer_read_are_said() -> None:
    variables = "export VLLM_ATTENTION_BACKEND=FLASHINFER\nVLLM_PP_LAYER_PARTITION=9,9"
    script = f"{variables} vllm serve Qwen/Qwen3-8B"
    text = " ".join(size(script, "--gpu", "h100", "--explain").stdout.split())
    assert "vLLM reads no VLLM_ATTENTION_BACKEND any more: use --attention-backend" in text
    assert "not counted: VLLM_PP_LAYER_PARTITION (the layers of each stage)" in text
    docker = "docker run -e VLLM_USE_DEEP_GEMM=0 vllm/vllm-openai:v0.20.0 --model Qwen/Qwen3-8B"
    assert (
        "run: VLLM_USE_DEEP_GEMM=0 vllm serve Qwen/Qwen3-8B" in size(docker, "--gpu", "h100").stdout
    )


@pytest.mark.parametrize(("value", "elements"), [("0", 512 + 64), ("1", 16 * (192 + 192))])
def test_without_latent_attention_each_head_has_keys_and_values(value: str, elements: int) -> None:
    """vLLM's MHA path of DeepSeek pads values to the keys' size."""
    line = f"VLLM_MLA_DISABLE={value} vllm serve deepseek-ai/DeepSeek-V2-Lite"
    _, answer = document("--gpu", "h100-sxm", "--max-model-len", "32768", "--launch", line)
    assert answer["memory"]["kv_bytes_per_token_per_gpu"] == 27 * elements * 2
