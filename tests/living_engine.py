"""One replica of a living fleet: requests arrive, queue, run and finish; its page counts them.

A fluid model, moved on by each scrape: how many requests run follows from how many arrive and how
long each takes, so that a page's numbers agree with each other, as a real server's do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.signals.table import ITL_BOUNDS_S, TTFT_BOUNDS_S

SECONDS_LE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
              120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
TOKENS_LE = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0)
XFER_LE = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
STEP_S = 5.0
SWAP_S = 0.8
"""How long an adapter takes to be loaded."""

BLOCK_TOKENS = 16
IDLE_FILES = 40.0
OLD = {
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries_total": "vllm:gpu_prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total": "vllm:gpu_prefix_cache_hits_total",
    "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
    "vllm:num_requests_waiting_by_reason": "unknown_waiting",
    "vllm:prompt_tokens_by_source_total": "unknown_prompt_tokens",
    "vllm:request_prefill_kv_computed_tokens": "unknown_computed_tokens",
}
"""Names of metrics in vLLM 0.10; those that it lacks get a name that is not read."""

Own = tuple[tuple[str, str], ...]
Row = tuple[str, Own, float]
"""A series of a page: name, own labels, value."""

Floats = npt.NDArray[np.float64]


class Work(Struct, frozen=True):
    """What a replica is asked for, and how it works. `arrival_per_s` None: its share of the
    pool's."""

    arrival_per_s: float | None = None
    prompt_tokens: float = 1500.0
    output_tokens: float = 200.0
    hit_share: float = 0.7
    itl_s: float = 0.02
    seats: float = 64.0
    prefill_tokens_per_s: float = 20_000.0
    capacity_tokens: float = 640_000.0
    backlog: float = 0.0
    """Requests that an offline client keeps in the queue."""
    hangs: bool = False
    hides: bool = False
    """Whether a hung server's gauges show no request."""
    failed_share: float = 0.0
    role: str = ""
    transfer_s: float = 0.035
    adapters: int = 0
    """How many LoRA adapters clients ask for; 0: the server has none."""
    slots: int = 4
    clock_mhz: float = 1980.0
    temperature_c: float = 55.0
    power_watts: float = 550.0
    xid: float = 0.0
    throttled: float = 0.0
    """Seconds per second for which the GPU is throttled by heat."""
    is_old: bool = False
    """Whether its vLLM is 0.10."""


class _Seen:
    """A histogram: what was observed since the last page, and all before."""

    def __init__(self, bounds: tuple[float, ...], width: float) -> None:
        self._bounds, self._width = (*bounds, math.inf), width
        edges = ("+Inf" if le == math.inf else repr(float(le)) for le in self._bounds)
        self.edges = [(("le", edge),) for edge in edges]
        self._below = np.zeros(len(self._bounds))
        self._total = self._all = 0.0
        self.sum = self.count = 0.0

    def told(self, random: np.random.Generator) -> tuple[list[float], float, float]:
        """The buckets, count and sum; the newest observations are spread around their mean."""
        whole = math.floor(self.count + random.random())
        if whole:
            sampled = min(whole, 60)
            values = self.sum / self.count * random.lognormal(0.0, self._width, sampled)
            weight = whole / sampled
            self._below += np.searchsorted(np.sort(values), self._bounds, "right") * weight
            self._all += whole
            self._total += float(values.sum()) * weight
        self.sum = self.count = 0.0
        return self._below.tolist(), self._all, self._total


class Engine:
    """The server of one pod, from its start."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(abs(seed))
        self._counts: dict[tuple[str, Own], float] = {}
        self._seen: dict[str, _Seen] = {}
        self.running = self.waiting = 0.0
        self._preempted = self._swapped = 0.0
        self._adapters: tuple[str, ...] = ()
        self._sets = 0
        self._left_s = 0.0
        self._open = 0.0

    def live(self, work: Work, arrival_per_s: float, passed_s: float) -> None:
        """Let some time pass."""
        steps = max(1, round(passed_s / STEP_S))
        for _ in range(steps if passed_s else 0):
            self._step(work, arrival_per_s, passed_s / steps)

    def _step(self, work: Work, arrival_per_s: float, dt_s: float) -> None:
        arrived = float(self._random.poisson(arrival_per_s * dt_s))
        if work.hangs:
            self._open += arrived
            if not work.hides:
                self.waiting += arrived
            return
        self._open = 0.0
        if work.backlog:
            arrived = max(0.0, work.backlog - self.waiting)
        computed = (1 - work.hit_share) * work.prompt_tokens if work.role != "decode" else 0.0
        prefill_s = computed / work.prefill_tokens_per_s + 0.01
        itl_s = work.itl_s * (1 + self.running / 128) * 1980.0 / work.clock_mhz
        transfer_s = work.transfer_s if work.role == "decode" else 0.0
        outputs = 1.0 if work.role == "prefill" else work.output_tokens
        decode_s = (outputs - 1) * itl_s
        swap_s = SWAP_S if work.adapters > work.slots else 0.0
        service_s = prefill_s + transfer_s + decode_s + swap_s
        held = work.prompt_tokens + outputs / 2
        fits = work.capacity_tokens / held
        seats = min(work.seats, fits)
        if work.adapters > work.slots:  # only requests of loaded adapters run
            seats = min(seats, max(2.0, 0.6 * arrival_per_s * service_s))
        self.waiting += arrived
        free = max(0.0, seats - self.running) + min(self.running, seats) * dt_s / service_s
        admitted = min(self.waiting, free)
        settled = admitted / dt_s * service_s
        left = settled + (self.running - settled) * math.exp(-dt_s / service_s)
        done = self.running + admitted - left
        rate = max(done / dt_s, 0.05)
        queue_s = 0.002 + max(0.0, self.waiting - admitted) / rate
        self.waiting -= admitted
        self.running = left
        if fits <= work.seats and self.waiting >= 1:  # the cache is full: requests are evicted
            lost = min(0.1 * self.running, 1.0) * dt_s
            self._add("vllm:num_preemptions_total", (), lost)
        first_s = queue_s + prefill_s + transfer_s + swap_s
        self._serve(work, admitted, done, computed, outputs, dt_s)
        self._observe("time_to_first_token_seconds", TTFT_BOUNDS_S, first_s, admitted, 0.35)
        self._observe("request_queue_time_seconds", SECONDS_LE, queue_s, admitted, 0.3)
        self._observe("request_prefill_time_seconds", SECONDS_LE, prefill_s, admitted, 0.3)
        gaps = done * (outputs - 1)
        self._observe("inter_token_latency_seconds", ITL_BOUNDS_S, itl_s, gaps, 0.2)
        self._observe("request_decode_time_seconds", SECONDS_LE, decode_s, done, 0.3)
        self._observe("e2e_request_latency_seconds", SECONDS_LE, first_s + decode_s, done, 0.3)
        self._observe("request_prompt_tokens", TOKENS_LE, work.prompt_tokens, done, 0.3)
        self._observe("request_generation_tokens", TOKENS_LE, outputs, done, 0.3)
        self._observe("request_prefill_kv_computed_tokens", TOKENS_LE, computed, done, 0.4)
        if transfer_s:
            self._observe("nixl_xfer_time_seconds", XFER_LE, transfer_s, admitted, 0.15)
            moved = work.prompt_tokens * 131_072.0 * admitted
            self._add("vllm:nixl_bytes_transferred_sum", (), moved)
            self._add("vllm:nixl_bytes_transferred_count", (), admitted)
        if work.adapters:
            self._turn(work, arrival_per_s)

    def _serve(
        self, work: Work, admitted: float, done: float, computed: float, outputs: float, dt_s: float
    ) -> None:
        prompts = admitted * work.prompt_tokens
        failed = done * work.failed_share
        source = "vllm:prompt_tokens_by_source_total"
        there = prompts if work.role == "decode" else 0.0
        own = admitted * computed
        self._add("vllm:prompt_tokens_total", (), prompts)
        self._add(source, (("source", "local_compute"),), own)
        self._add(source, (("source", "local_cache_hit"),), prompts - own - there)
        self._add(source, (("source", "external_kv_transfer"),), there)
        self._add("vllm:generation_tokens_total", (), done * outputs)
        self._add("vllm:prefix_cache_queries_total", (), prompts)
        self._add("vllm:prefix_cache_hits_total", (), prompts - own - there)
        self._add("vllm:num_preemptions_total", (), 0.0)
        finished = "vllm:request_success_total"
        self._add(finished, (("finished_reason", "stop"),), done - failed)
        self._add(finished, (("finished_reason", "length"),), 0.0)
        self._add(finished, (("finished_reason", "abort"),), 0.0)
        self._add(finished, (("finished_reason", "error"),), failed)
        call = ("handler", "/v1/chat/completions"), ("method", "POST")
        self._add("http_requests_total", (*call, ("status", "2xx")), done - failed)
        self._add("http_requests_total", (*call, ("status", "5xx")), failed)
        steps = dt_s / (work.itl_s * (1 + self.running / 128)) if self.running else 0.0
        self._add("vllm:iteration_tokens_total_sum", (), own + done * outputs)
        self._add("vllm:iteration_tokens_total_count", (), steps)
        if work.role == "prefill":
            self._add("vllm:nixl_num_kv_expired_reqs_total", (), 0.0)

    def _turn(self, work: Work, arrival_per_s: float) -> None:
        wanted = min(work.adapters, work.slots, math.ceil(self.running) or 1)
        if work.adapters > work.slots or len(self._adapters) != wanted:
            chosen = self._random.choice(work.adapters, size=wanted, replace=False)
            chosen_names = tuple(sorted(f"tenant-{at}" for at in chosen))
            self._sets += chosen_names != self._adapters
            self._adapters = chosen_names

    def _add(self, name: str, own: Own, more: float) -> None:
        key = name, own
        self._counts[key] = self._counts.get(key, 0.0) + more

    def _observe(
        self, metric: str, bounds: tuple[float, ...], value: float, count: float, width: float
    ) -> None:
        """Count observations that are spread around a value."""
        seen = self._seen.setdefault(metric, _Seen(bounds, width))
        seen.sum += value * count
        seen.count += count

    def page(self, work: Work, t_s: float) -> Iterator[Row]:
        """The series of its page now, apart from those about the process."""
        rows = self._page(work, t_s)
        return map(_as_old, rows) if work.is_old else rows

    def _page(self, work: Work, t_s: float) -> Iterator[Row]:
        outputs = 1.0 if work.role == "prefill" else work.output_tokens
        hidden = work.hangs and work.hides
        shown = 0.0 if hidden else round(self.running)
        waiting = 0.0 if hidden else round(self.waiting)
        deferred = waiting if work.adapters > work.slots else 0.0
        usage = min(0.998, shown * (work.prompt_tokens + outputs / 2) / work.capacity_tokens)
        yield "vllm:num_requests_running", (), shown
        yield "vllm:num_requests_waiting", (), waiting
        reason = "vllm:num_requests_waiting_by_reason"
        yield reason, (("reason", "capacity"),), waiting - deferred
        yield reason, (("reason", "deferred"),), deferred
        yield "vllm:kv_cache_usage_perc", (), usage
        blocks = str(round(work.capacity_tokens / BLOCK_TOKENS))
        config = (
            ("block_size", str(BLOCK_TOKENS)),
            ("num_gpu_blocks", blocks),
            ("enable_prefix_caching", "True"),
        )
        yield "vllm:cache_config_info", config, 1.0
        in_flight = round(self.running + self.waiting + (self._open if hidden else 0.0))
        yield "process_open_fds", (), IDLE_FILES + in_flight
        if work.adapters:
            names = ",".join(self._adapters)
            adapters = (
                ("max_lora", str(work.slots)),
                ("running_lora_adapters", names),
                ("waiting_lora_adapters", ""),
            )
            yield "vllm:lora_requests_info", adapters, t_s
        for (name, own), value in self._counts.items():
            yield name, own, float(math.floor(value))
        for metric, seen in self._seen.items():
            below, count, total = seen.told(self._random)
            for le, many in zip(seen.edges, below, strict=True):
                yield f"vllm:{metric}_bucket", le, many
            yield f"vllm:{metric}_count", (), count
            yield f"vllm:{metric}_sum", (), total


PART = re.compile(r"(.*?)(_bucket|_count|_sum)?")


def _as_old(row: Row) -> Row:
    """A series as vLLM 0.10 names it; without one of its own, it gets a name that is not read."""
    metric, part = PART.fullmatch(row[0]).groups("")  # type: ignore[union-attr]
    return OLD.get(metric, metric) + part, *row[1:]


def gpu_page(work: Work, load: float) -> Iterator[tuple[str, float]]:
    """What DCGM shows of the replica's GPU."""
    if work.xid:
        work, load = replace(work, clock_mhz=0.0, power_watts=0.0), 0.0
    yield "DCGM_FI_DEV_SM_CLOCK", work.clock_mhz
    yield "DCGM_FI_DEV_GPU_TEMP", work.temperature_c
    yield "DCGM_FI_DEV_POWER_USAGE", work.power_watts if load else min(90.0, work.power_watts)
    yield "DCGM_FI_DEV_GPU_UTIL", 95.0 if load else 0.0
    yield "DCGM_FI_DEV_XID_ERRORS", work.xid
