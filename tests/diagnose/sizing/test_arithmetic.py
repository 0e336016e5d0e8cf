"""The printed arithmetic: whoever evaluates it gets the printed result."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.sizing.arithmetic import Step
from kneewatch.diagnose.sizing.memory.launch_setup import Setup
from kneewatch.diagnose.sizing.memory.memory_arithmetic import memory_steps
from kneewatch.diagnose.sizing.memory.weights import Parallel
from kneewatch.diagnose.sizing.requirements import Question
from kneewatch.diagnose.sizing.size import size, steps
from kneewatch.rules.facts import Targets
from tests.diagnose.sizing.evaluating import differing
from tests.examples import examples

SETUPS = (
    ("meta-llama/Llama-3.1-8B-Instruct", "h100-sxm", Parallel()),
    ("meta-llama/Llama-3.3-70B-Instruct", "h200", Parallel(tensor=4)),
    ("openai/gpt-oss-120b", "h100-sxm", Parallel(tensor=2)),
    ("Qwen/Qwen3-32B", "a100-80gb", Parallel(tensor=2, pipeline=2)),
)


@examples(15)
@given(st.sampled_from(SETUPS), st.integers(1, 300), st.integers(10, 12_000), st.integers(2, 3000))
def test_the_arithmetic_of_a_launch_gives_its_results(
    launch: tuple[str, str, Parallel], concurrency: int, prompt_tokens: int, answer_tokens: int
) -> None:
    name, card, parallel = launch
    setup = Setup(model=model(name), gpu=gpu(card), version=(0, 11, 0), parallel=parallel)
    sized = size(
        Question(
            setup=replace(setup, max_model_len=16384),
            concurrency=float(concurrency),
            input_tokens=float(prompt_tokens),
            output_tokens=float(answer_tokens),
            peak_requests_per_s=40.0,
            targets=Targets(ttft_p99_s=2.0, itl_p99_s=0.05),
            usd_per_gpu_hour=3.0,
        )
    )
    lines = (*memory_steps(sized.memory), *steps(sized))
    wrong, read = differing(lines)
    assert not wrong
    assert read >= 0.9 * len(lines)


def test_a_wrong_result_is_found() -> None:
    right = Step("Blocks", "cache / page", "54.92 GiB / (65,536 B x 32)", "28,117 blocks", "")
    assert differing([right]) == ([], 1)
    assert differing([replace(right, result="28,217 blocks")])[0]
