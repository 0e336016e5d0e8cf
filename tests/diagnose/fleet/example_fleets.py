"""Made-up engines of a fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.diagnosis import FleetDiagnosis, diagnose
from kneewatch.diagnose.fleet.inventory import (
    Gone,
    Group,
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
from kneewatch.diagnose.values import GpuState, Histogram

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
) -> FleetDiagnosis:
    """The verdict on engines, each as usual but for what is stated and `lacking`; GPUs, faulty
    ones, streaks and images by pod."""
    shape = shaped([labels for labels, _ in engines])
    return diagnose(
        Observed(
            t_s=1_795_257_000.0,
            source="http://prometheus:9090",
            window_s=60.0,
            shape=shape,
            values={
                shape.key(labels): {
                    key: value for key, value in {**USUAL, **own}.items() if key not in lacking
                }
                for labels, own in engines
            },
            gpus={
                member.key: gpus[member.labels["pod"]]
                for member in shape.members
                if gpus and member.labels["pod"] in gpus
            },
            images={
                member.key: images[member.labels["pod"]]
                for member in shape.members
                if images and member.labels["pod"] in images
            },
            faulty_gpus={
                member.key: faulty_gpus[member.labels["pod"]]
                for member in shape.members
                if faulty_gpus and member.labels["pod"] in faulty_gpus
            },
            past=Past(peaks or {}, lengths or {}, recent=recent or {}, usual=usual or {}),
            gone=gone,
            routers=routers,
            raw=tuple(USUAL),
            warnings=warnings,
            failed=failed or {},
            streaks_s={
                member.key: streaks_s[member.labels["pod"]]
                for member in shape.members
                if streaks_s and member.labels["pod"] in streaks_s
            },
        ),
        profile or Profile(),
    )


def fleet(count: int, **more: str) -> list[Row]:
    """So many usual replicas."""
    return [(pod(f"r{at}", **more), {}) for at in range(count)]


def causes(diagnosis: FleetDiagnosis) -> dict[str, tuple[str, ...]]:
    """The replicas of each cause."""
    return {fleet_cause.cause.id: fleet_cause.replicas for fleet_cause in diagnosis.causes}
