"""The roofline of a live server, with the shares of the peaks that it is seen to reach. Pure.

vLLM estimates the FLOP and the bytes of its steps (`--enable-mfu-metrics`): over the time that
passes they are shares of the whole step, host and kernel launches included. The roofline has those
apart, so what takes its default's place is the share with which it would do as many a second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import inf

from kneewatch.diagnose.recommend.scene import MEASURED, Scene
from kneewatch.diagnose.sizing.inputs import SizingError
from kneewatch.diagnose.sizing.memory.setup import Setup
from kneewatch.diagnose.sizing.speed.costs import Costs, launch_costs
from kneewatch.diagnose.sizing.speed.efficiency import DEFAULT, Efficiency, with_shares
from kneewatch.diagnose.sizing.speed.roofline import Load, Performance, performance

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
