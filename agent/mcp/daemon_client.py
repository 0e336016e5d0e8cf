"""The HTTP API of a running daemon. I/O edge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import requests

from kneewatch.collector.errors import CollectError
from kneewatch.collector.http.address import parse_target

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 3.0, 65.0
"""A fleet's past moment takes the daemon up to 60 s."""

PROBLEM = "application/problem+json"
TRIAGE, FLEET = "/api/v1/triage", "/api/v1/fleet"


class DaemonClient:
    """Asks a daemon. Thread-safe; `token_file` is read for each request, so a token may change.

    Raises:
        CollectError: the URL is invalid.
    """

    def __init__(self, url: str, *, token_file: Path | None, ca_file: str | None) -> None:
        address = parse_target(url)
        self.url = address.url.removesuffix("/metrics").rstrip("/")
        self._token_file, self._verify = token_file, ca_file or True

    def text(self, path: str, **parameters: str) -> str:
        """An answer as text for people.

        Raises:
            CollectError: there is none; the message is the daemon's own reason where it gave one.
        """
        return self._get(path, {**parameters, "format": "text"}).text

    def document(self, path: str, **parameters: str) -> dict[str, Any]:
        """An answer as JSON.

        Raises:
            CollectError: as for text.
        """
        document: dict[str, Any] = self._get(path, {**parameters, "format": "json"}).json()
        return document

    def _get(self, path: str, parameters: Mapping[str, str]) -> requests.Response:
        headers: dict[str, str] = {}
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {_first_line(self._token_file)}"
        try:
            answer = requests.get(
                self.url + path,
                params=parameters,
                headers=headers,
                timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
                verify=self._verify,
            )
        except requests.RequestException as exc:
            hint = "check that `kneewatch run` listens on this address; its default port is 9877"
            raise CollectError(
                f"{self.url}: {type(exc).__name__}; {hint}", kind="refused", hint=hint
            ) from exc
        if not answer.ok:
            raise CollectError(f"{self.url}{path}: {_reason(answer)}", kind="http_status")
        return answer


def triage_path(target: str | None) -> str:
    """The path of a target's triage, or of that of all targets."""
    return f"{TRIAGE}/{quote(target, safe='')}" if target else TRIAGE


def _first_line(file: Path) -> str:
    try:
        return file.read_text("utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise CollectError(f"--token-file {file}: cannot be read", kind="auth") from exc


def _reason(answer: requests.Response) -> str:
    """Why the daemon refused: the detail of its problem document, else the status."""
    detail = answer.reason
    if answer.headers.get("content-type", "").startswith(PROBLEM):
        detail = str(answer.json().get("detail", detail))
    return f"{answer.status_code} {detail}"
