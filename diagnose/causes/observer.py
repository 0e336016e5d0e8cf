"""The engine that stands still, and the observer's own limits. Pure."""

from __future__ import annotations

from kneewatch.collector.base import CollectError
from kneewatch.diagnose.case import Case, Cause, Evidence, Facts
from kneewatch.rules.model import Severity

STALLED_S = 30.0
RESTART_NOTED_S = 60.0
DOWN_WARNING_FAILURES = 2
DOWN_CRITICAL_FAILURES = 3


def engine_stalled(facts: Facts) -> Cause | None:
    """Requests are running or waiting, and no token comes out."""
    if not facts.held("stalled", STALLED_S):
        return None
    stalled_s = facts.streaks_s["stalled"]
    running, waiting = facts.get("running"), facts.get("waiting")
    case = Case(
        "engine_stalled",
        f"No token for {stalled_s:.0f} s with {running:.0f} requests running and {waiting:.0f} "
        "waiting.",
        "Restart the engine once its log is saved; a request that can never fit waits for ever, so "
        "look for one longer than the KV cache.",
        ("9.4",),
        Severity.CRITICAL,
        log_odds=0.8,
    )
    case.weigh(
        "generation_tokens_per_s",
        stalled_s,
        STALLED_S * facts.scale,
        1.5,
        f"nothing generated, prefilled or finished for {stalled_s:.0f} s",
    )
    case.weigh("running", running + waiting, 1.0, 0.8, "requests are in flight")
    return case.close()


def engine_restarted(facts: Facts) -> Cause | None:
    """The process was replaced a moment ago; windows start anew."""
    if facts.restarted_s is None or facts.now_s - facts.restarted_s > RESTART_NOTED_S * facts.scale:
        return None
    ago_s = facts.now_s - facts.restarted_s
    return Cause(
        "engine_restarted",
        0.99,
        Severity.INFO,
        f"The engine was restarted, first seen {ago_s:.0f} s ago; its caches are cold.",
        (Evidence("process_start", ago_s, None, "counters and start time began anew"),),
        (),
        (),
        "Read the old process's log if nobody restarted it on purpose.",
    )


def metrics_missing(facts: Facts, core: tuple[str, ...]) -> Cause | None:
    """Core metrics are not on the page: what depends on them cannot be judged."""
    lacking = [signal for signal in core if signal in facts.missing]
    if not lacking:
        return None
    metrics = sorted({metric for signal in lacking for metric in facts.missing[signal]})
    return Cause(
        "metrics_missing",
        0.99,
        Severity.WARNING,
        f"The page lacks {', '.join(metrics)}: {', '.join(lacking)} cannot be judged.",
        tuple(Evidence(signal, None, None, "metric is not on the page") for signal in lacking),
        (),
        (),
        "Check the vLLM version and that statistics are not disabled (--disable-log-stats).",
    )


def unreadable(error: CollectError, failures: int, since_s: float) -> Cause:
    """The page could not be had (`target_down`) or is not what it should be (`metrics_missing`)."""
    down = error.kind not in ("no_vllm", "not_metrics", "exposition")
    severity = Severity.INFO
    if failures >= DOWN_CRITICAL_FAILURES:
        severity = Severity.CRITICAL
    elif failures >= DOWN_WARNING_FAILURES:
        severity = Severity.WARNING
    return Cause(
        "target_down" if down else "metrics_missing",
        round(1 - 0.4**failures, 2),
        severity,
        f"{failures} scrape{'s' if failures > 1 else ''} in a row failed: {error}",
        (Evidence("scrape_failures", float(failures), None, str(error)),),
        (),
        (),
        error.hint or "See whether the server runs and listens.",
        since_s,
    )
