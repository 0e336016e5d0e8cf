"""The values that the triage page shows; the agent fills them from its board and store. Pure.

The page's links and its form are relative and lead to the page itself, with these parameters:
`target` (a target's name; all targets without it), `at` (a time in UTC, 2026-11-21T03:07, with or
without seconds and a Z; now without it) and `since` (how much of the past the timeline shows: a
key of SINCE). Its files are `triage/triage.css` and `triage/triage.js`, relative to the page too.
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
"""How much of the past the timeline can show, in seconds."""

SINCE_DEFAULT = "3h"


@dataclass(frozen=True, slots=True)
class IntervalView:
    """The interval of a stage, cause or health state; `end_s` is None while it is ongoing.

    `kind` is stage, cause or health; `id` the stage's number, the cause's id or the health state;
    `severity` the worst severity in it, as a word.
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
    """The last run of a source (vLLM page, GPUs), and how its GPUs were matched to engines."""

    name: str
    t_s: float
    success: bool
    error: str = ""
    joined: str = ""


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine: its diagnosis at the moment shown, and its history.

    `series` holds the signals in `cited` that the store has; others are shown without a chart.
    """

    diagnosis: Diagnosis
    intervals: Sequence[IntervalView] = ()
    series: Mapping[str, SeriesView] = field(default_factory=dict[str, SeriesView])


@dataclass(frozen=True, slots=True)
class TargetView:
    """One target. `last_s` is the time of its newest scrape, None without any.

    `error` says why the target cannot be shown (never scraped, not watched at that moment, store
    not readable); failed scrapes appear in the engines' diagnoses instead.
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
    """A page of all targets, or with `single` of one target; `others`: there are more targets.

    `at_s` is the past moment shown, None for now. The timeline runs from `since_s` to `until_s`;
    `since` is the requested key of SINCE. `notices` report problems of kneewatch itself, such as
    a store that cannot be written.
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
    """Where the pages about causes and rules are: relative to the page, or a URL."""

    @property
    def moment_s(self) -> float:
        """The moment shown, in unix seconds."""
        return self.now_s if self.at_s is None else self.at_s


CASCADE_SIGNALS = (
    "kv_usage_ratio",
    "running",
    "waiting",
    "preemption_ratio_per_s",
    "ttft_p99_s",
    "itl_p99_s",
)
"""The vital signs: drawn for every engine, also for one without a problem."""


def cited(diagnosis: Diagnosis) -> list[str]:
    """The signals that the page draws for a diagnosis: those cited by its causes, those out of
    bounds, and CASCADE_SIGNALS."""
    causes = [item.signal for c in diagnosis.causes for item in (*c.evidence, *c.against)]
    bad = [finding.rule.signal for finding in notable(diagnosis, "info", "warning", "critical")]
    return list(dict.fromkeys((*causes, *bad, *CASCADE_SIGNALS)))
