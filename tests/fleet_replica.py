"""One replica of a made-up fleet: what is scraped of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tests.fleets import ITL_LE, SECONDS_LE, TOKENS_LE, TTFT_LE

Floats = npt.NDArray[np.float64]
Row = tuple[str, Mapping[str, str], Floats]
Series = Iterator[Row]
"""A name, labels, and the value of each scrape; NaN is none."""

DAY_S, HOUR_S = 86_400, 3600
ARRIVAL_PER_S, RUNNING = 2.0, 8.0
PROMPT_TOKENS, OUTPUT_TOKENS, HIT_SHARE = 1200.0, 150.0, 0.7
PREEMPTION_PER_S = 4.0
GPUS = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
TIERS = ("h100", "a100")
GPU_MEMORY_MIB, GPU_MEMORY_RATIO = 80_000.0, 0.9
BUSY, BUSY_PRESSED = 0.8, 0.95
INCIDENT_S = 900


class Planted(Struct, frozen=True):
    """What is wrong with a replica, and when."""

    cause: str
    replica: int
    start_s: float
    end_s: float

    @property
    def pod(self) -> str:
        """The replica's name."""
        return pod(self.replica)


class Spread(Struct, frozen=True):
    """A histogram: its bounds, what is usually observed and what in a cascade (each a value for
    nine in ten, and one for the rest), observations for each request."""

    bounds: tuple[float, ...]
    usual: tuple[float, float]
    pressed: tuple[float, float]
    each: float = 1.0


HISTOGRAMS = {
    "time_to_first_token_seconds": Spread(TTFT_LE, (0.15, 0.3), (6.0, 7.0)),
    "inter_token_latency_seconds": Spread(ITL_LE, (0.02, 0.04), (0.09, 0.3), OUTPUT_TOKENS),
    "e2e_request_latency_seconds": Spread(SECONDS_LE, (3.2, 6.0), (18.0, 28.0)),
    "request_queue_time_seconds": Spread(SECONDS_LE, (0.01, 0.02), (4.0, 6.0)),
    "request_prefill_time_seconds": Spread(SECONDS_LE, (0.12, 0.25), (1.2, 2.0)),
    "request_decode_time_seconds": Spread(SECONDS_LE, (3.0, 5.6), (12.0, 20.0)),
    "request_prompt_tokens": Spread(TOKENS_LE, (1100.0, 2100.0), (1100.0, 2100.0)),
    "request_generation_tokens": Spread(TOKENS_LE, (140.0, 240.0), (140.0, 240.0)),
}
USUAL_SHARE = 0.9


class Week(Protocol):
    """What a replica must know of its fleet."""

    from_s: int
    every_s: int
    times: Floats
    planted: tuple[Planted, ...]
    tiered: bool
    namespace: str


class Replica:
    """One replica: its load and what was counted by each time."""

    def __init__(self, week: Week, at: int) -> None:
        times = week.times
        hour = (times % DAY_S) / HOUR_S
        self.load = np.maximum(0.05, 0.55 + 0.45 * np.sin((hour - 9 + at % 3) * math.pi / 12))
        pressed = np.zeros(len(times), dtype=np.bool_)
        self.there = np.ones(len(times), dtype=np.bool_)
        self.born_s = np.full(len(times), float(week.from_s - DAY_S))
        anew = 0
        for problem in week.planted:
            if problem.replica != at:
                continue
            inside = (times >= problem.start_s) & (times < problem.end_s)
            if problem.cause == "kv_pressure":
                pressed |= inside
            elif problem.cause == "target_down":
                self.there &= ~inside
            else:
                anew = int(np.searchsorted(times, problem.start_s))
                self.born_s[anew:] = problem.start_s - 20.0
        step = float(week.every_s)
        self.pressed = pressed
        self.steady = _anew(np.cumsum(np.where(pressed, 0, self.load * ARRIVAL_PER_S) * step), anew)
        self.pressing = _anew(np.cumsum(np.where(pressed, ARRIVAL_PER_S, 0.0) * step), anew)
        self._target(week, at)

    def _target(self, week: Week, at: int) -> None:
        ampere = at % 5 == 4
        self.target = {
            "namespace": week.namespace,
            "pod": pod(at),
            "instance": f"10.{at // 250}.0.{at % 250}:8000",
            "job": "vllm",
            **({"tier": TIERS[ampere]} if week.tiered else {}),
        }
        self.labels = {**self.target, "model_name": "m", "engine": "0"}
        self.gpu = {
            "exported_namespace": week.namespace,
            "exported_pod": pod(at),
            "pod": "dcgm",
            "Hostname": f"node-{at}",
            "modelName": GPUS[ampere],
            "gpu": "0",
        }

    def series(self) -> Series:
        """All that is scraped of it; NaN where it did not answer."""
        ones = np.ones(len(self.load))
        yield "up", self.target, np.where(self.there, 1.0, 0.0)
        yield "process_start_time_seconds", self.target, self._seen(self.born_s)
        for name, values in {
            "DEV_SM_CLOCK": 1980 * ones,
            "DEV_FB_USED": GPU_MEMORY_MIB * GPU_MEMORY_RATIO * ones,
            "DEV_FB_FREE": GPU_MEMORY_MIB * (1 - GPU_MEMORY_RATIO) * ones,
            "PROF_GR_ENGINE_ACTIVE": np.where(self.pressed, BUSY_PRESSED, BUSY * self.load),
        }.items():
            yield f"DCGM_FI_{name}", self.gpu, values
        for name, labels, values in (*self._gauges(), *self._counters(), *self._histograms()):
            yield f"vllm:{name}", {**self.labels, **labels}, self._seen(values)

    def _seen(self, values: Floats) -> Floats:
        return np.where(self.there, values, np.nan)

    def _gauges(self) -> Series:
        ones, pressed = np.ones(len(self.load)), self.pressed
        waiting = np.where(pressed, 12.0, 0.0)
        yield "num_requests_running", {}, np.where(pressed, 24.0, RUNNING * self.load)
        yield "num_requests_waiting", {}, waiting
        yield "num_requests_waiting_by_reason", {"reason": "capacity"}, waiting
        yield "num_requests_waiting_by_reason", {"reason": "deferred"}, 0 * ones
        yield "kv_cache_usage_perc", {}, np.where(pressed, 0.995, 0.7 * self.load)
        config = {"block_size": "16", "num_gpu_blocks": "8000", "enable_prefix_caching": "True"}
        yield "cache_config_info", config, ones

    def _counters(self) -> Series:
        begun = self.steady + self.pressing
        prompts, nothing = begun * PROMPT_TOKENS, 0 * begun
        preempted = self.pressing / ARRIVAL_PER_S * PREEMPTION_PER_S
        source = "prompt_tokens_by_source_total"
        yield "num_preemptions_total", {}, preempted
        yield "prompt_tokens_total", {}, prompts
        yield source, {"source": "local_compute"}, prompts * (1 - HIT_SHARE)
        yield source, {"source": "local_cache_hit"}, prompts * HIT_SHARE
        yield "generation_tokens_total", {}, begun * OUTPUT_TOKENS
        yield "prefix_cache_queries_total", {}, prompts
        yield "prefix_cache_hits_total", {}, prompts * HIT_SHARE
        yield "request_success_total", {"finished_reason": "stop"}, begun
        yield "request_success_total", {"finished_reason": "error"}, nothing

    def _histograms(self) -> Series:
        for name, spread in HISTOGRAMS.items():
            for le in (*spread.bounds, math.inf):
                edge = "+Inf" if le == math.inf else repr(float(le))
                parts = _share(spread.usual, le) * self.steady
                parts = parts + _share(spread.pressed, le) * self.pressing
                yield f"{name}_bucket", {"le": edge}, spread.each * parts
            yield f"{name}_count", {}, spread.each * (self.steady + self.pressing)
            total = _mean(spread.usual) * self.steady + _mean(spread.pressed) * self.pressing
            yield f"{name}_sum", {}, spread.each * total


def pod(at: int) -> str:
    """A replica's name."""
    return f"chat-{at}"


def _share(values: tuple[float, float], le: float) -> float:
    return USUAL_SHARE * (values[0] <= le) + (1 - USUAL_SHARE) * (values[1] <= le)


def _mean(values: tuple[float, float]) -> float:
    return USUAL_SHARE * values[0] + (1 - USUAL_SHARE) * values[1]


def _anew(summed: Floats, at: int) -> Floats:
    """What a counter shows that began anew at a place; 0: it did not."""
    if not at:
        return summed
    return np.concatenate((summed[:at], summed[at:] - summed[at - 1]))
