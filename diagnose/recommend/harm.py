"""Do no harm: what is not recommended, and what a recommendation leaves undone. Pure."""

from __future__ import annotations

from dataclasses import replace

from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO
from kneewatch.diagnose.recommend.deployment import Deployment
from kneewatch.diagnose.recommend.launch import LARGEST
from kneewatch.diagnose.recommend.recommendation import Recommendation, Value
from kneewatch.diagnose.recommend.scene import Scene

WEAK_RATIO = 1.005
"""More KV cache than that is worth a restart; less is noise."""


def harmless(made: Recommendation, scene: Scene) -> Recommendation | None:
    """The recommendation with what it leaves undone said; None where it must not be made.

    It is not made where the running version does not know a flag, a value is in force already, or
    the same math says that a target which is met now would be missed.
    """
    server = scene.server
    for change in made.changes:
        same = change.before == change.after and change.after is not None
        if same or not server.knows(change.flag) or not _representable(change.after):
            return None
        now = server.in_force(change.flag)
        if change.after is not None and now is not None and now == change.after:
            return None
    if _misses_target(made, scene) or not _starts(made, server):
        return None
    return _with_residual(made)


def _representable(value: Value) -> bool:
    return not isinstance(value, int | float) or abs(value) <= LARGEST


def _starts(made: Recommendation, server: Deployment) -> bool:
    """Whether vLLM would start with the changes, as far as its other flags are known.

    Source: vllm/config/scheduler.py and vllm/config/lora.py of 0.32.
    """
    to = {change.flag: change.after for change in made.changes}

    def then(flag: str) -> float | None:
        value = to[flag] if flag in to else server.in_force(flag)
        return float(value) if isinstance(value, int | float) else None

    chunks = server.chunks
    if "--no-enable-chunked-prefill" in to or "--enable-chunked-prefill" in to:
        chunks = True
    budget, longest = then("--max-num-batched-tokens"), then("--max-model-len")
    rules = [
        (budget, then("--max-num-seqs")),
        (longest, then("--long-prefill-token-threshold")),
        (then("--max-cpu-loras"), then("--max-loras")),
    ]
    if chunks is False:
        rules.append((budget, longest))
    return all(most is None or least is None or most >= least for most, least in rules)


def _misses_target(made: Recommendation, scene: Scene) -> bool:
    targets = scene.facts.targets
    for key, target_s, tail in (
        ("itl_s", targets.itl_p99_s, "itl_p99_s"),
        ("ttft_s", targets.ttft_p99_s, "ttft_p99_s"),
    ):
        then_s, now_s = made.predicted.get(key), made.before.get(key)
        tail_s = scene.facts.values.get(tail)
        if target_s is None or then_s is None or not now_s or tail_s is None:
            continue
        # The tail is taken to move with the mean.
        if tail_s <= target_s < max(then_s, tail_s * then_s / now_s):
            return True
    return False


def _with_residual(made: Recommendation) -> Recommendation:
    """Says where the load still needs more KV cache than there would be."""
    demand = made.predicted.get("kv_demand_ratio")
    if demand is None or demand <= KV_TARGET_RATIO:
        return made
    left = (
        f"Not enough alone: the load would still take {demand:.1f} times the KV cache, and "
        "requests would still be preempted."
        if demand > 1
        else f"Barely enough: the load would take {100 * demand:.0f} % of the KV cache, and "
        "some requests may still be preempted."
    )
    return replace(made, summary=f"{made.summary} {left}")
