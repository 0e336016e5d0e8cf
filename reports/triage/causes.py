"""Causes on the triage page: evidence, other findings and recommended changes. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isclose, isfinite

from kneewatch.diagnose.causes.evidence import Cause, Evidence
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO
from kneewatch.diagnose.recommend.recommendation import Change, Recommendation
from kneewatch.reports.diagnosis_text import clearing_words, notable, quiet_notes, summary_words
from kneewatch.reports.formatting import quantity
from kneewatch.reports.recommendation_text import NUMBERS, advised, change_words
from kneewatch.reports.triage.charts import Axis, Bound, Chart, chart
from kneewatch.reports.triage.view_model import CASCADE_SIGNALS, EngineView
from kneewatch.rules.rule import Severity
from kneewatch.rules.rule_state import Finding


@dataclass(frozen=True, slots=True)
class Moved:
    """A number before and after; a dash where it is not known."""

    label: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class ChangeView:
    """A recommendation. `command` is what to type, empty where no change sets a flag.

    `instead` are the flags that it takes the place of, `besides` changes that are not typed (a flag
    to drop, replicas), `words` all changes, `doubt` that they do not suffice alone.
    """

    key: str
    summary: str
    command: str
    instead: str
    besides: tuple[str, ...]
    words: tuple[str, ...]
    numbers: tuple[Moved, ...]
    cost: str
    doubt: str
    checks: Sequence[str]
    verify: Sequence[str]
    risk: str
    unknown: Sequence[str]
    guide: Sequence[str]

    @property
    def title(self) -> str:
        """The changes in a line; the advice where nothing is changed."""
        return ", ".join(self.words) or self.summary


def change_view(made: Recommendation, key: str = "") -> ChangeView:
    """A recommendation as the page shows it; `key` names it there."""
    demand = made.predicted.get("kv_demand_ratio", 0.0)
    return ChangeView(
        key,
        made.summary,
        command(made.changes),
        ", ".join(words for change in made.changes if (words := _was(change))),
        tuple(_told(change) for change in made.changes if not _typed(change)),
        tuple(map(_told, made.changes)),
        tuple(_numbers(made)),
        _cost(made.cost_usd_per_hour),
        "Not enough alone." if demand > KV_TARGET_RATIO else "",
        made.checks,
        made.verify,
        made.risk,
        made.unknown,
        made.guide,
    )


def command(changes: Sequence[Change]) -> str:
    """The flags to put on the server's command line, quoted for a shell; "" where there are
    none."""
    return " ".join(word for change in changes for word in _typed(change))


def _typed(change: Change) -> list[str]:
    if not change.flag.startswith("--") or change.after is None:
        return []
    if change.after is True:
        return [shlex.quote(change.flag)]
    if change.after is False:
        return [shlex.quote(f"--no-{change.flag[2:]}")]
    value = f"{change.after:g}" if isinstance(change.after, float) else str(change.after)
    return [shlex.quote(change.flag), shlex.quote(value)]


def _told(change: Change) -> str:
    return change_words(change).replace(" -> ", " → ")


def _was(change: Change) -> str:
    """The flag as it is now, where it has a value and another one takes its place."""
    if not _typed(change) or change.before is None or isinstance(change.before, bool):
        return ""
    return " ".join(_typed(Change(change.flag, None, change.before)))


def _numbers(made: Recommendation) -> list[Moved]:
    """The numbers that move, in the order that advice has them."""
    found: list[Moved] = []
    for key, label, told in NUMBERS:
        then, now = made.predicted.get(key), made.before.get(key)
        if then is None:
            continue
        row = Moved(label, "-" if now is None else told(now), told(then))
        if row.before != row.after:
            found.append(row)
    return found


def _cost(usd_per_hour: float | None) -> str:
    if usd_per_hour is None:
        return "not known"
    return f"{usd_per_hour:+,.2f} USD an hour" if usd_per_hour else "nothing extra"


# --- Causes with their evidence, vital signs and other findings, each with its chart --------------


SAME = 1e-4
NOT_PLAIN = re.compile(r"[^A-Za-z0-9_-]")
LABELS = dict(
    zip(
        CASCADE_SIGNALS,
        ("KV cache used", "running", "waiting", "evicted a second", "TTFT P99", "ITL P99"),
        strict=True,
    )
)


@dataclass(frozen=True, slots=True)
class EvidenceView:
    """A piece of evidence, for a cause or against it; `value` and `bound` are empty where the
    text alone can say them."""

    speaks: bool
    text: str
    signal: str
    value: str
    bound: str
    chart: Chart | None


@dataclass(frozen=True, slots=True)
class CauseView:
    """A cause in its place, with evidence and what to change; `key` names it on the page."""

    place: int
    key: str
    cause: Cause
    summary: str
    evidence: tuple[EvidenceView, ...]
    changes: tuple[ChangeView, ...]


@dataclass(frozen=True, slots=True)
class VitalView:
    """One of the few numbers that tell a cascade; `note` says what keeps its rule quiet."""

    label: str
    signal: str
    value: str
    note: str
    chart: Chart | None


@dataclass(frozen=True, slots=True)
class FindingView:
    """A rule that is out of bounds and that no cause tells; `words` says what it is, or was."""

    finding: Finding
    words: str
    value: str
    chart: Chart | None


@dataclass(frozen=True, slots=True)
class Reasons:
    """All that is drawn of one engine at one moment."""

    engine: EngineView
    axis: Axis
    moment_s: float

    @property
    def diagnosis(self) -> Diagnosis:
        """What is said of the engine."""
        return self.engine.diagnosis

    def causes(self) -> list[CauseView]:
        """The causes in their order."""
        causes = self.diagnosis.causes
        keys = unique([cause.id for cause in causes])
        return [
            CauseView(
                place,
                key,
                cause,
                summary_words(cause, self.diagnosis.t_s),
                tuple(self._evidence(cause)),
                self._changes(cause),
            )
            for place, (key, cause) in enumerate(zip(keys, causes, strict=True), 1)
        ]

    def vitals(self) -> list[VitalView]:
        """The few numbers that tell a cascade."""
        quiet = quiet_notes(self.diagnosis)
        return [
            VitalView(
                LABELS[key],
                key,
                quantity(key, self.diagnosis.values.get(key)).removesuffix(" a second"),
                quiet.get(key, ""),
                self._chart(key, self._rule_bounds(key)),
            )
            for key in CASCADE_SIGNALS
        ]

    def findings(self, *states: str) -> list[FindingView]:
        """Rules in one of these states that no cause tells."""
        return [
            FindingView(
                finding,
                clearing_words(finding, self.diagnosis.t_s) or finding.rule.summary,
                "" if finding.clearing else quantity(finding.rule.signal, finding.value),
                self._finding_chart(finding),
            )
            for finding in notable(self.diagnosis, *states)
        ]

    def _finding_chart(self, finding: Finding) -> Chart | None:
        until_s = finding.clearing.since_s if finding.clearing else None
        return self._chart(
            finding.rule.signal, _bounds(finding), since_s=finding.since_s, until_s=until_s
        )

    def _changes(self, cause: Cause) -> tuple[ChangeView, ...]:
        found = advised(self.diagnosis, cause)
        keys = unique([made.id for made in found])
        return tuple(change_view(made, key) for made, key in zip(found, keys, strict=True))

    def _evidence(self, cause: Cause) -> Iterator[EvidenceView]:
        sides = ((True, cause.evidence), (False, cause.against))
        for speaks, items in sides:
            for item in items:
                drawn = self.engine.series.get(item.signal)
                if drawn is None and item.text in cause.summary:
                    continue
                same = _same_quantity(item, self.diagnosis)
                bounds = [Bound(item.threshold)] if same and item.threshold is not None else []
                since_s = cause.since_s if isfinite(cause.since_s) else None
                yield EvidenceView(
                    speaks,
                    item.text,
                    item.signal,
                    quantity(item.signal, item.value) if same else "",
                    quantity(item.signal, item.threshold) if bounds else "",
                    self._chart(item.signal, bounds, since_s=since_s),
                )

    def _chart(
        self,
        key: str,
        bounds: Sequence[Bound],
        *,
        since_s: float | None = None,
        until_s: float | None = None,
    ) -> Chart | None:
        held = None if since_s is None else (since_s, until_s or self.moment_s)
        return chart(
            key,
            self.engine.series.get(key),
            self.axis,
            bounds=bounds,
            held=held,
            moment_s=self.moment_s,
        )

    def _rule_bounds(self, key: str) -> list[Bound]:
        findings = [found for found in self.diagnosis.findings if found.rule.signal == key]
        return [bound for finding in findings for bound in _bounds(finding)]


def unique(words: Sequence[str]) -> list[str]:
    """Words as parts of ids: plain letters, no two alike."""
    found: list[str] = []
    for word in words:
        plain = NOT_PLAIN.sub("", word)
        found.append(plain if plain and plain not in found else f"{plain}-{len(found)}")
    return found


def _bounds(finding: Finding) -> list[Bound]:
    """The bounds of a rule that are worth a line: not "anything at all"."""
    return [
        Bound(bound.threshold, bound.severity.word)
        for bound in finding.rule.bounds
        if bound.threshold and bound.severity > Severity.OK
    ]


def _same_quantity(item: Evidence, diagnosis: Diagnosis) -> bool:
    """Whether a piece of evidence weighs the signal itself: some weigh a share or a growth of it,
    and their bound is none of the signal's."""
    value = diagnosis.values.get(item.signal)
    return value is not None and item.value is not None and isclose(value, item.value, rel_tol=SAME)
