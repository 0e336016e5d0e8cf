"""A diagnosis as plain text and as Markdown. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

from kneewatch.collector.signals.expr import Gauge
from kneewatch.collector.signals.table import VLLM_SIGNALS
from kneewatch.diagnose.account_signals import is_unchanged
from kneewatch.diagnose.deployment.server_facts import (
    KV_TOKENS,
    MAX_MODEL_LEN,
    MODEL,
    PAGE,
    SETTING,
    TENSOR_PARALLEL,
    VERSION,
)
from kneewatch.diagnose.doc_links import cause_page
from kneewatch.diagnose.engine.wording import spoken
from kneewatch.diagnose.ranking import BY_ID
from kneewatch.diagnose.verdict import (
    LOG_BASIS,
    SYMPTOMS,
    Cause,
    Counterfactual,
    Evidence,
    Server,
    Verdict,
)
from kneewatch.diagnose.verdict_json import symptom_actions
from kneewatch.reports import advice_text as advice
from kneewatch.reports.coverage import gaps
from kneewatch.reports.health import stage_known, stage_unknown
from kneewatch.reports.lines import WIDTH, lasting, moment, printable, wrapped
from kneewatch.rules.formatting import (
    alike,
    as_sentence,
    clock,
    date,
    duration,
    number,
    percent,
    quantity,
    span,
)
from kneewatch.rules.library import rule_of
from kneewatch.rules.rule import MORE_IS_BETTER, Finding, Severity

EVIDENCE_SHOWN = 3
GAUGES = frozenset(
    signal.key
    for signal in VLLM_SIGNALS
    if isinstance(signal.expr, Gauge) and signal.expr.fold == "sum"
)
"""Signals that are read from one scrape. All others are measured over the window."""

AGAINST_SHOWN = 2

WORK_WORDS = {
    "prompts": "prompt length",
    "answers": "answer length",
    "hits": "prefix cache hits",
    "drafts": "tokens per step with speculation",
}
RARELY_TOLD = ("prefill speed", WORK_WORDS["drafts"])
"""Factors that are left out unless they changed."""

LIMIT_WORDS = {"seats": "the limit on running requests", "kv": "the size of the KV cache"}

NUMBERS: tuple[advice.Column, ...] = (
    ("kv_usage_ratio", "KV {}", percent),
    ("running", "{} running", number),
    ("waiting", "{} waiting", number),
    ("preemption_ratio_per_s", "{} of running requests preempted every second", percent),
    ("ttft_p99_s", "TTFT P99 {}", duration),
    ("itl_p99_s", "ITL P99 {}", duration),
)
BRIEF_NUMBERS: tuple[advice.Column, ...] = (
    ("kv_usage_ratio", "KV {}", percent),
    ("running", "run {}", number),
    ("waiting", "wait {}", number),
    ("ttft_p99_s", "TTFT {}", duration),
    ("preemption_ratio_per_s", "preempt {}/s", percent),
)

MEANS: Sequence[tuple[str, float, advice.Column]] = (
    ("kv_usage_ratio", 0.5, ("kv_usage_avg_ratio", "KV {} on average", percent)),
    ("waiting", 1.0, ("waiting_avg", "{} waiting on average", "{:.0f}".format)),
)
"""Signals of one scrape, each with its mean over the window and the smallest mean that is shown."""

FALLEN_RATIO = 0.8
"""The mean is shown too if the newest value is below this share of it."""

SERVER_FACTS = (
    (VERSION, "vLLM {}"),
    (MODEL, "{}"),
    ("gpu", "{}"),
    (TENSOR_PARALLEL, "TP {}"),
    (MAX_MODEL_LEN, "max-model-len {}"),
    (KV_TOKENS, "KV cache {} tokens"),
)
"""The facts in the line about the server, with the format of each."""

UNKNOWN_CHANGE = "what changed since quiet times is unknown"

COLOURS = {"ok": "32", "info": "36", "warning": "33", "critical": "31;1", "unknown": "35"}
"""Terminal colours of the health states."""


class Style(Struct, frozen=True):
    """How to print: with colour or without, the width, and the address of the pages about
    causes."""

    colour: bool = False
    width: int = WIDTH
    docs_url: str = ""

    def paint(self, text: str, health: str) -> str:
        return f"\x1b[{COLOURS[health]}m{text}\x1b[0m" if self.colour else text

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.colour else text


HEAD, CAUSE, SECTION, LINE, LEAD, ITEM = "head", "cause", "section", "line", "lead", "item"
"""Kinds of rows: the first line, a cause's first line, a heading, a line of its own, and lines
below a cause or heading (LEAD is its sentence)."""

Row = tuple[str, str]
"""A kind and the words. Text and Markdown are made from the same rows."""

INDENTS = {CAUSE: (0, 3), SECTION: (0, 0), LINE: (0, 2), LEAD: (3, 0), ITEM: (3, 2)}
"""The indents of a row's first line and of the further ones, in addition."""


def as_text(rows: Iterable[Row], style: Style) -> str:
    """Rows as text."""
    lines: list[str] = []
    for kind, words in rows:
        if kind in (CAUSE, SECTION) and lines:
            lines.append("")
        if kind == HEAD or words.startswith(advice.RUN):
            lines.append(words if kind == HEAD else f"   {words}")
            continue
        indent, more = INDENTS[kind]
        folded = wrapped(words, width=style.width, indent=indent, more=more)
        if kind == CAUSE:
            first = words[: words.index(")") + 1]
            folded[0] = folded[0].replace(first, style.bold(first), 1)
        lines += folded
    return "\n".join(lines)


def as_markdown(rows: Iterable[Row]) -> str:
    """Rows as Markdown, for a ticket or a chat."""
    lines: list[str] = []
    for kind, words in rows:
        plain = " ".join(escaped(words).split())
        if kind in (HEAD, CAUSE, SECTION):
            mark = "##" if kind == HEAD else "###"
            lines += ["", f"{mark} {as_sentence(plain).rstrip(':.')}", ""]
        elif kind == ITEM:
            against = plain.startswith("- ")
            lines.append(
                f"- {'against: ' if against else ''}{plain.removeprefix('- ').removeprefix('+ ')}"
            )
        else:
            lines += ["", re.sub(r":\.$", ":", as_sentence(plain)), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def text(diagnoses: Sequence[Verdict], style: Style, *, footers: bool = True) -> str:
    """The diagnoses of one moment as text, the worst engine first. If the footers of all engines
    are equal, the footer is printed once.

    `footers`: add what latencies were judged against, and what could not be judged.
    """
    ordered = sorted(diagnoses, key=lambda d: -d.severity)
    blocks = [as_text([_head(each, style), *body(each, style)], style) for each in ordered]
    ends = [as_text(footer(diagnosis), style) for diagnosis in ordered]
    if not footers:
        return "\n\n".join(blocks)
    if len(set(ends)) == 1:
        return "\n\n".join((*blocks, ends[0]))
    return "\n\n".join(part for pair in zip(blocks, ends, strict=True) for part in pair)


def markdown(diagnoses: Sequence[Verdict], *, footers: bool = True, docs_url: str = "") -> str:
    """The diagnoses of one moment as Markdown, the worst engine first. `footers` as in `text`."""
    style = Style(docs_url=docs_url)
    return "\n\n".join(
        as_markdown(
            [
                _head(diagnosis, style),
                *body(diagnosis, style),
                *(footer(diagnosis) if footers else ()),
                (LINE, f"{date(diagnosis.t_s)} {clock(diagnosis.t_s)} UTC"),
            ]
        )
        for diagnosis in sorted(diagnoses, key=lambda d: -d.severity)
    )


SPECIAL = re.compile(r"([\\`*\[\]<>|])")


def escaped(line: str) -> str:
    """Text with every Markdown character escaped."""
    return SPECIAL.sub(r"\\\1", printable(line))


def who(diagnosis: Verdict) -> str:
    """The target of a diagnosis with its model and engine, or with its program."""
    if not diagnosis.model and not diagnosis.engine:
        program = f" ({diagnosis.program})" if diagnosis.program else ""
        return printable(f"{diagnosis.target}{program}")
    engine = f"model {diagnosis.model or '?'}"
    if diagnosis.judged_against != LOG_BASIS:
        # A log does not name the engine.
        engine += f", engine {diagnosis.engine or '?'}"
    return printable(f"{diagnosis.target} ({engine})")


def stage_words(diagnosis: Verdict, now_s: float | None = None) -> str:
    """The stage of the KV cascade, since when the stage has lasted at `now_s` (default: the time of
    the diagnosis), and its forecasts."""
    now_s = diagnosis.t_s if now_s is None else now_s
    stage = diagnosis.stage
    if stage.number is None:
        return f"KV cache: unknown, {stage_unknown(diagnosis)}"
    line = f"{stage_known(diagnosis)} {lasting(stage.since_s or diagnosis.t_s, now_s)}"
    if stage.forecast_s is not None:
        line += f"; KV cache full in about {span(stage.forecast_s)} at this trend"
    return line + slo_words(diagnosis)


def changed_words(diagnosis: Verdict) -> str:
    """What changed since quiet times, in one line: what moved, what is as usual, what is unknown.

    Empty for an engine without causes of which no factor is known, and while no page is readable.
    """
    what = diagnosis.changed
    if what is None:
        return UNKNOWN_CHANGE if diagnosis.causes and diagnosis.values else ""
    error = "" if what.speed.error is None else f" (+-{what.speed.error:.2f})"
    factors = (
        ("requests/s", what.demand, ""),
        *((words, what.work.get(name), "") for name, words in WORK_WORDS.items()),
        ("engine speed", what.speed.ratio, error),
        ("prefill speed", what.speed.prefill, ""),
    )
    moved, usual, unknown = list[str](), list[str](), list[str]()
    for name, ratio, note in factors:
        if name not in RARELY_TOLD or (ratio is not None and not is_unchanged(ratio)):
            times = _times(ratio)
            of = unknown if ratio is None else moved if times else usual
            of.append(f"{name}{times}{note}")
    if (streams := what.stream_words()) and what.since_s is not None:
        moved.append(streams)
    parts = (
        ("compared with quiet times ", moved),
        ("as usual: ", usual),
        ("unknown: ", unknown),
        ("limited by ", [LIMIT_WORDS[limit] for limit in what.limits]),
    )
    head = "" if what.since_s is None else f"since {clock(what.since_s)[:5]}: "
    if what.restart is not None:
        head = f"{what.restart.words()}: "
    return head + "; ".join(lead + ", ".join(words) for lead, words in parts if words)


def _times(ratio: float | None) -> str:
    """A ratio such as " x0.70"; empty if it rounds to 1 or is unknown."""
    if ratio is None or 0.95 <= ratio < 1.05:
        return ""
    return f" x{ratio:.1f}" if ratio >= 1 else f" x{ratio:.2f}"


def slo_words(diagnosis: Verdict) -> str:
    """The forecast of when TTFT P99 exceeds its target, as text to append to a line. Empty without
    a forecast, and where a critical verdict would only add that it may be now."""
    left_s, soonest_s, latest_s = (
        diagnosis.values.get(f"slo_breaks_{which}_s") for which in ("in", "soonest", "latest")
    )
    if left_s is None or (left_s < 1 and diagnosis.severity == Severity.CRITICAL):
        return ""
    if left_s < 1:
        return "; TTFT P99 may pass its target at any moment at this trend"
    between = ""
    if soonest_s is not None:
        latest = f"at most {span(latest_s)}" if latest_s is not None else "or never"
        between = f" (at least {span(soonest_s)}, {latest})"
    return f"; TTFT P99 passes its target in about {span(left_s)}{between} at this trend"


def figures(diagnosis: Verdict) -> list[tuple[str, str]]:
    """The numbers that show a cascade, in two parts: ("now", numbers of the newest scrape) and
    ("last 60 s", numbers measured over the window). A part without numbers is left out."""
    quiet = quiet_notes(diagnosis)
    scraped, measured = list[str](), list(fallen(diagnosis).values())
    for key, words in _numbers(diagnosis, NUMBERS):
        noted = f"{words} ({quiet[key]})" if key in quiet else words
        (scraped if key in GAUGES else measured).append(noted)
    parts = (("now", scraped), (f"last {span(diagnosis.window_s)}", measured))
    return [(when, ", ".join(numbers)) for when, numbers in parts if numbers]


def fallen(diagnosis: Verdict) -> dict[str, str]:
    """The window's mean of each signal whose newest value is far below it, in words by signal.
    Empty without a cause, because only causes are judged by the window."""
    words: dict[str, str] = {}
    for key, least, mean in MEANS if diagnosis.causes else ():
        newest, usual = diagnosis.values.get(key), diagnosis.values.get(mean[0]) or 0.0
        if newest is not None and usual >= least and newest < FALLEN_RATIO * usual:
            words |= [(key, shown) for _, shown in _numbers(diagnosis, [mean])]
    return words


def quiet_notes(diagnosis: Verdict) -> dict[str, str]:
    """The reasons why a rule is ok although its signal is out of bounds, by signal."""
    return {f.signal: f.note for f in diagnosis.findings if f.state == "ok" and f.note}


def brief_words(diagnosis: Verdict, width: int) -> str:
    """The numbers of `figures` in a short form. Numbers that exceed the width are left out."""
    line = ""
    for _, words in _numbers(diagnosis, BRIEF_NUMBERS):
        longer = f"{line}, {words}" if line else words
        if len(longer) > width:
            break
        line = longer
    return line


def notable(diagnosis: Verdict, *states: str) -> list[Finding]:
    """The findings whose state is one of `states` and that no cause covers."""
    signals = {item.signal for cause in diagnosis.causes for item in cause.evidence}
    cause_ids = [cause_id for cause in diagnosis.causes for cause_id in (cause.id, *cause.explains)]
    # A diagnosis by another version may name causes that this version lacks.
    rules = {rule for cause_id in cause_ids if cause_id in BY_ID for rule in BY_ID[cause_id].covers}
    return [
        finding
        for finding in diagnosis.findings
        if finding.state in states and finding.signal not in signals and finding.rule not in rules
    ]


def finding_words(finding: Finding, diagnosis: Verdict) -> str:
    """A finding of a diagnosis in one line: the rule's id, the summary and the value."""
    rule = rule_of(finding)
    if finding.clearing_since_s is not None:
        return f"{rule.id}: {clearing_words(finding, diagnosis)}"
    summary = spoken(diagnosis, rule.summary)
    return f"{rule.id}: {summary} ({rule.signal} {quantity(rule.signal, finding.value)})"


def advice_words(finding: Finding, diagnosis: Verdict) -> str:
    """What to do about a finding, with the limit to set if it is known."""
    rule = rule_of(finding)
    limit = diagnosis.values.get(rule.limit)
    limit_words = "" if limit is None else f" Limit: {quantity(rule.limit, limit)} ({rule.limit})."
    return spoken(diagnosis, rule.advice) + limit_words


def clearing_words(finding: Finding, diagnosis: Verdict) -> str:
    """For a finding that is clearing: the last value out of bounds, and since when the value is
    back in bounds. Empty for other findings."""
    rule, t_s = rule_of(finding), diagnosis.t_s
    if finding.clearing_since_s is None:
        return ""
    was = f"{advice.signal_name(rule.signal)} was {quantity(rule.signal, finding.was)}"
    was += f" until {moment(finding.clearing_since_s, t_s)}"
    if finding.value is None and not finding.note:
        return f"{was}, no value since"
    newest = "now" if rule.signal in GAUGES else f"in the last {span(diagnosis.window_s)}"
    value = f"{quantity(rule.signal, finding.value)} {newest}"
    if finding.note:
        return f"{was}, {value} and {finding.note}"
    side, lasted_s = "above" if rule.below else "below", t_s - finding.clearing_since_s
    how_long = f" for {span(lasted_s)}" if lasted_s >= 1 else ""
    return f"{was}, back {side} its threshold{how_long} ({value})"


def evidence_lines(cause: Cause) -> tuple[list[str], list[str]]:
    """At most EVIDENCE_SHOWN lines of evidence for a cause and AGAINST_SHOWN lines against it.

    Evidence for the cause is left out if the cause's summary already contains it. The order is that
    of the diagnosis.
    """

    def line(of: Evidence) -> str:
        return f"{of.text} [{of.signal}]" if of.signal else of.text

    supporting = [line(each) for each in cause.evidence if each.text not in cause.summary]
    against = [line(each) for each in cause.against]
    return supporting[:EVIDENCE_SHOWN], against[:AGAINST_SHOWN]


def symptom_lines(diagnosis: Verdict) -> list[tuple[str, str]]:
    """The symptoms that show and that this version knows: each id, its words and what to do."""
    actions = symptom_actions(diagnosis)
    return [(each, f"{SYMPTOMS[each].words} ({action})") for each, action in actions.items()]


def symptoms_shown(diagnosis: Verdict) -> list[str]:
    """The words of the symptoms that show and that this version knows."""
    return [SYMPTOMS[each].words for each in symptom_actions(diagnosis)]


def latency_basis(diagnosis: Verdict) -> str:
    """A text on what latencies were judged against: SLO targets, the engine's baseline, or nothing
    yet."""
    nothing, _, reason = diagnosis.judged_against.partition("nothing: ")
    if not nothing and reason:
        return f"latency not judged: {reason}"
    return f"latency judged against {diagnosis.judged_against}"


def server_words(server: Server | None) -> str:
    """Version, model, GPUs and limits of a server, with the sources of these facts. Empty if
    nothing was read from the server."""
    if server is None:
        return ""
    facts = {fact.name: fact for fact in server.facts}
    shown = [
        (words.format(printable(str(facts[name].value))), facts[name].source)
        for name, words in SERVER_FACTS
        if name in facts
    ]
    sources = dict.fromkeys(source for _, source in shown)
    if not sources.keys() - {SETTING, PAGE}:
        return ""
    return f"{', '.join(words for words, _ in shown)}; from: {', '.join(sources)}"


def _numbers(diagnosis: Verdict, numbers: Sequence[advice.Column]) -> list[tuple[str, str]]:
    values = diagnosis.values
    return [
        (key, spoken(diagnosis, words).format(formatted(value)))
        for key, words, formatted in numbers
        if (value := values.get(key)) is not None
        and not (value == 0 and key == "preemption_ratio_per_s")
    ]


def body(diagnosis: Verdict, style: Style) -> list[Row]:
    """What follows the headline of a diagnosis: what changed, the stage, the main numbers, the
    causes with what to do, and findings that no cause covers."""
    lines = [
        changed_words(diagnosis),
        stage_words(diagnosis),
        "; ".join(f"{when}: {numbers}" for when, numbers in figures(diagnosis)),
    ]
    if diagnosis.severity and (symptoms := symptom_lines(diagnosis)):
        lines.append(f"symptoms: {'; '.join(' '.join(each) for each in symptoms)}")
    rows = [(LINE, line) for line in lines if line]
    for place, cause in enumerate(diagnosis.causes, 1):
        rows += _cause(place, cause, diagnosis, style)
    if worse := notable(diagnosis, "warning", "critical"):
        rows.append((SECTION, "also out of bounds:"))
    for finding in worse:
        line = f"{finding_words(finding, diagnosis)}; {finding.state}. "
        rows.append((ITEM, line + advice_words(finding, diagnosis)))
    if notes := notable(diagnosis, "info"):
        rows.append((SECTION, "notes:"))
    return rows + [(ITEM, finding_words(finding, diagnosis)) for finding in notes]


def _head(diagnosis: Verdict, style: Style) -> Row:
    verdict = style.paint(diagnosis.health.upper(), diagnosis.health)
    first = f"  {style.bold(diagnosis.headline)}" if diagnosis.headline else ""
    # A failing target is scraped ever more rarely: durations end at its newest scrape.
    last = "log read" if diagnosis.judged_against == LOG_BASIS else "last tried"
    as_of = "" if diagnosis.was_read else f", {last} at {clock(diagnosis.t_s)} UTC"
    return HEAD, f"{verdict}{first}  {who(diagnosis)}{as_of}"


def _cause(place: int, cause: Cause, diagnosis: Verdict, style: Style) -> list[Row]:
    head = f"{place}. {cause.id} ({cause.severity.word}, confidence {cause.confidence:.2f})"
    lasted = "" if cause.since_s is None else lasting(cause.since_s, diagnosis.t_s)
    evidence, against = evidence_lines(cause)
    items = (
        *(f"+ {item}" for item in evidence),
        *(f"- {item}" for item in against),
        f"explains: {', '.join(cause.explains)}" if cause.explains else "",
        unless_words(cause),
        *advice.rows(diagnosis, cause),
        f"docs: {docs}" if (docs := cause_page(style.docs_url, cause.id)) else "",
    )
    return [
        (CAUSE, f"{head} {lasted}".rstrip()),
        (LEAD, summary_words(cause, diagnosis.t_s)),
        *((ITEM, item) for item in items if item),
    ]


def _turn(point: Counterfactual) -> str:
    """The point that the signal passes, with its direction. For a point at 0 it is "falls to",
    because no count or rate drops below 0."""
    verb = "rises above" if point.above else "drops below" if point.at else "falls to"
    at, now = alike(point.signal, point.at, point.now)
    return f"{point.signal} {verb} {at} (at the time: {now})"


def unless_words(cause: Cause) -> str:
    """A text with the better values at which a cause would clear, and the worse ones at which it
    would not be concluded, which is no recovery. Empty if they are unknown."""
    better, worse = list[str](), list[str]()
    for point in cause.unless:
        recovers = point.above == (point.signal in MORE_IS_BETTER)
        (better if recovers else worse).append(_turn(point))
    clears, others = " or ".join(better), " or ".join(worse)
    parts = (
        f"clears if {clears}" if clears else "",
        f"not concluded if {others}" if others else "",
    )
    return "; ".join(filter(None, parts))


def summary_words(cause: Cause, t_s: float) -> str:
    """The summary of a cause. If the cause is ending: its last summary, and how long ago it was
    last detected."""
    ago_s = 0.0 if cause.seen_s is None else t_s - cause.seen_s
    if ago_s > 0:
        return f"Ending: last detected {span(ago_s)} ago. It was: {cause.summary}"
    return cause.summary


def footer(diagnosis: Verdict) -> list[Row]:
    """What the latencies were judged against, the server, and what could not be judged."""
    rows: list[Row] = []
    if diagnosis.was_read:
        rows.append((LINE, f"window {span(diagnosis.window_s)}; {latency_basis(diagnosis)}"))
    if words := server_words(diagnosis.server):
        rows.append((LINE, f"server: {words}"))
    if unknown := gaps(diagnosis):
        rows.append((LINE, "could not be judged:"))
    return rows + [(ITEM, line) for line in unknown]
