"""Sends a request for one token now and then: proof that an idle server works. I/O edge."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kneewatch.agent.server.probe import answer_of
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.errors import CollectError
from kneewatch.collector.http.connection import FetchSettings
from kneewatch.diagnose.deployment.canary_state import CanaryState

COMPLETIONS = "/v1/completions"
PROMPT = "a"
UNAVAILABLE = 503
AT_REST = ("/is_sleeping", "/is_paused")
"""Requests whose answer is true where the server must be left alone; vLLM has them in its
development mode."""


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
        self.state = CanaryState()
        """What the newest requests showed; replaced as a whole, by the request's thread."""

    def poll(self, t_s: float, model: str, *, awake: bool) -> CanaryState:
        """Send a request if one is due, none is running, and the engines are awake."""
        model = self._settings.model or model
        # A clock that was set back must not delay the next request.
        due = not 0 <= t_s - self._due_s < self._settings.interval_s
        if due and awake and model and self._running.acquire(blocking=False):
            self._due_s = t_s
            self._spawn(lambda: self._send(model))
        return self.state

    def _send(self, model: str) -> None:
        try:
            if not any(self._rests(request) for request in AT_REST):
                self.state = self._asked(model)
        finally:
            self._running.release()

    def _rests(self, request: str) -> bool:
        try:
            answer: object = json.loads(answer_of(self._address, request, self._settings.fetch))
        except (CollectError, ValueError, RecursionError):
            return False
        return isinstance(answer, dict) and True in answer.values()

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
            before = self.state
            since_s = before.since_s if before.failures else sent_s
            return CanaryState(None, before.failures + 1, since_s, str(error))
        return CanaryState(time.perf_counter() - began_s)


def _in_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="canary", daemon=True).start()
