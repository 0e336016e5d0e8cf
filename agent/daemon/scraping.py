"""Reads the metrics page of a target, live or from a recording, and sends canary requests. I/O
edge."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from kneewatch.agent.server.probe import answer_of
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stream import TargetStream
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.errors import CaptureError, CollectError
from kneewatch.collector.http.address import FetchSettings, metrics_url
from kneewatch.collector.http.fetch import Fetcher
from kneewatch.collector.page import Layout, Page
from kneewatch.diagnose.deployment.server_state import CanaryState

log = logging.getLogger(__name__)

LEAST_GAP_S = 0.01
PAUSE_S = 1.0
"""Minimum pause between the end of a recording and its restart."""

STARTS = ("_created", "process_start_time_seconds")
"""Suffixes of metrics that hold start times of the process."""


class LivePages:
    """Pages of a live server, one GET each."""

    def __init__(self, spec: TargetSpec) -> None:
        self._fetcher = Fetcher(metrics_url(spec.address), spec.settings.fetch())

    def take(self, stream: TargetStream, now_s: float) -> Page | CollectError:
        return stream.fetch(self._fetcher, now_s)

    def due_in_s(self) -> float | None:
        """Returns None, because a server can be scraped at any time."""
        return None

    def close(self) -> None:
        self._fetcher.close()


class PlayedPages:
    """Plays a capture in real time; the times of its pages are shifted to now.

    At the end the capture starts again. The stream is reset then, as if a new process had started.

    Raises:
        CaptureError: the capture is empty.
    """

    def __init__(
        self, path: str, name: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._name, self._clock = Path(path), name, clock
        if self._path.is_fifo():
            raise CaptureError(f"{path}: a pipe cannot be played again and again")
        self._entries: Iterator[Entry] = iter(())
        self._next = self._open()
        self._due_s = clock()
        self._shift_s: float | None = None
        """Seconds to add to the recorded times. None until the first page since the start of the
        capture is played."""
        self._has_played = False
        self._starts: tuple[Layout, list[int]] | None = None

    def take(self, stream: TargetStream, now_s: float) -> Page | CollectError:
        """The page that is due at `now_s`, or the error recorded in its place. Skips pages whose
        time has passed."""
        if self._shift_s is None:
            if self._has_played:
                log.info("recording starts again target=%s", self._name)
                stream.reset()
            self._shift_s, self._has_played = now_s - self._next.t_s, True
        shift_s = self._shift_s
        try:
            page = self._due_page(stream)
        except CaptureError as error:
            return CollectError(str(error), kind="recorded", hint="Restore the recording.")
        return self._moved(page, shift_s) if isinstance(page, Page) else page

    def due_in_s(self) -> float | None:
        """Seconds until the next page of the recording."""
        return max(self._due_s - self._clock(), LEAST_GAP_S)

    def close(self) -> None:
        """Does nothing, because a recording has no connection to close."""

    def _due_page(self, stream: TargetStream) -> Page | CollectError:
        entry = self._next
        page = stream.read(entry)
        while (following := next(self._entries, None)) is not None:
            self._next = following
            self._due_s += max(following.t_s - entry.t_s, 0.0)
            if self._due_s > self._clock():
                return page
            entry, page = following, stream.read(following)
        self._due_s = max(self._due_s, self._clock()) + PAUSE_S
        self._next, self._shift_s = self._open(), None
        return page

    def _open(self) -> Entry:
        self._entries = iter(CaptureReader(self._path))
        first = next(self._entries, None)
        if first is None:
            raise CaptureError(f"{self._path}: the capture is empty")
        return first

    def _moved(self, page: Page, shift_s: float) -> Page:
        """A copy of the page with shifted process start times. Each replay of the capture thereby
        looks like a new process."""
        if self._starts is None or self._starts[0] is not page.layout:
            at = [
                index
                for index, series in enumerate(page.layout.series)
                if series.name.endswith(STARTS)
            ]
            self._starts = (page.layout, at)
        for index in self._starts[1]:
            page.values[index] += shift_s
        return page


# --- Sends a request for one token now and then: proof that an idle server works. I/O edge --------


COMPLETIONS = "/v1/completions"
PROMPT = "a"
UNAVAILABLE = 503
AT_REST = ("/is_sleeping", "/is_paused")
"""Requests whose answer shows that the server sleeps or is paused; then no canary is sent. vLLM
serves these requests in development mode only."""


def canary_fetch(settings: Settings) -> FetchSettings:
    """How the canary is sent: with its own credentials, not the target's."""
    return replace(
        settings.fetch().without_secrets(),
        bearer_token_file=settings["canary.bearer_token_file"],
        read_timeout_s=settings["canary.timeout_s"],
    )


class Canary:
    """Sends canary requests to one target, if the settings say so. A request runs in its own thread
    and never delays a scrape."""

    def __init__(
        self,
        address: str,
        settings: Settings,
        *,
        wall: Callable[[], float] = time.time,
        spawn: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._address, self._settings, self._wall = address, settings, wall
        self._fetch, self._spawn = canary_fetch(settings), spawn or _in_thread
        self._interval_s: float = settings["canary.interval_s"] or inf
        self._running = threading.Lock()
        self._due_s = float("-inf")
        # The request's thread replaces the whole state, so reading it needs no lock.
        self._newest = CanaryState()
        self._withheld = ""

    @property
    def state(self) -> CanaryState:
        """The results of the newest requests, and the reason if no request is sent now."""
        return _not_sent(self._newest, self._withheld) if self._withheld else self._newest

    def poll(self, t_s: float, model: str, *, silent: bool = False) -> None:
        """Start a request in a thread if one is due, none is running, and the server is neither
        asleep nor paused. `silent`: traffic has ended at once, which is unusual.

        Call it right after the server's page was read.
        """
        self._withheld = ""
        settings, interval_s = self._settings, self._interval_s
        model = settings["canary.model"] or model
        if not silent and interval_s == inf:
            self._newest = CanaryState()  # requests flow: older failures prove nothing
        if silent and settings["canary.on_silence"]:
            # Without an answer, a second request follows: one failure alone proves nothing.
            interval_s = min(interval_s, settings["canary.timeout_s"])
        # A clock that was set back must not delay the next request.
        due = interval_s < inf and not 0 <= t_s - self._due_s < interval_s
        if due and model and self._running.acquire(blocking=False):
            self._due_s = t_s
            try:
                self._spawn(lambda: self._send(model))
            except RuntimeError as error:  # no more threads can be started
                self._withheld = str(error)
                self._running.release()

    def withhold(self, reason: str) -> None:
        """Send no request until the next `poll`, and report `reason`."""
        self._withheld = reason

    def _send(self, model: str) -> None:
        try:
            reason = self._at_rest(AT_REST[0]) or self._at_rest(AT_REST[1])
            self._newest = _not_sent(self._newest, reason) if reason else self._asked(model)
        finally:
            self._running.release()

    def _at_rest(self, request: str) -> str:
        """Ask the server whether it sleeps or is paused. Returns the reason to send no canary; ""
        to send it.

        A server that lacks this request cannot sleep: vLLM has both the request and the sleep
        command, or neither.
        """
        try:
            answer: object = json.loads(answer_of(self._address, request, self._fetch))
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
            timeout_s: float = self._settings["canary.timeout_s"]
            answer_of(self._address, COMPLETIONS, self._fetch, post=body, timeout_s=timeout_s)
        except CollectError as error:
            broken = error.status is not None and error.status >= 500
            if error.kind != "timeout" and (not broken or error.status == UNAVAILABLE):
                return CanaryState(refused=str(error))
            before = self._newest
            since_s = before.since_s if before.failures else sent_s
            return CanaryState(None, before.failures + 1, since_s, str(error))
        return CanaryState(time.perf_counter() - began_s)


def _not_sent(newest: CanaryState, reason: str) -> CanaryState:
    """The canary's state after no request was sent. Earlier failures are kept, because they were
    observed."""
    return replace(newest, latency_s=None, refused=f"not sent: {reason}")


def _in_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="canary", daemon=True).start()
