"""A diagnosis as Markdown, for a ticket or a chat. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kneewatch.diagnose.case import Cause
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.diagnose.symptoms import SYMPTOMS
from kneewatch.reports import advice
from kneewatch.reports.gaps import gaps
from kneewatch.reports.text import (
    VERDICTS,
    finding_words,
    notable,
    now_words,
    stage_words,
    summary_words,
    who,
)
from kneewatch.reports.words import clock, date, moment, printable, quantity
from kneewatch.rules.state import Finding

SPECIAL = re.compile(r"([\\`*\[\]<>|])")


def markdown(diagnoses: Sequence[Diagnosis], *, footers: bool = True) -> str:
    """The report of one moment, worst engine first; `footers` as for text."""
    ordered = sorted(diagnoses, key=lambda d: -d.severity)
    return "\n\n".join(_one(diagnosis, footers=footers) for diagnosis in ordered)


def escaped(line: str) -> str:
    """Text in which nothing is markup."""
    return SPECIAL.sub(r"\\\1", printable(line))


def _one(diagnosis: Diagnosis, *, footers: bool) -> str:
    lines = [
        f"## {VERDICTS[diagnosis.health]}: {escaped(who(diagnosis))}",
        "",
        f"{date(diagnosis.t_s)} {clock(diagnosis.t_s)} UTC. {stage_words(diagnosis)}.",
    ]
    if now := now_words(diagnosis):
        lines.append(f"Now: {now}.")
    if diagnosis.symptoms:
        lines += ["", *(f"- {symptom}: {SYMPTOMS[symptom]}" for symptom in diagnosis.symptoms)]
    for place, cause in enumerate(diagnosis.causes, 1):
        lines += ["", *_cause(place, cause, diagnosis)]
    found = notable(diagnosis, "warning", "critical") + notable(diagnosis, "info")
    if found:
        lines += ["", "### Also seen", ""]
        lines += [_also(finding, diagnosis.t_s) for finding in found]
    if not footers:
        return "\n".join(lines)
    lines += ["", f"Latencies judged against {diagnosis.judged_against}."]
    if left := gaps(diagnosis):
        lines += ["", "Could not be judged:", "", *(f"- {escaped(line)}" for line in left)]
    return "\n".join(lines)


def _also(finding: Finding, t_s: float) -> str:
    said = escaped(finding_words(finding, t_s))
    advised = "" if finding.clearing else f" {finding.rule.advice}"
    return f"- {said}; {finding.state}.{advised}"


def _cause(place: int, cause: Cause, diagnosis: Diagnosis) -> list[str]:
    said = escaped(summary_words(cause, diagnosis.t_s))
    lines = [
        f"### {place}. `{cause.id}` ({cause.severity.word}, confidence {cause.confidence:.2f})",
        "",
        f"{said} Since {moment(cause.since_s, diagnosis.t_s)}.",
        "",
        "| evidence | signal | value | threshold |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {side}{escaped(item.text)} | `{item.signal}` | {quantity(item.signal, item.value)} "
        f"| {quantity(item.signal, item.threshold)} |"
        for side, items in (("", cause.evidence), ("against: ", cause.against))
        for item in items
    ]
    if cause.explains:
        lines += ["", f"Explains: {', '.join(f'`{other}`' for other in cause.explains)}."]
    made = advice.advised(diagnosis, cause)
    if not made:
        lines += ["", f"**Do first:** {escaped(cause.lever)}"]
    for row in advice.rows(made):
        head, _, told = row.partition(": ")
        lines += ["", f"**{head.capitalize()}:** {escaped(told)}"]
    if cause.guide:
        lines += ["", f"Guide: {', '.join(cause.guide)}."]
    return lines
