"""Causes of lost availability: engine stalled or restarted, target down, metrics missing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from kneewatch.collector.errors import CollectError
from kneewatch.diagnose.account_signals import (
    ALL_CANCELLED,
    AT_THE_DOOR,
    CANCELLED,
    PREFILL_SILENCE,
    UNADMITTED,
)
from kneewatch.diagnose.cause import Cause, Evidence
from kneewatch.diagnose.causes.common_conditions import (
    GIANTS_BLOCK,
    ITL_DRIFT,
    KV_HAS_ROOM,
    QUEUED,
    RUNNING,
    UNMOVED,
    WAITING,
)
from kneewatch.diagnose.causes.evidence import Facts, ReplacedProcess
from kneewatch.diagnose.causes.record import Computed, Form, cause, term
from kneewatch.diagnose.deployment.server_state import NO_STATE, CanaryState, ServerState
from kneewatch.rules.conditions import Condition, FirstOf, Number, Scope
from kneewatch.rules.formatting import as_sentence, failed_in_a_row, percent, plural, rate, span
from kneewatch.rules.quantities import Live
from kneewatch.rules.rule import HOUR_S, Severity

STALLED_S = 30.0
STALL_NOTED_S = 10.0

CRASH_LOOP_S = 600.0
CRASHES_WARNING, CRASHES_CRITICAL = 3, 5
"""Number of processes per hour that ended with work in progress: a slow crash loop.

A planned deployment drains its processes first.
"""

RESTARTS_SHOWN = 3
STARTS = (("start_s", "the start"), ("weights_load_s", "loading the weights"))
"""Signals of a start's duration, which some engines show."""

RESTART_NOTED_S = 60.0
DOWN_WARNING, DOWN_CRITICAL = 2, 3
START_S, STARTS_MAX_S = 300.0, 1800.0
"""How long, in seconds, an idle server may be away for a planned restart.

It is `START_S`, a common start-up time of vLLM; or this server's own start-up time if that was
longer, but at most `STARTS_MAX_S`.
"""
START_MARGIN_RATIO = 1.5

SIGHT = ("running", "waiting", "kv_usage_ratio")
"""The signals of load and cache. A page without any of them is useless for a diagnosis."""

NO_STATISTICS = "Check the vLLM version and that statistics are not disabled (--disable-log-stats)."
CHECK_PAGE = "Check the raw /metrics page: a proxy or exporter in between may alter it."
NOT_YET_USED = (
    "Nothing to do: with several API servers vLLM exports these metrics from the first request on."
)
HEALTHY_WITHOUT_PAGE = (
    "Requests may still be served: read the server's log for the error of its /metrics page, and "
    "compare the time that the page takes with fetch.read_timeout_s."
)
"""What to do if a healthy server's page lacks metrics, by the reason."""


IN_FLIGHT = RUNNING.otherwise(0.0) + WAITING.otherwise(0.0)


class Stalled(Condition, Struct, frozen=True):
    """Whether requests have been in flight for 30 s without progress.

    No progress means: no token generated, no request finished, and no prefill that gets further
    than earlier ones. The 30 s do not scale with the window, because prefill times do not. False if
    the page lacks the counters.

    A shorter watch concludes the cause earlier, at `info`, unless a prefill explains the silence.
    With `whole`, the full 30 s are required, or this engine's longest possible prefill if that is
    longer. After 30 s a queue is always an effect of the stall: more replicas or a larger batch
    would not help.
    """

    whole: bool = False

    def source(self, scope: Scope, *, side: bool = True) -> str:
        noted_s = f"max({STALL_NOTED_S}, {STALLED_S} * facts.scale)"
        explained_s = f"({scope.signal(PREFILL_SILENCE)} or 0.0)"
        from_s = f"min({STALLED_S}, max({noted_s}, {explained_s}))"
        if self.whole:
            from_s = f"max({STALLED_S}, {explained_s})"
        return f"((facts.streaks_s.get('stalled', -1.0) >= {from_s}) is {side})"


def stalled_from_s(values: Mapping[str, float | None]) -> float:
    """Seconds without progress after which an engine counts as stalled: no prefill takes that
    long."""
    return max(STALLED_S, values.get(PREFILL_SILENCE) or 0.0)


MOVES_FROM = 0.1
"""Prefills are being restarted if no request is answered and KV usage falls this far.

The fall is measured from the maximum, in shares of the cache (0..1).
"""


def _still(facts: Facts) -> str:
    still = f"no token generated and no request finished for {span(_stalled_s(facts))}"
    highest, mean = facts.get("kv_usage_max_ratio"), facts.get("kv_usage_avg_ratio")
    if highest - mean < MOVES_FROM:
        return still
    return f"{still}; KV usage moves up to {percent(highest)}: prefills start over and never end"


def _stalled(facts: Facts) -> str:
    counts = [
        f"{plural(round(count), 'request')} {state}"
        for signal, state in (("running", "running"), ("waiting", "queued"))
        if (count := facts.values.get(signal)) is not None
    ]
    at_the_door = facts.get(AT_THE_DOOR)
    if at_the_door and not facts.get("running") + facts.get("waiting"):
        counts = [
            f"{plural(round(at_the_door), 'call')} open at the API server beyond the usual number "
            "of connections, while it shows no request in flight"
        ]
    elif not facts.get("running") + facts.get("waiting") and "accepted_per_s" in facts.values:
        per_s = facts.get("accepted_per_s")
        counts = [f"{rate(per_s, 'calls')} end unanswered while it shows no request in flight"]
    words = f"no token for {span(_stalled_s(facts))}, {' and '.join(counts)}"
    if _stalled_s(facts) < stalled_from_s(facts.values):
        return f"Engine stalled, or one long prefill: {words}."
    return f"Engine stalled: {words}."


def _stalled_s(facts: Facts) -> float:
    return facts.streaks_s.get("stalled", 0.0)


STALLED_FOR_S = Computed(lambda facts: facts.streaks_s.get("stalled"), "seconds without progress")

STALLED_LEVER = (
    "Save the log, then restart the engine. Look for a request longer than the KV cache: it can "
    "never be scheduled."
)


def _stalled_lever(facts: Facts) -> str:
    """What to do first about a stalled engine, or what held-back requests may wait for."""
    if not facts.get("waiting_deferred"):
        return STALLED_LEVER
    return (
        "Save the log, then restart the engine. Requests are held back for KV from elsewhere, an "
        "adapter or a grammar: look for errors of the KV connector and at the peer that sends."
    )


ADMITS_NONE = (
    (Live(UNADMITTED) >= 60.0)
    & QUEUED
    & KV_HAS_ROOM
    & ~GIANTS_BLOCK.assume(unknown=False)
    & (ITL_DRIFT <= UNMOVED).assume(unknown=True)
    & (Live("iteration_tokens_mean") <= 128.0).assume(unknown=True)
    & ~Live("lora_max").known
).assume(unknown=False)
"""Requests queue for a minute and none is admitted, though seats and KV cache have room, and steps
are as short as usual: no prompt is under prefill. Nor do adapters hold them back."""

ENGINE_STALLED = cause(
    "engine_stalled",
    Form(
        gate=Stalled(),
        start=Number(0.8),
        terms=(
            term(
                FirstOf((STALLED_FOR_S, IN_FLIGHT)),
                None,
                1.5,
                _still,
                signal="generation_tokens_per_s",
            ),
            term(IN_FLIGHT, 1.0, 0.8, "{value} requests in flight"),
        ),
        levels=((Severity.CRITICAL, Stalled(whole=True)),),
        severity=Severity.INFO,
        say=_stalled,
        summary="Requests are in flight, and none makes progress",
        lever=_stalled_lever,
    ),
    Form(
        gate=ADMITS_NONE,
        start=Number(0.8),
        terms=(
            term(
                Live(UNADMITTED),
                60.0,
                1.5,
                "no queued request had a first token for {value:s}; {running} run, at most half of "
                "those that ran before; KV cache {kv_usage_avg_ratio:%} full (mean)",
            ),
        ),
        severity=Severity.CRITICAL,
        say="Admission stalled: {waiting} requests queued, none admitted for {unadmitted_s:s} "
        "although seats and KV cache have room.",
        summary="Requests queue, and none is admitted although there is room",
        lever="Save the log, then restart the engine: what runs goes on, what waits is never "
        "admitted.",
    ),
)


GAUGES_STALE = Live(CANCELLED) >= ALL_CANCELLED

METRICS_STALE = cause(
    "metrics_stale",
    Form(
        gate=GAUGES_STALE & (IN_FLIGHT >= 1.0),
        start=Number(0.5),
        terms=(
            term(
                Live(CANCELLED),
                ALL_CANCELLED,
                2.5,
                "the calls of {value:%} of the requests on the page ended unfinished, within "
                "seconds of the last token, and none was opened since",
            ),
        ),
        say="The gauges are stale: {in_flight} requests on the page, the calls of all of "
        "them have ended. Nothing hangs.",
        words=(("in_flight", IN_FLIGHT),),
        lever="Send one request: the next step corrects the gauges. Do not restart. Routers "
        "that read these gauges avoid the server until then.",
    ),
)

CANARY_FAILURES = 2
"""Failed canary requests in a row that count; a single failure may come from a proxy's restart."""


def unanswered(canary: CanaryState, facts: Facts) -> Cause | None:
    """`engine_stalled`, concluded from canary requests without an answer; None if too few failed.

    The page must show no other load. A stuck engine whose gauges read 0 can be proven in no other
    way.
    """
    in_flight = facts.get("running") + facts.get("waiting")
    if canary.failures < CANARY_FAILURES or in_flight > canary.failures:
        return None
    text = f"{canary.failures} canary requests in a row had no answer: {canary.error}"
    return Cause(
        id=ENGINE_STALLED.id,
        confidence=round(1 - 0.4**canary.failures, 2),
        severity=Severity.CRITICAL,
        summary=f"Engine stalled: {text}. No token was generated meanwhile.",
        evidence=(
            Evidence("canary_failures", float(canary.failures), float(CANARY_FAILURES), text),
        ),
        guide=ENGINE_STALLED.guide,
        lever=STALLED_LEVER,
        since_s=canary.since_s,
    )


AWAKE = Live("awake")

ENGINE_ASLEEP = cause(
    "engine_asleep",
    Form(
        gate=AWAKE < 1.0,
        start=Number(1.0),
        terms=(
            term(AWAKE, None, 2.0, "engine_sleep_state says that it is not awake"),
            term(
                IN_FLIGHT,
                1.0,
                0.5,
                "{value} requests in flight that it does not serve",
                when=IN_FLIGHT >= 1.0,
                signal="waiting",
            ),
        ),
        severity=Severity.INFO,
        say="Engine asleep: it serves no request until it is woken.",
        lever="Wake it with POST /wake_up (VLLM_SERVER_DEV_MODE=1) when it is needed; route no "
        "request to it before.",
    ),
)


def engine_restarted(facts: Facts) -> Cause | None:
    """The vLLM process was replaced: info for a minute, then warning or critical if it repeats."""
    within_hour = [each for each in facts.restarts if facts.now_s - each.t_s <= HOUR_S]
    if not within_hour:
        return None
    ago_s = facts.now_s - within_hour[-1].t_s
    at_once = sum(facts.now_s - each.t_s <= CRASH_LOOP_S for each in within_hour)
    broke_off = sum(each.broke_off for each in within_hour)
    severity = max(_severity(at_once), _severity(broke_off, CRASHES_WARNING, CRASHES_CRITICAL))
    if severity == Severity.INFO and ago_s > RESTART_NOTED_S * facts.scale:
        return None
    loop, many = "", len(within_hour) if broke_off >= CRASHES_WARNING else at_once
    if many > 1:
        loop = f"{many} times in {span(HOUR_S if many > at_once else CRASH_LOOP_S)}, last "
    return Cause(
        id="engine_restarted",
        confidence=0.99,
        severity=severity,
        summary=f"Engine restarted {loop}{span(ago_s)} ago; its caches are cold.",
        evidence=(
            Evidence(
                "process_start",
                float(many),
                None,
                "the counters or the process start time were reset",
            ),
            *(
                Evidence("process_start", each.uptime_s, None, how_ended(each))
                for each in reversed(within_hour[-RESTARTS_SHOWN:])
                if each.last_page
            ),
            *(
                Evidence(signal, took_s, None, f"{what} took {span(took_s)}")
                for signal, what in STARTS
                if (took_s := facts.values.get(signal)) is not None
            ),
        ),
        lever="If nobody restarted it on purpose, read the old process's log. A load balancer in "
        "front of several processes looks the same: scrape each process directly.",
    )


def how_ended(process: ReplacedProcess) -> str:
    """How a replaced process ended, how long it ran, and what its last page showed."""
    ran = "" if process.uptime_s is None else f" after {span(process.uptime_s)}"
    how = "ended under load" if process.broke_off else "ended without requests"
    return f"a process {how}{ran}; its last page: {process.last_page}"


def is_blind(facts: Facts) -> bool:
    """Whether the page lacks all metrics of load and cache, as an empty page does."""
    return all(signal in facts.missing for signal in SIGHT)


def lack_words(metrics: Sequence[str], impossible: Mapping[str, float]) -> str:
    """Why metrics have no usable value: they are absent from the page, or their values are
    impossible."""
    absent = [metric for metric in metrics if metric not in impossible]
    reasons = _impossible_values(metrics, impossible)
    if absent:
        verb = "is" if len(absent) == 1 else "are"
        reasons.append(f"{', '.join(absent)} {verb} not on the page")
    return "; ".join(reasons)


def _impossible_values(metrics: Iterable[str], impossible: Mapping[str, float]) -> list[str]:
    """A phrase for each impossible value, with the metrics that have this value."""
    by_value: dict[str, list[str]] = {}
    for metric in metrics:
        if metric in impossible:
            by_value.setdefault(f"{impossible[metric]:g}", []).append(metric)
    return [
        f"{', '.join(named)} {'is' if len(named) == 1 else 'are'} "
        + ("NaN" if value == "nan" else f"{value}, which is impossible")
        for value, named in by_value.items()
    ]


def metrics_missing(
    facts: Facts,
    core: tuple[str, ...],
    impossible: Mapping[str, float],
    *,
    switch_on: str,
    blind: int,
    unused: bool,
) -> Cause | None:
    """Core metrics are absent or have impossible values, so their signals cannot be judged.

    `switch_on`: what to do if another engine's page lacks them; empty for vLLM. `blind`: number of
    scrapes in a row without any metric of load or cache. With several API servers vLLM exports load
    and cache only after the engine's first step, so the severity is only `info` for an `unused`
    engine.
    """
    lacking = [signal for signal in core if signal in facts.missing]
    if not lacking:
        return None
    metrics = sorted({metric for signal in lacking for metric in facts.missing[signal]})
    absent = [metric for metric in metrics if metric not in impossible]
    lacks = [f"The page lacks {', '.join(absent)}"] if absent else []
    why = "; ".join([*lacks, *_impossible_values(metrics, impossible)])
    severity = Severity.CRITICAL if blind >= DOWN_CRITICAL else Severity.WARNING
    summary = f"{why}: {', '.join(lacking)} cannot be judged."
    lever = switch_on or NO_STATISTICS if absent else CHECK_PAGE
    if unused and absent == metrics and set(lacking) == set(SIGHT):
        severity, lever = Severity.INFO, NOT_YET_USED
        summary = f"No request yet: vLLM exports {', '.join(absent)} from the first request on."
    evidence = tuple(
        Evidence(signal, None, None, lack_words(facts.missing[signal], impossible))
        for signal in lacking
    )
    return Cause(
        id="metrics_missing",
        confidence=0.99,
        severity=severity,
        summary=summary,
        evidence=evidence,
        lever=lever,
    )


def vanished(engine: str, scrapes: int, last_s: float, *, successor: str | None) -> Cause:
    """The cause for an engine that is missing from a readable page, for `scrapes` scrapes in a row.

    With a `successor` the engine was replaced, which is `info`. Otherwise it died while the page's
    other engines kept running.
    """
    text = f"{engine} is no longer on the page"
    summary = f"E{text[1:]} (missing from {scrapes} scrape{'s' if scrapes > 1 else ''} in a row)."
    severity, lever = _severity(scrapes), "Check whether this engine died: its peers still report."
    if successor is not None:
        severity, summary = Severity.INFO, f"E{text[1:]}: {successor} replaced it."
        lever = "Nothing to do if the model or the engine was replaced on purpose."
    return Cause(
        id="metrics_missing",
        confidence=round(1 - 0.4**scrapes, 2),
        severity=severity,
        summary=summary,
        evidence=(Evidence("engine_missed_scrapes", float(scrapes), None, text),),
        lever=lever,
        since_s=last_s,
    )


def _severity(count: int, warning: int = DOWN_WARNING, critical: int = DOWN_CRITICAL) -> Severity:
    if count >= critical:
        return Severity.CRITICAL
    return Severity.WARNING if count >= warning else Severity.INFO


def restart_patience_s(longest_start_s: float) -> float:
    """How long, in seconds, an idle server that stopped answering may be restarting."""
    return min(max(START_S, START_MARGIN_RATIO * longest_start_s), STARTS_MAX_S)


def unreadable(
    error: CollectError,
    failures: int,
    since_s: float,
    state: ServerState = NO_STATE,
    *,
    patience_s: float = 0.0,
) -> Cause:
    """A scrape failed. The cause is `metrics_missing` if the page is not vLLM's, or if the server
    is healthy but serves no page; otherwise it is `target_down`.

    With `patience_s`, the server's last page showed no request, so it may be restarting on purpose.
    For that many seconds the cause is only a warning, unless the server's state shows a failure.
    """
    severity, may_restart = _severity(failures), patience_s > 0 and not state.is_broken
    if may_restart and severity is Severity.CRITICAL:
        severity = Severity.WARNING
    down = error.kind not in ("no_vllm", "not_metrics", "exposition", "stale") and not state.healthy
    states = state.words()
    also = f"; {'; '.join(states)}" if states else ""
    hint = error.hint or "check that the server runs and listens on this address"
    lever = as_sentence(hint.replace("`", ""))
    return Cause(
        id="target_down" if down else "metrics_missing",
        confidence=round(1 - 0.4**failures, 2),
        severity=severity,
        summary=f"{failed_in_a_row(failures)}: {error}{also}",
        evidence=(
            Evidence("scrape_failures", float(failures), None, str(error)),
            *(Evidence("server_state", None, None, words) for words in states),
            *([_no_requests(patience_s)] if may_restart else ()),
        ),
        lever=HEALTHY_WITHOUT_PAGE if state.healthy else state.lever or lever,
        since_s=since_s,
    )


def _no_requests(patience_s: float) -> Evidence:
    words = f"no requests on its last page: it may restart, critical after {span(patience_s)}"
    return Evidence("in_flight", 0.0, None, words)


ENGINE_RESTARTED = cause("engine_restarted", judge=engine_restarted)
