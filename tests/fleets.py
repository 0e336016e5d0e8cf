"""A made-up fleet with planted incidents, as blocks of a real Prometheus.

    python -m tests.fleets FOLDER REPLICAS [HISTORY]

writes the blocks for `prometheus --storage.tsdb.path=FOLDER` and prints the fleet's last moment.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from msgspec import Struct
from msgspec.structs import replace

STEP_S = 15
DETAIL_S = 180
"""How long before the end all series are there; before that only the gauges."""

UP_S = 2 * DETAIL_S
"""How long before the end `up` is there: a replica that is down has failed for a while."""

HISTORY_STEP_S = 240
HISTORY_S = 2 * 3600
BLOCK_S = 2 * 3600
"""What promtool puts in one block."""

TTFT_LE = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
ITL_LE = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TOKENS_LE = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
SECONDS_LE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
NEW_TOKENS = 64.0
"""What is new in a prompt that hits the prefix cache."""


class Replica(Struct, frozen=True):
    """How one replica behaves; `plan` is what is wrong with it, empty for nothing."""

    name: str
    pool: str
    gpu: str = "NVIDIA H100 80GB HBM3"
    model: str = ""
    plan: str = ""
    running: float = 8.0
    waiting: float = 0.0
    kv_usage_ratio: float = 0.55
    preemption_per_s: float = 0.0
    arrival_per_s: float = 2.0
    ttft_s: float = 0.15
    queue_s: float = 0.01
    itl_s: float = 0.02
    hit_share: float = 0.95
    prompt_tokens: float = 1500.0
    capacity_blocks: int = 40_000
    sm_clock_mhz: float = 1980.0
    temperature_c: float = 55.0
    xid: float = 0.0
    age_s: float = 1_000_000.0
    ends_before_s: float = 0.0


class Fleet(Struct, frozen=True):
    """Replicas, and which of them have what planted."""

    replicas: tuple[Replica, ...]

    def planted(self, plan: str) -> list[str]:
        """The replicas with an incident."""
        return [replica.name for replica in self.replicas if replica.plan == plan]


def fleet(count: int) -> Fleet:
    """A fleet of so many replicas: four pools, and one of each incident."""
    rag, mixed, idle = max(2, count * 15 // 100), max(2, count * 15 // 100), max(1, count // 10)
    chat = count - rag - mixed - idle
    replicas = [Replica(f"chat-{at}", "chat") for at in range(chat)]
    planted: tuple[dict[str, object], ...] = (
        {
            "plan": "kv_pressure",
            "kv_usage_ratio": 0.99,
            "preemption_per_s": 4.0,
            "waiting": 6.0,
            "ttft_s": 3.0,
        },
        {
            "plan": "replica_imbalance",
            "running": 40.0,
            "waiting": 12.0,
            "arrival_per_s": 9.0,
            "kv_usage_ratio": 0.85,
        },
        {
            "plan": "bad_node",
            "itl_s": 0.06,
            "sm_clock_mhz": 1200.0,
            "temperature_c": 86.0,
        },
        {"plan": "cold_replica", "age_s": 120.0, "hit_share": 0.4, "ttft_s": 0.9},
        {"plan": "target_down", "ends_before_s": 60.0},
    )
    for at, changes in enumerate(planted[: max(0, chat - 4)]):
        replicas[at] = replace(replicas[at], **changes)
    replicas += [
        Replica(f"rag-{at}", "rag", plan="routing_dilution", hit_share=0.15, capacity_blocks=2000)
        for at in range(rag)
    ]
    slow = Replica("", "mixed", gpu="NVIDIA A100 80GB", plan="mixed_tiers", ttft_s=0.6, itl_s=0.05)
    for at in range(mixed):
        kind = slow if at % 2 else Replica("", "mixed")
        replicas.append(replace(kind, name=f"mixed-{at}"))
    replicas += [
        Replica(
            f"idle-{at}",
            "idle",
            plan="underused",
            model="meta-llama/Llama-3.1-8B-Instruct",
            running=0.1,
            arrival_per_s=0.02,
            itl_s=0.01,
            kv_usage_ratio=0.01,
            capacity_blocks=27_000,
        )
        for at in range(idle)
    ]
    return Fleet(tuple(replicas))


def write_blocks(folder: Path, planned: Fleet, *, end_s: int, history_s: int = HISTORY_S) -> None:
    """Turn a fleet into blocks; all of it ends at `end_s`.

    A file a block: promtool reads the whole of a file for each block in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = folder.with_suffix(".om")
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "--quiet"]
    first_s = min(end_s - history_s, end_s - DETAIL_S) // BLOCK_S * BLOCK_S
    for from_s in range(first_s, end_s + 1, BLOCK_S):
        write_text(
            text, planned, end_s=end_s, history_s=history_s, only=range(from_s, from_s + BLOCK_S)
        )
        subprocess.run([*command, str(text), str(folder)], check=True, stdout=subprocess.DEVNULL)
    text.unlink()


def write_text(
    text: Path, planned: Fleet, *, end_s: int, history_s: int = HISTORY_S, only: range | None = None
) -> None:
    """Write a fleet as OpenMetrics; `only` the seconds of a range."""
    with text.open("w") as out:
        for metric in families():
            out.write(f"# TYPE {metric} unknown\n")
            for at, replica in enumerate(planned.replicas):
                times = [
                    t_s
                    for t_s in _times(metric, replica, end_s=end_s, history_s=history_s)
                    if only is None or t_s in only
                ]
                if times:
                    _write(out, metric, replica, at, end_s=end_s, times=times)
        out.write("# EOF\n")


def _times(metric: str, replica: Replica, *, end_s: int, history_s: int) -> Iterator[int]:
    """When a metric of a replica was scraped."""
    if metric.removeprefix("vllm:") in GAUGES:
        born_s = max(end_s - history_s, int(end_s - replica.age_s))
        yield from range(born_s, end_s - DETAIL_S, HISTORY_STEP_S)
    if metric == "up":
        yield from range(end_s - UP_S, end_s + 1, STEP_S)
    else:
        yield from range(end_s - DETAIL_S, end_s - int(replica.ends_before_s) + 1, STEP_S)


Curve = tuple[str, str, float, float]
"""A series' further labels, its name's ending, its value at the end, its growth a second."""


def families() -> Sequence[str]:
    """The names of all metrics of a fleet, without the endings of histograms."""
    return (
        *(f"vllm:{name}" for name in GAUGES),
        *(f"vllm:{name}" for name in COUNTERS),
        *(f"vllm:{name}" for name in HISTOGRAMS),
        "vllm:cache_config_info",
        "process_start_time_seconds",
        "up",
        "DCGM_FI_DEV_SM_CLOCK",
        "DCGM_FI_DEV_GPU_TEMP",
        "DCGM_FI_DEV_XID_ERRORS",
    )


GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "request_success_total",
    "prompt_tokens_by_source_total",
    "num_requests_waiting_by_reason",
)
HISTOGRAMS = {
    "time_to_first_token_seconds": TTFT_LE,
    "inter_token_latency_seconds": ITL_LE,
    "request_prompt_tokens": TOKENS_LE,
    "request_generation_tokens": TOKENS_LE,
    "request_prefill_kv_computed_tokens": TOKENS_LE,
    "request_queue_time_seconds": SECONDS_LE,
    "e2e_request_latency_seconds": SECONDS_LE,
}


def curves(metric: str, replica: Replica, end_s: int) -> Iterator[Curve]:
    """The series of a replica's metric."""
    name = metric.removeprefix("vllm:")
    levels = {
        "num_requests_running": replica.running,
        "num_requests_waiting": replica.waiting,
        "kv_cache_usage_perc": replica.kv_usage_ratio,
        "process_start_time_seconds": end_s - replica.age_s,
        "up": 0.0 if replica.ends_before_s else 1.0,
        "DCGM_FI_DEV_SM_CLOCK": replica.sm_clock_mhz,
        "DCGM_FI_DEV_GPU_TEMP": replica.temperature_c,
        "DCGM_FI_DEV_XID_ERRORS": replica.xid,
    }
    if name in levels:
        yield "", "", levels[name], 0.0
    elif name == "cache_config_info":
        yield f',block_size="16",num_gpu_blocks="{replica.capacity_blocks}"', "", 1.0, 0.0
    elif name == "num_requests_waiting_by_reason":
        yield ',reason="capacity"', "", replica.waiting, 0.0
        yield ',reason="deferred"', "", 0.0, 0.0
    elif name in HISTOGRAMS:
        yield from _histogram(name, replica)
    else:
        for labels, per_s in _rates(name, replica):
            yield labels, "", 1e6 + per_s * DETAIL_S, per_s


def _rates(name: str, replica: Replica) -> Iterator[tuple[str, float]]:
    prompts_per_s = replica.arrival_per_s * replica.prompt_tokens
    computed_per_s = replica.arrival_per_s * _computed(replica)
    if name == "prompt_tokens_by_source_total":
        yield ',source="local_compute"', computed_per_s
        yield ',source="local_cache_hit"', prompts_per_s - computed_per_s
    elif name == "request_success_total":
        yield ',finished_reason="stop"', replica.arrival_per_s
        yield ',finished_reason="error"', 0.0
    else:
        yield (
            "",
            {
                "num_preemptions_total": replica.preemption_per_s,
                "prompt_tokens_total": prompts_per_s,
                "generation_tokens_total": replica.running / replica.itl_s,
                "prefix_cache_queries_total": prompts_per_s,
                "prefix_cache_hits_total": prompts_per_s - computed_per_s,
            }[name],
        )


def _computed(replica: Replica) -> float:
    return replica.hit_share * NEW_TOKENS + (1 - replica.hit_share) * replica.prompt_tokens


def _histogram(name: str, replica: Replica) -> Iterator[Curve]:
    """Two kinds of observations: the usual, and the rest."""
    written = replica.running / replica.itl_s / replica.arrival_per_s
    usual, rest, share, per_s = {
        "time_to_first_token_seconds": (
            replica.ttft_s,
            1.6 * replica.ttft_s,
            0.9,
            replica.arrival_per_s,
        ),
        "inter_token_latency_seconds": (
            replica.itl_s,
            2 * replica.itl_s,
            0.95,
            replica.running / replica.itl_s,
        ),
        "request_prompt_tokens": (
            replica.prompt_tokens,
            replica.prompt_tokens,
            1.0,
            replica.arrival_per_s,
        ),
        "request_prefill_kv_computed_tokens": (
            NEW_TOKENS,
            replica.prompt_tokens,
            replica.hit_share,
            replica.arrival_per_s,
        ),
        "request_generation_tokens": (written, written, 1.0, replica.arrival_per_s),
        "request_queue_time_seconds": (
            replica.queue_s,
            2 * replica.queue_s,
            0.5,
            replica.arrival_per_s,
        ),
        "e2e_request_latency_seconds": (8.0, 16.0, 0.9, replica.arrival_per_s),
    }[name]
    for le in (*HISTOGRAMS[name], float("inf")):
        at_most = per_s * (share * (usual <= le) + (1 - share) * (rest <= le))
        edge = "+Inf" if le == float("inf") else repr(float(le))
        yield f',le="{edge}"', "_bucket", at_most * 1e4, at_most
    yield "", "_count", per_s * 1e4, per_s
    mean = per_s * (share * usual + (1 - share) * rest)
    yield "", "_sum", mean * 1e4, mean


def _write(
    out: TextIO, metric: str, replica: Replica, at: int, *, end_s: int, times: Sequence[int]
) -> None:
    host = f"10.{at // 62500}.{at // 250 % 250}.{at % 250}"
    gpu = metric.startswith("DCGM")
    labels = f'namespace="{replica.pool}",pod="{replica.name}",instance="{host}:8000",job="vllm"'
    if gpu:
        labels = (
            f'exported_namespace="{replica.pool}",exported_pod="{replica.name}",namespace="gpu",'
            f'pod="dcgm-{at}",Hostname="node-{at}",modelName="{replica.gpu}",gpu="0"'
        )
    elif metric.startswith("vllm:"):
        labels += f',node="node-{at}",engine="0"'
        labels += f',model_name="{replica.model or f"m-{replica.pool}"}"'
    for more, ending, value, per_s in curves(metric, replica, end_s):
        head = f"{metric}{ending}{{{labels}{more}}}"
        for t_s in times:
            out.write(f"{head} {value + per_s * (t_s - end_s):.10g} {t_s}\n")


def main() -> None:
    """Write the blocks of a fleet that ends now."""
    folder, count, *rest = sys.argv[1:]
    end_s = int(time.time()) // STEP_S * STEP_S
    history_s = int(rest[0]) if rest else HISTORY_S
    write_blocks(Path(folder), fleet(int(count)), end_s=end_s, history_s=history_s)
    print(end_s)


if __name__ == "__main__":
    main()
