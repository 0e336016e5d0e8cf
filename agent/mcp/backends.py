"""The backends of the MCP tools (the HTTP API of a running daemon, or a metrics system), and the
documents that the tools return, with their schemas. Documents are shortened. I/O edge."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import requests
from msgspec import Struct
from msgspec.json import decode, encode

from kneewatch.agent.api.openapi import schemas
from kneewatch.agent.api.responses import COMPONENTS
from kneewatch.agent.fleet.queries import QueryScope
from kneewatch.agent.fleet.snapshot import diagnose_fleet, source_settings
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.engines.engine_kind import canonical_labels, engine_kinds
from kneewatch.collector.errors import CollectError
from kneewatch.collector.files import SECRET_MAX_BYTES, read_text
from kneewatch.collector.http.address import parse_target
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.collector.signals.promql import quoted
from kneewatch.collector.signals.table import SIGNAL_BY_KEY
from kneewatch.reports.diagnosis_text import Style
from kneewatch.reports.fleet_rendering import text
from kneewatch.reports.triage.view_model import CASCADE_SIGNALS
from kneewatch.rules.rule import IN_BOUNDS

JsonObject = dict[str, Any]

CORE_SIGNALS = (*CASCADE_SIGNALS, "generation_tokens_per_s")
"""Signals that every shortened diagnosis contains, in addition to those that its causes cite."""

UNKNOWN_MAX = 5


def shortened(diagnosis: Mapping[str, Any]) -> JsonObject:
    """A `kneewatch.diagnosis/1` reduced to what a verdict needs. Left out: findings that are ok or
    unknown, signals that no cause cites, and most of the list of unknowns."""
    cited = {row["signal"] for cause in diagnosis["causes"] for row in cause["evidence"]}
    shown_signals = cited.union(CORE_SIGNALS)
    return {
        **diagnosis,
        "findings": [row for row in diagnosis["findings"] if row["state"] not in IN_BOUNDS],
        "signals": {
            key: value for key, value in diagnosis["signals"].items() if key in shown_signals
        },
        "unknown": diagnosis["unknown"][:UNKNOWN_MAX],
    }


def shortened_triage(document: Mapping[str, Any], limit: int) -> JsonObject:
    """A `kneewatch.triage/1` reduced to the `limit` worst engines and the scrape state of their
    targets."""
    targets = [shortened(diagnosis) for diagnosis in document["targets"][:limit]]
    names = {diagnosis["target"] for diagnosis in targets}
    watching = [row for row in document["watching"] if row["target"] in names]
    return {**document, "targets": targets, "watching": watching}


def shortened_fleet(document: Mapping[str, Any], limit: int) -> JsonObject:
    """A `kneewatch.fleet/1` reduced to the `limit` worst engines, each with its core signals and
    its findings that are out of bounds."""
    targets = [
        {
            **engine,
            "findings": [row for row in engine["findings"] if row["state"] not in IN_BOUNDS],
            "signals": {key: v for key, v in engine["signals"].items() if key in CORE_SIGNALS},
        }
        for engine in document["targets"][:limit]
    ]
    return {**document, "targets": targets, "gone": document["gone"][:limit]}


HISTORY = "kneewatch.signal_history/1"
HistoryRow = tuple[str, str, str, Sequence[float | None]]
"""Model, engine, signal, and the value at each time; None where the value is unknown."""


def history_document(
    target: str, times_s: Sequence[float], rows: Iterable[HistoryRow]
) -> JsonObject:
    """Values of a target's signals over time."""
    return {
        "schema": HISTORY,
        "target": target,
        "times": list(times_s),
        "series": [
            {"model": model, "engine": engine, "signal": signal, "values": list(values)}
            for model, engine, signal, values in rows
        ],
    }


def history_text(document: Mapping[str, Any]) -> str:
    """The document as text: for each series a line with its range and all its values."""
    lines = [f"{document['target']}: {len(document['times'])} times, oldest first; - is unknown"]
    for row in document["series"]:
        numbers = [value for value in row["values"] if value is not None]
        spread = f"{min(numbers):.4g} to {max(numbers):.4g}" if numbers else "unknown throughout"
        values = " ".join("-" if value is None else f"{value:.4g}" for value in row["values"])
        lines.append(f"{row['signal']} (engine {row['engine'] or '?'}): {spread}: {values}")
    return "\n".join(lines)


# --- Schemas --------------------------------------------------------------------------------------


REFERENCE = re.compile(rf'"\$ref":"{re.escape(COMPONENTS)}([^"]+)"')


def schema_of(name: str, documents: Mapping[str, JsonObject]) -> JsonObject:
    """The schema of a document of the HTTP API, or of one of `documents`, with all definitions that
    it refers to."""
    every = schemas()
    whole = documents.get(name) or {"type": "object", "$ref": COMPONENTS + name}
    needed, left = dict[str, Any](), REFERENCE.findall(orjson.dumps(whole).decode())
    while left:
        part = left.pop()
        if part not in needed:
            needed[part] = every[part]
            left += REFERENCE.findall(orjson.dumps(every[part]).decode())
    return {**whole, "components": {"schemas": needed}} if needed else dict(whole)


# --- Backends of the tools: a running daemon's HTTP API, or a metrics system. I/O edge ------------


CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 3.0, 65.0
"""Timeouts in seconds. The daemon needs up to 60 s to diagnose a fleet at a past moment."""

NOT_FOUND = 404
PROBLEM = "application/problem+json"
TRIAGE, FLEET = "/api/v1/triage", "/api/v1/fleet"


class DaemonClient:
    """Sends requests to a daemon. Thread-safe. `token_file` is read for each request, so the token
    may change.

    Raises:
        CollectError: the URL is invalid.
    """

    def __init__(self, url: str, *, token_file: Path | None, ca_file: str | None) -> None:
        address = parse_target(url)
        self.url = address.request_url.removesuffix("/metrics").rstrip("/")
        self._token_file, self._verify = token_file, ca_file or True

    def text(self, path: str, **parameters: str) -> str:
        """Request an answer as text for people.

        Raises:
            CollectError: the daemon does not answer or refuses; the message is the daemon's reason
                if it gave one.
        """
        return self._get(path, {**parameters, "format": "text"}).text

    def document(self, path: str, **parameters: str) -> dict[str, Any]:
        """Request an answer as JSON.

        Raises:
            CollectError: as in `text`.
        """
        document: dict[str, Any] = self._get(path, {**parameters, "format": "json"}).json()
        return document

    def _get(self, path: str, parameters: Mapping[str, str]) -> requests.Response:
        headers: dict[str, str] = {}
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {_first_line(self._token_file)}"
        try:
            with requests.Session() as session:
                # The token is for this daemon only: no proxy, no netrc, no redirect.
                session.trust_env = False
                answer = session.get(
                    self.url + path,
                    params=parameters,
                    headers=headers,
                    timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
                    verify=self._verify,
                    allow_redirects=False,
                )
        except requests.RequestException as exc:
            hint = "check that `kneewatch run` listens on this address; its default port is 9877"
            raise CollectError(
                f"{self.url}: {type(exc).__name__}; {hint}", kind="refused", hint=hint
            ) from exc
        if answer.status_code != requests.codes.ok:
            raise CollectError(
                f"{self.url}: {_reason(answer)}", kind="http_status", status=answer.status_code
            )
        return answer

    def watches_fleet(self) -> bool:
        """Whether the daemon has the route of a fleet. True if it does not answer: it may later."""
        try:
            self.document(FLEET)
        except CollectError as error:
            return error.status != NOT_FOUND
        return True


def triage_path(target: str | None) -> str:
    """The path of a target's triage; without a target, the path of the triage of all targets."""
    return f"{TRIAGE}/{quote(target, safe='')}" if target else TRIAGE


def _first_line(file: Path) -> str:
    try:
        return read_text(file, SECRET_MAX_BYTES).partition("\n")[0].strip()
    except (OSError, ValueError) as exc:
        raise CollectError(f"--token-file {file} cannot be read", kind="auth") from exc


def _reason(answer: requests.Response) -> str:
    """The reason why the daemon refused a request: the detail of its problem document, else the
    HTTP status."""
    status = f"{answer.status_code} {answer.reason}"
    if not answer.headers.get("content-type", "").startswith(PROBLEM):
        return status
    return str(answer.json().get("detail", status))


# --- A fleet and its signals from Prometheus or a system with its API -----------------------------


BY = (
    *("instance", "model_name", "engine"),
    *filter(None, (kind.engine_label for kind in engine_kinds())),
)
"""Labels that distinguish the engines of a target, of whatever kind."""


class MetricsSystem(Struct, frozen=True):
    """Queries a metrics system. `selector` restricts all series."""

    url: str
    settings: Settings
    selector: str = ""

    def fleet(self, at_s: float | None) -> tuple[str, dict[str, object]]:
        """The fleet now or at a moment, as text and as `kneewatch.fleet/1`.

        Raises:
            CollectError: the metrics system does not answer, or has no series of vLLM.
        """
        verdict = diagnose_fleet(self.url, self.settings, self.selector, at_s=at_s)
        docs_url = self.settings.docs_url
        document: dict[str, object] = decode(encode(verdict.linked(docs_url)))
        return text(verdict, Style(docs_url=docs_url)), document

    def history(
        self, target: str, signals: Sequence[str], times_s: Sequence[float]
    ) -> list[HistoryRow]:
        """Signals of a target at evenly spaced times. The target is a pod or an address.

        Raises:
            CollectError: the metrics system does not answer.
        """
        with PrometheusSource(self.url, source_settings(self.settings)) as source:
            for label in ("pod", "instance"):
                selector = ",".join(filter(None, (f'{label}="{quoted(target)}"', self.selector)))
                scope = QueryScope(selector, self.settings["window_s"], BY)
                rows = [row for signal in signals for row in _rows(source, signal, scope, times_s)]
                if rows:
                    return rows
        return []


def _rows(
    source: PrometheusSource, signal: str, scope: QueryScope, times_s: Sequence[float]
) -> Iterator[HistoryRow]:
    """Yields a row for each engine. Yields nothing if PromQL cannot express the signal."""
    query = scope.query(SIGNAL_BY_KEY[signal].expr)
    if not query:
        return
    first_s, step_s = times_s[0], times_s[1] - times_s[0]
    values: dict[tuple[str, str], list[float | None]] = {}
    for piece in source.range(query, from_s=first_s, to_s=times_s[-1], step_s=step_s):
        for track in piece.tracks:
            labels = canonical_labels(track.labels)
            engine = labels.get("model_name", ""), labels.get("engine", "")
            row = values.setdefault(engine, [None] * len(times_s))
            for t_s, value in track.points:
                row[round((t_s - first_s) / step_s)] = value
    for (model, engine_name), row in values.items():
        yield model, engine_name, signal, row
