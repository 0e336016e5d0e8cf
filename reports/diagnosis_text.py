"""A diagnosis as plain text and as Markdown. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kneewatch.diagnose.causes.evidence import Cause
from kneewatch.diagnose.causes.ranking import BY_ID
from kneewatch.diagnose.engine.diagnosis import SYMPTOMS, Diagnosis
from kneewatch.reports import recommendation_text as advice
from kneewatch.reports.coverage import gaps
from kneewatch.reports.formatting import (
    WIDTH,
    clock,
    date,
    duration,
    lasting,
    moment,
    number,
    percent,
    printable,
    quantity,
    span,
    wrapped,
)
from kneewatch.rules.rule_state import Finding

EVIDENCE_SHOWN = 3
AGAINST_SHOWN = 2

Number = tuple[str, str, Callable[[float], str]]
NUMBERS: tuple[Number, ...] = (
    ("kv_usage_ratio", "KV {}", percent),
    ("running", "{} running", number),
    ("waiting", "{} waiting", number),
    ("preemption_ratio_per_s", "{} evicted a second", percent),
    ("ttft_p99_s", "TTFT P99 {}", duration),
    ("itl_p99_s", "ITL P99 {}", duration),
)
BRIEF_NUMBERS: tuple[Number, ...] = (
    ("kv_usage_ratio", "KV {}", percent),
    ("running", "run {}", number),
    ("waiting", "wait {}", number),
    ("ttft_p99_s", "TTFT {}", duration),
    ("preemption_ratio_per_s", "evict {}/s", percent),
)

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
    """How to print: with colour or without, and how wide."""

    colour: bool = False
    width: int = WIDTH

    def paint(self, text: str, health: str) -> str:
        """Text in the colour of a health word."""
        return f"\x1b[{COLOURS[health]}m{text}\x1b[0m" if self.colour else text

    def bold(self, text: str) -> str:
        """Text in bold."""
        return f"\x1b[1m{text}\x1b[0m" if self.colour else text


def text(diagnoses: Sequence[Diagnosis], style: Style, *, footers: bool = True) -> str:
    """The report of one moment, worst engine first; what all engines lack is said once.

    `footers`: say what was judged against what, and what could not be judged.
    """
    ordered = sorted(diagnoses, key=lambda d: -d.severity)
    blocks = ["\n".join(_body(diagnosis, style)) for diagnosis in ordered]
    ends = ["\n".join(_footer(diagnosis, style)) for diagnosis in ordered]
    if not footers:
        return "\n\n".join(blocks)
    if len(set(ends)) == 1:
        return "\n\n".join((*blocks, ends[0]))
    return "\n\n".join(part for pair in zip(blocks, ends, strict=True) for part in pair)


def who(diagnosis: Diagnosis) -> str:
    """Which engine a diagnosis is about."""
    if not diagnosis.model and not diagnosis.engine:
        return printable(diagnosis.target)
    named = f"model {diagnosis.model or '?'}, engine {diagnosis.engine or '?'}"
    return printable(f"{diagnosis.target} ({named})")


def stage_words(diagnosis: Diagnosis) -> str:
    """The stage of the cascade, since when, and what comes next."""
    stage = diagnosis.stage
    if stage is None:
        return f"KV cascade: unknown, {diagnosis.stage_unknown}"
    line = f"KV cascade: stage {stage.number} ({stage.name})"
    line += f" {lasting(stage.since_s, diagnosis.t_s)}"
    if stage.forecast_s is not None:
        line += f"; full in about {span(stage.forecast_s)} at the present trend"
    return line + slo_words(diagnosis)


def slo_words(diagnosis: Diagnosis) -> str:
    """When the TTFT target breaks at the present trend, to be added to a line; empty without."""
    left_s, soonest_s, latest_s = (
        diagnosis.values.get(f"slo_breaks_{which}_s") for which in ("in", "soonest", "latest")
    )
    if left_s is None:
        return ""
    if left_s < 1:
        return "; TTFT P99 may pass its target any moment at the present trend"
    between = ""
    if soonest_s is not None:
        late = f"at most {span(latest_s)}" if latest_s is not None else "or never"
        between = f" ({span(soonest_s)} at least, {late})"
    return f"; TTFT P99 over its target in about {span(left_s)}{between} at the present trend"


def now_words(diagnosis: Diagnosis) -> str:
    """The few numbers that tell a cascade; none where nothing could be read."""
    quiet = quiet_notes(diagnosis)
    return ", ".join(
        f"{words} ({quiet[key]})" if key in quiet else words
        for key, words in _told(diagnosis, NUMBERS)
    )


def quiet_notes(diagnosis: Diagnosis) -> dict[str, str]:
    """What keeps a rule quiet though its value is out of bounds, by signal."""
    return {f.rule.signal: f.note for f in diagnosis.findings if f.state == "ok" and f.note}


def brief_words(diagnosis: Diagnosis, width: int) -> str:
    """As many of them, shorter, as fit a width."""
    line = ""
    for _, words in _told(diagnosis, BRIEF_NUMBERS):
        longer = f"{line}, {words}" if line else words
        if len(longer) > width:
            break
        line = longer
    return line


def notable(diagnosis: Diagnosis, *states: str) -> list[Finding]:
    """Findings in one of these states that no cause tells already."""
    signals = {item.signal for cause in diagnosis.causes for item in cause.evidence}
    told = [told for cause in diagnosis.causes for told in (cause.id, *cause.explains)]
    # A diagnosis of another version may name causes that this one lacks.
    rules = {rule for cause_id in told if cause_id in BY_ID for rule in BY_ID[cause_id].covers}
    return [
        finding
        for finding in diagnosis.findings
        if finding.state in states
        and finding.rule.signal not in signals
        and finding.rule.id not in rules
    ]


def finding_words(finding: Finding, t_s: float) -> str:
    """A finding in a line: rule, what it says, the number. `t_s` is when it was made."""
    rule = finding.rule
    if finding.clearing is not None:
        return f"{rule.id}: {clearing_words(finding, t_s)}"
    return f"{rule.id}: {rule.summary} ({rule.signal} {quantity(rule.signal, finding.value)})"


def clearing_words(finding: Finding, t_s: float) -> str:
    """What a state was and since when it is over; empty where it is not."""
    rule, clearing = finding.rule, finding.clearing
    if clearing is None:
        return ""
    was = f"{rule.signal} was {quantity(rule.signal, clearing.was)}"
    was += f" until {moment(clearing.since_s, t_s)}"
    if finding.note:
        return f"{was}, now {quantity(rule.signal, finding.value)} and {finding.note}"
    if finding.value is None:
        return f"{was}, and has no value since"
    side, lasted_s = "over" if rule.below else "under", t_s - clearing.since_s
    how_long = f" for {span(lasted_s)}" if lasted_s >= 1 else ""
    now = quantity(rule.signal, finding.value)
    return f"{was}, back {side} its bound{how_long} (now {now})"


def told_evidence(cause: Cause) -> tuple[list[str], list[str]]:
    """The evidence worth a line, for and against: what the summary has said is left out."""
    speaks = [f"{e.text} [{e.signal}]" for e in cause.evidence if e.text not in cause.summary]
    against = [f"{e.text} [{e.signal}]" for e in cause.against]
    return speaks[:EVIDENCE_SHOWN], against[:AGAINST_SHOWN]


def _told(diagnosis: Diagnosis, numbers: Sequence[Number]) -> list[tuple[str, str]]:
    values = diagnosis.values
    return [
        (key, words.format(told(value)))
        for key, words, told in numbers
        if (value := values.get(key)) is not None
        and not (value == 0 and key == "preemption_ratio_per_s")
    ]


def _body(diagnosis: Diagnosis, style: Style) -> list[str]:
    def told(line: str, *, indent: int = 0, more: int = 2) -> list[str]:
        return wrapped(line, width=style.width, indent=indent, more=more)

    lines = [_verdict(diagnosis, style), *told(stage_words(diagnosis))]
    if now := now_words(diagnosis):
        lines += told(f"now: {now}")
    if diagnosis.symptoms:
        lines += told(f"symptoms: {'; '.join(f'{s} {SYMPTOMS[s]}' for s in diagnosis.symptoms)}")
    for place, cause in enumerate(diagnosis.causes, 1):
        lines += ["", *_cause(place, cause, diagnosis, style)]
    worse = notable(diagnosis, "warning", "critical")
    if worse:
        lines += ["", "also out of bounds:"]
    for finding in worse:
        said = finding_words(finding, diagnosis.t_s)
        lines += told(f"{said}; {finding.state}. {finding.rule.advice}", indent=3)
    notes = notable(diagnosis, "info")
    if notes:
        lines += ["", "notes:"]
    for finding in notes:
        lines += told(finding_words(finding, diagnosis.t_s), indent=3)
    return lines


def _verdict(diagnosis: Diagnosis, style: Style) -> str:
    verdict = style.paint(VERDICTS[diagnosis.health], diagnosis.health)
    first = f"  {style.bold(diagnosis.headline)}" if diagnosis.headline else ""
    # One that fails is asked ever more rarely: durations are counted to its newest scrape.
    as_of = "" if diagnosis.was_read else f", tried last at {clock(diagnosis.t_s)} UTC"
    return f"{verdict}{first}  {who(diagnosis)}{as_of}"


def _cause(place: int, cause: Cause, diagnosis: Diagnosis, style: Style) -> list[str]:
    head = f"{place}. {cause.id} ({cause.severity.word}, confidence {cause.confidence:.2f})"
    evidence, against = told_evidence(cause)
    made = advice.advised(diagnosis, cause)
    rows = [
        (summary_words(cause, diagnosis.t_s), 0),
        *((f"+ {item}", 2) for item in evidence),
        *((f"- {item}", 2) for item in against),
        (f"explains: {', '.join(cause.explains)}" if cause.explains else "", 2),
        (unless_words(cause), 2),
        *((row, 2) for row in advice.rows(made) or [f"do first: {cause.lever}"]),
        (f"guide: {', '.join(cause.guide)}" if cause.guide else "", 2),
    ]
    lines = wrapped(f"{head} {lasting(cause.since_s, diagnosis.t_s)}", width=style.width, more=3)
    lines[0] = lines[0].replace(head, style.bold(head), 1)
    for row, more in rows:
        lines += wrapped(row, width=style.width, indent=3, more=more)
    return lines


def unless_words(cause: Cause) -> str:
    """At which values the cause clears; empty where that is not known."""
    points = [
        f"{point.signal} {'rises above' if point.above else 'drops below'} "
        f"{quantity(point.signal, point.at)}"
        f" (at the time: {quantity(point.signal, point.now)})"
        for point in cause.unless
    ]
    return f"clears if {' or '.join(points)}" if points else ""


def summary_words(cause: Cause, t_s: float) -> str:
    """A cause's summary; where it only lingers, with how old its numbers are."""
    ago_s = t_s - cause.seen_s
    return f"Clearing, last seen {span(ago_s)} ago: {cause.summary}" if ago_s > 0 else cause.summary


def _footer(diagnosis: Diagnosis, style: Style) -> list[str]:
    lines: list[str] = []
    if diagnosis.was_read:
        lines = wrapped(
            f"window {span(diagnosis.window_s)}; latencies judged against "
            f"{diagnosis.judged_against}",
            width=style.width,
        )
    left = gaps(diagnosis)
    if left:
        lines.append("could not be judged:")
    for line in left:
        lines += wrapped(line, width=style.width, indent=3)
    return lines


# --- A diagnosis as Markdown, for a ticket or a chat ----------------------------------------------


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
        lines += ["", *_markdown_cause(place, cause, diagnosis)]
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


def _markdown_cause(place: int, cause: Cause, diagnosis: Diagnosis) -> list[str]:
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
