"""Scenarios that are computed quickly, and the engine's balance of tokens and blocks."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from kneewatch.rules.rule import Severity
from tests.incidents.rebuilt import worded
from tests.scenarios.cases import SCENARIOS
from tests.scenarios.engine import Engine, Knobs
from tests.scenarios.load import BEGINS_S, Scenario, said
from tests.scenarios.random_faults import judged

UNTIL_S = 360.0
QUICK = (
    "hang with few callers",
    "small server, one caller, x1.6",
    "ok: small server, 1 to 3 callers",
    "x5, and clients give up after 10 s",
    "decode x3 while prompts double",
    "vllm 26166: 0.1 tokens/s",
    "vllm 44175: classification, x2.5",
    "answers ramble",
    "vllm 42362: all answers are errors",
    "vllm 48229: 1.2 s each 12 s",
    "ok: documents of 24,000 tokens as ever",
)


@pytest.mark.parametrize(
    "scenario", [pytest.param(each, id=each.name) for each in SCENARIOS if each.name in QUICK]
)
def test_scenario_is_told_right(scenario: Scenario) -> None:
    row = said(replace(scenario, until_s=UNTIL_S, lasts_s=UNTIL_S))
    assert row.right, f"{row.share:.2f} of the scrapes are right; needless: {row.needless}"


def test_late_first_tokens_behind_long_prompts_are_told_after_two_minutes() -> None:
    scenario = next(each for each in SCENARIOS if each.name == "router sends giants")
    told = [
        (at_s, worded(verdict))
        for at_s, verdict in replace(scenario, lasts_s=400.0).verdicts()
        if verdict.severity >= Severity.WARNING
    ]
    first_s, said_first = told[0]
    assert said_first.startswith("prefill_interference")
    assert BEGINS_S + 120.0 <= first_s <= BEGINS_S + 150.0


@pytest.mark.parametrize(
    ("seed", "cause"),
    [
        (12, "unexplained_latency"),
        (44, "unexplained_latency"),
        (67, "slow_steps"),
        (110, "workload_drift"),
        (568, "admission_limit"),
        (55, ""),
    ],
)
def test_random_engines_are_told_and_quiet_ones_are_not(seed: int, cause: str) -> None:
    row = judged(seed)
    assert not row.is_silent
    assert not row.is_needless
    first = row.said.most_common(1)[0][0]
    assert first.startswith(cause) if cause else row.told_share == 0.0


def test_drafts_are_counted_from_the_restart_that_switches_them_on() -> None:
    scenario = next(each for each in SCENARIOS if each.name == "ok: speculation switched on")
    pages = list(replace(scenario, lasts_s=300.0).pages())
    counted = [at_s for at_s, page in pages if page and "spec_decode_num_drafts_total" in page]
    assert counted == [285.0, 290.0, 295.0, 300.0]


def test_engine_counts_each_token_and_frees_each_block() -> None:
    knobs = Knobs(rate=6.0, prompt=900, answer=150, blocks=600, timeout_s=20.0)
    engine = Engine(knobs, Random(1), 0.0)
    engine.run(120.0)
    assert engine.counters.counts["num_preemptions_total"] > 10
    knobs.rate = 0.0
    engine.run(300.0)
    assert engine.in_flight == 0
    assert engine.usage_ratio == 0.0
    tokens = engine.counters.histograms["request_generation_tokens"].sum
    assert engine.counters.counts["generation_tokens_total"] == tokens
