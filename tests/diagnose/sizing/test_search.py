"""The search: its winner against `size` itself, what it tries, and why the others fail."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.catalogue.gpu_specs import gpu, gpus
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.sizing import search_results as rejections
from kneewatch.diagnose.sizing.configuration_search import Choices, search
from kneewatch.diagnose.sizing.memory.budget import memory
from kneewatch.diagnose.sizing.memory.launch_setup import Setup
from kneewatch.diagnose.sizing.memory.weights import Parallel
from kneewatch.diagnose.sizing.requirements import Question
from kneewatch.diagnose.sizing.search_results import (
    BY_HOUR,
    BY_TOKENS,
    SearchResult,
    document,
    explain,
    question_of,
)
from kneewatch.diagnose.sizing.size import size
from kneewatch.diagnose.sizing.speed.performance import Load, performance
from kneewatch.diagnose.sizing.speed.roofline_inputs import costs
from kneewatch.diagnose.sizing.speed.slo_capacity import Targets, capacity
from tests.effort import calls
from tests.examples import examples

LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"
DEEPSEEK, GPT_OSS = "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-120b"


def asked(
    name: str = LLAMA_8B,
    *,
    peak: float | None = 20.0,
    ttft_s: float | None = 1.0,
    itl_s: float | None = 0.05,
    lengths: tuple[float, float] = (1000, 300),
    setup: Setup | None = None,
) -> Question:
    return Question(
        setup=setup or Setup(model=model(name)),
        input_tokens=lengths[0],
        output_tokens=lengths[1],
        peak_requests_per_s=peak,
        ttft_slo_s=ttft_s,
        itl_slo_s=itl_s,
    )


def rejected(result: SearchResult) -> dict[str, int]:
    return {each.reason: each.configurations for each in result.rejections}


# --- the highest concurrency at the targets


@examples(40)
@given(
    itl_s=st.none() | st.floats(0.004, 0.2),
    ttft_s=st.none() | st.floats(0.02, 5),
    limit=st.integers(1, 1024),
    lengths=st.sampled_from([(1000, 300), (8000, 50), (20, 2000), (300, 1)]),
    name=st.sampled_from([LLAMA_8B, DEEPSEEK]),
)
def test_one_request_more_would_miss(
    itl_s: float | None,
    ttft_s: float | None,
    limit: int,
    lengths: tuple[float, float],
    name: str,
) -> None:
    server_costs = costs(model(name), gpu("h200"), tensor_parallel=8)
    load = Load(
        input_tokens=lengths[0],
        output_tokens=lengths[1],
        concurrency=limit,
        max_running=limit,
    )
    targets = Targets(ttft_s=ttft_s, itl_s=itl_s)
    at_capacity = capacity(server_costs, load, targets)

    def keeps(concurrency: int) -> bool:
        speed = performance(server_costs, replace(load, concurrency=concurrency))
        late = targets.strain(speed)[0] > 1
        return not late and (concurrency == 1 or not speed.queueing)

    assert at_capacity.concurrency == 0 or keeps(at_capacity.concurrency)
    assert at_capacity.concurrency == limit or not keeps(at_capacity.concurrency + 1)


# --- the winner


@pytest.mark.parametrize("name", [LLAMA_8B, LLAMA_70B, DEEPSEEK, GPT_OSS])
@pytest.mark.parametrize("peak", [None, 45.0])
def test_size_confirms_every_candidate(name: str, peak: float | None) -> None:
    question = asked(name, peak=peak)
    result = search(question, top=10)
    assert result.winner is not None
    for candidate in (*result.best, *result.by_gpu):
        answer = size(question_of(question, candidate))
        assert answer.fits
        assert answer.missed == ()
        assert answer.usable_requests_per_s == pytest.approx(candidate.requests_per_s)
        assert answer.gpus == candidate.gpus
        assert answer.performance is not None
        assert answer.performance.itl_s == pytest.approx(candidate.itl_s)
        assert answer.token_cost is not None
        assert answer.token_cost.usd_per_million_tokens == pytest.approx(
            candidate.usd_per_million_output_tokens
        )
        if answer.fleet is not None:
            assert answer.fleet.deployed_instances == candidate.replicas
        price = candidate.gpu.usd_per_hour
        assert candidate.usd_per_hour == pytest.approx(candidate.gpus * price)


@examples(8)
@given(
    peak=st.floats(0.5, 300),
    itl_s=st.floats(0.012, 0.1),
    ttft_s=st.floats(0.1, 3),
    lengths=st.sampled_from([(200, 800), (1000, 300), (6000, 100)]),
)
def test_nothing_that_size_accepts_is_cheaper(
    peak: float, itl_s: float, ttft_s: float, lengths: tuple[float, float]
) -> None:
    question = asked(peak=peak, itl_s=itl_s, ttft_s=ttft_s, lengths=lengths)
    choices = Choices(gpu_ids=["h100-sxm", "l4"], max_model_lens=[16384])
    winner = search(question, choices).winner
    for gpu_id, tensor, quantization, kv_cache_dtype, concurrency in itertools.product(
        ["h100-sxm", "l4"], [1, 4], [None, "fp8"], ["auto", "fp8"], [1, 6, 24, 90, 256]
    ):
        setup = Setup(
            model=model(LLAMA_8B),
            gpu=gpu(gpu_id),
            parallel=Parallel(tensor=tensor),
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=16384,
            context_tokens=int(sum(lengths)),
        )
        answer = size(replace(question, setup=setup, concurrency=concurrency))
        if answer.missed or not answer.fits or answer.fleet is None:
            continue
        assert winner is not None
        assert winner.usd_per_hour <= answer.fleet.gpus * gpu(gpu_id).usd_per_hour + 1e-9


def test_of_equal_cost_the_published_formats_win() -> None:
    result = search(asked(peak=0.1), Choices(gpu_ids=["h100-sxm"]))
    assert result.winner is not None
    assert result.winner.validations == 0
    assert "more formats whose answer quality must be tested" in "\n".join(explain(result))


def test_without_a_peak_tokens_are_ranked() -> None:
    result = search(asked(peak=None), top=1000)
    each = [candidate.usd_per_million_output_tokens for candidate in result.best]
    assert (result.ranked_by, each) == (BY_TOKENS, sorted(each))
    assert search(asked()).ranked_by == BY_HOUR


@given(looser=st.floats(1, 10))
@examples(10)
def test_looser_targets_never_cost_more(looser: float) -> None:
    choices = Choices(gpu_ids=["h100-sxm", "a10g", "l40s"])
    strict = search(asked(itl_s=0.03, ttft_s=0.4), choices).winner
    loose = search(asked(itl_s=0.03 * looser, ttft_s=0.4 * looser), choices).winner
    assert strict is not None
    assert loose is not None
    assert loose.usd_per_hour <= strict.usd_per_hour


# --- what is tried


def test_every_configuration_is_counted_once() -> None:
    choices = Choices(
        gpu_ids=["h100-sxm", "a100-80gb"],
        tensor_parallels=[1, 2, 3],
        quantizations=["bf16", "fp8"],
        kv_cache_dtypes=["auto", "fp8"],
        max_model_lens=[4096, 131072],
    )
    result = search(asked(LLAMA_70B), choices)
    assert result.configurations == 2 * 3 * 2 * 2 * 2
    assert result.meeting == result.configurations - sum(rejected(result).values())
    # TP 3: five allowed pairs of formats, 2 lengths.
    assert rejected(result)[rejections.HEADS] == 10
    assert rejected(result)[rejections.FORMAT] == 18  # A100: FP8 anywhere, TP 1 to 3, 2 lengths


def test_what_is_stated_is_fixed() -> None:
    setup = Setup(
        model=model(LLAMA_8B),
        gpu=gpu("l40s"),
        parallel=Parallel(tensor=2),
        quantization="fp8",
        kv_cache_dtype="fp8",
        max_model_len=8192,
    )
    result = search(asked(setup=setup))
    assert result.winner is not None
    assert (result.configurations, result.winner.setup.max_model_len) == (1, 8192)
    assert replace(result.winner.setup, context_tokens=None) == setup


def test_pipeline_stages_only_where_a_node_is_too_small() -> None:
    small = search(asked(LLAMA_8B), Choices(gpu_ids=["h100-sxm"]), top=100)
    assert {candidate.setup.parallel.pipeline for candidate in small.best} == {1}
    large = search(asked(DEEPSEEK, itl_s=0.2), Choices(gpu_ids=["h100-sxm"]), top=100)
    assert {candidate.setup.parallel.tensor for candidate in large.best} == {8}
    assert {candidate.setup.parallel.pipeline for candidate in large.best} == {2, 4}


def test_the_longest_context_that_starts_is_taken() -> None:
    result = search(asked(LLAMA_8B), Choices(gpu_ids=["l4"], tensor_parallels=[1]), top=9)
    lengths = {
        (candidate.setup.scheme.id, candidate.setup.kv_cache_dtype): candidate.setup.longest_tokens
        for candidate in result.best
    }
    assert lengths["awq", "fp8"] == 131072
    assert lengths["awq", "auto"] == 65536  # 131,072 tokens take 16 GiB
    assert "needs --max-model-len 65536" in "\n".join(explain(result))


def test_a_length_that_takes_every_block_waits_for_ever() -> None:
    setup = Setup(model=model(LLAMA_8B), gpu=gpu("l4"), quantization="awq", max_model_len=65536)
    answer = memory(setup)
    whole = 16 * answer.layout.blocks(answer.available_bytes.expected)
    choices = Choices(tensor_parallels=[1], pipeline_parallels=[1], kv_cache_dtypes=["auto"])
    for length, meeting in ((whole, 0), (whole - 16, 1)):
        question = asked(setup=replace(setup, max_model_len=length))
        assert memory(question.setup).holds_one is bool(meeting)
        assert search(question, choices).meeting == meeting


def test_context_ranks_leave_the_sizes_that_have_copies() -> None:
    setup = Setup(
        model=model("moonshotai/Kimi-K2-Instruct"), gpu=gpu("b200"), decode_context_parallel=8
    )
    result = search(asked(setup=setup, peak=None))
    assert {entry.setup.parallel.tensor for entry in result.best} == {8}
    assert rejected(result)[rejections.CONTEXT_RANKS]


def test_v0_has_a_memory_for_every_length() -> None:
    setup = Setup(model=model(LLAMA_8B), version=(0, 7, 3))
    choices = Choices(gpu_ids=["l4"], tensor_parallels=[1], quantizations=["fp8"])
    result = search(asked(setup=setup), choices, top=9)
    # 131,072 tokens and their halves down to 4,096, each with either KV cache.
    assert result.configurations == 12
    assert result.launches == result.meeting + sum(
        count for reason, count in rejected(result).items() if reason == rejections.ITL_MISSED
    )
    assert len(result.best) <= 2


@pytest.mark.parametrize(
    ("question", "choices", "reason"),
    [
        pytest.param(asked(LLAMA_70B), Choices(gpu_ids=["l4"]), rejections.WEIGHTS, id="weights"),
        pytest.param(
            asked(LLAMA_8B),
            Choices(gpu_ids=["l4"], max_model_lens=[131072], tensor_parallels=[1]),
            rejections.KV,
            id="16 GiB of KV cache on an L4",
        ),
        pytest.param(asked(itl_s=0.001), Choices(), rejections.ITL_MISSED, id="ITL"),
        pytest.param(asked(ttft_s=0.001), Choices(), rejections.TTFT_MISSED, id="TTFT"),
        pytest.param(asked(peak=1000), Choices(most_gpus=2), rejections.GPUS, id="GPUs"),
        pytest.param(
            asked(),
            Choices(gpu_ids=["gh200"], tensor_parallels=[2]),
            rejections.NODE,
            id="a GH200 has no neighbours",
        ),
        pytest.param(
            asked(DEEPSEEK),
            Choices(quantizations=["awq"]),
            rejections.REQUANTIZED,
            id="DeepSeek-V3 is published in FP8",
        ),
        pytest.param(
            asked(), Choices(pipeline_parallels=[64]), rejections.LAYERS, id="32 layers, 64 stages"
        ),
    ],
)
def test_why_others_fail(question: Question, choices: Choices, reason: str) -> None:
    result = search(question, choices)
    examples = {each.reason: each.example for each in result.rejections}
    assert examples[reason]
    assert f": {reason} (" in "\n".join(explain(result))


def test_nothing_found_is_an_answer() -> None:
    result = search(asked(itl_s=1e-4))
    assert (result.winner, result.best, result.meeting) == (None, (), 0)
    assert re.match(r"0 of [\d,]+ configurations meet the targets$", explain(result)[0])
    assert document(result)["best"] == []


@pytest.mark.parametrize(
    ("question", "choices", "name"),
    [
        (replace(asked(), input_tokens=None), Choices(), "input_tokens"),
        (replace(asked(), output_tokens=None), Choices(), "output_tokens"),
        (replace(asked(), usd_per_gpu_hour=2.0), Choices(), "usd_per_gpu_hour"),
        (replace(asked(), usable_requests_per_s=2.0), Choices(), "usable_rps"),
        (replace(asked(), safety=0.5), Choices(), "safety"),
        (asked(peak=-1), Choices(), "peak_rps"),
        (asked(itl_s=0), Choices(), "itl_slo"),
        (asked(setup=Setup(model=model(LLAMA_8B), weights_bytes=1e9)), Choices(), "weights_gib"),
        (asked(), Choices(gpu_ids=["h1000"]), "gpu"),
        (asked(), Choices(gpu_ids=[]), "gpu"),
        (asked(), Choices(quantizations=["fp7"]), "quantization"),
        (asked(), Choices(kv_cache_dtypes=["fp7"]), "kv_cache_dtype"),
        (asked(), Choices(tensor_parallels=[0]), "tensor_parallel"),
        (asked(), Choices(most_gpus=0), "gpus"),
        (asked(), Choices(max_model_lens=[1000, 4096]), "max_model_len"),
        (asked(setup=Setup(model=model(LLAMA_8B), max_model_len=1000)), Choices(), "input_tokens"),
    ],
)
def test_bad_input_is_named(question: Question, choices: Choices, name: str) -> None:
    with pytest.raises(SizingError) as caught:
        search(question, choices)
    assert caught.value.name == name


# --- the telling


def test_a_runner_up_says_what_it_costs_more_and_why() -> None:
    choices = Choices(
        gpu_ids=["h100-sxm"], tensor_parallels=[1], quantizations=["bf16"], max_model_lens=[8192]
    )
    result = search(asked(peak=300, itl_s=0.02), choices)
    first, second = result.best
    more = second.replicas - first.replicas
    assert more > 0
    assert (
        f"costs {second.gpus / first.gpus - 1:.0%} more: needs {more} more "
        f"replica{'s' if more > 1 else ''} because {second.binding} limits a replica to "
        f"{second.concurrency} concurrent requests"
    ) in "\n".join(explain(result))


def test_the_document_is_plain_json() -> None:
    result = search(asked())
    result_document = json.loads(json.dumps(document(result)))
    assert result_document["best"][0]["gpus"] == result.best[0].gpus
    assert result_document["best"][0]["reason"].startswith("cheapest that meets the targets")
    assert any("ceil(peak RPS / usable RPS)" in line for line in result_document["steps"])


def test_ten_thousand_configurations_are_little_work() -> None:
    question = asked(LLAMA_70B, ttft_s=0.5, itl_s=0.03)
    lengths = [131072 - 8192 * step for step in range(12)]
    result = search(question, Choices(max_model_lens=lengths))
    assert result.configurations >= 10_000
    work = calls(lambda: search(question, Choices(max_model_lens=lengths)))
    assert work < 100 * result.configurations  # a call is some 0.1 us
    assert len(gpus()) * 3 > len(result.by_gpu) > 10
