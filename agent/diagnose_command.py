"""The commands that diagnose one server: `diagnose` scrapes it for a while, or reads a capture or a
log; `replay` and `demo` diagnose recordings scrape by scrape. I/O edge."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from importlib.resources import files
from pathlib import Path

import click
from msgspec.structs import replace

from kneewatch.agent.captures import Captures, capture_name, capture_names, gpu_page
from kneewatch.agent.console import NO_DATA, OK, say, ticks
from kneewatch.agent.printing import print_diagnoses, print_timeline, progress, style
from kneewatch.agent.server.log import NO_START, LogFollower, facts_of_log, read_log
from kneewatch.agent.server.watch import ServerWatch, page_watch, server_watch
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.settings.table import timestamp
from kneewatch.agent.stated_deployment import stated
from kneewatch.agent.stream import GPU_INTERVAL_S, GpuStream, TargetStream, gpu_stream, no_gpus
from kneewatch.agent.targets import target_name
from kneewatch.collector.errors import CollectError, SettingsError
from kneewatch.collector.http.fetch import Fetcher, Scrape
from kneewatch.diagnose.account_signals import STALL
from kneewatch.diagnose.causes.availability import STALL_NOTED_S, stalled_from_s
from kneewatch.diagnose.deployment.server_facts import LOG
from kneewatch.diagnose.deployment.startup_log import StartupLog
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import LogFact, Server, Verdict
from kneewatch.reports.diagnosis_timeline import WorstState
from kneewatch.reports.lines import wrapped
from kneewatch.rules.formatting import span
from kneewatch.rules.rule import SCRAPES_IN_WINDOW, UNKNOWN, Severity

PROBED_BYTES = 1024 * 1024
"""Bytes of a file that are read to recognise a vLLM log."""


def diagnose(target: str, settings: Settings, fetcher: Fetcher, first: Scrape, *, form: str) -> int:
    """Watch a server, then print the diagnosis. Returns the exit status.

    `first` is the first scrape, which was made already.
    """
    profile = settings.profile(window_s=live_window_s(settings), stated=stated(settings))
    stream = TargetStream(target_name(target), profile, settings.limits())
    stream.server = watch = server_watch(target, settings)
    log = _log_of(watch)
    gpus = gpu_stream([target], settings, profile.window_s)
    try:
        with closing(gpus) if gpus else nullcontext():
            last, introduction = _watch(stream, fetcher, first, gpus, settings)
    except CollectError as error:
        # The log of a process on this node is found only after the scrape.
        log = watch.log.log if watch is not None and watch.log is not None else log
        if log.failure is None:
            raise
        say(f"{error}")
        return _print_log(log, target_name(target), settings, form)
    return print_diagnoses(
        last, form, settings.docs_url, introduction=introduction, log=_used_facts(stream, log)
    )


def diagnose_log(settings: Settings, *, form: str) -> int:
    """Print the diagnosis of a vLLM log: why the server did not start, why it died, or that it
    started. Returns the exit status."""
    path: str = settings["server_log"]
    try:
        log = read_log(path)
    except SettingsError as error:
        raise SettingsError(f"{settings.origin('server_log')}: {error}") from error
    if log.phase == "empty" and log.failure is None:
        raise SettingsError(f"{settings.origin('server_log')}: {path}: {NO_START}")
    return _print_log(log, path, settings, form)


def _check_is_no_log(path: str) -> None:
    """Check that a target is not a vLLM log.

    Raises:
        SettingsError: the target is a log; the message names the option for logs.
    """
    if path.endswith((".jsonl", ".gz")) or not Path(path).is_file():
        return
    follower = LogFollower(path)
    follower.read(PROBED_BYTES)
    if follower.log.phase != "empty" or follower.log.failure is not None:
        raise SettingsError(f"{path} is a vLLM log, not a capture: use --log {path}")


def _log_of(watch: ServerWatch | None) -> StartupLog:
    """The parsed vLLM log of a watched server.

    Raises:
        SettingsError: the log cannot be read.
    """
    if watch is None or watch.log is None:
        return StartupLog()
    watch.log.read_rest()
    if watch.log.log.phase == "empty":
        say(f"{watch.log.path}: {NO_START}")
    return watch.log.log


def _used_facts(stream: TargetStream, log: StartupLog) -> Mapping[str, LogFact]:
    """The facts of the log. Empty if the log was not used for this server; the reason is then
    printed to stderr."""
    facts = stream.monitor.server
    server = Server() if facts is None else facts.at(time.time())
    if not log.facts or any(fact.source == LOG for fact in server.facts):
        return log.facts
    for note in server.notes:
        if re.search(r"\blog\b", note):
            say(note)
    return {}


def _print_log(log: StartupLog, target: str, settings: Settings, form: str) -> int:
    # Imported here: only the diagnosis of a log needs it, and this import is slow.
    from kneewatch.diagnose.recommend.startup import log_diagnosis

    now_s = time.time()
    _, deployment = facts_of_log(stated(settings), log, now_s)
    diagnosis = log_diagnosis(log, deployment, target=target, t_s=now_s)
    return print_diagnoses([diagnosis], form, settings.docs_url, log=log.facts)


def live_window_s(settings: Settings) -> float:
    """Length of the short window in seconds: at most the watch time, and long enough for two
    scrapes."""
    window_s: float = min(settings["watch_s"], settings["window_s"])
    interval_s: float = min(settings["interval_s"], settings["watch_s"])
    return max(window_s, SCRAPES_IN_WINDOW * interval_s)


def diagnose_capture(path: str, settings: Settings, *, form: str) -> int:
    """Print the diagnosis of a capture as of its last scrape. Returns the exit status."""
    if gpu_page(settings) and settings.origin("gpu_metrics").startswith("flag"):
        raise SettingsError("--gpu-metrics needs a server: a capture has no GPU page")
    _check_is_no_log(path)
    stream = TargetStream(
        capture_name(path), settings.profile(stated=stated(settings)), settings.limits()
    )
    watch = page_watch(path, settings) if settings["server_log"] else None
    stream.server, log = watch, _log_of(watch)
    last: list[Verdict] = []
    worst = WorstState()
    for _, entry in Captures([path]):
        last = stream.replay(entry) or last
        worst.add(last)
    introduction = worst.ended_words(last)
    if introduction:
        introduction = f"{introduction} All states: kneewatch replay {path}"
    return print_diagnoses(
        last, form, settings.docs_url, introduction=introduction, log=_used_facts(stream, log)
    )


def _watch(
    stream: TargetStream,
    fetcher: Fetcher,
    first: Scrape,
    gpus: GpuStream | None,
    settings: Settings,
) -> tuple[list[Verdict], str]:
    """Scrape a server for the watch time. Returns the last diagnoses, and sentences about what the
    watch was too short for and about an earlier, worse state; "" if there is neither."""
    last: list[Verdict] = []
    worst = WorstState()
    try:
        for last, elapsed_s in _watch_scrapes(stream, fetcher, first, gpus, settings):
            progress(last, elapsed_s, settings["watch_s"])
            worst.add(last)
    except KeyboardInterrupt:
        if not last:
            raise
        say("interrupted: diagnosis of the scrapes so far")
    progress([], 0.0, 0.0)
    words = worst.ended_words(last)
    undecided = [diagnosis for diagnosis in last if _is_stall_undecided(diagnosis, settings)]
    if not undecided:
        return last, words
    decides_s = max(stalled_from_s(diagnosis.values) for diagnosis in undecided)
    decides = f"--for {math.ceil(decides_s + 2 * settings['interval_s'])}s decides"
    still = span(max(diagnosis.values[STALL] or 0.0 for diagnosis in undecided))
    words = (
        f"Unknown: no token for {still} while requests are in flight. The engine hangs, or a "
        f"prefill is long: {decides}. {words}"
    )
    return [
        replace(
            diagnosis,
            health=UNKNOWN if diagnosis.severity < Severity.WARNING else diagnosis.health,
            unknown=(*diagnosis.unknown, f"engine_stalled: no token for {still}; {decides}"),
        )
        if diagnosis in undecided
        else diagnosis
        for diagnosis in last
    ], words.rstrip()


def _is_stall_undecided(diagnosis: Verdict, settings: Settings) -> bool:
    """Whether an engine made no progress in much of the watch, but may only be slow."""
    stalled_s = diagnosis.values.get(STALL) or 0.0
    noticed_s: float = min(STALL_NOTED_S, settings["watch_s"] / 2)
    return noticed_s <= stalled_s < stalled_from_s(diagnosis.values)


def _watch_scrapes(
    stream: TargetStream,
    fetcher: Fetcher,
    first: Scrape,
    gpus: GpuStream | None,
    settings: Settings,
) -> Iterator[tuple[list[Verdict], float]]:
    """Yields the diagnoses after each scrape, and the seconds since the first one."""
    was_read, gpus_due_s = False, 0.0
    stream.gpus = gpus.monitor.reading if gpus else no_gpus
    watch_s = settings["watch_s"]
    # Rates need two scrapes, however short the watch.
    interval_s = min(settings["interval_s"], watch_s)
    passed_s = max(0.0, time.time() - first.t_s)
    scrape: Scrape | None = first
    for elapsed_s in ticks(interval_s, watch_s, least=2, passed_s=passed_s):
        if gpus is not None and elapsed_s >= gpus_due_s:
            gpus.scrape()
            gpus_due_s = elapsed_s + GPU_INTERVAL_S
        diagnoses = stream.scrape(fetcher) if scrape is None else stream.scraped(scrape)
        scrape = None
        was_read = was_read or any(diagnosis.was_read for diagnosis in diagnoses)
        if not was_read and stream.monitor.last_error is not None:
            # No answer at all means a wrong address, not an incident: fail at once.
            raise _with_url(fetcher.url, stream.monitor.last_error)
        if diagnoses:
            yield diagnoses, elapsed_s


def _with_url(url: str, error: CollectError) -> CollectError:
    """A copy of the error whose message and hint contain the page's URL."""
    hint = error.hint.replace("this address without /metrics", url.removesuffix("metrics"))
    text = f"{error}" if url in f"{error}" else f"{url}: {error}"
    return CollectError(text, kind=error.kind, hint=hint)


# --- Replay and demo ------------------------------------------------------------------------------


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
