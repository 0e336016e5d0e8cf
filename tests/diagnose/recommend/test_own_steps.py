"""TTFT and ITL after a change where no GPU is known: from the step times that the server showed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.learned.knee import CurveLearner, LoadPoint
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.recommend.demand import QueueTrend
from kneewatch.diagnose.recommend.step_times import BUSY_MOST_RATIO, Prompts, StepTimes
from tests.diagnose.recommend.scenes import FULL, LLAMA, advised
from tests.diagnose.situations import NOW_S, Situation
from tests.diagnose.test_knee import swept
from tests.effort import calls

INPUT, OUTPUT = 1200.0, 784.0
PROMPT_S = 0.4


def itl_s(running: float, context_tokens: float = INPUT + OUTPUT / 2) -> float:
    """The server's true decode step."""
    return 0.01 + 2e-4 * running + 1e-7 * running * context_tokens


def outside_s(running: float) -> float:
    """What a first token takes outside the engine: the API server has more streams to serve."""
    return 4e-5 * running**2


def page(running: float, *, input_tokens: float = INPUT, **signals: float) -> dict[str, float]:
    """A window of that server."""
    step_s = itl_s(running, input_tokens + OUTPUT / 2)
    prefill_s = step_s + PROMPT_S * input_tokens / INPUT
    e2e_s = prefill_s + OUTPUT * step_s
    return {
        "running_avg": running,
        "waiting_avg": 0.0,
        "completed_per_s": running / e2e_s,
        "generation_tokens_per_s": running * OUTPUT / e2e_s,
        "e2e_mean_s": e2e_s,
        "output_tokens_mean": OUTPUT,
        "prompt_tokens_mean": input_tokens,
        "itl_mean_s": step_s,
        "prefill_mean_s": prefill_s,
        "queue_mean_s": 0.0,
        "ttft_mean_s": outside_s(running) + prefill_s,
        **signals,
    }


def learned(*pages: dict[str, float]) -> CurveLearner:
    """What a watched server has shown, a window a minute, the last one a minute ago."""
    curve = CurveLearner(window_s=60.0)
    for ago, values in zip(range(len(pages), 0, -1), pages, strict=True):
        curve.learn(NOW_S - 60.0 * ago, values)
    return curve


LOADS = (20.0, 40.0, 60.0, 80.0, 100.0, 120.0)
BUSY = FULL.but(
    itl_mean_s=itl_s(100.0),
    generation_tokens_per_s=100.0 / itl_s(100.0),
    prefill_mean_s=0.5,
    queue_mean_s=2.4,
    prefix_saved_ratio=0.0,
    prompt_tokens_mean=INPUT,
)


def recommended(
    situation: Situation, lever: str = "max-num-seqs-down", trend: QueueTrend | None = None
) -> Advice:
    """What is recommended against KV pressure, with nothing stated."""
    return advised("kv_pressure", situation=situation, trend=trend)[lever]


def test_latencies_after_fewer_seats_are_those_of_that_batch() -> None:
    curve = learned(
        *[page(load, input_tokens=tokens) for load in LOADS for tokens in (600.0, INPUT)]
    )
    advice = recommended(replace(BUSY, curve=curve))

    seats = advice.changes[0].after
    assert isinstance(seats, int)
    assert seats < 100
    request_s = itl_s(seats) + PROMPT_S + (OUTPUT - 1) * itl_s(seats)
    queued_s = (160 - seats) * request_s / seats
    assert advice.predicted["itl_s"] == pytest.approx(itl_s(seats), rel=0.02)
    assert advice.before["output_tokens_per_s"] > advice.predicted["output_tokens_per_s"]
    assert advice.predicted["output_tokens_per_s"] == pytest.approx(
        seats * OUTPUT / request_s, rel=0.02
    )
    ttft_s = outside_s(seats) + queued_s + itl_s(seats) + PROMPT_S
    assert advice.predicted["ttft_s"] == pytest.approx(ttft_s, rel=0.02)
    assert (
        "Speed predicted from this server's own step times: 12 windows with 20 to 120 running "
        "requests, median error 0%." in advice.summary
    )
    assert not any("TTFT and ITL" in words or "MFU" in words for words in advice.unknown)


@pytest.mark.parametrize(
    ("changes", "loads", "share"),
    [
        pytest.param({}, (), 0.5, id="no step times"),
        pytest.param({}, (97.0, 98.0, 120.0), 0.5, id="only of larger batches"),
        pytest.param(
            {"completed_per_s": 0.05, "arrival_per_s": 0.05},
            LOADS,
            0.5,
            id="a rate too low for the batch",
        ),
        pytest.param({}, (80.0, 100.0, 120.0), 0.5, id="only of batches above the share"),
        pytest.param({}, LOADS, 0.38, id="faster answers"),
    ],
)
def test_kv_after_more_replicas_falls_by_what_is_shown(
    changes: dict[str, float], loads: Sequence[float], share: float
) -> None:
    """Without latencies of smaller batches, the load is divided by the replicas and no more."""
    curve = learned(*[page(load) for load in loads for _ in range(3)])
    situation = replace(BUSY.but(**changes), curve=curve)
    advice = recommended(situation, "replicas", QueueTrend(0.0))
    assert advice.changes[0].after == 2
    assert advice.predicted["kv_demand_ratio"] == pytest.approx(share, abs=0.01)
    assert advice.predicted["kv_usage_ratio"] == pytest.approx(share, abs=0.01)


def test_a_mean_latency_is_of_the_requests_in_the_mean() -> None:
    """Clients that pause between requests: at times more of them wait than in the mean."""
    curve = learned(*map(page, LOADS))
    predictions = [
        recommended(replace(BUSY.but(running_max=most), curve=curve)).predicted
        for most in (160.0, 200.0)
    ]
    assert predictions[0]["ttft_s"] == predictions[1]["ttft_s"]
    assert predictions[0]["waiting"] == predictions[1]["waiting"]


def test_a_machine_that_has_slowed_down_stays_slow() -> None:
    curve = learned(*map(page, LOADS))
    usual = recommended(replace(BUSY, curve=curve)).predicted
    now_s = 1.5 * itl_s(100.0)
    slowed = BUSY.but(itl_mean_s=now_s, generation_tokens_per_s=100.0 / now_s)

    advice = recommended(replace(slowed, curve=curve))
    after = advice.predicted
    changed = "Steps of the same batch now take 1.5x the time that they took in those windows"
    assert changed in advice.summary
    assert "Steps of the same batch" not in recommended(replace(BUSY, curve=curve)).summary
    assert after["itl_s"] == pytest.approx(1.5 * usual["itl_s"], rel=0.01)
    assert after["ttft_s"] > 1.4 * usual["ttft_s"]


@pytest.mark.parametrize("running", [20.0, 60.0, 120.0])
def test_the_api_server_answers_sooner_with_fewer_streams(running: float) -> None:
    steps = StepTimes.of(learned(*map(page, 3 * LOADS)), NOW_S)
    assert steps is not None
    assert before_prompt_s(steps, running) == pytest.approx(outside_s(running))


def before_prompt_s(steps: StepTimes, running: float, *, times: float = 1.0) -> float:
    """What a first token takes before its prompt, at so many times the requests/s of `page`."""
    return steps.outside_s(running, Prompts(0.2, 0.0), times * page(running)["completed_per_s"])


@pytest.mark.parametrize("shown", [1.0, 0.0])
def test_prompts_wait_for_each_other_as_more_arrive(shown: float) -> None:
    """As far as the engine's windows show it: one that computes many prompts at once has none."""
    prompts = Prompts(0.2, 0.0)

    def measured(running: float) -> dict[str, float]:
        window = page(running)
        wait_s = shown * prompts.wait_s(window["completed_per_s"])
        return {**window, "ttft_mean_s": window["prefill_mean_s"] + wait_s}

    steps = StepTimes.of(learned(*map(measured, LOADS)), NOW_S)
    assert steps is not None
    then_per_s = 1.5 * page(40.0)["completed_per_s"]
    ttft_s = steps.outside_s(40.0, prompts, then_per_s)
    assert ttft_s == pytest.approx(shown * prompts.wait_s(then_per_s), rel=0.1)


@given(st.floats(0.01, 2.0), st.floats(0.0, 4.0), st.floats(0.1, 200.0), st.floats(1.01, 100.0))
def test_requests_in_flight_have_one_rate(
    prompt_s: float, varies: float, requests: float, stays: float
) -> None:
    """Little's law, with the wait that the rate brings."""
    prompts, request_s = Prompts(prompt_s, varies), stays * prompt_s
    per_s = prompts.per_s(requests, request_s)
    assert 0 < per_s * prompt_s <= 1
    if per_s * prompt_s < BUSY_MOST_RATIO:
        in_flight = per_s * (request_s + prompts.wait_s(per_s))
        assert in_flight == pytest.approx(requests, rel=1e-3)


def test_a_growing_queue_is_no_time_outside_the_engine() -> None:
    """Those that got a token waited longer than those that ended."""
    late = {"waiting_avg": 50.0, "queue_mean_s": 2.0, "ttft_mean_s": 9.0}
    pages = [page(load) if load < 80 else {**page(load), **late} for load in LOADS]
    steps = StepTimes.of(learned(*pages), NOW_S)
    assert steps is not None
    assert before_prompt_s(steps, 120.0) < outside_s(80.0)


def test_an_idle_server_runs_batches_of_one() -> None:
    """A third of the window one request runs, the rest none: its steps are those of one request."""
    idle = {**page(1.0), "running_avg": 0.3, "waiting_avg": 0.3}
    steps = StepTimes.of(learned(idle, page(1.0), page(2.0)), NOW_S)
    assert steps is not None
    assert steps.least_running == 1


@pytest.mark.parametrize(
    ("loads", "why"),
    [
        pytest.param(
            (5.0, 10.0, 20.0), "not measured beyond 20 requests at once", id="smaller batches"
        ),
        pytest.param(
            (97.0, 98.0, 120.0), "not measured below 97 requests at once", id="larger batches"
        ),
        pytest.param((60.0, 80.0), "set kneewatch's model, gpu and tensor_parallel", id="two"),
    ],
)
def test_nothing_is_predicted_for_a_batch_that_never_ran(
    loads: tuple[float, ...], why: str
) -> None:
    advice = recommended(replace(BUSY, curve=learned(*map(page, loads))))

    assert f"TTFT and ITL after the change ({why})" in advice.unknown
    assert not advice.predicted.keys() & {"ttft_s", "itl_s"}
    assert "Speed predicted" not in advice.summary


def test_a_batch_somewhat_beyond_those_that_ran_is_predicted_and_said_to_be() -> None:
    loads = (5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0)
    advice = recommended(replace(BUSY, curve=learned(*map(page, loads))))

    running = advice.basis["running"]
    assert 60 < running <= 2 * 60
    assert advice.predicted["itl_s"] == pytest.approx(itl_s(running), rel=0.2)
    assert f"A batch of {running:.0f} was not measured" in advice.summary


def test_a_wait_of_a_few_steps_is_no_time_outside_the_engine() -> None:
    """Few wait beside the batch, but for long: their answers are long too."""
    late = {"waiting_avg": 3.0, "ttft_mean_s": 9.0}
    pages = [page(load) if load < 80 else {**page(load), **late} for load in LOADS]
    steps = StepTimes.of(learned(*pages), NOW_S)
    assert steps is not None
    assert before_prompt_s(steps, 120.0) < outside_s(80.0)


def test_waits_of_preempted_requests_are_in_no_step() -> None:
    """vLLM counts them as ITL, and late prompts as prefill; the tokens that come out tell."""
    waits = {"preemption_per_s": 1.0, "itl_mean_s": 1.0, "prefill_mean_s": 9.0, "ttft_mean_s": 99.0}
    pages = [page(load) if load < 80 else {**page(load), **waits} for load in LOADS]
    steps = StepTimes.of(learned(*pages), NOW_S)
    assert steps is not None
    context_tokens = INPUT + OUTPUT / 2
    assert steps.most_running == 120
    assert steps.itl_s(100.0, context_tokens) == pytest.approx(itl_s(100.0), rel=0.05)
    prefill_s = steps.itl_s(100.0, context_tokens) + steps.prompt_s(100.0, INPUT)
    assert prefill_s < 2 * PROMPT_S
    assert before_prompt_s(steps, 100.0) <= outside_s(100.0)


def test_steps_of_another_kind_are_not_predicted_from_the_present_ones() -> None:
    advice = recommended(replace(BUSY, curve=learned(*map(page, LOADS))), "kv-fp8")
    assert "itl_s" not in advice.predicted


def test_context_and_batch_are_told_apart() -> None:
    noise = Random(7)
    curve = learned(
        *[
            page(load, input_tokens=tokens, itl_mean_s=itl_s(load, tokens + OUTPUT / 2) * wobble)
            for load in LOADS
            for tokens in (300.0, 1200.0, 3000.0)
            for wobble in (noise.uniform(0.95, 1.05),)
        ]
    )
    steps = StepTimes.of(curve, NOW_S)
    assert steps is not None
    for running, tokens in ((30.0, 600.0), (70.0, 2500.0), (110.0, 400.0)):
        assert steps.itl_s(running, tokens) == pytest.approx(itl_s(running, tokens), rel=0.1)


def test_a_recorded_server_at_a_load_left_out() -> None:
    """Of the sweep of a real server each load from the windows at all others."""
    learner, now_s = swept()
    points = learner.points()
    errors: list[float] = []
    for point in points:
        assert point.running is not None
        assert point.itl_s is not None
        if not 2 <= point.running <= 60:
            continue  # without it the range would not hold it
        others = [other for other in points if not _alike(other.running, point.running)]
        own_s = step_times(others, now_s).itl_s(point.running, point.context_tokens or 0.0)
        errors.append(abs(own_s / point.itl_s - 1))
    assert len(errors) >= 15
    assert median(errors) <= 0.08
    assert sum(error <= 0.25 for error in errors) >= 0.9 * len(errors)


MEASURED = st.lists(
    st.tuples(st.integers(1, 300), st.integers(20, 30_000), st.floats(0.005, 0.5)),
    min_size=4,
    max_size=32,
)


def step_times(points: Sequence[LoadPoint], now_s: float = NOW_S) -> StepTimes:
    """Step times from these windows, all of them."""
    curve = CurveLearner(window_s=60.0, kept=len(points))
    for point in points:
        curve.take(point)
    steps = StepTimes.of(curve, now_s)
    assert steps is not None
    return steps


def windows_of(measured: list[tuple[int, int, float]]) -> list[LoadPoint]:
    """Windows of a batch, its context and a step."""
    usual = learned(page(50.0)).points()[0]
    return [
        replace(usual, running=float(running), context_tokens=float(tokens), itl_s=step_s)
        for running, tokens, step_s in measured
    ]


@settings(max_examples=60, deadline=None)
@given(MEASURED, st.integers(1, 300), st.integers(1, 300))
def test_a_step_grows_with_its_batch_and_no_faster_whatever_the_machine_did_meanwhile(
    measured: list[tuple[int, int, float]], some: int, others: int
) -> None:
    """A batch grows while clients start, and the machine slows down or becomes free."""
    fewer, more = sorted((some, others))
    steps = step_times(windows_of(measured))

    fewer_s, more_s = (steps.itl_s(each, 300.0, near=fewer) for each in (fewer, more))
    assert more_s * fewer / more <= fewer_s + 1e-12
    assert fewer_s <= more_s + 1e-12


@settings(max_examples=60, deadline=None)
@given(MEASURED)
def test_error_of_a_window_is_that_of_a_fit_to_all_others(
    measured: list[tuple[int, int, float]],
) -> None:
    windows = windows_of(measured)
    one_by_one = [
        abs(step_times(windows[:at] + windows[at + 1 :]).itl_s(running, tokens) / step_s - 1)
        for at, (running, tokens, step_s) in enumerate(measured)
    ]

    assert step_times(windows).error_ratio == pytest.approx(median(one_by_one), rel=1e-4, abs=1e-6)


def test_error_takes_work_in_proportion_to_the_windows() -> None:
    learner, now_s = swept()
    windows = list(learner.points())[:40]

    def work(times: int) -> int:
        steps = step_times(windows * times, now_s)
        return calls(lambda: steps.error_ratio)

    assert work(16) < 5 * work(4)
    assert work(4) < 30 * 4 * len(windows)


def test_reading_points_takes_few_calls() -> None:
    learner, _ = swept()
    points = learner.points()

    assert points
    assert any(None not in astuple(point) for point in points)
    assert calls(learner.points) < 6 * len(points)


def test_unknown_fields_of_points_stay_unknown() -> None:
    curve = learned(page(40.0), page(50.0, preemption_per_s=1.0))

    assert [point.prefill_s is None for point in curve.points()] == [False, True]


@pytest.mark.parametrize(
    ("least_s", "head"),
    [
        pytest.param(0.016, "replicas", id="compute takes the step"),
        pytest.param(0.07, "max-num-batched-tokens-up", id="weights take it"),
    ],
)
def test_a_larger_budget_saves_what_a_step_takes_without_prompts(least_s: float, head: str) -> None:
    """Steps of 88 ms with 512 tokens: twice the budget serves 1.15x, or 1.75x as many prompts."""
    full = BUSY.but(
        **{"itl_mean_s": 0.088, "iteration_tokens_mean": 510.0, "prompt_tokens_p50": 1100.0},
        **{"prefill_busy_ratio": 3.0, "waiting_slope_per_s": 0.4, "preemption_per_s": 0.0},
    )
    curve = learned(*[{**page(load), "itl_mean_s": least_s} for load in LOADS])
    given = advised("queue_saturation", situation=replace(full, curve=curve))

    assert next(iter(given)) == head
    larger = given["max-num-batched-tokens-up"]
    gain = larger.before["load_ratio"] / larger.predicted["load_ratio"]
    assert gain == pytest.approx(2 * 0.088 / (least_s + 2 * (0.088 - least_s)), rel=0.01)
    assert f"about {gain:.2f}x as many" in larger.summary


def test_a_larger_budget_multiplies_no_faster_than_the_gpu() -> None:
    """1,024 prompt tokens of an 8B model take an L4 117 ms at its peak."""
    full = BUSY.but(
        **{"itl_mean_s": 0.088, "iteration_tokens_mean": 510.0, "prompt_tokens_p50": 1100.0},
        **{"prefill_busy_ratio": 3.0, "waiting_slope_per_s": 0.4, "preemption_per_s": 0.0},
    )
    curve = learned(*[{**page(load), "itl_mean_s": 0.07} for load in LOADS])
    stated = replace(LLAMA, gpu=gpu("l4"))
    given = advised("queue_saturation", situation=replace(full, curve=curve), stated=stated)
    gain = given["max-num-batched-tokens-up"].predicted["prompts_served_ratio"]
    parameters = 6.9e9  # without the embeddings, whose rows are looked up
    assert gain <= 2 * 0.088 / (1024 * 2 * parameters / 121e12)


def _alike(running: float | None, other: float) -> bool:
    return running is not None and other / 1.2 <= running <= other * 1.2
