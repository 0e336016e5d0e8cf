"""The guide's symptom list: which symptom shows in which situation."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.engine.diagnosis import symptoms
from kneewatch.diagnose.ranking import ranked
from kneewatch.diagnose.verdict_json import symptom_actions
from kneewatch.rules.facts import Targets
from tests.diagnose.recommend.scenes import FULL, LLAMA, advised, cause
from tests.diagnose.situations import CALM, CONCLUSIVE, Situation
from tests.reports.diagnoses import SICK

LATE = Targets(ttft_p99_s=1.0, itl_p99_s=0.1)
FEW = CALM.but(running_avg=2.0)


def shown(situation: Situation) -> list[str]:
    """The symptoms of a situation and its causes."""
    return symptoms(situation.facts(), ranked(list(situation.causes().values())))


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        pytest.param(CALM, [], id="healthy"),
        pytest.param(replace(FEW.but(ttft_p99_s=1.1), targets=LATE), ["S1"], id="S1 by target"),
        pytest.param(FEW.but(ttft_p99_drift_ratio=3.0), ["S1"], id="S1 by baseline"),
        pytest.param(
            replace(FEW.but(ttft_p99_s=0.9, ttft_p99_drift_ratio=9.0), targets=LATE), [],
            id="within the target, whatever the baseline says",
        ),
        pytest.param(
            replace(CALM.but(ttft_p99_s=1.1, prefill_mean_s=0.0), targets=LATE), [],
            id="TTFT too high with many requests is no S1",
        ),
        pytest.param(CONCLUSIVE["prefill_interference"], ["S2"], id="S2"),
        pytest.param(CONCLUSIVE["queue_saturation"], ["S3"], id="S3"),
        pytest.param(
            CONCLUSIVE["admission_limit"], [], id="a limit that keeps requests out is no plateau"
        ),
        pytest.param(
            CONCLUSIVE["slo_conflict"].but(itl_p50_s=0.08, prefill_mean_s=0.5), ["S4"], id="S4"
        ),
        pytest.param(
            CONCLUSIVE["slo_conflict"].but(itl_p50_s=0.08, itl_p99_s=0.6), [],
            id="slow steps alone are no S4",
        ),
        pytest.param(
            CONCLUSIVE["slo_conflict"], ["S4"], id="S4 where prefill breaks TTFT: no S2 beside it"
        ),
        pytest.param(
            FEW.but(itl_p99_drift_ratio=3.0, gpu_engine_active_ratio=0.5), ["S6"], id="S6"
        ),
        pytest.param(FEW.but(itl_p99_drift_ratio=3.0), [], id="S6 needs a GPU source"),
        pytest.param(
            FEW.but(itl_p99_drift_ratio=3.0, gpu_engine_active_ratio=0.9), [],
            id="S6 needs a GPU with room",
        ),
        pytest.param(
            FEW.but(
                itl_p99_drift_ratio=3.0,
                gpu_engine_active_ratio=0.88,
                gpu_tensor_active_ratio=0.0075,
            ),
            ["S6"], id="S6: a busy GPU whose tensor pipes idle",
        ),
        pytest.param(
            FEW.but(itl_p99_drift_ratio=3.0, mbu_ratio=0.7), ["S6"], id="S6: bound by memory"
        ),
        pytest.param(
            FEW.but(
                itl_p99_drift_ratio=3.0,
                gpu_engine_active_ratio=0.5,
                gpu_tensor_active_ratio=0.55,
            ),
            [], id="no S6 where the tensor pipes are busy",
        ),
        pytest.param(
            CALM.but(itl_p99_drift_ratio=3.0, mbu_ratio=0.7), [], id="S6 needs few requests"
        ),
        pytest.param(
            CONCLUSIVE["adapter_thrash"].but(running_avg=2.0, ttft_p99_drift_ratio=5.0),
            ["S7"], id="a wait for an adapter is no S1",
        ),
        pytest.param(CONCLUSIVE["adapter_thrash"], ["S7"], id="S7"),
        pytest.param(CONCLUSIVE["past_knee"], ["S8"], id="S8 at the knee"),
        pytest.param(
            replace(CONCLUSIVE["past_knee"].but(running_avg=6.0), quiet={"running_avg": 2.0}),
            ["S1", "S8"], id="the knee of a few requests: nothing is queued",
        ),
        pytest.param(
            CONCLUSIVE["kv_pressure"].but(ttft_p99_drift_ratio=5.0), ["S8"], id="S8 by preemption"
        ),
        pytest.param(
            CONCLUSIVE["queue_saturation"].but(running_avg=2.0, ttft_p99_drift_ratio=5.0),
            ["S3", "S8"], id="a queue's TTFT is no S1",
        ),
    ],
)  # fmt: skip
def test_symptoms_show(situation: Situation, expected: list[str]) -> None:
    assert shown(situation) == expected


def test_a_symptom_shows_though_its_cause_is_folded_into_another() -> None:
    evicting = CONCLUSIVE["kv_pressure"]
    both = {**evicting.causes(), **CONCLUSIVE["past_knee"].causes()}
    causes = ranked(list(both.values()))
    assert [cause.id for cause in causes] == ["kv_pressure"]
    assert symptoms(evicting.facts(), causes) == ["S8"]


PINNED = FULL.but(running=64.0, running_avg=64.0, running_max=64.0, kv_usage_avg_ratio=0.3,
                  preemption_per_s=0.0, waiting_slope_per_s=0.5)  # fmt: skip


def test_a_symptom_says_what_the_ledger_has_first_a_limit_before_hardware() -> None:
    stated = replace(LLAMA, flags={"--max-num-seqs": "64", "--quantization": "fp8"})
    levers = advised("queue_saturation", situation=PINNED.but(itl_mean_drift_ratio=1.0),
                     stated=stated)  # fmt: skip
    verdict = replace(
        SICK, causes=[cause("queue_saturation")], symptoms=["S3"],
        recommendations=tuple(levers.values()),
    )  # fmt: skip
    assert [*levers][:2] == ["max-num-seqs-up", "replicas"]
    assert symptom_actions(verdict)["S3"].startswith("--max-num-seqs ")
