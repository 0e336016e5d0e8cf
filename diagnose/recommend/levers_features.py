"""Adapters, output limits: guide 2.5, 9.3, 9.4. Pure."""

from __future__ import annotations

import json
from math import ceil, inf

from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO
from kneewatch.diagnose.recommend.prediction import (
    After,
    changed_setup,
    predicted,
    present,
    resized_tokens,
)
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.recommend.scene import SETTLE_WORDS, Scene, advice
from kneewatch.diagnose.sizing.memory.adapters import Adapters

SLOTS_GROWTH = 4.0
KV_ROOM_RATIO = 0.8
OUTPUT_MULTIPLE = 3.0
"""Over the mean of quiet times: few honest outputs are longer."""

OUTPUT_STEP_TOKENS = 64


def more_adapter_slots(scene: Scene) -> Recommendation | None:
    """More --max-loras, as far as requests are held back for a slot."""
    slots, held_back = scene.facts.values.get("lora_max"), scene.get("waiting_deferred_avg")
    if not slots:
        return None
    # A slot holds an adapter, not a request: more than there are adapters serve nobody.
    waiting, running = scene.get("lora_waiting"), scene.get("lora_running")
    wanted = ceil(waiting or held_back)
    to = _slots_that_fit(
        scene, int(slots), int(min(max(running, slots) + wanted, SLOTS_GROWTH * slots))
    )
    if to <= slots:
        return None
    short = to - slots < wanted
    launch = scene.server.stated.launch
    on_cpu = None if launch is None else launch.count("--max-cpu-loras")
    changes = [("--max-loras", int(slots), to)]
    if on_cpu is not None and on_cpu < to:
        # vLLM refuses fewer adapters in CPU memory than on the GPU.
        changes.append(("--max-cpu-loras", on_cpu, to))
    usage = scene.get("kv_usage_avg_ratio")
    checks = ["how many adapters are in use at once: more slots than that only cost memory"]
    if on_cpu is None and launch is None:
        checks.append(f"--max-cpu-loras, where it is set: at least {to}")
    if usage > KV_ROOM_RATIO:
        checks.append(f"KV room: the cache is {100 * usage:.0f} % full and loses what slots take")
    return advice(
        scene,
        "max-loras",
        changes,
        f"{held_back:.0f} requests are held back for {slots:.0f} "
        f"slot{'s' if slots != 1 else ''}"
        + (f", by {waiting:.0f} adapters that wait" if waiting else "")
        + f"; {to} let as many adapters run at once"
        + (": not enough alone, but seen first." if short else "."),
        before={**present(scene), "lora_max": slots, "waiting_deferred": held_back},
        predicted={
            **_kv_numbers(scene, to),
            "lora_max": to,
            "waiting_deferred": max(0.0, held_back * (1 - (to - slots) / wanted)),
        },
        checks=checks,
        risk="Each slot takes the memory of an adapter at --max-lora-rank from the KV cache.",
        verify=[
            f"waiting_deferred {'falls' if short else 'goes to 0'} and lora_change_per_s falls "
            f"{SETTLE_WORDS}"
        ],
        guide=("2.5", "9.3"),
    )


def _slots_that_fit(scene: Scene, now: int, wanted: int) -> int:
    """The most slots up to `wanted` whose buffers leave the load its KV cache."""
    fits, fails = now, wanted + 1
    while fails - fits > 1:
        # The most first: mostly all of them fit.
        slots = wanted if fails > wanted else (fits + fails) // 2
        if _kv_numbers(scene, slots).get("kv_demand_ratio", 0.0) <= KV_TARGET_RATIO:
            fits = slots
        else:
            fails = slots
    return fits


def _kv_numbers(scene: Scene, slots: int) -> dict[str, float]:
    """The KV cache beside so many slots; nothing where model, GPU or rank are not known."""
    setup = scene.server.setup
    if setup is None or setup.gpu is None or setup.adapters is None:
        return {}
    wider = changed_setup(scene, adapters=Adapters(slots, setup.adapters.rank))
    capacity = resized_tokens(scene, wider)
    if capacity is None:
        # vLLM would not start, or an override keeps the cache as it is.
        return {"kv_demand_ratio": inf} if scene.server.blocks_override is None else {}
    return predicted(scene, After(capacity_tokens=capacity, setup=wider))


def adapter_routing(scene: Scene) -> Recommendation | None:
    """Adapters spread over replicas, each replica with its own."""
    if not scene.server.stated.replicas or scene.server.replicas < 2:
        return None
    return advice(
        scene,
        "adapter-routing",
        [("router", "any replica", "by adapter")],
        f"Routed by adapter, each of the {scene.server.replicas} replicas sees a share of them "
        "and swaps less.",
        before={"waiting_deferred": scene.get("waiting_deferred_avg")},
        checks=["that the adapters' loads are of similar size"],
        risk="A popular adapter makes its replica hot.",
        verify=[f"lora_change_per_s falls on every replica {SETTLE_WORDS}"],
        guide=("2.5", "9.3"),
    )


def output_cap(scene: Scene) -> Recommendation | None:
    """A server-wide limit of the output, from what was usual in quiet times."""
    quiet = scene.facts.baseline.get("output_tokens_mean")
    if not quiet:
        return None
    cap = ceil(OUTPUT_MULTIPLE * quiet / OUTPUT_STEP_TOKENS) * OUTPUT_STEP_TOKENS
    if scene.get("output_tokens_p99") <= cap:
        return None
    return advice(
        scene,
        "output-cap",
        [("--override-generation-config", None, json.dumps({"max_new_tokens": cap}))],
        f"Outputs were {quiet:.0f} tokens long in quiet times; {cap} end a runaway after "
        f"{OUTPUT_MULTIPLE:g} times that. Better still: limits per use case at the gateway.",
        before={"output_tokens_p99": scene.get("output_tokens_p99")},
        predicted={"output_tokens_p99": cap},
        checks=["the longest output that any use case needs"],
        risk="Honest long answers are cut.",
        verify=[f"output_tokens_p99 falls to {cap} and running falls {SETTLE_WORDS}"],
        guide=("9.4",),
    )
