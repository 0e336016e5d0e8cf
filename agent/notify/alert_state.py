"""The alert state of a receiver: its active problems, and which of them were sent. I/O edge."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, cast

from msgspec import Struct
from msgspec.json import decode, encode
from msgspec.structs import replace

from kneewatch.agent.notify.events import DedupKey, Event, Key, is_resolved, problems
from kneewatch.agent.notify.message import Message, identity
from kneewatch.agent.notify.receivers import Receiver
from kneewatch.agent.target_state import TargetState
from kneewatch.collector.files import read_file, replace_file
from kneewatch.diagnose.engine.target_monitor import ENGINES_MAX
from kneewatch.diagnose.ranking import OF_LATENCY, WAITS_FOR
from kneewatch.rules.cascade import EVICTS
from kneewatch.rules.rule import BY_WORD, Severity

ACTIVE_MAX = ENGINES_MAX
"""Maximum number of active problems per target. It matters if labels change with every scrape: each
change looks like a new engine."""

_TWINS = (
    ("queue_saturation", "admission_limit"),
    ("prefix_reuse_lost", "routing_dilution"),
    ("target_down", "engine_restarted"),
)
TWINS = {name: other for pair in _TWINS for name, other in (pair, pair[::-1])}
"""Two names of one problem. Which limit holds a batch shows only once the batch has filled; that
routing loses the prefix cache's hits, only once most replicas have lost them; that a replica which
is down crashes again and again, only once it has answered."""

DEVELOPS_S = 60.0
"""Seconds for which a new problem develops: a queue grows and a warning becomes critical, or the
window fills with slow requests and shows another cause.

So the first message about a warning of DEVELOPING is held that long, and until a second scrape
shows it; a message that a problem got worse comes at least that long after the message before it.
"""

DEVELOPING = WAITS_FOR | OF_LATENCY

HARM = ("ttft_p50_s", "itl_p50_s", "itl_stall_time_ratio", "waiting", "preemption_ratio_per_s")
"""What requests suffer from a problem of DEVELOPING: latency, pauses, a queue, preemptions. P99
jumps by a bucket of its histogram, and no latency is critical by it."""

HARM_GROWS_BY = 0.25
"""Share by which one of them must exceed its value in the message before: a median at its target
crosses it by chance, and a rule's duration passes, while nothing gets worse."""

GONE_SCRAPES = 2
"""Minimum number of scrapes without a problem before it is resolved, however far apart the scrapes
are."""


class ActiveProblem(Struct):
    """A problem that is active for a receiver.

    `severity` and `stage` are the worst so far; `notified` are the worst that were delivered.
    `notified_s` is the time of the last delivered message about the problem; None before the first.
    `shown_s` is the moment that the newest message is about, and `advised_last` the change that it
    advised; `advised` is that of the newest scrape. `shown_s` is None before the first.
    `shown_values` are the signals at that moment.
    `is_sent`: a message is queued or delivered; `is_end_sent`: that of its end too. `gone_s`
    is the time since when the problem is absent, and `gone_scrapes` the number of scrapes without
    it. `ended_s` and `how` are set when the problem is resolved. `restored`: the problem was read
    from the state file. `newest` is the problem at the newest scrape that shows it.
    """

    severity: Severity
    stage: int
    since_s: float
    notified: tuple[Severity, int] | None = None
    notified_s: float | None = None
    shown_s: float | None = None
    shown_values: Mapping[str, float | None] = {}
    advised_last: str = ""
    advised: str = ""
    is_sent: bool = False
    is_end_sent: bool = False
    ended_s: float | None = None
    how: str = ""
    gone_s: float | None = None
    gone_scrapes: int = 0
    restored: bool = False
    serial: int = 0
    newest: Event | None = None


class AlertState:
    """The active problems of one receiver. Not thread-safe."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._active: dict[Key, ActiveProblem] = {}
        self._by_target: dict[str, set[Key]] = {}
        self._first_s: dict[str, float] = {}
        self._labels: dict[str, Mapping[str, str]] = {}
        self._serials = count(1)
        self.is_changed = False

    def update(self, state: TargetState) -> list[Event]:
        """The events that follow from a target's newest state."""
        if not self._receiver.matches(state.name, state.labels):
            return []
        quiet = state.severity < self._receiver.severity
        if quiet and state.name not in self._by_target and state.name in self._first_s:
            return []
        first_s = min(self._first_s.get(state.name, state.t_s), state.t_s)
        self._first_s[state.name], self._labels[state.name] = first_s, state.labels
        now = self._relevant(problems(state, min(self._receiver.severity, Severity.WARNING)))
        events = [
            event for problem in now.values() if (event := self._update_present(problem, state.t_s))
        ]
        for key in sorted(self._by_target.get(state.name, set()) - now.keys()):
            # After a restart the diagnosis needs some scrapes before an absent problem means much.
            active = self._active[key]
            settled = not active.restored or state.t_s - first_s >= self._receiver.hold_s
            if settled and is_resolved(key, state.diagnoses):
                event = self._update_absent(key, state.t_s)
                events += [event] if event else []
            else:
                active.gone_s, active.gone_scrapes = None, 0
        return events

    def _relevant(self, present: Mapping[Key, Event]) -> dict[Key, Event]:
        """The problems as severe as the receiver wants, and those that were. One that goes on under
        the name of its twin keeps the name that was sent."""
        continued: dict[Key, Event] = {}
        for key, problem in present.items():
            before = key._replace(id=TWINS.get(key.id, key.id))
            twin = self._active.get(before)
            goes_on = twin is not None and twin.ended_s is None
            if key not in self._active and goes_on and before not in present:
                continued[before] = replace(problem, key=before)
            else:
                continued[key] = problem
        return {
            key: problem
            for key, problem in continued.items()
            if problem.severity >= self._receiver.severity or key in self.active(key.target)
        }

    def drop(self, target: str, t_s: float) -> list[Event]:
        """The events that end all problems of a target because it is no longer watched."""
        self._first_s.pop(target, None)
        events: list[Event] = []
        for key in sorted(self._by_target.get(target, set())):
            event = self._resolve(key, t_s, t_s, "no longer watched")
            events += [event] if event else []
        self._labels.pop(target, None)
        return events

    def repeated(self) -> list[Event]:
        """The unresolved problems as they were last seen, each as the event that it began."""
        return [
            replace(
                active.newest,
                severity=active.severity,
                stage=active.stage,
                since_s=active.since_s,
                serial=active.serial,
            )
            for active in self.active().values()
            if active.newest is not None
        ]

    def sent(self, event: Event) -> bool:
        """Mark the problem of an event as sent. Returns False if the problem is already over."""
        active = self._active.get(event.key)
        if active is None or active.serial != event.serial:
            return False
        active.is_sent, active.is_end_sent = True, event.kind == "ended"
        return True

    def delivered(self, *events: Event) -> None:
        """Mark events as delivered."""
        for event in events:
            active = self._active.get(event.key)
            if active is None or active.serial != event.serial:  # a later problem with the same key
                continue
            self.is_changed = True
            if event.kind == "ended":
                self._forget(event.key)
            else:
                active.notified_s = event.t_s
                severity, stage = active.notified or (event.severity, event.stage)
                active.notified = max(severity, event.severity), max(stage, event.stage)

    def active(self, target: str | None = None) -> Mapping[Key, ActiveProblem]:
        """The unresolved problems of a target, or of all targets, whose first message is due."""
        keys = self._active if target is None else self._by_target.get(target, ())
        return {
            key: active
            for key in keys
            if (active := self._active[key]).ended_s is None and active.shown_s is not None
        }

    def targets(self) -> list[str]:
        """The names of targets that have active problems, sorted."""
        return sorted(self._by_target)

    def rows(self) -> list[dict[str, Any]]:
        """The state as JSON values, to be restored after a restart."""
        self.is_changed = False
        return [
            {
                **key._asdict(),
                "severity": severity.word,
                "stage": stage,
                "since": active.since_s,
                "told": active.notified_s,
                "ended": active.ended_s,
                "how": active.how,
            }
            for key, active in self._active.items()
            for severity, stage in [active.notified or (active.severity, active.stage)]
        ]

    def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Load what `rows` returned before a restart.

        Raises:
            KeyError, TypeError, ValueError: the rows are malformed.
        """
        for row in rows:
            notified_s, ended_s = row["told"], row["ended"]
            severity, stage = BY_WORD[row["severity"]], int(row["stage"])
            active = ActiveProblem(
                severity,
                stage,
                float(row["since"]),
                notified=None if notified_s is None else (severity, stage),
                notified_s=None if notified_s is None else float(notified_s),
                shown_s=None if notified_s is None else float(notified_s),
                is_sent=notified_s is not None,
                ended_s=None if ended_s is None else float(ended_s),
                how=str(row["how"]),
                restored=True,
            )
            self._keep(Key(*(str(row[name]) for name in Key._fields)), active)
        self.is_changed = False

    def _update_present(self, problem: Event, t_s: float) -> Event | None:
        key, active = problem.key, self._active.get(problem.key)
        if active is None and len(self._by_target.get(key.target, ())) >= ACTIVE_MAX:
            return None
        if active and active.ended_s is not None and active.notified and not active.is_end_sent:
            # It is back: the message that it ended is out of date.
            active.ended_s, active.how, active.serial = None, "", next(self._serials)
        if active is None or active.ended_s is not None:
            active = ActiveProblem(problem.severity, problem.stage, problem.since_s)
            self._keep(key, active)
        active.gone_s, active.gone_scrapes, active.restored = None, 0, False
        last, active.newest = active.newest, problem
        if active.shown_s is None:
            active.severity = max(problem.severity, active.severity)
            active.stage = max(problem.stage, active.stage)
            if _develops(active, problem, last):
                return None
            return _shown(active, problem)
        if problem.is_ending:
            return None
        active.advised = problem.advised or active.advised
        before = active.severity
        deeper = problem.stage > max(active.stage, EVICTS - 1) and problem.severity >= before
        worse = deeper or (problem.severity > before and not _is_as_before(active, problem))
        if worse and active.notified_s is not None and 0 <= t_s - active.notified_s < DEVELOPS_S:
            return None
        active.stage = max(problem.stage, active.stage)
        if worse:
            active.severity = max(problem.severity, before)
            self.is_changed = True
            return _shown(active, replace(problem, kind="worse", before=before))
        repeat_s = self._receiver.repeat_s
        if repeat_s is not None and active.is_sent and t_s - active.shown_s >= repeat_s:
            return _shown(active, replace(problem, kind="still"))
        return None

    def _update_absent(self, key: Key, t_s: float) -> Event | None:
        active = self._active[key]
        if active.ended_s is not None:  # after a restart, sent again until it is delivered
            return self._resolve(key, active.ended_s, t_s, active.how) if active.restored else None
        if active.gone_s is None or t_s < active.gone_s:  # also where the clock was set back
            active.gone_s = t_s
        active.gone_scrapes += 1
        if active.gone_scrapes < GONE_SCRAPES or t_s - active.gone_s < self._receiver.hold_s:
            return None
        return self._resolve(key, active.gone_s, t_s, "")

    def _resolve(self, key: Key, ended_s: float, t_s: float, how: str) -> Event | None:
        active = self._active[key]
        self.is_changed = True
        if not active.is_sent:  # nobody was notified
            self._forget(key)
            return None
        active.ended_s, active.how, active.restored = ended_s, how, False
        return Event(
            "ended",
            key,
            active.severity,
            active.stage,
            active.since_s,
            t_s,
            ended_s=ended_s,
            how=how,
            left=() if how else self._still_active(key),
            serial=active.serial,
            shown_s=active.since_s if active.shown_s is None else active.shown_s,
            advised=active.advised,
            advised_before=_advised_before(active),
            labels=self._labels.get(key.target, {}),
        )

    def _still_active(self, ended: Key) -> tuple[str, ...]:
        """The ids of other active problems: those of the same engine and those of the target as a
        whole. After the end of a problem of the whole target: those of all its engines."""
        whole = (ended.target, "", "")
        return tuple(
            sorted(
                {
                    key.id
                    for key in self.active(ended.target)
                    if key != ended and (ended[:3] == whole or key[:3] in (ended[:3], whole))
                }
            )
        )

    def _keep(self, key: Key, active: ActiveProblem) -> None:
        active.serial = next(self._serials)
        self._active[key] = active
        self._by_target.setdefault(key.target, set()).add(key)
        self.is_changed = True

    def _forget(self, key: Key) -> None:
        self._active.pop(key, None)
        keys = self._by_target.get(key.target, set())
        keys.discard(key)
        if not keys:
            self._by_target.pop(key.target, None)


def _shown(active: ActiveProblem, problem: Event) -> Event:
    """The event of a message about a problem as it is now."""
    active.advised = problem.advised or active.advised
    before = _advised_before(active)
    active.advised_last, active.shown_s = active.advised, problem.t_s
    active.shown_values = problem.diagnosis.values if problem.diagnosis else {}
    return replace(problem, since_s=active.since_s, serial=active.serial, advised_before=before)


def _advised_before(active: ActiveProblem) -> str:
    """What the message before advised, unless it is what is advised now."""
    return active.advised_last if active.advised_last != active.advised else ""


def _develops(active: ActiveProblem, problem: Event, last: Event | None) -> bool:
    """Whether a problem is new, and its severity or name may still change, or it is ending before
    a message was due. `last` is the problem when it was last looked at; None at first."""
    if active.severity >= Severity.CRITICAL or problem.key.id not in DEVELOPING:
        return False
    if last is None or 0 <= problem.t_s - active.since_s < DEVELOPS_S:
        return True
    # Between two looks at a fleet are many scrapes. A problem that one of them showed comes and
    # goes, as preemptions do: it is not over because the newest one does not show it.
    seen_s = problem.cause.seen_s if problem.cause else None
    return problem.is_ending and (seen_s is None or seen_s <= last.t_s)


def _is_as_before(active: ActiveProblem, problem: Event) -> bool:
    """Whether requests suffer as at the message before. False where that is unknown, and in the
    cascade, whose stages say how much it is."""
    if problem.key.id not in DEVELOPING or problem.stage or problem.diagnosis is None:
        return False
    pairs = [(active.shown_values.get(name), problem.diagnosis.values.get(name)) for name in HARM]
    both = [(was, now) for was, now in pairs if was is not None and now is not None]
    return bool(both) and all(now <= was * (1 + HARM_GROWS_BY) for was, now in both)


# --- The state file -------------------------------------------------------------------------------


log = logging.getLogger(__name__)

SCHEMA = "kneewatch.notify/1"
LARGEST_BYTES = 16 * 1024 * 1024


def state_path(store: Path) -> Path:
    """The path of the alert state file; it is in the folder of the store."""
    return store.with_name(f"{store.stem}.notify.json")


class Stored(Struct, frozen=True):
    """A forwarded message in the outbox folder, with the keys of its alerts."""

    receiver: str
    queued_s: float
    keys: tuple[DedupKey, ...]
    message: Message


MESSAGE_MAX_BYTES = 16 * 1024 * 1024
FILES_MAX = 4096
"""Most messages in the outbox folder. The oldest are lost: a receiver that is gone must neither
fill the disk nor make the next start take minutes."""


class OutboxFolder:
    """The forwarded messages that are not delivered yet: a file each, written before Alertmanager
    gets an answer. With `path` None nothing is stored."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._is_failing = path, False

    def problem(self) -> str:
        """Whether the newest message could not be stored; empty if it was."""
        return "cannot store messages: they are lost if kneewatch ends" if self._is_failing else ""

    def add(self, stored: Stored) -> Path | None:
        """Store a message. Returns its file. If that fails, the error is logged once, and the
        message is lost if the process ends before it is delivered."""
        if self._path is None:
            return None
        file = self._path / f"{identity(stored.receiver, stored.message.id)}.json"
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
            replace_file(file, encode(stored))
            self._files()
        except OSError as exc:
            if not self._is_failing:
                log.error("notify: cannot store messages folder=%s error=%s", self._path, exc)  # noqa: TRY400
            self._is_failing = True
            return None
        self._is_failing = False
        return file

    def waiting(self, receiver: str) -> Iterator[tuple[Path, Stored]]:
        """The stored messages of a receiver, oldest first."""
        for file in self._files():
            stored = self.read(file)
            if stored is not None and stored.receiver == receiver:
                yield file, stored

    def _files(self) -> Sequence[Path]:
        """The stored messages, oldest first, once those beyond `FILES_MAX` are deleted."""
        if self._path is None or not self._path.is_dir():
            return ()
        dated: list[tuple[int, Path]] = []
        for file in self._path.glob("*.json"):
            with suppress(OSError):  # it was delivered meanwhile
                dated.append((file.stat().st_mtime_ns, file))
        files = [file for _, file in sorted(dated)]
        for file in files[:-FILES_MAX]:
            file.unlink(missing_ok=True)
        if len(files) > FILES_MAX:
            lost = len(files) - FILES_MAX
            log.error("notify: too many stored messages, oldest lost messages=%s", lost)
        return files[-FILES_MAX:]

    def read(self, file: Path) -> Stored | None:
        """A stored message. None if it cannot be read, which is logged."""
        try:
            return decode(read_file(file, MESSAGE_MAX_BYTES), type=Stored)
        except (OSError, ValueError) as exc:
            log.error("notify: unreadable stored message file=%s error=%s", file, exc)  # noqa: TRY400
            return None


class StateFile:
    """The alert state of all receivers in one JSON file. Each change replaces the whole file.

    Thread-safe. With `path` None the state is kept only in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = Lock()
        self._receivers = _read(path) if path is not None else {}
        self._is_failing = False
        self.outbox = OutboxFolder(path and path.with_suffix(".outbox"))

    def get(self, receiver: str) -> Mapping[str, Any]:
        """The stored state of a receiver; empty if there is none."""
        return self._receivers.get(receiver, {})

    def keep(self, receiver: str, state: Mapping[str, Any]) -> None:
        """Store the state of a receiver. If that fails, the error is logged once, and receivers may
        get duplicate notifications after the next start."""
        with self._lock:
            self._receivers[receiver] = state
            if self._path is None:
                return
            try:
                document = {"schema": SCHEMA, "receivers": self._receivers}
                replace_file(self._path, json.dumps(document).encode())
            except OSError as exc:
                if not self._is_failing:
                    log.warning(
                        "notify: cannot write the alert state file=%s error=%s", self._path, exc
                    )
                self._is_failing = True
            else:
                self._is_failing = False


def _read(path: Path) -> dict[str, Mapping[str, Any]]:
    try:
        document = json.loads(read_file(path, LARGEST_BYTES))
        rows = cast("dict[str, Any]", document["receivers"])
        return {name: state for name, state in rows.items() if isinstance(state, dict)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        log.warning(
            "notify: alert state lost, expect duplicate notifications file=%s error=%s",
            path, type(exc).__name__,
        )  # fmt: skip
        return {}
