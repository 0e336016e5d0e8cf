"""What was recommended, whether it was done, and whether it helped. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.figures import Advice
from kneewatch.reports.weekly.levers import changes_of
from kneewatch.reports.weekly.observed import EpisodeObserved, Recommended
from kneewatch.reports.weekly.report import Comparison, TrackRecord, TrackRow

FOLLOWED = ("applied", "kept", "missed", "worsened")
"""Fates of recommendations that were followed."""


def advised(one: EpisodeObserved, recommended: Sequence[Recommended]) -> tuple[Advice, ...]:
    """What was recommended against this cause while it lasted, with what became of it.

    Of what was told again with other numbers it is what was followed, else the newest: as trouble
    grows the same change must be larger. The track record has all of them.
    """
    episode = one.episode
    told: dict[str, Recommended] = {}
    for made in sorted(recommended, key=lambda made: made.first_s):
        if (
            (made.target, made.engine) == (one.target, one.engine)
            and made.document.get("cause") == episode.cause
            and made.first_s <= episode.until_s
            and (made.last_s >= episode.start_s or made.first_s >= episode.start_s)
        ):
            before = told.get(key := str(made.document["id"]))
            if before is None or before.fate not in FOLLOWED or made.fate in FOLLOWED:
                told[key] = made
    return tuple(map(advice, told.values()))


def advice(made: Recommended) -> Advice:
    """A recommendation and its fate."""
    document = made.document
    return Advice(
        id=str(document["id"]),
        cause=str(document["cause"]),
        summary=str(document["summary"]),
        changes=changes_of(document),
        fate=made.fate,
        first_s=made.first_s,
        last_s=made.last_s,
        applied_s=made.applied_s,
        before=document.get("before", {}),
        predicted=made.predicted,
        measured=made.measured,
        cost_usd_per_hour=document.get("cost_usd_per_hour"),
        risk=str(document.get("risk", "")),
        verify=tuple(document.get("verify", ())),
        guide=tuple(document.get("guide", ())),
    )


# --- What was recommended, what was done, and whether it did what it promised ---------------------


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
