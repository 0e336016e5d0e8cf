"""An engine that hangs: no advice to scale out, no overload, and critical as soon as it is sure."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition.grammar import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.rules.rule import Severity
from tests.recordings import CAPTURES

OVERLOADED_AT = 30
"""The page of the recording from which on requests queue."""

STEP_S, HANGS_S = 2.0, 40.0


def hanging() -> list[Diagnosis]:
    """A server under overload that then hangs: the same page again and again."""
    stream = TargetStream("t", Profile(window_s=30.0), Limits())
    entries = list(islice(CaptureReader(CAPTURES / "queue_overload.jsonl.gz"), OVERLOADED_AT + 1))
    for entry in entries:
        stream.replay(entry)
    last = entries[-1]
    told: list[Diagnosis] = []
    for step in range(1, int(HANGS_S / STEP_S) + 1):
        told += stream.replay(replace(last, t_s=last.t_s + step * STEP_S))
    return told


def test_scaling_out_is_never_the_advice_while_no_token_comes_out() -> None:
    told = hanging()
    assert told[0].values["waiting"], "there is a queue"
    after = [diagnosis for diagnosis in told if (diagnosis.values["stalled_s"] or 0) >= 10]
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
