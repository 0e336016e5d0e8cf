"""The signals of engines and GPUs: from the tables of TOML files, with expressions from their text,
and those that depend on settings. Pure."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import eq, ge, gt
from typing import Any

from kneewatch.collector.engines.engine_kind import MFU_METRICS
from kneewatch.collector.packaged import packaged_tables
from kneewatch.collector.scrape_history import Where
from kneewatch.collector.signals.expr import (
    COUNT,
    FOLDS,
    SUM,
    AboveRate,
    Beside,
    BitShare,
    Count,
    Expr,
    FirstValue,
    Gauge,
    HereOnly,
    InfoChanges,
    OverTime,
    Quantile,
    Rate,
    ShareAtMost,
    Slope,
    SlowTimeShare,
    SumOfKnown,
    complement,
    difference,
    info_names,
    info_number,
    kept_if,
    product,
    ratio,
    scaled,
    total,
)
from kneewatch.collector.signals.signal import Signal

STALL_EDGES_S = (0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
"""The bucket bounds of ITL from 0.5 s up. Users see a pause of 0.5 s in a stream as a stall."""

GENERATION_HANDLERS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/generate",
    "/inference/v1/generate",
    "/invocations",
)
"""Endpoints that generate text.

vLLM's counter of finished requests leaves out calls to other endpoints, such as tokenize and
embeddings.
"""


def _mean(metric: str) -> Expr:
    return ratio(Rate(metric, suffix=SUM), Rate(metric, suffix=COUNT))


def _http_calls(metric: str, status: str) -> Expr:
    return SumOfKnown(
        tuple(
            Rate(metric, (("handler", handler), ("method", "POST"), ("status", status)))
            for handler in GENERATION_HANDLERS
        )
    )


OF_METRIC: Mapping[str, Callable[..., Expr]] = {
    "gauge": Gauge,
    **{fold: partial(Gauge, fold=fold) for fold in FOLDS},
    **{f"{fold}_over_time": partial(OverTime, fold=fold) for fold in ("avg", "min", "max")},
    "deriv": Slope,
    "bits": BitShare,
    "counter": Count,
    "rate": Rate,
    "sum_rate": partial(Rate, suffix=SUM),
    "count_rate": partial(Rate, suffix=COUNT),
    "mean": _mean,
    "quantile": Quantile,
    "above_rate": AboveRate,
    "stall_share": partial(SlowTimeShare, edges=STALL_EDGES_S),
    "number_in": info_number,
    "names_in": info_names,
    "changes": InfoChanges,
    "http_calls": _http_calls,
}
"""Functions of a metric, by the name that an expression has for them."""

OF_EXPRS: Mapping[str, Callable[..., Expr]] = {
    "one_engine": HereOnly,
    "max_of": partial(Beside, fold="max"),
    "sum_of": partial(Beside, fold="sum"),
    "sum_of_known": lambda *parts: SumOfKnown(parts),
}
COMPARISONS: Mapping[type[ast.cmpop], tuple[str, Callable[[float, float], bool]]] = {
    ast.Gt: (">", gt),
    ast.GtE: (">=", ge),
    ast.Eq: ("==", eq),
}
OPERATORS: Mapping[type[ast.operator], Callable[[Expr, Expr], Expr]] = {
    ast.Add: total,
    ast.Sub: difference,
    ast.Mult: product,
    ast.Div: ratio,
}


def expression(text: str, named: Mapping[str, Expr], where: Where = ()) -> Expr:
    """The expression that a text describes; the head of vllm.toml explains the notation.

    `named` are expressions that it may use by name. `where` restricts the series of all metrics.
    """

    def of(node: ast.expr) -> Expr:
        match node:
            case ast.Name(name):
                return named[name]
            case ast.BoolOp(ast.Or(), options):
                return FirstValue(tuple(map(of, options)))
            case ast.Compare(left, [sign], [ast.Constant(int(bound))]):
                return kept_if(of(left), *COMPARISONS[type(sign)], bound)
            case ast.BinOp(ast.Constant(1), ast.Sub(), share):
                return complement(of(share))
            case ast.BinOp(ast.Constant(int(factor)), ast.Mult(), right):
                return scaled(of(right), factor)
            case ast.BinOp(left, operator, right):
                return OPERATORS[type(operator)](of(left), of(right))
            case ast.Call(ast.Name(name), arguments) if name in OF_EXPRS:
                return OF_EXPRS[name](*map(of, arguments))
            case ast.Call(ast.Name(name), arguments, keywords):
                return of_metric(name, arguments, keywords)
            case _:
                raise ValueError(f"not an expression of signals: {text}")

    def of_metric(name: str, arguments: list[ast.expr], keywords: list[ast.keyword]) -> Expr:
        options = {str(word.arg): ast.literal_eval(word.value) for word in keywords}
        own = {key: options.pop(key) for key in ("suffix", "across") if key in options}
        matchers = (*options.items(), *where)
        only = {"where": matchers} if matchers else {}
        values = (a.id if isinstance(a, ast.Name) else ast.literal_eval(a) for a in arguments)
        return OF_METRIC[name](*values, **only, **own)

    return of(ast.parse(f"({text})", mode="eval").body)


def expressions(texts: Mapping[str, str]) -> dict[str, Expr]:
    """Expressions by name; each may use those above it."""
    named: dict[str, Expr] = {}
    for name, text in texts.items():
        named[name] = expression(text, named)
    return named


COMMON = ("source", "needs", "optional")


def signals(
    tables: Mapping[str, Any], named: Mapping[str, Expr], common: Mapping[str, Any] | None = None
) -> Iterator[Signal]:
    """Yields the signals of a table and of the tables in it; a table without an expression has what
    its signals have in common."""
    common = {**(common or {}), **{key: tables[key] for key in COMMON if key in tables}}
    for key, table in tables.items():
        if key in COMMON:
            continue
        if "expr" not in table:
            yield from signals(table, named, common)
            continue
        keys: dict[str, Any] = {**common, **table, "key": key}
        for each in keys.pop("each", ("",)):
            filled: dict[str, Any] = {
                name: value.replace("{each}", str(each)) if isinstance(value, str) else value
                for name, value in keys.items()
            }
            yield Signal(expr=expression(filled.pop("expr"), named), **filled)


TTFT = "time_to_first_token_seconds"
ITL = "inter_token_latency_seconds"
QUEUE = "request_queue_time_seconds"
PREFILL = "request_prefill_time_seconds"
DECODE = "request_decode_time_seconds"
E2E = "e2e_request_latency_seconds"
PROMPT_LENGTH = "request_prompt_tokens"
OUTPUT_LENGTH = "request_generation_tokens"
XFER = "nixl_xfer_time_seconds"
TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BOUNDS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *STALL_EDGES_S)
"""The bucket bounds of ITL and, above, of TTFT, in seconds.

A target between two bounds is judged at the lower bound.
"""

_GROUPS = dict(packaged_tables("collector.signals", "vllm.toml"))
_EXPRESSIONS = expressions(_GROUPS.pop("expressions"))
VLLM_SIGNALS = tuple(signals(_GROUPS, _EXPRESSIONS))
SIGNAL_BY_KEY = {signal.key: signal for signal in VLLM_SIGNALS}
HTTP = "http_requests"
ONE_ENGINE, HOST_NEEDS = (str(_GROUPS[group]["needs"]) for group in ("http", "host"))
"""What the counters of HTTP calls and the metrics of the server's process need."""


def _within(metric: str, bounds_s: Sequence[float], target_s: float) -> ShareAtMost | None:
    """Share of a histogram's observations that are within the target; None if no bound is.

    The target is rounded down to a bucket bound.
    """
    kept_s = [bound_s for bound_s in bounds_s if bound_s <= target_s]
    return ShareAtMost(metric, kept_s[-1]) if kept_s else None


def within_ttft(target_s: float | None) -> ShareAtMost | None:
    """Share of requests whose first token arrives within the target.

    The target is rounded down to a bucket bound. None without a target, or if every bound is above
    it.
    """
    return _within(TTFT, TTFT_BOUNDS_S, target_s or 0.0)


def _goodput(ttft_target_s: float, itl_target_s: float | None) -> Expr | None:
    """Requests/s within the targets; None if a target is below every bucket bound.

    Computed as the request rate times (the share of requests whose first token is in time, minus
    the share of token gaps above the ITL target if one is set).

    vLLM counts slow gaps, not requests with a slow gap. As in the report, slow gaps are assumed to
    be spread evenly over the requests that are in time.
    """
    first = within_ttft(ttft_target_s)
    if first is None or itl_target_s is None:
        return first and product(first, _EXPRESSIONS["arrivals"])
    smooth = _within(ITL, ITL_BOUNDS_S, itl_target_s)
    return smooth and product(difference(first, complement(smooth)), _EXPRESSIONS["arrivals"])


def configured(
    *,
    ttft_slo_s: float | None = None,
    itl_slo_s: float | None = None,
    gpus: int | None = None,
    peak_flop_per_s: float | None = None,
    peak_bytes_per_s: float | None = None,
) -> tuple[Signal, ...]:
    """The signals that depend on settings: SLO, number of GPUs and the peaks of one GPU.

    Signals whose setting is missing are left out; `unconfigured` lists them.
    """
    signals: list[Signal] = []
    goodput = None if ttft_slo_s is None else _goodput(ttft_slo_s, itl_slo_s)
    if goodput is not None:
        signals.append(
            Signal(
                "goodput_per_s",
                goodput,
                "Requests/s within the targets: those with the first token in time, minus the "
                "share of token gaps above the ITL target, if one is set. Targets are rounded "
                "down to a bucket bound.",
            )
        )
    if gpus is not None:
        per_hour = Rate("generation_tokens")
        signals.append(
            Signal(
                "tokens_per_gpu_hour",
                scaled(per_hour, 3600 / gpus),
                "Generated tokens per GPU-hour at the current rate.",
            )
        )
    for key, metric, peak in (
        ("mfu_ratio", "estimated_flops_per_gpu", peak_flop_per_s),
        ("mbu_ratio", "estimated_read_bytes_per_gpu", peak_bytes_per_s),
    ):
        if peak is not None:
            signals.append(
                Signal(
                    key,
                    scaled(expression(f"rate({metric}) > 0", {}), 1 / peak),
                    "Achieved share of one GPU's peak, by vLLM's own estimate of the work.",
                    needs=MFU_METRICS,
                    optional=True,
                )
            )
    return tuple(signals)


DEV = "DCGM_FI_DEV_"
PROF = "DCGM_FI_PROF_"
_GPU = dict(packaged_tables("collector.signals", "gpu.toml"))
_HEALTH = _GPU.pop("health")
RECOMMENDED = str(_GPU["recommended"]["needs"])
GPU_SIGNALS = tuple(signals(_GPU, {}))


def health_signals(gpu: str) -> tuple[Signal, ...]:
    """The health signals of the GPU with this `gpu` label."""
    of: Where = (("gpu", gpu),)
    return tuple(Signal(key, expression(text, {}, of), "", "") for key, text in _HEALTH.items())
