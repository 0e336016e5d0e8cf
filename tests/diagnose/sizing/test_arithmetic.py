"""The printed arithmetic: whoever evaluates it gets the printed result."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.sizing.arithmetic import Sheet, Step, exact, gibibytes, seconds
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.memory.memory_arithmetic import memory_steps
from kneewatch.diagnose.sizing.memory.weights import Adapters, Draft, Parallel
from kneewatch.diagnose.sizing.requirements import Question
from kneewatch.diagnose.sizing.size import Size, size
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import figure
from tests.diagnose.sizing.evaluating import differing
from tests.examples import examples

MODELS = (
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct",
    "openai/gpt-oss-120b",
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3.2",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "google/gemma-3-27b-it",
)
GPUS = ("h100-sxm", "h200", "b200", "a100-80gb", "l40s")
VERSIONS = ((0, 8, 5), (0, 11, 0), (0, 20, 1), (0, 33, 0))
LOADS = st.tuples(st.integers(1, 300), st.integers(10, 12_000), st.integers(2, 3000))


@st.composite
def launches(draw: st.DrawFn) -> Launch:
    target = model(draw(st.sampled_from(MODELS)))
    tensor, pipeline = draw(st.sampled_from(((1, 1), (2, 1), (4, 1), (8, 1), (4, 2))))
    return Launch(
        model=target,
        gpu=gpu(draw(st.sampled_from(GPUS))),
        parallel=Parallel(tensor, pipeline, experts=draw(st.booleans())),
        version=draw(st.sampled_from(VERSIONS)),
        kv_cache_dtype=draw(st.sampled_from(("auto", "fp8"))),
        quantization=draw(st.sampled_from((None, "fp8"))),
        max_model_len=16384,
        overhead=draw(st.sampled_from(("fitted", "guide"))),
        cpu_offload_bytes=draw(st.sampled_from((0.0, 4.0e9))),
        adapters=draw(st.sampled_from((None, Adapters(4, 32)))),
        draft=draw(
            st.sampled_from((None, Draft(target.own_draft, 2) if target.own_draft else None))
        ),
    )


def figures_of(sized: Size) -> dict[str, str]:
    """The figures of an answer as its arithmetic shows them, by the title of their line."""
    held, speed, fleet = sized.memory, sized.performance, sized.fleet
    figures = {
        "Available KV cache on each GPU": gibibytes(held.available_bytes.expected),
        "Concurrent requests": figure(held.concurrency.expected),
    }
    if held.adapter_bytes:
        figures["Loaded on each GPU"] = gibibytes(held.weights_bytes or 0.0)
    if speed is not None:
        figures["Time to first token"] = seconds(speed.ttft_s)
        figures["Time per output token"] = seconds(speed.itl_s)
        figures["Decode step"] = seconds(speed.decode_step.total_s)
        figures["Output tokens per second"] = figure(speed.decode_tokens_per_s)
    if fleet is not None:
        figures["Replicas with safety"] = figure(fleet.deployed_instances)
        figures["GPUs"] = figure(fleet.gpus)
    if sized.usd_per_million_output_tokens is not None:
        figures["Cost per million tokens"] = figure(sized.usd_per_million_output_tokens)
    return figures


@examples(60)
@given(launches(), LOADS)
def test_the_arithmetic_of_a_launch_gives_its_results(
    launch: Launch, load: tuple[int, int, int]
) -> None:
    concurrency, prompt_tokens, answer_tokens = load
    question = Question(
        launch=launch,
        concurrency=float(concurrency),
        input_tokens=float(prompt_tokens),
        output_tokens=float(answer_tokens),
        peak_requests_per_s=40.0,
        targets=Targets(ttft_p99_s=2.0, itl_p99_s=0.05),
        usd_per_gpu_hour=3.0,
    )
    try:
        sized = size(question)
    except SizingError:
        assume(False)
        raise
    lines = (*memory_steps(sized.memory), *sized.sheet.steps)
    wrong, read = differing(lines)
    assert not wrong
    assert len(lines) == read
    results = {step.title: step.result for step in lines}
    for title, shown in figures_of(sized).items():
        number, _, _ = shown.partition(" ")
        printed = results[title].split()[0]
        assert number_of(printed) == pytest.approx(number_of(number), rel=2e-3), title


def number_of(text: str) -> float:
    return float(text.replace(",", ""))


def test_a_wrong_result_is_found() -> None:
    right = Step("Blocks", "cache / page", "54.92 GiB / (65,536 B x 32)", "28,117 blocks", "")
    assert differing([right]) == ([], 1)
    assert differing([replace(right, result="28,217 blocks")])[0]


def test_a_formula_is_computed_and_printed() -> None:
    sheet = Sheet("the guide")
    assert sheet.line("Replicas", "ceil({peak RPS} / {usable RPS})", (exact(4.2), exact(1.4))) == 3
    held = sheet.line(
        "Held",
        "max({room:GiB} - {taken:GiB}, 0) / {each: B}",
        (3 << 30, 1 << 30, 1024),
        source="us",
    )
    assert held == 2 << 20
    assert [step.line() for step in sheet.steps] == [
        "Replicas: ceil(peak RPS / usable RPS) = ceil(4.2 / 1.4) = 3 [the guide]",
        "Held: max(room - taken, 0) / each = max(3.00 GiB - 1.00 GiB, 0) / 1,024 B = 2,097,152"
        " [us]",
    ]
    with pytest.raises(TypeError):
        sheet.line("Lacks a quantity", "{a} + {b}", (1.0,))
