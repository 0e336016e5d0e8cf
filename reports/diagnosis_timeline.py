"""A recording told as a timeline: a line whenever the verdict on an engine changes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.reports.diagnosis_text import VERDICTS, Style, brief_words
from kneewatch.reports.formatting import clock, cut, date, span
from kneewatch.rules.rule import Severity

SHORT_VERDICTS = {**VERDICTS, "info": "NOTE"}

Key = tuple[str, str, str]
Told = tuple[str, int | None, tuple[str, ...]]
Render = Callable[[Sequence[Diagnosis], bool], str]
"""Tells a moment; the flag asks for what could not be judged then."""


class Timeline:
    """What has been told so far. `named`: lines say which engine they are about."""

    def __init__(self, style: Style, *, named: bool) -> None:
        self._style, self._named = style, named
        self._told: dict[Key, Told] = {}
        self._day = ""
        self.last: dict[Key, Diagnosis] = {}
        self.worst = Severity.OK
        self._worst: Diagnosis | None = None

    def lines(self, diagnoses: Sequence[Diagnosis]) -> list[str]:
        """Lines for what changed with these diagnoses; a new day has a line of its own."""
        found: list[str] = []
        self._named = self._named or len(diagnoses) > 1
        for diagnosis in diagnoses:
            key = _key(diagnosis)
            self.last[key] = diagnosis
            if self._worst is None or _badness(diagnosis) >= _badness(self._worst):
                self._worst = diagnosis
            self.worst = max(self.worst, diagnosis.severity)
            now = _told(diagnosis)
            if self._told.get(key) != now and not (_too_early(diagnosis) and key not in self._told):
                self._told[key] = now
                found += self._day_line(diagnosis)
                found += self._lines(diagnosis)
        return found

    def close(self, render: Render, *, mark: str = "---") -> str:
        """The worst moment, unless it is how things ended, and the end, as `render` tells them.

        `mark` begins a heading.
        """
        parts: list[str] = []
        worst, last = self._worst, list(self.last.values())
        if worst is not None and self.worst >= Severity.WARNING:
            end = self.last[_key(worst)]
            if _told(end) != _told(worst):
                parts += ["", _heading(mark, "at its worst", worst.t_s), "", render([worst], False)]
        parts += [
            "",
            _heading(mark, "at the end", max(d.t_s for d in last)),
            "",
            render(last, True),
        ]
        return "\n".join(parts)

    def _day_line(self, diagnosis: Diagnosis) -> list[str]:
        day = date(diagnosis.t_s)
        if day == self._day:
            return []
        self._day = day
        return [f"--- {day}, times are UTC"]

    def _lines(self, diagnosis: Diagnosis) -> list[str]:
        width = self._style.width
        verdict = f"{SHORT_VERDICTS[diagnosis.health]:8}"
        stage = f"stage {diagnosis.stage.number}" if diagnosis.stage else "stage ?"
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
    diagnoses: Sequence[Diagnosis], elapsed_s: float, watch_s: float, width: int = 79
) -> str:
    """One line while watching, no longer than the terminal is wide."""
    worst = max(diagnoses, key=lambda diagnosis: diagnosis.severity)
    first = f"  {worst.headline}" if worst.headline else ""
    line = f"watching {elapsed_s:.0f} of {span(watch_s)}  {SHORT_VERDICTS[worst.health]}{first}  "
    return cut(line + brief_words(worst, width - len(line)), width).rstrip()


def _heading(mark: str, what: str, t_s: float) -> str:
    return f"{mark} {what}, {date(t_s)} {clock(t_s)} UTC"


def _causes(diagnosis: Diagnosis) -> str:
    first = diagnosis.headline
    if not first:
        return "-"
    more = sum(cause.id != first for cause in diagnosis.causes)
    return first + (f" +{more}" if more else "")


def _numbers(diagnosis: Diagnosis, width: int) -> str:
    if not diagnosis.was_read and diagnosis.causes:
        return diagnosis.causes[0].summary
    return brief_words(diagnosis, width)


def _key(diagnosis: Diagnosis) -> Key:
    return diagnosis.target, diagnosis.model, diagnosis.engine


def _told(diagnosis: Diagnosis) -> Told:
    stage = diagnosis.stage.number if diagnosis.stage else None
    return diagnosis.health, stage, tuple(cause.id for cause in diagnosis.causes)


def _too_early(diagnosis: Diagnosis) -> bool:
    """One scrape can be read and not yet judged; to begin a timeline with it would be noise."""
    return diagnosis.health == "unknown" and diagnosis.was_read


def _badness(diagnosis: Diagnosis) -> tuple[float, ...]:
    stage = diagnosis.stage.number if diagnosis.stage else 0
    first = diagnosis.causes[0].confidence if diagnosis.causes else 0.0
    return diagnosis.severity, stage, first, diagnosis.values.get("waiting") or 0.0
