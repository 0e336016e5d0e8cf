"""The live server's roofline, and the numbers before and after a change. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import floor, inf

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.deployment.deployment import memory_of
from kneewatch.diagnose.recommend.context import MEASURED, Scene
from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO
from kneewatch.diagnose.sizing.memory.budget import kv_layout_of
from kneewatch.diagnose.sizing.memory.launch_setup import Setup
from kneewatch.diagnose.sizing.speed.performance import Load, Performance, performance
from kneewatch.diagnose.sizing.speed.roofline_inputs import (
    DEFAULT,
    Costs,
    Efficiency,
    launch_costs,
    with_shares,
)

costs_of = lru_cache(maxsize=256)(launch_costs)
performance_of = lru_cache(maxsize=256)(performance)

_LEAST_RATIO, _MOST_RATIO = 0.02, 1.0
# One rate tells one share: that of what takes most of the time.
_FEW_PROMPTS_RATIO, _MOSTLY_PROMPTS_RATIO = 0.2, 0.6
_HALVINGS = 14  # to a ten-thousandth


def roofline(
    scene: Scene,
    setup: Setup,
    *,
    requests: float,
    most: float = inf,
    saved_ratio: float,
    shares: Efficiency = DEFAULT,
) -> Performance:
    """What a launch yields at the scene's lengths.

    Raises:
        SizingError: GPU or lengths are not known.
    """
    load = load_of(scene, setup, requests=requests, most=most, saved_ratio=saved_ratio)
    return performance_of(costs_of(setup), load, shares)


def load_of(
    scene: Scene, setup: Setup, *, requests: float, most: float, saved_ratio: float
) -> Load:
    """The scene's load on that launch.

    Raises:
        SizingError: the lengths are not known.
    """
    demand = scene.demand
    if not demand.input_tokens or not demand.output_tokens:
        raise SizingError("the lengths are not known", name="input_tokens")
    return Load(
        input_tokens=demand.input_tokens,
        output_tokens=max(1.0, demand.output_tokens),
        concurrency=requests,
        max_running=most,
        max_num_batched_tokens=setup.batched_tokens,
        prefix_hit_ratio=saved_ratio,
    )


def reached(scene: Scene, setup: Setup, load: Load) -> Efficiency:
    """The shares of the peaks that the server reaches at its present load, defaults for the rest.

    Only what binds can be told from a rate: a share of the bandwidth where reading does, of the
    compute peak where prompts do. A batch that ran empty shows neither.
    """
    if MEASURED not in scene.memo:
        scene.memo[MEASURED] = _found(scene, setup, load)
    found = scene.memo[MEASURED]
    return with_shares(DEFAULT, mfu_ratio=found.get("mfu_ratio"), mbu_ratio=found.get("mbu_ratio"))


def _found(scene: Scene, setup: Setup, load: Load) -> dict[str, float]:
    if setup.parallel.pipeline > 1 or scene.get("running_min") < 1:
        return {}
    known = costs_of(setup)
    usual = performance_of(known, load, DEFAULT)
    prompts = _prompt_time_ratio(usual)
    if prompts <= _FEW_PROMPTS_RATIO and usual.decode_step.binding == "memory":
        share = _share(
            scene.get("memory_bytes_per_s"),
            lambda ratio: _bytes_per_s(known, load, with_shares(DEFAULT, mbu_ratio=ratio)),
        )
        return {} if share is None else {"mbu_ratio": share}
    if prompts >= _MOSTLY_PROMPTS_RATIO:
        share = _share(
            scene.get("flop_per_s"),
            lambda ratio: _flop_per_s(known, load, with_shares(DEFAULT, mfu_ratio=ratio)),
        )
        return {} if share is None else {"mfu_ratio": share}
    return {}


def _prompt_time_ratio(found: Performance) -> float:
    """The part of all steps' time that prompts take."""
    plain_s, mixed_s = found.decode_step.total_s, found.prefill_step.total_s
    more_s = found.prefill_step_ratio * (mixed_s - plain_s)
    return more_s / (plain_s + more_s)


def _share(measured_per_s: float, rate: Callable[[float], float]) -> float | None:
    """The share at which the roofline does as much a second; None where it never does."""
    low, high = _LEAST_RATIO, _MOST_RATIO
    if not rate(low) <= measured_per_s <= rate(high):
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if rate(middle) >= measured_per_s else (middle, high)
    return high


def _bytes_per_s(known: Costs, load: Load, shares: Efficiency) -> float:
    """Bytes that one GPU reads a second: those of a decode step over the mean step's time."""
    found = performance(known, load, shares)
    read_bytes = found.decode_step.memory_s * known.bandwidth_bytes_per_s * shares.mbu_ratio
    return read_bytes / (found.itl_s * found.tokens_per_pass)


def _flop_per_s(known: Costs, load: Load, shares: Efficiency) -> float:
    """FLOP of one GPU a second: those of a request's prompt and output, times the requests."""
    fresh = max(load.input_tokens * (1 - load.prefix_hit_ratio), 1.0)
    prompt_pairs = fresh * (load.input_tokens - fresh / 2)
    output_pairs = load.output_tokens * (load.input_tokens + load.output_tokens / 2)
    flop = (fresh + load.output_tokens) * known.body_flop_per_token
    flop += load.output_tokens * known.head_flop_per_token
    flop += prompt_pairs * known.prefill_flop_per_pair + output_pairs * known.flop_per_pair
    for window in known.windows:
        seen = min(load.input_tokens, window.tokens)
        flop += (fresh + load.output_tokens) * seen * window.flop_per_pair
    return performance(known, load, shares).requests_per_s * flop


# --- The numbers before a change and after it. Pure -----------------------------------------------
#
# KV: the load's tokens over the cache's. Latency: the roofline, scaled to the ITL that is
# measured.


SCALE_LOW, SCALE_HIGH = 0.4, 2.5
"""Measured ITL over the roofline's: outside, the roofline does not describe this server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """A server after a change; None: as it is. `share_ratio` of the present load stays on it."""

    capacity_tokens: float | None = None
    seats: int | None = None
    share_ratio: float = 1.0
    setup: Setup | None = None
    replicas: int | None = None
    gpus: int | None = None
    saved_ratio: float | None = None


def present(scene: Scene) -> dict[str, float]:
    """The numbers now: measured ones, and what the load would take."""
    if "present" not in scene.memo:
        scene.memo["present"] = _present(scene)
    return scene.memo["present"]


def _present(scene: Scene) -> dict[str, float]:
    server, values = scene.server, scene.facts.values
    told = _sizes(scene, After())
    for key, signal in (
        ("kv_usage_ratio", "kv_usage_avg_ratio"),
        ("preemption_per_s", "preemption_per_s"),
        ("ttft_s", "ttft_mean_s"),
        ("itl_s", "itl_mean_s"),
    ):
        value = values.get(signal)
        if value is not None:
            told[key] = value
    hourly = server.usd_per_hour
    if hourly is not None:
        told["usd_per_hour"] = hourly * server.replicas
        made_per_s = values.get("generation_tokens_per_s")
        if made_per_s:
            told["usd_per_million_tokens"] = hourly / (made_per_s * 3600) * 1e6
    return told


def predicted(scene: Scene, change: After) -> dict[str, float]:
    """The numbers after a change at the present load; unknown ones are left out."""
    told = _sizes(scene, change)
    demand_ratio = told.get("kv_demand_ratio")
    if demand_ratio is not None:
        told["kv_usage_ratio"] = min(1.0, demand_ratio)
        if demand_ratio <= KV_TARGET_RATIO and _peak_fits(scene, told):
            told["preemption_per_s"] = 0.0
    server = scene.server
    hourly, gpus = server.usd_per_gpu_hour, change.gpus or server.gpus
    if hourly is not None and gpus is not None:
        told["usd_per_hour"] = hourly * gpus * (change.replicas or server.replicas)
    yielded = latencies(scene, change)
    if yielded is not None:
        made, scale = yielded
        told["ttft_s"], told["itl_s"] = made.ttft_s * scale, made.itl_s * scale
        if "usd_per_hour" in told:
            made_per_s = made.decode_tokens_per_s / scale * (change.replicas or server.replicas)
            asked_per_s = asked_tokens_per_s(scene)
            if asked_per_s is not None:
                # What nobody asks for is not made, however many could make it.
                made_per_s = min(made_per_s, asked_per_s)
                told["usd_per_million_tokens"] = told["usd_per_hour"] / (made_per_s * 3600) * 1e6
    return told


def asked_tokens_per_s(scene: Scene) -> float | None:
    """Output tokens that all replicas together are asked for: those made now, by the arrivals."""
    demand, made_per_s = scene.demand, scene.get("generation_tokens_per_s")
    if not made_per_s or demand.served_per_s <= 0:
        return None
    grown = max(1.0, demand.arrival_per_s / demand.served_per_s)
    return made_per_s * grown * scene.server.replicas


def _peak_fits(scene: Scene, told: Mapping[str, float]) -> bool:
    """Whether the requests fit at their peak: a mean that fits is preempted now and then."""
    capacity, held = told["kv_capacity_tokens"], scene.demand.held_tokens or 1.0
    requests = told["kv_demand_ratio"] * capacity / held
    return scene.demand.peak_tokens(requests) <= capacity


def _sizes(scene: Scene, change: After) -> dict[str, float]:
    server, held = scene.server, scene.demand.held_tokens
    capacity = change.capacity_tokens or server.capacity_tokens
    seats = change.seats or server.max_num_seqs
    told: dict[str, float] = {}
    if capacity is None:
        return told
    told["kv_capacity_tokens"] = floor(capacity)
    if server.block_tokens and server.blocks:
        ratio = capacity / (server.capacity_tokens or capacity)
        usable = ratio * (server.blocks - 1)
        told["kv_blocks"] = floor(usable + 1 + 1e-6)
    if server.capacity_tokens:
        told["kv_capacity_ratio"] = capacity / server.capacity_tokens
    if held:
        most = floor(capacity / held)
        told["max_concurrency"] = min(most, seats) if seats else most
        wanted = min(scene.demand.requests * change.share_ratio, seats or inf)
        told["kv_demand_ratio"] = wanted * held / capacity
    return told


def latencies(scene: Scene, change: After) -> tuple[Performance, float] | None:
    """The roofline after a change and the factor that fits it to this server; None: not known."""
    server, demand = scene.server, scene.demand
    measured_s = scene.get("itl_mean_s")
    if server.setup is None or server.setup.gpu is None or not measured_s:
        return None
    try:
        load = _present_load(scene, server.setup)
        shares = reached(scene, server.setup, load)
        now = performance_of(costs_of(server.setup), load, shares)
        scale = measured_s / now.itl_s
        if not SCALE_LOW <= scale <= SCALE_HIGH:
            return None
        sizes = _sizes(scene, change)
        then = roofline(
            scene,
            change.setup or server.setup,
            requests=max(demand.requests * change.share_ratio, 1.0),
            most=max(1.0, sizes.get("max_concurrency", inf)),
            saved_ratio=demand.saved_ratio if change.saved_ratio is None else change.saved_ratio,
            shares=shares,
        )
    except SizingError:
        return None
    return then, scale


def _present_load(scene: Scene, setup: Setup) -> Load:
    demand = scene.demand
    running = max(demand.running, 1.0)
    return load_of(
        scene,
        setup,
        requests=max(demand.requests, running),
        most=running if demand.waiting >= 1 else inf,
        saved_ratio=demand.saved_ratio,
    )


def changed_setup(scene: Scene, **values: object) -> Setup | None:
    """The server's set-up with other values; None where it is not known."""
    setup = scene.server.setup
    return None if setup is None else replace(setup, **values)  # type: ignore[arg-type]


def resized_tokens(scene: Scene, then: Setup | None) -> float | None:
    """KV tokens that requests can hold with another set-up of the same server.

    The page's own figure times what the sizing math says of the change; None where it does not
    know, where vLLM would not start, or where an override of the blocks keeps them as they are.
    """
    server = scene.server
    if then is None or server.setup is None or server.layout is None or not server.capacity_tokens:
        return None
    if server.blocks_override is not None:
        return None
    try:
        if server.kv_memory_bytes is not None:
            ratio = server.layout.block_bytes / kv_layout_of(then).block_bytes
        else:
            now, later = memory_of(server.setup), memory_of(then)
            if not later.holds_one or now.held_tokens.expected <= 0:
                return None
            ratio = later.held_tokens.expected / now.held_tokens.expected
    except SizingError:
        return None
    return server.capacity_tokens * ratio
