"""What was recommended, what was done, and whether it did what it promised. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.advised import FOLLOWED, advice
from kneewatch.reports.weekly.figures import Advice
from kneewatch.reports.weekly.happened import Recommended
from kneewatch.reports.weekly.model import Comparison, TrackRecord, TrackRow

UNKNOWN = "unknown"


def track_record(recommended: Sequence[Recommended]) -> TrackRecord:
    """The period's recommendations, newest first, and those that were followed in it."""
    rows = [_row(one) for one in sorted(recommended, key=lambda one: -one.first_s)]
    fates = [one.fate for one in recommended]
    return TrackRecord(
        made=len(fates),
        applied=sum(fate in FOLLOWED for fate in fates),
        kept=fates.count("kept"),
        missed=fates.count("missed"),
        worsened=fates.count("worsened"),
        open=fates.count("open"),
        lapsed=fates.count("lapsed"),
        rows=tuple(rows),
        unknown=fates.count(UNKNOWN),
    )


def _row(one: Recommended) -> TrackRow:
    made = advice(one)
    return TrackRow(one.tier, one.target, one.engine, made, _comparisons(made))


def _comparisons(made: Advice) -> tuple[Comparison, ...]:
    found: list[Comparison] = []
    for signal, predicted in made.predicted.items():
        ratio = m.over(made.measured.get(signal), predicted)
        found.append(
            Comparison(
                signal=signal,
                before=made.before.get(signal),
                predicted=predicted,
                measured=made.measured.get(signal),
                off_ratio=None if ratio is None else ratio - 1,
            )
        )
    return tuple(found)
