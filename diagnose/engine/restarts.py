"""A server's processes: which launch each had, and how it ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from kneewatch.diagnose.causes.evidence import ReplacedProcess
from kneewatch.diagnose.latency_split import Changed
from kneewatch.diagnose.ranking import BY_ID
from kneewatch.diagnose.verdict import Cause, Evidence, Server, Verdict
from kneewatch.rules.formatting import quantity
from kneewatch.rules.rule import ITL, TTFT, WARNING

RESTARTS_KEPT = 16
LAST_PAGE = (("running", "{} running"), ("waiting", "{} waiting"), ("kv_usage_ratio", "KV {}"))
"""Signals of a process's last page that are kept after the process was replaced."""


def replaced(t_s: float, started_s: float | None, newest: Verdict | None) -> ReplacedProcess:
    """A description of the replaced process, from its last diagnosis.

    `t_s` is when the next process was first seen.
    """
    if newest is None:
        return ReplacedProcess(t_s)
    numbers = [
        words.format(quantity(key, value))
        for key, words in LAST_PAGE
        if (value := newest.values.get(key)) is not None
    ]
    uptime_s = None if started_s is None else max(0.0, newest.t_s - started_s)
    return ReplacedProcess(
        t_s,
        uptime_s,
        ", ".join([*numbers, *problems(newest)]),
        broke_off=broke_off(newest),
        away_s=t_s - newest.t_s,
    )


def launch_of(server: Server | None, labels: Mapping[str, str]) -> Mapping[str, object]:
    """Version, flags and the page's labels of a process, as far as they are known."""
    return {**labels, **((server and server.launch) or {})}


def compared(cause: Cause, what: Changed) -> Cause:
    """The cause, with the restart since which latency is off as evidence."""
    restart = what.restart
    if restart is None or {TTFT, ITL}.isdisjoint(BY_ID[cause.id].moves):
        return cause
    words = f"{restart.words()}: {what.stream_words() or 'slower than before'}"
    return replace(
        cause, evidence=(*cause.evidence, Evidence("process_start", restart.t_s, None, words))
    )


def problems(diagnosis: Verdict) -> list[str]:
    return [cause.id for cause in diagnosis.causes if cause.severity >= WARNING]


def broke_off(last: Verdict) -> bool:
    """Whether a process that ended after this diagnosis had requests or a problem.

    If so, it was not drained on purpose.
    """
    in_flight = (last.values.get("running") or 0.0) + (last.values.get("waiting") or 0.0)
    return in_flight >= 1 or bool(problems(last))
