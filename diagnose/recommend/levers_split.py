"""A lower tensor-parallel degree and more replicas on the same GPUs: guide 5.1, 8.5. Pure."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from kneewatch.diagnose.causes.parallelism import degree_words
from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO
from kneewatch.diagnose.recommend.deployment import memory_of
from kneewatch.diagnose.recommend.prediction import (
    After,
    changed_setup,
    predicted,
    present,
    resized_tokens,
)
from kneewatch.diagnose.recommend.recommendation import REPLICAS, Recommendation
from kneewatch.diagnose.recommend.scene import SETTLE_WORDS, Scene, advice
from kneewatch.diagnose.sizing.benchmark.by_tensor_parallel import Comparison, Degree
from kneewatch.diagnose.sizing.memory.setup import Setup
from kneewatch.diagnose.sizing.steps import figure

KEPT = ("kv_capacity_tokens", "kv_demand_ratio", "kv_usage_ratio", "usd_per_hour")
"""What is computed of the change; its speed was measured, which says more than the roofline."""


def lower_tensor_parallel(scene: Scene) -> Recommendation | None:
    """The measured smaller degree on the GPUs there are, where the sizing math says that weights
    and KV cache fit and the load so far leaves room; None also where it does not know."""
    server, split = scene.server, scene.facts.split
    if split is None or split.wide is None or split.narrow is None or not split.far_below:
        return None
    wide, narrow, now = split.wide, split.narrow, server.replicas
    to, total = narrow.tensor_parallel, now * wide.tensor_parallel // narrow.tensor_parallel
    after = _after(scene, wide, narrow, total)
    if after is None:
        return None
    computed = predicted(scene, after)
    if not _has_room(scene, computed.get("kv_demand_ratio")):
        return None
    least = max(ceil(now * wide.per_s / narrow.per_s), 1)
    times = figure(round(total * narrow.per_s / (now * wide.per_s), 1))
    gives = f"TP {wide.tensor_parallel} {'gives' if now == 1 else 'give'}"
    return advice(
        scene,
        "tensor-parallel-down",
        [("--tensor-parallel-size", wide.tensor_parallel, to), (REPLICAS, now, total)],
        f"By the benchmark {total} replicas with TP {to} give {times} times what {now} with "
        f"{gives}, on no more GPUs; {least} of them would give as much as now.",
        before={**present(scene), **_limits(scene, split, wide)},
        predicted={
            **{name: computed[name] for name in KEPT if name in computed},
            **_limits(scene, split, narrow),
        },
        cost_usd_per_hour=_more_usd_per_hour(scene, after, wide),
        checks=[
            degree_words(narrow),
            "that the benchmark's prompts and answers are as long as yours, and as often alike",
        ],
        risk=f"Each request is slower. {degree_words(wide)}; {degree_words(narrow)}. Prefixes are "
        f"cached on {total} replicas apart.",
        verify=[_verify(split, narrow)],
        guide=("5.1", "8.2", "8.5"),
    )


def _limits(scene: Scene, split: Comparison, one: Degree) -> dict[str, float]:
    """What a degree gives a GPU at most, and what its tokens cost then."""
    told = {f"{split.unit}_per_s_per_gpu": one.per_s_per_gpu}
    setup, hourly = scene.server.setup, scene.server.usd_per_gpu_hour
    if setup is not None and hourly is not None and split.unit == "tokens":
        stages = setup.parallel.pipeline
        told["usd_per_million_tokens_at_limit"] = hourly * stages / (one.per_s_per_gpu * 3600) * 1e6
    return told


def _more_usd_per_hour(scene: Scene, after: After, wide: Degree) -> float | None:
    """What the GPUs cost more: those that are left over where the degrees do not divide, less."""
    setup, hourly = scene.server.setup, scene.server.usd_per_gpu_hour
    stages = 1 if setup is None else setup.parallel.pipeline
    now = scene.server.replicas * wide.tensor_parallel * stages
    more = (after.replicas or 0) * (after.gpus or 0) - now
    if not more:
        return 0.0
    return None if hourly is None else more * hourly


def _verify(split: Comparison, narrow: Degree) -> str:
    kept = f"ttft_p99_s and itl_p99_s keep their targets {SETTLE_WORDS}"
    if split.unit == "requests":
        return f"with a queue completed_per_s a GPU rises, {kept}"
    most = figure(round(narrow.per_s_per_gpu, 1))
    return f"with a queue generation_tokens_per_s a GPU rises towards {most}, {kept}"


def _after(scene: Scene, wide: Degree, narrow: Degree, total: int) -> After | None:
    """The server with the smaller degree; None where it does not fit, or nobody knows."""
    server, to = scene.server, narrow.tensor_parallel
    setup = server.setup
    if setup is None or setup.gpu is None or setup.parallel.tensor != wide.tensor_parallel:
        return None
    narrower = changed_setup(scene, parallel=replace(setup.parallel, tensor=to))
    capacity = resized_tokens(scene, narrower)
    if narrower is None or capacity is None or not _starts(narrower):
        return None
    return After(
        capacity_tokens=capacity,
        setup=narrower,
        share_ratio=server.replicas / total,
        replicas=total,
        gpus=to * setup.parallel.pipeline,
    )


def _starts(setup: Setup) -> bool:
    """Whether weights and one request of full length fit for certain: a cache whose size is fixed
    in bytes says nothing of the weights beside it."""
    found = memory_of(setup)
    return found.holds_one and found.held_tokens.low >= setup.longest_tokens


def _has_room(scene: Scene, demand_ratio: float | None) -> bool:
    """Whether the load since the cause began, and the week's peak where one is known, leave room
    in the smaller caches."""
    if demand_ratio is None:
        return False
    requests, peak = scene.demand.requests, scene.weekly_peak_requests
    at_peak = demand_ratio * peak / requests if peak is not None and requests > 0 else 0.0
    return max(demand_ratio, at_peak) <= KV_TARGET_RATIO
