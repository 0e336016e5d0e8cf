"""SGLang's own collector classes, without a GPU: `python -m tests.lab.sglang [WHEEL [TEXT]]`.

Without WHEEL, prints what is said of the stored pages. With it, takes the classes from SGLang's
wheel (`pip download --no-deps sglang==0.5.23`), lets a small engine model by SGLang's rules
(tests/simulator/sglang_engine.py) write its metrics with them as its scheduler does, and stores the
pages, which tests replay. With TEXT, judges the cases that have it in their name or machine, and
stores nothing. Ends with the number of cases that are not diagnosed as they were planted.

The modules that the classes import, and which need torch, are replaced: they hold settings.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import get_context
from random import Random
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from tests.hard_cases import shown
from tests.hard_judging import Books, judge, said
from tests.simulator.cases import Case
from tests.simulator.page import START_S
from tests.simulator.requests import Request, Source
from tests.simulator.server import GPU_SCRAPE_S, Server, scrapes
from tests.simulator.sglang_cases import (
    StoredCase,
    recorded,
    replayed,
    sglang_cases,
    store,
    stored,
)
from tests.simulator.sglang_engine import SglangEngine

WHEEL, METRICS_FOLDER = "SGLANG_LAB_WHEEL", "PROMETHEUS_MULTIPROC_DIR"
LABELS = {"model_name": "served", "engine_type": "unified"}
RANKS = {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
SEED = 1
PAUSE_S, PAUSED_RATIO = 0.6, 0.05
"""Prompts stall streams if this share of the time between tokens is in gaps of 0.6 s and more."""


class Namespace:
    """Settings that are all unset."""

    prefill_delayer_max_delay_passes = 30

    def __getattr__(self, name: str) -> None:
        """None for each setting."""

    def is_config_namespace_published(self, _name: str) -> bool:
        """No settings are published."""
        return False


class Unused(Enum):
    """An enumeration that the classes name and do not use here."""

    NULL = "null"


def collectors() -> Any:  # noqa: ANN401
    """The module of SGLang's collector classes."""
    wheel = os.environ[WHEEL]
    for name in ("sglang", *(f"sglang.srt{each}" for each in ("", ".observability", ".utils"))):
        module = ModuleType(name)
        module.__path__ = [f"{wheel}/{name.replace('.', '/')}"]
        sys.modules[name] = module
    sys.modules["sglang.srt.utils"].get_bool_env_var = lambda *_: False  # type: ignore[attr-defined]
    settings = ("context", "disagg", "observability", "parallel", "schedule", "serving")
    replaced: dict[str, dict[str, Any]] = {
        "disaggregation.utils": {"DisaggregationMode": Unused},
        "model_executor.forward_batch_info": {"ForwardMode": Unused},
        "runtime_context": {
            "exports_expert_balancedness_to_prometheus": lambda: False,
            **{f"get_{name}": Namespace for name in settings},
        },
        "server_args": {"ServerArgs": object},
        "utils.nvtx_utils": dict.fromkeys(
            ("NVTX_SCHEDULER_ENABLED", "profile_range", "scheduler_nvtx_method")
        ),
    }
    for name, members in replaced.items():
        module = ModuleType(f"sglang.srt.{name}")
        vars(module).update(members)
        sys.modules[module.__name__] = module
    return importlib.import_module("sglang.srt.observability.metrics_collector")


class Collectors:
    """The collectors of a server, which the engine writes to."""

    def __init__(self, *, tokens: int, page_size: int) -> None:
        self._module = collectors()
        self._scheduler = self._module.SchedulerMetricsCollector(
            labels=LABELS | RANKS, server_args=None
        )
        self._tokenizer = self._module.TokenizerMetricsCollector(labels=LABELS)
        self._stats = self._module.SchedulerStats()
        http = importlib.import_module("sglang.srt.observability.http_request_metrics")
        http.init_http_request_metrics()
        self._responses = vars(http)["_http_request_metrics"].responses_total
        self._drafts: dict[str, float] = defaultdict(float)
        self._rest: dict[str, float] = defaultdict(float)
        self._between_s = self._paused_s = 0.0
        self._scheduler.emit_constants(
            max_total_num_tokens=tokens,
            max_total_num_tokens_swa=None,
            weight_memory_usage_gb=15.0,
            kv_cache_memory_usage_gb=45.0,
            graph_memory_usage_gb={"decode": 1.0},
            max_running_requests_under_SLO=None,
            page_size=page_size,
            num_pages=tokens // page_size,
            context_len=32_768,
            startup_available_gpu_memory_gb=10.0,
        )

    @property
    def gaps_s(self) -> tuple[float, float]:
        """Seconds between tokens so far, and those of them in pauses."""
        return self._between_s, self._paused_s

    def page(self) -> str:
        """The page now, as several processes write it together."""
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry).decode()

    def gauges(self, engine: SglangEngine, running: int) -> None:
        """Set the gauges."""
        stats, scheduler, count = self._stats, engine.scheduler, self._module.QueueCount
        size, blocks = engine.launch.block_size, scheduler.blocks
        pool = blocks.usable * size
        used = round(blocks.usage_ratio * pool)
        stats.num_running_reqs = count(total=running)
        stats.num_queue_reqs = count(total=len(scheduler.waiting))
        stats.num_decode_transfer_queue_reqs = count(total=engine.in_transfer)
        stats.kv_used_tokens = stats.num_used_tokens = used
        stats.kv_evictable_tokens = round(blocks.evictable * size)
        stats.kv_available_tokens = pool - used - stats.kv_evictable_tokens
        stats.full_token_usage = used / pool
        stats.token_usage = round(used / pool, 2)
        stats.new_token_ratio = engine.new_token_ratio
        drafts = self._drafts
        if drafts["drafts"]:
            stats.spec_accept_length = 1 + drafts["accepted"] / drafts["drafts"]
            stats.spec_accept_rate = drafts["accepted"] / drafts["drafted"]
            drafts.clear()
        self._scheduler.log_stats(stats)

    def prefilled(self, computed: float, cached: float, again: float) -> None:
        """Count a batch of prompts."""
        self._scheduler.increment_realtime_tokens(
            dp_cooperation_info=None,
            prefill_compute_tokens=self._whole("computed", computed),
            prefill_cache_tokens=self._whole("cached", cached),
        )
        self._scheduler.increment_effective_prefill_tokens(
            input_tokens=self._whole("input", computed - again),
            device_hit_tokens=self._whole("hits", cached),
            host_hit_tokens=0,
            storage_hit_tokens=0,
        )
        self._scheduler.increment_prefill_cuda_graph_pass(value=False)

    def scheduled(self, queue_s: float) -> None:
        """Observe the time in the queue."""
        self._scheduler.observe_queue_time(queue_s)
        self._scheduler.observe_per_stage_req_latency("prefill_waiting", queue_s)

    def first_token(self, ttft_s: float, prefill_s: float) -> None:
        """Observe the first token."""
        self._scheduler.observe_per_stage_req_latency("prefill_forward", prefill_s)
        self._tokenizer.observe_time_to_first_token(LABELS, ttft_s, stream=True)
        self._answered(200)

    def decoded(self, tokens: float, steps: int) -> None:
        """Count the tokens of decode steps."""
        whole = self._whole("decoded", tokens)
        self._scheduler.increment_realtime_tokens(dp_cooperation_info=None, decode_tokens=whole)
        for _ in range(steps):
            self._scheduler.increment_decode_cuda_graph_pass(value=True)

    def between_tokens(self, gap_s: float, times: int) -> None:
        """Observe gaps between tokens."""
        self._between_s += gap_s * times
        self._paused_s += gap_s * times if gap_s >= PAUSE_S else 0.0
        self._tokenizer.observe_inter_token_latency(LABELS, gap_s * times, times)

    def drafted(self, drafts: float, accepted: float, drafted: float) -> None:
        """Add verified drafts, until the gauges are set."""
        for name, value in (("drafts", drafts), ("accepted", accepted), ("drafted", drafted)):
            self._drafts[name] += value

    def retracted(self, request: Request) -> None:
        """Count a retraction."""
        self._scheduler.increment_retracted_reqs(
            num_retracted_reqs=1,
            num_retracted_input_tokens=request.prompt_tokens,
            num_retracted_output_tokens=int(request.generated),
        )

    def finished(self, request: Request, e2e_s: float, decode_s: float) -> None:
        """Observe a request that ended."""
        if request.hung_up:
            self._tokenizer.observe_one_aborted_request(LABELS)
            return
        self._tokenizer.observe_one_finished_request(
            LABELS,
            prompt_tokens=request.prompt_tokens,
            generation_tokens=request.output_tokens,
            cached_tokens=request.hit_tokens,
            e2e_latency=e2e_s,
            has_grammar=False,
            is_streaming=True,
            time_per_output_token=decode_s / max(1, request.output_tokens - 1),
        )

    def failed(self, *, transfer: bool) -> None:
        """Count a call that fails."""
        self._answered(503)
        if transfer:
            self._scheduler.increment_transfer_failed_reqs()

    def _answered(self, status: int) -> None:
        labels = {"endpoint": "/v1/chat/completions", "method": "POST"}
        self._responses.labels(**labels, status_code=str(status)).inc()

    def _whole(self, name: str, tokens: float) -> int:
        """The tokens as a whole number; what is left is counted with the next."""
        self._rest[name] += tokens
        whole = int(self._rest[name])
        self._rest[name] -= whole
        return whole


@dataclass
class SglangServer(Server):
    """A server whose engine is SGLang's."""

    collectors: Collectors = field(init=False)

    def _start(self, now_s: float, source: Source) -> None:
        launch = self.setting.launch
        tokens = (launch.num_gpu_blocks - 1) * launch.block_size
        self.collectors = Collectors(tokens=tokens, page_size=launch.block_size)
        self._writer = self.collectors
        self.engine = SglangEngine(
            launch,
            self.steps,
            source,
            self.rng,
            metrics=self.collectors,
            max_new_tokens=self.shape.output_cap,
        )
        self.engine.now_s = now_s


def record(at: int) -> StoredCase:
    """A case as it goes."""
    case = list(sglang_cases())[at]
    server = SglangServer(case.setting(), Random(f"{SEED} {case.machine} {case.name}"))
    books, gpu_due_s = Books(), START_S
    began_s: tuple[float, float] | None = None
    pages: list[tuple[float, str | None]] = []
    gpu_pages: list[tuple[float, str | None]] = []
    for entry in scrapes(server, for_s=case.ends_s, at=case.events(), every_s=case.scrape_s):
        t_s = entry.t_s - START_S
        if entry.t_s >= gpu_due_s:
            gpu_due_s = entry.t_s + GPU_SCRAPE_S
            gpu_pages.append((entry.t_s, server.exporter.page(t_s)))
        if t_s >= case.judged_from_s:
            books.note(server)
            began_s = began_s or server.collectors.gaps_s
        pages.append((entry.t_s, entry.body))
    between_s, paused_s = server.collectors.gaps_s
    first_s = began_s or (0.0, 0.0)
    paused = (paused_s - first_s[1]) / max(between_s - first_s[0], 1e-9)
    print(f"    {paused:.1%} of the time between tokens is in gaps of {PAUSE_S:g} s and more")
    follows = books.follows | ({"prefill_interference"} if paused >= PAUSED_RATIO else set[str]())
    return StoredCase(case.machine, case.name, sorted(follows), stored(pages), stored(gpu_pages))


def recorded_apart(at: int) -> StoredCase:
    """A case, recorded in a process of its own: a process's metrics cannot be forgotten."""
    with TemporaryDirectory() as folder:
        os.environ[METRICS_FOLDER] = folder
        with get_context("spawn").Pool(1) as pool:
            return pool.apply(record, (at,))


def is_right(case: Case, own: StoredCase) -> bool:
    """Print what is said of a case. Whether that is what was planted, and nothing before."""
    targets, incident = case.faults[0].targets, replayed(case, own)
    judged = judge(incident, list(said(incident, targets)), level="none", targets=targets)
    print(shown(judged), flush=True)
    return judged.right_and_first and not judged.early


def main(arguments: Sequence[str]) -> int:
    """Record, store and judge the cases."""
    if not arguments:
        return sum(not is_right(*each) for each in zip(sglang_cases(), recorded(), strict=True))
    os.environ[WHEEL] = arguments[0]
    text = arguments[1] if len(arguments) > 1 else ""
    chosen = {
        at: case for at, case in enumerate(sglang_cases()) if text in f"{case.name} {case.machine}"
    }
    made: list[StoredCase] = []
    wrong = 0
    for at, case in chosen.items():
        made.append(recorded_apart(at))
        wrong += not is_right(case, made[-1])
    if not text:
        store(made)
    print(f"{len(made) - wrong} of {len(made)} right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
