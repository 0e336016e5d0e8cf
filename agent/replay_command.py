"""The commands replay and demo: diagnose recordings scrape by scrape. I/O edge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files

import click

from kneewatch.agent.captures import Captures, capture_names
from kneewatch.agent.console import NO_DATA, OK
from kneewatch.agent.printing import print_timeline, style
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.settings.table import timestamp
from kneewatch.agent.stated_deployment import stated
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.lines import wrapped
from kneewatch.rules.formatting import span

DEMO = "demo.jsonl.gz"
DEMO_WINDOW_S = 15.0
"""Length of the demo's window in seconds. The phases of the shipped recording last 30 s each, so a
window of 60 s would mix them."""

DEMO_CRITICAL_AFTER_S = 80.0
"""Seconds from the start of the shipped recording until it turns critical."""


def replay(
    captures: Sequence[str],
    settings: Settings,
    *,
    form: str,
    from_time: str | None,
    to_time: str | None,
) -> int:
    """Print the diagnosis of every recorded scrape. Returns the exit status."""
    from_s, to_s = timestamp(from_time), timestamp(to_time)
    if from_s is not None and to_s is not None and from_s > to_s:
        raise SettingsError(f"--from {from_time} is later than --to {to_time}")
    recorded = Captures(captures, from_s=from_s, to_s=to_s)
    profile = settings.profile(stated=stated(settings))
    diagnoses = _replayed(recorded, captures, profile, settings)
    status = print_timeline(diagnoses, form, settings.docs_url, named=len(captures) > 1)
    return NO_DATA if status == OK and recorded.unusable else status


def _replayed(
    recorded: Captures, paths: Sequence[str], profile: Profile, settings: Settings
) -> Iterator[list[Verdict]]:
    """Yields the diagnoses of each scrape."""
    streams = [TargetStream(name, profile, settings.limits()) for name in capture_names(paths)]
    return (streams[at].replay(entry) for at, entry in recorded)


def demo(settings: Settings, *, form: str) -> int:
    """Replay the shipped recording. Returns the exit status."""
    recording = str(files("kneewatch.agent") / DEMO)
    window_s = settings["window_s"]
    if settings.origin("window_s") == "default":
        window_s = DEMO_WINDOW_S
    profile = settings.profile(window_s=window_s)
    diagnoses = _replayed(Captures([recording]), [recording], profile, settings)
    if form == "text":
        introduction = (
            "Recording of a real vLLM 0.32.0 server on CPU with 160 KV cache blocks: healthy, "
            "nearly full, preempting, queueing, drained. Scraped every 2 s, window "
            f"{span(window_s)}."
        )
        click.echo("\n".join(wrapped(introduction, width=style().width, more=0)) + "\n")
    return print_timeline(diagnoses, form, settings.docs_url, named=False)
