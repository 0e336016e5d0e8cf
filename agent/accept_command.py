"""`kneewatch accept`: makes present values the usual ones in a running daemon. I/O edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import orjson

from kneewatch.agent.console import NO_DATA, OK, say
from kneewatch.agent.server.probe import answer_of
from kneewatch.collector.errors import CollectError
from kneewatch.collector.http.address import FetchSettings
from kneewatch.rules.formatting import clock, date, quantity

TIMEOUT_S = 10.0


def accept(
    target: str,
    *,
    model: str,
    engine: str,
    what: Sequence[str],
    dry_run: bool,
    daemon: str,
    token_file: Path | None,
    form: str,
) -> int:
    """Ask the daemon, and print what was usual and what is now. Returns the exit status.

    Raises:
        CollectError: the daemon does not answer, or refuses.
    """
    body = {"target": target, "model": model, "engine": engine, "what": what, "dry_run": dry_run}
    settings = FetchSettings(bearer_token_file=None if token_file is None else str(token_file))
    try:
        answer = answer_of(
            daemon, "/api/v1/accept", settings, post=orjson.dumps(body), timeout_s=TIMEOUT_S
        )
    except CollectError as error:
        hint = {
            403: "give the admin token (--token-file)",
            404: "name a target as on the triage page, and an engine of it",
        }.get(error.status or 0, error.hint)
        raise CollectError(str(error), kind=error.kind, hint=hint) from error
    if form == "json":
        click.echo(answer.decode())
        return OK
    document: Mapping[str, Any] = orjson.loads(answer)
    lines = [line for each in document["engines"] for line in _lines(each)]
    click.echo("\n".join(lines))
    if dry_run:
        say("nothing was changed (--dry-run)")
    return OK if any(each["deviations"] for each in document["engines"]) else NO_DATA


def _lines(engine: Mapping[str, Any]) -> list[str]:
    name = f"{engine['target']} {engine['model']} engine {engine['engine']}"
    if not engine["deviations"]:
        return [f"{name}: nothing deviates from its usual value"]
    return [
        f"{name}:",
        *(
            f"  {each['signal']}: usual {quantity(each['signal'], each['usual'])}, "
            f"now {quantity(each['signal'], each['now'])}, "
            f"since {date(each['since'])} {clock(each['since'])} UTC"
            for each in engine["deviations"]
        ),
    ]
