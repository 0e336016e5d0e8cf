"""The queries of a fleet diagnosis: one a signal, for all replicas at once. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kneewatch.collector.base import SettingsError
from kneewatch.collector.signals.catalogue import Signal
from kneewatch.collector.signals.expr import Dialect, Expr, Quantile
from kneewatch.collector.signals.vllm import VLLM_SIGNALS
from kneewatch.dashboards.prometheus.model import duration, recorded
from kneewatch.diagnose.fleet.judging import REMEMBERED, SIGNALS

PREFIXES = ("vllm:", "ray_vllm_", "ray_vllm:", "kserve_vllm:", "kserve_vllm_", "vllm_")
PRESENCE = "num_requests_running"
HOUR_S = 3600.0
PREFILL = "request_prefill_kv_computed_tokens"

OWN: Mapping[str, Expr] = {
    "prefill_tokens_p10": Quantile(PREFILL, 0.1),
    "prefill_tokens_p90": Quantile(PREFILL, 0.9),
}
"""What only a fleet is asked for: whether prompts hit whole or miss whole."""

GPU_LABELS = (
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
    quoted = False
    for at, letter in enumerate(inner):
        if letter == '"' and inner[at - 1 : at] != "\\":
            quoted = not quoted
        if not quoted and letter in "{}()":
            raise SettingsError(f'{origin}: {text!r} is no list of matchers such as namespace="a"')
    if quoted or (inner and "=" not in inner):
        raise SettingsError(f'{origin}: {text!r} is no list of matchers such as namespace="a"')
    return inner.rstrip(",")


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


def gpu_queries() -> dict[str, str]:
    """A query for each GPU figure. The selector is for vLLM's series and is not used."""
    labels = ", ".join(GPU_LABELS)
    return {key: f"{fold} by ({labels}) ({name})" for key, (fold, name) in GPUS.items()}


def _each(asking: Asking, expr: Expr) -> str:
    queries = [query for one in asking.dialects() if (query := expr.promql(one)) is not None]
    return queries[0] if len(queries) == 1 else " or ".join(f"({query})" for query in queries)


def _catalogue(keys: Sequence[str]) -> dict[str, Expr]:
    signals: dict[str, Signal] = {signal.key: signal for signal in VLLM_SIGNALS}
    return {key: signals[key].expr for key in keys}
