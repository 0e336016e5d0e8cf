"""Levers off the usual path: prompts, routers, transfers, adapters, and two at once."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.deployment.deployment import NOTHING, Stated
from kneewatch.diagnose.deployment.vllm_flags import parse_command
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.recommend.demand import QueueTrend
from kneewatch.diagnose.sizing.memory.weights import Adapters, Parallel, adapter_bytes
from kneewatch.rules.facts import Targets
from tests.diagnose.recommend.scenes import FULL, LLAMA, PAGE, advised, changes
from tests.diagnose.situations import CALM, CONCLUSIVE, Situation

UNSHARED = replace(
    CALM.but(prefix_hit_ratio=0.2, computed_prompt_tokens_per_s=8000.0),
    quiet={**CALM.quiet, "prefix_hit_ratio": 0.8},
)


def launched(flags: str, stated: Stated = LLAMA) -> Stated:
    """The server with that command line."""
    return replace(stated, command_line=parse_command(f"vllm serve m {flags}", origin="f"))


def test_prompts_in_their_old_order_compute_as_little_as_before() -> None:
    advice = advised("prefix_reuse_lost", situation=UNSHARED)["prompt-order"]

    assert changes(advice) == {"prompt": (None, "with the shared part first")}
    assert advice.predicted["prefix_hit_ratio"] == 0.8
    # 20 % are computed in place of 80 %.
    assert advice.predicted["computed_prompt_tokens_per_s"] == pytest.approx(8000 / 4)


@pytest.mark.parametrize(
    "quiet",
    [
        pytest.param({}, id="nothing is known of quiet times"),
        pytest.param({"prefix_hit_ratio": 0.05}, id="nothing was ever shared"),
        pytest.param({"prefix_hit_ratio": 0.15}, id="hits are not fewer than they were"),
    ],
)
def test_prompts_that_shared_nothing_have_no_old_order(quiet: dict[str, float]) -> None:
    assert advised("prefix_reuse_lost", situation=replace(UNSHARED, quiet=quiet)) == {}


@pytest.mark.parametrize("cause_id", ["prefix_reuse_lost", "prefix_churn", "routing_dilution"])
def test_a_router_keeps_prefixes_together_where_there_are_replicas(cause_id: str) -> None:
    several = advised(cause_id, situation=UNSHARED, stated=Stated(replicas=4))
    assert changes(several["prefix-routing"]) == {"router": ("any replica", "by prefix")}

    assert "prefix-routing" not in advised(cause_id, situation=UNSHARED, stated=Stated(replicas=1))
    assert "prefix-routing" not in advised(cause_id, situation=UNSHARED)


def test_hits_at_the_share_that_random_routing_leaves_are_mended_by_routing_first() -> None:
    page = {**PAGE, "num_gpu_blocks_override": PAGE["num_gpu_blocks"]}
    # Random routing leaves 0.2 of a hit ratio of 0.8 to each of 4 replicas, 0.4 to each of 2.
    for replicas, first in {4: "prefix-routing", 2: "kv-blocks"}.items():
        levers = advised(
            "prefix_churn", situation=UNSHARED, page=page, stated=Stated(replicas=replicas)
        )
        assert next(iter(levers)) == first
        assert {"prefix-routing", "kv-blocks"} <= levers.keys()


SLOW = replace(
    CALM.but(kv_transfer_mean_s=0.4, prompt_tokens_mean=8000.0),
    quiet={"kv_transfer_mean_s": 0.05},
)


def test_a_slow_transfer_is_held_against_the_fabric() -> None:
    advice = advised("kv_transfer_slow", situation=SLOW, stated=LLAMA)["kv-transfer-path"]

    assert advice.changes == ()
    # 8,000 tokens of 131,072 bytes over 50 GB/s.
    assert "0.98 GiB per GPU should take 21 ms at 400 Gbit/s" in advice.summary
    assert any("falls towards 50 ms" in line for line in advice.verify)


def test_a_slow_transfer_without_a_model_says_where_to_look() -> None:
    advice = advised("kv_transfer_slow", situation=SLOW)["kv-transfer-path"]

    assert "Gbit/s" not in advice.summary
    assert any("RDMA" in line for line in advice.checks)


def test_transfers_that_are_not_counted_have_no_advice() -> None:
    assert advised("kv_transfer_slow", situation=CALM.but(kv_fetch_waiting=4.0)) == {}


THRASH = CALM.but(lora_max=2.0, waiting_deferred_avg=3.2, lora_waiting=30.0, lora_running=2.0)


def test_slots_grow_four_times_at_most_and_say_that_more_are_wanted() -> None:
    advice = advised("adapter_thrash", situation=THRASH)["max-loras"]

    assert changes(advice) == {"--max-loras": (2, 8)}
    assert "not enough alone" in advice.summary
    assert advice.predicted["waiting_deferred"] == pytest.approx(3.2 * (1 - 6 / 30))


def with_adapters(situation: Situation, flags: str) -> Advice | None:
    """The lever on a server whose launch and GPU are known."""
    return advised("adapter_thrash", situation=situation, stated=launched(flags)).get("max-loras")


def test_slots_take_their_memory_from_the_cache() -> None:
    advice = with_adapters(THRASH, "--enable-lora --max-loras 2 --max-lora-rank 64")
    assert advice is not None
    assert changes(advice)["--max-loras"] == (2, 8)
    assert LLAMA.model is not None
    taken = adapter_bytes(LLAMA.model, Adapters(6, 64), Parallel())

    lost = advice.before["kv_capacity_tokens"] - advice.predicted["kv_capacity_tokens"]
    # The page's 160,000 tokens stand for all that the sizing math finds free.
    assert 0 < lost < taken / 131_072


def test_fewer_slots_where_the_load_needs_the_cache() -> None:
    tight = FULL.but(
        lora_max=2.0, waiting_deferred_avg=3.2, lora_waiting=30.0, lora_running=2.0, running=70.0,
        running_avg=70.0, running_max=70.0, waiting=0.0, waiting_avg=0.0, waiting_by_capacity=0.0,
        kv_usage_ratio=0.7, kv_usage_avg_ratio=0.7, kv_usage_max_ratio=0.72,
    )  # fmt: skip
    roomy = with_adapters(THRASH, "--enable-lora --max-loras 2 --max-lora-rank 512")
    advice = with_adapters(tight, "--enable-lora --max-loras 2 --max-lora-rank 512")
    assert roomy is not None
    assert advice is not None
    (_, most), (_, to) = changes(roomy)["--max-loras"], changes(advice)["--max-loras"]
    assert isinstance(most, int)
    assert isinstance(to, int)

    assert 2 < to < most
    assert advice.predicted["kv_demand_ratio"] <= 0.9


@pytest.mark.parametrize(("blocks", "offered"), [(10_100, False), (12_000, True)])
def test_a_cache_that_hardly_grows_is_not_worth_a_restart(blocks: int, *, offered: bool) -> None:
    fitting = {"num_gpu_blocks_override": "10001", "kv_cache_memory_bytes": str(blocks * 2 * 2**20)}
    levers = advised("kv_pressure", page={**PAGE, **fitting}, stated=LLAMA)
    assert ("kv-blocks" in levers) is offered


def test_no_slots_that_leave_no_memory_for_the_blocks_of_an_override() -> None:
    """Weights of 16 GB and the buffers of many slots do not fit into 24 GB beside the blocks."""
    line = launched("--enable-lora --max-loras 1 --max-lora-rank 64").command_line
    waits = CALM.but(lora_max=1.0, lora_running=1.0, lora_waiting=60.0, waiting_deferred_avg=9.0)
    for name, offered in (("h100-sxm", True), ("a10", False)):
        stated = replace(LLAMA, gpu=gpu(name), command_line=line)
        page = {**PAGE, "num_gpu_blocks": "2600", "num_gpu_blocks_override": "2600"}
        levers = advised("adapter_thrash", situation=waits, page=page, stated=stated)
        assert ("max-loras" in levers) is offered, name


def test_no_slots_where_the_cache_is_short_already() -> None:
    full = FULL.but(lora_max=2.0, waiting_deferred_avg=3.2, lora_waiting=30.0)
    assert with_adapters(full, "--enable-lora --max-loras 2") is None


def test_adapters_are_routed_where_there_are_replicas() -> None:
    levers = advised("adapter_thrash", situation=THRASH, stated=Stated(replicas=3))
    assert changes(levers["adapter-routing"]) == {"router": ("any replica", "by adapter")}
    assert "adapter-routing" not in advised("adapter_thrash", situation=THRASH)


LONG = CALM.but(
    prompt_tokens_mean=4000.0, prompt_tokens_p99=20_000.0, prefill_mean_s=0.8, prefill_p99_s=4.0,
    itl_p50_s=0.02,
    itl_stall_per_s=0.5,
    itl_stall_time_ratio=0.2, itl_p99_s=1.5,
)  # fmt: skip


def test_long_prompts_are_held_to_a_threshold_where_the_budget_must_stay() -> None:
    levers = advised("prefill_interference", situation=LONG, stated=launched("--max-num-seqs 512"))
    (flag,) = changes(levers["long-prefill-threshold"]).items()
    name, (before, after) = flag

    assert name == "--long-prefill-token-threshold"
    assert before is None
    assert isinstance(after, int)
    assert levers["long-prefill-threshold"].predicted["longest_step_s"] < 0.5


def test_prefill_and_decode_apart_comes_last_and_has_no_price() -> None:
    levers = advised("prefill_interference", situation=LONG, stated=launched("--max-num-seqs 64"))
    assert list(levers)[-1] == "pd-disaggregation"
    assert levers["pd-disaggregation"].cost_usd_per_hour is None


def test_fp8_weights_free_room_and_are_not_made_twice() -> None:
    levers = advised("decode_bound", situation=FULL.but(itl_mean_s=0.02), stated=LLAMA)
    assert changes(levers["fp8-weights"]) == {"--quantization": (None, "fp8")}
    assert levers["fp8-weights"].predicted["kv_capacity_tokens"] > 160_000
    assert levers["fp8-weights"].predicted["itl_s"] < 0.02

    again = advised("decode_bound", situation=FULL, stated=launched("--quantization fp8"))
    assert "fp8-weights" not in again


@pytest.mark.parametrize("name", ["openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3"])
def test_a_quantized_checkpoint_is_not_quantized_again(name: str) -> None:
    """vLLM refuses another format than the checkpoint's, also where only experts have one."""
    stated = replace(LLAMA, model=model(name), gpu=gpu("b200"), tensor_parallel=8)
    for cause in ("decode_bound", "queue_saturation"):
        levers = advised(cause, situation=FULL.but(itl_mean_s=0.02), stated=stated)
        assert levers
        assert not {"fp8-weights", "awq-weights", "int8-weights"} & levers.keys()


def test_a_wider_split_without_more_kv_cache_is_not_for_the_kv_cache() -> None:
    """Qwen3-30B-A3B has 4 KV heads: 8 GPUs have two copies of each, and the bytes are fixed."""
    moe = model("Qwen/Qwen3-30B-A3B")
    stated = replace(LLAMA, model=moe, gpu=gpu("h200"), tensor_parallel=4)
    page = {**PAGE, "kv_cache_memory_bytes": str(20 * 2**30)}
    assert "tensor-parallel" not in advised("kv_pressure", page=page, stated=stated)
    (wider,) = [
        each
        for each in advised("decode_bound", page=page, stated=stated).values()
        if each.id == "tensor-parallel"
    ]
    assert wider.summary.startswith("Weights spread over 8 GPUs: each GPU reads half the weight")


A100 = replace(LLAMA, gpu=gpu("a100-80gb"))


@pytest.mark.parametrize(
    ("activity", "lever", "checkpoint"),
    [
        pytest.param({}, "awq-weights", "AWQ (4-bit)", id="fewest bytes"),
        pytest.param({"mfu_ratio": 0.6}, "int8-weights", "INT8 (W8A8)", id="compute-bound"),
    ],
)
def test_a_gpu_without_fp8_gets_another_quantization(
    activity: dict[str, float], lever: str, checkpoint: str
) -> None:
    levers = advised("decode_bound", situation=FULL.but(itl_mean_s=0.02, **activity), stated=A100)
    assert changes(levers[lever]) == {"checkpoint": ("16-bit", checkpoint)}
    assert levers[lever].predicted["kv_capacity_tokens"] > 160_000
    assert not {"fp8-weights", "awq-weights", "int8-weights"} - {lever} & set(levers)


@pytest.mark.parametrize("gpu_id", ["a100-80gb", "h100-sxm"])
def test_memory_that_weights_free_is_no_kv_cache_where_its_bytes_are_set(gpu_id: str) -> None:
    stated = replace(LLAMA, gpu=gpu(gpu_id))
    fixed: dict[str, Any] = {"kv_cache_memory_bytes": "20000000000"}
    for given, words in (({}, "for the KV cache"), (fixed, "stays unused until you raise")):
        levers = advised(
            "decode_bound", situation=FULL.but(itl_mean_s=0.02), stated=stated, **given
        )
        (lever,) = [each for each in levers.values() if each.id.endswith("-weights")]
        assert words in lever.summary
        assert "{" not in lever.summary


@pytest.mark.parametrize("cause", ["queue_saturation", "past_knee", "decode_bound", "slo_conflict"])
def test_known_16_bit_weights_are_quantized_before_hardware_is_added(cause: str) -> None:
    order = list(advised(cause, situation=FULL.but(itl_mean_s=0.02), stated=LLAMA))
    assert order.index("fp8-weights") < order.index("replicas")


def test_unknown_weights_are_no_reason_to_put_replicas_last() -> None:
    order = list(advised("queue_saturation", situation=FULL, stated=Stated(gpu=LLAMA.gpu)))
    assert order.index("replicas") < order.index("fp8-weights")


def test_weights_are_quantized_only_for_a_gpu_that_is_known() -> None:
    levers = advised("queue_saturation", situation=FULL)
    assert "replicas" in levers
    assert not {"fp8-weights", "awq-weights", "int8-weights"} & set(levers)


@pytest.mark.parametrize("cause", ["prefill_bound", "slo_conflict"])
def test_no_servers_apart_where_one_prefill_breaks_the_target(cause: str) -> None:
    short = replace(FULL.but(prefill_mean_s=0.8), targets=Targets(1.0, 0.1))
    assert list(advised(cause, situation=short, stated=LLAMA))[-1] == "pd-disaggregation"
    for values in (
        {"prefill_mean_s": 1.2},
        {"prompt_tokens_mean": 100.0},
        {"prompt_tokens_mean": None},
        {"prefill_busy_ratio": 0.4},  # of two replicas: less than one prefill server
        {"kv_external_share_ratio": 0.9},  # a decode server already
    ):
        not_apart = replace(short, values={**short.values, **values})
        assert "pd-disaggregation" not in advised(cause, situation=not_apart, stated=LLAMA), values


@pytest.mark.parametrize("cause", ["slo_conflict", "prefill_bound", "prefill_interference"])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prompt_tokens_mean": 4000.0}, ""),
        ({"prompt_tokens_mean": 100.0}, "prompts have 100 tokens, and it pays from about 500 on"),
        ({"prompt_tokens_mean": 4000.0, "kv_external_share_ratio": 0.9}, "this is a decode server"),
    ],
)
def test_texts_advise_servers_apart_only_where_they_may_help(
    cause: str, values: dict[str, float], words: str
) -> None:
    late = {"prefill_mean_s": 0.5} if cause == "prefill_bound" else {}
    lever = CONCLUSIVE[cause].but(**late, **values).causes()[cause].lever
    assert ("does not help" in lever) == bool(words)
    assert words in lever


def test_a_decode_server_without_kv_space_pins_its_sessions() -> None:
    full = CONCLUSIVE["kv_pressure"]
    assert "Pin sessions" not in full.causes()["kv_pressure"].lever
    assert "Pin sessions" in full.but(kv_external_share_ratio=0.9).causes()["kv_pressure"].lever


SLOW_FEW = CALM.but(running_avg=3.0, itl_mean_s=0.05, gpu_engine_active_ratio=0.88)


def test_speculation_for_few_requests_on_idle_tensor_pipes() -> None:
    spare = SLOW_FEW.but(gpu_tensor_active_ratio=0.0075)
    order = list(advised("decode_bound", situation=spare, stated=LLAMA))
    assert order.index("spec-on") < order.index("replicas")
    for busy in (
        SLOW_FEW,
        spare.but(gpu_tensor_active_ratio=0.7),
        spare.but(running_avg=40.0),
        spare.but(spec_draft_tokens_per_s=12.0),
    ):
        assert "spec-on" not in advised("decode_bound", situation=busy, stated=LLAMA)


def test_two_that_suffice_together_come_first() -> None:
    # 280 requests of 1,600 tokens: 2.8 times the cache; FP8 doubles it, a second replica too.
    heavy = FULL.but(waiting=180.0, waiting_avg=180.0, waiting_by_capacity=180.0)
    stated = launched("--max-num-seqs 1000", Stated(version=(0, 32, 0), replicas=1))
    levers = advised(
        "kv_pressure",
        situation=heavy,
        stated=stated,
        page={**PAGE, "gpu_memory_utilization": "0.95"},
    )
    first = next(iter(levers.values()))

    assert first.predicted["preemption_per_s"] == 0
    for advice in levers.values():
        if "+" in advice.id:
            assert len(advice.changes) == 2
            assert advice.predicted["preemption_per_s"] == 0
            assert "Neither change is enough alone" in advice.summary
            usage = f"moves to about {advice.predicted['kv_usage_ratio']:.2f}"
            assert usage in " ".join(advice.verify)


def test_the_price_of_a_token_counts_only_what_is_asked_for() -> None:
    stated = replace(LLAMA, usd_per_gpu_hour=4.0, replicas=1)
    queue = FULL.but(waiting_slope_per_s=0.0, completed_per_s=4.0)
    levers = advised("queue_saturation", situation=queue, stated=stated, trend=QueueTrend(0.0))
    advice = levers["replicas"]
    (_, total) = changes(advice)["replicas"]
    assert isinstance(total, int)

    # 3,000 tokens a second are made and no more arrive: more replicas make each dearer.
    assert advice.predicted["usd_per_million_tokens"] == pytest.approx(
        4.0 * total / (3000 * 3600) * 1e6, rel=1e-3
    )
    assert advice.predicted["output_tokens_per_s"] == advice.before["output_tokens_per_s"] == 3000
    assert advice.cost_usd_per_hour == 4.0 * (total - 1)


def test_a_price_that_cannot_be_known_is_given_from_below() -> None:
    stated = replace(LLAMA, usd_per_gpu_hour=4.0, replicas=1)
    silent = FULL.but(completed_per_s=0.0, arrival_per_s=0.0, itl_mean_s=None)
    advice = advised("kv_pressure", situation=silent, stated=stated)["replicas"]

    assert "usd_per_million_tokens" not in advice.predicted
    assert advice.predicted["usd_per_million_tokens_at_least"] > 0


def test_a_target_that_holds_is_held_by_every_lever() -> None:
    met = replace(FULL.but(itl_mean_s=0.02, itl_p99_s=0.03), targets=Targets(None, 0.031))
    for advice in advised("admission_limit", situation=met, stated=LLAMA).values():
        then_s = advice.predicted.get("itl_s")
        assert then_s is None or 0.03 * then_s / 0.02 <= 0.031


DOCUMENTS = FULL.but(
    prompt_tokens_mean=20_000.0,
    prompt_tokens_p99=30_000.0,
    running=8.0,
    running_avg=8.0,
    running_max=8.0,
    waiting=4.0,
    waiting_avg=4.0,
    waiting_by_capacity=4.0,
)
OLD = replace(LLAMA, version=(0, 11, 0))
OFFLOADS = launched("--kv-offloading-size 20")


def test_evicted_blocks_of_long_contexts_may_go_to_host_memory() -> None:
    """Behind an FP8 cache: guide 7.6 quantizes first."""
    levers = advised("kv_pressure", situation=DOCUMENTS, stated=LLAMA, cache_dtype="fp8")
    # 160,000 tokens of 65,536 bytes, as much again as the GPU holds.
    assert changes(levers["kv-offloading"]) == {"--kv-offloading-size": (None, 10)}
    assert "is reloaded in 21 ms" in levers["kv-offloading"].summary
    assert "batch work, not for users who wait" in levers["kv-offloading"].risk
    first = next(iter(advised("kv_pressure", situation=DOCUMENTS, stated=LLAMA)))
    assert first != "kv-offloading"


@pytest.mark.parametrize(
    ("situation", "stated"),
    [
        pytest.param(FULL, LLAMA, id="short contexts"),
        pytest.param(replace(DOCUMENTS, targets=Targets(ttft_p99_s=2.0)), LLAMA, id="users wait"),
        pytest.param(DOCUMENTS, OLD, id="vLLM has no such flag"),
        pytest.param(DOCUMENTS, OFFLOADS, id="it is set"),
        pytest.param(DOCUMENTS, NOTHING, id="nothing to compute with"),
        pytest.param(DOCUMENTS.but(preemption_per_s=0.0), LLAMA, id="nothing is evicted"),
    ],
)
def test_host_memory_is_not_for_others(situation: Situation, stated: Stated) -> None:
    levers = advised("kv_pressure", situation=situation, stated=stated, cache_dtype="fp8")
    assert "kv-offloading" not in levers
