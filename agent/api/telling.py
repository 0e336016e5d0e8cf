"""Several targets at one moment as text and Markdown: trouble in full, health in a line. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kneewatch.agent.api.forms import MARKDOWN
from kneewatch.agent.api.standings import rank
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.reports.markdown import escaped, markdown
from kneewatch.reports.text import Style, brief_words, text, who
from kneewatch.reports.timeline import SHORT_VERDICTS
from kneewatch.reports.triage.standing import RANKS, TALLY
from kneewatch.reports.words import WIDTH, clock, cut, date, moment, printable, span, wrapped
from kneewatch.rules.cascade import NAMES

LINES = 200
"""More lines of the past than this are no help at night."""

TROUBLE_FROM = RANKS["unknown"]
PLAIN = Style()
HINT = (
    "more: ?format=json or markdown; ?at=03:07 or -2h for the past; ?since=-2h for how it came to\n"
    "  this; a browser gets a page at /triage"
)


@dataclass(frozen=True, slots=True)
class Stretch:
    """How long a stage, cause or health of an engine lasted; `end_s` is None while it goes on."""

    target: str
    model: str
    engine: str
    kind: str
    id: str
    severity: str
    start_s: float
    end_s: float | None
    last_s: float
    ended: str


def body(form: str, diagnoses: Sequence[Diagnosis], *, alone: bool) -> str:
    """The engines, worst first as given. `alone`: one target was asked for, and all is told."""
    told = markdown if form == MARKDOWN else _text
    if alone or len(diagnoses) <= 1:
        return told(diagnoses)
    trouble = [one for one in diagnoses if rank(one) >= TROUBLE_FROM]
    healthy = [one for one in diagnoses if rank(one) < TROUBLE_FROM]
    parts = [told(trouble)] if trouble else []
    if healthy:
        lines = [_brief(one) for one in healthy]
        if form == MARKDOWN:
            lines = ["## Healthy", "", *(f"- {escaped(line)}" for line in lines)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def head(
    form: str,
    diagnoses: Sequence[Diagnosis],
    *,
    t_s: float,
    past: bool,
    late: Sequence[tuple[str, float]],
    pending: Mapping[str, str],
    notices: Sequence[str] = (),
) -> str:
    """What comes first: the moment, how many engines stand how, and whom there is no news of.

    `late` are names of targets with the seconds since their newest scrape, `pending` those that
    have had none with what is waited for, `notices` say what is wrong with kneewatch itself.
    """
    counts = Counter(one.health for one in diagnoses)
    tally = ", ".join(f"{counts[word]} {words}" for word, words in TALLY.items() if counts[word])
    when = f"{date(t_s)} {clock(t_s)} UTC{' (the past)' if past else ''}"
    lines = [f"{when}: {tally or _nothing(len(pending), past=past)}"]
    lines += [f"no news for {span(age_s)} of {name}: what it said need not be so now"
              for name, age_s in late]  # fmt: skip
    lines += notices
    lines += [
        f"not scraped yet, so nothing is known of it: {name}; {awaited}"
        for name, awaited in pending.items()
    ]
    if form == MARKDOWN:
        return "\n\n".join([f"# {lines[0]}", *(escaped(line) for line in lines[1:])])
    return "\n".join(part for line in lines for part in wrapped(line))


def _nothing(pending: int, *, past: bool) -> str:
    if past:
        return "nothing to tell"
    if not pending:
        return "no target is watched"
    return f"waiting for the first scrape of {pending} target{'' if pending == 1 else 's'}"


def past(form: str, stretches: Sequence[Stretch], *, since_s: float, t_s: float) -> str:
    """How it came to this: the newest stretches of stages, causes and health, in order."""
    rows = [_stretch(one, t_s) for one in stretches[-LINES:]]
    title = f"since {moment(since_s, t_s)}"
    if not rows:
        rows = ["nothing is stored of that time"]
    if len(stretches) > LINES:
        rows.insert(0, f"{len(stretches) - LINES} earlier ones are left out (?format=json)")
    if form == MARKDOWN:
        return "\n".join([f"## {title.capitalize()}", "", *(f"- {escaped(row)}" for row in rows)])
    return "\n".join([f"{title}:", *(part for row in rows for part in wrapped(row, indent=3))])


def _text(diagnoses: Sequence[Diagnosis]) -> str:
    # `text` sorts by severity, in which an unknown engine is not worse than a healthy one.
    groups: dict[int, list[Diagnosis]] = {}
    for one in diagnoses:
        groups.setdefault(rank(one), []).append(one)
    return "\n\n".join(text(group, PLAIN) for group in groups.values())


def _brief(diagnosis: Diagnosis) -> str:
    stage = f"stage {diagnosis.stage.number}" if diagnosis.stage else "stage ?"
    causes = ", ".join(cause.id for cause in diagnosis.causes)
    line = f"{SHORT_VERDICTS[diagnosis.health]:8} {stage}  {who(diagnosis)}  "
    line += f"{causes}  " if causes else ""
    return cut(line + brief_words(diagnosis, WIDTH - len(line))).rstrip()


def _stretch(one: Stretch, t_s: float) -> str:
    end = "now" if one.end_s is None else moment(one.end_s, t_s)
    what = {"stage": f"stage {one.id}", "cause": one.id, "health": f"health {one.id}"}[one.kind]
    if one.kind == "stage" and one.id.isdecimal() and int(one.id) < len(NAMES):
        what += f" {NAMES[int(one.id)]}"
    told = f" ({one.severity})" if one.severity not in ("ok", one.id) else ""
    how = {"restarted": "; the engine was restarted", "unwatched": "; then it was not seen"}
    lasted = span((t_s if one.end_s is None else one.end_s) - one.start_s)
    return printable(
        f"{moment(one.start_s, t_s)} to {end} ({lasted}): {what}{told}, {one.target} "
        f"engine {one.engine or '?'}{how.get(one.ended, '')}"
    )
