"""What the GPU waits for, and what that does to a verdict about latency."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.causes.bottleneck import bound_of
from kneewatch.diagnose.recommend.adviser import Adviser
from kneewatch.diagnose.verdict import Cause
from kneewatch.rules.facts import Targets
from tests.diagnose.situations import CALM, CONCLUSIVE, Situation

DECODE, PREFILL = CONCLUSIVE["decode_bound"], CONCLUSIVE["prefill_bound"]
READING = {"gpu_dram_active_ratio": 0.82, "gpu_tensor_active_ratio": 0.11}
MULTIPLYING = {"gpu_dram_active_ratio": 0.45, "gpu_tensor_active_ratio": 0.81}
RESTING = {
    "gpu_dram_active_ratio": 0.2,
    "gpu_tensor_active_ratio": 0.05,
    "gpu_engine_active_ratio": 0.35,
}


def bound(situation: Situation) -> str:
    step_bound = bound_of(situation.facts())
    return step_bound.kind if step_bound else ""


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        pytest.param(READING, "memory", id="decode"),
        pytest.param(MULTIPLYING, "compute", id="prefill"),
        pytest.param({**READING, "gpu_tensor_active_ratio": 0.93}, "compute", id="both: the more"),
        pytest.param(RESTING, "host", id="resting with requests in the batch"),
        pytest.param({**RESTING, "gpu_engine_active_ratio": 0.9}, "", id="busy with nothing short"),
        pytest.param({"mbu_ratio": 0.7, "mfu_ratio": 0.05}, "memory", id="vLLM's own estimate"),
        pytest.param({"mbu_ratio": 0.3, "mfu_ratio": 0.5}, "compute", id="its FLOPs"),
        pytest.param({"gpu_memory_used_ratio": 0.99}, "", id="memory taken is not memory busy"),
        pytest.param({}, "", id="no GPU source"),
    ],
)
def test_what_is_short(values: dict[str, float], kind: str) -> None:
    assert bound(CALM.but(**values)) == kind
    assert bound(CALM.but(running_avg=0.0, **values)) == "", "an idle server waits for nothing"
    guessed = replace(CALM, gpus_guessed=True).but(**values)
    assert bound(guessed) == "", "idle GPUs of others would look like a starved one"


def verdict(situation: Situation, cause_id: str, values: dict[str, float]) -> Cause:
    return situation.but(**values).causes()[cause_id]


@pytest.mark.parametrize(
    "slow",
    [
        CONCLUSIVE["slow_steps"],
        CALM.but(prefill_speed_ratio=0.25),
        CALM.but(prefill_speed_ratio=0.25, engine_speed_ratio=1.0),
    ],
)
def test_slow_steps_of_idle_gpus_lead_to_the_host(slow: Situation) -> None:
    unknown, idle = slow.causes()["slow_steps"], verdict(slow, "slow_steps", RESTING)
    assert "do not show why" in unknown.summary
    assert "GPUs' clocks" in unknown.lever
    assert idle.summary.endswith(": the GPU idles while requests run.")
    assert idle.lever.startswith("Look at the host first")
    assert "OMP_NUM_THREADS" in idle.lever


def test_slow_decode_is_surer_where_memory_is_short_or_gpus_idle_and_its_lever_follows() -> None:
    plain = DECODE.causes()["decode_bound"]
    memory, compute, host = (
        verdict(DECODE, "decode_bound", values) for values in (READING, MULTIPLYING, RESTING)
    )
    assert min(memory.confidence, host.confidence) > plain.confidence > compute.confidence
    assert "DRAM active 82%, tensor pipes active 11%" in memory.evidence[-1].text
    assert "Quantize" in memory.lever
    assert "compute is the limit" in compute.lever
    assert "host" in host.lever
    assert host.evidence[-1].signal == "gpu_engine_active_ratio"
    assert [cause.root for cause in (plain, memory, compute, host)] == [False, False, False, True]
    facts = DECODE.facts()
    advised = [bool(Adviser().advise(facts, [cause])) for cause in (memory, host)]
    assert advised == [True, False], "a host that starves its GPUs is no want of GPUs"


def test_slow_prefill_is_surer_where_arithmetic_is_short() -> None:
    confident = [
        verdict(PREFILL, "prefill_bound", values).confidence
        for values in (MULTIPLYING, {}, RESTING)
    ]
    assert confident == sorted(confident, reverse=True)
    assert len(set(confident)) == 3


def test_what_is_short_alone_is_no_cause() -> None:
    strict = replace(CALM, targets=Targets(ttft_p99_s=1.0, itl_p99_s=0.1))
    assert [strict.but(**values).causes() for values in (READING, MULTIPLYING, RESTING)] == [{}] * 3
