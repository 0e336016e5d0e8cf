"""A tier as its average engine, for the levers of one server (diagnose/recommend). Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kneewatch.diagnose.case import Facts, Targets
from kneewatch.diagnose.catalogue.gpus import recognise
from kneewatch.diagnose.catalogue.models import Model, model
from kneewatch.diagnose.fleet.spread import middle
from kneewatch.diagnose.fleet.verdict import Tier
from kneewatch.diagnose.recommend.demand import demand
from kneewatch.diagnose.recommend.deployment import Deployment, Stated, deployment
from kneewatch.diagnose.recommend.scene import Scene
from kneewatch.diagnose.sizing.inputs import SizingError

SHARED_OUT = (
    "running",
    "running_avg",
    "waiting",
    "waiting_by_capacity",
    "arrival_per_s",
    "generation_tokens_per_s",
    "computed_prompt_tokens_per_s",
    "kv_usage_ratio",
    "kv_usage_avg_ratio",
)
"""What the balancer shares out: the mean of the engines; of what is a request's own, the median."""

PER_REQUEST = ("prompt_tokens_mean", "output_tokens_mean", "itl_mean_s", "prefix_hit_ratio")
WORST = ("itl_p99_s", "ttft_p99_s")
CONFIGURED = ("kv_capacity_tokens",)


def averaged(tier: Tier) -> dict[str, float | None]:
    """The signals of the tier's average engine; P99s are the worst engine's."""

    def each(keys: tuple[str, ...], fold: Callable[[list[float]], float | None]) -> None:
        for key in keys:
            known = [value for e in tier.engines if (value := e.get(key)) is not None]
            found[key] = fold(known) if known else None

    found: dict[str, float | None] = {}
    each(SHARED_OUT, lambda known: sum(known) / len(known))
    each(PER_REQUEST, middle)
    each(WORST, max)
    each(CONFIGURED, min)
    computed, prompts = found["computed_prompt_tokens_per_s"], found["prompt_tokens_mean"]
    arrivals = found["arrival_per_s"]
    if computed is not None and prompts and arrivals:
        found["prefix_saved_ratio"] = max(0.0, 1 - computed / (prompts * arrivals))
    return found


def server_of(tier: Tier, stated: Stated) -> Deployment:
    """The server that each engine of the tier is: by what is stated, else by its series.

    The model is the one that `model_name` names, the GPU the one of the tier's name, and DCGM
    counts the GPUs of each pod, which its data-parallel engines share evenly.
    """
    pod = middle(engine.gpus.get("gpus") for engine in tier.engines)
    gpus = pod / (tier.engines_each or 1) if pod else 0.0
    each = int(gpus) if gpus and gpus == int(gpus) else None
    launch = stated.launch
    split = stated.tensor_parallel or (launch and launch.count("--tensor-parallel-size")) or each
    known = replace(
        stated,
        model=stated.model or _model_named(tier.engines[0].member.model),
        gpu=stated.gpu or (recognise(tier.tier) if tier.tier else None),
        tensor_parallel=split,
        gpus=stated.gpus or each,
        replicas=tier.replicas,
    )
    return deployment(tier.engines[0].config, known)


def _model_named(name: str) -> Model | None:
    try:
        return model(name)
    except SizingError:
        return None


def scene_of(
    tier: Tier, server: Deployment, targets: Targets, cause: str, *, peak: float | None
) -> Scene:
    """The average engine and its server, for the levers against a cause; `peak` are the most
    requests of one engine in a week, None where nobody knows."""
    values = averaged(tier)
    if server.capacity_tokens is None:
        server = replace(server, capacity_tokens=values["kv_capacity_tokens"])
    facts = Facts.of_moment(values, config=server.config, targets=targets)
    return Scene(cause, facts, server, demand(values, server), weekly_peak_requests=peak)


def at_load(scene: Scene, requests: float) -> Scene:
    """The same with so many requests on each engine."""
    return replace(scene, demand=replace(scene.demand, requests=requests))
