"""Alert state of a receiver: what it was sent, what is due, kept over restarts. I/O edge."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, cast

from kneewatch.agent.notify.events import Event, Key, Trouble, What, is_over, troubles
from kneewatch.agent.notify.receivers import Receiver
from kneewatch.agent.target_state import TargetState
from kneewatch.diagnose.engine.cardinality_limit import ENGINES_MAX
from kneewatch.rules.rule import WORDS, Severity

SEVERITIES = {word: severity for severity, word in WORDS.items()}
HELD_MAX = ENGINES_MAX
"""Troubles held of one target: labels that change with every scrape have no end of them. A message
names fewer."""

GONE_SCRAPES = 2
"""A trouble is missed by this many scrapes at least, however far apart the clock says they are."""


@dataclass(slots=True)
class Held:
    """A trouble that goes on, as far as the receiver is concerned.

    `told_s` is None until its beginning has been delivered, `is_sent` says that it is on its way
    at least. `ended_s` and `how` are set once its end is due to be told, `gone_s` while it is away.
    `severity` and `stage` are the worst seen, `told` those of them that have been delivered.
    """

    severity: Severity
    stage: int
    since_s: float
    told: tuple[Severity, int] | None = None
    told_s: float | None = None
    is_sent: bool = False
    ended_s: float | None = None
    how: str = ""
    gone_s: float | None = None
    gone_scrapes: int = 0
    restored: bool = False
    serial: int = 0


class AlertState:
    """The troubles of one receiver. Not safe between threads."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._held: dict[Key, Held] = {}
        self._by_target: dict[str, set[Key]] = {}
        self._first_s: dict[str, float] = {}
        self._serials = count(1)
        self.is_changed = False

    def update(self, state: TargetState) -> list[Event]:
        """What a target's newest state gives to tell."""
        if not self._receiver.wants(state.name, state.labels):
            return []
        quiet = state.severity < self._receiver.severity
        if quiet and state.name not in self._by_target and state.name in self._first_s:
            return []
        first_s = min(self._first_s.get(state.name, state.t_s), state.t_s)
        self._first_s[state.name] = first_s
        now = {} if quiet else troubles(state, self._receiver.severity)
        events = [event for one in now.values() if (event := self._seen(one, state.t_s))]
        for key in sorted(self._by_target.get(state.name, set()) - now.keys()):
            # After a start, what was known before has to be concluded anew: that takes a while.
            held = self._held[key]
            settled = not held.restored or state.t_s - first_s >= self._receiver.hold_s
            if settled and is_over(key, state.diagnoses):
                event = self._missed(key, state.t_s)
                events += [event] if event else []
            else:
                held.gone_s, held.gone_scrapes = None, 0
        return events

    def drop(self, target: str, t_s: float) -> list[Event]:
        """What is to tell when a target is no longer watched: nobody is left waiting for an end."""
        self._first_s.pop(target, None)
        events: list[Event] = []
        for key in sorted(self._by_target.get(target, set())):
            event = self._end(key, t_s, t_s, "no longer watched")
            events += [event] if event else []
        return events

    def sent(self, event: Event) -> bool:
        """Take an event as on its way; False where it is no longer worth telling."""
        held = self._held.get(event.key)
        if held is None or held.serial != event.serial:
            return False
        held.is_sent = True
        return True

    def delivered(self, event: Event) -> None:
        """The receiver has it, or never will: both are the end of telling it."""
        held = self._held.get(event.key)
        if held is None or held.serial != event.serial:  # a later trouble of the same name
            return
        self.is_changed = True
        if event.what == "ended":
            self._forget(event.key)
        else:
            held.told_s = event.t_s
            severity, stage = held.told or (event.severity, event.stage)
            held.told = max(severity, event.severity), max(stage, event.stage)

    def targets(self) -> list[str]:
        """Targets that something is held of."""
        return sorted(self._by_target)

    def rows(self) -> list[dict[str, Any]]:
        """What must be known after a restart, ready for JSON."""
        self.is_changed = False
        return [
            {
                **key._asdict(),
                "severity": severity.word,
                "stage": stage,
                "since": held.since_s,
                "told": held.told_s,
                "ended": held.ended_s,
                "how": held.how,
            }
            for key, held in self._held.items()
            for severity, stage in [held.told or (held.severity, held.stage)]
        ]

    def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take what `rows` gave before a restart.

        Raises:
            KeyError, TypeError, ValueError: they are not what it gave.
        """
        for row in rows:
            told_s, ended_s = row["told"], row["ended"]
            severity, stage = SEVERITIES[row["severity"]], int(row["stage"])
            held = Held(
                severity,
                stage,
                float(row["since"]),
                told=None if told_s is None else (severity, stage),
                told_s=None if told_s is None else float(told_s),
                is_sent=told_s is not None,
                ended_s=None if ended_s is None else float(ended_s),
                how=str(row["how"]),
                restored=True,
            )
            self._keep(Key(*(str(row[name]) for name in Key._fields)), held)
        self.is_changed = False

    def _seen(self, trouble: Trouble, t_s: float) -> Event | None:
        key, held = trouble.key, self._held.get(trouble.key)
        if held is None and len(self._by_target.get(key.target, ())) >= HELD_MAX:
            return None
        if held is None or held.ended_s is not None:
            held = Held(trouble.severity, trouble.stage, trouble.since_s)
            self._keep(key, held)
            return _event("began", trouble, held)
        untold = held.restored and held.told_s is None
        held.gone_s, held.gone_scrapes, held.restored = None, 0, False
        before = held.severity
        worse = trouble.severity > before or trouble.stage > held.stage
        if worse:
            held.severity = max(trouble.severity, before)
            held.stage = max(trouble.stage, held.stage)
            self.is_changed = True
        if untold:
            return _event("began", trouble, held)
        if worse:
            return _event("worse", trouble, held, before=before)
        repeat_s = self._receiver.repeat_s
        if repeat_s is not None and held.told_s is not None and t_s - held.told_s >= repeat_s:
            held.told_s = t_s
            return _event("still", trouble, held)
        return None

    def _missed(self, key: Key, t_s: float) -> Event | None:
        held = self._held[key]
        if held.ended_s is not None:  # told again after a restart, until it is delivered
            return self._end(key, held.ended_s, t_s, held.how) if held.restored else None
        if held.gone_s is None or t_s < held.gone_s:  # also where the clock was set back
            held.gone_s = t_s
        held.gone_scrapes += 1
        if held.gone_scrapes < GONE_SCRAPES or t_s - held.gone_s < self._receiver.hold_s:
            return None
        return self._end(key, held.gone_s, t_s, "")

    def _end(self, key: Key, ended_s: float, t_s: float, how: str) -> Event | None:
        held = self._held[key]
        self.is_changed = True
        if not held.is_sent:  # nobody knows of it
            self._forget(key)
            return None
        held.ended_s, held.how, held.restored = ended_s, how, False
        return Event(
            "ended",
            key,
            held.severity,
            held.stage,
            held.since_s,
            t_s,
            ended_s=ended_s,
            how=how,
            left=self._left(key),
            serial=held.serial,
        )

    def _left(self, ended: Key) -> tuple[str, ...]:
        """What else is wrong with an engine, or with its whole target."""
        return tuple(
            sorted(
                key.id
                for key in self._by_target.get(ended.target, ())
                if self._held[key].ended_s is None
                and key[:3] in (ended[:3], (ended.target, "", ""))
            )
        )

    def _keep(self, key: Key, held: Held) -> None:
        held.serial = next(self._serials)
        self._held[key] = held
        self._by_target.setdefault(key.target, set()).add(key)
        self.is_changed = True

    def _forget(self, key: Key) -> None:
        self._held.pop(key, None)
        keys = self._by_target.get(key.target, set())
        keys.discard(key)
        if not keys:
            self._by_target.pop(key.target, None)


def _event(what: What, trouble: Trouble, held: Held, *, before: Severity | None = None) -> Event:
    return Event(
        what,
        trouble.key,
        trouble.severity,
        trouble.stage,
        held.since_s,
        trouble.diagnosis.t_s,
        before=before,
        diagnosis=trouble.diagnosis,
        cause=trouble.cause,
        serial=held.serial,
    )


# --- What receivers have been told, kept in a small JSON file over restarts. I/O edge -------------


log = logging.getLogger(__name__)

SCHEMA = "kneewatch.notify/1"
LARGEST_BYTES = 16 * 1024 * 1024


def memory_file(store: Path) -> Path:
    """Where the memory of a daemon with this store is: beside the store."""
    return store.with_name(f"{store.stem}.notify.json")


class Memory:
    """The file, replaced as a whole at each change. Safe between threads. Without a path it lasts
    as long as the process."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = Lock()
        self._receivers = _read(path) if path is not None else {}
        self._is_failing = False

    def get(self, receiver: str) -> Mapping[str, Any]:
        """What was kept for a receiver; empty where there is nothing."""
        return self._receivers.get(receiver, {})

    def keep(self, receiver: str, kept: Mapping[str, Any]) -> None:
        """Keep this for a receiver. A disk that refuses is logged once, and told by duplicates
        after the next start."""
        with self._lock:
            self._receivers[receiver] = kept
            if self._path is None:
                return
            try:
                _replace(self._path, {"schema": SCHEMA, "receivers": self._receivers})
            except OSError as exc:
                if not self._is_failing:
                    log.warning(
                        "notify: cannot keep what was told file=%s error=%s", self._path, exc
                    )
                self._is_failing = True
            else:
                self._is_failing = False


def _replace(path: Path, document: Mapping[str, Any]) -> None:
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _read(path: Path) -> dict[str, Mapping[str, Any]]:
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(LARGEST_BYTES))
        rows = cast("dict[str, Any]", document["receivers"])
        return {name: kept for name, kept in rows.items() if isinstance(kept, dict)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        log.warning(
            "notify: what was told before is lost, some may be told again file=%s error=%s",
            path, type(exc).__name__,
        )  # fmt: skip
        return {}
