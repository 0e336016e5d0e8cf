"""The catalogue of vLLM signals: DESIGN's core list, one entry each. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.collector.signals.expr import (
    AboveRate,
    Across,
    Beside,
    Complement,
    Difference,
    Expr,
    FirstOf,
    Gauge,
    HereOnly,
    InfoChanges,
    InfoNames,
    InfoNumber,
    OverTime,
    PartRate,
    Positive,
    Product,
    Quantile,
    Rate,
    Ratio,
    Scaled,
    ShareAtMost,
    Slope,
    SlowTimeShare,
    Sum,
    SumOfKnown,
)
from kneewatch.collector.signals.signal import Signal

LOGGERS = "vllm/v1/metrics/loggers.py (0.32)"

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
"""The start of the names about loading offloaded KV blocks: seconds, bytes, sizes."""

LMCACHE_RETRIEVE = "lmcache_time_to_retrieve"

CONNECTOR = "a KV connector"
LMCACHE = "LMCache (single-engine endpoints only)"

STALL_EDGES_S = (0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
"""ITL's bucket bounds from half a second up: readers of a stream see such a pause as a stall."""

TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *STALL_EDGES_S,
)  # fmt: skip
"""TTFT's bucket bounds: a target between two of them is judged at the lower one."""

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
SPEC_POSITIONS = range(8)


def mean(metric: str) -> Expr:
    """A histogram's mean over the window: exact, unlike its quantiles."""
    return Ratio(PartRate(metric, "sum"), PartRate(metric, "count"))


COMPLETED: Expr = FirstOf((Rate("request_success"), PartRate(E2E, "count")))
ARRIVALS: Expr = FirstOf((PartRate(TTFT, "count"), COMPLETED))
QUEUED_MEAN: Expr = FirstOf(
    (
        OverTime("num_requests_waiting_by_reason", "avg", (("reason", "capacity"),)),
        OverTime("num_requests_waiting", "avg"),
    )
)
EXPECTED_WAIT: Expr = Ratio(QUEUED_MEAN, FirstOf((Positive(COMPLETED), PartRate(TTFT, "count"))))
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
"""Handlers of calls that generate text; others (tokenize, embeddings) finish no such request."""

HTTP_SOURCE = "prometheus_fastapi_instrumentator; vllm/entrypoints (0.32)"
ONE_ENGINE = "one engine behind the endpoint: http_requests_total has no engine label"


def http_calls(status: str) -> Expr:
    """Calls to generate text that ended a second, by the class of their status."""
    return SumOfKnown(
        tuple(
            Rate(HTTP, (("handler", handler), ("method", "POST"), ("status", status)))
            for handler in GENERATION_HANDLERS
        )
    )


ACCEPTED = http_calls("2xx")
ABORTED = Rate("request_success", (("finished_reason", "abort"),))
GIVEN_UP = Difference(ACCEPTED, FirstOf((Difference(COMPLETED, ABORTED), COMPLETED)))
CALLS = SumOfKnown((ACCEPTED, http_calls("4xx"), http_calls("5xx")))

COMPUTED_PROMPT: Expr = Rate("prompt_tokens_by_source", (("source", "local_compute"),))

LOAD = (
    Signal("running", Gauge("num_requests_running"), "Requests in the batch.", LOGGERS, core=True),
    Signal(
        "waiting",
        Gauge("num_requests_waiting"),
        "Requests in the queue, the deferred ones among them.",
        LOGGERS,
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
        "Requests that wait for a seat, a token budget or KV blocks.",
        LOGGERS,
        needs="vLLM 0.20 or later; before it `waiting` serves",
    ),
    Signal(
        "waiting_deferred",
        Gauge("num_requests_waiting_by_reason", (("reason", "deferred"),)),
        "Requests held back though there is capacity: for an adapter slot, a KV transfer, a "
        "grammar.",
        LOGGERS,
        needs="vLLM 0.20 or later",
        optional=True,
    ),
    Signal(
        "awake",
        Gauge("engine_sleep_state", (("sleep_state", "awake"),)),
        "1 while the engine is awake, 0 while sleep mode has taken its weights off the GPU.",
        LOGGERS,
        needs="vLLM 0.11 or later",
        optional=True,
    ),
    Signal(
        "running_avg",
        OverTime("num_requests_running", "avg"),
        "Requests in the batch, mean over the window.",
        LOGGERS,
    ),
    Signal(
        "running_max",
        OverTime("num_requests_running", "max"),
        "Requests in the batch, highest scrape of the window.",
        LOGGERS,
    ),
    Signal(
        "running_min",
        OverTime("num_requests_running", "min"),
        "Requests in the batch, lowest scrape of the window.",
        LOGGERS,
    ),
    Signal(
        "waiting_avg",
        OverTime("num_requests_waiting", "avg"),
        "Requests in the queue, mean over the window.",
        LOGGERS,
    ),
    Signal(
        "waiting_min",
        OverTime("num_requests_waiting", "min"),
        "Requests in the queue, lowest scrape of the window.",
        LOGGERS,
    ),
    Signal(
        "expected_wait_s",
        EXPECTED_WAIT,
        "Expected wait in the queue by Little's law: requests queued for capacity, mean over the "
        "window, over requests finished a second; over first tokens a second where none finished. "
        "No value where none left the queue.",
        LOGGERS,
    ),
    Signal(
        "waiting_slope_per_s",
        Slope("num_requests_waiting"),
        "How fast the queue grows, least squares over the window.",
        LOGGERS,
    ),
    Signal(
        "waiting_deferred_min",
        OverTime("num_requests_waiting_by_reason", "min", (("reason", "deferred"),)),
        "Deferred requests, lowest scrape of the window.",
        LOGGERS,
        needs="vLLM 0.20 or later",
        optional=True,
    ),
    Signal(
        "waiting_deferred_avg",
        OverTime("num_requests_waiting_by_reason", "avg", (("reason", "deferred"),)),
        "Deferred requests, mean over the window.",
        LOGGERS,
        needs="vLLM 0.20 or later",
        optional=True,
    ),
    Signal(
        "arrival_per_s",
        ARRIVALS,
        "Requests that got their first token a second: arrivals, as soon as a server can "
        "show them.",
        LOGGERS,
    ),
    Signal("completed_per_s", COMPLETED, "Requests finished a second.", LOGGERS, core=True),
    *(
        Signal(
            f"finished_{reason}_per_s",
            Rate("request_success", (("finished_reason", reason),)),
            f"Requests finished a second with reason {reason!r}.",
            LOGGERS,
        )
        for reason in FINISH_REASONS
    ),
    Signal(
        "finished_length_ratio",
        Ratio(Rate("request_success", (("finished_reason", "length"),)), COMPLETED),
        "Share of finished requests that ran into their output limit.",
        "guide 9.4; " + LOGGERS,
    ),
    Signal(
        "finished_error_ratio",
        Ratio(Rate("request_success", (("finished_reason", "error"),)), COMPLETED),
        "Share of finished requests that failed.",
        LOGGERS,
    ),
    Signal(
        "rejected_per_s",
        Rate("admission_rejections"),
        "Requests that vLLM refuses a second (HTTP 503), as its queue is at the configured limit.",
        "guide 9.4; " + LOGGERS,
        needs="vLLM 0.32 with --max-num-queued-reqs or --max-num-queued-tokens",
        optional=True,
    ),
)

CONSERVATION = (
    Signal(
        "accepted_per_s",
        ACCEPTED,
        "Calls to generate text that vLLM accepted and that ended a second: finished, or given up "
        "by their client.",
        HTTP_SOURCE,
        needs=ONE_ENGINE,
        optional=True,
    ),
    Signal(
        "given_up_per_s",
        GIVEN_UP,
        "Accepted calls a second that ended before their request finished, by conservation: "
        "accepted less finished. vLLM does not count most of them.",
        HTTP_SOURCE,
        needs=ONE_ENGINE,
        optional=True,
    ),
    Signal(
        "given_up_ratio",
        Ratio(GIVEN_UP, ACCEPTED),
        "Share of the accepted calls that ended before their request finished.",
        HTTP_SOURCE,
        needs=ONE_ENGINE,
        optional=True,
    ),
    Signal(
        "client_error_per_s",
        http_calls("4xx"),
        "Calls to generate text that vLLM refused a second as wrong (HTTP 4xx).",
        HTTP_SOURCE,
        needs=ONE_ENGINE,
        optional=True,
    ),
    Signal(
        "client_error_ratio",
        Ratio(http_calls("4xx"), CALLS),
        "Share of the calls to generate text that vLLM refused as wrong (HTTP 4xx).",
        HTTP_SOURCE,
        needs=ONE_ENGINE,
        optional=True,
    ),
)

KV = (
    Signal(
        "kv_usage_ratio",
        Gauge("kv_cache_usage_perc"),
        "Share of KV blocks that live requests hold; cached blocks that nobody holds count "
        "as free.",
        "guide 7.7, 9.3; " + LOGGERS,
        core=True,
    ),
    Signal(
        "kv_usage_avg_ratio",
        OverTime("kv_cache_usage_perc", "avg"),
        "KV usage, mean over the window.",
        "guide 9.3",
    ),
    Signal(
        "kv_usage_max_ratio",
        OverTime("kv_cache_usage_perc", "max"),
        "KV usage, highest scrape of the window.",
        "guide 9.3",
    ),
    Signal(
        "kv_usage_slope_per_s",
        Slope("kv_cache_usage_perc"),
        "How fast KV usage grows, least squares over the window.",
        "guide 7.4",
    ),
    Signal(
        "kv_capacity_tokens",
        FirstOf(
            (
                InfoNumber("cache_config_info", "kv_cache_size_tokens"),
                Product(
                    InfoNumber("cache_config_info", "num_gpu_blocks"),
                    InfoNumber("cache_config_info", "block_size"),
                ),
            )
        ),
        "Tokens that the KV cache holds, by the server's own figure.",
        LOGGERS,
    ),
    Signal(
        "preemption_per_s",
        Rate("num_preemptions"),
        "Running requests thrown out of the KV cache a second, to be recomputed.",
        "guide 7.4; " + LOGGERS,
        core=True,
    ),
    Signal(
        "preemption_ratio_per_s",
        Ratio(Rate("num_preemptions"), OverTime("num_requests_running", "avg")),
        "Preemptions per second and running request: the guide's eviction rate of active requests.",
        "guide 7.4, 9.3",
    ),
    Signal(
        "prefix_hit_ratio",
        Ratio(Rate("prefix_cache_hits"), Rate("prefix_cache_queries")),
        "Share of looked-up prompt tokens that the prefix cache had.",
        "guide 7.2, 7.7; " + LOGGERS,
    ),
    Signal(
        "prefix_block_tokens",
        FirstOf(
            (
                InfoNumber("cache_config_info", "cache_hit_alignment_tokens"),
                InfoNumber("cache_config_info", "block_size"),
            )
        ),
        "Tokens of the shortest prefix that can hit: the prefix cache holds whole blocks only.",
        LOGGERS,
        optional=True,
    ),
    Signal(
        "prefix_hit_tokens_mean",
        Ratio(Rate("prefix_cache_hits"), ARRIVALS),
        "Prompt tokens that the prefix cache had, a request.",
        "guide 7.2; " + LOGGERS,
    ),
    Signal(
        "prefix_query_per_s",
        Rate("prefix_cache_queries"),
        "Prompt tokens looked up in the prefix cache a second; zero with caching off.",
        LOGGERS,
    ),
    Signal(
        "prefix_saved_ratio",
        Complement(Ratio(COMPUTED_PROMPT, Rate("prompt_tokens"))),
        "Share of prompt tokens that were not computed, whatever cache had them.",
        "guide 7.7; " + LOGGERS,
        needs="vLLM 0.16 or later",
    ),
    Signal(
        "kv_residency_s",
        mean("kv_block_lifetime_seconds"),
        "How long an evicted KV block had been in the cache, mean.",
        "guide 7.7; " + LOGGERS,
        needs="--kv-cache-metrics",
        optional=True,
    ),
    Signal(
        "kv_idle_before_evict_s",
        mean("kv_block_idle_before_evict_seconds"),
        "How long an evicted KV block had not been used, mean.",
        LOGGERS,
        needs="--kv-cache-metrics",
        optional=True,
    ),
    Signal(
        "block_eviction_per_s",
        PartRate("kv_block_lifetime_seconds", "count"),
        "Sampled KV blocks reused for something else a second (divide by the sampling rate).",
        "guide 7.4; " + LOGGERS,
        needs="--kv-cache-metrics",
        optional=True,
    ),
    Signal(
        "block_reuse_per_s",
        PartRate("kv_block_reuse_gap_seconds", "count"),
        "Sampled evicted KV blocks that had been used again before, a second.",
        LOGGERS,
        needs="--kv-cache-metrics",
        optional=True,
    ),
    Signal(
        "kv_reuse_gap_s",
        mean("kv_block_reuse_gap_seconds"),
        "Time between two uses of a KV block, mean over those of evicted blocks.",
        LOGGERS,
        needs="--kv-cache-metrics",
        optional=True,
    ),
    Signal(
        "external_hit_ratio",
        Ratio(Rate("external_prefix_cache_hits"), Rate("external_prefix_cache_queries")),
        "Share of looked-up tokens that an external KV tier had.",
        LOGGERS,
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
            LOGGERS,
            core=core and percent == 99,
        )
        for percent in (50, 95, 99)
    )
    return (*quantiles, Signal(f"{name}_mean_s", mean(metric), f"{help_text}, mean.", LOGGERS))


LATENCY = (
    *_family("ttft", TTFT, "Time to first token", core=True),
    *_family("itl", ITL, "Time between two outputs of a request", core=True),
    *_family(
        "tpot",
        "request_time_per_output_token_seconds",
        "Decode time per output token, at a request's end",
    ),
    *_family("queue", QUEUE, "Time in the queue up to the last scheduling, at a request's end"),
    *_family("prefill", PREFILL, "Time from scheduling to the first token, at a request's end"),
    *_family("decode", DECODE, "Time from the first token to the last, at a request's end"),
    *_family("e2e", E2E, "Time of a whole request, at its end"),
    Signal(
        "ttft_itl_ratio",
        Ratio(mean(TTFT), mean(ITL)),
        "Mean TTFT over mean ITL: high says prefill or queue, low says decode.",
        "guide 8.4",
    ),
    Signal(
        "ttft_p99_p50_ratio",
        Ratio(Quantile(TTFT, 0.99), Quantile(TTFT, 0.5)),
        "How far the tail of TTFT has left its middle.",
        "guide 8.1",
    ),
    Signal(
        "itl_p99_p50_ratio",
        Ratio(Quantile(ITL, 0.99), Quantile(ITL, 0.5)),
        "How far the tail of ITL has left its middle.",
        "guide 9.3",
    ),
    Signal(
        "itl_stall_per_s",
        AboveRate(ITL, STALL_EDGES_S[0]),
        "Outputs a second that came half a second or more after the one before.",
        "guide 6.4, 9.3",
    ),
    Signal(
        "itl_stall_time_ratio",
        SlowTimeShare(ITL, STALL_EDGES_S),
        "Least share of decode time spent in pauses of half a second and more.",
        "guide 6.4, 9.3",
    ),
    Signal(
        "queue_share_ratio",
        Ratio(PartRate(QUEUE, "sum"), PartRate(E2E, "sum")),
        "Share of request time spent in the queue.",
        "guide 8.4",
    ),
    Signal(
        "prefill_share_ratio",
        Ratio(PartRate(PREFILL, "sum"), PartRate(E2E, "sum")),
        "Share of request time spent in prefill.",
        "guide 8.4",
    ),
    Signal(
        "prefill_service_ratio",
        Ratio(PartRate(PREFILL, "sum"), Sum((PartRate(PREFILL, "sum"), PartRate(DECODE, "sum")))),
        "Share of prefill in the time that requests are served: without the queue.",
        "guide 8.4; " + LOGGERS,
    ),
    Signal(
        "prefill_long_per_s",
        AboveRate(PREFILL, STALL_EDGES_S[0]),
        "Prefills a second of half a second and more, at the requests' ends.",
        "guide 6.4; " + LOGGERS,
    ),
    Signal(
        "decode_share_ratio",
        Ratio(PartRate(DECODE, "sum"), PartRate(E2E, "sum")),
        "Share of request time spent in decode.",
        "guide 8.4",
    ),
)

WORKLOAD = (
    *(
        Signal(
            f"{name}_tokens_p{percent}",
            Quantile(metric, percent / 100),
            f"{help_text}, P{percent} by histogram interpolation.",
            "guide 1.1; " + LOGGERS,
        )
        for name, metric, help_text in (
            ("prompt", PROMPT_LENGTH, "Prompt length of finished requests"),
            ("output", OUTPUT_LENGTH, "Output length of finished requests"),
        )
        for percent in (50, 95, 99)
    ),
    Signal("prompt_tokens_mean", mean(PROMPT_LENGTH), "Prompt length, mean.", LOGGERS),
    Signal("output_tokens_mean", mean(OUTPUT_LENGTH), "Output length, mean.", LOGGERS),
    Signal(
        "prefill_tokens_p50",
        Quantile("request_prefill_kv_computed_tokens", 0.5),
        "Prompt tokens a request had to compute, P50: what the caches did not have.",
        LOGGERS,
        needs="vLLM 0.13 or later",
    ),
    Signal(
        "prefill_tokens_p95",
        Quantile("request_prefill_kv_computed_tokens", 0.95),
        "Prompt tokens a request had to compute, P95.",
        LOGGERS,
        needs="vLLM 0.13 or later",
    ),
    Signal(
        "prompt_tokens_per_s",
        Rate("prompt_tokens"),
        "Prompt tokens a second, cached ones included.",
        LOGGERS,
        core=True,
    ),
    Signal(
        "computed_prompt_tokens_per_s",
        FirstOf(
            (
                COMPUTED_PROMPT,
                Difference(Rate("prompt_tokens"), Rate("prefix_cache_hits")),
                Rate("prompt_tokens"),
            )
        ),
        "Prompt tokens computed a second: the prefill work; before 0.16 prompts less cache hits.",
        LOGGERS,
    ),
    Signal(
        "generation_tokens_per_s",
        Rate("generation_tokens"),
        "Tokens generated a second.",
        "guide 9.3; " + LOGGERS,
        core=True,
    ),
    Signal(
        "large_step_per_s",
        AboveRate("iteration_tokens_total", 256),
        "Steps a second of more than 256 tokens: with fewer there is no prompt to split.",
        "guide 6.4; " + LOGGERS,
    ),
    Signal(
        "iteration_tokens_mean",
        mean("iteration_tokens_total"),
        "Tokens in one engine step, mean.",
        LOGGERS,
    ),
)

SPECULATION = (
    Signal(
        "spec_acceptance_ratio",
        Ratio(Rate("spec_decode_num_accepted_tokens"), Rate("spec_decode_num_draft_tokens")),
        "Share of drafted tokens that the model accepted.",
        "guide 6.6, 9.3; " + LOGGERS,
        needs="speculative decoding",
        optional=True,
    ),
    Signal(
        "spec_accepted_per_draft_tokens",
        Ratio(Rate("spec_decode_num_accepted_tokens"), Rate("spec_decode_num_drafts")),
        "Drafted tokens accepted in one verification, mean.",
        "guide 6.6; " + LOGGERS,
        needs="speculative decoding",
        optional=True,
    ),
    Signal(
        "spec_draft_tokens_per_s",
        Rate("spec_decode_num_draft_tokens"),
        "Tokens drafted a second.",
        LOGGERS,
        needs="speculative decoding",
        optional=True,
    ),
    *(
        Signal(
            f"spec_acceptance_pos{position}_ratio",
            Ratio(
                Rate("spec_decode_num_accepted_tokens_per_pos", (("position", str(position)),)),
                Rate("spec_decode_num_drafts"),
            ),
            f"Share of drafts whose token at position {position} was accepted.",
            "guide 6.6; " + LOGGERS,
            needs="speculative decoding",
            optional=True,
        )
        for position in SPEC_POSITIONS
    ),
)

LORA = (
    Signal(
        "lora_running",
        InfoNames("lora_requests_info", "running_lora_adapters"),
        "Adapters with a request in the batch.",
        LOGGERS,
        needs="--enable-lora",
        optional=True,
    ),
    Signal(
        "lora_waiting",
        InfoNames("lora_requests_info", "waiting_lora_adapters"),
        "Adapters with a waiting request, as far as vLLM shows them.",
        LOGGERS,
        needs="--enable-lora",
        optional=True,
    ),
    Signal(
        "lora_max",
        InfoNumber("lora_requests_info", "max_lora"),
        "Adapters that fit on the GPU at a time (--max-loras).",
        LOGGERS,
        needs="--enable-lora",
        optional=True,
    ),
    Signal(
        "lora_change_per_s",
        InfoChanges("lora_requests_info"),
        "Different sets of running adapters seen a second.",
        LOGGERS,
        needs="--enable-lora",
        optional=True,
    ),
)


def _of_connector(counted: str) -> Expr:
    """The rate of a KV connector's counter, under either connector's name."""
    return FirstOf((Rate(f"nixl_{counted}"), Rate(f"mooncake_{counted}")))


LOADING = Rate(f"{OFFLOAD_LOAD}_time")
LMCACHE_FAILED = Rate("lmcache_get_blocking_failed_count", suffix="")

TRANSFER = (
    Signal(
        "kv_transfer_mean_s",
        Beside(
            FirstOf(
                (
                    mean(XFER),
                    mean(MOONCAKE_XFER),
                    Ratio(LOADING, PartRate(f"{OFFLOAD_LOAD}_size", "count")),
                )
            ),
            mean(LMCACHE_RETRIEVE),
            "max",
        ),
        "Time of one KV transfer between nodes, of one load from an offload tier or of one "
        "retrieve from LMCache (only in the sidecar), mean; of several the longest.",
        "guide 7.6, 7.7; vllm/distributed/kv_transfer (0.32)",
        needs=CONNECTOR,
        optional=True,
    ),
    Signal(
        "kv_transfer_p95_s",
        Beside(
            FirstOf((Quantile(XFER, 0.95), Quantile(MOONCAKE_XFER, 0.95))),
            Quantile(LMCACHE_RETRIEVE, 0.95),
            "max",
        ),
        "Time of one KV transfer between nodes or of one retrieve from LMCache, P95.",
        "guide 7.7; vllm/distributed/kv_transfer (0.32)",
        needs=CONNECTOR,
        optional=True,
    ),
    Signal(
        "kv_transfer_busy_ratio",
        Beside(
            FirstOf((PartRate(XFER, "sum"), PartRate(MOONCAKE_XFER, "sum"), LOADING)),
            PartRate(LMCACHE_RETRIEVE, "sum"),
            "sum",
        ),
        "Seconds of KV transfer per second: transfers, loads or retrieves in flight.",
        "vllm/distributed/kv_transfer (0.32)",
        needs=CONNECTOR,
        optional=True,
    ),
    Signal(
        "kv_transfer_failed_per_s",
        Beside(_of_connector("num_failed_transfers"), LMCACHE_FAILED, "sum"),
        "KV transfers, or LMCache's reads from its remote storage, that failed a second.",
        "vllm/distributed/kv_transfer (0.32)",
        needs=CONNECTOR,
        optional=True,
    ),
    Signal(
        "kv_transfer_bytes_per_s",
        FirstOf(
            (
                *(
                    Ratio(PartRate(f"{name}_bytes_transferred", "sum"), PartRate(time, "sum"))
                    for name, time in (("nixl", XFER), ("mooncake", MOONCAKE_XFER))
                ),
                Ratio(Rate(f"{OFFLOAD_LOAD}_bytes"), LOADING),
            )
        ),
        "Bytes a second that one KV transfer, or load, moves while it lasts.",
        "guide 6.5; vllm/distributed/kv_transfer (0.32)",
        needs=CONNECTOR,
        optional=True,
    ),
    Signal(
        "kv_expired_per_s",
        _of_connector("num_kv_expired_reqs"),
        "Requests a second whose KV expired on the prefill side before it was fetched.",
        "vllm/distributed/kv_transfer (0.32)",
        needs=CONNECTOR,
        optional=True,
    ),
    Signal(
        "kv_external_share_ratio",
        Ratio(
            Rate("prompt_tokens_by_source", (("source", "external_kv_transfer"),)),
            Rate("prompt_tokens"),
        ),
        "Share of prompt tokens whose KV came from elsewhere.",
        "guide 6.5; " + LOGGERS,
        needs="vLLM 0.16 or later",
        optional=True,
    ),
    *(
        Signal(
            key,
            Gauge("num_requests_kv_fetch_by_stage", (("stage", stage),)),
            text,
            LOGGERS,
            needs=CONNECTOR,
            optional=True,
        )
        for key, stage, text in (
            ("kv_fetch_queued", "waiting_to_start", "Requests whose KV is not under way yet."),
            ("kv_fetch_moving", "in_progress", "Requests whose KV is under way."),
            ("kv_fetch_arrived", "completed_waiting", "Requests whose KV is there, and who wait."),
        )
    ),
    Signal(
        "kv_fetch_waiting",
        Gauge("num_requests_kv_fetch_by_stage"),
        "Requests whose KV is being fetched from elsewhere.",
        LOGGERS,
        needs=CONNECTOR,
        optional=True,
    ),
)

LMCACHE_SOURCE = "lmcache/observability.py"

LMCACHE_OWN = tuple(
    Signal(key, HereOnly(expr), text, LMCACHE_SOURCE, needs=LMCACHE, optional=True)
    for key, expr, text in (
        (
            "lmcache_retrieve_mean_s",
            mean(LMCACHE_RETRIEVE),
            "Time of one retrieve of KV from LMCache, of one GPU's share, mean.",
        ),
        (
            "lmcache_retrieve_tokens_per_s",
            mean("lmcache_retrieve_speed"),
            "Tokens a second that one retrieve from LMCache moves while it lasts, mean.",
        ),
        (
            "lmcache_retrieved_ratio",
            Ratio(Rate("lmcache_num_hit_tokens"), Rate("lmcache_num_requested_tokens")),
            "Share of the tokens whose KV was asked of LMCache that it gave.",
        ),
        (
            "lmcache_store_mean_s",
            mean("lmcache_time_to_store"),
            "Time of one store of KV in LMCache, of one GPU's share, mean.",
        ),
        (
            "lmcache_failed_per_s",
            LMCACHE_FAILED,
            "LMCache's reads from its remote storage that failed a second.",
        ),
        (
            "lmcache_healthy",
            Across("lmcache_is_healthy", "min"),
            "1 while every worker's LMCache says that it is healthy, else 0.",
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
)

WORK = (
    Signal(
        "flop_per_s",
        Positive(Rate("estimated_flops_per_gpu")),
        "Floating-point operations a second and GPU, by vLLM's own estimate.",
        "guide 8.4; vllm/v1/metrics/perf.py (0.32)",
        needs="--enable-mfu-metrics",
        optional=True,
    ),
    Signal(
        "memory_bytes_per_s",
        Positive(Rate("estimated_read_bytes_per_gpu")),
        "Bytes read from GPU memory a second, by vLLM's own estimate.",
        "guide 3.3; vllm/v1/metrics/perf.py (0.32)",
        needs="--enable-mfu-metrics",
        optional=True,
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
    """The share of a histogram's observations up to its greatest bucket bound within the target;
    None if the target is below every bound."""
    kept_s = [bound_s for bound_s in bounds_s if bound_s <= target_s]
    return ShareAtMost(metric, kept_s[-1]) if kept_s else None


def within_ttft(target_s: float | None) -> ShareAtMost | None:
    """The share of requests whose first token came within the target, rounded down to a bucket
    bound; None without a target or if it is below every bound."""
    return _within(TTFT, TTFT_BOUNDS_S, target_s or 0.0)


def _goodput(ttft_target_s: float, itl_target_s: float | None) -> Expr | None:
    """Requests/s within the targets: those with the first token in time, less the share of token
    gaps above the ITL target, where one is set; None if a target is below every bucket bound.

    vLLM counts gaps, not requests with a slow one: late gaps are taken to be spread over requests
    that were in time, as in the report.
    """
    first = within_ttft(ttft_target_s)
    if first is None or itl_target_s is None:
        return first and Product(first, ARRIVALS)
    smooth = _within(ITL, ITL_BOUNDS_S, itl_target_s)
    return smooth and Product(Difference(first, Complement(smooth)), ARRIVALS)


def configured(
    *,
    ttft_slo_s: float | None = None,
    itl_slo_s: float | None = None,
    gpus: int | None = None,
    peak_flop_per_s: float | None = None,
    peak_bytes_per_s: float | None = None,
) -> tuple[Signal, ...]:
    """The signals that depend on settings: SLO, number of GPUs, one GPU's peaks.

    Signals whose setting is missing are left out; `unconfigured` names them.
    """
    signals: list[Signal] = []
    goodput = None if ttft_slo_s is None else _goodput(ttft_slo_s, itl_slo_s)
    if goodput is not None:
        signals.append(
            Signal(
                "goodput_per_s",
                goodput,
                "Requests a second within the targets: with the first token in time, less the "
                "share of token gaps above the ITL target, if one is set. Targets are rounded down "
                "to a bucket bound.",
                "guide 8.4",
            )
        )
    if gpus is not None:
        per_hour = Rate("generation_tokens")
        signals.append(
            Signal(
                "tokens_per_gpu_hour",
                Scaled(per_hour, 3600 / gpus),
                "Tokens generated per GPU and hour at the present rate.",
                "guide 9.3",
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
                    Scaled(Positive(Rate(metric)), 1 / peak),
                    "Achieved share of one GPU's peak, by vLLM's own estimate of the work.",
                    "guide 8.4",
                    needs="--enable-mfu-metrics",
                    optional=True,
                )
            )
    return tuple(signals)
