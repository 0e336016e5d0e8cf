"""The state that the HTTP endpoint serves, now or from the store, how old it is, and whether the
daemon is ready. I/O edge."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace
from starlette.responses import Response

from kneewatch.agent.api.responses import Problem
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Series, StoredEngine
from kneewatch.agent.store.writer import Store
from kneewatch.agent.stream import AcceptRequest, EngineAcceptance
from kneewatch.agent.target_state import Board, TargetState
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import KneewatchError
from kneewatch.diagnose.change import UNWATCHED, Interval
from kneewatch.diagnose.fleet.verdict import FLEET
from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.health import is_late, rank_of, shown_health
from kneewatch.reports.lines import moment
from kneewatch.rules.formatting import clock, date, failed_in_a_row, span
from kneewatch.rules.rule import Severity

if TYPE_CHECKING:
    from kneewatch.agent.fleet.watch import FleetWatch
    from kneewatch.agent.notify.notifier import Notifier


# --- Replicas for autoscalers -------------------------------------------------------------------


Labels = tuple[tuple[str, str], ...]
Need = tuple[float | None, float]
"""The replicas that the load needs, None if unknown, and those present."""

GONE: Need = (None, 1.0)
UP_S, DOWN_S = 120.0, 600.0
"""The exported number rises to what was needed for so long, and falls to the most that was needed
in so long. Two windows pass until the load of new replicas is measured."""


class Recommended(Struct, frozen=True):
    """The replicas exported for one server or tier; `value` is None before the first.

    `needed` has the numbers needed since the replicas last changed, each with its time. `is_held`:
    the value is the last one, because the present need is unknown.
    """

    value: float | None = None
    is_held: bool = False
    present: float = 0.0
    needed: tuple[tuple[float, float], ...] = ()

    def at(self, now_s: float, need: float | None, present: float, most: float) -> Recommended:
        """The next number: at most `most`, and twice the present replicas plus one.

        It changes only after what is needed has lasted, so that neither a burst nor the first
        minutes of new replicas move an autoscaler.
        """
        if need is None:
            return replace(self, is_held=True)
        need = min(need, 2 * present + 1, most)
        since = self.needed if present == self.present else ()
        needed = (*[each for each in since if now_s - each[0] <= DOWN_S], (now_s, need))
        value = self.value or need
        if now_s - needed[0][0] >= UP_S:
            value = max(value, min(count for t_s, count in needed if now_s - t_s <= UP_S))
        if now_s - needed[0][0] >= DOWN_S:
            value = min(value, max(count for _, count in needed))
        return Recommended(min(value, most), present=present, needed=needed)


class Service(Struct, frozen=True, kw_only=True):
    """The parts of the running daemon that requests use.

    `reader` and `store` are None without a history, `notifier` without receivers, `fleet` without a
    metrics system. `targets` returns the configured targets. `restart_needed` returns the keys of
    settings that changed but take effect only after a restart. `problems` returns a line for each
    file that cannot be followed. `accept` makes present values of engines the usual ones.
    `replicas` has the exported numbers of replicas.
    """

    board: Board
    settings: Settings
    targets: Callable[[], Sequence[TargetSpec]]
    version: str
    started_s: float
    reader: Reader | None = None
    store: Store | None = None
    notifier: Notifier | None = None
    fleet: FleetWatch | None = None
    restart_needed: Callable[[], Sequence[str]] = tuple
    problems: Callable[[], Sequence[str]] = tuple
    accept: Callable[[AcceptRequest], Sequence[EngineAcceptance]] = lambda _request: ()
    clock: Callable[[], float] = time.time
    replicas: dict[Labels, Recommended] = field(default_factory=dict[Labels, Recommended])

    @property
    def only_fleet(self) -> bool:
        """Whether a fleet is watched through a metrics system, and no target directly."""
        return self.fleet is not None and not self.targets()

    def states(self) -> list[TargetState]:
        """The newest states of all targets and of the fleet's pools, worst first. Until the metrics
        system first answers, the fleet is one target whose state is unknown."""
        states = self.board.states()
        if self.fleet is not None:
            moment, unanswered = self.fleet.state.moment, self.fleet.state.unanswered(self.clock())
            states += [] if moment is None else moment.pools.values()
            states += [] if unanswered is None else [unanswered]
        return sorted(states, key=lambda state: -state.severity)

    def state(self, target: str) -> TargetState | None:
        """The newest state of a target, of a pool of the fleet, or of a replica. None if there is
        none."""
        state = self.board.get(target)
        if state is not None or self.fleet is None:
            return state
        if (moment := self.fleet.state.moment) is not None:
            return moment.target(target)
        return self.fleet.state.unanswered(self.clock()) if target == FLEET else None


# --- Freshness ------------------------------------------------------------------------------------


UNKNOWN = "unknown"


def late(state: TargetState, now_s: float) -> bool:
    """Whether a target's newest cycle is too old to describe the present."""
    return is_late(now_s - state.t_s, state.interval_s)


def shown(state: TargetState, *, late: bool) -> Sequence[Verdict]:
    """The diagnoses of a target. If the target is late, a health better than unknown becomes
    unknown."""
    if not late:
        return state.diagnoses
    why = f"every signal: no scrape since {date(state.t_s)} {clock(state.t_s)} UTC"
    return tuple(
        replace(
            diagnosis,
            health=shown_health(diagnosis.health, late=True),
            unknown=[why, *diagnosis.unknown],
        )
        for diagnosis in state.diagnoses
    )


def worst_first(diagnoses: Iterable[Verdict]) -> list[Verdict]:
    """Diagnoses sorted by health, then by name."""
    return sorted(diagnoses, key=lambda d: (-rank_of(d.health), d.target, d.model, d.engine))


# --- Readiness ------------------------------------------------------------------------------------


SHOWN = 20


def has_diagnosed(service: Service) -> bool:
    """Whether a target or the fleet was diagnosed since the start, or nothing is watched.

    It stays true when a source fails later. The endpoints must stay reachable then, to report since
    when the state is unknown.
    """
    fleet = service.fleet
    if fleet is None and not service.targets():
        return True
    return bool(service.board.states()) or (fleet is not None and fleet.state.verdict is not None)


def source_problems(service: Service) -> list[str]:
    """A line for each source without a current answer, each file of targets that cannot be read,
    and each receiver for which messages were given up; one if the history cannot be written. Empty
    if all work."""
    now_s, lines = service.clock(), list(service.problems())
    for spec in service.targets():
        state = service.board.get(spec.name)
        if state is None:
            lines.append(f"{spec.name}: not scraped yet")
        elif late(state, now_s):
            lines.append(f"{spec.name}: no scrape for {span(now_s - state.t_s)}")
        elif state.failing:
            lines.append(f"{spec.name}: {failed_in_a_row(state.failing)}{_why(state)}")
    if service.fleet is not None:
        why = service.fleet.state.why_unknown(now_s)
        lines += [f"fleet: {why}"] if why else []
    more = len(lines) - SHOWN
    if more > 0:
        lines[SHOWN:] = [f"and {more} more targets"]
    if service.notifier is not None:
        lines += service.notifier.problems()
    if service.store is not None and service.store.last_error:
        lines.append("the history cannot be written; see kneewatch's log")
    return lines


def _why(state: TargetState) -> str:
    """The errors of a target's sources, after a colon; "" if none was recorded."""
    errors = [source.error for source in state.sources if source.error]
    return f": {'; '.join(errors)}" if errors else ""


# --- `/probe/{target}`: whether an engine is hung, for vLLM's livenessProbe -----------------------


HUNG = "engine_stalled"
"""The cause that a restart ends. It is critical only after an engine's longest possible prefill."""


def probe(service: Service, target: str) -> Response:
    """503 while an engine of the target is hung, or of any target if it is empty; else 200.

    It is 200 also where kneewatch cannot know: a target that is not watched, does not answer, or
    was not scraped lately. A probe that fails then would restart servers that work.
    """
    states = [service.state(target)] if target else service.states()
    now_s = service.clock()
    watched = [state for state in states if state is not None]
    if any(_is_hung(state) for state in watched if not late(state, now_s)):
        return _answer(HTTPStatus.SERVICE_UNAVAILABLE, "hung")
    return _answer(HTTPStatus.OK, "not hung" if watched else "not watched")


def _is_hung(state: TargetState) -> bool:
    # A cause that is ending was seen last before the verdict.
    return any(
        cause.id == HUNG
        and cause.severity >= Severity.CRITICAL
        and (cause.seen_s or diagnosis.t_s) >= diagnosis.t_s
        for diagnosis in state.diagnoses
        for cause in diagnosis.causes
    )


def _answer(status: HTTPStatus, words: str) -> Response:
    return Response(f"{words}\n", status, media_type="text/plain; charset=utf-8")


# --- Past diagnoses, intervals and signals from the store -----------------------------------------


log = logging.getLogger(__name__)

INTERVALS_MAX = 10_000
RECENT_S = 10.0
"""Seconds after its last scrape for which an engine counts as watched, whatever its scrape
interval."""

ENGINES_READ_ALONE_MAX = 8
"""Maximum number of engines that are read one by one. For more engines, all intervals are read and
then filtered."""

Read = TypeVar("Read")


EngineInterval = tuple[StoredEngine, Interval]
"""A period in which an engine had a stage, cause or health."""


class History(Struct, frozen=True):
    """Access to the stored history. `reader` and `store` are None if no history is kept."""

    reader: Reader | None
    store: Store | None = None

    def engines(self, target: str | None) -> list[StoredEngine]:
        return self._read(lambda reader: reader.engines(target))

    def verdicts(self, engines: Sequence[StoredEngine], at_s: float) -> list[Verdict]:
        """The stored verdicts on engines at a moment, worst first."""

        def read(reader: Reader) -> list[Verdict]:
            verdicts = (reader.verdict(engine.id, at_s) for engine in engines)
            return worst_first(verdict for verdict in verdicts if verdict is not None)

        return self._read(read)

    def notices(self, now_s: float) -> list[str]:
        """At most one sentence: that the history cannot be written, and since when."""
        since_s = None if self.store is None else self.store.stats().unwritten_s
        if since_s is None:
            return []
        return [
            f"the history is not written since {moment(since_s, now_s)} "
            f"({span(max(0.0, now_s - since_s))}): newer moments are missing; see the log"
        ]

    def intervals(
        self, engines: Sequence[StoredEngine], *, since_s: float, until_s: float
    ) -> list[EngineInterval]:
        """The intervals of stages, causes and health in a period, sorted by start. If there are
        more than `INTERVALS_MAX`, only the newest."""
        by_id = {engine.id: engine for engine in engines}
        ids: list[int | None] = [None] if len(engines) > ENGINES_READ_ALONE_MAX else list(by_id)

        def read(reader: Reader) -> list[Interval]:
            return [
                interval
                for engine_id in ids
                for interval in reader.intervals(from_s=since_s, to_s=until_s, engine_id=engine_id)
            ]

        rows = [
            (engine, self._as_of(interval, engine, until_s))
            for interval in self._read(read)
            if (engine := by_id.get(interval.engine_id)) is not None
        ]
        return sorted(rows, key=lambda row: row[1].start_s)[-INTERVALS_MAX:]

    def _as_of(self, interval: Interval, engine: StoredEngine, until_s: float) -> Interval:
        """The interval as it looked at `until_s`. It is open if it ended later. It ends at its last
        evaluation if the engine was no longer watched at `until_s`."""
        if interval.end_s is not None and interval.end_s > until_s:
            return replace(interval, end_s=None, ended="")
        if interval.end_s is not None or interval.last_s >= until_s:
            return interval
        if interval.last_s >= engine.last_s and (
            until_s - engine.last_s <= RECENT_S
            or self._read(lambda reader: reader.watched(engine.id, until_s))
        ):
            return interval
        return replace(interval, end_s=interval.last_s, ended=UNWATCHED)

    def signals(
        self, engine_id: int, keys: Sequence[str], *, since_s: float, until_s: float
    ) -> Series:
        return self._read(
            lambda reader: reader.signals(engine_id, keys, from_s=since_s, to_s=until_s)
        )

    def _read(self, read: Callable[[Reader], Read]) -> Read:
        if self.reader is None:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "no history is stored")
        try:
            return read(self.reader)
        except KneewatchError as exc:
            log.warning("cannot read the history error=%s", exc)
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE, "the history cannot be read; see kneewatch's log"
            ) from exc


def history_reach(engines: Sequence[StoredEngine]) -> str:
    """Text with the times at which the history of these engines begins and ends, in UTC."""
    first_s = min(engine.first_s for engine in engines)
    last_s = max(engine.last_s for engine in engines)
    begins, ends = (f"{date(t_s)} {clock(t_s)} UTC" for t_s in (first_s, last_s))
    return f"the history begins at {begins} and ends at {ends}"


def interval_document(row: EngineInterval) -> dict[str, Any]:
    """An interval as a JSON document."""
    engine, interval = row
    return {
        "target": engine.target,
        "model": engine.model,
        "engine": engine.engine,
        "kind": interval.kind,
        "id": interval.id,
        "severity": interval.severity.word,
        "start": round(interval.start_s, 3),
        "end": None if interval.end_s is None else round(interval.end_s, 3),
        "last": round(interval.last_s, 3),
        "ended": interval.ended,
    }
