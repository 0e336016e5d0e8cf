"""An engine in full on the triage page: evidence, findings and recommended changes. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from math import isclose
from typing import Any

from msgspec import Struct

from kneewatch.diagnose.change import Interval
from kneewatch.diagnose.engine.wording import spoken
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.verdict import Cause, Evidence, Verdict
from kneewatch.diagnose.verdict_json import changes_words
from kneewatch.reports.advice_text import restart_words
from kneewatch.reports.diagnosis_text import (
    GAUGES,
    advice_words,
    clearing_words,
    fallen,
    notable,
    quiet_notes,
)
from kneewatch.reports.triage.charts import Axis, Bound, Chart, chart
from kneewatch.reports.triage.timeline import Lanes, lanes
from kneewatch.reports.triage.view_model import CASCADE_SIGNALS, EngineView, Standing
from kneewatch.rules.formatting import quantity, span
from kneewatch.rules.library import rule_of
from kneewatch.rules.rule import Finding, Severity


def title(recommendation: Advice) -> str:
    """All changes in one line. Without changes: the advice."""
    return changes_words(recommendation).replace(" -> ", " → ") or recommendation.summary


def cost(recommendation: Advice) -> str:
    """The extra cost of a change, and whether it needs a restart."""
    usd_per_hour = recommendation.cost_usd_per_hour
    if usd_per_hour is None:
        price = "price unknown"
    else:
        price = f"{usd_per_hour:+,.2f} USD/h" if usd_per_hour else "no change in price"
    return "; ".join(filter(None, (price, restart_words(recommendation))))


# --- An engine in full: evidence, vital signs and findings, each with its chart -------------------


SAME = 1e-4
NOT_PLAIN = re.compile(r"[^A-Za-z0-9_-]")
LABELS = dict(
    zip(
        CASCADE_SIGNALS,
        ("KV cache used", "running", "waiting", "preempted every second", "TTFT P99", "ITL P99"),
        strict=True,
    )
)


class EnginePart(Struct, frozen=True):
    """An engine that is shown in full."""

    number: int
    standing: Standing
    engine: EngineView
    axis: Axis
    moment_s: float

    @property
    def diagnosis(self) -> Verdict:
        return self.engine.diagnosis

    @property
    def title(self) -> str:
        """The name of the engine, which distinguishes it from other engines of its target."""
        return self.standing.who or "unknown engine"

    @property
    def seen(self) -> bool:
        """Whether at least one vital sign has a value or a chart."""
        return bool(self.diagnosis.values) or any(drawn for *_, drawn in self.vitals())

    @property
    def has_cache(self) -> bool:
        """Whether it may have a KV cache: a router has none."""
        return not self.diagnosis.values or CASCADE_SIGNALS[0] in self.diagnosis.values

    def lanes(self) -> Lanes:
        return lanes(self.standing.intervals, self.axis, self.moment_s)

    def log(self) -> list[Interval]:
        """The intervals, newest first."""
        return sorted(self.standing.intervals, key=lambda part: (-part.start_s, part.kind))

    def vitals(self) -> list[tuple[str, str, str, str, Chart | None]]:
        """Each of CASCADE_SIGNALS: label, value, whether the value is from one scrape or from the
        window, the chart, and before it a note: the window's mean if the newest value is far below
        it, or the reason if its rule is ok although the value is out of bounds."""
        window = f"last {span(self.diagnosis.window_s)}"
        means = {key: f"{words}, {window}" for key, words in fallen(self.diagnosis).items()}
        notes = means | quiet_notes(self.diagnosis)
        return [
            (
                spoken(self.diagnosis, LABELS[key]),
                quantity(key, self.diagnosis.values.get(key)).removesuffix("/s"),
                "last scrape" if key in GAUGES else window,
                notes.get(key, ""),
                self._chart(key, self._rule_bounds(key)),
            )
            for key in CASCADE_SIGNALS
            if self.has_cache or self.diagnosis.values.get(key) is not None
        ]

    def findings(self, *states: str) -> list[tuple[Finding, str, str, str, Chart | None]]:
        """The findings whose state is one of `states` and that no cause covers: what is, or was,
        out of bounds, the value, what to do about what still is, and the chart."""
        return [
            (
                finding,
                clearing_words(finding, self.diagnosis)
                or spoken(self.diagnosis, rule_of(finding).summary),
                "" if finding.clearing_since_s else quantity(finding.signal, finding.value),
                "" if finding.clearing_since_s else advice_words(finding, self.diagnosis),
                self._chart(
                    finding.signal,
                    _bounds(finding),
                    since_s=finding.since_s,
                    until_s=finding.clearing_since_s,
                ),
            )
            for finding in notable(self.diagnosis, *states)
        ]

    def fine(self) -> list[tuple[str, str]]:
        """What was checked and is fine: the words of each rule that no cause covers and whose
        value is inside its bounds, and the value."""
        return [
            (spoken(self.diagnosis, rule.fine), quantity(finding.signal, finding.value))
            for finding in notable(self.diagnosis, "ok")
            if (rule := rule_of(finding)).fine
            if finding.value is not None and rule.level(finding.value) is Severity.OK
        ]

    def evidence(self, cause: Cause) -> list[tuple[bool, Evidence, str, Chart | None]]:
        """A cause's evidence: whether it is for the cause, the evidence, the value, and the chart.

        Where the text is about another moment, a share or the growth of the signal, the value is
        what the signal is now.
        """
        rows: list[tuple[bool, Evidence, str, Chart | None]] = []
        for supports, items in ((True, cause.evidence), (False, cause.against)):
            for item in items:
                if item.signal not in self.engine.series and item.text in cause.summary:
                    continue
                same = _same_quantity(item, self.diagnosis)
                bounds = [(item.threshold, "bound")] if same and item.threshold is not None else []
                is_fleet = bool(self.standing.target.replicas)
                value = value_words(item, self.diagnosis, same=same, is_fleet=is_fleet)
                drawn = self._chart(item.signal, bounds, since_s=cause.since_s)
                rows.append((supports, item, value, drawn))
        return rows

    def _chart(
        self,
        key: str,
        bounds: Sequence[Bound],
        *,
        since_s: float | None = None,
        until_s: float | None = None,
    ) -> Chart | None:
        times, values = _with_newest(self.engine, key)
        return chart(
            key,
            times,
            values,
            self.axis,
            bounds=bounds,
            held=None if since_s is None else (since_s, until_s or self.moment_s),
            moment_s=self.moment_s,
        )

    def _rule_bounds(self, key: str) -> list[Bound]:
        findings = [finding for finding in self.diagnosis.findings if finding.signal == key]
        return [bound for finding in findings for bound in _bounds(finding)]


def _with_newest(engine: EngineView, key: str) -> tuple[Sequence[float], Sequence[float]]:
    """A signal's stored series with the diagnosis's value, which the page shows beside the chart.
    The store gets it later, and once downsampled has a minute's mean instead."""
    times, values = engine.times, engine.series.get(key, ())
    t_s, value = engine.diagnosis.t_s, engine.diagnosis.values.get(key)
    place = bisect_left(times, t_s)
    if value is None or not values or (place < len(times) and times[place] == t_s):
        return times, values
    return [*times[:place], t_s, *times[place:]], [*values[:place], value, *values[place:]]


def keyed(items: Sequence[Any]) -> list[tuple[str, Any]]:
    """Things that have an id, each with an HTML element id."""
    return list(zip(unique([item.id for item in items]), items, strict=True))


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
        (bound.threshold, bound.severity.word)
        for bound in rule_of(finding).bounds
        if bound.threshold and bound.severity > Severity.OK
    ]


PROCESS_START = "process_start"
"""Evidence about a moment, which has no value of its own."""


def value_words(item: Evidence, diagnosis: Verdict, *, same: bool, is_fleet: bool) -> str:
    """The value of an evidence's signal. Empty for a signal that is a point in time, for words
    without a value, and for a signal that a fleet has no value of: its text compares engines."""
    if item.signal in diagnosis.values and not same:
        now = diagnosis.values[item.signal]
        return "now unknown" if now is None else f"now {quantity(item.signal, now)}"
    if is_fleet or item.signal == PROCESS_START or item.value is None:
        return ""
    return quantity(item.signal, item.value)


def _same_quantity(item: Evidence, diagnosis: Verdict) -> bool:
    """Whether the value of the evidence is the value of its signal. Some evidence is about a share
    or the growth of the signal; the threshold for that must not be drawn in the signal's chart."""
    value = diagnosis.values.get(item.signal)
    return value is not None and item.value is not None and isclose(value, item.value, rel_tol=SAME)
