"""The whole report as values and as JSON. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from kneewatch.reports.weekly.figures import (
    Advice,
    DataQuality,
    EvidenceLine,
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


@dataclass(frozen=True, slots=True)
class EngineSpan:
    """An engine of a tier and when it was seen in the period."""

    target: str
    engine: str
    replica: str
    first_s: float
    last_s: float
    watched_ratio: float


@dataclass(frozen=True, slots=True)
class Tier:
    """A model on a kind of GPU: nothing is ever blended across tiers (guide 9.5).

    `id` is what the sections refer to it by, for people too. `gpu` is empty where nobody said which
    it is; `gpus` are those of all its engines, None where their number is not stated.
    """

    id: str
    model: str
    gpu: str
    engines: tuple[EngineSpan, ...]
    gpus: int | None


@dataclass(frozen=True, slots=True)
class Action:
    """The one thing to do. `why` names the figure that it follows from; `recommendation` its id."""

    text: str
    why: str
    recommendation: str
    changes: tuple[FlagChange, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A tier in one line.

    `health` is the worst there was that mattered: ok, info, warning, critical or unknown;
    `health_text` says why in a sentence. `size` is right, too small, too large or unknown.
    `trends` are the few figures whose arrows the line shows.
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


@dataclass(frozen=True, slots=True)
class StageSpan:
    """A stage of the cascade within an incident; `end_s` is None while it goes on."""

    number: int
    name: str
    severity: str
    start_s: float
    end_s: float | None


@dataclass(frozen=True, slots=True)
class CauseSpan:
    """A cause within an incident; `end_s` is None while it goes on."""

    id: str
    severity: str
    start_s: float
    end_s: float | None


@dataclass(frozen=True, slots=True)
class IncidentCost:
    """What an incident cost.

    `preemptions` are requests thrown out and recomputed, `recomputed_tokens` what that computed
    again at least (an estimate: preemptions by mean prompt). `late_requests` got their first token
    after the target; `lost_requests` were not finished though the hour before served them.
    """

    preemptions: float | None
    recomputed_tokens: float | None
    late_requests: float | None
    lost_requests: float | None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Incident:
    """A cascade, or a cause's interval, of one engine.

    `kind` is cascade or cause; `cause` the cause's id that is told first; `id` is I1, I2, ... by
    start. `end_s` is None while it goes on at the period's end; `ended` is ended, restarted,
    unwatched or empty. `stage2_s` is when eviction was first seen, `late_s` when TTFT P99 left its
    budget, and `lead_s` how much earlier the first was (negative: later); `lead_text` says it.
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
    evidence: tuple[EvidenceLine, ...]
    against: tuple[EvidenceLine, ...]
    advice: tuple[Advice, ...]
    lines: tuple[Line, ...]
    guide: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A signal that a recommendation predicted. `off_ratio` is measured over predicted, less 1."""

    signal: str
    before: float | None
    predicted: float
    measured: float | None
    off_ratio: float | None


@dataclass(frozen=True, slots=True)
class TrackRow:
    """A recommendation of the period, or one followed in it."""

    tier: str
    target: str
    engine: str
    advice: Advice
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True, slots=True)
class TrackRecord:
    """What was recommended and what came of it, newest first. `unknown` are those of which nothing
    tells whether they were followed."""

    made: int
    applied: int
    kept: int
    missed: int
    worsened: int
    open: int
    lapsed: int
    rows: tuple[TrackRow, ...]
    unknown: int = 0


@dataclass(frozen=True, slots=True)
class WeeklyReport:
    """The report. Sections are in reading order, each with an entry per tier, in `tiers` order.

    `source` says where the numbers come from, `noise_test` how arrows are decided. `notices` are
    said first: an empty period, a partial one, filters. `severity` is the worst incident's or
    table row's, ok where there is none; it decides the exit status.
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
    """The JSON document of a report: every field by its own name; null for what is not finite."""
    fields: dict[str, Any] = orjson.loads(orjson.dumps(report, default=dict))
    return {"schema": SCHEMA, **fields}


def render_json(report: WeeklyReport) -> str:
    """The document as text, with a line end."""
    return orjson.dumps(document(report), option=orjson.OPT_INDENT_2).decode() + "\n"
