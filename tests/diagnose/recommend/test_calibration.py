"""The roofline, fitted to the step times of a live server."""

from __future__ import annotations

from itertools import permutations
from operator import attrgetter

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.recommend.prediction import calibrated, costs_of
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.speed.performance import Load, Performance, performance
from kneewatch.diagnose.sizing.speed.roofline_inputs import DEFAULT, on_gpu, with_shares
from tests import throughput
from tests.diagnose.recommend.scenes import FULL, LLAMA, advised
from tests.diagnose.situations import Situation

assert LLAMA.model is not None
SERVER = Launch(
    model=LLAMA.model, gpu=LLAMA.gpu, version=(0, 32, 0), gpu_memory_utilization=0.9,
    block_tokens=16,
)  # fmt: skip
KNOWN = costs_of(SERVER)
DECODES = FULL.but(
    running_min=80.0, prompt_tokens_mean=200.0, output_tokens_mean=1400.0, waiting=0.0,
    waiting_avg=0.0, waiting_by_capacity=0.0,
)  # fmt: skip
PROMPTS = FULL.but(
    running_min=10.0, running=16.0, running_avg=16.0, running_max=16.0, waiting=0.0,
    waiting_avg=0.0, waiting_by_capacity=0.0, prompt_tokens_mean=6000.0, output_tokens_mean=60.0,
)  # fmt: skip


def at(situation: Situation, **shares: float) -> Performance:
    """What the server yields at those shares of its peaks, by the roofline itself."""
    values = situation.values
    load = Load(
        input_tokens=values["prompt_tokens_mean"] or 0.0,
        output_tokens=values["output_tokens_mean"] or 0.0,
        concurrency=values["running_avg"] or 0.0,
        max_num_batched_tokens=SERVER.batched_tokens,
    )
    return performance(KNOWN, load, with_shares(DEFAULT, **shares))


def seen(situation: Situation, **shares: float) -> Situation:
    """The page of that server."""
    return situation.but(preemption_per_s=0.0, itl_mean_s=at(situation, **shares).itl_s)


def advised_replicas(situation: Situation) -> Advice:
    """A recommendation with predicted latencies."""
    advice = advised("decode_bound", situation=situation, stated=LLAMA)["replicas"]
    assert "itl_s" in advice.predicted
    return advice


@pytest.mark.parametrize("mbu_ratio", [0.4, 0.6])
def test_a_server_that_reads_slower_is_predicted_from_its_step_times(mbu_ratio: float) -> None:
    advice = advised_replicas(seen(DECODES, mbu_ratio=mbu_ratio))

    # Half of the requests on each of twice the replicas, or fewer, as they are answered sooner.
    replicas = advice.changes[0].after
    assert isinstance(replicas, int)
    half, third = (
        replace(DECODES, values={**DECODES.values, "running_avg": 100.0 * part / replicas})
        for part in (2.0, 4 / 3)
    )
    least_s, most_s = at(third, mbu_ratio=mbu_ratio).itl_s, at(half, mbu_ratio=mbu_ratio).itl_s
    assert 0.95 * least_s < advice.predicted["itl_s"] < 1.05 * most_s


def test_the_age_and_the_factors_of_the_step_times_are_said() -> None:
    """The window is all that is measured: it starts anew with the process."""
    page = seen(DECODES, mbu_ratio=0.6)
    slower = page.but(itl_mean_s=1.3 * (page.values["itl_mean_s"] or 0.0))
    short_window = replace(slower, scale=1 / 3)

    assert "step times of the last 60 s: decode" in advised_replicas(slower).summary
    assert "step times of the last 20 s: decode" in advised_replicas(short_window).summary
    assert advised_replicas(slower).summary != advised_replicas(page).summary


def test_the_wait_of_preempted_requests_is_no_step_time() -> None:
    """vLLM counts it as ITL; what a step takes is seen by the tokens that come out."""
    page = seen(DECODES, mbu_ratio=0.6)
    itl_s, running = page.values["itl_mean_s"] or 0.0, page.values["running_avg"] or 0.0
    preempting = {"preemption_per_s": 4.0, "generation_tokens_per_s": running / itl_s}
    waits = page.but(itl_mean_s=1.4 * itl_s)

    usual_s = advised_replicas(page).predicted["itl_s"]
    assert advised_replicas(waits.but(**preempting)).predicted["itl_s"] == pytest.approx(usual_s)
    assert advised_replicas(waits).predicted["itl_s"] > 1.2 * usual_s


CHAT = Load(input_tokens=1000, output_tokens=250, concurrency=32)


def test_decode_and_prefill_have_a_factor_each() -> None:
    """A server that decodes slower and prefills faster than the roofline, at half of its load."""
    server = replace(DEFAULT, decode_factor=1.5, prefill_factor=0.7)
    now = performance(KNOWN, CHAT, server)

    own = calibrated(KNOWN, CHAT, DEFAULT, itl_s=now.itl_s, prefill_s=now.prefill_s)

    assert own is not None
    assert own.decode_factor == pytest.approx(1.5, rel=0.02)
    assert own.prefill_factor == pytest.approx(0.7, rel=0.02)
    half = replace(CHAT, concurrency=16)
    predicted, truth = (performance(KNOWN, half, shares) for shares in (own, server))
    assert predicted.itl_s == pytest.approx(truth.itl_s, rel=0.02)
    assert predicted.ttft_s == pytest.approx(truth.ttft_s, rel=0.02)


@pytest.mark.parametrize(("itl_times", "prefill_times"), [(1.0, 1.5), (1.2, 1.5), (1.2, 2.0)])
def test_no_step_reads_faster_than_the_memory(itl_times: float, prefill_times: float) -> None:
    """Longer prefills take more of the gaps between tokens, and leave less for decoding."""
    now = performance(KNOWN, CHAT, DEFAULT)
    itl_s, prefill_s = itl_times * now.itl_s, prefill_times * now.prefill_s
    own = calibrated(KNOWN, CHAT, DEFAULT, itl_s=itl_s, prefill_s=prefill_s)
    assert own is not None
    assert own.decode_factor >= own.mbu_ratio
    assert own.prefill_factor >= own.mfu_ratio


def test_a_server_far_from_the_roofline_is_not_calibrated() -> None:
    itl_s = 3 * performance(KNOWN, CHAT).itl_s
    assert calibrated(KNOWN, CHAT, DEFAULT, itl_s=itl_s, prefill_s=0.1) is None


def test_published_servers_at_another_load() -> None:
    """Calibrated on one published run of a server, predicted for another of up to 3 times the
    requests, as a change of the replicas' number makes it."""
    errors: list[tuple[float, float]] = []
    blind: list[float] = []
    for first, other in permutations(filter(throughput.steady, throughput.trusted()), 2):
        if not _same_server(first, other):
            continue
        server_costs = throughput.point_costs(first)
        loads = [throughput.load(point, point.in_flight or 1.0) for point in (first, other)]
        # Their clients measured TTFT, which has more in it than the prefill.
        prefill_s = (first.ttft_s or 0.0) - DEFAULT.request_s - first.tpot_s / 2
        own = calibrated(server_costs, loads[0], DEFAULT, itl_s=first.tpot_s, prefill_s=prefill_s)
        assert own is not None
        speed = performance(server_costs, loads[1], own)
        errors.append((speed.itl_s / other.tpot_s - 1, speed.ttft_s / (other.ttft_s or 1.0) - 1))
        blind.append(performance(server_costs, loads[1]).ttft_s / (other.ttft_s or 1.0) - 1)
    itl, ttft = (list(column) for column in zip(*errors, strict=True))
    assert len(errors) >= 20
    assert sum(abs(error) <= 0.25 for error in itl) >= 0.9 * len(itl)
    assert sum(abs(error) <= 0.25 for error in ttft) >= 0.75 * len(ttft)
    assert throughput.median_error_ratio(ttft) < throughput.median_error_ratio(blind)


def _same_server(first: throughput.Point, other: throughput.Point) -> bool:
    """Two loads of one launch, without drafts: the same source's page, other requests in flight."""
    launch = attrgetter("model", "gpu", "tensor_parallel", "vllm_version", "max_num_seqs")
    lower, higher = sorted(point.in_flight or 0.0 for point in (first, other))
    return (
        launch(first) == launch(other)
        and not (first.drafts or other.drafts)
        and not (first.is_short_closed_loop or other.is_short_closed_loop)
        and max(first.input_tokens, other.input_tokens) < 1000
        and 1.1 * lower <= higher <= 3 * lower
    )


@pytest.mark.parametrize("name", ["h100-sxm", "a100-80gb", "rtx-4090", "mi300x"])
def test_a_server_as_fast_as_its_gpu_usually_is_needs_no_factor(name: str) -> None:
    launch = replace(SERVER, gpu=gpu(name))
    load = Load(
        input_tokens=6000,
        output_tokens=60,
        concurrency=16,
        max_num_batched_tokens=launch.batched_tokens,
    )
    speed = performance(costs_of(launch), load, on_gpu(launch.gpu))
    page = PROMPTS.but(preemption_per_s=0.0, itl_mean_s=speed.itl_s, prefill_mean_s=speed.prefill_s)
    advice = advised("decode_bound", situation=page, stated=replace(LLAMA, gpu=gpu(name)))

    assert "decode takes 1.00x the roofline's time, prefill 1.00x" in advice["replicas"].summary
