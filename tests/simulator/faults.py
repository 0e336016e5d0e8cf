"""Faults by their mechanism: what is set wrong at the start, and what goes wrong at a moment, as
strongly as is asked for.

Nothing here knows of a signal or a bound of ours. `also` are causes that are as true then: what
the fault brings with it, by its own mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.rules.facts import Targets
from tests.simulator.gpus import GpuSteps
from tests.simulator.server import DOCUMENTS, SUMMARIES, Server, Setting
from tests.simulator.work import Work

Start = Callable[[Setting], None]
Lay = Callable[[Server, float], None]
"""What goes wrong with a server, at a strength whose meaning is the fault's own."""

DOCUMENTS_RISE = 0.2
"""Of a peak's rise, where requests carry documents."""

SPREADS = 6.0
BOOK_EVERY_S = 10.0


def _as_it_is(_setting: Setting) -> None:
    """A named function: cases go to other processes."""


def _nothing(_server: Server, _strength: float) -> None:
    """A fault that is there from the start."""


class Fault(Struct, frozen=True, kw_only=True):
    """A fault: the cause to be told, how it is prepared, and what happens when it begins.

    `strength` does clear harm; at `mildest` hardly anybody notices.
    """

    cause: str
    name: str
    start: Start = _as_it_is
    lay: Lay = _nothing
    strength: float = 1.0
    mildest: float = 1.0
    also: frozenset[str] = frozenset()
    targets: Targets = field(default_factory=Targets)
    """What the user promises: without it this is no fault."""

    def begin(self, server: Server) -> None:
        """Let it happen to a server."""
        self.lay(server, self.strength)


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


def _peak(server: Server, ratio: float) -> None:
    setting = server.setting
    if setting.rate_per_s is None:
        server.rate_per_s = setting.rate_for(ratio * setting.running)
    else:
        server.rate_per_s *= 1 + DOCUMENTS_RISE * (ratio - 1)


def prompt_bound_per_s(setting: Setting, prompt_tokens: float) -> float:
    """Requests a second whose prompts keep the GPUs computing all the time."""
    budget = setting.launch.max_num_batched_tokens
    pairs = budget * prompt_tokens / 2
    step_s = GpuSteps(setting.hardware).step_s(Work(16, 16 * prompt_tokens, budget, pairs, 1))
    return budget / step_s / prompt_tokens


def _summaries(setting: Setting) -> None:
    setting.shape = shape = SUMMARIES.scaled(setting.length_ratio)
    setting.rate_per_s = 0.35 * setting.load_ratio * prompt_bound_per_s(setting, shape.prompt)


def _flood(server: Server, ratio: float) -> None:
    server.rate_per_s = ratio * prompt_bound_per_s(server.setting, server.shape.prompt)


def _documents(setting: Setting) -> None:
    # Half of what the GPUs could do if they had to compute every prompt whole.
    setting.shape = shape = DOCUMENTS.scaled(setting.length_ratio)
    setting.running = 8.0 * setting.load_ratio
    bound_per_s = prompt_bound_per_s(setting, shape.prompt_tokens)
    setting.rate_per_s = 0.5 * setting.load_ratio * bound_per_s


def _no_caching(setting: Setting) -> None:
    _documents(setting)
    setting.launch.enable_prefix_caching = False


def _nonce(server: Server, lost_ratio: float) -> None:
    shape = server.shape
    kept = round((1 - lost_ratio) * shape.prefix_tokens)
    server.reshape(
        prefixes=shape.prefixes if kept else 0,
        prefix_tokens=kept,
        prompt=shape.prompt_tokens - kept,
    )


def _tight_documents(setting: Setting) -> None:
    _documents(setting)
    shape, size = setting.shape, setting.launch.block_size
    tokens = 1.5 * shape.prefixes * shape.prefix_tokens
    tokens += 2 * setting.running * shape.prompt_tokens
    setting.launch.num_gpu_blocks = int(tokens / size)


def _more_documents(server: Server, ratio: float) -> None:
    server.reshape(prefixes=round(ratio * server.shape.prefixes))


def _whole_prompts(setting: Setting) -> None:
    setting.launch.enable_chunked_prefill = False
    setting.launch.max_num_batched_tokens = setting.launch.max_model_len = 131_072
    setting.running = 8.0 * setting.load_ratio


def _books(server: Server, alone_s: float) -> None:
    # A prompt that takes so long by itself, about every ten seconds.
    ratio = min(1.0, 1 / (BOOK_EVERY_S * server.rate_per_s))
    server.reshape(long_tokens=_tokens_of(server, alone_s), long_ratio=ratio)


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
    setting.running = 8.0 * setting.load_ratio


def _draft_mismatch(server: Server, acceptance_ratio: float) -> None:
    server.reshape(acceptance_ratio=acceptance_ratio)


def _slots(setting: Setting) -> None:
    setting.launch.max_loras = 4
    setting.shape = replace(setting.shape, adapters=3)


def _more_adapters(server: Server, adapters: float) -> None:
    server.reshape(adapters=round(adapters))


def _overheated(server: Server, clock_ratio: float) -> None:
    server.steps.health.clock_ratio, server.steps.health.hot = clock_ratio, True


def _power_capped(server: Server, clock_ratio: float) -> None:
    server.steps.health.clock_ratio, server.steps.health.power_capped = clock_ratio, True


def _off_the_bus(server: Server, _strength: float) -> None:
    server.steps.health.xid, server.engine.hung = 79, True


def _remap_failed(server: Server, _strength: float) -> None:
    server.steps.health.xid, server.steps.health.remap_failed = 64, True


def _hang(server: Server, _strength: float) -> None:
    server.engine.hung = True


def _rambling(server: Server, ratio: float) -> None:
    server.reshape(runaway_ratio=ratio)


def _killed(server: Server, _strength: float) -> None:
    server.down = True


def _small_batch(setting: Setting) -> None:
    setting.running = 6.0 * setting.load_ratio


def _starving_host(server: Server, late_s: float) -> None:
    server.steps.host_late_s = late_s


def _long_prompts(server: Server, alone_s: float) -> None:
    tokens = float(_tokens_of(server, alone_s))
    server.reshape(prompt=tokens)
    server.rate_per_s = 0.25 * prompt_bound_per_s(server.setting, tokens)


FAULTS = (
    Fault(cause="kv_pressure", name="KV too small for the peak", start=_small_cache,
          lay=_peak, strength=4.0, mildest=1.05),
    Fault(cause="queue_saturation", name="more prompts than the GPUs compute", start=_summaries,
          lay=_flood, strength=1.4, mildest=0.7),
    Fault(cause="admission_limit", name="max_num_seqs too low", start=_few_seats,
          lay=_peak, strength=4.0, mildest=1.05),
    Fault(cause="prefix_cache_off", name="caching off, documents repeat", start=_no_caching),
    Fault(cause="prefix_reuse_lost", name="a nonce leads each prompt", start=_documents,
          lay=_nonce, mildest=0.05),
    Fault(cause="prefix_churn", name="more documents than the cache holds",
          start=_tight_documents, lay=_more_documents, strength=10.0, mildest=1.2),
    Fault(cause="prefill_interference", name="books, prefilled whole", start=_whole_prompts,
          lay=_books, strength=2.0, mildest=0.1),
    Fault(cause="spec_decode_poor", name="the draft does not suit the traffic", start=_drafting,
          lay=_draft_mismatch, strength=0.35, mildest=0.75),
    Fault(cause="adapter_thrash", name="20 adapters for 4 slots", start=_slots,
          lay=_more_adapters, strength=20.0, mildest=4.0),
    Fault(cause="gpu_throttled", name="too hot", lay=_overheated, strength=0.35, mildest=0.97,
          also=frozenset({"decode_bound"})),
    Fault(cause="gpu_throttled", name="power cap", lay=_power_capped, strength=0.45, mildest=0.97,
          also=frozenset({"decode_bound"})),
    Fault(cause="gpu_fault", name="off the bus", lay=_off_the_bus,
          also=frozenset({"engine_stalled"})),
    Fault(cause="gpu_fault", name="row remap failed", lay=_remap_failed),
    Fault(cause="engine_stalled", name="deadlock", lay=_hang),
    Fault(cause="runaway_generation", name="half of the outputs ramble", lay=_rambling,
          strength=0.5, mildest=0.02),
    Fault(cause="decode_bound", name="a host that cannot feed the GPUs", start=_small_batch,
          lay=_starving_host, strength=0.25, mildest=0.002, targets=Targets(itl_p99_s=0.2)),
    Fault(cause="prefill_bound", name="prompts too long for the TTFT target",
          lay=_long_prompts, strength=1.5, mildest=0.2, targets=Targets(ttft_p99_s=1.0)),
    Fault(cause="target_down", name="the server is killed", lay=_killed),
)  # fmt: skip
"""All that is planted: what one server's pages, with its GPUs', can show within minutes."""


def _long_answers(setting: Setting) -> None:
    setting.shape, setting.running = replace(setting.shape, prompt=120.0, output=700.0), 6.0


QUIET: dict[str, Start] = {
    "chat": _as_it_is,
    "documents": _documents,
    "summaries": _summaries,
    "few long answers": _long_answers,
}
"""Loads without a fault."""
