"""Exit statuses, messages and garbage collection for all commands. I/O edge.

It imports none of the modules of a diagnosis, so that commands start fast.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

import click

from kneewatch.rules.formatting import printable

OK, FOUND, NO_DATA = 0, 1, 2
"""Exit status: nothing found; findings at warning or worse; wrong usage or settings, or no data."""


def say(message: str) -> None:
    """Print a message of the program itself to stderr."""
    click.echo(f"kneewatch: {printable(message)}", err=True)


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
