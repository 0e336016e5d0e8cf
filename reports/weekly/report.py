"""The whole report as values, and as a JSON document. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import orjson
from msgspec import Struct
from msgspec.structs import asdict

from kneewatch.diagnose.capacity import Range
from kneewatch.diagnose.verdict import Evidence
from kneewatch.reports.weekly.figures import (
    AdviceOutcome,
    DataQuality,
    Line,
    Period,
    ReportedFlag,
    Spark,
    Trend,
)

# --- The sections on one tier as values -----------------------------------------------------------


class Lengths(Struct, frozen=True):
    """Tokens per request, from histograms summed over time and engines."""

    p50: Trend
    p95: Trend
    p99: Trend
    mean: Trend
    missing: str = ""


class Arrivals(Struct, frozen=True):
    """Arriving requests/s of the whole tier, measured in windows of `window_s` seconds."""

    window_s: float
    mean_per_s: Trend
    p95_per_s: Trend
    p99_per_s: Trend
    highest_per_s: float | None
    highest_at_s: float | None
    peak_to_mean_ratio: float | None
    missing: str = ""


class Drift(Struct, frozen=True):
    """A figure of the workload, compared with the profile for which the size was computed.

    `ratio` is measured / stated. The state is warning if `ratio` is below 1 / `limit` or above
    `limit`.
    """

    name: str
    unit: str
    stated: float
    measured: float | None
    ratio: float | None
    limit: float
    state: str


class TierWorkload(Struct, frozen=True):
    """The workload of a tier.

    `archetype` is chat, rag, code or agentic, and `archetype_why` is the reason. Both are empty if
    the lengths are unknown. `drift` is empty if no profile is set; `drift_missing` then says so.
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
    """A part of the memory of one GPU."""

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
    """A signal before a change and, as predicted, after it."""

    signal: str
    before: float | None
    after: float | None


class Lever(Struct, frozen=True):
    """A change that would alter the size. `saves_usd_per_hour` is negative if the change costs
    more."""

    id: str
    summary: str
    changes: tuple[ReportedFlag, ...]
    figures: tuple[LeverFigure, ...]
    gpus_after: int | None
    saves_usd_per_hour: float | None


class TierSize(Struct, frozen=True):
    """The sizing of a tier for its measured workload.

    `verdict` is right, too small, too large or unknown; `doubts` are reasons to doubt it.
    `usable_requests_per_s` is the capacity of one engine. `usable_source` says where this number
    comes from: stated, learned (from the windows of the period) or predicted. `relative`: the
    settings lack model and GPU, so only the load relative to the learned capacity is known.

    Several numbers of replicas may serve the peak with a margin; `replicas_needed` is the one that
    is nearest to `replicas_present`. `headroom_ratio` is capacity / peak - 1. `memory` is that of
    one GPU. `limits` are those for the gateway; `schedule` has the replicas by hour, each rise an
    hour ahead.
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
    limits: tuple[str, ...] = ()
    schedule: tuple[str, ...] = ()


class Saving(Struct, frozen=True):
    """The savings that a recommendation would bring, and its risk."""

    id: str
    target: str
    engine: str
    summary: str
    fate: str
    saves_usd_per_hour: float | None
    saves_usd_per_month: float | None
    risk: str


class TierMoney(Struct, frozen=True):
    """The cost of a tier, and the tokens that it generated for that.

    Every hour in which an engine was watched is paid. `idle_hours` are the GPU-hours of engines
    without load. `utilization_ratio` is the mean share of the usable capacity that was used;
    `utilization_basis` is how it was computed. `requests_in_time_per_usd` are requests within the
    targets per USD. `tokens_per_s_per_hbm_gb` are generated tokens/s per 10^9 bytes of GPU memory.
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
    """A row of the monitoring table or the KV metrics table of one tier.

    `figures` are one to three values, such as P50 and P99. `band` is the target as text. `low` and
    `high` are its bounds in the unit of the last figure; None without a numeric bound. `how` is the
    method by which the value was computed.

    `state` is ok, info, warning, critical, unknown, trend or off. `advice` is what to do if the
    state is not ok. If it is unknown, `missing` is what is missing, and `enable` how to enable it.
    The state is trend if the row has no bound. It is off if a feature is not in use; `missing`
    names the feature.
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
    """The monitoring table and the KV metrics table of one tier, with all rows."""

    tier: str
    monitoring: tuple[TableRow, ...]
    kv: tuple[TableRow, ...]


class Latency(Struct, frozen=True):
    """A latency of all requests in the period, from the histogram summed over time and engines.

    `name` is ttft, itl, e2e, queue, prefill or decode. `budget_s` is the target for P99, None if
    not set. `within_ratio` is the share of observations within `budget_s`. `state` is ok, warning
    (P99 exceeds the target), critical (P50 exceeds it) or unknown.
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
    """The error budget of the SLO, and the part of it that was spent.

    `objective_ratio` is the share of requests whose first token must be within the target.
    `bad_ratio` is the share of requests whose first token was late. `spent_ratio` is `bad_ratio`
    divided by the allowed share; above 1 the budget is exhausted.
    """

    objective_ratio: float
    requests: float
    bad_requests: float | None
    bad_ratio: float | None
    spent_ratio: float | None
    missing: str = ""


class Hour(Struct, frozen=True):
    """An hour of the period. `weekday` (0 is Monday) and `hour` are local.

    `burn` is the share of bad requests divided by the allowed share. At 1 the budget is spent
    exactly.
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
    """One hour of the week, over all weeks of the period. `weekday` (0 is Monday) and `hour` are
    local."""

    weekday: int
    hour: int
    requests: float | None
    bad_ratio: float | None
    burn: float | None
    ttft_p99_s: float | None


class TierSlo(Struct, frozen=True):
    """How well a tier met its targets.

    `goodput_per_s` is the part of `served_per_s` with the first token in time, minus the share of
    token gaps above the ITL target. `queue_ratio`, `prefill_ratio` and `decode_ratio` are shares of
    the requests' total time; `other_ratio` is the rest.
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
    """The windows of one engine at about the same concurrency. Each figure is a median with
    quartiles."""

    in_flight: float
    windows: int
    requests_per_s: Range
    tokens_per_s: Range
    token_s: Range
    ttft_p99_s: Range | None
    itl_p99_s: Range | None


class BenchmarkCheck(Struct, frozen=True):
    """A figure in production, compared with the benchmark on which the size is based.

    `off` is the difference: as a ratio for TTFT, in points for GPU activity. `state` is ok,
    unknown, or warning if `off` is beyond `limit` (above 0.3 for TTFT, below -0.2 for GPU
    activity).
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
    """Latency by concurrency on one engine of the tier, from the windows of the period.

    `c_max` is the number of requests in flight on one engine at the knee. If `reached` is false, it
    is a lower bound, because no higher load was observed. `peak_in_flight` is the P99 over the
    windows of an engine; `peak_at_s` is the time of the maximum. `position_ratio` is the peak
    divided by C_max: above 1 the peak was past the knee.

    `little_requests_per_s` is C_max divided by the mean latency at C_max (Little's law).
    `little_gap_ratio` is `little_requests_per_s` divided by the usable requests/s: above 2 the two
    contradict each other.
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


# --- The report -----------------------------------------------------------------------------------


SCHEMA = "kneewatch.report/1"


class EngineSpan(Struct, frozen=True):
    """An engine of a tier, and the times between which it was present in the period."""

    target: str
    engine: str
    replica: str
    first_s: float
    last_s: float
    watched_ratio: float


class Tier(Struct, frozen=True):
    """A model on a kind of GPU. No figure combines two tiers.

    `id` is the name of the tier in all sections. `engines` are all engines that were watched in the
    period. `engines_present` is the number of engines that run at the same time at its end. `gpu`
    is empty if unknown. `gpus` is the number of GPUs of the present engines; None if not set.
    `is_router`: the tier is a router, or several of a kind, and has no engines.
    """

    id: str
    model: str
    gpu: str
    engines: tuple[EngineSpan, ...]
    engines_present: int
    gpus: int | None
    is_router: bool = False


class Action(Struct, frozen=True):
    """The first thing to do. `why` is the figure or incident that calls for it. `recommendation` is
    the id of the recommendation, `incident` that of the incident; empty if there is none."""

    text: str
    why: str
    recommendation: str
    changes: tuple[ReportedFlag, ...]
    incident: str = ""


class WeeklyVerdict(Struct, frozen=True):
    """The verdict on a tier.

    `health` is the worst state in the period: ok, info, warning, critical or unknown. `health_text`
    explains it in a sentence. `size` is right, too small, too large or unknown. `trends` are the
    figures shown with the verdict.
    """

    tier: str
    health: str
    health_text: str
    incidents: int
    incident_s: float
    size: str
    size_text: str
    money_text: str
    action: Action | None
    trends: tuple[Trend, ...]


class StageSpan(Struct, frozen=True):
    """A stage of the cascade within an incident. `end_s` is None while the stage is open."""

    number: int
    name: str
    severity: str
    start_s: float
    end_s: float | None


class CauseSpan(Struct, frozen=True):
    """A cause within an incident. `end_s` is None while the cause is open."""

    id: str
    severity: str
    start_s: float
    end_s: float | None


class IncidentCost(Struct, frozen=True):
    """The cost of an incident.

    `preemptions` is the number of preempted requests, which vLLM recomputes. `recomputed_tokens` is
    a lower bound (preemptions times mean prompt length). `late_requests` got their first token
    after the target. `lost_requests` is the number of requests that would have been served during
    an outage at the rate of the hour before.
    """

    preemptions: float | None
    recomputed_tokens: float | None
    late_requests: float | None
    lost_requests: float | None
    missing: tuple[str, ...] = ()

    @property
    def harmed_requests(self) -> float:
        """The number of requests that were preempted, late or lost. Unknown numbers count as 0."""
        counts = (self.preemptions, self.late_requests, self.lost_requests)
        return sum(count for count in counts if count is not None)


class Incident(Struct, frozen=True):
    """A preemption cascade or a cause, on one engine or on several replicas at the same time.

    `id` is I1, I2, ... in order of start. `kind` is cascade or cause. `cause` is the id of the root
    cause. `end_s` is None if the incident is open at the end of the period. `ended` is ended,
    restarted, unwatched or empty.

    `stage2_s` is the time of the first preemption. `late_s` is the time at which TTFT P99 first
    exceeds its target. `lead_s` is the number of seconds from `stage2_s` to `late_s`; negative if
    TTFT P99 was late first. `lead_text` is the same as a sentence.

    `replicas` are the replicas that have the incident. `replicas_present` is the number of replicas
    that the tier had at the time. Target, stages, lead time and evidence are those of the worst
    replica; costs are those of all.
    """

    id: str
    kind: str
    tier: str
    target: str
    engine: str
    cause: str
    title: str
    severity: str
    start_s: float
    end_s: float | None
    last_s: float
    ended: str
    stages: tuple[StageSpan, ...]
    causes: tuple[CauseSpan, ...]
    stage2_s: float | None
    late_s: float | None
    budget_s: float | None
    lead_s: float | None
    lead_text: str
    cost: IncidentCost
    evidence: tuple[Evidence, ...]
    against: tuple[Evidence, ...]
    advice: tuple[AdviceOutcome, ...]
    lines: tuple[Line, ...]
    guide: tuple[str, ...]
    replicas: tuple[str, ...]
    replicas_present: int

    @property
    def until_s(self) -> float:
        """End of the incident in Unix seconds. If it is open, the time at which it was last
        observed."""
        return self.last_s if self.end_s is None else self.end_s

    @property
    def lasted_s(self) -> float:
        """Seconds from its start to its end."""
        return self.until_s - self.start_s

    @property
    def where(self) -> str:
        """The engine; if there are several replicas, their number and the worst one."""
        if len(self.replicas) == 1:
            return f"{self.target}, engine {self.engine}" if self.engine else self.target
        return f"{len(self.replicas)} of {self.replicas_present} replicas, worst {self.target}"


class Comparison(Struct, frozen=True):
    """A signal for which a recommendation made a prediction. `off_ratio` is measured / predicted -
    1."""

    signal: str
    before: float | None
    predicted: float
    measured: float | None
    off_ratio: float | None


class TrackRow(Struct, frozen=True):
    """A recommendation that was made or applied in the period."""

    tier: str
    target: str
    engine: str
    advice: AdviceOutcome
    comparisons: tuple[Comparison, ...]


class TrackRecord(Struct, frozen=True):
    """The recommendations and their outcomes, newest first. `unknown` is the number of
    recommendations for which nothing records whether they were applied."""

    made: int
    applied: int
    kept: int
    missed: int
    worsened: int
    open: int
    lapsed: int
    rows: tuple[TrackRow, ...]
    unknown: int = 0


class WeeklyReport(Struct, frozen=True):
    """The report. Its sections are in reading order. Each section has one entry per tier, in the
    order of `tiers`.

    `source` is the origin of the data. `noise_test` describes the test that decides about arrows.
    `notices` say that the period is empty or partial; they are shown first. `severity` is the worst
    of incidents and table rows, ok without any; it determines the exit status.
    """

    made_s: float
    version: str
    source: str
    timezone: str
    period: Period
    compared: Period | None
    filters: tuple[str, ...]
    notices: tuple[str, ...]
    severity: str
    noise_test: str
    tiers: tuple[Tier, ...]
    verdicts: tuple[WeeklyVerdict, ...]
    incidents: tuple[Incident, ...]
    tables: tuple[TierTables, ...]
    slo: tuple[TierSlo, ...]
    knees: tuple[TierKnee, ...]
    workloads: tuple[TierWorkload, ...]
    sizes: tuple[TierSize, ...]
    money: tuple[TierMoney, ...]
    track_record: TrackRecord
    data_quality: DataQuality


# --- The report as the JSON document kneewatch.report/1 -------------------------------------------


def document(report: WeeklyReport) -> dict[str, Any]:
    """The JSON document. Each field has its own name. Values that are not finite are null."""
    fields: dict[str, Any] = orjson.loads(orjson.dumps(report, default=_plain))
    return {"schema": SCHEMA, **fields}


def _plain(value: object) -> dict[str, Any]:
    """A dict for a value that orjson cannot encode: a record, or a mapping that is not a dict."""
    return asdict(value) if isinstance(value, Struct) else dict(cast("Mapping[str, Any]", value))


def render_json(report: WeeklyReport) -> str:
    """The JSON document as text, with a newline at the end."""
    return orjson.dumps(document(report), option=orjson.OPT_INDENT_2).decode() + "\n"
