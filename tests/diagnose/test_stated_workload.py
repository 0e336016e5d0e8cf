"""Live requests against the profile that a size was computed for: the watch and the cause."""

from __future__ import annotations

import random
import re

import pytest
from msgspec.structs import replace

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.causes.workload import RUNAWAY_GENERATION
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.vllm_flags import parse_command
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.counterfactual import counterfactuals
from kneewatch.diagnose.lengths import ANSWERS, PROMPTS, RATE, SHIFTS, Departure, StatedPoint
from kneewatch.diagnose.ranking import BY_ID, ranked
from kneewatch.diagnose.verdict import Cause, Verdict
from kneewatch.rules.rule import Severity
from tests.collector.name_pages import labelled
from tests.diagnose.situations import CALM, CONCLUSIVE
from tests.diagnose.streams import START_S
from tests.diagnose.workloads import POINTS, PROFILE, Requests, answer, as_stated, prompt, stated
from tests.pages import engine_only, restarted

MINUTE_S = 60.0
TIERS = """
[routing]
method = "route"
[[tiers]]
name = "small"
model = "meta-llama/Llama-3.1-8B-Instruct"
gpus = ["l40s"]
share_ratio = 0.6
[[tiers]]
name = "large"
share_ratio = 0.4
"""
LENGTHS = PROFILE[PROFILE.index("input_p50") : PROFILE.index("[traffic]")]
OWN = TIERS + "[tiers.lengths]\n" + LENGTHS.replace("1000", "3000")
"""The large tier has prompts of its own."""

SESSION = "\n[session]\ncalls = 5\nadded_tokens = 100\n"


def watch(
    requests: Requests, *, minutes: int, each: int, statement: Stated | None = None
) -> list[Verdict]:
    """What is said each minute, with so many requests in each."""
    profile = Profile(stated=statement or Stated(workload=stated()))
    stream = TargetStream("tiny", profile, Limits())
    diagnoses: list[Verdict] = []
    for minute in range(minutes):
        diagnoses += stream.take(START_S + minute * MINUTE_S, requests.page(each), "")
    return diagnoses


def drifts(diagnoses: list[Verdict]) -> list[Cause]:
    """What is said of the workload."""
    return [
        cause
        for diagnosis in diagnoses
        for cause in diagnosis.causes
        if cause.id == "workload_drift"
    ]


def test_requests_as_stated_say_nothing() -> None:
    statement = Stated(workload=stated(), replicas=2)
    diagnoses = watch(Requests(), minutes=70, each=240, statement=statement)
    assert drifts(diagnoses) == []
    assert diagnoses[-1].values[RATE] == pytest.approx(4 / 5, rel=0.01), "4 a second of half of 10"
    assert diagnoses[-1].values[SHIFTS[PROMPTS]] == pytest.approx(0, abs=0.05)


def test_without_a_profile_nothing_is_said_and_nothing_is_lacking() -> None:
    requests = Requests(prompts=lambda dice: 9 * prompt(dice))
    diagnoses = watch(requests, minutes=8, each=240, statement=Stated(replicas=1))
    assert drifts(diagnoses) == []
    ours = {RATE, *SHIFTS.values()}
    assert not ours & set(diagnoses[-1].values)
    assert not [line for line in diagnoses[-1].unknown if line.partition(":")[0] in ours]


def test_longer_prompts_are_told_with_what_was_stated() -> None:
    longer = Requests(prompts=lambda dice: as_stated(dice, 2500.0, 9000.0))
    diagnoses = watch(longer, minutes=40, each=60)
    (cause, *_) = drifts(diagnoses)
    assert cause.severity == Severity.INFO
    assert cause.guide == ("9.1",)
    assert "prompts are longer" in cause.summary
    assert "answers" not in cause.summary
    (evidence,) = cause.evidence
    assert evidence.signal == SHIFTS[PROMPTS]
    assert "above its P50 of 1000" in evidence.text
    assert "chance explains at most" in evidence.text
    last = drifts(diagnoses)[-1]
    assert "kneewatch size --plan base.toml" in last.lever
    assert "input_p50_tokens = 2" in last.lever
    assert "output_p50_tokens" not in last.lever
    assert "input_p99_tokens" not in last.lever, "the recorded buckets end at 5000"


def test_shorter_answers_are_told() -> None:
    diagnoses = watch(Requests(answers=lambda dice: 0.1 * answer(dice)), minutes=20, each=120)
    assert "answers are shorter" in drifts(diagnoses)[-1].summary


def test_few_requests_are_no_workload() -> None:
    longer = Requests(prompts=lambda dice: 9 * prompt(dice))
    assert drifts(watch(longer, minutes=8, each=10)) == []


def test_an_hour_is_looked_at_and_no_more() -> None:
    """A night of other requests is over an hour later."""
    night = Requests(prompts=lambda dice: 9 * prompt(dice))
    profile = Profile(stated=Stated(workload=stated()))
    stream, diagnoses = TargetStream("tiny", profile, Limits()), list[Verdict]()
    for minute in range(140):
        if minute == 40:
            night.draws[PROMPTS] = prompt
        diagnoses += stream.take(START_S + minute * MINUTE_S, night.page(60), "")
    assert drifts(diagnoses[35:40])
    assert drifts(diagnoses[-30:]) == []


def test_a_rate_held_above_its_share_of_the_peak_is_told() -> None:
    statement = Stated(workload=stated(), replicas=4)
    diagnoses = watch(Requests(), minutes=15, each=300, statement=statement)
    cause = drifts(diagnoses)[-1]
    assert "arrivals are 2.0x its peak" in cause.summary
    assert RATE not in diagnoses[4].values, "four minutes are not held yet"
    assert RATE in diagnoses[5].values
    assert [evidence.signal for evidence in cause.evidence] == [RATE]
    assert "this engine's share of the peak in base.toml is 2.5" in cause.evidence[0].text
    assert drifts(watch(Requests(), minutes=65, each=177, statement=statement)) == [], (
        "within the safety"
    )


def test_a_share_is_by_data_parallel_engines_too() -> None:
    launch = parse_command("vllm serve m --data-parallel-size 2", origin="")
    statement = Stated(workload=stated(), replicas=2, command_line=launch)
    diagnoses = watch(Requests(), minutes=8, each=150, statement=statement)
    assert diagnoses[-1].values[RATE] == pytest.approx(1.0)


def test_engines_of_one_page_share_the_peak_whatever_the_launch_says() -> None:
    requests = Requests()
    stream = TargetStream("tiny", Profile(stated=Stated(workload=stated(), replicas=2)), Limits())
    diagnoses = list[Verdict]()
    for minute in range(8):
        page = requests.page(150)
        both = "".join(engine_only(labelled(page, engine=name)) for name in ("0", "1"))
        diagnoses += stream.take(START_S + minute * MINUTE_S, both, "")
    assert [diagnosis.values[RATE] for diagnosis in diagnoses[-2:]] == pytest.approx([1.0, 1.0])


def test_what_a_rate_needs_is_said_where_it_is_lacking() -> None:
    diagnoses = watch(Requests(), minutes=2, each=60)
    (line,) = [reason for reason in diagnoses[-1].unknown if reason.startswith(RATE)]
    assert line.endswith("set replicas")


def test_a_new_process_begins_anew() -> None:
    profile = Profile(stated=Stated(workload=stated()))
    stream = TargetStream("tiny", profile, Limits())
    before, after = Requests(prompts=lambda dice: 9 * prompt(dice)), Requests()
    diagnoses = list[Verdict]()
    for minute in range(20):
        diagnoses += stream.take(START_S + minute * MINUTE_S, before.page(120), "")
    assert drifts(diagnoses)
    again = list[Verdict]()
    for minute in range(20, 60):
        page = restarted(after.page(120))
        again += stream.take(START_S + minute * MINUTE_S, page, "")
    assert drifts(again) == []


def test_a_clock_that_is_set_back_begins_anew() -> None:
    statement = Stated(workload=stated(), replicas=4)
    stream, requests = TargetStream("tiny", Profile(stated=statement), Limits()), Requests()
    diagnoses = [
        diagnosis
        for minute in (*range(10), *range(-120, -110))
        for diagnosis in stream.take(START_S + minute * MINUTE_S, requests.page(150), "")
    ]
    assert diagnoses[-1].values[RATE] == pytest.approx(1.0)


def test_lengths_of_tiers() -> None:
    shared, apart = stated(PROFILE + TIERS), stated(PROFILE + OWN)
    assert shared.peak_requests_per_s is None, "a plan decides who gets what of it"
    assert shared.lengths(None, None)[PROMPTS] == POINTS, "all tiers say the same"
    assert PROMPTS not in apart.lengths(None, None)
    small, large = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"
    assert apart.lengths(small, None)[PROMPTS] == POINTS
    assert apart.lengths(large, None)[PROMPTS][0] == StatedPoint(0.5, 3000.0, 3000.0)
    assert apart.lengths(None, "l40s")[PROMPTS] == POINTS
    assert apart.lengths("another/model", None) == {}
    assert stated().lengths("another/model", "b200")[PROMPTS] == POINTS, "one part: it is meant"


def test_a_tier_that_is_not_named_is_asked_for() -> None:
    statement = Stated(workload=stated(PROFILE + OWN))
    lines = Profile(stated=statement).unstated
    assert "set model or gpu" in lines[SHIFTS[PROMPTS]]
    named = replace(statement, model=model("meta-llama/Llama-3.1-8B-Instruct"), gpu=gpu("l40s"))
    assert SHIFTS[PROMPTS] not in Profile(stated=named).unstated


def test_a_session_is_between_its_first_call_and_its_last() -> None:
    workload = stated(PROFILE + SESSION)
    points = workload.lengths(None, None)[PROMPTS]
    assert [point.least for point in points] == [1000, 4000, 8000]
    (grown,) = {point.most - point.least for point in points}
    assert grown == pytest.approx(4 * (100 + 233), abs=10), "four answers and what was added"
    assert [band.most - band.least for band in workload.lengths(None, None)[ANSWERS]] == [0, 0, 0]
    statement = Stated(workload=workload)

    def call(dice: random.Random) -> float:
        return prompt(dice) + dice.randrange(5) * grown / 4

    assert drifts(watch(Requests(prompts=call), minutes=30, each=120, statement=statement)) == []
    longer = Requests(prompts=lambda dice: 4 * call(dice))
    lever = drifts(watch(longer, minutes=30, each=120, statement=statement))[-1].lever
    assert "a session's first call" in lever
    assert "input_p50_tokens" not in lever


def test_a_batch_has_no_peak() -> None:
    batch = PROFILE.replace('"online"', '"batch"')
    assert stated(batch).peak_requests_per_s is None


def test_without_a_profile_far_longer_answers_are_another_workload() -> None:
    longer = CALM.but(answers_moved_ratio=11.9, moved_for_s=120.0)
    cause = longer.causes()["workload_drift"]
    assert cause.severity == Severity.INFO
    assert cause.summary == "Requests ask for more work: answers are 11.9x as long as usual."
    assert [each.signal for each in cause.evidence] == ["answers_moved_ratio"]
    assert not longer.but(moved_for_s=30.0).causes()
    assert not longer.but(answers_moved_ratio=2.5).causes()


def test_the_cause_has_turning_points() -> None:
    facts = CONCLUSIVE["workload_drift"].facts()
    record = BY_ID["workload_drift"]
    cause = record.examine(facts)
    assert cause is not None
    (point,) = counterfactuals(record.stands, facts, cause)
    assert point.signal == SHIFTS[PROMPTS]
    assert not point.above
    for value, stands in ((point.now, True), (1.01 * point.at, True), (point.at, False)):
        moved = replace(facts, values={**facts.values, point.signal: value})
        assert record.stands(moved) == stands


def test_a_drift_does_not_keep_quiet_times_from_being_learned() -> None:
    requests = Requests(prompts=lambda dice: 9 * prompt(dice))
    stream = TargetStream("tiny", Profile(stated=Stated(workload=stated())), Limits())
    diagnoses, capped = list[Verdict](), 0.0
    for minute in range(40):
        capped += 0.0 if minute < 10 else 12.0
        page = _finished(requests.page(80), length=capped, stop=80.0 * (minute + 1) - capped)
        diagnoses += stream.take(START_S + minute * MINUTE_S, page, "")
    assert len(drifts(diagnoses)) > 30
    assert diagnoses[12].values["finished_length_drift_points"] == pytest.approx(0.15)
    assert diagnoses[-1].values["finished_length_drift_points"] == pytest.approx(0, abs=0.01)


ENDLESS = Departure(0.6, StatedPoint(0.99, 900.0, 1800.0), 2000.0, 0.61, 0.15)
RAMBLING = replace(
    CALM.but(finished_length_ratio=0.65, output_tokens_mean=3000.0), quiet={}, endless=ENDLESS
)


def test_a_server_that_rambles_from_its_start_on() -> None:
    cause = RAMBLING.causes()["runaway_generation"]
    assert cause.severity == Severity.WARNING
    assert "twice the stated P99 of 900 tokens" in cause.summary
    usual = replace(RAMBLING, quiet={"finished_length_ratio": 0.65, "output_tokens_mean": 3000.0})
    note = usual.causes()["runaway_generation"]
    assert note.severity == Severity.INFO, "it has always been so"
    assert note.confidence < cause.confidence
    assert "65% hit it in quiet times too" in note.against[0].text


@pytest.mark.parametrize(
    "departed",
    [
        pytest.param(None, id="nothing is stated"),
        pytest.param(replace(ENDLESS, shift_ratio=0.15, chance_ratio=0.1), id="too few"),
        pytest.param(replace(ENDLESS, shift_ratio=0.3, chance_ratio=0.4), id="chance may make it"),
    ],
)
def test_what_is_no_rambling(departed: Departure | None) -> None:
    assert RUNAWAY_GENERATION.examine(replace(RAMBLING, endless=departed).facts()) is None


def test_answers_that_end_by_themselves_are_no_rambling() -> None:
    assert "runaway_generation" not in RAMBLING.but(finished_length_ratio=0.15).causes()
    assert "runaway_generation" not in RAMBLING.but(completed_per_s=0.1).causes()


def test_a_rambling_hides_the_drift_that_it_makes() -> None:
    drifted = replace(RAMBLING, workload=CONCLUSIVE["workload_drift"].workload)
    both = drifted.but(**{SHIFTS[PROMPTS]: 0.4}).causes()
    assert set(both) == {"runaway_generation", "workload_drift"}
    (cause,) = ranked(list(both.values()))
    assert cause.explains == ("workload_drift",)


def test_rambling_is_told_from_pages() -> None:
    requests = Requests(answers=lambda dice: 5000.0 if dice.random() < 0.6 else answer(dice))
    profile = Profile(stated=Stated(workload=stated()))
    stream = TargetStream("tiny", profile, Limits())
    diagnoses = list[Verdict]()
    for turn in range(20):
        page = _finished(requests.page(20), length=12.0 * turn, stop=8.0 * turn)
        diagnoses += stream.take(START_S + 10 * turn, page, "")
    (cause, *_) = [
        c for diagnosis in diagnoses for c in diagnosis.causes if c.id == "runaway_generation"
    ]
    assert "exceed twice the stated P99" in cause.summary


def _finished(body: str, *, length: float, stop: float) -> str:
    """The page with so many requests finished at their limit, and by themselves."""
    for reason, count in (("length", length), ("stop", stop)):
        named = rf'(?m)^(vllm:request_success_total{{.*finished_reason="{reason}".*}}) \S+$'
        body, replaced = re.subn(named, rf"\g<1> {count}", body)
        assert replaced
    return body
