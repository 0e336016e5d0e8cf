"""The daemon's log: logfmt or JSON lines on stderr. The only place that configures handlers. I/O
edge.

A message is a fixed phrase followed by `key=%s` for each value. The template separates phrase and
values, so that text from a page, an address or an error is always a value.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import select
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import cast

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
STDERR = 2
MAX_VALUE_CHARS = 2_000
"""Maximum length of a value in characters: an error may quote a long part of a page."""

PATIENCE_S = 0.1
"""How long a line waits for the reader of the log."""

MAX_TRACEBACK_CHARS = 20_000
TRACEBACK_S, TRACEBACKS_MAX = 600.0, 256
"""A traceback is logged again after this many seconds: one page may cause it at each scrape."""
FIELD = re.compile(r" (\w+)=(%[-+ #0]*\d*(?:\.\d+)?[sdrfgx])")
TEMPLATE = re.compile(rf"([^%]*?)((?:{FIELD.pattern})*)")
CREDENTIALS = re.compile(r"//[^/\s@]*@")
BARE = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f-\x9f\u2028\u2029]+")
LIBRARY_LEVELS = {
    "uvicorn": logging.WARNING,
    "asyncio": logging.WARNING,
}
"""Lowest levels logged for libraries."""


def configure(*, form: str, level: str, fd: int = STDERR) -> None:
    """Set the format of the log (`logfmt` or `json`), its lowest level, and the file descriptor to
    which it is written."""
    handler = DescriptorHandler(fd)
    handler.setFormatter(LineFormatter(form))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])
    for name, lowest in LIBRARY_LEVELS.items():
        logging.getLogger(name).setLevel(max(LEVELS[level], lowest))


class DescriptorHandler(logging.Handler):
    """Writes each line without a buffer. A buffer has a lock, which a thread that still runs at
    exit could hold.

    A reader that stops reading (a paused pager, a stuck log driver) delays the daemon once by
    `PATIENCE_S`; then lines are lost until it reads again.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd, self._poll = fd, select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as one line. If the descriptor is closed, nothing happens."""
        lines = self.format(record) + "\n"
        if self._lost and self._poll.poll(0):
            lost, self._lost = self._lost, 0
            own = logging.LogRecord(
                __name__, logging.WARNING, "", 0, "log lines lost lines=%s", (lost,), None
            )
            lines = f"{self.format(own)}\n{lines}"
        data = lines.encode("utf-8", "backslashreplace")
        with suppress(OSError):
            while data:
                if not self._poll.poll(0 if self._lost else 1000 * PATIENCE_S):
                    self._lost += 1
                    return
                # A pipe that is ready takes that many bytes at once.
                data = data[os.write(self._fd, data[: select.PIPE_BUF]) :]


class LineFormatter(logging.Formatter):
    """Formats a message as one line: `time=… level=… msg="…" key=value`, or a JSON object with the
    same keys."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self._form = form
        self._traced_s: dict[tuple[object, ...], float] = {}

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line = fields(record)
        if self._is_repeated(record):
            line["traceback"] = str(line["traceback"]).rpartition("\n")[2]
        if self._form == "json":
            return json.dumps(line)  # ASCII, so it cannot control a terminal
        return " ".join(f"{key}={quoted(value)}" for key, value in line.items())

    def _is_repeated(self, record: logging.LogRecord) -> bool:
        """Whether the traceback of an error at the same place was logged lately."""
        if not record.exc_info or record.exc_info[2] is None:
            return False
        *_, (frame, number) = traceback.walk_tb(record.exc_info[2])
        place = record.exc_info[0], frame.f_code, number
        if 0 <= record.created - self._traced_s.get(place, -math.inf) < TRACEBACK_S:
            return True
        if len(self._traced_s) >= TRACEBACKS_MAX:
            self._traced_s.clear()
        self._traced_s[place] = record.created
        return False


def fields(record: logging.LogRecord) -> dict[str, str | float]:
    """The fields of a log line by key: time, level, msg, the values of the message, logger,
    traceback."""
    moment = datetime.fromtimestamp(record.created, UTC)
    line: dict[str, str | float] = {
        "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
    }
    phrase, values = _parts(record)
    line["msg"] = phrase
    line.update((f"{key}_" if key in line else key, value) for key, value in values.items())
    line["logger"] = record.name
    if record.exc_info:
        trace = logging.Formatter().formatException(record.exc_info)
        line["traceback"] = without_secrets(trace)[-MAX_TRACEBACK_CHARS:]
    return line


def _parts(record: logging.LogRecord) -> tuple[str, dict[str, str | float]]:
    """Split a message into its fixed phrase and its values by key. A message without keys is only a
    phrase."""
    args = record.args if isinstance(record.args, tuple) else ()
    phrase, keys = _template(str(record.msg))
    if record.args and len(keys) == len(args):
        return phrase, {key: _value(form, arg) for (key, form), arg in zip(keys, args, strict=True)}
    try:
        return _cleaned(record.getMessage()), {}
    except (TypeError, ValueError):  # a template that does not fit its values is still a message
        return _cleaned(f"{record.msg} {record.args!r}"), {}


@lru_cache(maxsize=512)
def _template(template: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    match = TEMPLATE.fullmatch(template)
    if match is None:
        return template, ()
    return match[1], tuple((field[1], field[2]) for field in FIELD.finditer(match[2]))


def _value(form: str, arg: object) -> str | float:
    if isinstance(arg, int | float) and form == "%s" and math.isfinite(arg):
        return arg if isinstance(arg, int) else round(arg, 6)
    if isinstance(arg, Mapping):
        pairs = cast("Mapping[object, object]", arg).items()
        return _cleaned(",".join(f"{key}:{value}" for key, value in pairs))
    try:
        return _cleaned(form % (arg,))
    except (TypeError, ValueError):
        return _cleaned(str(arg))


def _cleaned(text: str) -> str:
    text = without_secrets(text)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"


def without_secrets(text: str) -> str:
    return CREDENTIALS.sub("//", text)


def quoted(value: str | float) -> str:
    """A value in logfmt: without quotes if possible, else quoted with JSON's escapes."""
    if not isinstance(value, str):
        return str(value)
    if BARE.fullmatch(value) and value.isprintable():
        return value
    escaped = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in escaped)
