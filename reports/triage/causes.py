"""Causes on the triage page: evidence, other findings and recommended changes. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from math import isclose

from msgspec import Struct

from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO
from kneewatch.diagnose.recommend.recommendation import Change, Recommendation
from kneewatch.diagnose.verdict import Cause, Evidence, Verdict
from kneewatch.reports.diagnosis_text import (
    GAUGES,
    clearing_words,
    notable,
    quiet_notes,
    summary_words,
)
from kneewatch.reports.recommendation_text import NUMBERS, advised, change_words, stop_gap
from kneewatch.reports.triage.charts import Axis, Bound, Chart, chart
from kneewatch.reports.triage.view_model import CASCADE_SIGNALS, EngineView
from kneewatch.rules.formatting import quantity, span
from kneewatch.rules.library import rule_of
from kneewatch.rules.rule import Finding, Severity


class Moved(Struct, frozen=True):
    """A number before and after a change. An unknown number is a dash."""

    label: str
    before: str
    after: str


class ChangeView(Struct, frozen=True):
    """A recommendation for the page.

    `command` are the flags to add; empty if no change sets a flag. `instead` are the current flags
    that `command` replaces. `besides` are changes other than adding a flag (removing a flag,
    changing replicas). `words` are all changes. `doubt` is a remark if this change alone is not
    enough.
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

    @property
    def title(self) -> str:
        """All changes in one line. Without changes: the advice."""
        return ", ".join(self.words) or self.summary


def change_view(recommendation: Recommendation, key: str = "") -> ChangeView:
    """A recommendation in the form in which the page shows it. `key` is its element id on the
    page."""
    demand = recommendation.predicted.get("kv_demand_ratio", 0.0)
    return ChangeView(
        key,
        recommendation.summary,
        command(recommendation.changes),
        ", ".join(flag for change in recommendation.changes if (flag := _current_flag(change))),
        tuple(_words(change) for change in recommendation.changes if not _arguments(change)),
        tuple(map(_words, recommendation.changes)),
        tuple(_numbers(recommendation)),
        _cost(recommendation),
        "Not enough alone." if demand > KV_TARGET_RATIO else "",
        recommendation.checks,
        recommendation.verify,
        recommendation.risk,
        recommendation.unknown,
    )


def command(changes: Sequence[Change]) -> str:
    """The flags to add to the server's command line, quoted for a shell. "" if there are none."""
    return " ".join(argument for change in changes for argument in _arguments(change))


def _arguments(change: Change) -> list[str]:
    """The command-line arguments that set a change's flag. Empty if the change sets no flag."""
    if not change.flag.startswith("--") or change.after is None:
        return []
    if change.after is True:
        return [shlex.quote(change.flag)]
    if change.after is False:
        return [shlex.quote(f"--no-{change.flag[2:]}")]
    value = f"{change.after:g}" if isinstance(change.after, float) else str(change.after)
    return [shlex.quote(change.flag), shlex.quote(value)]


def _words(change: Change) -> str:
    return change_words(change).replace(" -> ", " → ")


def _current_flag(change: Change) -> str:
    """The flag with its current value, if the change replaces that value; else empty."""
    if not _arguments(change) or change.before is None or isinstance(change.before, bool):
        return ""
    return " ".join(_arguments(Change(change.flag, None, change.before)))


def _numbers(recommendation: Recommendation) -> list[Moved]:
    """The numbers that a recommendation changes, in the order of NUMBERS."""
    rows: list[Moved] = []
    for key, label, formatted in NUMBERS:
        after, before = recommendation.predicted.get(key), recommendation.before.get(key)
        if after is None:
            continue
        row = Moved(label, "-" if before is None else formatted(before), formatted(after))
        if row.before != row.after:
            rows.append(row)
    return rows


def _cost(recommendation: Recommendation) -> str:
    usd_per_hour = recommendation.cost_usd_per_hour
    if usd_per_hour is None:
        price = "price unknown"
    else:
        price = f"{usd_per_hour:+,.2f} USD/h" if usd_per_hour else "no change in price"
    restarts = any(change.flag.startswith("--") for change in recommendation.changes)
    return f"{price}; needs a restart, which empties the caches" if restarts else price


# --- Causes, vital signs and findings, each with its chart ----------------------------------------


SAME = 1e-4
NOT_PLAIN = re.compile(r"[^A-Za-z0-9_-]")
LABELS = dict(
    zip(
        CASCADE_SIGNALS,
        ("KV cache used", "running", "waiting", "preempted/s", "TTFT P99", "ITL P99"),
        strict=True,
    )
)


class EvidenceView(Struct, frozen=True):
    """A piece of evidence. `supports` is False if it speaks against the cause.

    `value` and `bound` are empty if the text of the evidence is not about the value of the signal
    itself.
    """

    supports: bool
    text: str
    signal: str
    value: str
    bound: str
    chart: Chart | None


class CauseView(Struct, frozen=True):
    """A cause with its rank, evidence, stop-gap and changes. `key` is its element id on the
    page."""

    place: int
    key: str
    cause: Cause
    summary: str
    evidence: tuple[EvidenceView, ...]
    stop_gap: Sequence[str]
    changes: tuple[ChangeView, ...]


def stop_gap_steps(cause: Cause) -> Sequence[str]:
    """The steps of a cause's stop-gap. Empty for a cause at info, which needs no action tonight."""
    return stop_gap(cause.id) if cause.severity > Severity.INFO else ()


class VitalView(Struct, frozen=True):
    """One of CASCADE_SIGNALS. `note` is the reason if its rule is ok although the value is out of
    bounds.

    `measured` says whether the value is from one scrape or from the window.
    """

    label: str
    signal: str
    value: str
    measured: str
    note: str
    chart: Chart | None


class FindingView(Struct, frozen=True):
    """A finding that no cause covers. `words` say what is, or was, out of bounds."""

    finding: Finding
    words: str
    value: str
    chart: Chart | None


class Reasons(Struct, frozen=True):
    """Builds the views of one engine at one moment."""

    engine: EngineView
    axis: Axis
    moment_s: float

    @property
    def diagnosis(self) -> Verdict:
        """The engine's diagnosis."""
        return self.engine.diagnosis

    def causes(self) -> list[CauseView]:
        """The causes, most likely first."""
        causes = self.diagnosis.causes
        keys = unique([cause.id for cause in causes])
        return [
            CauseView(
                place,
                key,
                cause,
                summary_words(cause, self.diagnosis.t_s),
                tuple(self._evidence(cause)),
                stop_gap_steps(cause),
                self._changes(cause),
            )
            for place, (key, cause) in enumerate(zip(keys, causes, strict=True), 1)
        ]

    def vitals(self) -> list[VitalView]:
        """A view of each of CASCADE_SIGNALS."""
        quiet, window = quiet_notes(self.diagnosis), f"last {span(self.diagnosis.window_s)}"
        return [
            VitalView(
                LABELS[key],
                key,
                quantity(key, self.diagnosis.values.get(key)).removesuffix("/s"),
                "last scrape" if key in GAUGES else window,
                quiet.get(key, ""),
                self._chart(key, self._rule_bounds(key)),
            )
            for key in CASCADE_SIGNALS
        ]

    def findings(self, *states: str) -> list[FindingView]:
        """The findings whose state is one of `states` and that no cause covers."""
        return [
            FindingView(
                finding,
                clearing_words(finding, self.diagnosis) or rule_of(finding).summary,
                "" if finding.clearing_since_s else quantity(finding.signal, finding.value),
                self._finding_chart(finding),
            )
            for finding in notable(self.diagnosis, *states)
        ]

    def _finding_chart(self, finding: Finding) -> Chart | None:
        until_s = finding.clearing_since_s
        return self._chart(
            finding.signal, _bounds(finding), since_s=finding.since_s, until_s=until_s
        )

    def _changes(self, cause: Cause) -> tuple[ChangeView, ...]:
        recommendations = advised(self.diagnosis, cause)
        keys = unique([recommendation.id for recommendation in recommendations])
        return tuple(map(change_view, recommendations, keys))

    def _evidence(self, cause: Cause) -> Iterator[EvidenceView]:
        sides = ((True, cause.evidence), (False, cause.against))
        for supports, items in sides:
            for item in items:
                if item.signal not in self.engine.series and item.text in cause.summary:
                    continue
                same = _same_quantity(item, self.diagnosis)
                bounds = [Bound(item.threshold)] if same and item.threshold is not None else []
                since_s = cause.since_s
                yield EvidenceView(
                    supports,
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
        findings = [finding for finding in self.diagnosis.findings if finding.signal == key]
        return [bound for finding in findings for bound in _bounds(finding)]


def unique(words: Sequence[str]) -> list[str]:
    """Unique parts of HTML element ids, one for each word: letters, digits, "_" and "-".

    Other characters are removed. If the rest is empty or taken already, "-" and the word's index
    are appended.
    """
    ids: list[str] = []
    for word in words:
        plain = NOT_PLAIN.sub("", word)
        ids.append(plain if plain and plain not in ids else f"{plain}-{len(ids)}")
    return ids


def _bounds(finding: Finding) -> list[Bound]:
    """The bounds of a finding's rule that are drawn. A bound of 0 means any value and is not
    drawn."""
    return [
        Bound(bound.threshold, bound.severity.word)
        for bound in rule_of(finding).bounds
        if bound.threshold and bound.severity > Severity.OK
    ]


def _same_quantity(item: Evidence, diagnosis: Verdict) -> bool:
    """Whether the value of the evidence is the value of its signal. Some evidence is about a share
    or the growth of the signal; the threshold for that must not be drawn in the signal's chart."""
    value = diagnosis.values.get(item.signal)
    return value is not None and item.value is not None and isclose(value, item.value, rel_tol=SAME)
