"""The exceptions of kneewatch. Pure.

KneewatchError
├── CollectError          a source could not be read; `hint` says what to try
│   └── ExpositionError   its page is not valid exposition text
├── CaptureError          a recording cannot be used
├── SettingsError         settings are wrong; each message names a key and its origin
└── StoreError            the history cannot be opened; the message says what to do
"""

from __future__ import annotations

CHARS_MAX = 1000
"""Most characters of a source's error: what it quotes of an answer is stored at each scrape."""


class KneewatchError(Exception):
    """An expected error outside kneewatch; its message is for the user."""


class CollectError(KneewatchError):
    """A source could not be read.

    `kind` is a stable word for counting: url, refused, dns, tls, timeout, auth, not_found,
    redirect, http_status, not_metrics, no_vllm, truncated, too_large, exposition, stale, recorded,
    no_gpu, gpus_lost, driver or internal. `hint` says what to try. `status` is the response's HTTP
    status; None if there was no response.
    """

    def __init__(
        self, message: str, *, kind: str, hint: str = "", status: int | None = None
    ) -> None:
        super().__init__(message if len(message) <= CHARS_MAX else f"{message[: CHARS_MAX - 1]}…")
        self.kind = kind
        self.hint = hint
        self.status = status

    def detached(self) -> CollectError:
        """The error without the frames and errors behind it, which would keep the page in memory as
        long as the error is kept."""
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)


class ExpositionError(CollectError):
    """A page is not valid exposition text. `line` counts from 1; it is 0 if the error is not in one
    line."""

    def __init__(self, message: str, *, line: int = 0, kind: str = "exposition") -> None:
        where = f"line {line}: " if line else ""
        super().__init__(
            f"{where}{message}", kind=kind, hint="check that this is a Prometheus metrics page"
        )
        self.line = line


class CaptureError(KneewatchError):
    """A recording is missing, is not a recording, or has no usable entry."""


class SettingsError(KneewatchError):
    """Settings are wrong; each of `messages` names a key and its origin."""

    def __init__(self, *messages: str) -> None:
        super().__init__("; ".join(messages))
        self.messages = messages


class StoreError(KneewatchError):
    """The history cannot be opened; the message says what to do."""
