"""The range queries of a report: their PromQL, their resolution, and reading their answers as
arrays. I/O edge."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.fleet.queries import DELETED, GPU_LABELS, PRESENCE, AnswerLog, QueryScope
from kneewatch.agent.report.history import ReportProgress
from kneewatch.agent.report.series import Floats
from kneewatch.collector.errors import CollectError
from kneewatch.collector.names.vllm_metrics import OF_THE_PAGE
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.collector.prometheus.responses import SAMPLES_MOST, Piece
from kneewatch.collector.signals.expr import OverTime
from kneewatch.collector.signals.promql import Dialect, any_of, bound_matcher, duration, quoted
from kneewatch.collector.signals.table import DEV, PROF, SIGNAL_BY_KEY, TTFT
from kneewatch.dashboards.prometheus import rule_group
from kneewatch.diagnose.fleet.inventory import Labels, of_process
from kneewatch.reports.weekly.measures import (
    DEFERRED,
    GENERATED,
    GPU_BUSY,
    GPU_MEMORY,
    KV_USAGE,
    PREEMPTIONS,
    RUNNING,
    WAITING,
)
from kneewatch.reports.weekly.observed import Grid, Slot
from kneewatch.rules.rule import HOUR_S, MINUTE_S

RowKey = tuple[Any, ...]
"""The key of a row of an answer: the values of labels."""

Rows = dict[RowKey, Floats]

STEPS_S = (60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, HOUR_S)
VALUES_MOST = 400_000
"""Maximum number of values that are read for one signal, over all engines. More would take
minutes."""

CURVE_STEPS_MOST = 700
"""Maximum number of windows of one engine that are read for the latency curve. Their P99 are
computed from many buckets, which takes the server long."""

SCRAPES_A_STEP = 2.0
"""Minimum number of scrapes per step. The increase of a counter needs two."""

WINDOW_SCRAPES = 4.0
SHORT_S = 6 * HOUR_S
"""Periods of at least this length in seconds begin and end on a full hour, shorter ones on a full
minute."""


class Steps(Struct, frozen=True):
    """Equally spaced times. Each value covers the `step_s` seconds before its time. `first_s` is in
    Unix seconds."""

    first_s: float
    step_s: float
    count: int

    @property
    def last_s(self) -> float:
        """Time of the last step, in Unix seconds."""
        return self.first_s + (self.count - 1) * self.step_s

    @property
    def begins_s(self) -> Floats:
        """Start time of each step. Shape: (count,)."""
        return self.first_s + self.step_s * np.arange(-1.0, self.count - 1)


class Resolution(Struct, frozen=True):
    """Seconds between scrapes (`scrape_s`), between values of gauges (`step_s`), between windows of
    the latency curve (`curve_s`), between values of arrivals (`begun_s`), and the window of rates
    (`window_s`)."""

    scrape_s: float
    step_s: float
    curve_s: float
    begun_s: float
    window_s: float


def unit_s(span_s: float) -> float:
    """The bounds of a period of length `span_s` must be multiples of this number of seconds: an
    hour for long periods, a minute for short ones."""
    return HOUR_S if span_s >= SHORT_S else MINUTE_S


def resolution(grid: Grid, *, engines: int, scrape_s: float, window_s: float) -> Resolution:
    """The resolution at which a period should be read."""
    least_s = SCRAPES_A_STEP * scrape_s
    wanted_s = max(least_s, (grid.to_s - grid.from_s) * engines / VALUES_MOST)
    return Resolution(
        scrape_s=scrape_s,
        step_s=_fitting(grid, wanted_s),
        curve_s=_fitting(grid, max(wanted_s, (grid.to_s - grid.from_s) / CURVE_STEPS_MOST)),
        begun_s=_fitting(grid, least_s),
        window_s=max(window_s, WINDOW_SCRAPES * scrape_s),
    )


def _fitting(grid: Grid, wanted_s: float) -> float:
    """The shortest of STEPS_S that is at least `wanted_s` and divides every hour of the grid. If
    there is none, the longest one that divides the hours."""
    fits = [
        step_s for step_s in STEPS_S if all(edge_s % step_s == 0 for edge_s in grid.edges_s)
    ] or [STEPS_S[0]]  # fmt: skip
    return next((step_s for step_s in fits if step_s >= wanted_s), fits[-1])


def steps(grid: Grid, step_s: float) -> Steps:
    return Steps(grid.from_s + step_s, step_s, max(1, int((grid.to_s - grid.from_s) // step_s)))


def hour_runs(slots: Sequence[Slot]) -> list[Steps]:
    """Hours as steps: one `Steps` per run of consecutive hours of equal length. The first and last
    hour of a period may be shorter, and hours may be missing."""
    runs: list[Steps] = []
    for slot in slots:
        length_s = slot.end_s - slot.start_s
        last = runs[-1] if runs else None
        if last and (last.step_s, last.last_s) == (length_s, slot.start_s):
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(Steps(slot.end_s, length_s, 1))
    return runs


PREEMPTED, GENERATED_TOKENS, LATE, BEGUN = "preempted", "made", "late", "begun"
ITL_MEAN, ERRORS, OPEN = "itl_mean_s", "finished_error_per_s", "open_files"
GAUGES: Mapping[str, OverTime] = {
    RUNNING: OverTime("num_requests_running", "avg"),
    WAITING: OverTime("num_requests_waiting", "avg"),
    KV_USAGE: OverTime("kv_cache_usage_perc", "avg"),
    DEFERRED: OverTime("num_requests_waiting_by_reason", "avg", (("reason", "deferred"),)),
}
GPUS = (GPU_BUSY, GPU_MEMORY)


def presence(asking: QueryScope, range_s: float) -> str:
    """A query for the series of running requests that existed within `range_s` seconds."""
    over = f"[{duration(range_s)}]"
    return asking.either(
        lambda dialect: f"last_over_time({dialect.series(PRESENCE)}{over})",
        f"last_over_time({asking.of_vllm(PRESENCE)}{over})",
    )


def scrapes(asking: QueryScope, range_s: float) -> str:
    """A query for the number of scrapes of each engine."""
    return _either(
        asking,
        range_s,
        lambda dialect: dialect.folded(f"count_over_time({{}}[{dialect.range}])", PRESENCE),
    )


def gauges(asking: QueryScope, key: str, range_s: float) -> str:
    """A query for the mean of a gauge, per engine."""
    return replace(asking, window_s=range_s).query(GAUGES[key])


def gained(key: str, part: str, asking: QueryScope, by: Sequence[str], range_s: float) -> str:
    """A query for the increase of a counter (`part` is empty) or of a part of a histogram
    (`bucket`, `sum` or `count`), summed by the labels `by`."""
    whole = _with_bounds(part, by)
    return _either(asking, range_s, lambda dialect: rule_group.increase(dialect, key, part, whole))


def queued(asking: QueryScope, by: Sequence[str], range_s: float) -> str:
    """A query for the newest number of queued requests, summed by the labels `by`."""
    scope = replace(asking, by=tuple(by))
    return _either(
        scope,
        range_s,
        lambda dialect: dialect.folded(
            f"last_over_time({{}}[{dialect.range}])", "num_requests_waiting"
        ),
    )


def gained_kept(key: str, part: str, asking: QueryScope, by: Sequence[str], range_s: float) -> str:
    """The same query as `gained`, on the sums that recording rules store."""
    return _kept(asking, rule_group.summed_series(key, part), _with_bounds(part, by), range_s)


def engines_kept(asking: QueryScope, by: Sequence[str], range_s: float) -> str:
    """A query for the number of engines in the recorded sums. The numbers of all evaluations are
    added up."""
    return _kept(asking, rule_group.SUMMED_ENGINES, by, range_s)


def _kept(asking: QueryScope, name: str, by: Sequence[str], range_s: float) -> str:
    series = asking.series(name)
    return f"sum by ({', '.join(by)}) (sum_over_time({series}[{duration(range_s)}]))"


def _with_bounds(part: str, by: Sequence[str]) -> tuple[str, ...]:
    return (*by, "le") if part == "bucket" else tuple(by)


def watched(asking: QueryScope, key: str, late_s: float | None, range_s: float) -> str:
    """A query for a sign of trouble, per engine: a counter, the mean ITL or failed requests/s.
    `late_s` is the TTFT target in seconds."""
    if key in (ITL_MEAN, ERRORS):
        return replace(asking, window_s=range_s).query(SIGNAL_BY_KEY[key].expr)
    if key == PREEMPTED:
        return gained(PREEMPTIONS, "", asking, asking.by, range_s)
    if key == GENERATED_TOKENS:
        return gained(GENERATED, "", asking, asking.by, range_s)
    if key == BEGUN:
        return gained(TTFT, "count", asking, asking.by, range_s)

    def late(dialect: Dialect) -> str:
        series = dialect.series(TTFT, "_bucket", extra=bound_matcher(late_s or 0.0))
        return dialect.sum(f"increase({series}[{dialect.range}])")

    return _either(asking, range_s, late)


def narrowed(asking: QueryScope, only: str) -> QueryScope:
    """A copy of the scope with additional matchers."""
    return replace(
        asking, selector=",".join(matchers for matchers in (asking.selector, only) if matchers)
    )


def curve(asking: QueryScope, key: str, only: str, _step_s: float) -> str:
    """A query for a signal over the window, for the latency curve. `only` are matchers of the
    chosen engines."""
    return narrowed(asking, only).query(SIGNAL_BY_KEY[key].expr)


def up(jobs: Sequence[str], range_s: float) -> str:
    """A query for the share of successful scrapes (0-1), per job and instance."""
    only = f"{{{any_of('job', jobs)}}}" if jobs else ""
    return f"avg by (job, instance) (avg_over_time(up{only}[{duration(range_s)}]))"


def failed_scrapes(jobs: Sequence[str], range_s: float) -> str:
    """A query for the number of failed scrapes, per job and instance."""
    scrapes = f"up{{{any_of('job', jobs)}}}" if jobs else "up"
    over = f"{scrapes}[{duration(range_s)}]"
    return f"sum by (job, instance) (count_over_time({over}) - sum_over_time({over}))"


def deleted(namespaces: Sequence[str], range_s: float) -> str:
    """A query on kube-state-metrics with a value for each pod of these namespaces that Kubernetes
    is deleting."""
    over = f"[{duration(range_s)}]"
    if not namespaces:
        return f"last_over_time({DELETED}{over})"
    return " or ".join(
        f"last_over_time({DELETED}{{{any_of(label, namespaces)}}}{over})"
        for label in ("namespace", "exported_namespace")
    )


def starts(asking: QueryScope, range_s: float) -> str:
    """A query for the start time of each process, in Unix seconds."""
    series, by = asking.series("process_start_time_seconds"), ", ".join(of_process(asking.by))
    return f"max by ({by}) (last_over_time({series}[{duration(range_s)}]))"


def open_files(asking: QueryScope, range_s: float) -> str:
    """A query for the files and connections that each process holds open."""
    series, by = asking.series("process_open_fds"), ", ".join(of_process(asking.by))
    return f"max by ({by}) (avg_over_time({series}[{duration(range_s)}]))"


def configs(asking: QueryScope, range_s: float) -> str:
    """A query for the cache configuration, which vLLM exports as labels."""
    return _either(
        asking,
        range_s,
        lambda dialect: f"last_over_time({dialect.series('cache_config_info')}[{dialect.range}])",
    )


def gpu_models(range_s: float) -> str:
    """A query for DCGM series that have the GPU model as a label."""
    return f"last_over_time(DCGM_FI_DEV_SM_CLOCK[{duration(range_s)}])"


def gpus(key: str, range_s: float) -> str:
    """A query for a GPU signal of the DCGM exporter, per pod or per node."""
    over, by = f"[{duration(range_s)}]", ", ".join(GPU_LABELS)
    if key == GPU_BUSY:
        return f"avg by ({by}) (avg_over_time({PROF}GR_ENGINE_ACTIVE{over}))"
    used, free = (
        f"sum by ({by}) (avg_over_time({DEV}FB_{name}{over}))" for name in ("USED", "FREE")
    )
    return f"{used} / ({used} + {free})"


def pages(asking: QueryScope, labels: Mapping[str, str], span_s: float) -> str:
    """A query for all raw samples of one target over `span_s` seconds."""
    begins = "|".join(map(re.escape, (*asking.prefixes, *OF_THE_PAGE)))
    names = quoted(f"({begins}).*|process_start_time_seconds|up")
    only = ",".join(f'{name}="{quoted(value)}"' for name, value in sorted(labels.items()))
    return f'{{__name__=~"{names}",{only}}}[{duration(span_s)}]'


def _either(asking: QueryScope, range_s: float, make: Callable[[Dialect], str | None]) -> str:
    """A query over `range_s` seconds for all prefixes of vLLM's metrics. `make` returns the query
    for one prefix, or None."""
    return replace(asking, window_s=range_s).either(make)


# --- Range queries read into arrays ---------------------------------------------------------------


PIECE_VALUES = 200_000
"""Maximum number of values per answer. They take about 20 MB while the answer is read."""

PIECE_SCRAPED = 20_000_000
"""Maximum number of raw samples that one query may scan on the server: about one second of work."""

KeyOf = Callable[[Labels], RowKey]


class Query(Struct, frozen=True):
    """A range query. `text` returns the PromQL for a step length in seconds. `key` returns the key
    of a row.

    `rows` is the estimated number of rows of the answer, `scraped` the estimated raw samples per
    second of range that the server scans. A long range is split so that neither gets too large.
    """

    text: Callable[[float], str]
    key: KeyOf
    rows: int = 1
    scraped: float = 1.0


class Ranges:
    """Runs range queries against a metrics system."""

    def __init__(
        self, source: PrometheusSource, progress: ReportProgress, *, expected: int, at_once: int
    ) -> None:
        """`expected` is the number of queries that are assumed, for the progress."""
        self.source, self._at_once = source, at_once
        self.problems = AnswerLog()
        self._progress, self._done, self._expected = progress, 0, expected

    def expect(self, queries: int) -> None:
        """Set the number of queries that are still to come."""
        self._expected = self._done + queries

    def count(self) -> None:
        """Count one finished query."""
        self._done += 1
        self._progress(min(self._done, self._expected - 1), self._expected)

    def steps(self, queries: Mapping[str, Query], at: Steps) -> dict[str, Rows]:
        """The rows of each query, with a value for each step. NaN without a value. Shape of a row:
        (steps,)."""
        return self._all(queries, [at])

    def slots(self, queries: Mapping[str, Query], slots: Sequence[Slot]) -> dict[str, Rows]:
        """The rows of each query, with a value for each hour. NaN without a value. Shape of a row:
        (slots,)."""
        return self._all(queries, hour_runs(slots))

    def _all(self, queries: Mapping[str, Query], runs: Sequence[Steps]) -> dict[str, Rows]:
        def rows_of(name: str) -> Rows:
            rows: Rows = {}
            at, count = 0, sum(run.count for run in runs)
            try:
                for run in runs:
                    self._run(queries[name], run, rows, at, count)
                    at += run.count
            except CollectError as exc:
                self.problems.fail(name, exc)
            self.count()
            return rows

        with ThreadPoolExecutor(self._at_once) as pool:
            return dict(zip(queries, pool.map(rows_of, queries), strict=True))

    def _run(self, query: Query, run: Steps, rows: Rows, at: int, count: int) -> None:
        steps_per_piece = min(
            PIECE_VALUES // max(1, query.rows),
            int(PIECE_SCRAPED / max(1.0, query.scraped * run.step_s)),
        )
        for piece in self.source.range(
            query.text(run.step_s),
            from_s=run.first_s,
            to_s=run.last_s,
            step_s=run.step_s,
            series=SAMPLES_MOST // max(1, steps_per_piece),
        ):
            self._take(piece, query.key, run, rows, at, count)

    def _take(self, piece: Piece, key: KeyOf, run: Steps, rows: Rows, at: int, count: int) -> None:
        self.problems.warn(piece.warnings)
        for track in piece.tracks:
            row = rows.setdefault(key(track.labels), np.full(count, np.nan))
            points = np.array(track.points)
            places = np.rint((points[:, 0] - run.first_s) / run.step_s).astype(np.intp)
            row[at + places] = points[:, 1]
