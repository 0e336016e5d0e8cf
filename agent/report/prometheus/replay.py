"""Replays samples of one engine, scrape by scrape, through the sidecar's monitor. Pure.

A metrics system keeps every sample. The scraped pages are rebuilt from the samples, so stages,
causes and recommendations are the same that a sidecar would have reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kneewatch.agent.report.series import METRICS, Counted, Floats, Increases, Signals
from kneewatch.collector.errors import CollectError
from kneewatch.collector.prometheus.responses import Track
from kneewatch.collector.samples import Layout, Page, Series
from kneewatch.collector.scrape_history import Column
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.engine.engine_monitor import Catalogue
from kneewatch.diagnose.engine.target_monitor import TargetMonitor
from kneewatch.diagnose.fleet.inventory import Member
from kneewatch.diagnose.intervals import UNWATCHED, IntervalBook, Open, Verdict, verdict_of
from kneewatch.reports.diagnosis_json import document
from kneewatch.reports.weekly.measures import LEVELS
from kneewatch.reports.weekly.observed import Held

OWN = frozenset({"model_name", "engine"})
"""Labels from the page itself, not from the scrape target."""

SHOWN = ("ttft_p99_s", "kv_usage_ratio", "waiting", "running", "itl_p99_s", "preemption_per_s")
KEPT = tuple(dict.fromkeys((*LEVELS, *SHOWN, "running_avg")))


@dataclass(slots=True)
class Replay:
    """The result of a replay: intervals, the worst diagnosis of each cause, recommendations with
    the first and last time they were made, signals and counters."""

    held: list[Held] = field(default_factory=list[Held])
    documents: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    recommended: dict[str, tuple[Mapping[str, Any], float, float]] = field(
        default_factory=dict[str, tuple[Mapping[str, Any], float, float]]
    )
    signals: Signals = field(default_factory=lambda: Signals(np.empty(0), {}))
    increases: Increases | None = None
    scrapes: int = 0


def replay_samples(
    tracks: Sequence[Track],
    member: Member,
    profile: Profile,
    catalogue: Catalogue,
    name: str,
    lived_s: tuple[float, float],
) -> Replay:
    """The diagnoses of a target's scrapes in order; `catalogue` belongs to the profile. Failed
    scrapes outside `lived_s` are left out: the pod was loading or terminating."""
    monitor = TargetMonitor(name, profile, catalogue)
    recorder = _Recorder()
    for t_s, page in _pages(tracks, member):
        if page is None and not lived_s[0] <= t_s <= lived_s[1]:
            continue
        diagnoses = (
            monitor.page(t_s, page)
            if page is not None
            else monitor.failed(t_s, CollectError("the scrape failed (up is 0)", kind="refused"))
        )
        diagnosis = next((diagnosis for diagnosis in diagnoses if _is(diagnosis, member)), None)
        if diagnosis is None:
            continue
        engine = next(
            (
                candidate
                for candidate in monitor.engines
                if candidate.key.engine == diagnosis.engine
            ),
            None,
        )
        read = engine if page is not None else None
        recorder.take(
            verdict_of(diagnosis, restarted=read is not None and read.restart is not None),
            diagnosis,
            read.counters() if read is not None else None,
        )
    return recorder.finish()


class _Recorder:
    """Collects diagnoses, in order, into a Replay."""

    def __init__(self) -> None:
        self._book = IntervalBook()
        self._ranks: dict[str, tuple[int, float]] = {}
        self._times: list[float] = []
        self._values: dict[str, list[float]] = {key: [] for key in KEPT}
        self._counted: list[tuple[tuple[Column, ...], list[float], list[tuple[float, ...]]]] = []
        self._replay = Replay()

    def take(
        self,
        seen: Verdict,
        diagnosis: Diagnosis,
        counters: tuple[tuple[Column, ...], tuple[float, ...]] | None,
    ) -> None:
        for change in self._book.take(seen):
            if change.ended:
                self._hold(change.interval, change.end_s, change.ended)
        self._keep(diagnosis)
        self._replay.scrapes += 1
        self._times.append(diagnosis.t_s)
        for signal, column in self._values.items():
            value = diagnosis.values.get(signal)
            column.append(math.nan if value is None else value)
        if counters is not None:
            self._count(diagnosis.t_s, *counters)

    def _keep(self, diagnosis: Diagnosis) -> None:
        stored: dict[str, Any] | None = None
        for cause in diagnosis.causes:
            rank = int(cause.severity), cause.confidence
            if rank > self._ranks.get(cause.id, (-1, 0.0)):
                stored = stored or document(diagnosis)
                self._ranks[cause.id], self._replay.documents[cause.id] = rank, stored
        for recommendation in diagnosis.recommendations:
            before = self._replay.recommended.get(recommendation.id)
            if before is None:
                stored = stored or document(diagnosis)
                (row_found,) = [
                    row for row in stored["recommendations"] if row["id"] == recommendation.id
                ]
                self._replay.recommended[recommendation.id] = (
                    row_found,
                    diagnosis.t_s,
                    diagnosis.t_s,
                )
            else:
                self._replay.recommended[recommendation.id] = before[0], before[1], diagnosis.t_s

    def _count(self, t_s: float, columns: tuple[Column, ...], values: tuple[float, ...]) -> None:
        if not self._counted or self._counted[-1][0] is not columns:
            self._counted.append((columns, [], []))
        self._counted[-1][1].append(t_s)
        self._counted[-1][2].append(values)

    def _hold(self, interval: Open, end_s: float | None, ended: str) -> None:
        if interval.kind != "health":
            self._replay.held.append(
                Held(
                    interval.kind,
                    interval.id,
                    interval.severity,
                    interval.start_s,
                    end_s,
                    interval.last_s,
                    ended,
                )
            )

    def finish(self) -> Replay:
        for interval in self._book.opened:
            if interval.paused:
                self._hold(interval, interval.last_s, UNWATCHED)
            else:
                self._hold(interval, None, "")
        result = self._replay
        result.signals = Signals(
            np.array(self._times), {key: np.array(row) for key, row in self._values.items()}
        )
        metrics = frozenset(METRICS)
        parts: list[Counted] = []
        for columns, times, rows in self._counted:
            places = [at for at, column in enumerate(columns) if column.metric in metrics]
            whole: Floats = np.array(rows, dtype=np.float64)[:, places].T
            parts.append(Counted(np.array(times), tuple(columns[at] for at in places), whole))
        result.increases = Increases(parts, restarts_s=()) if parts else None
        return result


def _is(diagnosis: Diagnosis, member: Member) -> bool:
    engine, model = member.labels.get("engine"), member.labels.get("model_name")
    return diagnosis.engine in (engine or diagnosis.engine, "") and diagnosis.model in (
        model or diagnosis.model,
        "",
    )


def _pages(tracks: Sequence[Track], member: Member) -> list[tuple[float, Page | None]]:
    """Pages in order of time; None for a failed scrape. Includes series of other engines."""
    target = {name for name in member.labels if name not in OWN and name != "__name__"}
    series: list[Series] = []
    scraped: dict[float, dict[int, float]] = {}
    works: dict[float, float] = {}
    for track in tracks:
        name = track.labels.get("__name__", "")
        if name == "up":
            works.update(track.points)
            continue
        labels = sorted(
            (key, value)
            for key, value in track.labels.items()
            if key != "__name__" and (key not in target or key == "le")
        )
        place = len(series)
        series.append(Series(name, tuple(labels)))
        for t_s, value in track.points:
            scraped.setdefault(t_s, {})[place] = value
    layouts: dict[frozenset[int], tuple[list[int], Layout]] = {}
    pages: list[tuple[float, Page | None]] = []
    for t_s, row in scraped.items():
        key = frozenset(row)
        if key not in layouts:
            places = sorted(key)
            layouts[key] = places, Layout(tuple(series[place] for place in places), {})
        places, layout = layouts[key]
        pages.append((t_s, Page(layout, [row[place] for place in places])))
    pages += [(t_s, None) for t_s, worked in works.items() if worked == 0 and t_s not in scraped]
    return sorted(pages, key=lambda pair: pair[0])
