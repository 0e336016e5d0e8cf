"""The history of a report's engines, read from the store in bulk as numpy arrays. I/O edge."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.report.series import (
    METRICS,
    NO_TIMES,
    POINT_SIGNALS,
    Counted,
    Increases,
    Signals,
    arrived,
    in_order,
    peak,
    points,
    spans_of,
)
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stated_deployment import PROFILE_SETTING, named_profile, stated
from kneewatch.agent.store.chunks import (
    ColumnRow,
    CounterChunk,
    DamagedError,
    Decoders,
    column_of,
    decoding,
)
from kneewatch.agent.store.database import COUNTERS, rows_of
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import StoredEngine
from kneewatch.agent.store.stored_series import (
    OPEN_COUNTERS,
    chunk_reader,
    chunk_rows,
    columns_by_name,
    log_damage,
    open_rows,
    signal_parts,
)
from kneewatch.agent.targets import table_specs
from kneewatch.collector.engines.engine_kind import PROGRAM
from kneewatch.collector.errors import SettingsError
from kneewatch.collector.scrape_history import Column
from kneewatch.collector.signals.routers import ROUTERS
from kneewatch.collector.signals.table import TTFT
from kneewatch.diagnose.fleet.verdict import IN_FLEET
from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.weekly.measures import LEVELS, WAITING
from kneewatch.reports.weekly.observed import (
    EngineObserved,
    EnginesObserved,
    Episode,
    Grid,
    Observed,
    TierStated,
)
from kneewatch.rules.rule import MINUTE_S, WINDOW_S

# --- What a report covers -------------------------------------------------------------------------


UNNAMED = "unknown model"
LISTED_MOST = 20


class ReportRequest(Struct, frozen=True):
    """What a report covers. Empty `tiers` or `targets` mean all."""

    grid: Grid
    before: Grid | None
    stated: Callable[[str], TierStated]
    targets: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    window_s: float = WINDOW_S


def tier_name(model: str, tier: str, gpu: str, program: str | None = "") -> str:
    """The name of a tier in the report: its `tier` label with the model; without the label, the
    model and GPU. `program` are engines that are not vLLM: they are a tier of their own."""
    if program and not model:
        return program
    model = model or UNNAMED
    name = f"{model}@{gpu}" if gpu else model
    if tier:
        name = tier if model in tier else f"{model} on {tier}"
    return f"{name} on {program}" if program and program not in name else name


def check_names(
    kind: str, requested: Sequence[str], existing: Iterable[str], place: str, listed: Iterable[str]
) -> None:
    """Check that all names given by `--target` or `--tier` exist.

    Raises:
        SettingsError: a name does not exist; the message lists the first names of `listed`.
    """
    names = set(existing)
    for name in requested:
        if name not in names:
            some = ", ".join(sorted(set(listed))[:LISTED_MOST]) or "none"
            raise SettingsError(f"--{kind} {name}: no such {kind} in {place}; it has {some}")


# --- What the settings state about each target. I/O edge: settings may name files -----------------


def stated_of(settings: Settings) -> Callable[[str], TierStated]:
    """A function from a target's name to the settings of its tier. They come from the target's own
    table if it has one, else from the general settings.

    Raises:
        SettingsError: a model, GPU, file or table is not valid.
    """
    own = {spec.name: spec.settings for spec in table_specs(settings)}
    cached = cache(_stated)
    cached(settings)  # fail on invalid settings before anything is read
    return lambda target: cached(own.get(target, settings))


def _stated(settings: Settings) -> TierStated:
    own_profile = settings["report.profile"] is not None
    return TierStated(
        profile=settings.profile(stated=stated(settings)),
        workload=named_profile(settings, "report.profile" if own_profile else PROFILE_SETTING),
    )


ReportProgress = Callable[[int, int], None]
"""Called with the number of steps done and the total number of steps."""


# --- The history as arrays ------------------------------------------------------------------------


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
    """A reader of the store for reports: signals and counters in bulk, and what a report must know
    of its source."""

    def __init__(self, path: Path) -> None:
        """Open the store.

        Raises:
            StoreError: there is no store, or it cannot be read; the message says what to do.
        """
        super().__init__(path, NUMPY)

    @property
    def name(self) -> str:
        """The source of the data, as the report names it."""
        return f"kneewatch's own history ({self.path.name})"

    def engines(self, target: str | None = None) -> list[StoredEngine]:
        """The stored engines of a target, or of all targets, without the pools of a fleet: their
        engines are reported from the metrics system."""
        engines = super().engines(target)
        return [engine for engine in engines if not engine.target.startswith(IN_FLEET)]

    def members(self, request: ReportRequest) -> list[Member]:
        """The requested engines of both periods.

        Raises:
            SettingsError: a requested target or tier does not exist.
        """
        targets = [engine.target for engine in self.engines()]
        check_names("target", request.targets, targets, "the history", targets)
        return members_of(self, request)

    def numbers(self, engine: StoredEngine, grid: Grid, window_s: float) -> EngineHistory:
        """The signals and counters of an engine over a period."""
        return EngineHistory.read(self, engine, grid, window_s)

    def closely(self, numbers: EngineHistory, _episode: Episode) -> EngineHistory:
        """The signals and counters of an engine during an incident, as precise as they are known.
        `numbers` are those of the period."""
        return numbers

    def totals(self, _tier: str) -> tuple[EnginesObserved, EnginesObserved]:
        """Sums over the engines of a tier that only the source knows, for the period and for the
        previous one. Empty, because the store has the figures of each engine."""
        return EnginesObserved(), EnginesObserved()

    def with_remarks(self, observed: Observed) -> Observed:
        """The data with what a reader of the report must know about it. Nothing is added, because
        the report's own description of its methods fits the store."""
        return observed

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
            ids = rows_of(engine_id)
            opened = list(open_rows(connection, OPEN_COUNTERS, ids, from_s=from_s, to_s=to_s))
        if opened:
            _, times, rows = zip(*opened, strict=True)
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


# --- Engines of a report: which, and their numbers over a period ----------------------------------

MARGIN_S = 120.0
"""Seconds that are read before and after the period, because counters are stored only once a
minute."""

READ = tuple(dict.fromkeys((*LEVELS, *POINT_SIGNALS)))
"""The signals that are read for the whole period."""


class Member(Struct, frozen=True):
    """An engine and its tier. `verdict` is its newest verdict in the period.

    A target that could not be reached at first is stored as an engine without a name. It has
    incidents, but if the target has other engines it does not count as an engine (`counts` is
    false). Neither does a router.
    """

    engine: StoredEngine
    tier: str
    gpu: str
    verdict: Verdict | None
    counts: bool = True

    @property
    def program(self) -> str:
        """The engine's program; empty for vLLM."""
        program = self.verdict and self.verdict.program
        return program or self.engine.labels.get(PROGRAM, "")

    @property
    def is_router(self) -> bool:
        """Whether it is no engine but a router."""
        return self.program in {router.title for router in ROUTERS}


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
    verdict = history.verdict(engine.id, min(engine.last_s, request.grid.to_s))
    tier = (verdict and verdict.tier) or engine.labels.get("tier") or ""
    gpu = request.stated(engine.target).server.gpu
    name = gpu.id if gpu else ""
    program = verdict.program if verdict else None
    member = Member(engine, tier_name(engine.model, tier, name, program), name, verdict)
    return replace(member, counts=not member.is_router)


class EngineHistory(Struct, frozen=True):
    """The signals and counters of an engine over a period.

    `curve` are the windows for the latency curve. `summed`: the counters of the engine are in the
    totals of its tier (`History.totals`).
    """

    engine: StoredEngine
    grid: Grid
    signals: Signals
    increases: Increases
    curve: Signals
    window_s: float
    summed: bool = False

    @classmethod
    def read(
        cls, history: History, engine: StoredEngine, grid: Grid, window_s: float
    ) -> EngineHistory:
        """Read the signals and counters of an engine over a period from the store."""
        span = {"from_s": grid.from_s - MARGIN_S, "to_s": grid.to_s + MARGIN_S}
        changes = history.configs(engine.id, **span)
        increases = Increases(
            history.counter_arrays(engine.id, METRICS, **span),
            restarts_s=[change.t_s for change in changes if change.restart],
        )
        signals = history.signal_arrays(engine.id, READ, from_s=grid.from_s, to_s=grid.to_s)
        return cls(engine, grid, signals, increases, signals, window_s)

    def observed(
        self, config: Mapping[str, str], unknown: Mapping[str, str], *, curve: bool
    ) -> EngineObserved:
        """The engine over the period. With `curve`, it includes the windows for the latency
        curve."""
        engine, signals = self.engine, self.signals
        highest = peak(signals, window_s=self.window_s) if curve else (None, None)
        spans = spans_of(signals, self.increases, np.array(self.grid.edges_s))
        if self.summed:
            spans = [
                replace(
                    span, engine_s=span.watched_s, clock_s=span.watched_s, counts={}, tallies={}
                )
                for span in spans
            ]
        return EngineObserved(
            target=engine.target,
            engine=engine.engine,
            replica=engine.replica,
            first_s=max(engine.first_s, self.grid.from_s),
            last_s=min(engine.last_s, self.grid.to_s),
            spans=spans,
            minutes=() if self.summed else arrivals(self.increases, signals, self.grid),
            points=points(self.curve, window_s=self.window_s) if curve else (),
            peak_in_flight=highest[0],
            peak_at_s=highest[1],
            config=config,
            unknown=unknown,
        )


def arrivals(increases: Increases, signals: Signals, grid: Grid) -> list[float]:
    """The number of requests that arrived in each minute. NaN for minutes without counter data."""
    edges_s = np.arange(grid.from_s, grid.to_s + MINUTE_S, MINUTE_S)
    begun = increases.between((TTFT, "count"), edges_s)
    if begun is None:
        return []
    covered = increases.covered(edges_s, gap_s=0.0)
    known = ~np.isnan(waiting := signals.values[WAITING])
    if known.any():
        begun = arrived(begun, np.interp(edges_s, signals.times[known], waiting[known]))
    rates: list[float] = np.where(covered > 0.5 * MINUTE_S, begun, np.nan).tolist()
    return rates
