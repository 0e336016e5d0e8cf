"""The sections of a tier as values: workload, size, cost, SLO, tables, knee. Pure."""

from __future__ import annotations

from msgspec import Struct

from kneewatch.diagnose.learned.knee import Range
from kneewatch.reports.weekly.figures import FlagChange, Spark, Trend


class Lengths(Struct, frozen=True):
    """Tokens per request, from the histogram summed over time and engines."""

    p50: Trend
    p95: Trend
    p99: Trend
    mean: Trend
    missing: str = ""


class Arrivals(Struct, frozen=True):
    """Arriving requests/s of the whole tier, over windows of `window_s`."""

    window_s: float
    mean_per_s: Trend
    p95_per_s: Trend
    p99_per_s: Trend
    highest_per_s: float | None
    highest_at_s: float | None
    peak_to_mean_ratio: float | None
    missing: str = ""


class Drift(Struct, frozen=True):
    """A figure of the workload compared with the profile that the size was computed for.

    `ratio` is measured / stated; outside of 1 / `limit` to `limit` the state is warning.
    """

    name: str
    unit: str
    stated: float
    measured: float | None
    ratio: float | None
    limit: float
    state: str


class TierWorkload(Struct, frozen=True):
    """The requests of a tier.

    `archetype` is chat, rag, code or agentic, `archetype_why` the reason; both are empty if the
    lengths are unknown. `drift` is empty without a stated profile; `drift_missing` explains it.
    """

    tier: str
    prompt: Lengths
    output: Lengths
    computed_prompt_ratio: float | None
    arrivals: Arrivals
    archetype: str
    archetype_why: str
    bottleneck: str
    drift: tuple[Drift, ...]
    drift_missing: str


class MemoryPart(Struct, frozen=True):
    """A part of one GPU's memory."""

    name: str
    bytes: float


class Option(Struct, frozen=True):
    """A launch that can serve the measured workload."""

    gpu: str
    tensor_parallel: int
    replicas: int
    gpus: int
    usd_per_hour: float | None
    usable_requests_per_s: float | None
    text: str


class LeverFigure(Struct, frozen=True):
    """A figure that a lever changes."""

    signal: str
    before: float | None
    after: float | None


class Lever(Struct, frozen=True):
    """A change that would alter the size. `saves_usd_per_hour` is negative if it costs more."""

    id: str
    summary: str
    changes: tuple[FlagChange, ...]
    figures: tuple[LeverFigure, ...]
    gpus_after: int | None
    saves_usd_per_hour: float | None


class TierSize(Struct, frozen=True):
    """The sizing of a tier on the measured workload.

    `verdict` is right, too small, too large or unknown. `usable_source`: where the requests/s of
    one engine come from: stated, learned (from the period's own windows) or predicted.
    `replicas_needed` carry the peak with a margin: of the counts that do, the one nearest to
    `replicas_present`. `doubts` are reasons to doubt the verdict. `headroom_ratio` is capacity /
    peak - 1. `relative`: the settings have no model and GPU, so only the load relative to the
    learned capacity is known. `memory` is that of one GPU.
    """

    tier: str
    verdict: str
    relative: bool
    replicas_present: int
    replicas_needed: int | None
    gpus_present: int | None
    gpus_needed: int | None
    peak_requests_per_s: float | None
    usable_requests_per_s: float | None
    usable_source: str
    safety: float
    headroom_ratio: float | None
    memory: tuple[MemoryPart, ...]
    gpu_memory_bytes: float | None
    kv_capacity_tokens: float | None
    kv_peak_tokens: float | None
    kv_peak_ratio: float | None
    options: tuple[Option, ...]
    levers: tuple[Lever, ...]
    notes: tuple[str, ...]
    missing: str = ""
    doubts: tuple[str, ...] = ()


class Saving(Struct, frozen=True):
    """What applying a recommendation would save (negative: cost), and its risk."""

    id: str
    target: str
    engine: str
    summary: str
    fate: str
    saves_usd_per_hour: float | None
    saves_usd_per_month: float | None
    risk: str


class TierMoney(Struct, frozen=True):
    """What a tier cost and what it generated.

    Every hour in which an engine was watched is paid. `idle_hours`: GPU-hours of engines without
    load; `utilization_ratio`: mean share of the usable capacity that was used;
    `utilization_basis`: how it was computed. `requests_in_time_per_usd`: requests within the
    targets for each dollar; `tokens_per_s_per_hbm_gb`: generated tokens for each 10^9 bytes of GPU
    memory.
    """

    tier: str
    gpus: int | None
    gpu_hours: float | None
    usd_per_gpu_hour: float | None
    price_source: str
    usd: Trend
    tokens_per_gpu_hour: Trend
    usd_per_million_tokens: Trend
    requests_per_s_per_gpu: Trend
    requests_in_time_per_usd: Trend
    tokens_per_s_per_hbm_gb: Trend
    usd_per_million_tokens_at_full: float | None
    utilization_ratio: Trend
    utilization_basis: str
    idle_hours: float | None
    idle_ratio: float | None
    idle_usd: float | None
    savings: tuple[Saving, ...]
    missing: str = ""


# --- Service of a tier: the guide's tables, the SLO, the knee ------------------------------------


class TableRow(Struct, frozen=True):
    """A row of the table of monitoring or of KV metrics for one tier.

    `figures` are one to three values, such as P50 and P99. `band` is the target as text; `low` and
    `high` are its bounds, if numeric, in the unit of the last figure. `state` is ok, info, warning,
    critical, unknown (`missing`: what is missing, `enable`: how to enable it), trend (no bound) or
    off (the feature in `missing` is not in use). `advice`: what to do if the state is not ok.
    `how`: how the value was computed.
    """

    section: str
    subject: str
    figures: tuple[Trend, ...]
    band: str
    low: float | None
    high: float | None
    state: str
    advice: str
    missing: str
    enable: str
    how: str
    rules: tuple[str, ...]
    causes: tuple[str, ...]
    spark: Spark | None


class TierTables(Struct, frozen=True):
    """The tables of monitoring and of KV metrics, every row, of one tier."""

    tier: str
    monitoring: tuple[TableRow, ...]
    kv: tuple[TableRow, ...]


class Latency(Struct, frozen=True):
    """A latency of all requests in the period, from the histogram summed over time and engines.

    `name` is ttft, itl, e2e, queue, prefill or decode. `budget_s` is the P99 target, None if not
    set; `within_ratio` the share of observations within it; `state` ok, warning (P99 exceeds it),
    critical (P50 exceeds it) or unknown.
    """

    name: str
    p50: Trend
    p95: Trend
    p99: Trend
    mean: Trend
    observations: float
    budget_s: float | None
    within_ratio: float | None
    judged_at_s: float | None
    state: str
    missing: str = ""


class ErrorBudget(Struct, frozen=True):
    """The error budget of the SLO and how much of it was spent.

    `objective_ratio`: share of requests whose first token must come within the target; `bad_ratio`:
    share that did not; `spent_ratio`: bad / allowed, above 1 the budget is exhausted.
    """

    objective_ratio: float
    requests: float
    bad_requests: float | None
    bad_ratio: float | None
    spent_ratio: float | None
    missing: str = ""


class Hour(Struct, frozen=True):
    """An hour of the period. `weekday` (0 is Monday) and `hour` are local.

    `burn` is the share of bad requests divided by the allowed share: 1 spends the budget exactly.
    """

    start_s: float
    weekday: int
    hour: int
    watched_ratio: float
    requests: float | None
    tokens: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p99_s: float | None
    in_flight: float | None
    bad_ratio: float | None
    burn: float | None


class WeekdayHour(Struct, frozen=True):
    """One hour of the week, over all weeks of the period. `weekday` 0 is Monday, both local."""

    weekday: int
    hour: int
    requests: float | None
    bad_ratio: float | None
    burn: float | None
    ttft_p99_s: float | None


class TierSlo(Struct, frozen=True):
    """How a tier met its targets.

    `goodput_per_s`: the part of `served_per_s` with the first token in time, less the share of
    token gaps above the ITL target. The ratios are shares of the requests' total time;
    `other_ratio` is the rest.
    """

    tier: str
    latencies: tuple[Latency, ...]
    served_per_s: Trend
    goodput_per_s: Trend
    budget: ErrorBudget
    hours: tuple[Hour, ...]
    by_weekday: tuple[WeekdayHour, ...]
    queue_ratio: float | None
    prefill_ratio: float | None
    decode_ratio: float | None
    other_ratio: float | None
    missing: str = ""


class KneeStep(Struct, frozen=True):
    """The windows at about one concurrency of one engine: medians with quartiles."""

    in_flight: float
    windows: int
    requests_per_s: Range
    tokens_per_s: Range
    token_s: Range
    ttft_p99_s: Range | None
    itl_p99_s: Range | None


class BenchmarkCheck(Struct, frozen=True):
    """A figure in production compared with the benchmark behind the size.

    `off` is the difference, as a ratio (TTFT) or in points (GPU activity); beyond `limit` (TTFT:
    above 0.3, GPU activity: below -0.2) the state is warning. `state` is ok, warning or unknown.
    """

    name: str
    unit: str
    benchmark: float | None
    production: float | None
    off: float | None
    limit: float
    state: str
    missing: str = ""


class TierKnee(Struct, frozen=True):
    """Latency by concurrency of one engine of the tier, from the period's own windows.

    `c_max` is in requests in flight on one engine; without `reached` it is a lower bound, because
    no higher load was seen. `peak_in_flight` is the P99 over an engine's windows, `peak_at_s` the
    time of the maximum, `position_ratio` the peak / C_max: above 1 the peak was past the knee.
    `little_requests_per_s` is C_max / mean latency there (Little's law), `little_gap_ratio` that
    divided by the usable requests/s: above 2 the two contradict each other.
    """

    tier: str
    steps: tuple[KneeStep, ...]
    c_max: Range | None
    usable_requests_per_s: Range | None
    reached: bool
    basis: str
    peak_in_flight: float | None
    peak_requests_per_s: float | None
    peak_at_s: float | None
    peak_target: str
    position_ratio: float | None
    little_requests_per_s: float | None
    little_gap_ratio: float | None
    benchmark: tuple[BenchmarkCheck, ...]
    windows: int
    missing: str = ""
