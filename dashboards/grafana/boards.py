"""The dashboards and their panels in reading order, independent of Grafana's file format. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from kneewatch.collector.names.vllm_metrics import PREFIXES
from kneewatch.collector.signals.expr import any_of
from kneewatch.rules.facts import recorded
from kneewatch.rules.library import RULES
from kneewatch.rules.rule import Severity

Kind = Literal["line", "number", "states", "rows"]

SELECTOR = (
    'cluster=~"$cluster", namespace=~"$namespace", tier=~"$tier", model_name=~"$model",'
    ' pod=~"$pod", instance=~"$replica"'
)
OF_REPLICA = "{{pod}} {{instance}}"
"""The legend for the series of a replica. A server outside of Kubernetes has only the instance."""
UNITS = (
    ("_ratio_per_s", "percentunit"),
    ("_ratio", "percentunit"),
    ("_tokens_per_s", "short"),
    ("_per_s", "short"),
    ("_bytes", "bytes"),
    ("_watts", "watt"),
    ("_celsius", "celsius"),
    ("_s", "s"),
)
"""Grafana's units by the suffix of a signal's key."""


class Query(Struct, frozen=True):
    """A PromQL expression, and the legend for its series."""

    expr: str
    legend: str = OF_REPLICA


class Panel(Struct, frozen=True):
    """A panel. `bounds` are pairs of value and severity that are drawn, sorted by value."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "line"
    bounds: tuple[tuple[float, str], ...] = ()
    below: bool = False
    """Whether the signal is bad below its bounds."""
    width: int = 8
    triage: bool = False
    """Whether each series links to the triage page of its replica."""


class Row(Struct, frozen=True):
    """A heading with the panels below it."""

    title: str
    panels: tuple[Panel, ...]


class Board(Struct, frozen=True):
    """A dashboard. `uid` never changes, because links contain it."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]


def signal(key: str) -> str:
    """A PromQL selector for a recorded signal of the chosen replicas."""
    return f"{recorded(key)}{{{SELECTOR}}}"


def own(name: str) -> str:
    """A PromQL selector for one of kneewatch's own metrics, of the chosen models."""
    return f'kneewatch_{name}{{model=~"$model"}}'


def unit_of(key: str) -> str:
    """Grafana's unit for a signal."""
    return next((unit for end, unit in UNITS if key.endswith(end)), "short")


def bounds_of(key: str) -> tuple[tuple[tuple[float, str], ...], bool]:
    """The bounds of the rules for a signal, and whether the signal is bad below them."""
    rules = [rule for rule in RULES if rule.signal == key]
    for rule in rules:
        shown = {
            bound.threshold: bound.severity.word
            for bound in rule.bounds
            if bound.threshold > 0 and bound.severity >= Severity.INFO
        }
        if shown:
            return tuple(sorted(shown.items())), rule.below
    return (), False


def lines(
    title: str,
    description: str,
    *keys: str,
    legend: str = OF_REPLICA,
    width: int = 8,
) -> Panel:
    """A panel with one or more signals. The bounds are those of the rule for the first signal."""
    bounds, below = bounds_of(keys[0])
    named = len(keys) > 1
    return Panel(
        title,
        description,
        tuple(Query(signal(key), f"{key} {legend}" if named else legend) for key in keys),
        unit_of(keys[0]),
        bounds=bounds,
        below=below,
        width=width,
        triage=True,
    )


def day_before(title: str, description: str, key: str) -> Panel:
    """A panel with a signal now and a day earlier."""
    queries = (
        Query(signal(key), f"now {OF_REPLICA}"),
        Query(f"{signal(key)} offset 1d", f"a day earlier {OF_REPLICA}"),
    )
    return Panel(title, description, queries, unit_of(key), triage=True)


def tail(title: str, description: str, name: str) -> Panel:
    """A panel with a latency's P99 divided by its P50, with the bounds of that signal's rule."""
    bounds, _ = bounds_of(f"{name}_p99_p50_ratio")
    ratio = Query(f"{signal(f'{name}_p99_s')} / ({signal(f'{name}_p50_s')} > 0)")
    return Panel(title, description, (ratio,), bounds=bounds, triage=True)


# --- The dashboard of GPUs ------------------------------------------------------------------------

ENOUGH = "On in dcgm-exporter's default list of fields."
RECOMMENDED = "Needs the recommended list of fields (kneewatch export dcgm)."
GPU = "{{Hostname}}{{hostname}} {{gpu}}"


def _of(field: str) -> str:
    return f'DCGM_FI_{field}{{Hostname=~"$node|"}}'


def _panel(
    title: str,
    what: str,
    expr: str,
    unit: str = "short",
    bounds: tuple[tuple[float, str], ...] = (),
) -> Panel:
    return Panel(title, what, (Query(expr, GPU),), unit, bounds=bounds)


GPUS = Board(
    "kneewatch-gpus",
    "kneewatch: GPUs",
    "Bandwidth, compute, clocks, heat and errors of the GPUs.",
    (
        Row(
            "Work",
            (
                _panel("Engine active",
                       f"Share of time in which a kernel ran; not a measure of load. {ENOUGH}",
                       _of("PROF_GR_ENGINE_ACTIVE"), "percentunit"),
                _panel("Memory bandwidth active", f"High when memory-bound (decode). {ENOUGH}",
                       _of("PROF_DRAM_ACTIVE"), "percentunit"),
                _panel("Tensor pipe active", f"High when compute-bound (prefill). {ENOUGH}",
                       _of("PROF_PIPE_TENSOR_ACTIVE"), "percentunit"),
            ),
        ),
        Row(
            "Limits",
            (
                _panel("Power", ENOUGH, _of("DEV_POWER_USAGE"), "watt"),
                _panel("Temperature", ENOUGH, _of("DEV_GPU_TEMP"), "celsius",
                       ((83.0, "warning"), (90.0, "critical"))),
                _panel("SM clock", f"Falls under load when the GPU is throttled. {ENOUGH}",
                       f"1e6 * {_of('DEV_SM_CLOCK')}", "hertz"),
                _panel("Memory used",
                       f"vLLM allocates its share at start-up: high is not KV pressure. "
                       f"{ENOUGH}", f"1048576 * {_of('DEV_FB_USED')}", "bytes"),
            ),
        ),
        Row(
            "Errors",
            (
                _panel("XID", f"The newest code, not a count. {ENOUGH}", _of("DEV_XID_ERRORS")),
                _panel("Row remap failed", f"Above 0: replace the GPU. {ENOUGH}",
                       _of("DEV_ROW_REMAP_FAILURE"), bounds=((1.0, "critical"),)),
                _panel("PCIe replays", f"Retransmissions/s. {ENOUGH}",
                       f"rate({_of('DEV_PCIE_REPLAY_COUNTER')}[5m])"),
                _panel("Double-bit errors", RECOMMENDED, _of("DEV_ECC_DBE_VOL_TOTAL"),
                       bounds=((1.0, "critical"),)),
            ),
        ),
    ),
)  # fmt: skip


# --- The dashboards: what is on each, in reading order --------------------------------------------


TIER = "by (namespace, tier, model_name)"
NAMED = "{{namespace}} {{model_name}} {{tier}}"
ADAPTERS_INFO = any_of("__name__", (f"{prefix}lora_requests_info" for prefix in PREFIXES))
STAGES = ((1.0, "info"), (2.0, "warning"), (4.0, "critical"))
IN_FLIGHT = f"{signal('running')} + {signal('waiting')}"
DAEMON = "Needs a running kneewatch that Prometheus scrapes."
WORST = "A mean would hide the worst replica."

FLEET = Board(
    "kneewatch-fleet",
    "kneewatch: fleet",
    "Every tier at a glance: replicas with problems, and the load of the tiers.",
    (
        Row(
            "Now",
            (
                Panel("Replicas", "Replicas whose metrics are scraped, by tier.",
                      (Query(f"count {TIER} ({signal('running')})", NAMED),),
                      kind="number", width=6),
                Panel("Worst stage", f"The highest stage of the KV cascade by model. {DAEMON}",
                      (Query(f"max by (model) ({own('stage')})", "{{model}}"),),
                      kind="number", bounds=STAGES, width=6),
                Panel("Causes", f"Causes by target: 1 info, 2 warning, 3 critical. {DAEMON}",
                      (Query(f"{own('cause_severity')} or on () vector(0)",
                             "{{cause}} {{target}} {{model}}"),),
                      kind="rows", width=12),
            ),
        ),
        Row(
            "By tier",
            (
                Panel("Requests in flight", "Running and queued, by tier.",
                      (Query(f"sum {TIER} ({signal('running')})", f"running {NAMED}"),
                       Query(f"sum {TIER} ({signal('waiting')})", f"waiting {NAMED}"))),
                Panel("KV usage, highest and lowest", WORST,
                      (Query(f"max {TIER} ({signal('kv_usage_avg_ratio')})",
                             f"worst {NAMED}"),
                       Query(f"min {TIER} ({signal('kv_usage_avg_ratio')})",
                             f"least {NAMED}")),
                      unit="percentunit", bounds=((0.9, "info"),)),
                Panel("Generated tokens/s", "By tier.",
                      (Query(f"sum {TIER} ({signal('generation_tokens_per_s')})",
                             NAMED),)),
                Panel("TTFT P99, worst replica", WORST,
                      (Query(f"max {TIER} ({signal('ttft_p99_s')})", NAMED),),
                      unit="s"),
                Panel("ITL P99, worst replica", WORST,
                      (Query(f"max {TIER} ({signal('itl_p99_s')})", NAMED),),
                      unit="s"),
                Panel("Load spread",
                      "Busiest replica divided by the mean of its tier; 1 means even.",
                      (Query(f"max {TIER} ({signal('running_avg')})"
                             f" / (avg {TIER} ({signal('running_avg')}) > 0)",
                             NAMED),),
                      bounds=((2, "warning"),)),
            ),
        ),
    ),
)  # fmt: skip

REPLICA = Board(
    "kneewatch-replica",
    "kneewatch: one replica",
    "One replica from its queue to its tokens.",
    (
        Row(
            "Load",
            (
                lines("In flight", "Requests running and waiting.", "running", "waiting"),
                lines("Arrivals and completions", "Requests/s.", "arrival_per_s",
                      "completed_per_s"),
                lines("Tokens", "Computed prompt tokens/s and generated tokens/s.",
                      "computed_prompt_tokens_per_s", "generation_tokens_per_s"),
            ),
        ),
        Row(
            "Latency and memory",
            (
                lines("TTFT", "Time to the first token.", "ttft_p50_s", "ttft_p99_s"),
                lines("ITL", "Time between outputs of a stream.", "itl_p50_s", "itl_p99_s"),
                lines("KV usage",
                      "Share of blocks that running requests hold; cached ones count as free.",
                      "kv_usage_avg_ratio", "kv_usage_max_ratio"),
                lines("Preempted", "Share of running requests preempted per second.",
                      "preemption_ratio_per_s"),
                lines("Lengths", "Prompt and output tokens, P99.", "prompt_tokens_p99",
                      "output_tokens_p99"),
                lines("How requests end", "Finished requests/s, by reason.", "finished_stop_per_s",
                      "finished_length_per_s", "finished_abort_per_s", "finished_error_per_s"),
            ),
        ),
    ),
)  # fmt: skip

CASCADE = Board(
    "kneewatch-cascade",
    "kneewatch: the KV cascade",
    "The KV memory-pressure cascade: filling, evicting, queueing, collapsing.",
    (
        Row(
            "Stage",
            (
                Panel("Stage",
                      f"0 steady, 1 filling, 2 evicting, 3 queueing, 4 collapsing. {DAEMON}",
                      (Query(own("stage"), "{{target}} {{engine}}"),), kind="states",
                      bounds=STAGES, width=24),
            ),
        ),
        Row(
            "Evidence",
            (
                lines("KV usage", "Stage 1: nearly full. Target at the peak: 75-90%.",
                      "kv_usage_avg_ratio"),
                lines("Preempted", "Stage 2: share of running requests preempted per second.",
                      "preemption_ratio_per_s"),
                lines("Queued for capacity", "Stage 3: the queue behind the full cache.",
                      "waiting_by_capacity"),
                day_before("TTFT P99", "Stage 3: P99 now, and a day earlier.", "ttft_p99_s"),
                lines("Generated tokens/s", "Stage 4: falls while the load holds.",
                      "generation_tokens_per_s"),
            ),
        ),
    ),
)  # fmt: skip

CACHE = Board(
    "kneewatch-cache",
    "kneewatch: KV and prefix cache",
    "KV cache usage and residency, and what the prefix cache saves.",
    (
        Row(
            "KV cache",
            (
                lines("KV usage", "Share of blocks that running requests hold.",
                      "kv_usage_avg_ratio",
                      "kv_usage_max_ratio"),
                lines("Residency", "Mean lifetime of a block; needs --kv-cache-metrics.",
                      "kv_residency_s"),
                lines("Blocks evicted",
                      "Evictions/s and reuses/s of sampled blocks; needs --kv-cache-metrics.",
                      "block_eviction_per_s", "block_reuse_per_s"),
            ),
        ),
        Row(
            "Prefix cache",
            (
                lines("Hit ratio", "Share of prompt tokens found in the cache.",
                      "prefix_hit_ratio"),
                lines("Saved", "Share of prompt tokens that were not computed.",
                      "prefix_saved_ratio"),
                lines("Prompt tokens looked up", "Tokens/s.", "prefix_query_per_s"),
                day_before("Hit ratio, a day apart", "The hit ratio now, and a day earlier.",
                           "prefix_hit_ratio"),
            ),
        ),
    ),
)  # fmt: skip

LATENCY = Board(
    "kneewatch-latency",
    "kneewatch: latency anatomy",
    "Where a request's time goes: queue, prefill, decode.",
    (
        Row(
            "Shares",
            (
                lines("Queue", "Share of a request's time.", "queue_share_ratio"),
                lines("Prefill", "Share of a request's time.", "prefill_share_ratio"),
                lines("Decode", "Share of a request's time.", "decode_share_ratio"),
            ),
        ),
        Row(
            "Times",
            (
                lines("Queue", "Time until first scheduled.", "queue_mean_s", "queue_p99_s"),
                lines("Prefill", "Mean time to compute the prompt.", "prefill_mean_s"),
                lines("Decode", "Mean time from first to last token.", "decode_mean_s"),
                lines("Whole request", "End to end.", "e2e_p50_s", "e2e_p99_s"),
                tail("Tail of TTFT", "P99 divided by P50; it grows at the knee.", "ttft"),
                tail("Tail of ITL", "P99 divided by P50.", "itl"),
            ),
        ),
    ),
)  # fmt: skip

SPECULATION = Board(
    "kneewatch-speculation",
    "kneewatch: speculative decoding",
    "What speculation gains, by position.",
    (
        Row(
            "Speculation",
            (
                lines("Acceptance", "Share of draft tokens accepted.",
                      "spec_acceptance_ratio"),
                lines("Accepted per draft", "Tokens beyond the one that every step generates.",
                      "spec_accepted_per_draft_tokens"),
                lines("Drafted", "Draft tokens/s.", "spec_draft_tokens_per_s"),
                Panel("Acceptance by position",
                      "Drafting a position that is rarely accepted is wasted work.",
                      tuple(Query(signal(f"spec_acceptance_pos{at}_ratio"), f"position {at}")
                            for at in range(8)),
                      unit="percentunit", width=24),
            ),
        ),
    ),
)  # fmt: skip

ADAPTERS = Board(
    "kneewatch-lora",
    "kneewatch: LoRA adapters",
    "Adapters that compete for slots, and requests that wait for one.",
    (
        Row(
            "Adapters",
            (
                lines("Held back", "Requests that wait for an adapter slot.", "waiting_deferred",
                      "waiting_deferred_avg"),
                lines("Changes", "Changes/s of the set of running adapters.",
                      "lora_change_per_s"),
                Panel("Adapters now", "The newest lora_requests_info series.",
                      (Query(f'topk by (instance) (1, {{{ADAPTERS_INFO}, instance=~"$replica"}})',
                             "{{running_lora_adapters}} of {{max_lora}}"),),
                      kind="rows", width=24),
            ),
        ),
    ),
)  # fmt: skip

CAPACITY = Board(
    "kneewatch-capacity",
    "kneewatch: cost and capacity",
    "Cost, usage, and what a peak needs.",
    (
        Row(
            "Capacity",
            (
                Panel("Peak in flight, 7 days", "The busiest five minutes of each tier.",
                      (Query(f"max_over_time((sum {TIER} ({IN_FLIGHT}))[7d:5m])", NAMED),),
                      kind="number"),
                Panel("KV usage at the peak", "Highest of the week on the worst replica.",
                      (Query(f"max {TIER} (max_over_time({signal('kv_usage_max_ratio')}[7d:5m]))",
                             NAMED),),
                      unit="percentunit", kind="number", bounds=((0.9, "info"),)),
                Panel("Idle time", "Share of the week with fewer than 0.5 requests running.",
                      (Query(f"avg_over_time(({signal('running_avg')} < bool 0.5)[7d:5m])"),),
                      unit="percentunit"),
            ),
        ),
        Row(
            "Cost",
            (
                Panel("Tokens generated, per hour", "By tier.",
                      (Query(f"3600 * sum {TIER} ({signal('generation_tokens_per_s')})",
                             NAMED),)),
                Panel("USD per million tokens", "At the price per replica-hour set above.",
                      (Query(f"$usd_per_hour * count {TIER} ({signal('running')})"
                             f" / (3600e-6 * sum {TIER} ({signal('generation_tokens_per_s')}) > 0)",
                             NAMED),),
                      unit="currencyUSD"),
                Panel("Idle replicas", "Replicas with fewer than 0.5 requests running.",
                      (Query(f"count {TIER} ({signal('running_avg')} < 0.5) or (0 * count {TIER} ("
                             f"{signal('running_avg')}))", NAMED),)),
            ),
        ),
    ),
)  # fmt: skip

BOARDS = (FLEET, REPLICA, CASCADE, CACHE, LATENCY, SPECULATION, ADAPTERS, GPUS, CAPACITY)
