"""The daemon's log: logfmt or JSON lines on stderr. The only place that configures handlers.

A message is a fixed phrase and `key=%s` for each value. The values are taken apart from the phrase
by that template: whatever a page, an address or an error holds, it stays a value.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
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
"""Characters of a value; what an error quotes of a page may be long."""

MAX_TRACEBACK_CHARS = 20_000
FIELD = re.compile(r" (\w+)=(%[-+ #0]*\d*(?:\.\d+)?[sdrfgx])")
TEMPLATE = re.compile(rf"([^%]*?)((?:{FIELD.pattern})*)")
CREDENTIALS = re.compile(r"//[^/\s@]*@")
BARE = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f-\x9f\u2028\u2029]+")
LIBRARY_LEVELS = {
    "uvicorn": logging.WARNING,
    "asyncio": logging.WARNING,
    "apscheduler": logging.ERROR,
}
"""What others say about their own work is told from these levels on. APScheduler warns each time
that a cycle is still under way when the next one is due; our own words for that are enough."""


def configure(*, form: str, level: str, fd: int = STDERR) -> None:
    """Log from now on in that form, from that level on, to stderr (or to another descriptor)."""
    handler = DescriptorHandler(fd)
    handler.setFormatter(JsonLines() if form == "json" else Logfmt())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])
    for name, least in LIBRARY_LEVELS.items():
        logging.getLogger(name).setLevel(max(LEVELS[level], least))


class DescriptorHandler(logging.Handler):
    """Writes each line in one go, past Python's buffers: a thread that the interpreter leaves
    behind at its end cannot hold their lock."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line; a reader that is gone stops nothing."""
        data = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
        with suppress(OSError):
            while data:
                data = data[os.write(self._fd, data) :]


class Logfmt(logging.Formatter):
    """`time=… level=… msg="…" key=value`, one line a message."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return " ".join(f"{key}={quoted(value)}" for key, value in fields(record).items())


class JsonLines(logging.Formatter):
    """One JSON object a line, with the same keys."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return json.dumps(fields(record))  # ASCII: nothing in it steers a terminal either


def fields(record: logging.LogRecord) -> dict[str, str | float]:
    """What a line says, by key: time, level, msg, the message's own values, logger, traceback."""
    moment = datetime.fromtimestamp(record.created, UTC)
    line: dict[str, str | float] = {
        "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
    }
    phrase, own = _parts(record)
    line["msg"] = phrase
    line.update((f"{key}_" if key in line else key, value) for key, value in own.items())
    line["logger"] = record.name
    if record.exc_info:
        trace = logging.Formatter().formatException(record.exc_info)
        line["traceback"] = without_secrets(trace)[-MAX_TRACEBACK_CHARS:]
    return line


def _parts(record: logging.LogRecord) -> tuple[str, dict[str, str | float]]:
    """The phrase of a message and its values by key; a message of another make is all phrase."""
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
    whole = TEMPLATE.fullmatch(template)
    if whole is None:
        return template, ()
    return whole[1], tuple((found[1], found[2]) for found in FIELD.finditer(whole[2]))


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
    """The text without the credentials of any URL in it."""
    return CREDENTIALS.sub("//", text)


def quoted(value: str | float) -> str:
    """A value as logfmt has it: bare where it can be, else quoted with JSON's escapes."""
    if not isinstance(value, str):
        return str(value)
    if BARE.fullmatch(value) and value.isprintable():
        return value
    escaped = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in escaped)
