"""Parses Prometheus query responses, and splits ranges so that each response stays small. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

POINTS_MOST = 11_000
"""Prometheus refuses more points per series than this (web/api/v1)."""

SAMPLES_MOST = 2_000_000
"""Most samples in one piece: about 60 MB of JSON."""


def steps_of(*, from_s: float, to_s: float, step_s: float) -> int:
    """Number of steps of a range, both ends included."""
    return max(0, math.floor((to_s - from_s) / step_s + 1e-9) + 1)


def steps_a_piece(series: int) -> int:
    """Most steps per piece for this number of series."""
    return max(1, min(POINTS_MOST, SAMPLES_MOST // max(1, series)))


def pieces(
    *, from_s: float, to_s: float, step_s: float, steps: int
) -> Iterator[tuple[float, float]]:
    """Start and end of each piece: every step of the range is in exactly one."""
    for first in range(0, steps_of(from_s=from_s, to_s=to_s, step_s=step_s), steps):
        last = min(first + steps, steps_of(from_s=from_s, to_s=to_s, step_s=step_s)) - 1
        yield from_s + first * step_s, from_s + last * step_s


def halves(from_s: float, to_s: float, step_s: float) -> list[tuple[float, float]]:
    """The two halves of a piece; empty for a single step."""
    steps = steps_of(from_s=from_s, to_s=to_s, step_s=step_s)
    if steps < 2:
        return []
    middle_s = from_s + (steps // 2) * step_s
    return [(from_s, middle_s - step_s), (middle_s, to_s)]


# --- What a Prometheus answers to a query ---------------------------------------------------------


Json: TypeAlias = Any
"""Parsed JSON from a server: any type."""

Document = Mapping[str, Json]


REASONS = ("error", "message", "Message", "error_description", "detail", "title")
"""Keys under which servers and the gateways before them say why they refuse, the best first."""


def said_of(document: Document) -> str:
    """Why a server refuses, in its own words; empty where it does not say."""
    for key in REASONS:
        reason = document.get(key)
        if isinstance(reason, Mapping):  # Google's and Azure's: {"error": {"message": ...}}
            reason = cast("Document", reason).get("message")
        if isinstance(reason, str) and reason.strip():
            return reason
    return ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One series' value at the query's time."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Track:
    """One series' values over a range, oldest first: (unix seconds, value)."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Answer:
    """An instant query's samples. `warnings` are the server's: some samples may be missing."""

    samples: Sequence[Sample]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a range query's answer, from `from_s` to `to_s`, both included."""

    from_s: float
    to_s: float
    tracks: Sequence[Track]
    warnings: tuple[str, ...] = ()


def samples_of(result: Json) -> list[Sample]:
    """The samples of a vector result.

    Raises:
        ValueError: it is none.
    """
    try:
        return [Sample(row["metric"], float(row["value"][1])) for row in _rows(result)]
    except (KeyError, TypeError, IndexError) as exc:
        raise ValueError("the answer is no vector of samples") from exc


def tracks_of(result: Json) -> list[Track]:
    """The series of a matrix result.

    Raises:
        ValueError: it is none.
    """
    try:
        return [
            Track(row["metric"], [(float(t_s), float(value)) for t_s, value in row["values"]])
            for row in _rows(result)
        ]
    except (KeyError, TypeError) as exc:
        raise ValueError("the answer is no matrix of series") from exc


def warnings_of(document: Document) -> tuple[str, ...]:
    """The warnings of a response: a shard that is down, a store that did not answer."""
    said: Json = document.get("warnings")
    warnings = [str(warning) for warning in _rows(said or [])]
    if document.get("isPartial") is True:  # VictoriaMetrics' own word for it
        warnings.append("the server marks its answer as partial")
    return tuple(warnings)


def _rows(result: Json) -> list[Json]:
    if type(result) is not list:
        raise TypeError
    return result  # pyright: ignore[reportUnknownVariableType]
