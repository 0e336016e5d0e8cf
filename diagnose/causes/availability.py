"""The engine that stands still, and the observer's own limits. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from kneewatch.collector.errors import CollectError
from kneewatch.diagnose.causes.common_conditions import QUEUE_RULES, QUEUES, RUNNING, WAITING
from kneewatch.diagnose.causes.evidence import Cause, Evidence, Facts
from kneewatch.diagnose.causes.record import CauseRecord, Form, Level, Sidecar, term
from kneewatch.rules.baseline import FAMILIES
from kneewatch.rules.conditions import ALWAYS, Clause, Leaf, Number
from kneewatch.rules.facts import Holds, Spelling, duration
from kneewatch.rules.quantities import FirstOf
from kneewatch.rules.rule import Severity

STALLED_S = 30.0
STALL_NOTED_S = 10.0

CRASH_LOOP_S = 600.0
RESTART_NOTED_S = 60.0
DOWN_WARNING_FAILURES = 2
DOWN_CRITICAL_FAILURES = 3

SIGHT = ("running", "waiting", "kv_usage_ratio")
"""The signals of load and cache: a page without any of them shows nothing."""

NO_STATISTICS = "Check the vLLM version and that statistics are not disabled (--disable-log-stats)."
SPOILT = "Look at the page itself: a proxy or an exporter in between may have spoilt it."
UNUSED = "Nothing: several API servers show load and cache from the first request on."
"""What to do about a page that lacks metrics, by why it does."""


IN_FLIGHT = RUNNING.otherwise(0.0) + WAITING.otherwise(0.0)


@dataclass(frozen=True, slots=True)
class Stalled(Leaf):
    """Whether requests have been in flight and nothing moved: no token, no KV block.

    Half a minute is not stretched with the window: a prefill takes as long whoever watches. A watch
    that is shorter than that can only note it, unless `whole` asks for all of it. False where it is
    not known: the page lacks the counters.
    """

    whole: bool = False

    def holds(self, *, side: bool) -> Holds:
        def stalled(facts: Facts) -> bool:
            least_s = STALLED_S
            if not self.whole:
                least_s = min(STALLED_S, max(STALL_NOTED_S, STALLED_S * facts.scale))
            return (facts.streaks_s.get("stalled", -1.0) >= least_s) == side

        return cast(Holds, stalled)

    def promql(self, to: Spelling, *, side: bool) -> Clause:
        span, step = duration(STALLED_S), duration(to.interval_s)
        tokens = [
            f"({to.summed(f'increase({series}[{span}])')} == 0)"
            for series in (to.raw("generation_tokens", "_total"), to.raw("prompt_tokens", "_total"))
        ]
        moved = to.summed(f"changes({to.raw('kv_cache_usage_perc')}[{span}])")
        in_flight = IN_FLIGHT.promql(to)
        clause = Clause((
            f"((min_over_time({in_flight}[{span}:{step}]) >= 1) and {' and '.join(tokens)}"
            f" and ({moved} == 0))",
        ))  # fmt: skip
        return clause if side else clause.negated


def _still(facts: Facts) -> str:
    return f"no token generated or prefilled and no KV block moved for {_stalled_s(facts):.0f} s"


def _stalled(facts: Facts) -> str:
    running, waiting = facts.get("running"), facts.get("waiting")
    return (
        f"Engine stalled: no token for {_stalled_s(facts):.0f} s with {running:.0f} requests "
        f"running and {waiting:.0f} queued."
    )


def _stalled_s(facts: Facts) -> float:
    return facts.streaks_s.get("stalled", 0.0)


STALLED_FOR_S = Sidecar(
    lambda facts: facts.streaks_s.get("stalled"),
    "PromQL sees it as no increase over the range",
    "seconds without progress",
)

ENGINE_STALLED = CauseRecord(
    id="engine_stalled",
    title="Engine stood still",
    means="Requests are running or waiting, and no token comes out.",
    forms=(
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
                term(IN_FLIGHT, 1.0, 0.8, "{value} requests are in flight", signal="running"),
            ),
            levels=(Level(Severity.CRITICAL, Stalled(whole=True)), Level(Severity.INFO)),
            say=((ALWAYS, _stalled),),
            summary="Requests are in flight and no token comes out",
            lever="Restart the engine once its log is saved. A request that can never fit waits "
            "for ever, so look for one longer than the KV cache.",
            guide=("9.4",),
        ),
    ),
    explains=(*QUEUES, "kv_pressure", "adapter_thrash", "kv_transfer_slow"),
    covers=QUEUE_RULES,
    moves=FAMILIES,
    levers=("max_model_len",),
    onset_s=Number(0.0),
)


def engine_restarted(facts: Facts) -> Cause | None:
    """The process was replaced: noted for a minute, and worse the more often of late."""
    times_s = [t_s for t_s in facts.restarts_s if facts.now_s - t_s <= CRASH_LOOP_S]
    if not times_s:
        return None
    ago_s, often = facts.now_s - times_s[-1], len(times_s)
    if often < 2 and ago_s > RESTART_NOTED_S * facts.scale:
        return None
    loop = f"{often} times in {CRASH_LOOP_S / 60:.0f} minutes, last " if often > 1 else ""
    return Cause(
        "engine_restarted",
        0.99,
        Severity.INFO if often < 2 else Severity.WARNING if often < 3 else Severity.CRITICAL,
        f"The engine was restarted {loop}{ago_s:.0f} s ago; its caches are cold.",
        (Evidence("process_start", float(often), None, "counters and start time began anew"),),
        (),
        (),
        "Read the old process's log if nobody restarted it on purpose; a balancer in front of "
        "several processes looks the same: watch each by itself.",
    )


def is_blind(facts: Facts) -> bool:
    """Whether the page says nothing of load and cache: it is worth no more than an empty one."""
    return all(signal in facts.missing for signal in SIGHT)


def lack_words(metrics: Sequence[str], impossible: Mapping[str, float]) -> str:
    """Why metrics give nothing: not on the page, or there with a value that they cannot have."""
    absent = [metric for metric in metrics if metric not in impossible]
    words = _odd(metrics, impossible)
    if absent:
        words.append(f"{', '.join(absent)} is not on the page")
    return "; ".join(words)


def _odd(metrics: Iterable[str], impossible: Mapping[str, float]) -> list[str]:
    """What impossible values metrics have, a line for each value."""
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
    blind: int,
    unused: bool,
) -> Cause | None:
    """Core metrics are not on the page, or say what cannot be: what depends on them cannot be
    judged. `blind`: scrapes in a row that said nothing of load and cache.

    Several API servers (`--data-parallel-size`, `--api-server-count`) show load and cache from the
    engine's first step on: that an `unused` engine lacks them is a note.
    """
    lacking = [signal for signal in core if signal in facts.missing]
    if not lacking:
        return None
    metrics = sorted({metric for signal in lacking for metric in facts.missing[signal]})
    absent = [metric for metric in metrics if metric not in impossible]
    lacks = [f"The page lacks {', '.join(absent)}"] if absent else []
    why = "; ".join([*lacks, *_odd(metrics, impossible)])
    severity = Severity.CRITICAL if blind >= DOWN_CRITICAL_FAILURES else Severity.WARNING
    summary = f"{why}: {', '.join(lacking)} cannot be judged."
    lever = NO_STATISTICS if absent else SPOILT
    if unused and absent == metrics and set(lacking) == set(SIGHT):
        severity, lever = Severity.INFO, UNUSED
        summary = f"No request has come yet: {', '.join(absent)} is not on the page before one."
    evidence = tuple(
        Evidence(signal, None, None, lack_words(facts.missing[signal], impossible))
        for signal in lacking
    )
    return Cause("metrics_missing", 0.99, severity, summary, evidence, (), (), lever)


def vanished(engine: str, scrapes: int, last_s: float, *, successor: str | None) -> Cause:
    """An engine is no longer on a page that can be read, for so many scrapes. With a `successor`
    it was replaced, which is a note; else it died beside others that stayed."""
    text = f"{engine} is no longer on the page, which can be read"
    summary = f"E{text[1:]} (missed {scrapes} time{'s' if scrapes > 1 else ''} in a row)."
    severity, lever = _grave(scrapes), "See whether this engine died: the others still answer."
    if successor is not None:
        severity, summary = Severity.INFO, f"E{text[1:]}: {successor} came in its place."
        lever = "Nothing, where the model or the engine was replaced on purpose."
    return Cause(
        "metrics_missing",
        round(1 - 0.4**scrapes, 2),
        severity,
        summary,
        (Evidence("engine_missed_scrapes", float(scrapes), None, text),),
        (),
        (),
        lever,
        last_s,
    )


def _grave(failures: int) -> Severity:
    if failures >= DOWN_CRITICAL_FAILURES:
        return Severity.CRITICAL
    return Severity.WARNING if failures >= DOWN_WARNING_FAILURES else Severity.INFO


def unreadable(error: CollectError, failures: int, since_s: float) -> Cause:
    """The page could not be had (`target_down`) or is not what it should be (`metrics_missing`)."""
    down = error.kind not in ("no_vllm", "not_metrics", "exposition", "stale")
    return Cause(
        "target_down" if down else "metrics_missing",
        round(1 - 0.4**failures, 2),
        _grave(failures),
        f"{failures} scrape{'s' if failures > 1 else ''} in a row failed: {error}",
        (Evidence("scrape_failures", float(failures), None, str(error)),),
        (),
        (),
        error.hint or "See whether the server runs and listens.",
        since_s,
    )


ENGINE_RESTARTED = CauseRecord(
    id="engine_restarted",
    title="Engine was restarted",
    means="The process was replaced: a note for a minute, and worse the more often of late.",
    judge=engine_restarted,
    onset_s=Number(0.0),
    clear_s=Number(0.0),
    sidecar="a new start time is the process's own page; Prometheus has changes() for it",
)
TARGET_DOWN = CauseRecord(
    id="target_down",
    title="Target was down",
    fleet=True,
    means="The page could not be fetched.",
    explains=("engine_restarted", "metrics_missing", "engine_stalled"),
    moves=FAMILIES,
)
METRICS_MISSING = CauseRecord(
    id="metrics_missing",
    title="Metrics were missing",
    means="Core metrics are not on the page, or have impossible values: what depends on them "
    "cannot be judged.",
    moves=FAMILIES,
    onset_s=Number(0.0),
    sidecar="a page that lacks metrics is KneewatchMetricsVanished's",
)
"""Concluded by whoever fetches the page (`unreadable`, `metrics_missing`)."""
