"""HTTP endpoint, `/api/v1/alerts`: the answer to Alertmanager's webhook, with the targets that each
alert is about, and their diagnoses when the alert started and now. I/O edge."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, field

from kneewatch.agent.api.responses import Problem
from kneewatch.agent.api.service import History, Service
from kneewatch.agent.notify.events import Alert, DiagnosedAlert, action_lines, payload_of
from kneewatch.agent.notify.message import Line
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import CollectError
from kneewatch.collector.http.address import parse_target
from kneewatch.diagnose.doc_links import OWN_DOCS, cause_page, linked
from kneewatch.diagnose.verdict import Verdict
from kneewatch.diagnose.verdict_json import documented
from kneewatch.reports.diagnosis_text import who
from kneewatch.reports.health import stage_known
from kneewatch.reports.lines import cut_after_sentence, moment
from kneewatch.rules.wire import UnixTime, to_ms

if TYPE_CHECKING:
    from kneewatch.agent.store.records import StoredEngine


NAMES = ("kneewatch_target", "target")
"""Labels of kneewatch's own metrics whose value is a target's name."""

EXPORTED = ("instance", "pod", "namespace", "job", "node", "container")
"""Labels that may occur twice. Without `honor_labels`, Prometheus renames such a label of the
scraped page to `exported_<label>`, and `<label>` describes the exporter. Then `exported_<label>`
describes the workload."""

MODEL = "model_name"
PODS = ("pod", "pod_name")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})
LOCAL = "loopback"
IGNORED_LABELS = frozenset({"alertname", "severity"})
"""Labels that describe the alerting rule, not the target."""


class Candidate(Struct, frozen=True):
    """A watched target that an alert may match. `models` and `engines` include those of the
    past."""

    name: str
    address: str
    labels: Mapping[str, str]
    models: frozenset[str] = frozenset()
    engines: frozenset[str] = frozenset()


class MatchedTarget(Struct, frozen=True):
    """A target that an alert matches.

    - `target`: the target's name.
    - `by`: the labels that matched.
    - `exact`: whether these labels identify the target.
    """

    target: str
    by: tuple[str, ...]
    exact: bool


class Match(Struct, frozen=True):
    """The targets of an alert.

    - `text`: how they matched, or why none did.
    - `targets`: the targets.
    - `model`, `engine`: the alert's label; null if it lacks it. It restricts the engines of a
      target.
    """

    text: str
    targets: tuple[MatchedTarget, ...]
    model: str | None
    engine: str | None


EXACT, SHARED, AGAINST = "exact", "shared", "against"
_Evidence = dict[str, list[str]]
"""Labels of an alert compared with those of a target: EXACT identify the target, SHARED are equal
but not unique, AGAINST differ."""


def match(alert: Mapping[str, str], candidates: Sequence[Candidate]) -> Match:
    """The targets that an alert with these labels is about."""
    labels = {**alert, **{n: alert[f"exported_{n}"] for n in EXPORTED if f"exported_{n}" in alert}}
    evidence_by_target = {candidate.name: _evidence(labels, candidate) for candidate in candidates}
    targets = [
        MatchedTarget(name, tuple(evidence[EXACT] + evidence[SHARED]), exact=True)
        for name, evidence in evidence_by_target.items()
        if evidence[EXACT] and not evidence[AGAINST]
    ] or [
        MatchedTarget(name, tuple(evidence[SHARED]), exact=False)
        for name, evidence in evidence_by_target.items()
        if evidence[SHARED] and not evidence[AGAINST]
    ]
    text = _explanation(labels, targets, evidence_by_target)
    return Match(text, tuple(targets), labels.get(MODEL) or None, labels.get("engine") or None)


def _evidence(labels: Mapping[str, str], target: Candidate) -> _Evidence:
    evidence: _Evidence = {EXACT: [], SHARED: [], AGAINST: []}
    for name in NAMES:
        if labels.get(name) == target.name:
            evidence[EXACT].append(f"{name}={target.name}")
    own = dict(target.labels)
    _pod(evidence, labels, own)
    _instance(evidence, labels, own, target.address)
    target_values: dict[str, frozenset[str]] = {
        name: frozenset({value}) for name, value in own.items()
    }
    target_values[MODEL] = target.models
    for name, values in target_values.items():
        value = labels.get(name)
        if value and values and name not in IGNORED_LABELS | {"instance", "engine", *PODS}:
            (evidence[SHARED] if value in values else evidence[AGAINST]).append(f"{name}={value}")
    # Every target has an engine 0, so an equal id proves nothing; an id that it lacks excludes it.
    engine = labels.get("engine")
    if engine and target.engines and engine not in target.engines:
        evidence[AGAINST].append(f"engine={engine}")
    return evidence


def _pod(evidence: _Evidence, labels: Mapping[str, str], own: Mapping[str, str]) -> None:
    alert_pod = next(((n, labels[n]) for n in PODS if labels.get(n)), None)
    own_pod = next((own[n] for n in PODS if own.get(n)), None)
    if alert_pod is None or own_pod is None:
        return
    (evidence[EXACT] if alert_pod[1] == own_pod else evidence[AGAINST]).append(
        f"{alert_pod[0]}={alert_pod[1]}"
    )


def _instance(
    evidence: _Evidence, labels: Mapping[str, str], own: Mapping[str, str], address: str
) -> None:
    """Compare the alert's label `instance` with a target's address.

    A host can have several names, so a different `instance` is evidence against a target only if no
    other label identifies the target. It is never evidence against a target with a loopback
    address.
    """
    instance = labels.get("instance")
    if not instance:
        return
    if instance == own.get("instance") or instance == address:
        evidence[EXACT].append(f"instance={instance}")
        return
    theirs, ours = _host_port(instance), _host_port(address)
    if ours is None or theirs is None:
        return
    if theirs == ours:
        evidence[EXACT].append(f"instance={instance}")
    elif ours[0] == LOCAL:
        return
    elif theirs[0] == ours[0]:  # another port of the same machine: a GPU exporter, a proxy
        evidence[SHARED].append(f"host of instance={instance}")
    elif not evidence[EXACT]:
        evidence[AGAINST].append(f"instance={instance}")


def _host_port(text: str) -> tuple[str, int] | None:
    try:
        address = parse_target(text)
    except CollectError:
        return None
    host = address.host.lower().rstrip(".")
    return (LOCAL if host in LOOPBACK else host), address.port


def _explanation(
    labels: Mapping[str, str],
    targets: Sequence[MatchedTarget],
    evidence_by_target: Mapping[str, _Evidence],
) -> str:
    if len(targets) == 1:
        by = ", ".join(targets[0].by)
        text = f"matched {targets[0].target} by {by}"
        return text if targets[0].exact else f"{text}; no label of the alert names a target"
    if targets:
        by = ", ".join(dict.fromkeys(label for target in targets for label in target.by))
        how = "by" if targets[0].exact else "by shared labels:"
        return f"matched {len(targets)} targets {how} {by}"
    near = {
        name: evidence[AGAINST]
        for name, evidence in evidence_by_target.items()
        if evidence[AGAINST] and (evidence[SHARED] or evidence[EXACT])
    }
    if near:
        name, against = next(iter(near.items()))
        more = f" (and {len(near) - 1} more)" if len(near) > 1 else ""
        return f"no match: {name}{more} is the closest, but {', '.join(against)} differs"
    if not evidence_by_target:
        return "no match: no target is watched"
    tried = ", ".join(sorted(labels.keys() - IGNORED_LABELS)) or "none"
    return f"no match: no target has any of these labels ({tried})"


# --- The diagnosis when an alert started, from the history ----------------------------------------


log = logging.getLogger(__name__)

EngineName = tuple[str, str]
"""Model and engine."""


class AlertContext(Struct, frozen=True):
    """The verdicts on one engine when an alert started and now.

    - `target`: the target's name.
    - `model`: the served model.
    - `engine`: the engine core within the target.
    - `start`: the verdict when the alert started; null if unknown.
    - `now`: the newest verdict; null if the engine is no longer watched.
    - `why`: why `at_start` is null.
    """

    target: str
    model: str
    engine: str
    start: Verdict | None = field(name="at_start")
    now: Verdict | None
    why: str

    @property
    def cause_id(self) -> str:
        """The id of the first cause now. If there is none, the id of the first cause when the alert
        started; "" without any cause."""
        for diagnosis in (self.now, self.start):
            if diagnosis is not None and diagnosis.causes:
                return diagnosis.causes[0].id
        return ""

    def lines(self, starts_s: float, now_s: float) -> list[Line]:
        """Lines for people: the verdict when the alert started, the verdict now, and the first step
        to take."""
        start = self.start
        diagnosis = self.now or start
        lines = [Line(f"at {moment(starts_s, now_s)}", _verdict(start) or self.why)]
        lines.append(Line("now", _verdict(self.now) or "unknown: no longer watched"))
        if diagnosis is not None:
            lines[0] = Line("", f"{who(diagnosis)}: {lines[0].plain()}")
        with_cause = next((d for d in (self.now, start) if d is not None and d.causes), None)
        if with_cause is None:
            return lines
        return [*lines, *action_lines(with_cause, with_cause.causes[0])]


StoredEngines = dict[str, dict[EngineName, list["StoredEngine"]]]
"""The stored engines by target and name; several replicas may share a name."""


def stored_engines(history: History) -> tuple[StoredEngines, str]:
    """The stored engines, and why there are none to read, else ""."""
    stored: StoredEngines = {}
    try:
        rows = history.engines(None)
    except Problem:
        why = "cannot read the history" if history.reader else "no history is stored"
        return {}, f"unknown: {why}"
    for row in rows:
        stored.setdefault(row.target, {}).setdefault((row.model, row.engine), []).append(row)
    return stored, ""


def stored_verdict(
    history: History, replicas: Sequence[StoredEngine], at_s: float
) -> tuple[Verdict | None, str]:
    """The worst verdict on replicas that was valid at `at_s`, or None; and the reason if it is
    None, else ""."""
    try:
        verdicts = history.verdicts(replicas, at_s) if replicas else []
    except Problem:
        return None, "unknown: cannot read the history"
    return (verdicts[0], "") if verdicts else (None, "unknown: nothing is stored of that time")


def _verdict(diagnosis: Verdict | None) -> str:
    if diagnosis is None:
        return ""
    text = diagnosis.health.upper()
    if first := diagnosis.headline:
        causes = {cause.id: f": {cause.summary}" for cause in diagnosis.causes}
        text += f" {first}{causes.get(first, '')}"
    return text if diagnosis.stage.number is None else f"{text} ({stage_known(diagnosis)})"


# The answer to Alertmanager's webhook: each alert with the diagnosis of the targets it matches,
# when it started and now.


SCHEMA: Literal["kneewatch.alerts/1"] = "kneewatch.alerts/1"
DOCUMENTS_MAX = 32
"""Maximum number of engines with documents in one answer. Each engine has two documents (start and
now) of about 20 kB."""


ENGINES_SHOWN = 3
LINE_MAX = 300


class AlertVerdicts(Struct, frozen=True):
    """An alert with the verdicts on the engines that it is about.

    - `fingerprint`: Alertmanager's fingerprint, or a hash of the labels.
    - `status`: firing or resolved.
    - `name`: the name of the alerting rule.
    - `labels`: the alert's labels.
    - `starts_s`: when the alert started.
    - `ends_s`: when it was resolved; null while it fires.
    - `match`: the targets that it is about.
    - `diagnoses`: the verdicts on their engines.
    - `left_out`: the number of engines whose verdicts are left out, because the answer is long.
    - `text`: the same as text, at most 300 characters a line.
    """

    fingerprint: str
    status: str
    name: str
    labels: Mapping[str, str]
    starts_s: UnixTime = field(name="starts")
    ends_s: UnixTime | None = field(name="ends")
    match: Match
    diagnoses: tuple[AlertContext, ...]
    left_out: int
    text: str


class AlertsAnswer(Struct, frozen=True, kw_only=True):
    """Alertmanager's alerts, each with the verdicts on the matched servers.

    - `schema`: the name and version of this document.
    - `t_s`: when the alerts were received.
    - `status`: the status of Alertmanager's notification: firing or resolved.
    - `text`: the number of alerts, and of those about watched targets.
    - `alerts`: the alerts, firing ones first.
    - `sent`: the number of forwarded alerts by receiver; null without receivers.
    """

    schema: Literal["kneewatch.alerts/1"] = SCHEMA
    t_s: UnixTime = field(name="t")
    status: str
    text: str
    alerts: Sequence[AlertVerdicts]
    sent: Mapping[str, int] | None


def answer(payload: Mapping[str, Any], service: Service) -> AlertsAnswer:
    """The document kneewatch.alerts/1 that answers a webhook request of Alertmanager. Also forwards
    new alerts to the receivers.

    Raises:
        DocumentError: the payload is not one of Alertmanager's.
    """
    posted = payload_of(payload)
    now_s = service.clock()
    diagnoser = _AlertDiagnoser(service, now_s)
    # Firing alerts come first, so that a long answer leaves out resolved ones.
    alerts = [diagnoser.of(a) for a in sorted(posted.alerts, key=lambda a: a.status)]
    sent = None
    if service.notifier:
        sent = service.notifier.forward([alert for alert in alerts if alert.targets], now_s)
    matched = sum(bool(alert.targets) for alert in alerts)
    plural = "" if len(alerts) == 1 else "s"
    text = f"{len(alerts)} alert{plural}, {matched} of them about watched targets"
    if posted.truncated_alerts:
        text += f"; Alertmanager truncated {posted.truncated_alerts} more"
    return AlertsAnswer(
        t_s=to_ms(now_s),
        status=posted.status,
        text=text,
        alerts=[alert.document for alert in alerts],
        sent=sent,
    )


class _AlertDiagnoser:
    """Adds diagnoses to the alerts of one webhook request."""

    def __init__(self, service: Service, now_s: float) -> None:
        self._now_s = now_s
        self._docs_url = service.settings.docs_url or OWN_DOCS
        self._history = History(service.reader, service.store)
        self._stored, self._why = stored_engines(self._history)
        self._labels: dict[str, Mapping[str, str]] = {}
        self._now: dict[str, dict[EngineName, Verdict]] = {}
        self._candidates: list[Candidate] = []
        self._left = DOCUMENTS_MAX
        for spec in service.targets():
            state = service.board.get(spec.name)
            self._add_target(spec, state.diagnoses if state else ())

    def _add_target(self, spec: TargetSpec, diagnoses: Sequence[Verdict]) -> None:
        now = {(diagnosis.model, diagnosis.engine): diagnosis for diagnosis in diagnoses}
        engines = now.keys() | self._stored.get(spec.name, {}).keys()
        self._labels[spec.name], self._now[spec.name] = spec.labels, now
        self._candidates.append(
            Candidate(
                spec.name,
                spec.address,
                spec.labels,
                models=frozenset(model for model, _ in engines if model),
                engines=frozenset(engine for _, engine in engines if engine),
            )
        )

    def of(self, alert: Alert) -> DiagnosedAlert:
        """An alert with the targets that it matches and their diagnoses."""
        alert_match = match(alert.labels, self._candidates)
        engines = [
            (matched.target, *name)
            for matched in alert_match.targets
            for name in sorted(
                self._now[matched.target].keys() | self._stored.get(matched.target, {}).keys()
            )
            if _is_about(alert_match, *name)
        ]
        contexts: list[AlertContext] = []
        for target, model, engine in engines[: self._left]:
            now = self._now[target].get((model, engine))
            replicas = self._stored.get(target, {}).get((model, engine), ())
            start, why = stored_verdict(self._history, replicas, alert.starts_s)
            why = self._why or why
            if now is not None or start is not None:
                then, at = (
                    each and documented(linked(each, self._docs_url)) for each in (start, now)
                )
                contexts.append(AlertContext(target, model, engine, then, at, why))
        left_out = len(engines[self._left :])
        self._left -= len(engines) - left_out
        lines = self._lines(alert, alert_match, contexts, left_out)
        cause_ids = [context.cause_id for context in contexts[:ENGINES_SHOWN]]
        pages = [cause_page(self._docs_url, cause_id) for cause_id in dict.fromkeys(cause_ids)]
        return DiagnosedAlert(
            alert=alert,
            targets=tuple(
                (matched.target, self._labels[matched.target]) for matched in alert_match.targets
            ),
            lines=tuple(lines[1:]),
            document=AlertVerdicts(
                alert.fingerprint,
                alert.status,
                alert.name,
                alert.labels,
                to_ms(alert.starts_s),
                None if alert.ends_s is None else to_ms(alert.ends_s),
                alert_match,
                tuple(contexts),
                left_out,
                "\n".join(
                    cut_after_sentence(line.plain(), LINE_MAX)
                    for line in (*lines, *(Line("docs", page) for page in pages if page))
                ),
            ),
            cause_id=next((cause_id for cause_id in cause_ids if cause_id), ""),
        )

    def _lines(
        self, alert: Alert, alert_match: Match, contexts: Sequence[AlertContext], left_out: int
    ) -> list[Line]:
        since = moment(alert.starts_s, self._now_s)
        lines = [
            Line("", f"{alert.name} {alert.status}, since {since}"),
            Line("", alert_match.text),
        ]
        annotations = alert.annotations or {}
        annotation = next(
            (annotations[n] for n in ("summary", "description") if annotations.get(n)),
            "",
        )
        lines += [Line("alert", annotation)] if annotation else []
        for context in contexts[:ENGINES_SHOWN]:
            lines += context.lines(alert.starts_s, self._now_s)
        not_shown = len(contexts[ENGINES_SHOWN:]) + left_out
        return [*lines, Line("", f"and {not_shown} more engines")] if not_shown else lines


def _is_about(alert_match: Match, model: str, engine: str) -> bool:
    """Whether the alert's labels `model` and `engine` match this engine. A target whose page was
    never read has an engine without names, which always matches."""
    named = alert_match.model in (None, model) and alert_match.engine in (None, engine)
    return named or not (model or engine)
