"""Output of the commands: results to stdout, everything else to stderr. I/O edge."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence

import click
from msgspec.structs import replace

from kneewatch.agent.console import FOUND, NO_DATA, OK, columns, say, text_width
from kneewatch.collector.errors import CaptureError
from kneewatch.diagnose.deployment.startup_log import title
from kneewatch.diagnose.doc_links import linked
from kneewatch.diagnose.verdict import LogFact, Value, Verdict
from kneewatch.diagnose.verdict_json import encode
from kneewatch.reports import diagnosis_timeline as timeline
from kneewatch.reports.diagnosis_text import Style, escaped, markdown, text
from kneewatch.reports.lines import wrapped
from kneewatch.rules.rule import Severity

NO_FACTS: Mapping[str, LogFact] = {}
NO_SCRAPE = "no scrape in the requested period"


def style(docs_url: str = "") -> Style:
    """The style for stdout: colour only on a terminal, and not if NO_COLOR is set."""
    terminal = sys.stdout.isatty()
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return Style(colour=terminal and not plain, width=text_width(), docs_url=docs_url)


def progress(diagnoses: Sequence[Verdict], elapsed_s: float, watch_s: float) -> None:
    """Overwrite the progress line on stderr, if stderr is a terminal. Empty `diagnoses` clear the
    line."""
    if not sys.stderr.isatty():
        return
    line = ""
    if diagnoses:
        line = timeline.progress(diagnoses, elapsed_s, watch_s, columns(sys.stderr) - 1)
    click.echo(f"\r\x1b[K{line}", nl=False, err=True)


def print_diagnoses(
    diagnoses: Sequence[Verdict],
    form: str,
    docs_url: str,
    *,
    introduction: str = "",
    log: Mapping[str, LogFact] = NO_FACTS,
) -> int:
    """Print the diagnoses of one moment. Returns the exit status.

    The introduction is printed before text and Markdown; with JSON it is printed to stderr. `log`
    are the facts of the server's log: they follow text and Markdown, and are the key `log` in JSON.

    Raises:
        CaptureError: `diagnoses` is empty.
    """
    if not diagnoses:
        raise CaptureError("no scrape to diagnose")
    if introduction and form == "json":
        say(introduction)
    elif introduction:
        click.echo("\n".join(wrapped(introduction, width=text_width(), more=0)) + "\n")
    if form == "json":
        for diagnosis in diagnoses:
            shown = linked(replace(diagnosis, log=log or None), docs_url)
            click.echo(encode(shown).decode())
    elif form == "markdown":
        click.echo(markdown(diagnoses, docs_url=docs_url))
    else:
        click.echo(text(diagnoses, style(docs_url)))
    if log and form != "json":
        words = log_words(log)
        lines = wrapped(words, width=text_width(), more=3) if form == "text" else [escaped(words)]
        click.echo("\n" + "\n".join(lines))
    return status(max(diagnosis.severity for diagnosis in diagnoses), diagnoses)


def print_timeline(
    diagnoses_over_time: Iterable[list[Verdict]], form: str, docs_url: str, *, named: bool
) -> int:
    """Print the diagnoses of successive moments. Returns the exit status. `named`: include the
    names of targets.

    Raises:
        CaptureError: there is no scrape.
    """
    if form == "json":
        return _print_json_lines(diagnoses_over_time, docs_url)
    shown = Style() if form == "markdown" else style(docs_url)
    view = timeline.Timeline(shown, named=named)
    fence = ["```"] if form == "markdown" else []
    for lines in itertools.chain([fence], map(view.lines, diagnoses_over_time), [fence]):
        for line in lines:
            click.echo(line)
    if not view.last:
        raise CaptureError(NO_SCRAPE)
    if form == "markdown":
        click.echo(
            view.close(lambda ds, all_: markdown(ds, footers=all_, docs_url=docs_url), mark="#")
        )
    else:
        click.echo(view.close(lambda ds, all_: text(ds, shown, footers=all_)))
    return status(view.worst, view.last.values())


def _print_json_lines(diagnoses_over_time: Iterable[list[Verdict]], docs_url: str) -> int:
    worst, out = Severity.OK, sys.stdout.buffer
    last: dict[tuple[str, str, str], Verdict] = {}
    for diagnoses in diagnoses_over_time:
        for diagnosis in diagnoses:
            last[diagnosis.target, diagnosis.model, diagnosis.engine] = diagnosis
            worst = max(worst, diagnosis.severity)
            out.write(encode(linked(diagnosis, docs_url)) + b"\n")
    out.flush()
    if not last:
        raise CaptureError(NO_SCRAPE)
    return status(worst, last.values())


def status(worst: Severity, last: Iterable[Verdict]) -> int:
    """The exit status: FOUND if `worst` is at warning or worse; else NO_DATA if the state of an
    engine in `last` is unknown; else OK."""
    if worst >= Severity.WARNING:
        return FOUND
    return NO_DATA if any(diagnosis.health == "unknown" for diagnosis in last) else OK


# --- Facts of a start-up log ----------------------------------------------------------------------


_UNITS = {"_gib": " GiB", "_s": " s", "concurrency_tokens": " tokens"}


def log_words(facts: Mapping[str, LogFact]) -> str:
    """All facts of a log in one line, such as "from the log: vLLM 0.19.1, model weights 12.66
    GiB"."""
    return "from the log: " + ", ".join(_words(name, fact.value) for name, fact in facts.items())


def _words(name: str, value: Value) -> str:
    if isinstance(value, bool):
        return title(name) if value else title(name).replace("--", "--no-", 1)
    unit = next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")
    return f"{title(name)} {f'{value:,}' if isinstance(value, int) else value}{unit}"
