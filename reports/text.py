"""Diagnoses for a person: plain text for a terminal at night, and Markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from kneewatch.diagnose.case import Cause
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.diagnose.symptoms import SYMPTOMS

NUMBERS_SHOWN = 3
UNKNOWN_SHOWN = 6

COLOURS = {"ok": "32", "info": "36", "warning": "33", "critical": "31;1", "unknown": "35"}
VERDICTS = {
    "ok": "HEALTHY",
    "info": "HEALTHY, with a note",
    "warning": "WARNING",
    "critical": "CRITICAL",
    "unknown": "UNKNOWN",
}


@dataclass(frozen=True, slots=True)
class Style:
    """How to print: with colour or without, and an offset of local time from UTC."""

    colour: bool = False

    def paint(self, text: str, health: str) -> str:
        """Text in the colour of a health word."""
        return f"\x1b[{COLOURS[health]}m{text}\x1b[0m" if self.colour else text

    def bold(self, text: str) -> str:
        """Text in bold."""
        return f"\x1b[1m{text}\x1b[0m" if self.colour else text


def text(diagnoses: Sequence[Diagnosis], style: Style) -> str:
    """The report of one moment, worst engine first."""
    ordered = sorted(diagnoses, key=lambda d: -d.severity)
    return "\n\n".join(_one(diagnosis, style) for diagnosis in ordered)


def _one(diagnosis: Diagnosis, style: Style) -> str:
    lines = [verdict_line(diagnosis, style), _stage_line(diagnosis)]
    if diagnosis.symptoms:
        named = "; ".join(f"{s} {SYMPTOMS[s]}" for s in diagnosis.symptoms)
        lines.append(f"symptoms: {named}")
    for number, cause in enumerate(diagnosis.causes, 1):
        lines += ["", *_cause_lines(number, cause, diagnosis.t_s, style)]
    lonely = _lonely_findings(diagnosis)
    if lonely:
        lines += ["", "also out of bounds:", *lonely]
    lines += ["", *_footer(diagnosis)]
    return "\n".join(lines)


def verdict_line(diagnosis: Diagnosis, style: Style) -> str:
    """Verdict, target and first cause in one line."""
    verdict = style.paint(VERDICTS[diagnosis.health], diagnosis.health)
    who = f"{diagnosis.target} (model {diagnosis.model or '?'}, engine {diagnosis.engine or '?'})"
    first = diagnosis.causes[0] if diagnosis.causes else None
    return f"{verdict}  {who}" + (f"  {style.bold(first.id)}" if first else "")


def _stage_line(diagnosis: Diagnosis) -> str:
    stage = diagnosis.stage
    if stage is None:
        return "KV cascade: unknown, the page could not be read"
    line = f"KV cascade: stage {stage.number} ({stage.name})"
    if diagnosis.t_s - stage.since_s > 0:
        line += f" for {span(diagnosis.t_s - stage.since_s)}"
    if stage.forecast_s is not None:
        line += f"; full in about {span(stage.forecast_s)} at the present trend"
    return line


def _cause_lines(number: int, cause: Cause, now_s: float, style: Style) -> list[str]:
    head = f"{number}. {cause.id} ({cause.severity.word}, confidence {cause.confidence:.2f})"
    since = f"since {clock(cause.since_s)} UTC ({span(now_s - cause.since_s)} ago)"
    lines = [f"{style.bold(head)} {since}", f"   {cause.summary}"]
    lines += [f"   + {item.text} [{item.signal}]" for item in cause.evidence[:NUMBERS_SHOWN]]
    lines += [f"   - {item.text} [{item.signal}]" for item in cause.against]
    if cause.explains:
        lines.append(f"   explains: {', '.join(cause.explains)}")
    lines.append(f"   do first: {cause.lever}")
    if cause.guide:
        lines.append(f"   guide: {', '.join(cause.guide)}")
    return lines


def _lonely_findings(diagnosis: Diagnosis) -> list[str]:
    """Findings at warning or worse that no cause's evidence speaks of."""
    told = {item.signal for cause in diagnosis.causes for item in cause.evidence}
    return [
        f"   {finding.rule.id} {finding.state}: {finding.rule.summary} "
        f"({finding.rule.signal} {number(finding.value)}); {finding.rule.advice}"
        for finding in diagnosis.findings
        if finding.state in ("warning", "critical") and finding.rule.signal not in told
    ]


def _footer(diagnosis: Diagnosis) -> list[str]:
    lines = [
        f"window {diagnosis.window_s:.0f} s; latencies judged against {diagnosis.judged_against}"
    ]
    waiting = [f.rule.id for f in diagnosis.findings if f.state == "unknown" and not f.missing]
    if diagnosis.unknown:
        lines.append(f"could not be judged ({len(diagnosis.unknown)}):")
        lines += [f"   {line}" for line in diagnosis.unknown[:UNKNOWN_SHOWN]]
        if len(diagnosis.unknown) > UNKNOWN_SHOWN:
            lines.append(f"   and {len(diagnosis.unknown) - UNKNOWN_SHOWN} more (--format json)")
    if waiting:
        lines.append(f"not judged yet: {', '.join(waiting)}")
    return lines


def markdown(diagnoses: Sequence[Diagnosis]) -> str:
    """The same for a ticket or a chat."""
    ordered = sorted(diagnoses, key=lambda d: -d.severity)
    return "\n\n".join(_one_markdown(diagnosis) for diagnosis in ordered)


def _one_markdown(diagnosis: Diagnosis) -> str:
    lines = [f"## {VERDICTS[diagnosis.health]}: {diagnosis.target}", ""]
    lines.append(
        f"Model `{diagnosis.model}`, engine `{diagnosis.engine}`. {_stage_line(diagnosis)}."
    )
    for number_, cause in enumerate(diagnosis.causes, 1):
        lines += [
            "",
            f"### {number_}. `{cause.id}` ({cause.severity.word}, confidence "
            f"{cause.confidence:.2f})",
            "",
            f"{cause.summary} Since {clock(cause.since_s)} UTC.",
            "",
            "| evidence | signal | value | threshold |",
            "| --- | --- | --- | --- |",
        ]
        lines += [
            f"| {escaped(item.text)} | `{item.signal}` | {number(item.value)} "
            f"| {number(item.threshold)} |"
            for item in cause.evidence
        ]
        lines += ["", f"**Do first:** {cause.lever}"]
    lines += ["", f"Latencies judged against {diagnosis.judged_against}."]
    if diagnosis.unknown:
        lines += ["", "Could not be judged:", ""]
        lines += [f"- {escaped(line)}" for line in diagnosis.unknown]
    return "\n".join(lines)


def escaped(line: str) -> str:
    """Text that is safe inside a Markdown table."""
    return line.replace("|", "\\|").replace("\n", " ")


def number(value: float | None) -> str:
    """A number for reading; a dash for none."""
    return "-" if value is None else f"{value:.4g}"


def span(seconds: float) -> str:
    """A duration for reading: 45 s, 12 min, 3.2 h."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def clock(t_s: float) -> str:
    """A moment as hours, minutes and seconds, UTC."""
    return datetime.fromtimestamp(t_s, tz=UTC).strftime("%H:%M:%S")
