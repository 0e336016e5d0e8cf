"""The whole report as values and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import orjson
from msgspec import Struct
from msgspec.structs import asdict

from kneewatch.diagnose.causes.evidence import Evidence
from kneewatch.reports.weekly.figures import (
    Advice,
    DataQuality,
    FlagChange,
    Line,
    Period,
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
    """An engine of a tier and when it was seen in the period."""

    target: str
    engine: str
    replica: str
    first_s: float
    last_s: float
    watched_ratio: float


class Tier(Struct, frozen=True):
    """A model on a kind of GPU. No figure combines two tiers.

    `id` is its name in all sections. `engines` are all that were watched in the period,
    `engines_present` is how many of them are alive at once at its end. `gpu` is empty if unknown;
    `gpus` is the number of GPUs of the engines present, None if not stated.
    """

    id: str
    model: str
    gpu: str
    engines: tuple[EngineSpan, ...]
    engines_present: int
    gpus: int | None


class Action(Struct, frozen=True):
    """The first thing to do. `why`: the figure or incident that calls for it; `recommendation`: its
    id."""

    text: str
    why: str
    recommendation: str
    changes: tuple[FlagChange, ...]


class Verdict(Struct, frozen=True):
    """A tier's verdict in one line.

    `health` is the worst state in the period: ok, info, warning, critical or unknown; `health_text`
    explains it in a sentence. `size` is right, too small, too large or unknown. `trends` are the
    figures shown with it.
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
    """A stage of the cascade within an incident; `end_s` is None while it is open."""

    number: int
    name: str
    severity: str
    start_s: float
    end_s: float | None


class CauseSpan(Struct, frozen=True):
    """A cause within an incident; `end_s` is None while it is open."""

    id: str
    severity: str
    start_s: float
    end_s: float | None


class IncidentCost(Struct, frozen=True):
    """What an incident cost.

    `preemptions`: requests preempted and recomputed; `recomputed_tokens`: a lower bound
    (preemptions times mean prompt). `late_requests`: first token after the target; `lost_requests`:
    requests that the rate of the hour before would have served during an outage.
    """

    preemptions: float | None
    recomputed_tokens: float | None
    late_requests: float | None
    lost_requests: float | None
    missing: tuple[str, ...] = ()

    @property
    def harmed_requests(self) -> float:
        """Requests preempted, late or lost, as far as they are known."""
        counts = (self.preemptions, self.late_requests, self.lost_requests)
        return sum(count for count in counts if count is not None)


class Incident(Struct, frozen=True):
    """A preemption cascade or a cause, on one engine or on several replicas at the same time.

    `kind` is cascade or cause; `cause` the root cause's id; `id` is I1, I2, ... by start. `end_s`
    is None if it is open at the period's end; `ended` is ended, restarted, unwatched or empty.
    `stage2_s`: first preemption; `late_s`: TTFT P99 first exceeds its target; `lead_s`: seconds
    from the first to the second (negative: after it); `lead_text`: the same as a sentence.
    `replicas`: those that have it, of the tier's `replicas_present` at the time; target, stages,
    lead time and evidence are those of the worst. Costs are those of all.
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
    advice: tuple[Advice, ...]
    lines: tuple[Line, ...]
    guide: tuple[str, ...]
    replicas: tuple[str, ...]
    replicas_present: int

    @property
    def until_s(self) -> float:
        """The end in unix seconds; while the incident is open, the time at which it was last
        seen."""
        return self.last_s if self.end_s is None else self.end_s

    @property
    def where(self) -> str:
        """The engine, or how many replicas have it and the worst of them."""
        if len(self.replicas) == 1:
            return f"{self.target}, engine {self.engine}"
        return f"{len(self.replicas)} of {self.replicas_present} replicas, worst {self.target}"


class Comparison(Struct, frozen=True):
    """A signal that a recommendation predicted. `off_ratio` is measured / predicted - 1."""

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
    advice: Advice
    comparisons: tuple[Comparison, ...]


class TrackRecord(Struct, frozen=True):
    """The recommendations and their outcomes, newest first. `unknown`: how many of them have no
    record of whether they were applied."""

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
    """The report. Sections are in reading order, each with an entry per tier, in `tiers` order.

    `source` names the origin of the data, `noise_test` the test behind the arrows. `notices` come
    first: an empty or partial period. `severity` is the worst of incidents and table rows, ok
    without any; it sets the exit status.
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
    verdicts: tuple[Verdict, ...]
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
    """The JSON document: every field by its own name; null for values that are not finite."""
    fields: dict[str, Any] = orjson.loads(orjson.dumps(report, default=_plain))
    return {"schema": SCHEMA, **fields}


def _plain(value: object) -> dict[str, Any]:
    """A value that orjson cannot encode (a record, or a mapping other than dict) as a dict."""
    return asdict(value) if isinstance(value, Struct) else dict(cast("Mapping[str, Any]", value))


def render_json(report: WeeklyReport) -> str:
    """The JSON document as text, with a newline at the end."""
    return orjson.dumps(document(report), option=orjson.OPT_INDENT_2).decode() + "\n"
