"""A recording told as a timeline: a line whenever the verdict on an engine changes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.reports.text import VERDICTS, Style, clock, number
from kneewatch.rules.model import Severity

SHOWN = (
    ("kv_usage_ratio", "KV", 100.0, "%"),
    ("running", "running", 1.0, ""),
    ("waiting", "waiting", 1.0, ""),
    ("preemption_ratio_per_s", "evicted/s", 100.0, "%"),
    ("ttft_p99_s", "TTFT P99", 1.0, " s"),
)

Told = tuple[str, int | None, tuple[str, ...]]


class Timeline:
    """What has been told so far."""

    def __init__(self, style: Style) -> None:
        self._style = style
        self._told: dict[tuple[str, str, str], Told] = {}
        self.last: dict[tuple[str, str, str], Diagnosis] = {}
        self.worst = Severity.OK
        self._worst: Diagnosis | None = None

    def lines(self, diagnoses: Sequence[Diagnosis]) -> list[str]:
        """Lines for what changed with these diagnoses."""
        found: list[str] = []
        for diagnosis in diagnoses:
            key = (diagnosis.target, diagnosis.model, diagnosis.engine)
            self.last[key] = diagnosis
            if self._worst is None or _badness(diagnosis) > _badness(self._worst):
                self._worst = diagnosis
            self.worst = max(self.worst, diagnosis.severity)
            stage = diagnosis.stage.number if diagnosis.stage else None
            now: Told = (diagnosis.health, stage, tuple(cause.id for cause in diagnosis.causes))
            if self._told.get(key) != now:
                self._told[key] = now
                found.append(self._line(diagnosis))
        return found

    def close(self, render: Callable[[Sequence[Diagnosis]], str]) -> str:
        """The worst moment and the end, as `render` tells a moment."""
        parts: list[str] = []
        if self._worst is not None and self.worst >= Severity.WARNING:
            parts.append(f"\n--- at its worst, {clock(self._worst.t_s)} UTC\n")
            parts.append(render([self._worst]))
        last = list(self.last.values())
        parts.append(f"\n--- at the end, {clock(max(d.t_s for d in last))} UTC\n")
        parts.append(render(last))
        return "\n".join(parts)

    def _line(self, diagnosis: Diagnosis) -> str:
        verdict = self._style.paint(f"{VERDICTS[diagnosis.health]:20}", diagnosis.health)
        stage = f"stage {diagnosis.stage.number}" if diagnosis.stage else "stage ?"
        causes = ", ".join(cause.id for cause in diagnosis.causes) or "-"
        return (
            f"{clock(diagnosis.t_s)}  {verdict} {stage}  {causes:32} {numbers(diagnosis)}"
            f"  [{diagnosis.target}]"
        )


def numbers(diagnosis: Diagnosis) -> str:
    """The few numbers that tell a cascade."""
    parts: list[str] = []
    for key, name, scale, unit in SHOWN:
        value = diagnosis.values.get(key)
        if value is not None:
            parts.append(f"{name} {number(round(value * scale, 2))}{unit}")
    return "  ".join(parts)


def progress(diagnoses: Sequence[Diagnosis], elapsed_s: float, watch_s: float) -> str:
    """One line while watching."""
    worst = max(diagnoses, key=lambda diagnosis: diagnosis.severity)
    return (
        f"watching {elapsed_s:.0f} of {watch_s:.0f} s  {VERDICTS[worst.health]}  {numbers(worst)}"
    )


def _badness(diagnosis: Diagnosis) -> tuple[int, int, float]:
    stage = diagnosis.stage.number if diagnosis.stage else 0
    first = diagnosis.causes[0].confidence if diagnosis.causes else 0.0
    return diagnosis.severity, stage, first
