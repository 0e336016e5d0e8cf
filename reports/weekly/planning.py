"""What a tier is asked for, what it needs and what it costs. Values of the report. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kneewatch.reports.weekly.figures import FlagChange, Trend


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
