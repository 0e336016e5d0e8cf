"""Pages of one engine under a changing load, with vLLM 0.32's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

STEP_S = 5.0
LABELS = 'engine="0",model_name="m"'
HTTP = 'handler="/v1/completions",method="POST"'


class Load(Struct, frozen=True, kw_only=True):
    """Gauges and rates of one engine at one moment.

    `finished_per_s` requests are counted by `request_success`, `answered_per_s` by the histograms
    alone. `waiting` requests are queued for capacity, `deferred` ones for a transfer, a grammar or
    an adapter (None: the page gives no reasons); `errors_per_s` requests end in an error,
    `server_errors_per_s` calls in HTTP 5xx; `blocks` is the size of the KV cache. Every first token
    came after `ttft_s`, every
    request that finished took `request_s`, `queued_s` of it in the queue, `prefill_s` in prefill
    and `outside_s` outside the engine, and had a prompt of `prompt_tokens`; `cut_share` of them
    ended at their limit; of the prompts, `giant_share` had `giant_tokens`; every answer had
    `answer_tokens`. `resident_bytes` is the memory of the process that serves the page. Of the
    `draft_tokens` of a draft `accepted_per_draft` were accepted. Every step had `step_tokens`. Of
    the prompt tokens that were looked up in the prefix cache, `hit_ratio` were found; of
    `tier_lookups_per_s` tokens that were looked up in another tier, `tier_hit_ratio`. `adapters`
    are the LoRA adapters in the one slot, and those that wait for it. None leaves a metric out.
    """

    running: float = 0.0
    waiting: float = 0.0
    deferred: float | None = 0.0
    kv_ratio: float = 0.0
    blocks: int = 4096
    block_tokens: int = 16
    accepted_per_s: float | None = None
    refused_per_s: float = 0.0
    server_errors_per_s: float | None = None
    errors_per_s: float | None = None
    failed_transfers_per_s: float | None = None
    first_tokens_per_s: float = 0.0
    finished_per_s: float | None = 0.0
    answered_per_s: float = 0.0
    aborted_per_s: float = 0.0
    generated_per_s: float = 0.0
    prompt_per_s: float = 0.0
    preempted_per_s: float = 0.0
    ttft_s: float = 0.1
    itl_s: float = 0.02
    request_s: float = 2.0
    prompt_tokens: float = 100.0
    giant_share: float = 0.0
    giant_tokens: float = 0.0
    answer_tokens: float | None = None
    queued_s: float | None = None
    prefill_s: float | None = None
    outside_s: float = 0.0
    cut_share: float = 0.0
    steps_per_s: float = 0.0
    step_tokens: float | None = None
    hit_ratio: float | None = None
    tier_lookups_per_s: float | None = None
    tier_hit_ratio: float = 1.0
    adapters: tuple[str, str] | None = None
    resident_bytes: float | None = None
    drafts_per_s: float | None = None
    accepted_per_draft: float = 0.0
    draft_tokens: int = 4


Phases = Callable[[float], Load | None]
"""The load by seconds since the first page; None while the page is not answered."""

SERVING = Load(
    running=4,
    kv_ratio=0.3,
    first_tokens_per_s=2.0,
    finished_per_s=2.0,
    generated_per_s=100.0,
    prompt_per_s=200.0,
)
"""A healthy server."""

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
TOKENS = (10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0)


def pages(
    engines: Sequence[Phases], lasts_s: float, step_s: float = STEP_S
) -> Iterator[tuple[float, str]]:
    """Seconds since the first page, and the page of all engines, every `step_s` seconds; empty
    where it is not answered."""
    counted = [Counter[str]() for _ in engines]
    at_s = 0.0
    while at_s <= lasts_s:
        page = ""
        for number, load_at in enumerate(engines):
            if (load := load_at(at_s)) is None:
                continue
            if at_s:
                rates = _rates(load).items()
                counted[number].update({name: per_s * step_s for name, per_s in rates})
            page += _page(load, counted[number]).replace('engine="0"', f'engine="{number}"')
        yield at_s, page
        at_s += step_s


def then(before: Load, from_s: float, **after: float | None) -> Phases:
    """A load that changes at a moment."""
    changed = replace(before, **after)
    return lambda at_s: changed if at_s >= from_s else before


def _rates(load: Load) -> dict[str, float]:
    """Increase per second of every counter, by its series."""
    finished_per_s = load.finished_per_s or 0.0
    rates = {
        f"vllm:generation_tokens_total{{{LABELS}}}": load.generated_per_s,
        f"vllm:prompt_tokens_total{{{LABELS}}}": load.prompt_per_s,
        f"vllm:num_preemptions_total{{{LABELS}}}": load.preempted_per_s,
    }
    if load.finished_per_s is not None:
        cut_per_s = load.cut_share * finished_per_s
        reasons = {
            "stop": finished_per_s - cut_per_s,
            "length": cut_per_s,
            "abort": load.aborted_per_s,
        }
        if load.errors_per_s is not None:
            reasons["error"] = load.errors_per_s
        for reason, per_s in reasons.items():
            series = f'vllm:request_success_total{{finished_reason="{reason}",{LABELS}}}'
            rates[series] = per_s
    if load.accepted_per_s is not None:
        rates[f'http_requests_total{{{HTTP},status="2xx"}}'] = load.accepted_per_s
        rates[f'http_requests_total{{{HTTP},status="4xx"}}'] = load.refused_per_s
    if load.server_errors_per_s is not None:
        rates[f'http_requests_total{{{HTTP},status="5xx"}}'] = load.server_errors_per_s
    if load.failed_transfers_per_s is not None:
        rates[f"vllm:nixl_num_failed_transfers_total{{{LABELS}}}"] = load.failed_transfers_per_s
    if load.drafts_per_s is not None:
        accepted_per_s = load.drafts_per_s * load.accepted_per_draft
        for name, per_s in (
            ("drafts", load.drafts_per_s),
            ("draft_tokens", load.draft_tokens * load.drafts_per_s),
            ("accepted_tokens", accepted_per_s),
        ):
            rates[f"vllm:spec_decode_num_{name}_total{{{LABELS}}}"] = per_s
    tiers = {
        "prefix_cache": (load.prompt_per_s, load.hit_ratio),
        "external_prefix_cache": (
            load.tier_lookups_per_s or 0.0,
            None if load.tier_lookups_per_s is None else load.tier_hit_ratio,
        ),
    }
    for tier, (queried_per_s, hit_ratio) in tiers.items():
        if hit_ratio is not None:
            rates[f"vllm:{tier}_queries_total{{{LABELS}}}"] = queried_per_s
            rates[f"vllm:{tier}_hits_total{{{LABELS}}}"] = queried_per_s * hit_ratio
    answered_per_s = finished_per_s + load.answered_per_s
    giant = answered_per_s * load.giant_share
    small = answered_per_s - giant
    for name, bounds, values in (
        ("time_to_first_token_seconds", SECONDS, {load.ttft_s: load.first_tokens_per_s}),
        ("inter_token_latency_seconds", SECONDS, {load.itl_s: load.generated_per_s}),
        ("e2e_request_latency_seconds", SECONDS, {load.request_s: answered_per_s}),
        ("request_prompt_tokens", TOKENS, {load.prompt_tokens: small, load.giant_tokens: giant}),
    ):
        rates |= _histogram(name, bounds, values)
    phases = {"queue": load.queued_s, "prefill": load.prefill_s}
    if load.queued_s is not None and load.prefill_s is not None:
        phases["decode"] = load.request_s - load.queued_s - load.prefill_s - load.outside_s
    for name, seconds in phases.items():
        if seconds is not None:
            times = {seconds: answered_per_s}
            rates |= _histogram(f"request_{name}_time_seconds", SECONDS, times)
    if load.step_tokens is not None:
        steps = {load.step_tokens: load.steps_per_s}
        rates |= _histogram("iteration_tokens_total", STEP_TOKENS, steps)
    if load.answer_tokens is not None:
        answers = {load.answer_tokens: answered_per_s}
        rates |= _histogram("request_generation_tokens", TOKENS, answers)
    return rates


def _histogram(
    name: str, bounds: tuple[float, ...], values: dict[float, float]
) -> dict[str, float]:
    """Increase per second of a histogram's series; `values` maps observations to their rates."""
    count = sum(values.values())
    rates = {
        f'vllm:{name}_bucket{{le="{bound}",{LABELS}}}': sum(
            per_s for value, per_s in values.items() if value <= bound
        )
        for bound in bounds
    }
    rates[f'vllm:{name}_bucket{{le="+Inf",{LABELS}}}'] = count
    rates[f"vllm:{name}_count{{{LABELS}}}"] = count
    rates[f"vllm:{name}_sum{{{LABELS}}}"] = sum(value * n for value, n in values.items())
    return rates


def _page(load: Load, counted: Counter[str]) -> str:
    gauges = {
        f"vllm:num_requests_running{{{LABELS}}}": load.running,
        f"vllm:num_requests_waiting{{{LABELS}}}": load.waiting + (load.deferred or 0.0),
        f"vllm:kv_cache_usage_perc{{{LABELS}}}": load.kv_ratio,
        f'vllm:cache_config_info{{block_size="{load.block_tokens}",enable_prefix_caching="True",'
        f'num_gpu_blocks="{load.blocks}",{LABELS}}}': 1.0,
    }
    if load.deferred is not None:
        for reason, requests in (("capacity", load.waiting), ("deferred", load.deferred)):
            series = f'vllm:num_requests_waiting_by_reason{{reason="{reason}",{LABELS}}}'
            gauges[series] = requests
    if load.adapters is not None:
        running, waiting = load.adapters
        names = f'running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
        gauges[f'vllm:lora_requests_info{{max_lora="1",{names}}}'] = 1.0
    if load.resident_bytes is not None:
        gauges["process_resident_memory_bytes"] = load.resident_bytes
    counters = {series: counted[series] for series in _rates(load)}
    return "".join(f"{series} {value!r}\n" for series, value in (gauges | counters).items())
