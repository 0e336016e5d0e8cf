"""Faults by their mechanism: what is set wrong at the start, and what goes wrong at a moment.

Nothing here knows of a signal or a bound of ours. `also` are causes that are as true then: what
the fault brings with it, by its own mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kneewatch.rules.facts import Targets
from tests.simulator.gpus import GpuSteps
from tests.simulator.server import DOCUMENTS, SUMMARIES, Begin, Server, Setting
from tests.simulator.work import Work

Start = Callable[[Setting], None]
PEAK_RATIO, DOCUMENTS_PEAK_RATIO = 4.0, 1.6
SPREADS = 6.0
BOOK_S, BOOK_EVERY_S, LONG_PROMPT_S = 2.0, 10.0, 1.5


def _as_it_is(_what: Setting | Server) -> None:
    """A named function: cases go to other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault: the cause to be told, how it is laid, how it begins."""

    cause: str
    name: str
    start: Start = _as_it_is
    begin: Begin = _as_it_is
    also: frozenset[str] = frozenset()
    targets: Targets = field(default_factory=Targets)
    """What the user promises: without it this is no fault."""


def _room(running: float) -> float:
    """Requests that are never exceeded by chance where so many run in the mean."""
    return running + SPREADS * math.sqrt(running)


def _small_cache(setting: Setting) -> None:
    # Room for all that runs when all is well, and for the shared prefixes.
    shape, size = setting.shape, setting.launch.block_size
    shared = shape.prefixes * shape.prefix_tokens
    tokens = _room(setting.running) * shape.held_tokens + shared
    setting.launch.num_gpu_blocks = int(tokens / size)


def seats_for(setting: Setting) -> int:
    """Seats that what runs when all is well does not exceed by chance."""
    return round(_room(setting.running))


def _few_seats(setting: Setting) -> None:
    setting.launch.max_num_seqs = seats_for(setting)


def _peak(server: Server) -> None:
    setting = server.setting
    if setting.rate_per_s is None:
        server.rate_per_s = setting.rate_for(PEAK_RATIO * setting.running)
    else:
        server.rate_per_s *= DOCUMENTS_PEAK_RATIO


def prompt_bound_per_s(setting: Setting, prompt_tokens: float) -> float:
    """Requests a second whose prompts keep the GPUs computing all the time."""
    budget = setting.launch.max_num_batched_tokens
    pairs = budget * prompt_tokens / 2
    step_s = GpuSteps(setting.hardware).step_s(Work(16, 16 * prompt_tokens, budget, pairs, 1))
    return budget / step_s / prompt_tokens


def _summaries(setting: Setting) -> None:
    setting.shape = SUMMARIES
    setting.rate_per_s = 0.35 * prompt_bound_per_s(setting, SUMMARIES.prompt)


def _flood(server: Server) -> None:
    server.rate_per_s = 1.4 * prompt_bound_per_s(server.setting, SUMMARIES.prompt)


def _documents(setting: Setting) -> None:
    # Half of what the GPUs could do if they had to compute every prompt whole.
    setting.shape, setting.running = DOCUMENTS, 8.0
    setting.rate_per_s = 0.5 * prompt_bound_per_s(setting, DOCUMENTS.prompt_tokens)


def _no_caching(setting: Setting) -> None:
    _documents(setting)
    setting.launch.enable_prefix_caching = False


def _nonce(server: Server) -> None:
    whole = server.shape.prompt_tokens
    server.reshape(prefixes=0, prompt=whole)


def _tight_documents(setting: Setting) -> None:
    _documents(setting)
    shape, size = setting.shape, setting.launch.block_size
    tokens = 1.5 * shape.prefixes * shape.prefix_tokens
    tokens += 2 * setting.running * shape.prompt_tokens
    setting.launch.num_gpu_blocks = int(tokens / size)


def _more_documents(server: Server) -> None:
    server.reshape(prefixes=10 * server.shape.prefixes)


def _whole_prompts(setting: Setting) -> None:
    setting.launch.enable_chunked_prefill = False
    setting.launch.max_num_batched_tokens = setting.launch.max_model_len = 131_072
    setting.running = 8.0


def _books(server: Server) -> None:
    # A prompt that takes two seconds by itself, about every ten.
    ratio = min(1.0, 1 / (BOOK_EVERY_S * server.rate_per_s))
    server.reshape(long_tokens=_tokens_of(server, BOOK_S), long_ratio=ratio)


def _tokens_of(server: Server, alone_s: float) -> int:
    """The length of a prompt that takes so long where nothing else runs."""
    tokens = 2000
    while tokens < 120_000 and _alone_s(server, tokens) < alone_s:
        tokens += 2000
    return tokens


def _alone_s(server: Server, tokens: int) -> float:
    return server.steps.step_s(Work(0, 0.0, tokens, tokens * tokens / 2, 1))


def _drafting(setting: Setting) -> None:
    setting.launch.num_speculative_tokens, setting.draft_cost_ratio = 3, 0.05
    setting.shape = replace(setting.shape, acceptance_ratio=0.8)
    setting.running = 8.0


def _draft_mismatch(server: Server) -> None:
    server.reshape(acceptance_ratio=0.35)


def _slots(setting: Setting) -> None:
    setting.launch.max_loras = 4
    setting.shape = replace(setting.shape, adapters=3)


def _more_adapters(server: Server) -> None:
    server.reshape(adapters=20)


def _overheated(server: Server) -> None:
    server.steps.health.clock_ratio, server.steps.health.hot = 0.35, True


def _power_capped(server: Server) -> None:
    server.steps.health.clock_ratio, server.steps.health.power_capped = 0.45, True


def _off_the_bus(server: Server) -> None:
    server.steps.health.xid, server.engine.hung = 79, True


def _remap_failed(server: Server) -> None:
    server.steps.health.xid, server.steps.health.remap_failed = 64, True


def _hang(server: Server) -> None:
    server.engine.hung = True


def _rambling(server: Server) -> None:
    server.reshape(runaway_ratio=0.5)


def _killed(server: Server) -> None:
    server.down = True


def _small_batch(setting: Setting) -> None:
    setting.running = 6.0


def _starving_host(server: Server) -> None:
    server.steps.host_late_s = 0.25


def _long_prompts(server: Server) -> None:
    tokens = float(_tokens_of(server, LONG_PROMPT_S))
    server.reshape(prompt=tokens)
    server.rate_per_s = 0.25 * prompt_bound_per_s(server.setting, tokens)


FAULTS = (
    Fault(cause="kv_pressure", name="KV too small for the peak", start=_small_cache,
          begin=_peak),
    Fault(cause="queue_saturation", name="more prompts than the GPUs compute", start=_summaries,
          begin=_flood),
    Fault(cause="admission_limit", name="max_num_seqs too low", start=_few_seats,
          begin=_peak),
    Fault(cause="prefix_cache_off", name="caching off, documents repeat", start=_no_caching),
    Fault(cause="prefix_reuse_lost", name="a nonce leads each prompt", start=_documents,
          begin=_nonce),
    Fault(cause="prefix_churn", name="more documents than the cache holds",
          start=_tight_documents, begin=_more_documents),
    Fault(cause="prefill_interference", name="books, prefilled whole", start=_whole_prompts,
          begin=_books),
    Fault(cause="spec_decode_poor", name="the draft does not suit the traffic", start=_drafting,
          begin=_draft_mismatch),
    Fault(cause="adapter_thrash", name="20 adapters for 4 slots", start=_slots,
          begin=_more_adapters),
    Fault(cause="gpu_throttled", name="too hot", begin=_overheated,
          also=frozenset({"decode_bound"})),
    Fault(cause="gpu_throttled", name="power cap", begin=_power_capped,
          also=frozenset({"decode_bound"})),
    Fault(cause="gpu_fault", name="off the bus", begin=_off_the_bus,
          also=frozenset({"engine_stalled"})),
    Fault(cause="gpu_fault", name="row remap failed", begin=_remap_failed),
    Fault(cause="engine_stalled", name="deadlock", begin=_hang),
    Fault(cause="runaway_generation", name="half of the outputs ramble", begin=_rambling),
    Fault(cause="decode_bound", name="a host that cannot feed the GPUs", start=_small_batch,
          begin=_starving_host, targets=Targets(itl_p99_s=0.2)),
    Fault(cause="prefill_bound", name="prompts too long for the TTFT target",
          begin=_long_prompts, targets=Targets(ttft_p99_s=1.0)),
    Fault(cause="target_down", name="the server is killed", begin=_killed),
)  # fmt: skip
"""All that is planted: what one server's pages, with its GPUs', can show within minutes."""
