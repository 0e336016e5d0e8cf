"""Exit status and messages of every command, without the imports of a diagnosis. I/O edge."""

from __future__ import annotations

import click

from kneewatch.rules.formatting import printable

OK, FOUND, NO_DATA = 0, 1, 2
"""Exit status: nothing found; findings at warning or worse; wrong usage or settings, or no data."""


def say(message: str) -> None:
    """Print a message of the program itself to stderr."""
    click.echo(f"kneewatch: {printable(message)}", err=True)
