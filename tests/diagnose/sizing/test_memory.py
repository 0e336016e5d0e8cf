"""Does it fit: weights, overhead and what is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import GIB, gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import model, model_from_config
from kneewatch.diagnose.catalogue.quantization import scheme
from kneewatch.diagnose.sizing.memory.budget import FewestGpus, fewest_gpus, memory
from kneewatch.diagnose.sizing.memory.launch import Launch, defaults, parse_version
from kneewatch.diagnose.sizing.memory.memory_arithmetic import memory_steps
from kneewatch.diagnose.sizing.memory.weights import Draft, Parallel, weights_per_gpu
from kneewatch.diagnose.sizing.size import memory_notes, start_failure
from tests.diagnose.catalogue.configurations import DEEPSEEK_V41

LLAMA_8B = Launch(
    model=model("meta-llama/Llama-3.1-8B-Instruct"), gpu=gpu("h100-sxm"), version=(0, 11, 0)
)
LLAMA_70B = replace(LLAMA_8B, model=model("meta-llama/Llama-3.3-70B-Instruct"))


@pytest.mark.parametrize(
    ("name", "quantization", "parallel", "logged_gib"),
    [
        pytest.param("Qwen/Qwen3-32B", "bf16", Parallel(), 61.03, id="32.76e9 x 2 B"),
        pytest.param("Qwen/Qwen3-32B", "bf16", Parallel(tensor=2), 30.59, id="halved by TP 2"),
        pytest.param(
            "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic",
            "fp8",
            Parallel(),
            67.72,
            id="tables stay in 16 bit",
        ),
        pytest.param("openai/gpt-oss-120b", "mxfp4", Parallel(), 64.38, id="experts padded"),
        pytest.param(
            "openai/gpt-oss-120b", "mxfp4", Parallel(tensor=4), 17.2217, id="padded again at TP 4"
        ),
        pytest.param(
            "nvidia/GLM-5.2-NVFP4",
            "nvfp4-experts",
            Parallel(tensor=4, experts=True),
            106.69,
            id="all but routed experts in 16 bit, MLA's down-projections on every rank",
        ),
        pytest.param(
            "mistralai/Mistral-Small-3.2-24B-Instruct-2506", "bf16", Parallel(), 44.76, id="tower"
        ),
    ],
)
def test_weights_are_what_vllm_logged(
    name: str, quantization: str, parallel: Parallel, logged_gib: float
) -> None:
    weights = weights_per_gpu(model(name), scheme(quantization), parallel)
    assert sum(weights.values()) / GIB == pytest.approx(logged_gib, rel=0.015)


def test_llama_4_in_fp8_has_its_routed_experts_alone_in_it() -> None:
    """48.8682 GiB on each of 8 GPUs (vLLM issue 16152), a tower of 0.2 GiB among it."""
    name = "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8"
    sized = weights_per_gpu(model(name), scheme(model(name).quantization), Parallel(tensor=8))
    assert sum(sized.values()) / GIB == pytest.approx(48.87 - 0.2, rel=0.01)


@pytest.mark.parametrize(
    ("tensor", "experts", "width"),
    [(1, False, 1920), (2, False, 1024), (8, False, 256), (8, True, 1920)],
)
def test_experts_without_a_gate_are_padded_on_each_rank(
    tensor: int, experts: bool, width: int
) -> None:
    nano = model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8")
    assert nano.parameters is not None
    parallel = Parallel(tensor=tensor, experts=experts)
    padded = weights_per_gpu(nano, scheme("fp8"), parallel)["experts"]
    split = 1 if experts else tensor
    plain = nano.parameters.experts / tensor
    assert padded == pytest.approx(plain * width * split / 1856)
    # In 16 bit their kernels take any width.
    plain_16_bit = weights_per_gpu(nano, scheme("bf16"), parallel)["experts"]
    assert plain_16_bit == pytest.approx(2 * plain)


def test_rows_of_16_bit_experts_are_longer_on_amd() -> None:
    """Qwen3-235B over 8 ranks: rows of 4,096 elements get 128 more, those of 192 none."""
    qwen = model("Qwen/Qwen3-235B-A22B-Instruct-2507")
    split = Parallel(tensor=8)
    nvidia = weights_per_gpu(qwen, scheme("bf16"), split)["experts"]
    amd = weights_per_gpu(qwen, scheme("bf16"), split, vendor="amd")["experts"]
    assert amd / nvidia == pytest.approx(1 + 2 / 3 * 128 / 4096)
    alone = weights_per_gpu(qwen, scheme("bf16"), Parallel(), vendor="amd")["experts"]
    assert alone / 8 / nvidia == pytest.approx(1 + 2 / 3 * 128 / 4096 + 1 / 3 * 128 / 1536)
    fp8 = weights_per_gpu(qwen, scheme("fp8"), split, vendor="amd")["experts"]
    assert fp8 == nvidia / 2


def test_a_load_on_one_amd_gpu_may_take_more_than_computed() -> None:
    launch = replace(LLAMA_8B, gpu=gpu("mi300x"), version=(0, 18, 0))
    old, new = memory(launch), memory(replace(launch, version=(0, 19, 0)))
    assert old.weights_bytes is not None
    widened = old.available_bytes.expected - old.available_bytes.low
    assert widened - (new.available_bytes.expected - new.available_bytes.low) == pytest.approx(
        0.27 * old.weights_bytes, rel=0.01
    )
    assert any("AMD GPU" in note for note in memory_notes(old, 1))
    for other in (
        replace(launch, version=(0, 19, 0)),
        replace(launch, gpu=gpu("h200")),
        replace(launch, parallel=Parallel(tensor=2)),
        replace(launch, weights_bytes=16 * GIB),
    ):
        assert not any("AMD GPU" in note for note in memory_notes(memory(other), 1))


def test_weights_of_deepseek_v41_are_those_of_its_checkpoint() -> None:
    """The index of DeepSeek-V4.1-Flash says 510,286,023,000 bytes: tables of n-grams, which stay
    in the host's memory, and three layers of a draft are in it."""
    described = model_from_config("m", DEEPSEEK_V41)
    tables_bytes = (384006168 + 384016682) * (256 + 8)
    draft_bytes = 3 * 128 * 3 * 5120 * 2304 * 4.25 / 8

    held = weights_per_gpu(described, scheme(described.quantization), Parallel())
    assert sum(held.values()) + tables_bytes + draft_bytes == pytest.approx(
        510_286_023_000, rel=5e-3
    )


def test_blackwell_keeps_denser_vectors_of_deepseek_v41() -> None:
    launch = Launch(
        model=model_from_config("m", DEEPSEEK_V41),
        gpu=gpu("h200"),
        version=(0, 32, 0),
        parallel=Parallel(tensor=8),
        max_model_len=32_768,
    )
    blackwell = replace(launch, gpu=gpu("b200"))
    # As vLLM's own cache code has it: tests/fixtures/kvlayout.
    assert memory(launch).layout.block_bytes == 460_224
    assert memory(blackwell).layout.block_bytes == 422_400


@pytest.mark.parametrize(
    ("weights_gib", "why"),
    [
        pytest.param(90, "leave no room for a KV cache; split the model", id="no room at all"),
        pytest.param(60, "use --max-model-len ", id="too little for the longest request"),
    ],
)
def test_why_vllm_would_not_start(weights_gib: int, why: str) -> None:
    launch = replace(LLAMA_8B, weights_bytes=weights_gib * GIB, max_model_len=131_072)
    refusals = [note for note in memory_notes(memory(launch), 1) if "would not start" in note]
    assert len(refusals) == 1
    assert why in refusals[0]


@pytest.mark.parametrize(("fewest", "gpus"), [(2, "more"), (4, "4")])
def test_a_launch_on_two_gpus_is_not_told_to_use_two(fewest: int, gpus: str) -> None:
    launch = replace(LLAMA_8B, parallel=Parallel(tensor=2), weights_bytes=90 * GIB)
    why = start_failure(memory(launch), FewestGpus(fewest, fewest, fewest, None))
    assert why is not None
    assert f"split the model over {gpus} GPUs" in why


def test_a_token_budget_changes_vllms_start_up_figure_not_the_load_that_runs() -> None:
    launch = replace(
        LLAMA_8B,
        model=model("deepseek-ai/DeepSeek-V4-Flash"),
        gpu=gpu("h200"),
        quantization=None,
        version=(0, 32, 0),
        parallel=Parallel(tensor=4),
        max_model_len=32_768,
    )
    usual = memory(launch)
    smaller = memory(replace(launch, max_num_batched_tokens=2048))
    assert smaller.concurrency.expected > 1.5 * usual.concurrency.expected
    assert smaller.held.expected == pytest.approx(usual.held.expected, rel=0.1)
    assert usual.held.expected > 5 * usual.concurrency.expected
    assert any("counts every request in prefill" in note for note in memory_notes(usual, 1))
    assert not any("in prefill" in note for note in memory_notes(memory(LLAMA_8B), 1))
    assert memory(LLAMA_8B).held == memory(LLAMA_8B).concurrency


def test_available_kv_is_what_vllm_logged() -> None:
    """Llama-3.1-8B on an H100 with 0.11: 71.26 - 14.99 - 4.76 - 0.13 = 51.38 GiB."""
    budget = memory(replace(LLAMA_8B, max_model_len=16_000, weights_bytes=14.99 * GIB))
    assert budget.available_bytes.expected / GIB == pytest.approx(51.38, rel=0.005)
    assert budget.available_bytes.low < 51.38 * GIB < budget.available_bytes.high


def test_the_guides_overhead_is_a_fifth_of_the_weights_and_a_share_of_the_card() -> None:
    budget = memory(replace(LLAMA_8B, overhead="guide", weights_bytes=10 * GIB))
    whole = gpu("h100-sxm").memory_bytes
    room = 0.9 * whole - 10 * GIB - 2 * GIB
    assert budget.available_bytes.high == pytest.approx(room - 0.05 * whole)
    assert budget.available_bytes.low == pytest.approx(room - 0.10 * whole)


@pytest.mark.parametrize("eager", [True, False])
def test_context_parallel_ranks_have_buffers_and_may_have_larger_graphs(eager: bool) -> None:
    """GLM-5.1 on eight RTX PRO 6000: 18.51 GiB without, 18.42 with 2 and 4 ranks."""
    plain = Launch(
        model("zai-org/GLM-5-FP8"),
        gpu("rtx-pro-6000"),
        Parallel(tensor=8),
        enforce_eager=eager,
        max_model_len=8192,
    )
    alone, shared = (
        memory(replace(plain, decode_context_parallel=ranks)).overhead for ranks in (1, 8)
    )
    assert alone is not None
    assert shared is not None
    assert (shared.expected_bytes - alone.expected_bytes) / GIB == pytest.approx(0.09)
    wider = (shared.high_bytes - alone.high_bytes) / GIB
    assert wider == pytest.approx(0.09 if eager else 0.89)


@pytest.mark.parametrize(
    ("version", "more_gib"), [((0, 28, 0), 3.5), ((0, 31, 0), 0.0)], ids=["first", "second"]
)
def test_drafts_of_a_thousand_seats_are_profiled_too(
    version: tuple[int, int, int], more_gib: float
) -> None:
    """vLLM's first model runner runs the rejection sampler for all seats, the second does not."""
    plain = Launch(
        model("Qwen/Qwen3.8-27B-FP8"), gpu("rtx-pro-6000"), max_num_seqs=1024, version=version
    )
    assert plain.model.own_draft is not None
    drafting = replace(plain, draft=Draft(plain.model.own_draft, 3))
    alone, both = (memory(each).overhead for each in (plain, drafting))
    assert alone is not None
    assert both is not None
    more_bytes = both.activation_bytes - alone.activation_bytes
    assert more_bytes / GIB == pytest.approx(more_gib, abs=0.05)


def test_stated_kv_bytes_need_no_gpu_and_have_no_band() -> None:
    budget = memory(replace(LLAMA_8B, gpu=None, available_kv_bytes=1e9))
    assert budget.available_bytes.low == budget.available_bytes.high == 1e9
    assert budget.overhead is None


def test_what_does_not_fit_does_not_start() -> None:
    budget = memory(LLAMA_70B)
    assert budget.available_bytes.expected < 0
    assert not budget.holds_one
    assert not budget.fits()
    assert budget.concurrency.expected == 0


def test_a_context_beyond_the_cache_does_not_start_whatever_is_asked_for() -> None:
    budget = memory(
        replace(LLAMA_8B, available_kv_bytes=1e9, max_model_len=131_072, context_tokens=100)
    )
    assert budget.concurrency.expected > 50
    assert not budget.fits()


@pytest.mark.parametrize(
    ("version", "card", "expected"),
    [
        ("0.11.0", "h100-sxm", (0.90, 1024, 8192)),
        ("v0.20.1rc1", "h100-sxm", (0.92, 1024, 8192)),
        ("0.10.1.1", "a100-80gb", (0.90, 256, 2048)),
        ("0.32.0", "b200", (0.92, 1024, 16_384)),
        ("0.19", "l40s", (0.90, 256, 2048)),
    ],
)
def test_defaults_follow_version_and_gpu(
    version: str, card: str, expected: tuple[float, int, int]
) -> None:
    engine_defaults = defaults(parse_version(version), gpu(card))
    assert expected == (
        engine_defaults.gpu_memory_utilization,
        engine_defaults.max_num_seqs,
        engine_defaults.max_num_batched_tokens,
    )


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(SizingError, match="newest") as caught:
        parse_version("newest")
    assert caught.value.name == "vllm_version"


def test_the_fewest_gpus_start_and_hold_the_load() -> None:
    launch = replace(LLAMA_70B, max_model_len=8192)
    fewest = fewest_gpus(launch, concurrency=100)
    assert fewest.expected == 8
    assert fewest.spread == Parallel(tensor=8)
    assert memory(replace(launch, parallel=Parallel(tensor=8))).fits(100)
    assert not memory(replace(launch, parallel=Parallel(tensor=4))).fits(100)


@pytest.mark.parametrize("weights_gib", [60, 170])
def test_a_launch_is_not_told_to_use_the_gpus_that_it_has(weights_gib: int) -> None:
    parallel = Parallel(tensor=2)
    launch = replace(LLAMA_8B, parallel=parallel, weights_bytes=weights_gib * GIB)
    launch = replace(launch, max_model_len=131_072)
    fewest = replace(fewest_gpus(LLAMA_8B, concurrency=1), expected=2)
    refused = start_failure(memory(replace(launch, gpu=gpu("l4"))), fewest)
    assert refused is not None
    assert "2 GPUs" not in refused


def test_a_state_for_each_running_request() -> None:
    """Logged for Qwen3.6-27B-FP8 on an H100: 1,024 exceeds 856, so vLLM does not start."""
    launch = Launch(model("Qwen/Qwen3.6-27B-FP8"), gpu("h100-sxm"), gpu_memory_utilization=0.95)
    stated = memory(replace(launch, max_num_seqs=1024))
    assert stated.most_seqs == pytest.approx(856, rel=0.03)
    assert stated.holds_one
    assert not stated.fits(1)
    refused = start_failure(stated, None)
    assert refused is not None
    assert f"--max-num-seqs {stated.most_seqs} or less" in refused
    unstated = memory(launch)
    assert unstated.starts
    assert (unstated.launch.seqs, unstated.refused_seqs) == (512, 1024)
    notes = list(memory_notes(unstated, 1))
    assert any("default max_num_seqs of 1,024" in note for note in notes)
    for other in ({"enforce_eager": True}, {"version": (0, 19, 0)}, {"max_num_seqs": 512}):
        assert memory(replace(stated.launch, **other)).starts


def test_stated_weights_of_one_layout_do_not_mislead_another() -> None:
    stated = replace(LLAMA_70B, max_model_len=8192, weights_bytes=1 * GIB)
    assert fewest_gpus(stated, concurrency=1).expected == 4


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization"),
        ({"max_model_len": -5}, "max_model_len"),
        ({"parallel": Parallel(tensor=3)}, "tensor_parallel"),
        ({"kv_cache_dtype": "fp3"}, "kv_cache_dtype"),
        ({"quantization": "q4"}, "quantization"),
        ({"overhead": "none"}, "overhead"),
        ({"max_model_len": 100, "context_tokens": 200}, "context"),
        ({"quantization": "nvfp4", "gpu": gpu("v100-32gb")}, "quantization"),
        ({"quantization": "fp8", "gpu": gpu("v100-32gb")}, "quantization"),
        ({"gpu": None}, "gpu"),
    ],
)
def test_what_cannot_be_names_its_input(change: dict[str, object], name: str) -> None:
    with pytest.raises(SizingError) as caught:
        memory(replace(LLAMA_8B, **change))
    assert caught.value.name == name


@pytest.mark.parametrize("gpu_id", ["t4", "a100-80gb", "rtx-3090"])
def test_4_bit_weights_are_unpacked_where_a_gpu_does_not_compute_in_them(gpu_id: str) -> None:
    """vLLM started NVFP4 on RTX A6000: Marlin's kernels unpack it from capability 7.5 on."""
    launch = replace(LLAMA_8B, gpu=gpu(gpu_id), quantization="nvfp4", max_model_len=4096)
    assert memory(launch).starts


def test_a_vision_tower_is_split_where_vllm_splits_it() -> None:
    """Qwen3-VL-30B over 4 GPUs: 14.6 GiB logged, 15.3 with a whole tower on each."""
    for name, parts in (
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", 4),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", 1),
    ):
        sized = model(name)
        alone, split = (
            weights_per_gpu(sized, scheme("bf16"), Parallel(tensor=tensor))["vision"]
            for tensor in (1, 4)
        )
        assert alone == parts * split


def test_the_steps_end_in_the_answer() -> None:
    budget = memory(replace(LLAMA_8B, max_model_len=16_000))
    lines = [step.line() for step in memory_steps(budget)]
    assert any("32 x 8 x (128 + 128) x 2 = 131,072 B" in line for line in lines)
    assert lines[-1].startswith("Concurrent requests: ")
    assert f"{budget.concurrency.expected:.4g}" in lines[-1]


@given(
    utilization=st.floats(0.1, 0.98),
    tensor=st.sampled_from([1, 2, 4, 8]),
    context=st.integers(128, 131_072),
)
def test_the_budget_closes(utilization: float, tensor: int, context: int) -> None:
    """Weights, overhead and KV are what vLLM may use, to the byte."""
    launch = replace(
        LLAMA_70B,
        gpu_memory_utilization=utilization,
        parallel=Parallel(tensor=tensor),
        context_tokens=context,
    )
    budget = memory(launch)
    assert budget.weights_bytes is not None
    assert budget.overhead is not None
    used = budget.weights_bytes + budget.overhead.expected_bytes + budget.available_bytes.expected
    assert used == pytest.approx(utilization * gpu("h100-sxm").memory_bytes)
    low, expected, high = (
        budget.available_bytes.low,
        budget.available_bytes.expected,
        budget.available_bytes.high,
    )
    assert low <= expected <= high
    assert budget.concurrency.low <= budget.concurrency.expected <= budget.concurrency.high


def test_a_version_without_a_shared_pool_is_named() -> None:
    hybrid = Launch(
        model=model("Qwen/Qwen3-Next-80B-A3B-Instruct"), gpu=gpu("h200"), parallel=Parallel(4),
        max_model_len=8192, version=(0, 9, 0),
    )  # fmt: skip
    with pytest.raises(SizingError, match=r"0\.9\.2") as refused:
        memory(hybrid)
    assert refused.value.name == "vllm_version"
    switched = replace(hybrid, version=(0, 20, 0), hybrid_pool=False)
    with pytest.raises(SizingError) as refused:
        memory(switched)
    assert refused.value.name == "hybrid_pool"


@pytest.mark.parametrize(
    ("name", "tensor", "ranks"),
    [
        pytest.param("moonshotai/Kimi-K2-Instruct", 8, 8, id="every rank has the latent vectors"),
        pytest.param("deepseek-ai/DeepSeek-V3", 8, 8, id="every rank has the latent vectors"),
        pytest.param("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", 8, 2, id="4 KV heads, 2 copies"),
        pytest.param("meta-llama/Llama-3.3-70B-Instruct", 16, 2, id="8 KV heads, 2 copies"),
    ],
)
def test_context_ranks_multiply_what_is_held(name: str, tensor: int, ranks: int) -> None:
    alone = Launch(model=model(name), gpu=gpu("b200"), parallel=Parallel(tensor=tensor))
    shared = replace(alone, decode_context_parallel=ranks)
    ratio = memory(shared).concurrency.expected / memory(alone).concurrency.expected
    assert ratio == pytest.approx(ranks, rel=0.01)
    fewest = fewest_gpus(shared, concurrency=1)
    assert fewest.spread == Parallel(tensor=tensor)


@pytest.mark.parametrize(
    ("name", "tensor", "ranks", "choices"),
    [
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", 8, 8, ("1", "2")),
        ("meta-llama/Llama-3.3-70B-Instruct", 8, 8, ("1",)),
        pytest.param("Qwen/Qwen3-32B", 64, 3, ("1", "2", "4", "8"), id="8 query heads a KV head"),
    ],
)
def test_context_ranks_that_vllm_refuses(
    name: str, tensor: int, ranks: int, choices: tuple[str, ...]
) -> None:
    launch = Launch(
        model=model(name),
        gpu=gpu("b200"),
        parallel=Parallel(tensor=tensor),
        decode_context_parallel=ranks,
    )
    with pytest.raises(SizingError) as caught:
        memory(launch)
    assert caught.value.name == "dcp"
    assert tuple(caught.value.choices) == choices


def test_graphs_are_captured_up_to_the_stated_size() -> None:
    """Each takes 0.2 MiB a layer: 51 sizes of 1 to 512 by default, 11 up to 64, 147 up to 2,048."""
    launch = replace(LLAMA_8B, version=(0, 32, 0))
    free = {
        most: memory(replace(launch, max_cudagraph_capture_size=most)).available_bytes.expected
        for most in (None, 64, 512, 2048)
    }
    assert free[64] > free[None] == free[512] > free[2048]
    assert (free[64] - free[None]) / (free[None] - free[2048]) == pytest.approx(40 / 64, abs=0.01)
