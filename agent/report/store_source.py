"""The history store as a source for reports, read in bulk as numpy arrays. I/O edge."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.report.period_source import (
    EnginePeriod,
    Remarks,
    ReportProgress,
    ReportRequest,
    check_names,
    tier_name,
)
from kneewatch.agent.report.series import (
    METRICS,
    MINUTE_S,
    NO_TIMES,
    Counted,
    Increases,
    Signals,
    gap_s,
    in_flight,
    in_order,
    points,
    runs,
    spans_of,
    usual_step_s,
)
from kneewatch.agent.store.chunks import ColumnRow, CounterChunk, column_of
from kneewatch.agent.store.columns import DamagedError, Decoders, decoding
from kneewatch.agent.store.database import COUNTERS
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Scrapes, StoredEngine
from kneewatch.agent.store.stored_series import (
    chunk_reader,
    chunk_rows,
    columns_by_name,
    log_damage,
    open_counters,
    signal_parts,
)
from kneewatch.collector.scrape_history import Column
from kneewatch.collector.signals.vllm import TTFT
from kneewatch.diagnose.learned.knee import POINT_SIGNALS
from kneewatch.reports.weekly.figures import Gap
from kneewatch.reports.weekly.incidents import BRIDGED_S
from kneewatch.reports.weekly.measures import LEVELS
from kneewatch.reports.weekly.observed import (
    HOUR_S,
    Configured,
    EngineObserved,
    Episode,
    EpisodeObserved,
    Grid,
    Held,
    Recommended,
    TargetObserved,
    TierTotals,
)
from kneewatch.rules.rule import WORDS


def _sums(data: bytes, order: int) -> array[int]:
    # Overflow wraps around here exactly as it did when the differences were encoded.
    folded = np.frombuffer(data, dtype="<u8")
    signs = (folded & np.uint64(1)).view(np.int64)
    values = (folded >> np.uint64(1)).view(np.int64)
    values ^= np.negative(signs, out=signs)
    for _ in range(order):
        np.cumsum(values, out=values)
    sums: array[int] = array("q")
    sums.frombytes(values.data.cast("B"))
    return sums


def _doubles(data: bytes) -> array[float]:
    doubles: array[float] = array("d")
    doubles.frombytes(np.frombuffer(data, dtype="<f4").astype(np.float64).data.cast("B"))
    return doubles


NUMPY = Decoders(_sums, _doubles)
"""Decoders for the store that return numpy arrays."""


class History(Reader):
    """A reader of the store that can also read signals and counters in bulk."""

    def __init__(self, path: Path) -> None:
        """Open the store.

        Raises:
            StoreError: there is no store, or it cannot be read; the message says what to do.
        """
        super().__init__(path, NUMPY)

    def signal_arrays(
        self, engine_id: int, keys: Sequence[str], *, from_s: float, to_s: float
    ) -> Signals:
        """Signals of an engine. Where they were downsampled, there is one value per minute."""
        span = {"from_s": from_s, "to_s": to_s}
        with self._snapshot() as connection:
            parts = list(signal_parts(connection, engine_id, keys, NUMPY, **span))
        times = np.concatenate([NO_TIMES, *(part.times for part in parts)])
        keep = in_order(times)
        return Signals(
            times[keep],
            {
                key: np.concatenate([NO_TIMES, *(part.values[key] for part in parts)])[keep]
                for key in keys
            },
        )

    def counter_arrays(
        self, engine_id: int, metrics: Collection[str], *, from_s: float, to_s: float
    ) -> Iterator[Counted]:
        """Yields the counters of `metrics`, about an hour at a time. The first and the last item
        extend slightly beyond the range."""
        chosen = _Chosen(metrics)
        with self._snapshot() as connection:
            for row in chunk_rows(connection, COUNTERS, engine_id, from_s=from_s, to_s=to_s):
                try:
                    with chunk_reader(connection, row.id) as read:
                        yield chosen.counted(CounterChunk(read, NUMPY))
                except DamagedError as error:
                    log_damage("counters", row.id, error)
            opened = [
                (t_s, row)
                for _, t_s, row in open_counters(connection, engine_id)
                if from_s <= t_s <= to_s
            ]
        if opened:
            times, rows = zip(*opened, strict=True)
            columns = {
                column: values
                for column, values in columns_by_name(rows).items()
                if column.metric in chosen.metrics and any(value == value for value in values)
            }
            table = np.array(list(columns.values())).reshape(len(columns), len(times))
            yield Counted(np.array(times), tuple(columns), table)


class _Chosen:
    """Selects the columns of some metrics. The selection is cached, because successive chunks have
    the same columns."""

    def __init__(self, metrics: Collection[str]) -> None:
        self.metrics = frozenset(metrics)
        self._rows: list[ColumnRow] = []
        self._columns: tuple[Column, ...] = ()
        self._places: list[int] = []

    def counted(self, chunk: CounterChunk) -> Counted:
        """The selected counters of a chunk.

        Raises:
            DamagedError: the columns or the times cannot be decoded.
        """
        integers, floats = np.asarray(chunk.integers), np.asarray(chunk.floats)
        with decoding("counters"):
            rows = [row for row, _ in chunk.columns]
            if rows != self._rows:
                self._places = [at for at, row in enumerate(rows) if row[0] in self.metrics]
                self._columns = tuple(column_of(rows[at]) for at in self._places)
                self._rows = rows
            values = np.empty((len(self._places), chunk.rows))
            for row, place in enumerate(self._places):
                (_, kind), at = chunk.columns[place], chunk.starts[place]
                if kind == "i":
                    values[row] = integers[at : at + chunk.rows]
                elif kind == "b":
                    values[row] = floats[at : at + chunk.rows]
                else:
                    values[row] = kind
        return Counted(np.asarray(chunk.times()), self._columns, values)


# --- The history store as a report's source. I/O edge ---------------------------------------------
#
# Reads one engine after another: memory holds the numbers of one engine at a time.


MARGIN_S = 120.0
"""Seconds that are read before and after the period, because counters are stored only once a
minute."""

AROUND_S = 600.0
"""Seconds before and after an incident for which its signals are shown."""

SHOWN = ("ttft_p99_s", "kv_usage_ratio", "waiting", "running")
SHOWN_MOST = 4
CITED_MOST = 2
"""Number of signals that are shown for an incident. They are the first ones that its cause cites,
then the usual ones."""

NOTHING_READ = "every signal"

LOOKS = (0.5, 0.25, 0.75, 0.05, 0.95)
"""Positions within an incident (0-1) at which the stored diagnosis is looked up."""

SEVERITY = {word: severity for severity, word in WORDS.items()}


class Member(Struct, frozen=True):
    """An engine and its tier. `document` is its newest diagnosis in the period.

    A target that could not be reached at first is stored as an engine without a name. It has
    incidents, but if the target has other engines it does not count as an engine (`counts` is
    false).
    """

    engine: StoredEngine
    tier: str
    gpu: str
    document: dict[str, Any] | None
    counts: bool = True


class StoreSource:
    """Reads a report's periods from the history store."""

    def __init__(self, history: History, request: ReportRequest, progress: ReportProgress) -> None:
        """Find the requested engines.

        Raises:
            SettingsError: a requested target or tier does not exist.
        """
        self._history, self._request, self._progress = history, request, progress
        targets = [engine.target for engine in history.engines()]
        check_names("target", request.targets, targets, "the history", targets)
        self._members = members_of(history, request)
        self._targets = [*dict.fromkeys(member.engine.target for member in self._members)]
        self._steps = len(self._members) + len(self._targets)

    @property
    def name(self) -> str:
        """The path of the store."""
        return f"kneewatch's own history ({self._history.path.name})"

    def engines(self) -> Iterator[EnginePeriod]:
        """Yields the requested engines. Each is read only when it is needed."""
        for done, member in enumerate(self._members):
            self._progress(done, self._steps)
            yield _engine(self._history, member, self._request)

    def totals(self, tier: str) -> tuple[TierTotals, TierTotals]:
        """Empty, because the figures of each engine are in the store."""
        return TierTotals(), TierTotals()

    def targets(self) -> Iterator[TargetObserved]:
        """The scrapes, failures and gaps of each target since it was first seen."""
        grid = self._request.grid
        for done, target in enumerate(self._targets, len(self._members)):
            self._progress(done, self._steps)
            firsts_s = (m.engine.first_s for m in self._members if m.engine.target == target)
            from_s = max(grid.from_s, min(firsts_s))
            if from_s < grid.to_s:
                scrapes = self._history.scrapes(target, from_s=from_s, to_s=grid.to_s)
                yield target_observed(target, scrapes, from_s=from_s, to_s=grid.to_s)
        self._progress(self._steps, self._steps)

    def remarks(self) -> Remarks:
        """Empty, because the report's own description of its methods fits the store."""
        return Remarks()


# --- Which engines -------------------------------------------------------------------------------


def members_of(history: History, request: ReportRequest) -> list[Member]:
    """The requested engines of both periods.

    Raises:
        SettingsError: there are engines, but none in a requested tier.
    """
    grids = [grid for grid in (request.grid, request.before) if grid]
    members = [
        _member(history, engine, request)
        for engine in history.engines()
        if (not request.targets or engine.target in request.targets)
        and any(seen(engine, grid.from_s, grid.to_s) for grid in grids)
    ]
    named = {member.engine.target: member.tier for member in members if member.engine.model}
    placed = [
        replace(member, tier=named[member.engine.target], counts=False)
        if not member.engine.model and member.engine.target in named
        else member
        for member in members
    ]
    if placed:
        names = set[str]().union(*map(names_of, placed))
        tiers = [member.tier for member in placed]
        check_names("tier", request.tiers, names, "that period", tiers)
    return [
        member for member in placed if not request.tiers or names_of(member) & set(request.tiers)
    ]


def names_of(member: Member) -> set[str]:
    """The names by which a user can select the tier of an engine: the report's name of the tier,
    and its `tier` label."""
    return {member.tier, member.engine.labels.get("tier") or member.tier}


def seen(engine: StoredEngine, from_s: float, to_s: float) -> bool:
    """Whether an engine was present in a period."""
    return engine.first_s < to_s and engine.last_s >= from_s


def _member(history: History, engine: StoredEngine, request: ReportRequest) -> Member:
    document = history.document(engine.id, min(engine.last_s, request.grid.to_s))
    tier = (document or {}).get("tier") or engine.labels.get("tier") or ""
    gpu = request.stated(engine.target).stated.gpu
    name = gpu.id if gpu else ""
    return Member(engine, tier_name(engine.model, tier, name), name, document)


# --- One engine: its period, its incidents, its advice --------------------------------------------


class EngineHistory(Struct, frozen=True):
    """The signals and counters of an engine over a period."""

    engine: StoredEngine
    grid: Grid
    signals: Signals
    increases: Increases
    window_s: float

    @classmethod
    def read(
        cls, history: History, engine: StoredEngine, grid: Grid, window_s: float
    ) -> EngineHistory:
        """Read the signals and counters of an engine over a period from the store."""
        span = {"from_s": grid.from_s - MARGIN_S, "to_s": grid.to_s + MARGIN_S}
        keys = tuple(dict.fromkeys((*LEVELS, *POINT_SIGNALS)))
        changes = history.configs(engine.id, **span)
        increases = Increases(
            history.counter_arrays(engine.id, METRICS, **span),
            restarts_s=[change.t_s for change in changes if change.restart],
        )
        signals = history.signal_arrays(engine.id, keys, from_s=grid.from_s, to_s=grid.to_s)
        return cls(engine, grid, signals, increases, window_s)

    def observed(
        self, config: Mapping[str, str], unknown: Mapping[str, str], *, curve: bool
    ) -> EngineObserved:
        """The engine over the period. With `curve`, it includes the windows for the latency
        curve."""
        engine, signals = self.engine, self.signals
        return EngineObserved(
            target=engine.target,
            engine=engine.engine,
            replica=engine.replica,
            first_s=max(engine.first_s, self.grid.from_s),
            last_s=min(engine.last_s, self.grid.to_s),
            spans=spans_of(signals, self.increases, np.array(self.grid.edges_s)),
            minutes=self._arrivals(),
            points=points(signals, window_s=self.window_s) if curve else (),
            in_flight=in_flight(signals, window_s=self.window_s) if curve else None,
            config=config,
            unknown=unknown,
        )

    def _arrivals(self) -> list[float]:
        """The number of requests that began in each minute. NaN for minutes without counter
        data."""
        edges_s = np.arange(self.grid.from_s, self.grid.to_s + MINUTE_S, MINUTE_S)
        begun = self.increases.between((TTFT, "count"), edges_s)
        if begun is None:
            return []
        covered = self.increases.covered(edges_s, gap_s=0.0)
        rates: list[float] = np.where(covered > 0.5 * MINUTE_S, begun, np.nan).tolist()
        return rates

    def incident(
        self, history: History, episode: Episode, document: Mapping[str, Any] | None, tier: str
    ) -> EpisodeObserved:
        """An episode with its diagnosis, its signals, and counts during the episode and in the hour
        before."""
        start_s, until_s = episode.start_s, max(episode.until_s, episode.start_s + 1.0)
        edges_s = np.array([start_s - HOUR_S, start_s, until_s])
        hour_before, during = spans_of(self.signals, self.increases, edges_s)
        around = history.signal_arrays(
            self.engine.id,
            shown(episode, document),
            from_s=max(start_s - AROUND_S, self.grid.from_s),
            to_s=min(until_s + AROUND_S, self.grid.to_s),
        )
        return EpisodeObserved(
            tier=tier,
            target=self.engine.target,
            engine=self.engine.engine,
            episode=episode,
            document=document,
            during=during,
            hour_before=hour_before,
            series={
                key: (around.times.tolist(), values.tolist())
                for key, values in around.values.items()
            },
        )


def _engine(history: History, member: Member, request: ReportRequest) -> EnginePeriod:
    engine, grid, before = member.engine, request.grid, None
    if (
        member.counts
        and request.before is not None
        and seen(engine, request.before.from_s, request.before.to_s)
    ):
        numbers = EngineHistory.read(history, engine, request.before, request.window_s)
        before = numbers.observed({}, {}, curve=False)
    numbers = EngineHistory.read(history, engine, grid, request.window_s)

    def evidence(episode: Episode, detailed: bool) -> EpisodeObserved:
        document = _document(history, engine.id, episode) if detailed else None
        return numbers.incident(history, episode, document, member.tier)

    period = EnginePeriod(
        engine.target, engine.model, member.tier, member.gpu, evidence, before=before
    )
    if not seen(engine, grid.from_s, grid.to_s):
        return period
    changes = history.configs(engine.id, from_s=-1e18, to_s=grid.to_s)
    config: Mapping[str, str] = changes[-1].after if changes else {}
    intervals = history.intervals(
        from_s=grid.from_s - BRIDGED_S,
        to_s=grid.to_s,
        engine_id=engine.id,
        kinds=("stage", "cause"),
    )
    return replace(
        period,
        now=numbers.observed(config, unknown_of(member.document), curve=True)
        if member.counts
        else None,
        held=[
            Held(row.kind, row.id, row.severity, row.start_s, row.end_s, row.last_s, row.ended)
            for row in intervals
        ],
        recommended=_recommended(history, member, grid),
        configured=[
            Configured(
                change.t_s, engine.target, engine.engine, change.before, change.after,
                change.restart,
            )
            for change in changes
            if change.t_s >= grid.from_s
        ],
    )  # fmt: skip


def _document(history: History, engine_id: int, episode: Episode) -> dict[str, Any] | None:
    """The stored diagnosis in which the cause of the incident is worst. None if no diagnosis was
    stored."""
    best: dict[str, Any] | None = None
    best_rank = (-1, 0.0)
    own = [interval for interval in episode.causes if interval.id == episode.cause] or [
        *episode.stages
    ]
    longest = max(
        own, key=lambda interval: (interval.severity, interval.until_s - interval.start_s)
    )
    for look in LOOKS:
        at_s = longest.start_s + look * (longest.until_s - longest.start_s)
        document = history.document(engine_id, at_s)
        for cause in document["causes"] if document else ():
            rank = int(SEVERITY[cause["severity"]]), float(cause["confidence"])
            if cause["id"] == episode.cause and rank > best_rank:
                best, best_rank = document, rank
        if best_rank[0] >= longest.severity:
            break
    return best


def _recommended(history: History, member: Member, grid: Grid) -> list[Recommended]:
    engine = member.engine
    rows = history.recommendations(from_s=grid.from_s, to_s=grid.to_s, engine_id=engine.id)
    return [
        Recommended(
            tier=member.tier,
            target=engine.target,
            engine=engine.engine,
            document=row.document,
            outcome=row.outcome,
            first_s=row.first_s,
            last_s=row.last_s,
            applied_s=row.applied_s,
            predicted=row.predicted,
            measured=row.measured,
        )
        for row in rows
    ]


def shown(episode: Episode, document: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The signals to show for an incident. TTFT is always shown, because it determines which
    requests were late."""
    causes: Sequence[Mapping[str, Any]] = document["causes"] if document else ()
    cited = [
        str(item["signal"])
        for cause in causes
        if cause["id"] == episode.cause and episode.kind != "cascade"
        for item in cause["evidence"][:CITED_MOST]
    ]
    return tuple(dict.fromkeys((SHOWN[0], *cited, *SHOWN)))[:SHOWN_MOST]


def unknown_of(document: Mapping[str, Any] | None) -> dict[str, str]:
    """The signals that a diagnosis lacks, each with the reason."""
    lines: Sequence[str] = document["unknown"] if document else ()
    pairs = (line.partition(": ") for line in lines)
    return {key: why for key, _, why in pairs if why and key != NOTHING_READ}


# --- Scrapes of a target: failures and gaps -------------------------------------------------------


def target_observed(target: str, scrapes: Scrapes, *, from_s: float, to_s: float) -> TargetObserved:
    """The scrapes, failures and gaps of a target.

    `from_s` is the start of the period. If the target was first scraped later, `from_s` is the time
    of that scrape, so that the time before it is no gap.
    """
    times = np.asarray(scrapes.times)
    places = np.flatnonzero(in_order(times))
    times, failed = times[places], np.isin(places, list(scrapes.failed))
    usual_s, gap = usual_step_s(times), gap_s(times)
    # A failure lasts until the next scrape; a row of failures has the reason of the first.
    ends = np.append(times[1:], times[-1:] + usual_s)
    unread = [
        Gap(float(times[run[0]]), float(ends[run[-1]]), scrapes.failed[int(places[run[0]])])
        for run in runs(failed)
    ]
    bounds = np.concatenate(([from_s], times, [to_s]))
    for at in np.flatnonzero(np.diff(bounds) > gap).tolist():
        unread.append(Gap(float(bounds[at]), float(bounds[at + 1]), ""))
    unread.sort(key=lambda gap: gap.from_s)
    lost_s = sum(gap.to_s - gap.from_s for gap in unread)
    return TargetObserved(
        target=target,
        scrapes=len(times),
        failed=int(failed.sum()),
        interval_s=usual_s or None,
        watched_s=max(to_s - from_s - lost_s, 0.0) if len(times) else 0.0,
        unread=unread,
    )
