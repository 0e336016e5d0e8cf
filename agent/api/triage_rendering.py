"""Diagnoses of several targets as text and Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

from kneewatch.agent.api.past import EngineInterval
from kneewatch.agent.api.responses import MARKDOWN
from kneewatch.diagnose.doc_links import OWN_DOCS
from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.diagnosis_text import (
    Style,
    brief_words,
    escaped,
    markdown,
    notable,
    text,
    who,
)
from kneewatch.reports.health import RANKS, counted_words, rank_of
from kneewatch.reports.recommendation_text import first_step
from kneewatch.rules.cascade import NAMES
from kneewatch.rules.formatting import (
    WIDTH,
    clock,
    cut,
    date,
    moment,
    plural,
    printable,
    span,
    wrapped,
)

INDENT = " " * 9
"""Spaces before the text column, which follows the column with the health."""

LINES = 200
"""Maximum number of history lines in text and Markdown."""

PROBLEM_FROM_RANK = RANKS["unknown"]
"""Engines whose health has at least this rank are problems. Problems are listed first."""

FULL_MAX = 2
"""Maximum number of problems that the text shows in full. With more problems, only the worst is
shown in full and the others in two lines each: ten then fit a screen and a model's context."""

FULL_CHARS = 3_000
"""Maximum number of characters of problems shown in full, if other targets follow."""

HINT = (
    "more: /api/v1/triage/TARGET for one target in full; ?since=-2h for the history; ?at=03:07 or\n"
    "  -2h for a past moment; /docs/causes/CAUSE about a cause; ?format=json or markdown;\n"
    "  /triage for browsers"
)


def body(form: str, diagnoses: Sequence[Verdict], *, alone: bool, docs_url: str = OWN_DOCS) -> str:
    """The diagnoses as text, in the given order. `alone`: there is one target, which is shown in
    full."""
    render = partial(markdown if form == MARKDOWN else _text, docs_url=docs_url)
    if alone or len(diagnoses) <= 1:
        return render(diagnoses)
    trouble = [each for each in diagnoses if rank_of(each.health) >= PROBLEM_FROM_RANK]
    healthy = [each for each in diagnoses if rank_of(each.health) < PROBLEM_FROM_RANK]
    in_full = trouble if form == MARKDOWN or len(trouble) <= FULL_MAX else trouble[:1]
    full = render(in_full)
    if form != MARKDOWN and len(full) > FULL_CHARS and len(diagnoses) > FULL_MAX:
        in_full = trouble[:1]
        full = render(in_full)
    parts = [full] if full else []
    if in_short := trouble[len(in_full) :]:
        pairs = ((_brief(diagnosis), *_first_step(diagnosis)) for diagnosis in in_short)
        parts.append("\n".join(chain.from_iterable(pairs)))
    if healthy:
        lines = [_brief(diagnosis) for diagnosis in healthy]
        if form == MARKDOWN:
            lines = ["## OK", "", *(f"- {escaped(line)}" for line in lines)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def head(
    form: str,
    diagnoses: Sequence[Verdict],
    *,
    t_s: float,
    past: bool,
    late: Sequence[tuple[str, float]],
    pending: Mapping[str, str],
    notices: Sequence[str] = (),
) -> str:
    """The first lines: the time, the number of engines by health, and targets without data.

    `late` are names of targets with the seconds since their newest scrape. `pending` maps targets
    without a scrape to the reason. `notices` are problems of kneewatch itself.
    """
    tally = counted_words(diagnosis.health for diagnosis in diagnoses)
    when = f"{date(t_s)} {clock(t_s)} UTC{' (the past)' if past else ''}"
    lines = [f"{when}: {tally or _nothing(len(pending), past=past)}"]
    lines += [f"no scrape of {name} for {span(age_s)}: its last state may be out of date; "
              "durations end at that scrape"
              for name, age_s in late]  # fmt: skip
    lines += notices
    lines += [
        f"not scraped yet, so its state is unknown: {name}; {awaited}"
        for name, awaited in pending.items()
    ]
    if form == MARKDOWN:
        return "\n\n".join([f"# {lines[0]}", *(escaped(line) for line in lines[1:])])
    return "\n".join(part for line in lines for part in wrapped(line))


def _nothing(pending: int, *, past: bool) -> str:
    if past:
        return "no data"
    if not pending:
        return "no target is watched"
    return f"waiting for the first scrape of {plural(pending, 'target')}"


def past(form: str, intervals: Sequence[EngineInterval], *, since_s: float, t_s: float) -> str:
    """The history as text: the newest intervals of stages, causes and health, oldest first."""
    rows = [_interval(row, t_s) for row in intervals[-LINES:]]
    title = f"since {moment(since_s, t_s)}"
    if not rows:
        rows = ["no stored data of that time"]
    if len(intervals) > LINES:
        rows.insert(0, f"{len(intervals) - LINES} earlier rows are not shown (?format=json)")
    if form == MARKDOWN:
        return "\n".join([f"## {title.capitalize()}", "", *(f"- {escaped(row)}" for row in rows)])
    return "\n".join([f"{title}:", *(part for row in rows for part in wrapped(row, indent=3))])


def _text(diagnoses: Sequence[Verdict], *, docs_url: str) -> str:
    # `text` sorts by severity, which does not rank unknown above ok.
    groups: dict[int, list[Verdict]] = {}
    for diagnosis in diagnoses:
        groups.setdefault(rank_of(diagnosis.health), []).append(diagnosis)
    return "\n\n".join(text(group, Style(docs_url=docs_url)) for group in groups.values())


def _brief(diagnosis: Verdict) -> str:
    number = diagnosis.stage.number
    stage = "stage ?" if number is None else f"stage {number}"
    causes = [cause.id for cause in diagnosis.causes]
    notes = [finding.rule for finding in notable(diagnosis, "info")]
    line = f"{diagnosis.health.upper():8} {stage}  {who(diagnosis)}  "
    line += f"{', '.join(causes + notes)}  " if causes or notes else ""
    return cut(line + brief_words(diagnosis, WIDTH - len(line))).rstrip()


def _first_step(diagnosis: Verdict) -> list[str]:
    """One line: the first step against the engine's first cause, or why /metrics was not read.

    The line is cut to WIDTH characters. The list is empty if the engine was read and has no cause.
    """
    if not diagnosis.was_read:
        why = diagnosis.causes[0].summary if diagnosis.causes else diagnosis.stage_unknown
        return [cut(f"{INDENT}{why}")]
    if not diagnosis.causes:
        return []
    return [cut(f"{INDENT}{first_step(diagnosis, diagnosis.causes[0])}")]


def _interval(row: EngineInterval, t_s: float) -> str:
    engine, interval = row
    end = "now" if interval.end_s is None else moment(interval.end_s, t_s)
    what = interval.id if interval.kind == "cause" else f"{interval.kind} {interval.id}"
    if interval.kind == "stage" and interval.id.isdecimal() and int(interval.id) < len(NAMES):
        what += f" {NAMES[int(interval.id)]}"
    word = interval.severity.word
    severity = f" ({word})" if word not in ("ok", interval.id) else ""
    how = {"restarted": "; the engine was restarted", "unwatched": "; then it was not watched"}
    lasted = span((t_s if interval.end_s is None else interval.end_s) - interval.start_s)
    return printable(
        f"{moment(interval.start_s, t_s)} to {end} ({lasted}): {what}{severity}, {engine.target} "
        f"engine {engine.engine or '?'}{how.get(interval.ended, '')}"
    )
