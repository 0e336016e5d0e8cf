"""Sends a request for one token now and then: proof that an idle server works. I/O edge."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from kneewatch.agent.server.probe import answer_of
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.errors import CollectError
from kneewatch.collector.http.connection import FetchSettings
from kneewatch.diagnose.deployment.server_facts import CanaryState

COMPLETIONS = "/v1/completions"
PROMPT = "a"
UNAVAILABLE = 503
AT_REST = ("/is_sleeping", "/is_paused")
"""Requests that return true while the server sleeps or is paused: then no canary is sent. vLLM has
them in development mode only."""


@dataclass(frozen=True, slots=True)
class CanarySettings:
    """When and how the canary is sent. `model` is empty for the model of the page."""

    interval_s: float
    timeout_s: float
    model: str
    fetch: FetchSettings


def canary_settings(settings: Settings) -> CanarySettings | None:
    """The settings of the canary; None where it is off. It has no credentials but its own."""
    interval_s: float | None = settings["canary.interval_s"]
    if interval_s is None:
        return None
    timeout_s: float = settings["canary.timeout_s"]
    fetch = replace(
        settings.fetch().without_secrets(),
        bearer_token_file=settings["canary.bearer_token_file"],
        read_timeout_s=timeout_s,
    )
    return CanarySettings(interval_s, timeout_s, settings["canary.model"] or "", fetch)


class Canary:
    """The canary of one target. A request runs in a thread of its own: the scrape never waits."""

    def __init__(
        self,
        address: str,
        settings: CanarySettings,
        *,
        wall: Callable[[], float] = time.time,
        spawn: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._address, self._settings, self._wall = address, settings, wall
        self._spawn = spawn or _in_thread
        self._running = threading.Lock()
        self._due_s = float("-inf")
        # Replaced as a whole, by the request's thread.
        self._newest = CanaryState()
        self._withheld = ""

    @property
    def state(self) -> CanaryState:
        """What the newest requests showed, and why none is sent now."""
        return _not_sent(self._newest, self._withheld) if self._withheld else self._newest

    def poll(self, t_s: float, model: str) -> None:
        """Send a request if one is due, none is running, and the server is not asleep or paused.

        Call it right after the server's page was read.
        """
        self._withheld = ""
        model = self._settings.model or model
        # A clock that was set back must not delay the next request.
        due = not 0 <= t_s - self._due_s < self._settings.interval_s
        if due and model and self._running.acquire(blocking=False):
            self._due_s = t_s
            self._spawn(lambda: self._send(model))

    def withhold(self, reason: str) -> None:
        """Report why no request is sent before the next `poll`."""
        self._withheld = reason

    def _send(self, model: str) -> None:
        try:
            reason = self._at_rest(AT_REST[0]) or self._at_rest(AT_REST[1])
            self._newest = _not_sent(self._newest, reason) if reason else self._asked(model)
        finally:
            self._running.release()

    def _at_rest(self, request: str) -> str:
        """Why no canary may be sent, by the server's answer to a request; empty if one may.

        A server without the request cannot sleep: vLLM serves both or neither.
        """
        try:
            answer: object = json.loads(answer_of(self._address, request, self._settings.fetch))
        except CollectError as error:
            return "" if error.kind == "not_found" else f"GET {request}: {error}"
        except (ValueError, RecursionError):
            return f"GET {request}: not vLLM's answer"
        values = cast("dict[str, object]", answer).values() if isinstance(answer, dict) else ()
        if values and all(value is False for value in values):
            return ""
        return f"GET {request}: {answer!r:.100}"

    def _asked(self, model: str) -> CanaryState:
        sent_s, began_s = self._wall(), time.perf_counter()
        body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 1}).encode()
        try:
            answer_of(
                self._address,
                COMPLETIONS,
                self._settings.fetch,
                post=body,
                timeout_s=self._settings.timeout_s,
            )
        except CollectError as error:
            broken = error.status is not None and error.status >= 500
            if error.kind != "timeout" and (not broken or error.status == UNAVAILABLE):
                return CanaryState(refused=str(error))
            before = self._newest
            since_s = before.since_s if before.failures else sent_s
            return CanaryState(None, before.failures + 1, since_s, str(error))
        return CanaryState(time.perf_counter() - began_s)


def _not_sent(newest: CanaryState, reason: str) -> CanaryState:
    """The state where no request was sent. Earlier failures still count: they were observed."""
    return replace(newest, latency_s=None, refused=f"not sent: {reason}")


def _in_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="canary", daemon=True).start()
