"""What the canary requests to a server showed. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CanaryState:
    """The newest canary requests of a target.

    `latency_s` is how long the newest took; None where it had no answer. `failures` counts those in
    a row that the server did not answer, the first of them sent at `since_s`; `error` is of the
    newest. `refused` says why the server did not accept the newest request, or why none was
    sent: then nothing new is known.
    """

    latency_s: float | None = None
    failures: int = 0
    since_s: float = 0.0
    error: str = ""
    refused: str = ""
