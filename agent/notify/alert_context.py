"""Context of an alert: which targets it is about, and their diagnosis when it began."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kneewatch.agent.notify.message import Line
from kneewatch.collector.errors import CollectError, KneewatchError
from kneewatch.collector.http.address import parse_target
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.reports import recommendation_text as advice
from kneewatch.reports.diagnosis_json import DocumentError, diagnosis_of
from kneewatch.reports.diagnosis_text import VERDICTS, who
from kneewatch.reports.formatting import moment

if TYPE_CHECKING:
    from kneewatch.agent.store.reader import Reader
    from kneewatch.agent.store.records import StoredEngine


NAMES = ("kneewatch_target", "target")
"""Labels that hold a target's name, as kneewatch's own metrics have it."""

EXPORTED = ("instance", "pod", "namespace", "job", "node", "container")
"""Without honorLabels Prometheus puts a page's own label under exported_, and the scraper's in its
place: the workload's is the exported one."""

MODEL = "model_name"
PODS = ("pod", "pod_name")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})
LOCAL = "loopback"
IGNORED_LABELS = frozenset({"alertname", "severity"})
"""Labels of the rule, not of what it is about."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A target as far as alerts can tell it. `models` and `engines` are those it has or had."""

    name: str
    address: str
    labels: Mapping[str, str]
    models: frozenset[str] = frozenset()
    engines: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Hit:
    """A target that an alert is about, and the labels that say so. `exact`: they identify it."""

    target: str
    by: tuple[str, ...]
    exact: bool


@dataclass(frozen=True, slots=True)
class Match:
    """What was found for an alert, and in words how, or why nothing was. `model` and `engine` are
    what the alert names of them: other engines of the target are not meant."""

    hits: tuple[Hit, ...]
    text: str
    model: str | None
    engine: str | None


@dataclass(slots=True)
class _Case:
    """What speaks for and against a target."""

    exact: list[str] = field(default_factory=list[str])
    shared: list[str] = field(default_factory=list[str])
    against: list[str] = field(default_factory=list[str])


def match(alert: Mapping[str, str], candidates: Sequence[Candidate]) -> Match:
    """The targets that an alert with these labels is about."""
    labels = {**alert, **{n: alert[f"exported_{n}"] for n in EXPORTED if f"exported_{n}" in alert}}
    cases = {one.name: _case(labels, one) for one in candidates}
    hits = [
        Hit(name, tuple(case.exact + case.shared), exact=True)
        for name, case in cases.items()
        if case.exact and not case.against
    ] or [
        Hit(name, tuple(case.shared), exact=False)
        for name, case in cases.items()
        if case.shared and not case.against
    ]
    told = _words(labels, hits, cases)
    return Match(tuple(hits), told, labels.get(MODEL) or None, labels.get("engine") or None)


def _case(labels: Mapping[str, str], target: Candidate) -> _Case:
    case = _Case()
    for name in NAMES:
        if labels.get(name) == target.name:
            case.exact.append(f"{name}={target.name}")
    own = dict(target.labels)
    _pod(case, labels, own)
    _instance(case, labels, own, target.address)
    known: dict[str, frozenset[str]] = {name: frozenset({told}) for name, told in own.items()}
    known[MODEL] = target.models
    for name, values in known.items():
        told = labels.get(name)
        if told and values and name not in IGNORED_LABELS | {"instance", "engine", *PODS}:
            (case.shared if told in values else case.against).append(f"{name}={told}")
    # That two have an engine 0 says nothing; that one has no engine 3 does.
    engine = labels.get("engine")
    if engine and target.engines and engine not in target.engines:
        case.against.append(f"engine={engine}")
    return case


def _pod(case: _Case, labels: Mapping[str, str], own: Mapping[str, str]) -> None:
    told = next(((n, labels[n]) for n in PODS if labels.get(n)), None)
    pod = next((own[n] for n in PODS if own.get(n)), None)
    if told is None or pod is None:
        return
    (case.exact if told[1] == pod else case.against).append(f"{told[0]}={told[1]}")


def _instance(case: _Case, labels: Mapping[str, str], own: Mapping[str, str], address: str) -> None:
    """A target's address can be known by other names: one that differs speaks against it only
    where nothing else identifies it, and says nothing against a loopback address."""
    told = labels.get("instance")
    if not told:
        return
    if told == own.get("instance") or told == address:
        case.exact.append(f"instance={told}")
        return
    theirs, ours = _host_port(told), _host_port(address)
    if ours is None or theirs is None:
        return
    if theirs == ours:
        case.exact.append(f"instance={told}")
    elif ours[0] == LOCAL:
        return
    elif theirs[0] == ours[0]:  # another port of the same machine: a GPU exporter, a proxy
        case.shared.append(f"host of instance={told}")
    elif not case.exact:
        case.against.append(f"instance={told}")


def _host_port(text: str) -> tuple[str, int] | None:
    try:
        address = parse_target(text)
    except CollectError:
        return None
    host = address.host.lower().rstrip(".")
    return (LOCAL if host in LOOPBACK else host), address.port


def _words(labels: Mapping[str, str], hits: Sequence[Hit], cases: Mapping[str, _Case]) -> str:
    if len(hits) == 1:
        by = ", ".join(hits[0].by)
        told = f"matched {hits[0].target} by {by}"
        return told if hits[0].exact else f"{told}, which it shares; nothing in it names a target"
    if hits:
        by = ", ".join(dict.fromkeys(one for hit in hits for one in hit.by))
        how = "by" if hits[0].exact else "by labels that they share:"
        return f"matched {len(hits)} targets {how} {by}"
    near = {
        name: case.against
        for name, case in cases.items()
        if case.against and (case.shared or case.exact)
    }
    if near:
        name, against = next(iter(near.items()))
        more = f" (and {len(near) - 1} more)" if len(near) > 1 else ""
        return f"nothing matched: {name}{more} is near, but {', '.join(against)} differs"
    if not cases:
        return "nothing matched: no target is watched"
    tried = ", ".join(sorted(labels.keys() - IGNORED_LABELS)) or "none"
    return f"nothing matched: no target has its labels ({tried})"


# --- Engines at the moment an alert began, from the history, and what is said of them -------------


log = logging.getLogger(__name__)

EngineName = tuple[str, str]
"""Model and engine."""

UNREADABLE = "unknown, what was kept cannot be told"
RANKS = {word: n for n, word in enumerate(("ok", "info", "unknown", "warning", "critical"))}


@dataclass(frozen=True, slots=True)
class AlertContext:
    """One engine when an alert began, and now. `why` says why there is nothing of the start."""

    target: str
    model: str
    engine: str
    start: Mapping[str, Any] | None
    now: Diagnosis | None
    why: str

    def lines(self, starts_s: float, now_s: float) -> list[Line]:
        """What to tell a person of it."""
        start = _read(self.start)
        one = self.now or start
        lines = [Line(f"at {moment(starts_s, now_s)}", _verdict(start) or self.why or UNREADABLE)]
        lines.append(Line("now", _verdict(self.now) or "unknown, it is not watched any more"))
        if one is not None:
            lines[0] = Line("", f"{who(one)}: {lines[0].plain()}")
        ill = next((d for d in (self.now, start) if d is not None and d.causes), None)
        return [*lines, *_lever(ill)] if ill else lines


class Past:
    """The history as far as alerts ask for it. Without one, or where it cannot be read, it knows
    nothing and says why."""

    def __init__(self, reader: Reader | None) -> None:
        self._reader = reader
        self._why = "" if reader is not None else "no history is kept"
        self._stored: dict[str, dict[EngineName, list[StoredEngine]]] = {}
        if reader is None:
            return
        try:
            rows = reader.engines()
        except KneewatchError as exc:
            self._failed(exc)
            return
        for row in rows:
            engines = self._stored.setdefault(row.target, {})
            engines.setdefault((row.model, row.engine), []).append(row)

    def engines(self, target: str) -> AbstractSet[EngineName]:
        """The engines that a target has had."""
        return self._stored.get(target, {}).keys()

    def document(
        self, target: str, engine: EngineName, at_s: float
    ) -> tuple[dict[str, Any] | None, str]:
        """The diagnosis in force at a moment, of the worst of an engine's replicas; or why there
        is none."""
        found: list[dict[str, Any]] = []
        damaged = False
        for row in self._stored.get(target, {}).get(engine, ()):
            try:
                look = self._reader.look(row.id, at_s) if self._reader else None
            except KneewatchError as exc:
                self._failed(exc)
            else:
                damaged = damaged or (look is not None and look.damaged)
                found += [look.document] if look and look.document is not None else []
        if found:
            return max(found, key=lambda one: RANKS.get(one.get("health", ""), 0)), ""
        if damaged:
            return None, "unknown, the history is damaged there"
        return None, self._why or "unknown, it was not watched then"

    def _failed(self, error: KneewatchError) -> None:
        log.warning("alerts: the history cannot be read error=%s", error)
        self._why = "unknown, the history cannot be read"


def _read(kept: Mapping[str, Any] | None) -> Diagnosis | None:
    try:
        return None if kept is None else diagnosis_of(kept)
    except DocumentError as exc:
        log.warning("alerts: a stored diagnosis cannot be told error=%s", exc)
        return None


def _verdict(diagnosis: Diagnosis | None) -> str:
    if diagnosis is None:
        return ""
    told = VERDICTS[diagnosis.health]
    if first := diagnosis.headline:
        causes = {cause.id: f": {cause.summary}" for cause in diagnosis.causes}
        told += f" {first}{causes.get(first, '')}"
    stage = diagnosis.stage
    return f"{told} (KV cascade stage {stage.number}, {stage.name})" if stage else told


def _lever(diagnosis: Diagnosis) -> list[Line]:
    cause = diagnosis.causes[0]
    made = advice.advised(diagnosis, cause)
    if not made:
        return [Line("do first", cause.lever)]
    return [Line("do first", made[0].summary, advice.changes_words(made[0]))]
