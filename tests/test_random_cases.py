"""A few random cases of fixed seeds, and that their books can tell harm."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.hard_judging import played
from tests.random_cases import judge_seed
from tests.simulator.cases import fault
from tests.simulator.harm import Harm, Served, harm
from tests.simulator.random_cases import RandomCase, random_case

SEEDS = {
    12: "nothing wrong",
    16: "documents evicted before reuse",
    19: "a deadlock, scraped each second",
    20: "a row remap that failed",
    41: "prompts of many lengths behind one short head: no churn",
    46: "acceptance that varies by a hundredth: drafts still pay",
    181: "prefill is two thirds of a TTFT over its target",
    258: "prompts forty times longer, whose hits would not matter",
}


@pytest.mark.parametrize("seed", SEEDS, ids=list(SEEDS.values()))
def test_a_random_case_is_right(seed: int) -> None:
    assert judge_seed(seed).wrong == ""


def test_a_seed_is_one_case() -> None:
    assert random_case(7) == random_case(7)
    drawn = [random_case(seed) for seed in range(200)]
    assert 40 < sum(not case.faults for case in drawn) < 110
    assert all(0.05 <= case.share <= 0.8 for case in drawn)
    assert {case.scrape_s for case in drawn} >= {1.0, 15.0}


def strengthened(case: RandomCase, cause: str) -> RandomCase:
    """The case with the first fault of that cause, at its full strength."""
    return replace(case, faults=(fault(cause),))


@pytest.mark.parametrize("cause", ["target_down", "engine_stalled"])
def test_a_server_that_serves_nobody_harms(cause: str) -> None:
    case = strengthened(random_case(24), cause)
    span_s = case.judged_from_s, case.ends_s
    served = played(case, case.seed).books.ledger.served(*span_s)
    otherwise = case.without_fault().served(*span_s)
    assert harm(served, otherwise, ttft=None, itl=None) == Harm.CLEAR
    assert harm(otherwise, otherwise, ttft=None, itl=None) == Harm.NONE


QUICK = Served(
    ttft_s=0.2, pace_s=0.02, e2e_s=2.0, ended=500.0, output_tokens=100.0, paused_ratio=0.0,
    preempted_per_s=0.0, wait_s=0.0, stopped=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        pytest.param(QUICK, Harm.NONE, id="as it would have been"),
        pytest.param(replace(QUICK, ttft_s=0.5), Harm.LITTLE, id="half a second instead of 0.2"),
        pytest.param(replace(QUICK, ttft_s=1.5), Harm.CLEAR, id="the first token takes 1.5 s"),
        pytest.param(replace(QUICK, pace_s=0.04), Harm.LITTLE, id="slower than anybody reads"),
        pytest.param(replace(QUICK, pace_s=0.2), Harm.CLEAR, id="five tokens a second"),
        pytest.param(replace(QUICK, paused_ratio=0.2), Harm.CLEAR, id="streams pause"),
        pytest.param(replace(QUICK, preempted_per_s=0.1), Harm.CLEAR, id="requests are preempted"),
        pytest.param(
            replace(QUICK, e2e_s=8.0, output_tokens=400.0), Harm.CLEAR, id="answers ramble"
        ),
        pytest.param(replace(QUICK, stopped=True), Harm.CLEAR, id="no token comes out"),
    ],
)
def test_harm_is_what_clients_see(served: Served, expected: Harm) -> None:
    assert harm(served, QUICK, ttft=None, itl=None) == expected


def test_where_something_is_promised_only_that_counts() -> None:
    slower = replace(QUICK, ttft_s=1.5, pace_s=0.2)
    assert harm(slower, QUICK, ttft=Harm.NONE, itl=None) == Harm.LITTLE
    assert harm(slower, QUICK, ttft=Harm.CLEAR, itl=None) == Harm.CLEAR
