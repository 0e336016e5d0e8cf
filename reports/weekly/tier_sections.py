"""The sections of a tier as values: workload, size, cost, SLO, tables, knee. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kneewatch.reports.weekly.figures import FlagChange, Spark, Spread, Trend


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the period's requests, from the histogram summed over time and engines."""

    p50: Trend
    p95: Trend
    p99: Trend
    mean: Trend
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests a second of the whole tier, over windows of `window_s`."""

    window_s: float
    mean_per_s: Trend
    p95_per_s: Trend
    p99_per_s: Trend
    highest_per_s: float | None
    highest_at_s: float | None
    peak_to_mean_ratio: float | None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Drift:
    """A figure of the workload against the profile that the size was computed for.

    `ratio` is measured over stated; outside of 1 / `limit` to `limit` the state is warning.
    """

    name: str
    unit: str
    stated: float
    measured: float | None
    ratio: float | None
    limit: float
    state: str


@dataclass(frozen=True, slots=True)
class TierWorkload:
    """What a tier was asked for.

    `archetype` is chat, rag, code or agentic, `archetype_why` what it was told by, empty where the
    lengths are not known. `drift` is empty without a stated profile, and `drift_missing` says so.
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


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A part of one GPU's memory."""

    name: str
    bytes: float


@dataclass(frozen=True, slots=True)
class Option:
    """A launch that would carry the measured workload."""

    gpu: str
    tensor_parallel: int
    replicas: int
    gpus: int
    usd_per_hour: float | None
    usable_requests_per_s: float | None
    text: str


@dataclass(frozen=True, slots=True)
class LeverFigure:
    """A figure that a lever changes."""

    signal: str
    before: float | None
    after: float | None


@dataclass(frozen=True, slots=True)
class Lever:
    """What would change the size, with numbers. `saves_usd_per_hour` is negative where it costs."""

    id: str
    summary: str
    changes: tuple[FlagChange, ...]
    figures: tuple[LeverFigure, ...]
    gpus_after: int | None
    saves_usd_per_hour: float | None


@dataclass(frozen=True, slots=True)
class TierSize:
    """The sizing of a tier on the measured workload.

    `verdict` is right, too small, too large or unknown. `usable_source` says how the requests per
    second of one engine are known: stated, learned (from the period's own windows) or predicted.
    `replicas_needed` hold the peak with a margin: of the counts that do, the one nearest to what is
    there. `doubts` say what makes the verdict uncertain.
    `headroom_ratio` is what the fleet carries over its peak, less 1. Without a model and a GPU in
    the settings only the load against what was learned is told: `relative`. `memory` is of one GPU.
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


@dataclass(frozen=True, slots=True)
class Saving:
    """What following a recommendation would save (negative: cost), and its risk."""

    id: str
    target: str
    engine: str
    summary: str
    fate: str
    saves_usd_per_hour: float | None
    saves_usd_per_month: float | None
    risk: str


@dataclass(frozen=True, slots=True)
class TierMoney:
    """What a tier cost and what it gave for it.

    Every hour in which an engine was watched is paid. `idle_hours` are GPU-hours of engines with
    hardly a request running; `utilization_ratio` says what of the usable capacity was used, on
    average: `utilization_basis` how that is known.
    """

    tier: str
    gpus: int | None
    gpu_hours: float | None
    usd_per_gpu_hour: float | None
    price_source: str
    usd: Trend
    tokens_per_gpu_hour: Trend
    usd_per_million_tokens: Trend
    usd_per_million_tokens_at_full: float | None
    utilization_ratio: Trend
    utilization_basis: str
    idle_hours: float | None
    idle_ratio: float | None
    idle_usd: float | None
    savings: tuple[Saving, ...]
    missing: str = ""


# --- How a tier served: the guide's tables, the SLO, the knee. Values of the report ---------------


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of the guide's table 9.3 or 7.7 for one tier.

    `figures` are its values, one or two (P50 and P99). `band` is the target in words; `low` and
    `high` bound it where it has numbers, in the unit of the last figure. `state` is ok, info,
    warning, critical, unknown (`missing` says what is missing, `enable` how to have it), trend
    (there is no bound) or off (the feature is not in use: `missing` names it). `advice` is what to
    do about a state that is not ok. `how` says how the value was computed.
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


@dataclass(frozen=True, slots=True)
class TierTables:
    """The guide's monitoring table (9.3) and KV table (7.7), every row, of one tier."""

    tier: str
    monitoring: tuple[TableRow, ...]
    kv: tuple[TableRow, ...]


@dataclass(frozen=True, slots=True)
class Latency:
    """A latency of all the period's requests, from its histogram summed over time and engines.

    `name` is ttft, itl, e2e, queue, prefill, decode. `budget_s` is the target of its P99, None
    where none is stated; `within_ratio` the share of observations in it, `state` ok, warning (P99
    is over it), critical (P50 is) or unknown.
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


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """What the SLO allows and what was spent of it.

    `objective_ratio` of requests must have their first token within the target. `bad_ratio` did
    not; `spent_ratio` is bad over allowed: above 1 the budget is gone.
    """

    objective_ratio: float
    requests: float
    bad_requests: float | None
    bad_ratio: float | None
    spent_ratio: float | None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Hour:
    """An hour of the period. `weekday` (0 is Monday) and `hour` are local.

    `burn` is the share of bad requests over the allowed share: 1 spends the budget exactly.
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


@dataclass(frozen=True, slots=True)
class WeekdayHour:
    """One hour of the week, over all weeks of the period. `weekday` 0 is Monday, both local."""

    weekday: int
    hour: int
    requests: float | None
    bad_ratio: float | None
    burn: float | None
    ttft_p99_s: float | None


@dataclass(frozen=True, slots=True)
class TierSlo:
    """How a tier kept its targets.

    `goodput_per_s` are requests a second whose first token came within the target, of
    `served_per_s`. The shares are of the requests' whole time; `other_ratio` is what is left.
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


@dataclass(frozen=True, slots=True)
class KneeStep:
    """The windows of one engine at about one concurrency: their middle halves."""

    in_flight: float
    windows: int
    requests_per_s: Spread
    tokens_per_s: Spread
    token_s: Spread
    ttft_p99_s: Spread | None
    itl_p99_s: Spread | None


@dataclass(frozen=True, slots=True)
class BenchmarkCheck:
    """A figure of production against the benchmark that the size was computed from (9.1 step 13).

    `off` is the difference as a ratio (TTFT: above 0.3 is too far) or in points (GPU activity:
    below -0.2 is), `limit` that bound. `state` is ok, warning or unknown.
    """

    name: str
    unit: str
    benchmark: float | None
    production: float | None
    off: float | None
    limit: float
    state: str
    missing: str = ""


@dataclass(frozen=True, slots=True)
class TierKnee:
    """Latency against concurrency of one engine of the tier, from the period's own windows.

    `c_max` is in requests in flight on one engine; without `reached` no load past it was seen and
    it is a lower bound. `peak_in_flight` is the P99 of an engine's windows, `peak_at_s` when the
    highest one was, `position_ratio` the peak over C_max: above 1 the peak was past the knee.
    `little_requests_per_s` is C_max over the mean latency there (Little's law),
    `little_gap_ratio` that over the usable requests per second: above 2 the two do not belong
    together (8.3).
    """

    tier: str
    steps: tuple[KneeStep, ...]
    c_max: Spread | None
    usable_requests_per_s: Spread | None
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
