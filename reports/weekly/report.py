"""The whole report as values, and as a JSON document. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import orjson
from msgspec import Struct
from msgspec.structs import asdict

from kneewatch.diagnose.verdict import Evidence
from kneewatch.reports.weekly.figures import (
    AdviceOutcome,
    DataQuality,
    Line,
    Period,
    ReportedFlag,
    Trend,
)
from kneewatch.reports.weekly.tier_sections import (
    TierKnee,
    TierMoney,
    TierSize,
    TierSlo,
    TierTables,
    TierWorkload,
)

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
