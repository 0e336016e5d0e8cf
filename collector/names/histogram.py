"""Histograms from their series: buckets in order, or what is wrong with them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from kneewatch.collector.names.page import Found, Labels


@dataclass(frozen=True, slots=True)
class HistogramSlots:
    """Where one histogram stands in `Page.values`.

    `bounds` ascend and end with infinity; `buckets` are the positions of the cumulative counts, one
    for each bound. A histogram whose buckets were dropped by the scraper keeps its mean: its only
    bound is infinity, and that bucket is its count.
    """

    bounds: tuple[float, ...]
    buckets: tuple[int, ...]
    sum: int | None
    count: int | None
    labels: Labels = ()


@dataclass(slots=True)
class _Pieces:
    buckets: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    sum: int | None = None
    count: int | None = None


def read_histograms(
    found: Iterable[tuple[Found, Labels]],
) -> tuple[tuple[HistogramSlots, ...], list[str]]:
    """The histograms of one metric and engine, one for each set of own labels, and the damage."""
    pieces: dict[Labels, _Pieces] = {}
    for f, own in found:
        one = pieces.setdefault(own, _Pieces())
        if f.sample.part == "bucket":
            one.buckets.append((dict(f.labels).get("le", ""), f.position))
        elif f.sample.part == "sum":
            one.sum = f.position
        else:
            one.count = f.position
    good: list[HistogramSlots] = []
    damage: list[str] = []
    for own, one in pieces.items():
        bounds, wrong = _bounds(one)
        if wrong:
            damage.append(f"damaged: {wrong}")
        else:
            at = tuple(position for _, position in bounds)
            count = at[-1] if one.count is None else one.count
            les = tuple(bound for bound, _ in bounds)
            good.append(HistogramSlots(les, at, one.sum, count, own))
            if not one.buckets:
                damage.append("without buckets: only its mean is known")
    return tuple(good), damage


def _bounds(pieces: _Pieces) -> tuple[list[tuple[float, int]], str]:
    """Bounds with positions, ascending, and what is wrong with them."""
    if not pieces.buckets:
        if pieces.count is None:
            return [], "no buckets and no count"
        return [(math.inf, pieces.count)], ""
    try:
        # The order of lines means nothing, as in Prometheus.
        bounds = sorted((float(le), position) for le, position in pieces.buckets)
    except ValueError:
        return [], "a bucket's le is not a number"
    edges = [bound for bound, _ in bounds]
    if any(math.isnan(edge) for edge in edges):
        return [], "a bucket's le is not a number"
    if len(set(edges)) < len(edges):
        return [], "two buckets have the same le"
    if edges[-1] != math.inf:
        return [], "no bucket for +Inf"
    return bounds, ""
