"""What a server has counted, by vLLM's own names without their prefix."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

TTFT_LE = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
           10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
ITL_LE = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
          20.0, 40.0, 80.0)  # fmt: skip
REQUEST_LE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
              120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
ITERATION_LE = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

OF_REQUEST_S = tuple(
    f"request_{part}_time_seconds" for part in ("queue", "inference", "prefill", "decode")
)
OF_LENGTH = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
)
"""Histograms whose buckets go up to the longest request that the server takes."""


class Histogram:
    """Observations by bucket; each bucket's own, not cumulative."""

    __slots__ = ("edges", "own", "sum")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.own = [0.0] * (len(self.edges) + 1)
        self.sum = 0.0

    def add(self, value: float, times: float = 1) -> None:
        """Observe a value so many times."""
        self.own[bisect_left(self.edges, value)] += times
        self.sum += value * times


def length_edges(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... up to the longest (vllm/v1/metrics/loggers.py, build_1_2_5_buckets)."""
    edges = [m * 10**power for power in range(8) for m in (1, 2, 5)]
    return tuple(edge for edge in edges if edge <= longest)


class Counters:
    """Counters by name, and by name and label (`name|label=value`); histograms by name."""

    def __init__(self, max_model_len: int) -> None:
        self.counts: defaultdict[str, float] = defaultdict(float)
        edges = length_edges(max_model_len)
        self.histograms = {
            "time_to_first_token_seconds": Histogram(TTFT_LE),
            "inter_token_latency_seconds": Histogram(ITL_LE),
            "request_time_per_output_token_seconds": Histogram(ITL_LE),
            "e2e_request_latency_seconds": Histogram(REQUEST_LE),
            **{name: Histogram(REQUEST_LE) for name in OF_REQUEST_S},
            **{name: Histogram(edges) for name in OF_LENGTH},
            "request_params_n": Histogram((1, 2, 5, 10, 20)),
            "iteration_tokens_total": Histogram(ITERATION_LE),
            "request_num_preemptions": Histogram((1, 2, 3, 4, 5, 10, 20)),
        }
