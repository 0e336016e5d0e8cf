"""Conservation of requests: calls that clients give up, and calls that are refused as wrong."""

from __future__ import annotations

import pytest

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import Severity

T_S, STEP_S = 1_795_000_000.0, 5.0


def page(
    at_s: float,
    *,
    accepted_per_s: float,
    finished_per_s: float,
    first_tokens_per_s: float = 0.0,
    refused_per_s: float = 0.0,
    waiting: float = 0.0,
    engines: int = 1,
) -> str:
    """A page after so many seconds of a steady load: vLLM 0.32's names."""
    calls = 'http_requests_total{handler="/v1/completions",method="POST",status="%s"} %f'
    lines = [calls % ("2xx", accepted_per_s * at_s), calls % ("4xx", refused_per_s * at_s)]
    for engine in range(engines):
        labels = f'engine="{engine}",model_name="m"'
        count = first_tokens_per_s * at_s
        lines += [
            f"vllm:num_requests_running{{{labels}}} 3",
            f"vllm:num_requests_waiting{{{labels}}} {waiting}",
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.3",
            f"vllm:num_preemptions_total{{{labels}}} 0",
            f"vllm:generation_tokens_total{{{labels}}} {90 * at_s}",
            f"vllm:prompt_tokens_total{{{labels}}} {400 * at_s}",
            f'vllm:request_success_total{{finished_reason="stop",{labels}}} '
            f"{finished_per_s * at_s}",
            f'vllm:request_success_total{{finished_reason="abort",{labels}}} 0',
            f'vllm:time_to_first_token_seconds_bucket{{le="+Inf",{labels}}} {count}',
            f"vllm:time_to_first_token_seconds_count{{{labels}}} {count}",
            f"vllm:time_to_first_token_seconds_sum{{{labels}}} {count}",
        ]
    return "\n".join(lines) + "\n"


def said(**load: float) -> Verdict:
    """The diagnosis after a minute and a half of this load."""
    stream = TargetStream("t", Profile(stated=Stated(replicas=1)), Limits())
    diagnoses: list[Verdict] = []
    for step in range(19):
        at_s = step * STEP_S
        diagnoses = stream.take(T_S + at_s, page(at_s, **load), "text/plain")  # type: ignore[arg-type]
    return diagnoses[0]


def test_nobody_is_answered_and_the_verdict_says_so() -> None:
    # A real server of six seats whose clients hang up after 2 s: 737 calls, none finished.
    diagnosis = said(accepted_per_s=9.2, finished_per_s=0.0, first_tokens_per_s=4.6, waiting=14.0)
    head = diagnosis.causes[0]
    assert {"queue_saturation", "clients_give_up"} <= {head.id, *head.explains}
    assert head.severity == Severity.CRITICAL
    assert "clients give up 100% of the calls" in head.summary
    (replicas,) = [r for r in diagnosis.recommendations if r.id == "replicas"]
    # 9.2 accepted for 4.6 that get a first token, and the safety factor of 1.3: 2.6.
    assert [(c.before, c.after) for c in replicas.changes] == [(1, 3)]


@pytest.mark.parametrize(
    ("finished_per_s", "severity"),
    [
        pytest.param(4.0, Severity.CRITICAL, id="most"),
        pytest.param(7.0, Severity.WARNING, id="a third"),
        pytest.param(8.6, Severity.INFO, id="a seventh: people stop answers that they have read"),
        pytest.param(9.9, Severity.OK, id="one in a hundred"),
        pytest.param(12.0, Severity.OK, id="several answers a call"),
    ],
)
def test_severity_follows_the_share_that_is_given_up(
    finished_per_s: float, severity: Severity
) -> None:
    diagnosis = said(accepted_per_s=10.0, finished_per_s=finished_per_s, first_tokens_per_s=10.0)
    by_id = {cause.id: cause.severity for cause in diagnosis.causes}
    assert by_id.get("clients_give_up", Severity.OK) == severity


def test_a_third_of_the_calls_is_refused_as_wrong() -> None:
    diagnosis = said(
        accepted_per_s=2.0, finished_per_s=2.0, first_tokens_per_s=2.0, refused_per_s=1.0
    )
    cause = next(cause for cause in diagnosis.causes if cause.id == "client_errors")
    assert cause.severity == Severity.INFO
    assert "33% of the calls are refused" in cause.summary


def test_calls_of_several_engines_are_nobodys() -> None:
    diagnosis = said(accepted_per_s=9.2, finished_per_s=0.0, first_tokens_per_s=4.6, engines=2)
    assert diagnosis.values["given_up_ratio"] is None
    assert "clients_give_up" not in {cause.id for cause in diagnosis.causes}
