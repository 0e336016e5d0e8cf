"""The catalogue of vLLM signals. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.collector.scrape_history import Where
from kneewatch.collector.signals.expr import (
    AboveRate,
    Beside,
    Expr,
    FirstOf,
    Gauge,
    HereOnly,
    InfoChanges,
    OverTime,
    PartRate,
    Quantile,
    Rate,
    ShareAtMost,
    Slope,
    SlowTimeShare,
    SumOfKnown,
    complement,
    difference,
    info_names,
    info_number,
    positive,
    product,
    ratio,
    scaled,
    total,
)
from kneewatch.collector.signals.signal import LOGGERS, Signal, of_feature

TTFT = "time_to_first_token_seconds"
ITL = "inter_token_latency_seconds"
QUEUE = "request_queue_time_seconds"
PREFILL = "request_prefill_time_seconds"
DECODE = "request_decode_time_seconds"
E2E = "e2e_request_latency_seconds"
PROMPT_LENGTH = "request_prompt_tokens"
OUTPUT_LENGTH = "request_generation_tokens"
XFER = "nixl_xfer_time_seconds"
MOONCAKE_XFER = "mooncake_xfer_time_seconds"
OFFLOAD_LOAD = "kv_offload_load"
"""Beginning of the metric names for loading offloaded KV blocks: seconds, bytes and sizes."""

LMCACHE_RETRIEVE = "lmcache_time_to_retrieve"

CONNECTOR = "a KV connector"
LMCACHE = "LMCache (single-engine endpoints only)"

STALL_EDGES_S = (0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
"""The bucket bounds of ITL from 0.5 s up. Users see a pause of 0.5 s in a stream as a stall."""

TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *STALL_EDGES_S,
)  # fmt: skip
"""The bucket bounds of ITL and, above, of TTFT, in seconds.

A target between two bounds is judged at the lower bound.
"""

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
SPEC_POSITIONS = range(8)


def mean(metric: str) -> Expr:
    """A histogram's mean over the window: exact, unlike its quantiles."""
    return ratio(PartRate(metric, "sum"), PartRate(metric, "count"))


COMPLETED: Expr = FirstOf((Rate("request_success"), PartRate(E2E, "count")))
QUEUED_MEAN: Expr = FirstOf(
    (
        OverTime("num_requests_waiting_by_reason", "avg", (("reason", "capacity"),)),
        OverTime("num_requests_waiting", "avg"),
    )
)
FIRST_TOKENS: Expr = PartRate(TTFT, "count")
ARRIVALS: Expr = FirstOf((FIRST_TOKENS, COMPLETED))
MOVING: Expr = FirstOf((total(COMPLETED, difference(FIRST_TOKENS, COMPLETED)), ARRIVALS))
"""The larger rate of first tokens and finished requests.

In a steady state both are equal. In a burst of long answers, or when clients disconnect, few
requests finish although the queue still moves.
"""
EXPECTED_WAIT: Expr = ratio(QUEUED_MEAN, MOVING)
HTTP = "http_requests"
GENERATION_HANDLERS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/generate",
    "/inference/v1/generate",
    "/invocations",
)
"""Endpoints that generate text.

vLLM's counter of finished requests leaves out calls to other endpoints, such as tokenize and
embeddings.
"""

HTTP_SOURCE = "prometheus_fastapi_instrumentator; vllm/entrypoints (0.32)"
ONE_ENGINE = "an endpoint with one engine: http_requests_total has no engine label"


def http_calls(status: str) -> Expr:
    """Text generation calls/s that ended with a status of this class, such as 2xx."""
    return SumOfKnown(
        tuple(
            Rate(HTTP, (("handler", handler), ("method", "POST"), ("status", status)))
            for handler in GENERATION_HANDLERS
        )
    )


ACCEPTED = http_calls("2xx")
ABORTED = Rate("request_success", (("finished_reason", "abort"),))
GIVEN_UP = difference(ACCEPTED, FirstOf((difference(COMPLETED, ABORTED), COMPLETED)))
CALLS = SumOfKnown((ACCEPTED, http_calls("4xx"), http_calls("5xx")))

COMPUTED_PROMPT: Expr = Rate("prompt_tokens_by_source", (("source", "local_compute"),))

FOLDED = {
    "avg": "mean over the window",
    "max": "highest scrape of the window",
    "min": "lowest scrape of the window",
}


def _over_window(
    name: str,
    metric: str,
    what: str,
    *folds: str,
    where: Where = (),
    unit: str = "",
    source: str = LOGGERS,
) -> tuple[Signal, ...]:
    """A signal for each aggregation of a gauge over the window."""
    return tuple(
        Signal(
            f"{name}_{fold}{unit}",
            OverTime(metric, fold, where),
            f"{what}, {FOLDED[fold]}.",
            source,
        )
        for fold in folds
    )


LOAD = (
    Signal("running", Gauge("num_requests_running"), "Requests in the batch.", core=True),
    Signal(
        "waiting",
        Gauge("num_requests_waiting"),
        "Requests in the queue, deferred ones included.",
        core=True,
    ),
    Signal(
        "waiting_by_capacity",
        FirstOf(
            (
                Gauge("num_requests_waiting_by_reason", (("reason", "capacity"),)),
                Gauge("num_requests_waiting"),
            )
        ),
        "Requests queued for capacity: a seat in the batch, a token budget or KV blocks.",
        needs="vLLM 0.20 or later; before, `waiting` is used",
    ),
    Signal(
        "waiting_deferred",
        Gauge("num_requests_waiting_by_reason", (("reason", "deferred"),)),
        "Requests held back although there is capacity: they wait for an adapter slot, a KV "
        "transfer or a grammar.",
        needs="vLLM 0.20 or later",
        optional=True,
    ),
    Signal(
        "awake",
        Gauge("engine_sleep_state", (("sleep_state", "awake"),)),
        "1 while the engine is awake, 0 while sleep mode has taken its weights off the GPU.",
        needs="vLLM 0.11 or later",
        optional=True,
    ),
    Signal(
        "awake_min",
        OverTime("engine_sleep_state", "min", (("sleep_state", "awake"),)),
        "0 where the engine slept at any time in the window, which empties its KV cache.",
        needs="vLLM 0.11 or later",
        optional=True,
    ),
    *_over_window("running", "num_requests_running", "Requests in the batch", "avg", "max", "min"),
    *_over_window("waiting", "num_requests_waiting", "Requests in the queue", "avg", "min"),
    Signal(
        "expected_wait_s",
        EXPECTED_WAIT,
        "Expected wait in the queue by Little's law: requests queued for capacity (mean over the "
        "window) divided by first tokens/s or finished requests/s, whichever is more. No value if "
        "no request left the queue.",
    ),
    Signal(
        "waiting_slope_per_s",
        Slope("num_requests_waiting"),
        "Growth of the queue in requests/s, least squares over the window.",
    ),
    *of_feature(
        "vLLM 0.20 or later",
        *_over_window(
            "waiting_deferred",
            "num_requests_waiting_by_reason",
            "Deferred requests",
            "min",
            "avg",
            where=(("reason", "deferred"),),
        ),
    ),
    Signal(
        "arrival_per_s",
        ARRIVALS,
        "Requests/s that got their first token: the first sign of an arrival on the page.",
    ),
    Signal("completed_per_s", COMPLETED, "Finished requests/s.", core=True),
    *(
        Signal(
            f"finished_{reason}_per_s",
            Rate("request_success", (("finished_reason", reason),)),
            f"Finished requests/s with reason {reason!r}.",
        )
        for reason in FINISH_REASONS
    ),
    Signal(
        "finished_length_ratio",
        ratio(Rate("request_success", (("finished_reason", "length"),)), COMPLETED),
        "Share of finished requests that reached their output limit.",
        LOGGERS,
    ),
    Signal(
        "finished_error_ratio",
        ratio(Rate("request_success", (("finished_reason", "error"),)), COMPLETED),
        "Share of finished requests that failed.",
    ),
    Signal(
        "rejected_per_s",
        Rate("admission_rejections"),
        "Requests/s that vLLM rejects (HTTP 503) because its queue is at the configured limit.",
        LOGGERS,
        needs="vLLM 0.32 with --max-num-queued-reqs or --max-num-queued-tokens",
        optional=True,
    ),
)

CONSERVATION = of_feature(
    ONE_ENGINE,
    Signal(
        "accepted_per_s",
        ACCEPTED,
        "Accepted calls/s to generate text that ended: finished, or given up by their client.",
    ),
    Signal(
        "given_up_per_s",
        GIVEN_UP,
        "Accepted calls/s that ended before their request finished: accepted calls minus finished "
        "requests. vLLM does not count most of them.",
    ),
    Signal(
        "given_up_ratio",
        ratio(GIVEN_UP, ACCEPTED),
        "Share of the accepted calls that ended before their request finished.",
    ),
    Signal(
        "client_error_per_s",
        http_calls("4xx"),
        "Calls/s to generate text that vLLM rejected as invalid (HTTP 4xx).",
    ),
    Signal(
        "client_error_ratio",
        ratio(http_calls("4xx"), CALLS),
        "Share of the calls to generate text that vLLM rejected as invalid (HTTP 4xx).",
    ),
    Signal(
        "server_error_per_s",
        http_calls("5xx"),
        "Calls/s to generate text that failed with HTTP 5xx; rejected ones (503) are among them.",
    ),
    source=HTTP_SOURCE,
)

KV = (
    Signal(
        "kv_usage_ratio",
        Gauge("kv_cache_usage_perc"),
        "Share of KV blocks that running requests hold; cached blocks that no request holds count "
        "as free.",
        LOGGERS,
        core=True,
    ),
    *_over_window(
        "kv_usage",
        "kv_cache_usage_perc",
        "KV usage",
        "avg",
        "max",
        unit="_ratio",
        source=LOGGERS,
    ),
    Signal(
        "kv_usage_slope_per_s",
        Slope("kv_cache_usage_perc"),
        "Growth of KV usage per second, least squares over the window.",
        LOGGERS,
    ),
    Signal(
        "kv_capacity_tokens",
        FirstOf(
            (
                info_number("cache_config_info", "kv_cache_size_tokens"),
                product(
                    info_number("cache_config_info", "num_gpu_blocks"),
                    info_number("cache_config_info", "block_size"),
                ),
            )
        ),
        "KV cache capacity in tokens, as the server reports it.",
    ),
    Signal(
        "preemption_per_s",
        Rate("num_preemptions"),
        "Preemptions/s: running requests that lose their KV blocks and are recomputed.",
        LOGGERS,
        core=True,
    ),
    Signal(
        "preemption_ratio_per_s",
        ratio(Rate("num_preemptions"), OverTime("num_requests_running", "avg")),
        "Preemptions/s per running request (also called the eviction rate of active requests).",
        LOGGERS,
    ),
    Signal(
        "prefix_hit_ratio",
        ratio(Rate("prefix_cache_hits"), Rate("prefix_cache_queries")),
        "Share of prompt tokens found in the prefix cache.",
        LOGGERS,
    ),
    Signal(
        "prefix_block_tokens",
        FirstOf(
            (
                info_number("cache_config_info", "cache_hit_alignment_tokens"),
                info_number("cache_config_info", "block_size"),
            )
        ),
        "Tokens of the shortest prefix that can hit: the prefix cache holds whole blocks only.",
        optional=True,
    ),
    Signal(
        "prefix_hit_tokens_mean",
        ratio(Rate("prefix_cache_hits"), ARRIVALS),
        "Prompt tokens found in the prefix cache, per request.",
        LOGGERS,
    ),
    Signal(
        "prefix_query_per_s",
        Rate("prefix_cache_queries"),
        "Prompt tokens/s looked up in the prefix cache; 0 with caching off.",
    ),
    Signal(
        "prefix_saved_ratio",
        complement(ratio(COMPUTED_PROMPT, Rate("prompt_tokens"))),
        "Share of prompt tokens that were not computed because a cache had them.",
        LOGGERS,
        needs="vLLM 0.16 or later",
    ),
    *of_feature(
        "--kv-cache-metrics",
        Signal(
            "kv_residency_s",
            mean("kv_block_lifetime_seconds"),
            "Time that an evicted KV block was in the cache, mean.",
            LOGGERS,
        ),
        Signal(
            "kv_idle_before_evict_s",
            mean("kv_block_idle_before_evict_seconds"),
            "Time since the last use of an evicted KV block, mean.",
        ),
        Signal(
            "block_eviction_per_s",
            PartRate("kv_block_lifetime_seconds", "count"),
            "Evictions/s of sampled KV blocks (divide by the sampling rate).",
            LOGGERS,
        ),
        Signal(
            "block_reuse_per_s",
            PartRate("kv_block_reuse_gap_seconds", "count"),
            "Reuses/s of sampled KV blocks, counted when the block is evicted.",
        ),
        Signal(
            "kv_reuse_gap_s",
            mean("kv_block_reuse_gap_seconds"),
            "Time between two uses of a KV block, mean over those of evicted blocks.",
        ),
    ),
    Signal(
        "external_hit_ratio",
        ratio(Rate("external_prefix_cache_hits"), Rate("external_prefix_cache_queries")),
        "Share of looked-up tokens found in an external KV tier.",
        needs=CONNECTOR,
        optional=True,
    ),
)


def _family(name: str, metric: str, help_text: str, *, core: bool = False) -> tuple[Signal, ...]:
    quantiles = tuple(
        Signal(
            f"{name}_p{percent}_s",
            Quantile(metric, percent / 100),
            f"{help_text}, P{percent} by histogram interpolation.",
            core=core and percent == 99,
        )
        for percent in (50, 95, 99)
    )
    return (*quantiles, Signal(f"{name}_mean_s", mean(metric), f"{help_text}, mean."))


def _share(name: str, metric: str, where: str) -> Signal:
    """Share of requests' time that is spent in the phase that a histogram measures."""
    share = ratio(PartRate(metric, "sum"), PartRate(E2E, "sum"))
    return Signal(f"{name}_share_ratio", share, f"Share of request time spent {where}.", LOGGERS)


LATENCY = (
    *_family("ttft", TTFT, "Time to first token", core=True),
    *_family("itl", ITL, "Time between two outputs of a request", core=True),
    *_family(
        "tpot",
        "request_time_per_output_token_seconds",
        "Decode time per output token, recorded at the request's end",
    ),
    *_family(
        "queue", QUEUE, "Time in the queue until the last scheduling, recorded at the request's end"
    ),
    *_family(
        "prefill", PREFILL, "Time from scheduling to the first token, recorded at the request's end"
    ),
    *_family(
        "decode", DECODE, "Time from the first token to the last, recorded at the request's end"
    ),
    *_family("e2e", E2E, "End-to-end time of a request"),
    Signal(
        "ttft_itl_ratio",
        ratio(mean(TTFT), mean(ITL)),
        "Mean TTFT divided by mean ITL: high points to prefill or the queue, low to decode.",
        LOGGERS,
    ),
    Signal(
        "ttft_p99_p50_ratio",
        ratio(Quantile(TTFT, 0.99), Quantile(TTFT, 0.5)),
        "TTFT P99 divided by P50.",
        LOGGERS,
    ),
    Signal(
        "itl_p99_p50_ratio",
        ratio(Quantile(ITL, 0.99), Quantile(ITL, 0.5)),
        "ITL P99 divided by P50.",
        LOGGERS,
    ),
    Signal(
        "itl_stall_per_s",
        AboveRate(ITL, STALL_EDGES_S[0]),
        "Outputs/s that came 0.5 s or more after the previous one.",
        LOGGERS,
    ),
    Signal(
        "itl_stall_time_ratio",
        SlowTimeShare(ITL, STALL_EDGES_S),
        "Share of decode time in pauses of 0.5 s or more (a lower bound).",
        LOGGERS,
    ),
    _share("queue", QUEUE, "in the queue"),
    _share("prefill", PREFILL, "in prefill"),
    Signal(
        "prefill_service_ratio",
        ratio(PartRate(PREFILL, "sum"), total(PartRate(PREFILL, "sum"), PartRate(DECODE, "sum"))),
        "Share of prefill in the time of prefill and decode (without the queue).",
        LOGGERS,
    ),
    Signal(
        "prefill_long_per_s",
        AboveRate(PREFILL, STALL_EDGES_S[0]),
        "Prefills/s of 0.5 s or more, recorded when the requests end.",
        LOGGERS,
    ),
    _share("decode", DECODE, "in decode"),
)

WORKLOAD = (
    *(
        Signal(
            f"{name}_tokens_p{percent}",
            Quantile(metric, percent / 100),
            f"{help_text}, P{percent} by histogram interpolation.",
            LOGGERS,
        )
        for name, metric, help_text in (
            ("prompt", PROMPT_LENGTH, "Prompt length of finished requests"),
            ("output", OUTPUT_LENGTH, "Output length of finished requests"),
        )
        for percent in (50, 95, 99)
    ),
    Signal("prompt_tokens_mean", mean(PROMPT_LENGTH), "Prompt length, mean."),
    Signal("output_tokens_mean", mean(OUTPUT_LENGTH), "Output length, mean."),
    Signal(
        "prefill_tokens_p50",
        Quantile("request_prefill_kv_computed_tokens", 0.5),
        "Prompt tokens computed per request, P50: those that no cache had.",
        needs="vLLM 0.13 or later",
    ),
    Signal(
        "prefill_tokens_p95",
        Quantile("request_prefill_kv_computed_tokens", 0.95),
        "Prompt tokens computed per request, P95.",
        needs="vLLM 0.13 or later",
    ),
    Signal(
        "prompt_tokens_per_s",
        Rate("prompt_tokens"),
        "Prompt tokens/s, cached ones included.",
        core=True,
    ),
    Signal(
        "computed_prompt_tokens_per_s",
        FirstOf(
            (
                COMPUTED_PROMPT,
                difference(Rate("prompt_tokens"), Rate("prefix_cache_hits")),
                Rate("prompt_tokens"),
            )
        ),
        "Computed prompt tokens/s (the prefill work); before vLLM 0.16, prompt tokens minus cache "
        "hits.",
    ),
    Signal(
        "generation_tokens_per_s",
        Rate("generation_tokens"),
        "Generated tokens/s.",
        LOGGERS,
        core=True,
    ),
    Signal(
        "large_step_per_s",
        AboveRate("iteration_tokens_total", 256),
        "Engine steps/s with more than 256 tokens; smaller steps have no prompt to split.",
        LOGGERS,
    ),
    Signal(
        "iteration_tokens_mean", mean("iteration_tokens_total"), "Tokens in one engine step, mean."
    ),
)

SPECULATION = of_feature(
    "speculative decoding",
    Signal(
        "spec_acceptance_ratio",
        ratio(Rate("spec_decode_num_accepted_tokens"), Rate("spec_decode_num_draft_tokens")),
        "Share of draft tokens that the model accepted.",
        LOGGERS,
    ),
    Signal(
        "spec_accepted_per_draft_tokens",
        ratio(Rate("spec_decode_num_accepted_tokens"), Rate("spec_decode_num_drafts")),
        "Draft tokens accepted per draft, mean.",
        LOGGERS,
    ),
    Signal("spec_draft_tokens_per_s", Rate("spec_decode_num_draft_tokens"), "Draft tokens/s."),
    *(
        Signal(
            f"spec_acceptance_pos{position}_ratio",
            ratio(
                Rate("spec_decode_num_accepted_tokens_per_pos", (("position", str(position)),)),
                Rate("spec_decode_num_drafts"),
            ),
            f"Share of drafts whose token at position {position} was accepted.",
            LOGGERS,
        )
        for position in SPEC_POSITIONS
    ),
)

LORA = of_feature(
    "--enable-lora",
    Signal(
        "lora_running",
        info_names("lora_requests_info", "running_lora_adapters"),
        "Adapters with a request in the batch.",
    ),
    Signal(
        "lora_waiting",
        info_names("lora_requests_info", "waiting_lora_adapters"),
        "Adapters with a waiting request, as far as vLLM reports them.",
    ),
    Signal(
        "lora_max",
        info_number("lora_requests_info", "max_lora"),
        "Adapters that fit on the GPU at a time (--max-loras).",
    ),
    Signal(
        "lora_change_per_s",
        InfoChanges("lora_requests_info"),
        "Changes/s of the set of running adapters.",
    ),
)


def _of_connector(counted: str) -> Expr:
    """The rate of NIXL's counter; of Mooncake's if the page has none of NIXL."""
    return FirstOf((Rate(f"nixl_{counted}"), Rate(f"mooncake_{counted}")))


LOADING = Rate(f"{OFFLOAD_LOAD}_time")
LMCACHE_FAILED = Rate("lmcache_get_blocking_failed_count", suffix="")

TRANSFER = of_feature(
    CONNECTOR,
    Signal(
        "kv_transfer_mean_s",
        Beside(
            FirstOf(
                (
                    mean(XFER),
                    mean(MOONCAKE_XFER),
                    ratio(LOADING, PartRate(f"{OFFLOAD_LOAD}_size", "count")),
                )
            ),
            mean(LMCACHE_RETRIEVE),
            "max",
        ),
        "Time of one KV transfer between nodes, load from an offload tier or retrieve from "
        "LMCache (sidecar only), mean; if there are several, the longest.",
        "vllm/distributed/kv_transfer (0.32)",
    ),
    Signal(
        "kv_transfer_p95_s",
        Beside(
            FirstOf((Quantile(XFER, 0.95), Quantile(MOONCAKE_XFER, 0.95))),
            Quantile(LMCACHE_RETRIEVE, 0.95),
            "max",
        ),
        "Time of one KV transfer between nodes or of one retrieve from LMCache, P95.",
        "vllm/distributed/kv_transfer (0.32)",
    ),
    Signal(
        "kv_transfer_busy_ratio",
        Beside(
            FirstOf((PartRate(XFER, "sum"), PartRate(MOONCAKE_XFER, "sum"), LOADING)),
            PartRate(LMCACHE_RETRIEVE, "sum"),
            "sum",
        ),
        "KV transfers, loads or retrieves in flight (seconds of transfer per second).",
        "vllm/distributed/kv_transfer (0.32)",
    ),
    Signal(
        "kv_transfer_failed_per_s",
        Beside(_of_connector("num_failed_transfers"), LMCACHE_FAILED, "sum"),
        "Failed KV transfers/s, or LMCache's failed reads/s from its remote storage.",
        "vllm/distributed/kv_transfer (0.32)",
    ),
    Signal(
        "kv_transfer_bytes_per_s",
        FirstOf(
            (
                *(
                    ratio(PartRate(f"{name}_bytes_transferred", "sum"), PartRate(time, "sum"))
                    for name, time in (("nixl", XFER), ("mooncake", MOONCAKE_XFER))
                ),
                ratio(Rate(f"{OFFLOAD_LOAD}_bytes"), LOADING),
            )
        ),
        "Bytes/s of one KV transfer or load while it lasts.",
        "vllm/distributed/kv_transfer (0.32)",
    ),
    Signal(
        "kv_expired_per_s",
        _of_connector("num_kv_expired_reqs"),
        "Requests/s whose KV expired on the prefill side before it was fetched.",
        "vllm/distributed/kv_transfer (0.32)",
    ),
    Signal(
        "kv_external_share_ratio",
        ratio(
            Rate("prompt_tokens_by_source", (("source", "external_kv_transfer"),)),
            Rate("prompt_tokens"),
        ),
        "Share of prompt tokens whose KV came from another node or tier.",
        LOGGERS,
        needs="vLLM 0.16 or later",
    ),
    *(
        Signal(key, Gauge("num_requests_kv_fetch_by_stage", (("stage", stage),)), text)
        for key, stage, text in (
            ("kv_fetch_queued", "waiting_to_start", "Requests whose KV transfer has not started."),
            ("kv_fetch_moving", "in_progress", "Requests whose KV is being transferred."),
            (
                "kv_fetch_arrived",
                "completed_waiting",
                "Requests whose KV has arrived and that still wait.",
            ),
        )
    ),
    Signal(
        "kv_fetch_waiting",
        Gauge("num_requests_kv_fetch_by_stage"),
        "Requests that wait for KV from another node or tier.",
    ),
)

LMCACHE_SOURCE = "lmcache/observability.py"

LMCACHE_OWN = tuple(
    Signal(key, HereOnly(expr), text, LMCACHE_SOURCE, needs=LMCACHE, optional=True)
    for key, expr, text in (
        (
            "lmcache_retrieve_mean_s",
            mean(LMCACHE_RETRIEVE),
            "Time of one retrieve of KV from LMCache for one GPU's share, mean.",
        ),
        (
            "lmcache_retrieve_tokens_per_s",
            mean("lmcache_retrieve_speed"),
            "Tokens/s of one retrieve from LMCache, mean.",
        ),
        (
            "lmcache_retrieved_ratio",
            ratio(Rate("lmcache_num_hit_tokens"), Rate("lmcache_num_requested_tokens")),
            "Share of requested tokens whose KV LMCache had.",
        ),
        (
            "lmcache_store_mean_s",
            mean("lmcache_time_to_store"),
            "Time of one store of KV in LMCache for one GPU's share, mean.",
        ),
        (
            "lmcache_failed_per_s",
            LMCACHE_FAILED,
            "LMCache's failed reads/s from its remote storage.",
        ),
        (
            "lmcache_healthy",
            Gauge("lmcache_is_healthy", fold="min"),
            "1 while every worker's LMCache reports healthy, else 0.",
        ),
    )
)

HOST = (
    Signal(
        "host_process_bytes",
        HereOnly(Gauge("process_resident_memory_bytes")),
        "Resident memory of the process that serves /metrics: the API server.",
        "prometheus_client/process_collector.py",
        needs="one engine behind the endpoint: the metric has no engine label",
        optional=True,
    ),
    Signal(
        "open_files",
        HereOnly(Gauge("process_open_fds")),
        "Files and sockets that the API server's process holds open: each call in flight is one.",
        "prometheus_client/process_collector.py",
        needs="one engine behind the endpoint: the metric has no engine label",
        optional=True,
    ),
)

WORK = of_feature(
    "--enable-mfu-metrics",
    Signal(
        "flop_per_s",
        positive(Rate("estimated_flops_per_gpu")),
        "FLOP/s per GPU, by vLLM's own estimate.",
        "vllm/v1/metrics/perf.py (0.32)",
    ),
    Signal(
        "memory_bytes_per_s",
        positive(Rate("estimated_read_bytes_per_gpu")),
        "Bytes/s read from the memory of each GPU, by vLLM's own estimate.",
        "vllm/v1/metrics/perf.py (0.32)",
    ),
)

VLLM_SIGNALS = (
    *LOAD,
    *CONSERVATION,
    *KV,
    *LATENCY,
    *WORKLOAD,
    *SPECULATION,
    *LORA,
    *TRANSFER,
    *LMCACHE_OWN,
    *HOST,
    *WORK,
)


def _within(metric: str, bounds_s: Sequence[float], target_s: float) -> ShareAtMost | None:
    """Share of a histogram's observations that are within the target; None if no bound is.

    The target is rounded down to a bucket bound.
    """
    kept_s = [bound_s for bound_s in bounds_s if bound_s <= target_s]
    return ShareAtMost(metric, kept_s[-1]) if kept_s else None


def within_ttft(target_s: float | None) -> ShareAtMost | None:
    """Share of requests whose first token arrives within the target.

    The target is rounded down to a bucket bound. None without a target, or if every bound is above
    it.
    """
    return _within(TTFT, TTFT_BOUNDS_S, target_s or 0.0)


def _goodput(ttft_target_s: float, itl_target_s: float | None) -> Expr | None:
    """Requests/s within the targets; None if a target is below every bucket bound.

    Computed as the request rate times (the share of requests whose first token is in time, minus
    the share of token gaps above the ITL target if one is set).

    vLLM counts slow gaps, not requests with a slow gap. As in the report, slow gaps are assumed to
    be spread evenly over the requests that are in time.
    """
    first = within_ttft(ttft_target_s)
    if first is None or itl_target_s is None:
        return first and product(first, ARRIVALS)
    smooth = _within(ITL, ITL_BOUNDS_S, itl_target_s)
    return smooth and product(difference(first, complement(smooth)), ARRIVALS)


def configured(
    *,
    ttft_slo_s: float | None = None,
    itl_slo_s: float | None = None,
    gpus: int | None = None,
    peak_flop_per_s: float | None = None,
    peak_bytes_per_s: float | None = None,
) -> tuple[Signal, ...]:
    """The signals that depend on settings: SLO, number of GPUs and the peaks of one GPU.

    Signals whose setting is missing are left out; `unconfigured` lists them.
    """
    signals: list[Signal] = []
    goodput = None if ttft_slo_s is None else _goodput(ttft_slo_s, itl_slo_s)
    if goodput is not None:
        signals.append(
            Signal(
                "goodput_per_s",
                goodput,
                "Requests/s within the targets: those with the first token in time, minus the "
                "share of token gaps above the ITL target, if one is set. Targets are rounded "
                "down to a bucket bound.",
                LOGGERS,
            )
        )
    if gpus is not None:
        per_hour = Rate("generation_tokens")
        signals.append(
            Signal(
                "tokens_per_gpu_hour",
                scaled(per_hour, 3600 / gpus),
                "Generated tokens per GPU-hour at the current rate.",
                LOGGERS,
            )
        )
    for key, metric, peak in (
        ("mfu_ratio", "estimated_flops_per_gpu", peak_flop_per_s),
        ("mbu_ratio", "estimated_read_bytes_per_gpu", peak_bytes_per_s),
    ):
        if peak is not None:
            signals.append(
                Signal(
                    key,
                    scaled(positive(Rate(metric)), 1 / peak),
                    "Achieved share of one GPU's peak, by vLLM's own estimate of the work.",
                    LOGGERS,
                    needs="--enable-mfu-metrics",
                    optional=True,
                )
            )
    return tuple(signals)
