"""The values that the triage page shows. The agent fills them from its board and store. Pure.

All links and the form of the page lead to the page itself, with these query parameters:

- `target`: the name of a target; without it the page shows all targets.
- `at`: a time in UTC, such as 2026-11-21T03:07, with or without seconds and a Z; without it, now.
- `since`: the length of the timeline, a key of SINCE.

Links are relative. So are the page's files `triage/triage.css` and `triage/triage.js`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.diagnose.change import Interval
from kneewatch.diagnose.engine.wording import spoken
from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.coverage import gaps
from kneewatch.reports.diagnosis_text import NUMBERS, clearing_words, notable, summary_words
from kneewatch.reports.health import RANKS, SourceState, is_late, shown_health, stage_unknown
from kneewatch.rules.formatting import as_sentence, span
from kneewatch.rules.library import rule_of
from kneewatch.rules.rule import Finding

SINCE: Mapping[str, float] = {
    "15m": 900.0,
    "1h": 3600.0,
    "3h": 3 * 3600.0,
    "12h": 12 * 3600.0,
    "24h": 24 * 3600.0,
    "7d": 7 * 24 * 3600.0,
}
"""Possible lengths of the timeline, in seconds."""

SINCE_DEFAULT = "3h"


class EngineView(Struct, frozen=True):
    """One engine: its diagnosis at the moment shown, and its history.

    `series` contains those signals of `cited` that are stored, at `times`, oldest first; NaN where
    unknown. The others are shown without a chart. Shapes: `times` and each of `series` (scrapes,).
    """

    diagnosis: Verdict
    intervals: Sequence[Interval] = ()
    times: Sequence[float] = ()
    series: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])


class ReplicaRow(Struct, frozen=True):
    """A replica of a pool. `target` is its name as a target of the page; empty if it has no page,
    because it does not serve."""

    name: str
    target: str
    health: str
    words: str


class TargetView(Struct, frozen=True):
    """One target. `last_s` is the time of its newest scrape; None if it was never scraped.

    `error` is the reason why the target cannot be shown: it was never scraped, it was not watched
    at that moment, or the store cannot be read. Failed scrapes are not included, because the
    engines' diagnoses report them. `replicas` and `facts` describe a pool of a
    fleet; `pool` is the target of a replica's pool.
    """

    name: str
    url: str
    labels: Mapping[str, str]
    engines: Sequence[EngineView]
    interval_s: float
    last_s: float | None
    error: str = ""
    sources: Sequence[SourceState] = ()
    replicas: Sequence[ReplicaRow] = ()
    facts: Sequence[str] = ()
    pool: str = ""


class TriageView(Struct, frozen=True):
    """A page about all targets, or about one target if `single` is true. `others`: there are more
    targets.

    `at_s` is the past moment shown, None for now. The timeline covers the time from `since_s` to
    `until_s`; `since` is the requested key of SINCE. `notices` report problems of kneewatch itself,
    such as a store that cannot be written.
    """

    now_s: float
    at_s: float | None
    since_s: float
    until_s: float
    refresh_s: float
    version: str
    targets: Sequence[TargetView]
    single: bool
    since: str = SINCE_DEFAULT
    notices: Sequence[str] = ()
    others: bool = True
    docs_url: str = "docs"
    """The address of the pages about causes and rules: a path relative to the page, or a URL."""

    @property
    def moment_s(self) -> float:
        """The moment shown, in Unix seconds."""
        return self.now_s if self.at_s is None else self.at_s


CASCADE_SIGNALS = tuple(key for key, *_ in NUMBERS)
"""The vital signs. They are drawn for every engine, even for one without a problem."""


def cited(diagnosis: Verdict) -> list[str]:
    """The signals that the page draws for a diagnosis: those that its causes cite, those that are
    out of bounds, and CASCADE_SIGNALS."""
    causes = [item.signal for c in diagnosis.causes for item in (*c.evidence, *c.against)]
    bad = [finding.signal for finding in notable(diagnosis, "info", "warning", "critical")]
    return list(dict.fromkeys((*causes, *bad, *CASCADE_SIGNALS)))


# --- Each engine's state on the page: its verdict, or unknown when its data is too old ------------


class Standing(Struct, frozen=True):
    """The state of one engine. If `engine` is None: the state of a target without engines.

    `late`: the newest data is too old for the state to be called ok.
    """

    target: TargetView
    engine: EngineView | None
    health: str
    late: bool
    age_s: float | None

    @property
    def rank(self) -> int:
        """The rank of the health state. The worst state has the highest rank."""
        return RANKS[self.health]

    @property
    def verdict(self) -> str:
        """The health state in capitals."""
        return self.health.upper()

    @property
    def diagnosis(self) -> Verdict | None:
        return None if self.engine is None else self.engine.diagnosis

    @property
    def intervals(self) -> Sequence[Interval]:
        """The intervals of the engine. If the data is late, none of them is ongoing, because the
        present state is unknown."""
        if self.engine is None:
            return ()
        if not self.late:
            return self.engine.intervals
        last_s = self.target.last_s
        return [
            replace(interval, end_s=last_s) if interval.end_s is None else interval
            for interval in self.engine.intervals
            if interval.start_s <= (last_s or 0.0)
        ]

    @property
    def as_of_s(self) -> float:
        """Unix time at which durations end. It is the time of the page; for late data, the time of
        the newest scrape.

        For a target that fails it is the time of the page too, because such a target is scraped
        less and less often.
        """
        if self.late or self.age_s is None or self.target.last_s is None:
            return 0.0 if self.engine is None else self.engine.diagnosis.t_s
        return self.target.last_s + self.age_s

    @property
    def who(self) -> str:
        """The program that is not vLLM, the model and the engine. Empty if all are unknown."""
        diagnosis = self.diagnosis
        if diagnosis is None:
            return ""
        labels = {"model": diagnosis.model, "engine": diagnosis.engine}
        named = [f"{name} {value}" for name, value in labels.items() if value]
        return ", ".join([diagnosis.program, *named] if diagnosis.program else named)

    @property
    def headline(self) -> str:
        """The main problem in a sentence."""
        diagnosis = self.diagnosis
        if diagnosis is None:
            return as_sentence(self.target.error) or "This target has not been scraped yet."
        if self.late and self.health == "unknown":
            return f"No data for {span(self.age_s or 0.0)}; it was {diagnosis.health} then."
        if diagnosis.causes:
            return summary_words(diagnosis.causes[0], diagnosis.t_s)
        return _without_cause(diagnosis)


def _without_cause(diagnosis: Verdict) -> str:
    """The headline for a diagnosis that has no cause."""
    if not diagnosis.was_read:
        return as_sentence(stage_unknown(diagnosis))
    if diagnosis.health == "unknown":
        reason = (gaps(diagnosis) or ["wait for the next scrapes"])[0]
        return f"Not enough data to judge. {as_sentence(reason)}"
    clearing = list[Finding]()
    for state in ("critical", "warning", "info"):
        for finding in notable(diagnosis, state):
            if finding.clearing_since_s is None:
                return f"{spoken(diagnosis, rule_of(finding).summary)}."
            clearing.append(finding)
    if diagnosis.stage.number is None and CASCADE_SIGNALS[0] in diagnosis.values:
        return "No problem found, but the KV cache could not be judged."
    if diagnosis.stage.severity:
        return f"The KV cache is at stage {diagnosis.stage.number} of 4 ({diagnosis.stage.name})."
    if clearing:
        worst = max(clearing, key=lambda finding: finding.held)
        return f"No problem now: {clearing_words(worst, diagnosis)}."
    return "No problem found."


def standings(target: TargetView, view: TriageView) -> list[Standing]:
    """The states of the engines of a target, worst first. A target without engines has one
    entry."""
    age_s = None if target.last_s is None else max(0.0, view.moment_s - target.last_s)
    late = age_s is not None and is_late(age_s, target.interval_s)
    if not target.engines:
        return [Standing(target, None, "unknown", late, age_s)]
    engines = [
        Standing(target, engine, shown_health(engine.diagnosis.health, late=late), late, age_s)
        for engine in target.engines
    ]
    return sorted(engines, key=lambda standing: -standing.rank)
