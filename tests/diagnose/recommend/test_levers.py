"""Levers by cause, each with its arithmetic."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.vllm_flags import parse_command
from kneewatch.diagnose.ranking import CAUSES
from kneewatch.diagnose.recommend.adviser import LEVERS
from kneewatch.rules.facts import Targets
from tests.diagnose.recommend.scenes import ADVISED, FULL, LLAMA, advised, changes
from tests.diagnose.situations import CALM


def launched(line: str) -> Stated:
    return Stated(command_line=parse_command(f"vllm serve m {line}", origin="f"))


def test_kv_pressure_in_the_guides_order() -> None:
    levers = advised("kv_pressure")
    # What suffices comes first, and of that what is free.
    assert list(levers) == ["kv-fp8", "replicas", "gpu-memory-utilization", "max-num-seqs-down"]


def test_fp8_holds_twice_the_blocks() -> None:
    advice = advised("kv_pressure")["kv-fp8"]
    assert changes(advice) == {"--kv-cache-dtype": ("auto", "fp8")}
    assert advice.before["kv_blocks"] == 10_001
    assert advice.predicted["kv_blocks"] == 20_002
    assert advice.predicted["kv_capacity_tokens"] == 20_001 * 16
    assert advice.before["kv_demand_ratio"] == pytest.approx(1.6)
    assert advice.predicted["kv_usage_ratio"] == pytest.approx(0.8, abs=0.001)
    assert advice.predicted["preemption_per_s"] == 0
    assert advice.predicted["max_concurrency"] == 200  # 320,016 / 1,600


def test_fp8_without_a_number_of_blocks() -> None:
    page = {"kv_cache_size_tokens": "160000", "cache_dtype": "auto"}
    assert advised("kv_pressure", page=page)["kv-fp8"].predicted["kv_capacity_tokens"] == 320_000


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_no_fp8_where_it_is_in_force(dtype: str) -> None:
    assert "kv-fp8" not in advised("kv_pressure", cache_dtype=dtype)


@pytest.mark.parametrize("name", ["a100-80gb", "a10g"])
def test_no_fp8_on_gpus_without_it(name: str) -> None:
    assert "kv-fp8" not in advised("kv_pressure", stated=Stated(gpu=gpu(name)))


def test_no_fp8_on_versions_that_ignore_it() -> None:
    page = {"block_size": "16", "num_gpu_blocks": "10001"}
    assert "kv-fp8" not in advised("kv_pressure", page=page, stated=Stated(version=(0, 8, 0)))
    assert "kv-fp8" in advised("kv_pressure", page=page, stated=Stated(version=(0, 9, 0)))


def test_utilization_without_a_gpu_is_a_step_and_a_lower_bound() -> None:
    advice = advised("kv_pressure")["gpu-memory-utilization"]
    assert changes(advice) == {"--gpu-memory-utilization": (0.9, 0.92)}
    assert advice.predicted["kv_capacity_ratio"] == pytest.approx(0.92 / 0.9, rel=5e-4)
    assert "at least" in advice.summary


def test_utilization_on_a_known_gpu_counts_bytes() -> None:
    advice = advised("kv_pressure", stated=LLAMA)["gpu-memory-utilization"]
    assert changes(advice)["--gpu-memory-utilization"] == (0.9, 0.95)
    gained = 0.05 * gpu("h100-sxm").memory_bytes // (16 * 131_072)
    assert advice.predicted["kv_blocks"] == pytest.approx(10_001 + gained, abs=1)


def test_utilization_is_not_raised_above_the_guides_limit() -> None:
    assert "gpu-memory-utilization" not in advised("kv_pressure", gpu_memory_utilization="0.95")


def test_an_override_of_the_blocks_is_what_binds() -> None:
    levers = advised("kv_pressure", num_gpu_blocks_override="10001")
    assert next(iter(levers)) == "kv-blocks"
    assert "gpu-memory-utilization" not in levers
    # 1.6 times what there is, at a usage of 0.8: twice the 10,000 blocks.
    ((_, blocks),) = changes(levers["kv-blocks"]).values()
    assert isinstance(blocks, int)
    assert 20_001 <= blocks <= 20_001 * 1.15
    assert changes(levers["kv-fp8"])["--num-gpu-blocks-override"] == (10_001, 20_002)


def test_an_override_is_not_raised_beyond_the_memory() -> None:
    # Llama 3.1 8B on an H100 leaves some 30,000 blocks; 12 times the load wants many more.
    many = FULL.but(waiting=1800.0, waiting_avg=1800.0, waiting_by_capacity=1800.0)
    levers = advised("kv_pressure", situation=many, stated=LLAMA, num_gpu_blocks_override="10001")
    ((_, blocks),) = changes(levers["kv-blocks"]).values()
    assert isinstance(blocks, int)
    assert 20_000 < blocks < 32_000
    assert "Not enough alone" in levers["kv-blocks"].summary


def test_fixed_bytes_are_what_binds() -> None:
    levers = advised("kv_pressure", kv_cache_memory_bytes=str(4 * 2**30))
    assert next(iter(levers)) == "kv-memory-bytes"
    assert changes(levers["kv-memory-bytes"]) == {
        "--kv-cache-memory-bytes": (4 * 2**30, 8 * 2**30)  # 1.6 / 0.8 = 2 times
    }
    assert "gpu-memory-utilization" not in levers


def test_fewer_sequences_with_the_wait_that_follows() -> None:
    advice = advised("kv_pressure")["max-num-seqs-down"]
    # 0.9 x 160,000 / 1,600 = 90, rounded down to 88; 72 wait, and 3,000 tokens a second are 3.8
    # requests of 784.
    assert changes(advice) == {"--max-num-seqs": (None, 88)}
    assert advice.predicted["waiting"] == 72
    assert advice.predicted["queue_wait_s"] == pytest.approx(72 / (3000 / 784), rel=5e-4)
    assert advice.predicted["kv_usage_ratio"] == pytest.approx(0.88)


def test_fewer_sequences_never_means_more() -> None:
    assert "max-num-seqs-down" not in advised("kv_pressure", stated=launched("--max-num-seqs 64"))


def test_replicas_are_no_advice_where_nothing_waits_and_streams_are_as_fast_as_usual() -> None:
    given_up = CALM.but(given_up_ratio=0.7, given_up_per_s=1.0, running_avg=20.0)
    streams = {"stream_tokens_per_s": 50.0, "stream_usual_tokens_per_s": 50.0}
    assert "replicas" not in advised("clients_give_up", situation=given_up.but(**streams))
    slower = given_up.but(**{**streams, "stream_tokens_per_s": 20.0})
    advice = advised("clients_give_up", situation=slower)["replicas"]
    assert "number that the load needs is unknown" in advice.summary
    assert "load_ratio" not in {**advice.before, **advice.predicted}
    queued = given_up.but(**streams, waiting_avg=30.0, waiting=30.0, waiting_by_capacity=30.0)
    assert "load_ratio" in advised("clients_give_up", situation=queued)["replicas"].before


def test_replicas_with_the_guides_safety() -> None:
    grows = FULL.but(waiting_slope_per_s=2.4)
    advice = advised("kv_pressure", situation=grows, stated=LLAMA)["replicas"]
    # Two replicas, at which 1.6 times what they serve arrives: 3.2 x 1.3 = 4.16, so five.
    assert changes(advice) == {"replicas": (2, 5)}
    price = gpu("h100-sxm").usd_per_hour
    assert advice.cost_usd_per_hour == pytest.approx(3 * price)
    assert advice.before["usd_per_hour"] == pytest.approx(2 * price)
    assert advice.predicted["usd_per_hour"] == pytest.approx(5 * price)
    # Smaller batches have shorter steps, so that fewer requests run at once than the share.
    assert 0.5 * 1.6 * 2 / 5 < advice.predicted["kv_usage_ratio"] < 1.6 * 2 / 5


def test_what_is_not_stated_is_said_not_invented() -> None:
    advice = advised("kv_pressure")["replicas"]
    assert advice.cost_usd_per_hour is None
    assert not {"ttft_s", "itl_s"} & advice.predicted.keys()
    assert any("kneewatch's model" in line for line in advice.unknown)
    assert any("usd_per_gpu_hour" in line for line in advice.unknown)


def test_latency_where_model_and_gpu_are_stated() -> None:
    situation = FULL.but(itl_mean_s=0.02)
    advice = advised("kv_pressure", situation=situation, stated=LLAMA)["replicas"]
    assert 0 < advice.predicted["itl_s"] <= 0.02  # no more requests on each
    assert advice.predicted["ttft_s"] < 3.0
    assert not advice.unknown


def test_tensor_parallel_where_it_can_be_computed() -> None:
    advice = advised("kv_pressure", stated=LLAMA)["tensor-parallel"]
    assert changes(advice) == {"--tensor-parallel-size": (1, 2)}
    assert advice.predicted["kv_capacity_ratio"] > 2
    assert advice.cost_usd_per_hour == pytest.approx(2 * gpu("h100-sxm").usd_per_hour)


def test_tensor_parallel_does_not_help_against_an_override() -> None:
    levers = advised("kv_pressure", stated=LLAMA, num_gpu_blocks_override="10001")
    assert "tensor-parallel" not in levers


def test_queue_replicas_by_rates() -> None:
    queued = CALM.but(waiting_avg=60.0, waiting=60.0, waiting_by_capacity=60.0).but(
        completed_per_s=8.0, waiting_slope_per_s=6.0
    )
    advice = advised("queue_saturation", situation=queued)["replicas"]
    # 8 served, 6 more a second queue up: 14 / 8 x 1.3 = 2.3. The 60 that are queued are no demand.
    assert changes(advice) == {"replicas": (1, 3)}
    assert advice.predicted["load_ratio"] == pytest.approx(14 / 8 / 3, rel=1e-3)
    assert advice.predicted["backlog_drain_s"] == pytest.approx(60 / (3 * 8 - 14), rel=1e-3)


PINNED = CALM.but(
    running=8.0, running_avg=8.0, running_max=8.0, waiting=60.0, waiting_avg=60.0,
    waiting_by_capacity=60.0, kv_usage_avg_ratio=0.05, completed_per_s=8.0,
    prompt_tokens_mean=800.0, output_tokens_mean=384.0,
)  # fmt: skip


def test_admission_limit_raises_the_seats() -> None:
    advice = advised("admission_limit", situation=PINNED)["max-num-seqs-up"]
    assert changes(advice) == {"--max-num-seqs": (8, 32)}  # four times at once, no more
    assert advice.predicted["served_per_s_at_most"] == 32
    # Of callers, 36 would still wait.
    assert (advice.before["waiting"], advice.predicted["waiting"]) == (60, 36)
    assert "Sized for 32 of 68 requests in flight" in advice.summary


def test_an_observed_limit_holds_in_every_prediction() -> None:
    """FP8 weights admit no more requests than now: nothing fills the KV cache."""
    pinned = FULL.but(running=8.0, running_avg=8.0, running_max=8.0, kv_usage_avg_ratio=0.5,
                      preemption_per_s=0.0, waiting_slope_per_s=0.0)  # fmt: skip
    levers = advised("admission_limit", situation=pinned, stated=LLAMA)
    assert levers["fp8-weights"].before["max_concurrency"] == 8
    assert levers["fp8-weights"].predicted["kv_usage_ratio"] < 0.5
    assert "still preempt" not in levers["fp8-weights"].summary


def test_nothing_is_predicted_of_a_load_that_the_page_does_not_show() -> None:
    hidden = FULL.but(running=None, running_avg=None)
    for lever in advised(
        "queue_saturation", "kv_pressure", situation=hidden, stated=LLAMA
    ).values():
        assert lever.predicted.keys().isdisjoint({"kv_usage_ratio", "kv_demand_ratio", "ttft_s"})


def test_seats_stop_where_the_kv_cache_is_full() -> None:
    situation = PINNED.but(prompt_tokens_mean=8000.0)
    advice = advised("admission_limit", situation=situation)["max-num-seqs-up"]
    # 0.8 x 160,000 / (8,000 + 192 + 8) = 15.6
    assert changes(advice) == {"--max-num-seqs": (8, 15)}
    assert advice.predicted["kv_usage_ratio"] <= 0.8


def test_seats_stop_where_itl_would_miss_its_target() -> None:
    slow = replace(PINNED.but(itl_p99_s=0.08), targets=Targets(itl_p99_s=0.1))
    advice = advised("admission_limit", situation=slow)["max-num-seqs-up"]
    assert changes(advice) == {"--max-num-seqs": (8, 10)}  # 8 x 0.1 / 0.08


def test_a_target_that_no_batch_keeps_does_not_hold_the_seats_back() -> None:
    pinned = PINNED.but(itl_p99_s=0.03, itl_mean_s=0.02, tpot_mean_s=0.02)
    for target_s, seats in ((0.001, 32), (0.028, None)):
        asked = replace(pinned, targets=Targets(itl_p99_s=target_s))
        levers = advised("admission_limit", situation=asked, stated=LLAMA)
        advice = levers.get("max-num-seqs-up")
        assert (advice and changes(advice)["--max-num-seqs"][1]) == seats
        told = (
            advice is not None and "No batch keeps the ITL P99 target of 1 ms: " in advice.summary
        )
        assert told == (seats is not None)


def test_no_more_seats_where_the_gpu_is_busy() -> None:
    busy = PINNED.but(itl_mean_drift_ratio=2.5)
    assert "max-num-seqs-up" not in advised("queue_saturation", situation=busy)


def test_no_more_seats_where_the_batch_is_below_what_it_was() -> None:
    below = PINNED.but(running=4.0, running_avg=4.0, itl_mean_drift_ratio=1.0)
    assert "max-num-seqs-up" not in advised("queue_saturation", situation=below)
    assert "max-num-seqs-up" in advised("queue_saturation", situation=below.but(running=8.0))
    drained = below.but(running=8.0, waiting_by_capacity=0.0)
    assert "max-num-seqs-up" not in advised("queue_saturation", situation=drained)


def test_a_queue_limit_only_where_the_version_knows_it() -> None:
    slow = replace(PINNED, targets=Targets(ttft_p99_s=2.0))
    assert "queue-limit" not in advised("queue_saturation", situation=slow)
    new = Stated(version=(0, 29, 0))
    assert "queue-limit" not in advised("queue_saturation", situation=slow, stated=new)
    stated = replace(new, command_line=launched("--max-num-seqs 8").command_line)
    old = replace(stated, version=(0, 28, 0))
    assert "queue-limit" not in advised("queue_saturation", situation=slow, stated=old)
    levers = advised("queue_saturation", situation=slow, stated=stated)
    # vLLM counts what runs too: 8 seats, and 0.85 x 2 x 8 in the queue.
    assert changes(levers["queue-limit"]) == {"--max-num-queued-reqs": (None, 8 + 13)}
    assert "HTTP 503" in levers["queue-limit"].checks[0]
    assert list(levers)[-1] == "queue-limit"
    ranks = replace(new, command_line=launched("--max-num-seqs 8 -dp 2").command_line)
    levers = advised("queue_saturation", situation=slow, stated=ranks)
    assert changes(levers["queue-limit"]) == {"--max-num-queued-reqs": (None, 2 * 8 + 26)}


def test_a_queue_limit_never_comes_first() -> None:
    slow = replace(PINNED, targets=Targets(ttft_p99_s=2.0))
    stated = replace(launched("--max-num-seqs 8"), version=(0, 32, 0))
    levers = advised("admission_limit", "queue_saturation", situation=slow, stated=stated)
    assert [advice.cause for advice in levers.values() if advice.id == "queue-limit"] == [
        "admission_limit"
    ]
    assert list(levers)[-1] == "queue-limit"
    wide = PINNED.but(running=88.0, running_avg=88.0, running_max=88.0)
    levers_beside_knee = advised("past_knee", "queue_saturation", situation=wide, stated=stated)
    assert "queue-limit" not in levers_beside_knee or any(
        advice.cause == "queue_saturation" and advice.id != "queue-limit"
        for advice in levers_beside_knee.values()
    )


def test_prefix_caching_by_the_version() -> None:
    off = advised("prefix_cache_off", enable_prefix_caching="False", stated=LLAMA)
    assert changes(off["prefix-caching"]) == {"--no-enable-prefix-caching": (True, None)}
    old = advised(
        "prefix_cache_off",
        page={"enable_prefix_caching": "False"},
        stated=Stated(version=(0, 6, 3)),
    )
    assert changes(old["prefix-caching"]) == {"--enable-prefix-caching": (False, True)}
    assert advised("prefix_cache_off", enable_prefix_caching="True") == {}


LONG = CALM.but(prefill_p99_s=2.0, prompt_tokens_p99=6000.0, itl_stall_per_s=1.0)


def test_a_budget_by_the_prefill_rate() -> None:
    stated = launched("--max-num-seqs 64")
    levers = advised("prefill_interference", situation=LONG, stated=stated)
    advice = levers["max-num-batched-tokens"]
    # 3,000 tokens a second, and 0.02 s for the streams: 540 in 0.2 s, 512 as a power of two.
    assert changes(advice) == {"--max-num-batched-tokens": (None, 512)}
    assert advice.predicted["longest_step_s"] == pytest.approx(512 / 3000 + 0.02, rel=5e-4)
    assert advice.predicted["itl_stall_per_s"] == advice.predicted["itl_stall_time_ratio"] == 0
    # 12 steps instead of one: each of the other 11 decodes for the streams too.
    assert advice.predicted["prefill_p99_s"] == pytest.approx(2.0 + 11 * 0.02)


def test_the_last_chunk_of_a_long_prompt_is_the_longest() -> None:
    # Llama-3.1 8B: 14 GFLOP a token without its head, and 4 x 32 x 4096 a token attended.
    body, pairs = 2 * 6.98e9, 4 * 32 * 4096 * 60_000
    ratio = (body + pairs) / (body + pairs / 2)
    assert ratio == pytest.approx(1.53, abs=0.01)
    long = LONG.but(prompt_tokens_p99=60_000.0, prefill_p99_s=20.0)
    stated = replace(LLAMA, command_line=launched("--max-num-seqs 64").command_line)
    advice = advised("prefill_interference", situation=long, stated=stated)[
        "max-num-batched-tokens"
    ]
    assert changes(advice) == {"--max-num-batched-tokens": (8192, 256)}  # 0.18 s at 1,960 a second
    step_s = 256 * 20 / 60_000 * ratio + 0.02
    assert advice.predicted["longest_step_s"] == pytest.approx(step_s, rel=0.01)


def test_steps_of_half_a_second_do_not_end_the_pauses() -> None:
    # 300 tokens a second: the smallest budget, 256 tokens, still takes 0.85 s.
    slow = LONG.but(prefill_p99_s=20.0)
    stated = launched("--max-num-seqs 64")
    advice = advised("prefill_interference", situation=slow, stated=stated)[
        "max-num-batched-tokens"
    ]
    step_s, prefill_s = 256 / 300 + 0.02, 20.0 + 23 * 0.02
    assert advice.predicted == {
        "longest_step_s": pytest.approx(step_s, rel=5e-4),
        "prefill_p99_s": pytest.approx(prefill_s),
    }


def test_a_prompt_without_chunks_is_one_step() -> None:
    stated = launched("--no-enable-chunked-prefill --max-num-batched-tokens 8192 --max-num-seqs 64")
    advice = advised("prefill_interference", situation=LONG, stated=stated)["chunked-prefill"]
    assert changes(advice)["--max-num-batched-tokens"] == (8192, 512)
    assert advice.predicted["prefill_p99_s"] == pytest.approx(2.0 + 11 * 0.02)


def test_chunked_prefill_that_the_launch_switches_off() -> None:
    line = "--no-enable-chunked-prefill --max-num-batched-tokens 8192 --max-num-seqs"
    stated = launched(f"{line} 64")
    levers = advised("prefill_interference", situation=LONG, stated=stated)
    assert changes(levers["chunked-prefill"]) == {
        "--no-enable-chunked-prefill": (True, None),
        "--max-num-batched-tokens": (8192, 512),
    }
    wide = advised("prefill_interference", situation=LONG, stated=launched(f"{line} 600"))
    # vLLM refuses a budget below its seats.
    assert changes(wide["chunked-prefill"])["--max-num-batched-tokens"] == (8192, 600)
    # Without chunks a smaller budget alone would refuse the longest prompts.
    assert "max-num-batched-tokens" not in levers
    assert "long-prefill-threshold" not in levers


def test_chunked_prefill_is_the_default() -> None:
    levers = advised("prefill_interference", situation=LONG, stated=launched("--enforce-eager"))
    assert "chunked-prefill" not in levers


def test_a_budget_that_is_in_force_is_not_recommended() -> None:
    stated = launched("--max-num-batched-tokens 512")
    levers = advised("prefill_interference", situation=LONG, stated=stated)
    assert "max-num-batched-tokens" not in levers


SPECULATING = CALM.but(
    spec_acceptance_ratio=0.45,
    spec_accepted_per_draft_tokens=1.8,
    spec_acceptance_pos0_ratio=0.9,
    spec_acceptance_pos1_ratio=0.8,
    spec_acceptance_pos2_ratio=0.08,
    spec_acceptance_pos3_ratio=0.02,
)


def test_a_shorter_draft_by_what_each_position_gives() -> None:
    levers = advised("spec_decode_poor", situation=SPECULATING)
    assert list(levers) == ["spec-shorter"]  # as it is it pays as well: 2.8 / 1.4
    advice = levers["spec-shorter"]
    assert changes(advice) == {"--speculative-config.num_speculative_tokens": (4, 2)}
    assert advice.predicted["spec_acceptance_ratio"] == pytest.approx(0.85)  # (0.9 + 0.8) / 2
    assert advice.predicted["speedup_at_most_ratio"] == pytest.approx(2.7 / 1.2)


def test_speculation_off_where_nothing_is_accepted() -> None:
    poor = CALM.but(spec_acceptance_ratio=0.01, spec_accepted_per_draft_tokens=0.04)
    levers = advised("spec_decode_poor", situation=poor)
    assert list(levers) == ["spec-off"]
    assert changes(levers["spec-off"]) == {
        "--speculative-config": (None, None)  # what nobody wrote is not shown
    }
    assert levers["spec-off"].before["speedup_at_most_ratio"] < 1


def test_adapter_slots_and_their_place_in_memory() -> None:
    thrash = CALM.but(lora_max=2.0, waiting_deferred_avg=3.2)
    levers = advised("adapter_thrash", situation=thrash, stated=launched("--max-cpu-loras 4"))
    assert changes(levers["max-loras"]) == {"--max-loras": (2, 6), "--max-cpu-loras": (4, 6)}


def test_an_output_limit_from_quiet_times() -> None:
    levers = advised("runaway_generation", situation=CALM.but(output_tokens_p99=4000.0))
    # 3 x 200 tokens, in steps of 64
    assert changes(levers["output-cap"]) == {
        "--override-generation-config": (None, '{"max_new_tokens": 640}')
    }


def test_a_request_that_can_never_fit() -> None:
    levers = advised("engine_stalled", situation=FULL, stated=launched("--max-model-len 200000"))
    assert changes(levers["max-model-len"]) == {"--max-model-len": (200_000, 143_872)}


def test_a_utilization_that_no_server_has_is_not_raised() -> None:
    levers = advised("kv_pressure", situation=FULL, gpu_memory_utilization="5e-324")
    assert "gpu-memory-utilization" not in levers


def test_scaling_down_needs_the_weekly_peak() -> None:
    assert advised("underused", situation=CALM) == {}
    levers = advised("kv_overprovisioned", situation=CALM, stated=Stated(replicas=4))
    assert levers["fewer-replicas"].changes == ()
    assert "weekly peak" in levers["fewer-replicas"].summary


@pytest.mark.parametrize("cause_id", ["engine_restarted", "target_down", "metrics_missing"])
def test_the_observers_own_causes_have_no_lever(cause_id: str) -> None:
    assert cause_id not in ADVISED
    assert advised(cause_id) == {}


def test_every_lever_is_one_of_some_cause() -> None:
    assert {name for record in CAUSES for name in record.levers} == set(LEVERS)


def test_a_lever_is_told_once() -> None:
    levers = advised("kv_pressure", "prefix_churn", "past_knee")
    assert levers["kv-fp8"].cause == "kv_pressure"
