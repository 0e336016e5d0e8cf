"""A running daemon as a source: its triage endpoint, asked again and again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, cast

import orjson

from kneewatch.agent.settings import Settings
from kneewatch.agent.terminal.feeds import patience_s
from kneewatch.agent.terminal.pace import Pace
from kneewatch.agent.terminal.wall import Kind, Wall
from kneewatch.collector.base import CollectError
from kneewatch.collector.http.access import FetchSettings
from kneewatch.collector.http.address import METRICS_PATH, parse_target
from kneewatch.collector.http.fetch import Fetcher
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.reports.reading import DocumentError, diagnosis_of

SCHEMA = "kneewatch.triage/1"
PATH = "/api/v1/triage"
PAGES = (PATH, "/triage", METRICS_PATH)
"""What may stand at the end of a daemon's address: people copy the address of a page."""

SECRETS = ("bearer_token_file", "bearer_token_env", "headers", "header_files", "header_envs")


HINTS = {
    "refused": "is `kneewatch run` up there, and listening on this address? Its port is 9877 by "
    "default",
    "auth": "give the file with the daemon's token: --token-file FILE",
    "not_found": "is this the address of a kneewatch daemon?",
    "not_metrics": "is this the address of a kneewatch daemon?",
}
"""What to try, where the hints of a scrape would speak of vLLM."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a daemon told: its time, the diagnoses, the targets that it calls late, those that it
    has not scraped yet, and what of all that could not be read."""

    t_s: float
    diagnoses: list[Diagnosis]
    late: frozenset[str]
    pending: list[str]
    trouble: str


@dataclass(frozen=True, slots=True)
class DaemonFeed:
    """A daemon's triage endpoint."""

    name: str
    fetcher: Fetcher
    interval_s: float
    kind: Kind = Kind.DAEMON

    @property
    def patience_s(self) -> float:
        """After so long without news what it told is the past."""
        return patience_s(self.interval_s)

    def run(self, wall: Wall, pace: Pace) -> None:
        """Ask and tell."""
        due_s = time.monotonic()
        with closing(self.fetcher):
            while pace.until(due_s):
                self._ask(wall)
                due_s = max(due_s + self.interval_s, time.monotonic())

    def _ask(self, wall: Wall) -> None:
        try:
            told = read(self.fetcher.get().body)
        except CollectError as error:
            hint = HINTS.get(error.kind, error.hint)
            wall.say(self.name, f"{error}; try: {hint}" if hint else str(error))
        except DocumentError as error:
            wall.say(self.name, f"{self.name}: {error}")
        else:
            wall.put(
                self.name, told.diagnoses, now_s=told.t_s, late=told.late, pending=told.pending
            )
            if told.trouble or not (told.diagnoses or told.pending):
                wall.say(self.name, told.trouble or "the daemon watches no target")


def read(body: bytes) -> Told:
    """What a triage document tells; one diagnosis that cannot be read does not hide the others.

    Raises:
        DocumentError: it is no triage document.
    """
    try:
        document: object = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise DocumentError("the answer is not JSON; is this a kneewatch daemon?") from exc
    whole = cast("dict[str, Any]", document) if isinstance(document, dict) else {}
    t_s = whole.get("t")
    numeric = isinstance(t_s, int | float) and not isinstance(t_s, bool)
    if whole.get("schema") != SCHEMA or not numeric or not isinstance(whole.get("targets"), list):
        raise DocumentError(f"the answer is no {SCHEMA} document; is the daemon another version?")
    found: list[Diagnosis] = []
    trouble = ""
    for row in _rows(whole, "targets"):
        try:
            found.append(diagnosis_of(cast("Mapping[str, Any]", row)))
        except DocumentError as error:
            trouble = str(error)
    watching = [cast("dict[str, Any]", row) for row in _rows(whole, "watching") if _is_object(row)]
    late = frozenset(str(row.get("target")) for row in watching if row.get("late") is True)
    pending = [name for name in _rows(whole, "pending") if isinstance(name, str)]
    return Told(float(cast("float", t_s)), found, late, pending, trouble)


def _rows(whole: Mapping[str, Any], key: str) -> list[object]:
    rows: object = whole.get(key)
    return cast("list[object]", rows) if isinstance(rows, list) else []


def _is_object(row: object) -> bool:
    return isinstance(row, dict)


def daemon_feed(url: str, settings: Settings, token_file: str | None) -> DaemonFeed:
    """The feed of the daemon at a URL.

    Raises:
        CollectError: the URL cannot be one.
    """
    address = parse_target(url)
    prefix = address.path.partition("?")[0].rstrip("/")
    for page in PAGES:
        prefix = prefix.removesuffix(page)
    asked = replace(address, path=prefix + PATH)
    fetch = access(settings, token_file)
    return DaemonFeed(asked.url, Fetcher(asked.full_url(), fetch), settings["interval_s"])


def access(settings: Settings, token_file: str | None) -> FetchSettings:
    """How the daemon is asked: of tokens and headers only what the command line gives; a file's or
    the environment's are meant for the servers that are scraped."""
    given = settings.fetch()
    own: dict[str, Any] = {
        key: getattr(given, key)
        for key in SECRETS
        if settings.origin(f"fetch.{key}").startswith("flag ")
    }
    fetch = replace(given.without_secrets(), **own)
    if token_file is not None:
        fetch = replace(fetch, bearer_token_file=token_file, bearer_token_env=None)
    return replace(fetch, headers={**fetch.headers, "Accept": "application/json"})
