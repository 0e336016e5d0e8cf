"""Signals from the tables of a TOML file, and expressions from their text. Pure."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import eq, ge, gt
from typing import Any

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
