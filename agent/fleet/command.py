"""`kneewatch diagnose --prometheus`: diagnoses a fleet from the data of a metrics system. I/O
edge."""

from __future__ import annotations

import click
import msgspec

from kneewatch.agent.console import FOUND, NO_DATA, OK, say
from kneewatch.agent.fleet.snapshot import diagnose_fleet
from kneewatch.agent.printing import style
from kneewatch.agent.settings.effective import Settings
from kneewatch.diagnose.fleet.verdict import FleetVerdict
from kneewatch.reports.fleet_rendering import markdown, text
from kneewatch.rules.formatting import duration
from kneewatch.rules.rule import Severity


def diagnose(url: str, settings: Settings, *, selector: str, at_s: float | None, form: str) -> int:
    """Print the diagnosis of a fleet, now or at a moment. Returns the exit status.

    Raises:
        CollectError: the metrics system does not answer, or has no series of vLLM.
    """
    verdict = diagnose_fleet(url, settings, selector, at_s=at_s)
    if form == "json":
        click.echo(msgspec.json.encode(verdict.linked(settings.docs_url)).decode())
    else:
        click.echo(
            markdown(verdict, docs_url=settings.docs_url)
            if form == "markdown"
            else text(verdict, style(settings.docs_url))
        )
    load = verdict.load
    retried = f", {load.retried} of them again" if load.retried else ""
    say(f"{load.queries} queries{retried} in {duration(load.seconds)}")
    return status(verdict)


def status(verdict: FleetVerdict) -> int:
    """The exit status. A fleet that cannot be read counts as no data, never as ok."""
    if verdict.severity >= Severity.WARNING:
        return FOUND
    return NO_DATA if verdict.health == "unknown" else OK
