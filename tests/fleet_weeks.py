"""A made-up fleet over days, with daily load and incidents at known times, as Prometheus blocks.

    python -m tests.fleet_weeks FOLDER REPLICAS [--days 7] [--every 60] [--end T]

writes the blocks for `prometheus --storage.tsdb.path=FOLDER` and prints the last moment. Counters
and histograms are there for the whole time, so that a week can be read back from them.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt

from tests.fleets import BLOCK_S, ITL_LE, SECONDS_LE, TOKENS_LE, TTFT_LE

Floats = npt.NDArray[np.float64]

DAY_S, HOUR_S = 86_400, 3600
ARRIVAL_PER_S, RUNNING = 2.0, 8.0
PROMPT_TOKENS, OUTPUT_TOKENS, HIT_SHARE = 1200.0, 150.0, 0.7
PREEMPTION_PER_S = 4.0
GPUS = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
INCIDENT_S = 900


@dataclass(frozen=True, slots=True)
class Planted:
    """What is wrong with a replica for INCIDENT_S, from `start_s` on."""

    cause: str
    replica: int
    start_s: float

    @property
    def pod(self) -> str:
        """The replica's name."""
        return pod(self.replica)


@dataclass(frozen=True, slots=True)
class Spread:
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


class FleetWeek:
    """Replicas over some days, scraped every so many seconds; an incident of each kind for every
    ten of them. `recorded`: with what recording rules keep."""

    def __init__(
        self, replicas: int, *, end_s: int, days: float, every_s: int, recorded: bool = False
    ) -> None:
        self.replicas, self.end_s, self.every_s = replicas, end_s, every_s
        self.metrics = (*METRICS, *RECORDED) if recorded else METRICS
        self.from_s = end_s - int(days * DAY_S)
        self.times = np.arange(self.from_s, end_s + 1, every_s, dtype=np.float64)
        self.planted = tuple(self._plant(days))

    def _plant(self, days: float) -> Iterator[Planted]:
        causes = ("kv_pressure", "target_down", "engine_restarted")
        for at in range(max(1, self.replicas // 10)):
            for place, cause in enumerate(causes):
                share = (at * len(causes) + place + 1) / (self.replicas * 0.3 + 4)
                start_s = self.from_s + 2 * HOUR_S + int(share % 0.9 * days * DAY_S)
                yield Planted(cause, (10 * at + 3 * place) % self.replicas, start_s // 60 * 60)

    def write(self, folder: Path) -> None:
        """Turn it into blocks, one file each."""
        folder.mkdir(parents=True, exist_ok=True)
        text = folder.with_suffix(".om")
        command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "--quiet"]
        engines = [_Engine(self, at) for at in range(self.replicas)]
        first_s = self.from_s // BLOCK_S * BLOCK_S
        for from_s in range(first_s, self.end_s + 1, BLOCK_S):
            rows = slice(*np.searchsorted(self.times, (from_s, from_s + BLOCK_S)).tolist())
            with text.open("w") as out:
                for metric in self.metrics:
                    out.write(f"# TYPE {metric} unknown\n")
                    for engine in engines:
                        engine.write(out, metric, rows)
                out.write("# EOF\n")
            subprocess.run(
                [*command, str(text), str(folder)], check=True, stdout=subprocess.DEVNULL
            )
        text.unlink()


class _Engine:
    """One replica: its load and what was counted by each time."""

    def __init__(self, week: FleetWeek, at: int) -> None:
        times = week.times
        hour = (times % DAY_S) / HOUR_S
        self.at, self.times, self.end_s = at, times, week.end_s
        self.load = np.maximum(0.05, 0.55 + 0.45 * np.sin((hour - 9 + at % 3) * math.pi / 12))
        pressed = np.zeros(len(times), dtype=np.bool_)
        self.gone = np.zeros(len(times), dtype=np.bool_)
        self.born_s = np.full(len(times), float(week.from_s - DAY_S))
        anew = 0
        for one in week.planted:
            if one.replica != at:
                continue
            inside = (times >= one.start_s) & (times < one.start_s + INCIDENT_S)
            if one.cause == "kv_pressure":
                pressed |= inside
            elif one.cause == "target_down":
                self.gone |= inside
            else:
                anew = int(np.searchsorted(times, one.start_s))
                self.born_s[anew:] = one.start_s - 20.0
        step = float(week.every_s)
        self.pressed = pressed
        self.steady_sum = _anew(
            np.cumsum(np.where(pressed, 0, self.load * ARRIVAL_PER_S) * step), anew
        )
        self.pressed_sum = _anew(np.cumsum(np.where(pressed, ARRIVAL_PER_S, 0.0) * step), anew)
        labels = f'namespace="prod",pod="{pod(at)}",instance="10.{at // 250}.0.{at % 250}:8000"'
        self.target = f'{labels},job="vllm"'
        self.labels = f'{self.target},model_name="m",engine="0"'

    def write(self, out: TextIO, metric: str, rows: slice) -> None:
        kept = ~self.gone[rows] if metric != "up" else np.ones(len(self.gone[rows]), dtype=np.bool_)
        tails = [f" {t_s:.0f}\n" for t_s in self.times[rows][kept].tolist()]
        for head, values in self._series(metric, rows):
            texts = [f"{value:.9g}" for value in values[kept].tolist()]
            out.write(
                "".join([head + value + tail for value, tail in zip(texts, tails, strict=True)])
            )

    def _series(self, metric: str, rows: slice) -> Iterator[tuple[str, Floats]]:
        load, pressed = self.load[rows], self.pressed[rows]
        steady, pressing = self.steady_sum[rows], self.pressed_sum[rows]
        begun = steady + pressing
        one = np.ones(len(load))
        name = metric.removeprefix("vllm:")
        if metric == "up":
            yield f"up{{{self.target}}} ", np.where(self.gone[rows], 0.0, 1.0)
        elif metric == "process_start_time_seconds":
            yield f"{metric}{{{self.target}}} ", self.born_s[rows]
        elif metric == "DCGM_FI_DEV_SM_CLOCK":
            yield (
                f'{metric}{{exported_namespace="prod",exported_pod="{pod(self.at)}",pod="dcgm",'
                f'Hostname="node-{self.at}",modelName="{GPUS[self.at % 5 == 4]}",gpu="0"}} ',
                1980 * one,
            )
        elif name in HISTOGRAMS:
            yield from self._histogram(metric, HISTOGRAMS[name], steady, pressing)
        elif metric in RECORDED:
            yield f"{metric}{{{self.labels}}} ", self._recorded(metric, rows)
        else:
            for labels, values in {
                "num_requests_running": {"": np.where(pressed, 24.0, RUNNING * load)},
                "num_requests_waiting": {"": np.where(pressed, 12.0, 0.0)},
                "num_requests_waiting_by_reason": {
                    ',reason="capacity"': np.where(pressed, 12.0, 0.0),
                    ',reason="deferred"': 0 * one,
                },
                "kv_cache_usage_perc": {"": np.where(pressed, 0.995, 0.7 * load)},
                "cache_config_info": {
                    ',block_size="16",num_gpu_blocks="8000",enable_prefix_caching="True"': one
                },
                "num_preemptions_total": {"": pressing / ARRIVAL_PER_S * PREEMPTION_PER_S},
                "prompt_tokens_total": {"": begun * PROMPT_TOKENS},
                "prompt_tokens_by_source_total": {
                    ',source="local_compute"': begun * PROMPT_TOKENS * (1 - HIT_SHARE),
                    ',source="local_cache_hit"': begun * PROMPT_TOKENS * HIT_SHARE,
                },
                "generation_tokens_total": {"": begun * OUTPUT_TOKENS},
                "prefix_cache_queries_total": {"": begun * PROMPT_TOKENS},
                "prefix_cache_hits_total": {"": begun * PROMPT_TOKENS * HIT_SHARE},
                "request_success_total": {
                    ',finished_reason="stop"': begun,
                    ',finished_reason="error"': 0 * one,
                },
            }[name].items():
                yield f"{metric}{{{self.labels}{labels}}} ", values

    def _recorded(self, metric: str, rows: slice) -> Floats:
        """What a recording rule would keep."""
        load, pressed = self.load[rows], self.pressed[rows]
        begun_per_s = np.where(pressed, ARRIVAL_PER_S, load * ARRIVAL_PER_S)
        usual: dict[str, Floats] = {
            "running_avg": np.where(pressed, 24.0, RUNNING * load),
            "waiting_avg": np.where(pressed, 12.0, 0.0),
            "completed_per_s": begun_per_s,
            "generation_tokens_per_s": begun_per_s * OUTPUT_TOKENS,
            "e2e_mean_s": np.where(pressed, 19.0, 3.5),
            "output_tokens_mean": np.full(len(load), OUTPUT_TOKENS),
            "ttft_p99_s": np.where(pressed, 7.0, 0.3),
            "itl_p99_s": np.where(pressed, 0.3, 0.04),
            "cascade_severity": np.where(pressed, 3.0, 0.0),
        }
        return usual[metric.removeprefix("kneewatch:")]

    def _histogram(
        self, metric: str, spread: Spread, steady: Floats, pressing: Floats
    ) -> Iterator[tuple[str, Floats]]:
        for le in (*spread.bounds, math.inf):
            edge = "+Inf" if le == math.inf else repr(float(le))
            parts = _share(spread.usual, le) * steady + _share(spread.pressed, le) * pressing
            yield f'{metric}_bucket{{{self.labels},le="{edge}"}} ', spread.each * parts
        yield f"{metric}_count{{{self.labels}}} ", spread.each * (steady + pressing)
        total = _mean(spread.usual) * steady + _mean(spread.pressed) * pressing
        yield f"{metric}_sum{{{self.labels}}} ", spread.each * total


METRICS: Sequence[str] = (
    *(
        f"vllm:{name}"
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "num_requests_waiting_by_reason",
            "kv_cache_usage_perc",
            "cache_config_info",
            "num_preemptions_total",
            "prompt_tokens_total",
            "prompt_tokens_by_source_total",
            "generation_tokens_total",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "request_success_total",
            *HISTOGRAMS,
        )
    ),
    "process_start_time_seconds",
    "up",
    "DCGM_FI_DEV_SM_CLOCK",
)


RECORDED = tuple(
    f"kneewatch:{key}"
    for key in (
        "running_avg",
        "waiting_avg",
        "completed_per_s",
        "generation_tokens_per_s",
        "e2e_mean_s",
        "output_tokens_mean",
        "ttft_p99_s",
        "itl_p99_s",
        "cascade_severity",
    )
)


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


def main() -> None:
    """Write the blocks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("replicas", type=int)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--every", type=int, default=60)
    parser.add_argument("--end", type=int)
    given = parser.parse_args()
    end_s = given.end or int(time.time()) // HOUR_S * HOUR_S
    FleetWeek(given.replicas, end_s=end_s, days=given.days, every_s=given.every).write(given.folder)
    print(end_s)


if __name__ == "__main__":
    main()
