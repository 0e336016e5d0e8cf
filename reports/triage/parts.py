"""The parts of the page, made of the view: engines in full, targets in a row each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.diagnose.symptoms import SYMPTOMS
from kneewatch.reports.advice import advised
from kneewatch.reports.gaps import gaps
from kneewatch.reports.text import stage_words
from kneewatch.reports.triage.axis import Axis
from kneewatch.reports.triage.changes import ChangeView, change_view
from kneewatch.reports.triage.lanes import Lanes, lanes
from kneewatch.reports.triage.reasons import CauseView, FindingView, Reasons, VitalView
from kneewatch.reports.triage.standing import Standing, standings
from kneewatch.reports.triage.strip import Strip, strip
from kneewatch.reports.triage.view import EngineView, IntervalView, TargetView, TriageView

LOG_ROWS = 40
GAPS_SHOWN = 1000
"""A page has room for all of them."""


@dataclass(frozen=True, slots=True)
class EnginePart:
    """An engine in full. `log` are its intervals, newest first, `more` how many are left out."""

    number: int
    standing: Standing
    stage: str
    lanes: Lanes
    causes: Sequence[CauseView]
    vitals: Sequence[VitalView]
    worse: Sequence[FindingView]
    notes: Sequence[FindingView]
    symptoms: Sequence[tuple[str, str]]
    gaps: Sequence[str]
    log: Sequence[IntervalView]
    more: int

    @property
    def title(self) -> str:
        """What the engine is called among others."""
        return self.standing.who or "no engine known"

    @property
    def seen(self) -> bool:
        """Whether there is anything to show of the few numbers, now or before."""
        now = self.standing.diagnosis is not None and self.standing.diagnosis.values
        return bool(now) or any(vital.chart for vital in self.vitals)


@dataclass(frozen=True, slots=True)
class TargetPart:
    """A target in a row: how its engines stand, the worst first, and its past."""

    target: TargetView
    standings: Sequence[Standing]
    strip: Strip

    @property
    def worst(self) -> Standing:
        """The engine that stands worst."""
        return self.standings[0]


@dataclass(frozen=True, slots=True)
class First:
    """What to do first: a change with what it does, or in words."""

    change: ChangeView | None
    words: str


def engine_parts(target: TargetView, view: TriageView, axis: Axis) -> list[EnginePart]:
    """The engines of a target in full, worst first; none where none is known."""
    return [
        _engine_part(number, standing, standing.engine, axis, view.moment_s)
        for number, standing in enumerate(standings(target, view), 1)
        if standing.engine is not None
    ]


def _engine_part(
    number: int, standing: Standing, engine: EngineView, axis: Axis, moment_s: float
) -> EnginePart:
    reasons = Reasons(engine, axis, moment_s)
    found = engine.diagnosis
    log = sorted(standing.intervals, key=lambda one: (-one.start_s, one.kind))
    return EnginePart(
        number=number,
        standing=standing,
        stage=stage_words(found),
        lanes=lanes(standing.intervals, axis, moment_s),
        causes=reasons.causes(),
        vitals=reasons.vitals(),
        worse=reasons.findings("warning", "critical"),
        notes=reasons.findings("info"),
        symptoms=[(symptom, SYMPTOMS.get(symptom, "")) for symptom in found.symptoms],
        gaps=gaps(found, shown=GAPS_SHOWN),
        log=log[:LOG_ROWS],
        more=max(0, len(log) - LOG_ROWS),
    )


def target_parts(view: TriageView, axis: Axis) -> list[TargetPart]:
    """The targets in a row each, worst first; those alike stay in the order they came in."""
    parts: list[TargetPart] = []
    for target in view.targets:
        found = standings(target, view)
        past = strip([standing.intervals for standing in found], axis)
        parts.append(TargetPart(target, found, past))
    return sorted(parts, key=lambda part: -part.worst.rank)


def first(standing: Standing) -> First | None:
    """What to do first about an engine; None where nothing is to be done."""
    found = standing.diagnosis
    if found is None or not found.causes:
        return None
    cause = found.causes[0]
    made = advised(found, cause)
    return First(change_view(made[0]) if made else None, cause.lever)


def last_read(engine: EngineView, moment_s: float) -> IntervalView | None:
    """The stage that was known last, of an engine whose stage is not known now."""
    if engine.diagnosis.stage is not None:
        return None
    ended = [
        one
        for one in engine.intervals
        if one.kind == "stage" and one.end_s is not None and one.end_s <= moment_s
    ]
    return max(ended, key=lambda one: one.end_s or 0.0, default=None)
