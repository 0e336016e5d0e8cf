"""The range queries of a report: few series in an answer, the heavy part on the server. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kneewatch.agent.fleet.queries import PREFIXES, PRESENCE, Asking
from kneewatch.agent.report.counting import BY_SOURCE, FAILED_REASONS, LOCAL
from kneewatch.collector.signals.catalogue import Signal
from kneewatch.collector.signals.expr import Dialect, OverTime, bound_matcher
from kneewatch.collector.signals.vllm import TTFT, VLLM_SIGNALS
from kneewatch.dashboards.prometheus.model import duration, recorded
from kneewatch.reports.weekly.measures import (
    COMPUTED,
    COUNTS,
    DEFERRED,
    FAILED,
    GENERATED,
    KV_USAGE,
    PREEMPTIONS,
    RUNNING,
    WAITING,
)

PREEMPTED, MADE, LATE, BEGUN = "preempted", "made", "late", "begun"
STAGE_SEVERITY, CONFIDENCE = "cascade_severity", "cause_confidence"
GAUGES: Mapping[str, OverTime] = {
    RUNNING: OverTime("num_requests_running", "avg"),
    WAITING: OverTime("num_requests_waiting", "avg"),
    KV_USAGE: OverTime("kv_cache_usage_perc", "avg"),
    DEFERRED: OverTime("num_requests_waiting_by_reason", "avg", (("reason", "deferred"),)),
}
PROCESS = ("model_name", "engine")
"""Labels that what a page says once for all its engines lacks."""


def presence(asking: Asking, range_s: float) -> str:
    """The series of running requests that were there within a time, under any known prefix."""
    names = "|".join(prefix + PRESENCE for prefix in PREFIXES)
    series = asking.series("", f'__name__=~"{names}"')
    return f"last_over_time({series}[{duration(range_s)}])"


def scrapes(asking: Asking, range_s: float) -> str:
    """How often each engine was scraped."""
    return _either(
        asking,
        range_s,
        lambda one: one.sum(f"count_over_time({one.series(PRESENCE)}[{one.range}])"),
    )


def gauges(asking: Asking, key: str, range_s: float) -> str:
    """A gauge's mean on each engine."""
    return _either(asking, range_s, GAUGES[key].promql)


def counts(key: str, asking: Asking, by: Sequence[str], range_s: float) -> str:
    """What a counter gained, added up by some labels."""
    metric, extra = key, ""
    if key == COMPUTED:
        metric, extra = BY_SOURCE, f'{LOCAL[0]}="{LOCAL[1]}"'
    elif key == FAILED:
        metric, extra = "request_success", f'finished_reason=~"{"|".join(FAILED_REASONS)}"'
    return _increase(asking, metric, "_total", by, range_s, extra)


COUNTED = (*COUNTS, COMPUTED, FAILED)
"""The counters, as the report names them."""


def parts(metric: str, part: str, asking: Asking, by: Sequence[str], range_s: float) -> str:
    """What a histogram's `bucket`s, `sum` or `count` gained, added up by some labels."""
    more = ("le",) if part == "bucket" else ()
    return _increase(asking, metric, f"_{part}", (*by, *more), range_s)


def watched(asking: Asking, key: str, late_s: float | None, range_s: float) -> str:
    """What tells on each engine whether a time is worth a closer look."""
    if key == PREEMPTED:
        return _increase(asking, PREEMPTIONS, "_total", asking.by, range_s)
    if key == MADE:
        return _increase(asking, GENERATED, "_total", asking.by, range_s)
    if key == LATE:
        return _increase(asking, TTFT, "_bucket", asking.by, range_s, bound_matcher(late_s or 0.0))
    return _increase(asking, TTFT, "_count", asking.by, range_s)


def recorded_worst(asking: Asking, key: str, range_s: float) -> str:
    """The highest value that recording rules kept of a series; by cause where it has one."""
    by = (*asking.by, "cause") if key == CONFIDENCE else asking.by
    series = asking.series(recorded(key))
    return f"max by ({', '.join(by)}) (max_over_time({series}[{duration(range_s)}]))"


def narrowed(asking: Asking, only: str) -> Asking:
    """The same for fewer series."""
    return replace(asking, selector=",".join(one for one in (asking.selector, only) if one))


def curve(asking: Asking, key: str, only: str, _step_s: float) -> str:
    """A signal on the window, on some engines (`only`: matchers), for their latency curve."""
    signals: dict[str, Signal] = {signal.key: signal for signal in VLLM_SIGNALS}
    return _either(narrowed(asking, only), asking.window_s, signals[key].expr.promql)


def curve_recorded(asking: Asking, key: str, only: str, _step_s: float) -> str:
    """The same as recording rules kept it."""
    series = asking.series(recorded(key), only)
    return f"max by ({', '.join(asking.by)}) ({series})"


def up(jobs: Sequence[str], range_s: float) -> str:
    """The share of scrapes that worked."""
    names = "|".join(one.replace("\\", "\\\\").replace('"', '\\"') for one in jobs)
    only = f'{{job=~"{names}"}}' if names else ""
    return f"avg by (job, instance) (avg_over_time(up{only}[{duration(range_s)}]))"


def starts(asking: Asking, range_s: float) -> str:
    """When each process began, as its page says."""
    series = asking.series("process_start_time_seconds")
    by = ", ".join(one for one in asking.by if one not in PROCESS)
    return f"max by ({by}) (last_over_time({series}[{duration(range_s)}]))"


def configs(asking: Asking, range_s: float) -> str:
    """The cache's configuration, which stands in labels."""
    return " or ".join(
        f"last_over_time({one.series('cache_config_info')}[{duration(range_s)}])"
        for one in asking.dialects()
    )


def gpu_models(range_s: float) -> str:
    """DCGM's series that name the GPUs."""
    return f"last_over_time(DCGM_FI_DEV_SM_CLOCK[{duration(range_s)}])"


def pages(labels: Mapping[str, str], prefix: str, span_s: float) -> str:
    """All that one target's scrapes held over a time, sample by sample."""
    names = f"{prefix}.+|process_start_time_seconds|up"
    only = ",".join(f'{name}="{_quoted(value)}"' for name, value in sorted(labels.items()))
    return f'{{__name__=~"{names}",{only}}}[{duration(span_s)}]'


def exactly(name: str, values: Sequence[str]) -> str:
    """A matcher of any of some values."""
    return f'{name}=~"{"|".join(_escaped(value) for value in sorted(set(values)))}"'


def _escaped(value: str) -> str:
    special = "\\.+*?()|[]{}^$"
    plain = "".join(f"\\{letter}" if letter in special else letter for letter in value)
    return _quoted(plain)


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _increase(
    asking: Asking, metric: str, suffix: str, by: Sequence[str], range_s: float, extra: str = ""
) -> str:
    def one(dialect: Dialect) -> str:
        series = dialect.series(metric, suffix, extra=extra)
        return f"sum by ({', '.join(by)}) (increase({series}[{dialect.range}]))"

    return _either(asking, range_s, one)


def _either(asking: Asking, range_s: float, make: Callable[[Dialect], str | None]) -> str:
    """A query that any of the prefixes answers."""
    dialects = replace(asking, window_s=range_s).dialects()
    made = [query for one in dialects if (query := make(one)) is not None]
    return made[0] if len(made) == 1 else " or ".join(f"({one})" for one in made)
