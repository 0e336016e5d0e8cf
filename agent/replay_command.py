"""The commands replay and demo: recordings scrape by scrape. I/O edge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files

import click

from kneewatch.agent.console import NO_DATA, OK
from kneewatch.agent.prefetch import PrefetchedPages
from kneewatch.agent.printing import print_timeline, style
from kneewatch.agent.recording import Captures, capture_names, infrequent_gc
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.settings.options import timestamp
from kneewatch.agent.stated_deployment import stated
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.engine.engine_monitor import Catalogue
from kneewatch.reports.formatting import wrapped

DEMO = "demo.jsonl.gz"
DEMO_WINDOW_S = 15.0
"""The phases of the shipped recording last 30 s each: a window of a minute would blur them."""

DEMO_CRITICAL_AFTER_S = 80.0
"""The shipped recording turns critical this long after its start."""


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
    pages = PrefetchedPages(Captures(captures, from_s=from_s, to_s=to_s), settings.limits())
    profile = settings.profile(stated=stated(settings))
    diagnoses = _replayed(pages, captures, profile, settings)
    with infrequent_gc():
        status = print_timeline(diagnoses, form, settings.docs_url, named=len(captures) > 1)
    return NO_DATA if status == OK and pages.unusable else status


def _replayed(
    pages: PrefetchedPages, paths: Sequence[str], profile: Profile, settings: Settings
) -> Iterator[list[Diagnosis]]:
    """The diagnoses of each scrape. Raises SettingsError for a wrong threshold before the first."""
    catalogue, limits = Catalogue.of(profile), settings.limits()
    streams = [TargetStream(name, profile, limits, catalogue) for name in capture_names(paths)]
    return (streams[at].judge(t_s, page) for batch in pages for at, t_s, page in batch)


def demo(settings: Settings, *, form: str) -> int:
    """Replay the shipped recording. Returns the exit status."""
    recording = str(files("kneewatch.agent") / DEMO)
    window_s = settings["window_s"]
    if settings.origin("window_s") == "default":
        window_s = DEMO_WINDOW_S
    pages = PrefetchedPages(Captures([recording]), settings.limits())
    diagnoses = _replayed(pages, [recording], settings.profile(window_s=window_s), settings)
    if form == "text":
        introduction = (
            "A recording of a real vLLM 0.32.0 server on CPU with 160 KV blocks: healthy, nearly "
            "full, preempting, queueing, drained. It was scraped every 2 s and is judged with a "
            f"window of {window_s:g} s."
        )
        click.echo("\n".join(wrapped(introduction, width=style().width, more=0)) + "\n")
    return print_timeline(diagnoses, form, settings.docs_url, named=False)
