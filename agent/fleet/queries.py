"""The queries of a fleet diagnosis: one a signal, for all replicas at once. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kneewatch.collector.base import SettingsError
from kneewatch.collector.signals.catalogue import Signal
from kneewatch.collector.signals.expr import Dialect, Expr, Quantile
from kneewatch.collector.signals.vllm import VLLM_SIGNALS
from kneewatch.dashboards.prometheus.model import duration, recorded
from kneewatch.diagnose.fleet.history import HOUR_S, WEEK_S
from kneewatch.diagnose.fleet.judging import REMEMBERED, SIGNALS
from kneewatch.diagnose.fleet.workload import SIGNALS as LENGTH_SIGNALS
from kneewatch.diagnose.stated_workload import METRICS

PREFIXES = ("vllm:", "ray_vllm_", "ray_vllm:", "kserve_vllm:", "kserve_vllm_", "vllm_")
PRESENCE, WAITING = "num_requests_running", "num_requests_waiting"
PREFILL = "request_prefill_kv_computed_tokens"

OWN: Mapping[str, Expr] = {
    "prefill_tokens_p10": Quantile(PREFILL, 0.1),
    "prefill_tokens_p90": Quantile(PREFILL, 0.9),
}
"""What only a fleet is asked for: whether prompts hit whole or miss whole."""

LENGTHS = ("prompt_tokens_mean", "output_tokens_mean")
"""Signals of the last hour: a size is for usual requests, and a minute of few has none."""

GPU_LABELS = (
    "cluster",
    "exported_namespace",
    "exported_pod",
    "namespace",
    "pod",
    "Hostname",
    "hostname",
    "node",
    "instance",
    "modelName",
    "model_name",
)
GPUS: Mapping[str, tuple[str, str]] = {
    "sm_clock_mhz": ("min", "DCGM_FI_DEV_SM_CLOCK"),
    "temperature_c": ("max", "DCGM_FI_DEV_GPU_TEMP"),
    "xid": ("max", "DCGM_FI_DEV_XID_ERRORS"),
}
"""GPU figures: how they are folded over the GPUs of a replica, and DCGM's field."""

COUNTED = "gpus"
EXPORTED = ("namespace", "pod", "container")
"""Labels of a workload that DCGM's series carry too, as exported_*."""

_VALUE = r"""("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`[^`]*`)"""
MATCHER = re.compile(
    rf"\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*{_VALUE}\s*(?:,\s*|$)",
)
"""A label matcher as PromQL writes it; a list may end with a comma."""


@dataclass(frozen=True, slots=True)
class Asking:
    """What queries are made for: matchers of the series, labels that tell engines apart, prefixes
    of vLLM's names, the window."""

    selector: str
    window_s: float
    by: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("vllm:",)

    def dialects(self) -> list[Dialect]:
        """How each prefix's series are spelled."""
        return [
            Dialect(self.window_s, self.by, self.selector, {}, prefix) for prefix in self.prefixes
        ]

    def series(self, name: str, extra: str = "") -> str:
        """A selector of a series that is not vLLM's."""
        matchers = ",".join(part for part in (self.selector, extra) if part)
        return f"{name}{{{matchers}}}"


def checked_selector(text: str, origin: str) -> str:
    """Label matchers without their braces.

    Raises:
        SettingsError: they cannot be matchers.
    """
    inner = text.strip()
    if inner.startswith("{") and inner.endswith("}"):
        inner = inner[1:-1].strip()
    at = 0
    while at < len(inner):
        found = MATCHER.match(inner, at)
        if found is None:
            raise SettingsError(f'{origin}: {text!r} is no list of matchers such as namespace="a"')
        at = found.end()
    return inner.rstrip(",").rstrip()


def presence(asking: Asking) -> str:
    """All series of running requests, under any known prefix, and the recorded ones."""
    names = "|".join(f"{prefix}{PRESENCE}" for prefix in PREFIXES)
    return asking.series("", f'__name__=~"{names}|{recorded("running")}"')


def vanished(asking: Asking) -> str:
    """Series of running requests that the last hour had and this moment has not."""
    parts: list[str] = []
    for dialect in asking.dialects():
        series = dialect.series(PRESENCE)
        parts.append(f"(last_over_time({series}[{duration(HOUR_S)}]) unless {series})")
    return " or ".join(parts)


def raw_queries(asking: Asking) -> dict[str, str]:
    """A query for each signal that has one, from vLLM's own series."""
    exprs = {**_catalogue(SIGNALS), **OWN}
    found = {key: _each(asking, expr) for key, expr in exprs.items()}
    lengths = replace(asking, window_s=HOUR_S)
    found |= {key: _each(lengths, expr) for key, expr in _catalogue(LENGTHS).items()}
    return {key: query for key, query in found.items() if query}


def recorded_queries(asking: Asking) -> dict[str, str]:
    """A query for each signal that recording rules keep."""
    return {
        key: f"max by ({', '.join(asking.by)}) ({asking.series(recorded(key))})"
        for key in (*SIGNALS, *REMEMBERED)
    }


def beside(asking: Asking) -> dict[str, str]:
    """What is no signal: ages and the last hour."""
    by, hour = ", ".join(asking.by), duration(HOUR_S)
    process = ", ".join(one for one in asking.by if one not in ("model_name", "engine"))
    running = [dialect.series(PRESENCE) for dialect in asking.dialects()]
    # A page shows the process's start once, without model and engine: joined in Python.
    age = f"max by ({process}) (time() - {asking.series('process_start_time_seconds')})"
    return {
        "running_hour_avg": " or ".join(
            f"sum by ({by}) (avg_over_time({one}[{hour}]))" for one in running
        ),
        "running_hour_max": " or ".join(
            f"sum by ({by}) (max_over_time({one}[{hour}]))" for one in running
        ),
        "running_hour_ago": " or ".join(f"sum by ({by}) ({one} offset {hour})" for one in running),
        "age_s": age,
    }


def configs(asking: Asking) -> str:
    """The cache's configuration, which stands in labels."""
    return " or ".join(dialect.series("cache_config_info") for dialect in asking.dialects())


def scrapes_failing(asking: Asking) -> str:
    """Scrapes that fail now, of the targets whose series the last hour has.

    `up` has the target's labels and none of the page's: it is joined, not matched.
    """
    hour = duration(HOUR_S)
    seen = " or ".join(
        f"last_over_time({dialect.series(PRESENCE)}[{hour}])" for dialect in asking.dialects()
    )
    return f"(up == 0) and on (job, instance) ({seen})"


def in_flight(asking: Asking, groups: Iterable[str], *, recorded_only: bool) -> str:
    """Requests that run and wait on all replicas of a group together."""
    names = [f"{prefix}{name}" for prefix in asking.prefixes for name in (PRESENCE, WAITING)]
    if recorded_only:
        names = [recorded("running"), recorded("waiting")]
    series = asking.series("", f'__name__=~"{"|".join(names)}"')
    return f"sum by ({', '.join(groups)}) ({series})"


def lengths(asking: Asking, groups: Iterable[str]) -> dict[tuple[str, bool], str]:
    """Buckets of the last hour's request lengths on all of a group, by signal, and of the same hour
    a week ago (True)."""
    by, hour = ", ".join((*groups, "le")), duration(HOUR_S)
    found: dict[tuple[str, bool], str] = {}
    for side, metric in METRICS.items():
        for ago in (False, True):
            offset = f" offset {duration(WEEK_S)}" if ago else ""
            found[LENGTH_SIGNALS[side], ago] = " or ".join(
                f"sum by ({by}) (increase({one.series(metric, '_bucket')}[{hour}]{offset}))"
                for one in asking.dialects()
            )
    return found


def gpu_queries(selector: str) -> dict[str, str]:
    """A query for each GPU figure, and for how many GPUs there are."""
    labels = ", ".join(GPU_LABELS)
    found = {
        key: f"{fold} by ({labels}) ({_gpu_series(name, selector)})"
        for key, (fold, name) in GPUS.items()
    }
    # A MIG device is no whole GPU.
    whole = _gpu_series(GPUS["sm_clock_mhz"][1], selector, 'GPU_I_ID=""')
    return {**found, COUNTED: f"count by ({labels}) ({whole})"}


def _gpu_series(name: str, selector: str, extra: str = "") -> str:
    """DCGM's series, restricted as far as their labels allow: where the exporter names the
    workload, by namespace, pod and container; where it does not, all are kept."""
    matchers = [
        f"exported_{label}{sign}{value}"
        for label, sign, value in MATCHER.findall(selector)
        if label in EXPORTED
    ]
    if not matchers:
        return f"{name}{{{extra}}}"
    own = ",".join(['exported_pod!=""', *matchers, *([extra] if extra else [])])
    others = ",".join(['exported_pod=""', *([extra] if extra else [])])
    return f"{name}{{{own}}} or {name}{{{others}}}"


def _each(asking: Asking, expr: Expr) -> str:
    queries = [query for one in asking.dialects() if (query := expr.promql(one)) is not None]
    return queries[0] if len(queries) == 1 else " or ".join(f"({query})" for query in queries)


def _catalogue(keys: Sequence[str]) -> dict[str, Expr]:
    signals: dict[str, Signal] = {signal.key: signal for signal in VLLM_SIGNALS}
    return {key: signals[key].expr for key in keys}
