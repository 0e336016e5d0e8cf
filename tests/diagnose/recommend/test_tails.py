"""TTFT and ITL P99 after a change, with a band: from what this server's own windows showed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.deployment.deployment import deployment
from kneewatch.diagnose.learned.knee import CurveLearner
from kneewatch.diagnose.recommend.context import LeverContext
from kneewatch.diagnose.recommend.demand import demand
from kneewatch.diagnose.recommend.prediction import After, predicted
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Targets
from tests.diagnose.recommend.scenes import PAGE
from tests.diagnose.recommend.test_own_steps import BUSY, LOADS, learned, page, recommended
from tests.recordings import LAB, WINDOW_S, diagnoses

NEAR = 1.3


def windows(name: str) -> list[Verdict]:
    """Verdicts on a recording of a real vLLM, whose windows do not overlap."""
    kept: list[Verdict] = []
    for verdict in diagnoses(LAB / f"{name}.jsonl.gz"):
        is_new = not kept or verdict.t_s - kept[-1].t_s >= WINDOW_S
        if verdict.values.get("itl_p99_s") and is_new:
            kept.append(verdict)
    return kept


@pytest.mark.parametrize("name", ["loads", "slow_open", "few_seats"])
def test_a_window_is_predicted_from_the_others(name: str) -> None:
    """A window of 15 s has few requests, so its own P99 is noisy: the band says by how much."""
    told = windows(name)
    server, near, inside = deployment(PAGE), list[bool](), list[bool]()
    for left_out in told:
        curve = CurveLearner(window_s=WINDOW_S)
        for verdict in told:
            if verdict is not left_out:
                curve.learn(verdict.t_s, verdict.values)
        values = left_out.values
        facts = Facts(values, Targets(), config=PAGE, now_s=told[-1].t_s, window_s=WINDOW_S)
        load = demand(values, server)
        context = LeverContext("kv_pressure", facts, server, load, curve=curve)
        numbers = predicted(context, After())
        for key in ("itl_p99", "ttft_p99"):
            was_s, said_s = values.get(f"{key}_s"), numbers.get(f"{key}_s")
            if was_s and said_s:
                low_s, high_s = numbers[f"{key}_low_s"], numbers[f"{key}_high_s"]
                inside.append(low_s <= was_s <= high_s)
                if key == "itl_p99":
                    near.append(1 / NEAR <= said_s / was_s <= NEAR)
    assert len(near) >= 8
    assert sum(near) >= 0.66 * len(near)
    assert sum(inside) >= 0.66 * len(inside)


def test_a_target_is_compared_with_the_predicted_p99() -> None:
    pages = [page(load, itl_p99_s=0.2, ttft_p99_s=1.0) for load in (*LOADS, *LOADS)]
    targets = Targets(itl_p99_s=0.15)
    situation = replace(BUSY.but(itl_p99_s=0.4), targets=targets, curve=learned(*pages))
    fewer = recommended(situation)
    band = [fewer.predicted[f"itl_p99_{end}s"] for end in ("low_", "", "high_")]
    assert band == sorted(band)
    assert fewer.unmet == ("ITL P99 target of 150 ms",)
    assert "ttft_p99_s" not in fewer.predicted, "requests queue: no window showed their tail"


def test_no_p99_without_windows_of_such_a_batch() -> None:
    few = [page(load, itl_p99_s=0.2, ttft_p99_s=1.0) for load in LOADS[:2]]
    assert "itl_p99_s" not in recommended(replace(BUSY, curve=learned(*few))).predicted
