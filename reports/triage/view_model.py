"""What the triage page shows, gathered by whoever has the board and the store at hand. Pure.

The page's own links and form are relative and lead to the page itself, with these parameters:
`target` (a target's name; none: all of them), `at` (a moment in UTC, 2026-11-21T03:07, with or
without seconds and a Z; none or empty: now) and `since` (how much of the past the timeline shows:
one of SINCE). Its files are `triage/triage.css` and `triage/triage.js`, relative to the page too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.reports.diagnosis_text import notable

SINCE: Mapping[str, float] = {
    "15m": 900.0,
    "1h": 3600.0,
    "3h": 3 * 3600.0,
    "12h": 12 * 3600.0,
    "24h": 24 * 3600.0,
    "7d": 7 * 24 * 3600.0,
}
"""How much of the past may be asked for, in seconds."""

SINCE_DEFAULT = "3h"


@dataclass(frozen=True, slots=True)
class IntervalView:
    """A stretch of time in which something held; `end_s` is None while it goes on.

    `kind` is stage, cause or health; `id` the stage's number, the cause's id or the health word;
    `severity` the worst there was, as a word.
    """

    kind: str
    id: str
    severity: str
    start_s: float
    end_s: float | None


@dataclass(frozen=True, slots=True)
class SeriesView:
    """A signal over the timeline, oldest first; NaN where it is unknown.

    Shapes: `times` and `values` (scrapes,).
    """

    times: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class SourceView:
    """How a source (the page, GPUs) did at its last run, and how its GPUs were joined."""

    name: str
    t_s: float
    success: bool
    error: str = ""
    joined: str = ""


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine: what is said of it at the moment shown, and how it came to that.

    `series` holds the signals that its causes and findings cite, as far as the store has them
    (`cited` says which); what is missing is shown without a chart.
    """

    diagnosis: Diagnosis
    intervals: Sequence[IntervalView] = ()
    series: Mapping[str, SeriesView] = field(default_factory=dict[str, SeriesView])


@dataclass(frozen=True, slots=True)
class TargetView:
    """One target. `last_s` is the newest scrape at the moment shown, None where there is none.

    `error` is what keeps the target from being shown (never scraped, not watched at that moment,
    the store could not be read), in words; a failed scrape is told by the engines' diagnoses.
    """

    name: str
    url: str
    labels: Mapping[str, str]
    engines: Sequence[EngineView]
    interval_s: float
    last_s: float | None
    error: str = ""
    sources: Sequence[SourceView] = ()


@dataclass(frozen=True, slots=True)
class TriageView:
    """A page of all targets, or with `one` of a single one; `others` says whether there are more.

    `at_s` is the past moment shown, None for now. The timeline runs from `since_s` to `until_s`;
    `since` is the word of SINCE that was asked for. `notices` say what is wrong with kneewatch
    itself, such as a store that cannot be written.
    """

    now_s: float
    at_s: float | None
    since_s: float
    until_s: float
    refresh_s: float
    version: str
    targets: Sequence[TargetView]
    one: bool
    since: str = SINCE_DEFAULT
    notices: Sequence[str] = ()
    others: bool = True

    @property
    def moment_s(self) -> float:
        """The moment that is shown."""
        return self.now_s if self.at_s is None else self.at_s


CASCADE_SIGNALS = (
    "kv_usage_ratio",
    "running",
    "waiting",
    "preemption_ratio_per_s",
    "ttft_p99_s",
    "itl_p99_s",
)
"""The few that tell a cascade: drawn of every engine, also of one with nothing wrong."""


def cited(diagnosis: Diagnosis) -> list[str]:
    """Signals that the page draws for a diagnosis: those that its causes cite, those that are out
    of bounds, and the few that tell a cascade."""
    causes = [item.signal for c in diagnosis.causes for item in (*c.evidence, *c.against)]
    bad = [found.rule.signal for found in notable(diagnosis, "info", "warning", "critical")]
    return list(dict.fromkeys((*causes, *bad, *CASCADE_SIGNALS)))
