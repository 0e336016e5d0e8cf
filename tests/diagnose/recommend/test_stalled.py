"""An engine that hangs: no advice to scale out, no overload, and critical as soon as it is sure."""

from __future__ import annotations

from itertools import islice

from msgspec.structs import replace

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import Severity
from tests.incidents.pages import SERVING, Load, Phases, pages
from tests.recordings import CAPTURES

OVERLOADED_AT = 30
"""The page of the recording from which on requests queue."""

STEP_S, HANGS_S = 2.0, 40.0


def hanging() -> list[Verdict]:
    """A server under overload that then hangs: the same page again and again."""
    stream = TargetStream("t", Profile(window_s=30.0), Limits())
    entries = list(islice(CaptureReader(CAPTURES / "queue_overload.jsonl.gz"), OVERLOADED_AT + 1))
    for entry in entries:
        stream.replay(entry)
    last = entries[-1]
    diagnoses: list[Verdict] = []
    for step in range(1, int(HANGS_S / STEP_S) + 1):
        diagnoses += stream.replay(replace(last, t_s=last.t_s + step * STEP_S))
    return diagnoses


def test_scaling_out_is_never_the_advice_while_no_token_comes_out() -> None:
    diagnoses = hanging()
    assert diagnoses[0].values["waiting"], "there is a queue"
    after = [diagnosis for diagnosis in diagnoses if (diagnosis.values["stalled_s"] or 0) >= 10]
    assert len(after) >= 10
    for diagnosis in after:
        flags = {c.flag for r in diagnosis.recommendations for c in r.changes}
        assert not flags & {"replicas", "--max-num-seqs"}, diagnosis.t_s


def test_a_hang_is_critical_once_half_a_minute_has_passed() -> None:
    (last,) = hanging()[-1:]
    assert last.causes[0].id == "engine_stalled"
    assert last.causes[0].severity == Severity.CRITICAL


def test_a_queue_before_an_engine_that_runs_nothing_is_no_overload() -> None:
    stream = TargetStream("t", Profile(window_s=30.0), Limits())
    page = (
        'vllm:num_requests_running{engine="0",model_name="m"} 0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 12\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0\n'
        'vllm:generation_tokens_total{engine="0",model_name="m"} 500\n'
        'vllm:prompt_tokens_total{engine="0",model_name="m"} 500\n'
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 7\n'
    )
    ids: list[str] = []
    for step in range(20):
        (diagnosis,) = stream.take(1_795_000_000.0 + step * STEP_S, page, "text/plain")
        ids += [cause.id for cause in diagnosis.causes]
    assert "engine_stalled" in ids
    assert not {"queue_saturation", "admission_limit"} & set(ids)


def of_pages(load_at: Phases, lasts_s: float) -> dict[float, Verdict]:
    """The diagnoses of pages every 2 s in a window of 12 s, by seconds since the first page."""
    stream = TargetStream("t", Profile(window_s=12.0), Limits())
    taken = [
        (at_s, stream.take(1_795_000_000.0 + at_s, page, "text/plain"))
        for at_s, page in pages([load_at], lasts_s, STEP_S)
    ]
    return {at_s: diagnoses[0] for at_s, diagnoses in taken}


def silence_said(diagnoses: dict[float, Verdict], from_s: float, to_s: float) -> set[str]:
    """Severities of `engine_stalled` between two moments."""
    return {
        cause.severity.word
        for at_s, diagnosis in diagnoses.items()
        if from_s <= at_s < to_s
        for cause in diagnosis.causes
        if cause.id == "engine_stalled"
    }


SILENT = replace(SERVING, first_tokens_per_s=0, finished_per_s=0, generated_per_s=0, prompt_per_s=0)


def paused(at_s: float) -> Load:
    """Every minute a prompt is prefilled in one step of 22 s; from 180 s on the engine hangs."""
    return SERVING if at_s % 60 < 38 and at_s < 180 else SILENT


def test_a_pause_as_long_as_those_that_ended_with_a_first_token_is_no_stall() -> None:
    diagnoses = of_pages(paused, 240.0)
    assert silence_said(diagnoses, 38.0, 60.0) == {"info"}, "nothing explains the first pause"
    first = next(c for c in diagnoses[58.0].causes if c.id == "engine_stalled")
    assert first.summary.startswith("Engine stalled, or one long prefill: no token for")
    assert silence_said(diagnoses, 66.0, 180.0) == set()
    assert diagnoses[240.0].causes[0].id == "engine_stalled"
    assert diagnoses[240.0].causes[0].severity == Severity.CRITICAL


def hung(at_s: float) -> Load:
    """A silence of 80 s that ends with first tokens; from 180 s on the engine hangs for good."""
    return SILENT if 60 <= at_s < 140 or at_s >= 180 else SERVING


def test_a_hang_that_a_prefill_might_explain_is_noted_after_half_a_minute() -> None:
    diagnoses = of_pages(hung, 320.0)
    assert silence_said(diagnoses, 200.0, 206.0) == set()
    assert silence_said(diagnoses, 216.0, 280.0) == {"info"}, (
        "a silence of up to 120 s is explained"
    )
    noted = next(c for c in diagnoses[230.0].causes if c.id == "engine_stalled")
    assert noted.summary.startswith("Engine stalled, or one long prefill: no token for")
    assert silence_said(diagnoses, 304.0, 320.0) == {"critical"}


def test_a_queue_behind_such_a_silence_is_no_cause_beside_it() -> None:
    def queued(at_s: float) -> Load:
        load = hung(at_s)
        return replace(load, waiting=20) if load is SILENT else load

    assert [cause.id for cause in of_pages(queued, 240.0)[240.0].causes] == ["engine_stalled"]


def test_blocks_taken_since_the_last_token_explain_a_pause_at_the_usual_prefill_speed() -> None:
    def taking(kv_ratio: float) -> Phases:
        return lambda at_s: (
            replace(SERVING, prefill_s=0.05)
            if at_s < 30
            else replace(SILENT, prefill_s=0.05, kv_ratio=kv_ratio)
        )

    # 100 tokens in 0.05 s each: half of 65,536 tokens take 16 s, twice that with a margin.
    assert silence_said(of_pages(taking(0.8), 52.0), 0.0, 60.0) == set()
    assert silence_said(of_pages(taking(0.4), 52.0), 0.0, 60.0) == {"info"}
