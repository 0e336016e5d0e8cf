"""Exit statuses, messages, line length, ticks and garbage collection for all commands. I/O edge.

It imports none of the modules of a diagnosis, so that commands start fast.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

import click

from kneewatch.reports.lines import WIDTH, printable

OK, FOUND, NO_DATA = 0, 1, 2
"""Exit status: nothing found; findings at warning or worse; wrong usage or settings, or no data."""

LEAST_WIDTH = 60


def say(message: str) -> None:
    """Print a message of the program itself to stderr. A full disk there is not an error: no
    message could say so."""
    with suppress(OSError):
        click.echo(f"kneewatch: {printable(message)}", err=True)


def text_width() -> int:
    """The line length for text on stdout: that of the terminal, within limits."""
    return max(LEAST_WIDTH, min(WIDTH, columns(sys.stdout))) if sys.stdout.isatty() else WIDTH


def columns(stream: TextIO) -> int:
    """The width of a stream's terminal; WIDTH if it is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except OSError:
        return WIDTH


def ticks(
    interval_s: float,
    for_s: float | None,
    *,
    least: int = 1,
    passed_s: float = 0.0,
) -> Iterator[float]:
    """Yields ticks: the seconds since the start. The start was `passed_s` seconds ago.

    The first tick comes at once, the next ones every `interval_s`. If the work after a tick takes
    longer than the interval, the next tick comes at once and missed ticks are skipped.

    The ticks end when `for_s` has passed and at least `least` ticks were yielded.
    """
    start_s = due_s = time.monotonic() - passed_s
    for count in itertools.count(1):
        yield time.monotonic() - start_s
        due_s = max(due_s + interval_s, time.monotonic())
        if for_s is not None and due_s - start_s > for_s + 0.01 and count >= least:
            return
        time.sleep(max(0.0, due_s - time.monotonic()))


COLLECT_AFTER = 20_000
"""Number of new objects after which Python's garbage collector runs (Python's default: 700)."""


@contextmanager
def infrequent_gc() -> Generator[None]:
    """A context in which the garbage collector runs rarely. Imports and parsed pages leave almost
    no garbage."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
