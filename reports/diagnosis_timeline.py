"""A recording as a timeline: one line each time the verdict about an engine changes. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.diagnosis_text import Style, brief_words, who
from kneewatch.reports.lines import cut
from kneewatch.rules.formatting import clock, date, span
from kneewatch.rules.rule import Severity

EngineKey = tuple[str, str, str]
"""Target, model and engine."""

Gist = tuple[str, int | None, tuple[str, ...]]
"""Health, stage and cause ids. When one of them changes, the timeline gets a new line."""

Render = Callable[[Sequence[Verdict], bool], str]
"""A function that renders the diagnoses of one moment. Its second argument asks for the footers."""


class WorstState:
    """The worst diagnosis so far, and the time at which its severity was last observed."""

    def __init__(self) -> None:
        self.diagnosis: Verdict | None = None
        self._last_seen_s = math.nan

    @property
    def severity(self) -> Severity:
        """The worst severity so far; ok before the first diagnosis."""
        return Severity.OK if self.diagnosis is None else self.diagnosis.severity

    def add(self, diagnoses: Sequence[Verdict]) -> None:
        """Add the diagnoses of one moment. If several are equally bad, the latest one is kept."""
        for diagnosis in diagnoses:
            if self.diagnosis is None or _badness(diagnosis) >= _badness(self.diagnosis):
                self.diagnosis = diagnosis
            if diagnosis.severity == self.severity:
                self._last_seen_s = diagnosis.t_s

    def ended_words(self, last: Sequence[Verdict]) -> str:
        """The worst state and its time, if that state is worse than all diagnoses in `last`. Empty
        if the last state is as bad, or if there was no warning."""
        worst = self.diagnosis
        if worst is None or worst.severity < Severity.WARNING:
            return ""
        if not last or worst.severity <= max(diagnosis.severity for diagnosis in last):
            return ""
        end_s = max(diagnosis.t_s for diagnosis in last)
        return (
            f"Worst state: {worst.health.upper()} {worst.headline or 'findings'}, {who(worst)}, at "
            f"{date(worst.t_s)} {clock(worst.t_s)} UTC; ended after {clock(self._last_seen_s)} "
            f"UTC. Below is the last state, at {clock(end_s)} UTC."
        )


class Timeline:
    """The verdicts that were written so far. `named`: each line ends with its target and engine."""

    def __init__(self, style: Style, *, named: bool) -> None:
        self._style, self._named = style, named
        self._verdicts: dict[EngineKey, Gist] = {}
        self._day = ""
        self.last: dict[EngineKey, Verdict] = {}
        self._worst = WorstState()

    @property
    def worst(self) -> Severity:
        return self._worst.severity

    def lines(self, diagnoses: Sequence[Verdict]) -> list[str]:
        """Lines for the verdicts that these diagnoses change. A new day gets its own line."""
        lines: list[str] = []
        self._named = self._named or len(diagnoses) > 1
        self._worst.add(diagnoses)
        for diagnosis in diagnoses:
            key = _key(diagnosis)
            self.last[key] = diagnosis
            verdict, before = _verdict(diagnosis), self._verdicts.get(key)
            # A first scrape has no rates to judge yet: noise in a timeline.
            is_first = before is None and diagnosis.health == "unknown" and diagnosis.was_read
            if verdict != before and not is_first:
                self._verdicts[key] = verdict
                lines += self._day_line(diagnosis)
                lines += self._lines(diagnosis)
        return lines

    def close(self, render: Render, *, mark: str = "---") -> str:
        """The worst moment and the last moment, both as rendered by `render`. The worst one is left
        out if its verdict is still the last one.

        `mark` is the prefix of each heading.
        """
        parts: list[str] = []
        worst, last = self._worst.diagnosis, list(self.last.values())
        if worst is not None and worst.severity >= Severity.WARNING:
            end = self.last[_key(worst)]
            if _verdict(end) != _verdict(worst):
                parts += ["", _heading(mark, "at its worst", worst.t_s), "", render([worst], False)]
        parts += [
            "",
            _heading(mark, "at the end", max(d.t_s for d in last)),
            "",
            render(last, True),
        ]
        return "\n".join(parts)

    def _day_line(self, diagnosis: Verdict) -> list[str]:
        day = date(diagnosis.t_s)
        if day == self._day:
            return []
        self._day = day
        return [f"--- {day}, times are UTC"]

    def _lines(self, diagnosis: Verdict) -> list[str]:
        width = self._style.width
        verdict = f"{diagnosis.health.upper():8}"
        stage = "stage ?" if (number := diagnosis.stage.number) is None else f"stage {number}"
        start = f"{clock(diagnosis.t_s)} {verdict} {stage} {_causes(diagnosis):20}  "
        line = cut(start + _numbers(diagnosis, width - len(start)), width).rstrip()
        name = f"[{cut(diagnosis.target, width // 2)}, engine {diagnosis.engine}]"
        lines = [line]
        if self._named and len(line) + 2 + len(name) <= width:
            lines = [f"{line}  {name}"]
        elif self._named:
            lines = [line, f"         {name}"]
        lines[0] = lines[0].replace(verdict, self._style.paint(verdict, diagnosis.health), 1)
        return lines


def progress(
    diagnoses: Sequence[Verdict], elapsed_s: float, watch_s: float, width: int = 79
) -> str:
    """The progress line while a server is watched, cut to `width` characters."""
    worst = max(diagnoses, key=lambda diagnosis: diagnosis.severity)
    first = f"  {worst.headline}" if worst.headline else ""
    line = f"watching {elapsed_s:.0f} of {span(watch_s)}  {worst.health.upper()}{first}  "
    return cut(line + brief_words(worst, width - len(line)), width).rstrip()


def _heading(mark: str, what: str, t_s: float) -> str:
    return f"{mark} {what}, {date(t_s)} {clock(t_s)} UTC"


def _causes(diagnosis: Verdict) -> str:
    first = diagnosis.headline
    if not first:
        return "-"
    more = sum(cause.id != first for cause in diagnosis.causes)
    return first + (f" +{more}" if more else "")


def _numbers(diagnosis: Verdict, width: int) -> str:
    if not diagnosis.was_read and diagnosis.causes:
        return diagnosis.causes[0].summary
    return brief_words(diagnosis, width)


def _key(diagnosis: Verdict) -> EngineKey:
    return diagnosis.target, diagnosis.model, diagnosis.engine


def _verdict(diagnosis: Verdict) -> Gist:
    return diagnosis.health, diagnosis.stage.number, tuple(cause.id for cause in diagnosis.causes)


def _badness(diagnosis: Verdict) -> tuple[float, ...]:
    first = diagnosis.causes[0].confidence if diagnosis.causes else 0.0
    return (
        float(diagnosis.severity),
        diagnosis.stage.level,
        first,
        diagnosis.values.get("waiting") or 0.0,
    )
