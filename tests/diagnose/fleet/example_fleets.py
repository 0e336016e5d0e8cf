"""Made-up engines of a fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.deployment.server_state import GpuState
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import health
from kneewatch.diagnose.fleet.diagnosis import diagnose
from kneewatch.diagnose.fleet.inventory import (
    Gone,
    Group,
    Key,
    Labels,
    Observed,
    Past,
    Peak,
    Shape,
    Usual,
    label_map,
    shape_of,
)
from kneewatch.diagnose.fleet.routers import RouterState
from kneewatch.diagnose.fleet.verdict import FleetVerdict
from kneewatch.diagnose.ranking import conclude, ranked
from kneewatch.diagnose.values import Histogram
from kneewatch.diagnose.verdict import UNKNOWN_STAGE, Verdict, worst_of
from kneewatch.rules.cascade import lacking as lacking_for
from kneewatch.rules.facts import Baselines
from kneewatch.rules.lifecycle import Cascade
from kneewatch.rules.rule import Severity

T = TypeVar("T")
T_S = 1_795_257_000.0

USUAL: Mapping[str, float] = {
    "running": 8.0,
    "running_avg": 8.0,
    "waiting": 0.0,
    "waiting_by_capacity": 0.0,
    "arrival_per_s": 2.0,
    "generation_tokens_per_s": 400.0,
    "computed_prompt_tokens_per_s": 300.0,
    "kv_usage_ratio": 0.5,
    "kv_usage_avg_ratio": 0.5,
    "preemption_per_s": 0.0,
    "preemption_ratio_per_s": 0.0,
    "prefix_hit_ratio": 0.9,
    "prefix_query_per_s": 3000.0,
    "prompt_tokens_p50": 1500.0,
    "prefill_tokens_p10": 60.0,
    "prefill_tokens_p90": 90.0,
    "ttft_p50_s": 0.1,
    "ttft_p99_s": 0.3,
    "itl_p50_s": 0.02,
    "itl_p99_s": 0.04,
    "kv_capacity_tokens": 40_000.0,
    "running_hour_avg": 8.0,
    "running_hour_ago": 8.0,
    "age_s": 100_000.0,
}
DILUTED: Mapping[str, float] = {"prefix_hit_ratio": 0.3, "prefill_tokens_p90": 1450.0}

Row = tuple[Labels, Mapping[str, float]]
"""An engine's labels, and what is not as usual of it."""


def pod(name: str, **more: str) -> dict[str, str]:
    """The labels of a replica in Kubernetes."""
    return {
        "namespace": "prod",
        "pod": name,
        "instance": f"{name}:8000",
        "model_name": "m",
        "engine": "0",
        **more,
    }


def shaped(rows: Sequence[Labels]) -> Shape:
    """The shape of a fleet by the default meaning of labels."""
    return shape_of(rows, label_map({}, "default"))


def verdict(
    *engines: Row,
    gpus: Mapping[str, Mapping[str, float]] | None = None,
    gone: Sequence[Gone] = (),
    warnings: Sequence[str] = (),
    failed: Mapping[str, str] | None = None,
    lacking: Sequence[str] = (),
    peaks: Mapping[Group, Peak] | None = None,
    lengths: Mapping[Group, Mapping[str, tuple[Histogram, Histogram]]] | None = None,
    recent: Mapping[Group, Mapping[str, Histogram]] | None = None,
    usual: Mapping[Group, Usual] | None = None,
    profile: Profile | None = None,
    streaks_s: Mapping[str, Mapping[str, float]] | None = None,
    images: Mapping[str, str] | None = None,
    faulty_gpus: Mapping[str, Sequence[GpuState]] | None = None,
    routers: Sequence[RouterState] = (),
    since_s: float | None = None,
) -> FleetVerdict:
    """The verdict on engines, each as usual but for what is stated and `lacking`; GPUs, faulty
    ones, streaks and images by pod. `since_s`: when the causes of all engines began."""
    shape = shaped([labels for labels, _ in engines])
    profile = profile or Profile()

    def of_pods(by_pod: Mapping[str, T] | None) -> dict[Key, T]:
        return {
            member.key: by_pod[member.labels["pod"]]
            for member in shape.members
            if by_pod and member.labels["pod"] in by_pod
        }

    faulty, streaks = of_pods(faulty_gpus), of_pods(streaks_s)
    gpu_figures, usuals = of_pods(gpus), usual or {}
    members = {member.key: member for member in shape.members}
    verdicts: dict[Key, Verdict] = {}
    for labels, own in engines:
        key = shape.key(labels)
        values = {name: v for name, v in {**USUAL, **own}.items() if name not in lacking}
        pool = usuals.get(members[key].group)
        if pool is not None:
            values["prefix_hit_quiet_ratio"] = pool.hit_ratio
        verdicts[key] = judged(
            members[key].replica,
            values,
            profile,
            streaks_s=streaks.get(key, {}),
            gpus=faulty.get(key, ()),
            gpus_guessed="gpus" not in gpu_figures.get(key, {}),
        )
    if since_s is not None:
        verdicts = {
            key: replace(each, causes=[replace(c, since_s=since_s) for c in each.causes])
            for key, each in verdicts.items()
        }
    return diagnose(
        Observed(
            t_s=T_S,
            source="http://prometheus:9090",
            window_s=60.0,
            shape=shape,
            verdicts=verdicts,
            gpus=gpu_figures,
            images=of_pods(images),
            past=Past(peaks or {}, lengths or {}, recent=recent or {}, usual=usuals),
            gone=gone,
            routers=routers,
            warnings=warnings,
            failed=failed or {},
        ),
        profile,
    )


class Quiet(Baselines):
    """An engine's baselines: what its signals say of quiet times."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = values

    def get(self, key: str) -> float | None:
        name = "prefix_hit_quiet_ratio" if key == "prefix_hit_ratio" else f"{key}:baseline"
        return self._values.get(name)


def judged(
    target: str,
    values: Mapping[str, float],
    profile: Profile,
    *,
    streaks_s: Mapping[str, float],
    gpus: Sequence[GpuState],
    gpus_guessed: bool,
) -> Verdict:
    """The verdict on an engine with these signals, as if its conditions had held so long."""
    evicting = next(rule for rule in profile.rules if rule.id == "KV-EVICT")
    cascade = Cascade(scale=1.0, targets=profile.targets, evicting=evicting)
    stage = cascade.judge(T_S, values, preempted=values.get("preemption_per_s", 0.0))
    known = UNKNOWN_STAGE if lacking_for(stage, values) else stage
    severity = float(stage.severity or Severity.OK)
    values = {**values, "cascade_stage": float(stage.level), "cascade_severity": severity}
    facts = Facts(
        values,
        profile.targets,
        streaks_s,
        {},
        {},
        Quiet(values),
        60.0,
        values.get("age_s", 0.0),
        stage=stage,
        gpus=gpus,
        gpus_guessed=gpus_guessed,
        now_s=T_S,
    )
    causes = ranked(conclude(facts))
    return Verdict(
        t_s=T_S,
        target=target,
        health=health(worst_of(causes, known, ()), readable=known.number is not None),
        stage=known,
        causes=causes,
        values=values,
        window_s=60.0,
        judged_against="nothing",
    )


def fleet(count: int, **more: str) -> list[Row]:
    """So many usual replicas."""
    return [(pod(f"r{at}", **more), {}) for at in range(count)]


def causes(diagnosis: FleetVerdict) -> dict[str, tuple[str, ...]]:
    """The replicas of each cause."""
    return {fleet_cause.id: fleet_cause.replicas for fleet_cause in diagnosis.causes}
