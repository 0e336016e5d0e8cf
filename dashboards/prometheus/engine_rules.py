"""Expressions of alerts on the series of engines that are not vLLM. What an alert reads, a series
with its function, is recorded first: one series by the labels of vLLM's, whatever number of the
engine's own it comes from. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from kneewatch.collector.signals.promql import Dialect, NoSeriesError
from kneewatch.dashboards.prometheus.rule_group import Plan, Record

READ = re.compile(
    r"(?:(?P<function>\w+)\((?=[^()]*\]))?"
    r"vllm:(?P<metric>\w+?)(?P<suffix>_total|_bucket|_count|_sum|)(?!\w)"
    r"(?:\{(?P<matchers>[^}]*)\})?(?P<range>\[\w+\](?: offset \w+)?)?(?(function)\))"
)
"""A canonical metric of alerts.toml, with the function over its range if it has one."""

MATCHER = re.compile(r'(\w+)(=~|!=|=)"([^"]*)"')


def first_possible(options: Sequence[str], dialect: Dialect) -> str:
    """The first expression whose metrics the engine has; else the last."""
    return next((text for text in options if _is_possible(text, dialect)), options[-1])


def engine_expr(plan: Plan, text: str, records: dict[str, Record]) -> str | None:
    """An alert's expression on recorded series, which are added to `records` by name.

    Conditions after `unless` on metrics that the engine lacks are left out; None if it lacks
    another one."""
    dialect = plan.dialect
    needed, *excepted = re.split(r"(?= unless )", text)
    if not _is_possible(needed, dialect):
        return None
    kept = "".join([needed, *(part for part in excepted if _is_possible(part, dialect))])
    metrics = {match["metric"] for match in READ.finditer(kept)}
    is_of_page = not dialect.program.of_page.isdisjoint(metrics)
    by = tuple(label for label in plan.labels if label != "engine" or not is_of_page)

    def recorded(match: re.Match[str]) -> str:
        record = _record(match, replace(dialect, by=by), "page" if is_of_page else "engine")
        records[record.name] = record
        return record.name

    return READ.sub(recorded, kept)


def _is_possible(text: str, dialect: Dialect) -> bool:
    with suppress(NoSeriesError):
        for match in READ.finditer(text):
            where, _ = _labels(match)
            dialect.each(match["metric"], match["suffix"], tuple(where.items()))
        return True
    return False


def _labels(match: re.Match[str]) -> tuple[Mapping[str, str], str]:
    """The canonical labels that a series must have, and its other matchers."""
    where: dict[str, str] = {}
    others: list[str] = []
    for label, sign, value in MATCHER.findall(match["matchers"] or ""):
        if sign == "=" and value:
            where[label] = value
        else:
            others.append(f'{label}{sign}"{value}"')
    return where, ",".join(others)


def _record(match: re.Match[str], dialect: Dialect, level: str) -> Record:
    where, extra = _labels(match)
    if match["suffix"] == "_bucket" and not re.search(r"\ble=", extra):
        dialect = replace(dialect, by=(*dialect.by, "le"))
    words = f"{match['function']}({{}}{match['range']})" if match["function"] else "{}"
    expr = dialect.folded(words, match["metric"], match["suffix"], tuple(where.items()), extra)
    return Record(f"{level}:{'_'.join(_name(match, dialect))}{_operation(match)}", expr)


def _name(match: re.Match[str], dialect: Dialect) -> Iterator[str]:
    yield dialect.prefix.rstrip(":_")
    yield re.sub(r"^num_(requests_)?", "", match["metric"]) + match["suffix"]
    for label, sign, value in MATCHER.findall(match["matchers"] or ""):
        word = re.sub(r"\W", "_", value.partition("|")[0])
        yield word if sign != "!=" else f"not_{word}" if word else f"with_{label}"


def _operation(match: re.Match[str]) -> str:
    if not match["function"]:
        return ""
    function = match["function"].removesuffix("_over_time")
    return f":{function}{re.sub(r'[][]', '', match['range']).replace(' offset ', '_before_')}"
