"""Recommendations and stop-gaps as text. Pure, except that pages about causes are read once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files

from kneewatch.diagnose.engine.wording import spoken
from kneewatch.diagnose.ranking import BY_ID, ENGINE_DIED, ENGINE_RESTARTED, STARTUP_FAILED
from kneewatch.diagnose.recommend.advice import Advice, FlagChange, ServeCommand
from kneewatch.diagnose.recommend.ledger import BACKLOG
from kneewatch.diagnose.recommend.serve_command import arguments
from kneewatch.diagnose.verdict import Cause, Verdict
from kneewatch.diagnose.verdict_json import change_words, changes_words
from kneewatch.reports.lines import first_sentence, moment
from kneewatch.rules.formatting import (
    as_sentence,
    clock,
    duration,
    number,
    percent,
    plural,
    rate,
    span,
)
from kneewatch.rules.rule import Severity

NUMBERS_SHOWN = 5

Column = tuple[str, str, Callable[[float], str]]
"""The key, the label and the format of a signal."""

NUMBERS: tuple[Column, ...] = (
    ("kv_capacity_tokens", "KV tokens", number),
    ("max_concurrency", "requests that fit at once", number),
    ("max_num_seqs", "requests that run at once", number),
    ("kv_usage_ratio", "mean KV usage", percent),
    ("preemption_per_s", "preemptions", rate),
    ("queue_wait_s", "queue wait", duration),
    ("ttft_s", "TTFT", duration),
    ("itl_s", "ITL", duration),
    ("ttft_p99_s", "TTFT P99", duration),
    ("itl_p99_s", "ITL P99", duration),
    ("longest_step_s", "longest step", duration),
    ("prefill_p99_s", "prefill P99", duration),
    ("output_tokens_per_s", "output tokens/s", number),
    ("waiting", "queued", number),
    ("waiting_deferred", "deferred", number),
    ("spec_acceptance_ratio", "acceptance", percent),
    ("load_ratio", "load", percent),
    ("output_tokens_p99", "output tokens P99", number),
    ("usd_per_million_tokens", "USD per million tokens", number),
    ("usd_per_million_tokens_at_least", "USD per million tokens, at least", number),
    ("tokens_per_s_per_gpu", "tokens/s per GPU (benchmark)", number),
    ("requests_per_s_per_gpu", "requests/s per GPU (benchmark)", number),
    ("usd_per_million_tokens_at_limit", "USD per million tokens at the limit", number),
)
"""The signals whose numbers are shown, in this order. The JSON document has all signals."""


SIGNAL_NAMES = {key: label for key, label, _ in NUMBERS} | {
    "preemption_ratio_per_s": "share of running requests preempted",
    "kv_usage_avg_ratio": "mean KV usage",
}
UNITS = re.compile(r"(_ratio|_per_s|_tokens|_s|_usd|_bytes)+$")


def signal_name(key: str) -> str:
    """The name of a signal for people; the unit is with its value."""
    words = UNITS.sub("", key).replace("_", " ")
    return SIGNAL_NAMES.get(key) or re.sub(
        r"\b(kv|ttft|itl|e2e|gpu)\b", lambda word: word[0].upper(), words
    )


def advised(diagnosis: Verdict, cause: Cause) -> list[Advice]:
    """The recommendations for a cause, the best first."""
    return [
        recommendation
        for recommendation in diagnosis.recommendations
        if recommendation.cause == cause.id
    ]


STOP_GAP = re.compile(r"^## Stop-gap now\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
STEP = re.compile(r"^\d+\. (.*?)(?=^\d+\. |\Z)", re.MULTILINE | re.DOTALL)
MARKUP = re.compile(r"\[([^\]]*)\]\([^)]*\)|`([^`]*)`")


@cache
def stop_gap(cause_id: str) -> tuple[str, ...]:
    """The stop-gap of a cause: the numbered steps that its page lists, as plain text.

    Empty if the page says that none is needed, or if the cause is unknown.
    """
    if cause_id not in BY_ID:
        return ()
    page = files("kneewatch.docs").joinpath("causes", f"{cause_id}.md").read_text("utf-8")
    section = STOP_GAP.search(page)
    steps = STEP.findall(section[1]) if section else []
    return tuple(MARKUP.sub(r"\1\2", " ".join(step.split())) for step in steps)


def stop_gap_steps(diagnosis: Verdict, cause: Cause) -> tuple[str, ...]:
    """The steps of a cause's stop-gap. Empty for a cause at info, which needs no action tonight."""
    if cause.severity <= Severity.INFO:
        return ()
    steps = (spoken(diagnosis, step) for step in stop_gap(cause.id))
    return (*_launch_before(diagnosis, cause), *filter(None, steps))


def _launch_before(diagnosis: Verdict, cause: Cause) -> Iterator[str]:
    """Yields the step back to the launch before the last restart, for the first cause, if the
    trouble began with that restart and nothing broke the server."""
    restart = None if diagnosis.changed is None else diagnosis.changed.restart
    broke = any(
        each.id == ENGINE_RESTARTED and each.severity > Severity.INFO for each in diagnosis.causes
    )
    if restart is None or broke or cause.id != diagnosis.causes[0].id:
        return
    if restart.changes:
        yield (
            f"This began with the restart at {clock(restart.t_s)[:5]} UTC: go back to the launch "
            f"before it, unless the change was meant ({', '.join(restart.changes)})."
        )
    else:
        yield (
            f"This began with the restart at {clock(restart.t_s)[:5]} UTC: compare version and "
            "flags with those before it, and go back if they differ."
        )


def moved(recommendation: Advice) -> list[tuple[str, str, str]]:
    """The numbers that change: the label, the value before ("" if unknown) and after, in the order
    of NUMBERS."""
    rows: list[tuple[str, str, str]] = []
    for key, label, formatted in NUMBERS:
        after, before = (
            _predicted_words(recommendation, key, formatted),
            recommendation.before.get(key),
        )
        row = label, "" if before is None else formatted(before), after
        rows += [row] if after and row[1] != after.partition(" (")[0] else []
    return rows


def _predicted_words(recommendation: Advice, key: str, formatted: Callable[[float], str]) -> str:
    """A number after the change with its band, or its upper end alone; empty if unknown."""
    predicted, stem = recommendation.predicted, key.removesuffix("s")
    after, low, high = (predicted.get(name) for name in (key, f"{stem}low_s", f"{stem}high_s"))
    if after is None:
        return "" if high is None else f"at most {formatted(high)}"
    if low is None or high is None:
        return formatted(after)
    return f"{formatted(after)} ({formatted(low)} to {formatted(high)})"


def doubt(recommendation: Advice) -> str:
    """A remark if the change alone is not enough; else empty."""
    return "not enough alone" if recommendation.suffices is False else ""


def numbers_words(recommendation: Advice) -> str:
    """The predicted effect: the numbers that change, with the old and the new value, and the
    cost."""
    parts = [
        f"{label} {before} -> {after}" if before else f"{label} {after}"
        for label, before, after in moved(recommendation)[:NUMBERS_SHOWN]
    ]
    if recommendation.cost_usd_per_hour:
        parts.append(f"{recommendation.cost_usd_per_hour:+,.2f} USD/h")
    return "; ".join(parts)


EXPECTED = "expected"


def of_load(recommendation: Advice, t_s: float) -> str:
    """The time of the load that advice and its numbers are for, to follow a label; empty if that is
    `t_s`."""
    of_s = recommendation.as_of_s
    return "" if of_s in (None, t_s) else f" for the load of {moment(of_s, t_s)}"


def measured_at_s(recommendation: Advice, diagnosis: Verdict, cause: Cause) -> float | None:
    """When the figures of advice are made anew; None if they are of the incident or of this moment.

    Those of its first window reach back before it, and contradict the evidence of now.
    """
    of_s, window_s = recommendation.as_of_s, diagnosis.window_s
    if of_s is None or cause.since_s is None or of_s >= cause.since_s + window_s:
        return None
    return of_s + window_s if of_s < diagnosis.t_s < of_s + window_s else None


def why_words(recommendation: Advice, t_s: float) -> str:
    """What a change does and why, with the time of its figures unless that is `t_s`: others than
    those of now would contradict the evidence."""
    of_s, words = recommendation.as_of_s, recommendation.summary
    return words if of_s in (None, t_s) else f"At {moment(of_s, t_s)}: {words}"


def gist(recommendation: Advice, t_s: float | None = None) -> str:
    """What a change does, at `t_s` with the time of its figures; the derivation that follows is
    left out. Advice without a change is whole."""
    words = recommendation.summary if t_s is None else why_words(recommendation, t_s)
    return first_sentence(words) if recommendation.changes else as_sentence(words)


def restart_words(recommendation: Advice) -> str:
    """What the restart for a change of flags costs, as far as it is known; "" without one,
    also for a server that is down."""
    is_down = recommendation.cause in (STARTUP_FAILED, ENGINE_DIED)
    if is_down or not any(change.flag.startswith("--") for change in recommendation.changes):
        return ""
    command = recommendation.command
    if command is None:
        return "needs a restart, which empties the caches"
    start_s, hit_ratio = command.restart_at_least_s, command.lost_prefix_hit_ratio
    parts = [
        "takes an unknown time (set server_log)"
        if start_s is None
        else f"takes at least {span(start_s)} to load the model",
        f"ends {plural(command.lost_requests, 'request')} unless drained"
        if command.lost_requests
        else "",
        "empties the prefix cache"
        + (f" ({percent(hit_ratio)} of prompt tokens hit it now)" if hit_ratio else ""),
    ]
    return f"needs a restart, which {', '.join(filter(None, parts))}"


RUN = "run: "
"""The start of a row with a command, which must stay one line to be copied."""


def args_words(command: ServeCommand) -> str:
    """The args of the container as YAML and JSON have them; empty without a pod."""
    return json.dumps(command.container_args) if command.container_args else ""


def command_rows(recommendation: Advice) -> list[str]:
    """The whole command after the change, with what it changes and what it may lack."""
    command = recommendation.command
    if command is None:
        return []
    parts = (
        ("changed", ", ".join(command.changed)),
        ("dropped", ", ".join(command.removed)),
        ("as the container's args", args_words(command)),
        ("not in the command", "; ".join(command.unknown)),
        ("cost", restart_words(recommendation)),
    )
    return [f"{RUN}{command.line}", *(f"{name}: {words}" for name, words in parts if words)]


def is_ending(cause: Cause, t_s: float) -> bool:
    """Whether the newest measurements no longer show a cause: it is in its clear time."""
    return cause.seen_s is not None and cause.seen_s < t_s


def do_first_label(cause: Cause, t_s: float) -> str:
    """The label of the first advice. A cause that is ending needs the advice only if it returns."""
    return "if it returns, do first" if is_ending(cause, t_s) else "do first"


FIX, THEN = "fix", "then fix it"


def command(changes: Sequence[FlagChange]) -> str:
    """The flags to add to the server's command line, quoted for a shell. "" if there are none."""
    return " ".join(arguments(changes))


def replaced(changes: Sequence[FlagChange]) -> str:
    """The current flags whose values the changes replace; empty if there are none."""
    return ", ".join(
        " ".join(arguments([FlagChange(change.flag, None, change.before)]))
        for change in changes
        if not (change.before is None or isinstance(change.before, bool)) and arguments([change])
    )


def besides(changes: Sequence[FlagChange]) -> list[str]:
    """The changes that do not set a flag: a flag that is removed, or another number of replicas."""
    return [change_words(change) for change in changes if not arguments([change])]


def flags_words(recommendation: Advice) -> str:
    """All changes in one line, without the values now."""
    changes = recommendation.changes
    return ", ".join(filter(None, (command(changes), *besides(changes))))


def brief_words(recommendation: Advice, t_s: float) -> str:
    """A change beside its flags, in a message: the flags that it replaces, other changes, the
    restart, what it does, and what may go wrong. The derivation is left out."""
    changes = recommendation.changes
    instead = replaced(changes)
    parts = (
        f"instead of {instead}" if instead else "",
        ", ".join(besides(changes)),
        restart_words(recommendation),
        gist(recommendation, t_s),
        doubt(recommendation),
        f"still missed: {' and '.join(recommendation.unmet)}" if recommendation.unmet else "",
        BACKLOG if BACKLOG in recommendation.summary else "",
        recommendation.risk,
    )
    return " ".join(map(as_sentence, filter(None, parts)))


def first_steps(diagnosis: Verdict, cause: Cause) -> list[tuple[str, str, str]]:
    """What to do, in order, as on the triage page: the stop-gap, then the change that fixes it; of
    each its label, its words and the change as flags. Without a recommendation: the cause's
    lever."""
    do_first = do_first_label(cause, diagnosis.t_s)
    best = next(iter(advised(diagnosis, cause)), None)
    words, flags = cause.lever, ""
    if best is not None:
        words, flags = why_words(best, diagnosis.t_s), changes_words(best)
    if steps := stop_gap_steps(diagnosis, cause):
        return [(do_first, " ".join(steps), ""), (THEN, words, flags)]
    return [(do_first, words, flags)]


def first_step(diagnosis: Verdict, cause: Cause) -> str:
    """The change that fixes a cause, in one line. Without a recommendation: the cause's lever."""
    *stop_gaps, (label, words, flags) = first_steps(diagnosis, cause)
    return f"{FIX if stop_gaps else label}: {flags or words}"


def rows(diagnosis: Verdict, cause: Cause) -> list[str]:
    """What to do against a cause as lines of text: the first steps, then what is expected of the
    first recommendation, and the others as alternatives, with their flags only."""
    steps = (
        f"{label}: {flags}. {words}" if flags else f"{label}: {words}"
        for label, words, flags in first_steps(diagnosis, cause)
    )
    return [*steps, *detail_rows(diagnosis, cause)]


def detail_rows(diagnosis: Verdict, cause: Cause) -> list[str]:
    """What is expected of the first recommendation against a cause, how to check and verify it, and
    the alternatives; no lines without a recommendation."""
    recommendations = advised(diagnosis, cause)
    if not recommendations:
        return []
    best, lines, verify = recommendations[0], list[str](), recommendations[0].verify
    if numbers := numbers_words(best):
        if (anew_s := measured_at_s(best, diagnosis, cause)) is not None:
            left, verify = span(anew_s - diagnosis.t_s), ()
            numbers = f"being measured, figures follow in {left}: the window began before the cause"
        lines.append(f"{EXPECTED}: {numbers}")
    lines += command_rows(best)
    if unknown := [*best.unknown, *_unknown_p99(best)]:
        lines.append(f"unknown: {'; '.join(unknown)}")
    for name, words in (("check before", best.checks), ("verify", verify)):
        lines += [f"{name}: {'; '.join(words)}"] if words else []
    others = "; or ".join(_short(other) for other in recommendations[1:] if other.changes)
    if others:
        lines.append(f"alternatives: {others}")
    return lines


def _unknown_p99(recommendation: Advice) -> Iterator[str]:
    """Why a predicted latency has no P99."""
    numbers = recommendation.predicted
    untold = [
        name
        for name, key in (("TTFT", "ttft"), ("ITL", "itl"))
        if f"{key}_s" in numbers and f"{key}_p99_s" not in numbers
    ]
    if untold:
        yield (
            f"{' and '.join(untold)} P99 after the change (too few windows of such a batch without "
            "a queue or preemptions)"
        )


def _short(recommendation: Advice) -> str:
    remarks = [remark] if (remark := doubt(recommendation)) else []
    if recommendation.cost_usd_per_hour:
        remarks.append(f"{recommendation.cost_usd_per_hour:+,.4g} USD/h")
    remarks += recommendation.worsens
    return changes_words(recommendation) + (f" ({', '.join(remarks)})" if remarks else "")
