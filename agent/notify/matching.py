"""Which targets an alert is about, by its labels, and how that is known. Pure.

A target is matched by what identifies it (its name, its address, its pod) or, where the alert has
nothing of that, by labels that it shares (model, engine, job, the user's own). What differs rules
it out. An alert that identifies something else matches nothing: a label shared by chance is no
match. How it was matched is always said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kneewatch.collector.base import CollectError
from kneewatch.collector.http.address import parse_target

NAMES = ("kneewatch_target", "target")
"""Labels that hold a target's name, as kneewatch's own metrics have it."""

EXPORTED = ("instance", "pod", "namespace", "job", "node", "container")
"""Without honorLabels Prometheus puts a page's own label under exported_, and the scraper's in its
place: the workload's is the exported one."""

MODEL = "model_name"
PODS = ("pod", "pod_name")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})
LOCAL = "loopback"
UNTOLD = frozenset({"alertname", "severity"})
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
        if told and values and name not in UNTOLD | {"instance", "engine", *PODS}:
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
    tried = ", ".join(sorted(labels.keys() - UNTOLD)) or "none"
    return f"nothing matched: no target has its labels ({tried})"
