"""Examples for the OpenAPI document: an incident, and Alertmanager's webhook. Pure."""

from __future__ import annotations

from functools import cache
from typing import Any

import orjson

from kneewatch.agent.api.formatting import HINT, Moment, RenderCache, body, head
from kneewatch.agent.api.responses import JSON, TEXT
from kneewatch.agent.target_state import SourceState, TargetState
from kneewatch.diagnose.causes.evidence import Cause, Evidence
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.recommend.recommendation import Change, Recommendation
from kneewatch.rules.cascade import Stage
from kneewatch.rules.rule import Severity

NOW_S = 1795219620.0
TARGET = "http://gpu-7:8000"

CAUSE = Cause(
    id="kv_pressure",
    confidence=0.97,
    severity=Severity.CRITICAL,
    summary="KV cache full: vLLM preempts running requests.",
    evidence=(
        Evidence(
            "preemption_ratio_per_s",
            0.24,
            0.05,
            "24% of running requests are preempted every second",
        ),
    ),
    against=(),
    guide=("7.4", "9.3"),
    lever="Enlarge the KV cache, or admit fewer requests.",
    since_s=NOW_S - 180,
)
ADVICE = Recommendation(
    id="kv-fp8",
    cause="kv_pressure",
    changes=(Change("--kv-cache-dtype", "auto", "fp8"),),
    summary="Half the bytes a token: the cache holds twice the tokens.",
    before={"kv_capacity_tokens": 101_760.0},
    predicted={"kv_capacity_tokens": 203_520.0},
    cost_usd_per_hour=0.0,
    checks=("that answers stay as good with an fp8 cache",),
    risk="Some models lose quality.",
    verify=("preemption_per_s goes to 0 within 5 min",),
    guide=("4.2",),
)
DIAGNOSIS = Diagnosis(
    t_s=NOW_S - 2,
    target=TARGET,
    engine="0",
    model="llama",
    tier=None,
    health="critical",
    stage=Stage(3, NOW_S - 180, Severity.CRITICAL, None, ("running requests were preempted",)),
    causes=[CAUSE],
    symptoms=["S8"],
    findings=[],
    values={"kv_usage_ratio": 0.998, "running": 61.0, "waiting": 23.0, "ttft_p99_s": 4.2},
    unknown=["gpu_dram_active_ratio: no GPU source"],
    window_s=60.0,
    judged_against="its own baseline (no SLO configured)",
    recommendations=(ADVICE,),
)
STATE = TargetState(
    name=TARGET,
    url=f"{TARGET}/metrics",
    labels={"tier": "chat"},
    t_s=NOW_S - 2,
    diagnoses=(DIAGNOSIS,),
    cycle_s=0.0041,
    interval_s=5.0,
    cycles=1200,
    failures=1,
    failing=0,
    sources=(SourceState("page", NOW_S - 2, success=True, duration_s=0.0023),),
)


METRICS = """\
kneewatch_stage{engine="0",model="llama",target="http://gpu-7:8000"} 3.0
kneewatch_cause{cause="kv_pressure",engine="0",model="llama",target="http://gpu-7:8000"} 1.0
kneewatch_recommended_replicas{model="llama",target="http://gpu-7:8000"} 3.0
"""


@cache
def triage_json() -> dict[str, Any]:
    """The triage document."""
    moment = Moment.of([STATE], NOW_S)
    rendered = RenderCache().render(JSON, "", moment)
    interval = {
        "target": TARGET,
        "model": "llama",
        "engine": "0",
        "kind": "stage",
        "id": "3",
        "severity": "critical",
        "start": NOW_S - 180,
        "end": None,
        "last": NOW_S - 2,
        "ended": "",
    }
    whole: dict[str, Any] = {"schema": "kneewatch.triage/1", "t": NOW_S, "pending": []}
    members: dict[str, Any] = orjson.loads(b"{%s}" % rendered)
    return whole | members | {"since": NOW_S - 7200, "intervals": [interval]}


def triage_told(form: str) -> str:
    """The triage answer as text or Markdown."""
    first = head(form, [DIAGNOSIS], t_s=NOW_S, past=False, late=(), pending={})
    parts = [first, body(form, [DIAGNOSIS], alone=True), *([HINT] if form == TEXT else [])]
    return "\n\n".join(parts) + "\n"


# --- Alertmanager's webhook -----------------------------------------------------------------------


Json = dict[str, Any]

TEXTS: Json = {"type": "object", "additionalProperties": {"type": "string"}}
STATUS: Json = {"enum": ["firing", "resolved"]}
ALERTS: Json = {
    "type": "object",
    "required": ["version", "status", "alerts"],
    "properties": {
        "version": {"const": "4"},
        "status": STATUS,
        "truncatedAlerts": {"type": "integer", "minimum": 0},
        "alerts": {
            "type": "array",
            "maxItems": 1000,
            "items": {
                "type": "object",
                "required": ["status", "labels", "startsAt"],
                "properties": {
                    "status": STATUS,
                    "labels": TEXTS,
                    "annotations": TEXTS,
                    "startsAt": {"type": "string", "format": "date-time"},
                    "endsAt": {"type": "string", "format": "date-time"},
                    "fingerprint": {"type": "string"},
                },
            },
        },
    },
}
ALERTS_EXAMPLE: Json = {
    "version": "4",
    "status": "firing",
    "alerts": [
        {
            "status": "firing",
            "labels": {"alertname": "SlowFirstToken", "instance": "gpu-7:8000"},
            "annotations": {"summary": "TTFT P99 is over its target"},
            "startsAt": "2026-11-21T00:05:00Z",
            "endsAt": "0001-01-01T00:00:00Z",
            "fingerprint": "c1f0ffee00c1f0ff",
        }
    ],
}
ANSWER: Json = {
    "type": "object",
    "required": ["schema", "t", "alerts"],
    "properties": {
        "schema": {"const": "kneewatch.alerts/1"},
        "t": {"type": "number"},
        "text": {"type": "string"},
        "alerts": {"type": "array", "items": {"type": "object"}},
    },
}
ANSWER_EXAMPLE: Json = {
    "schema": "kneewatch.alerts/1",
    "t": NOW_S,
    "status": "firing",
    "text": "1 alert, 1 matched to a watched target",
    "alerts": [
        {
            "fingerprint": "c1f0ffee00c1f0ff",
            "status": "firing",
            "text": f"matched {TARGET} by instance=gpu-7:8000\ndocs: /docs/causes/kv_pressure",
        }
    ],
    "sent": None,
}
