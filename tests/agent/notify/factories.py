"""States, settings and receivers made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kneewatch.agent.notify.receivers import Receiver, receivers
from kneewatch.agent.settings.effective import Settings, load
from kneewatch.agent.target_state import TargetState
from kneewatch.diagnose.recommend.advice import Advice, FlagChange
from kneewatch.diagnose.verdict import Cause, Verdict
from kneewatch.rules.cascade import staged
from kneewatch.rules.rule import Severity
from tests.reports.diagnoses import HEALTHY, NOW_S, PRESSURE, SICK, UNREADABLE

FP8 = Advice(
    id="kv-fp8",
    cause="kv_pressure",
    changes=(FlagChange("--kv-cache-dtype", "auto", "fp8"),),
    summary="Half the bytes a token: the cache holds twice as many.",
    predicted={"kv_capacity_tokens": 10176.0},
    before={"kv_capacity_tokens": 5088.0},
    cost_usd_per_hour=0.0,
    checks=("answers on your own prompts",),
    risk="quality",
    verify=("cache_dtype is fp8",),
    guide=("7.4",),
)
LABELS = {"tier": "prod", "namespace": "ml"}


def healthy(**more: Any) -> Verdict:  # noqa: ANN401
    """A healthy engine."""
    return replace(HEALTHY, **more)


def sick(severity: Severity = Severity.CRITICAL, stage: int = 3, **more: Any) -> Verdict:  # noqa: ANN401
    """An engine whose KV cache is too small."""
    fields = {
        "health": severity.word,
        "stage": staged(stage, NOW_S - 40, severity, None, ("requests queue",)),
        "causes": [replace(PRESSURE, severity=severity)],
        "recommendations": (FP8,),
    }
    return replace(SICK, **{**fields, **more})


def unreadable(**more: Any) -> Verdict:  # noqa: ANN401
    """An engine whose page cannot be read."""
    return replace(UNREADABLE, **more)


def cause(id_: str, severity: Severity = Severity.CRITICAL, **more: Any) -> Cause:  # noqa: ANN401
    """Another cause."""
    return replace(PRESSURE, id=id_, severity=severity, explains=(), **more)


def state(
    *diagnoses: Verdict,
    after_s: float = 0.0,
    name: str = "r0",
    labels: Mapping[str, str] = LABELS,
) -> TargetState:
    """A target's state some seconds after NOW_S."""
    t_s = NOW_S + after_s
    moved = tuple(replace(diagnosis, t_s=t_s, target=name) for diagnosis in diagnoses)
    return TargetState(name, f"http://{name}:8000/metrics", labels, t_s, moved, 0.01, 5.0, 1, 0, 0)


def settings(folder: Path, text: str) -> Settings:
    """Settings from a TOML file."""
    file = folder / "kneewatch.toml"
    file.write_text(text)
    return load(file=file, environ={}, flags={})


def receiver(folder: Path, text: str) -> Receiver:
    """The one receiver of a TOML file."""
    (configured,) = receivers(settings(folder, f"[[notify]]\n{text}\n"))
    return configured
