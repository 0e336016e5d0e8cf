"""Examples for the OpenAPI document: a made-up incident, rendered as real ones are. Pure."""

from __future__ import annotations

from functools import cache
from typing import Any

import orjson

from kneewatch.agent.api.forms import JSON, TEXT
from kneewatch.agent.api.present import Moment, Present
from kneewatch.agent.api.telling import HINT, body, head
from kneewatch.agent.board import SourceState, TargetState
from kneewatch.diagnose.case import Cause, Evidence
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.diagnose.recommend.recommendation import Change, Recommendation
from kneewatch.rules.cascade import Stage
from kneewatch.rules.model import Severity

NOW_S = 1795219620.0
TARGET = "http://gpu-7:8000"

CAUSE = Cause(
    id="kv_pressure",
    confidence=0.97,
    severity=Severity.CRITICAL,
    summary="The KV cache is too small for this load: running requests are preempted.",
    evidence=(Evidence("preemption_ratio_per_s", 0.24, 0.05, "24 % are preempted a second"),),
    against=(),
    guide=("7.4", "9.3"),
    lever="Give the KV cache more room, or admit less.",
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
    judged_against="its own quiet baseline (no SLO is set)",
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
    rendered = Present().render(JSON, "", moment)
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
    told: dict[str, Any] = orjson.loads(b"{%s}" % rendered)
    return whole | told | {"since": NOW_S - 7200, "intervals": [interval]}


def triage_told(form: str) -> str:
    """The same as text or Markdown."""
    first = head(form, [DIAGNOSIS], t_s=NOW_S, past=False, late=(), pending={})
    parts = [first, body(form, [DIAGNOSIS], alone=True), *([HINT] if form == TEXT else [])]
    return "\n\n".join(parts) + "\n"
