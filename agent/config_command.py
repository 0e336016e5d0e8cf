"""The command config: the effective settings. I/O edge."""

from __future__ import annotations

import click

from kneewatch.agent.console import OK
from kneewatch.agent.notify.receivers import as_toml as receivers_toml
from kneewatch.agent.notify.receivers import receivers
from kneewatch.agent.report.delivery import receivers_of
from kneewatch.agent.report.schedule import cron_of
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.targets import targets_toml


def config(settings: Settings) -> int:
    """Print the effective settings as a TOML file with their origins. Returns the exit status."""
    # Whatever `run` would reject is an error before anything is printed.
    settings.profile().rules()
    receivers(settings)
    if cron_of(settings) is not None:
        receivers_of(settings)
    for line in (*settings.as_toml(), *targets_toml(settings), *receivers_toml(settings)):
        click.echo(line)
    return OK
