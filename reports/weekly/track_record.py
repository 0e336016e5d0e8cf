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


def advised(incident: EpisodeObserved, recommended: Sequence[Recommended]) -> tuple[Advice, ...]:
    """What was recommended against this cause while it lasted, with what became of it.

    Of what was told again with other numbers it is what was followed, else the newest: as trouble
    grows the same change must be larger. The track record has all of them.
    """
    episode = incident.episode
    newest: dict[str, Recommended] = {}
    for recommendation in sorted(recommended, key=lambda recommendation: recommendation.first_s):
        if (
            (recommendation.target, recommendation.engine) == (incident.target, incident.engine)
            and recommendation.document.get("cause") == episode.cause
            and recommendation.first_s <= episode.until_s
            and (
                recommendation.last_s >= episode.start_s
                or recommendation.first_s >= episode.start_s
            )
        ):
            before = newest.get(key := str(recommendation.document["id"]))
            if before is None or before.fate not in FOLLOWED or recommendation.fate in FOLLOWED:
                newest[key] = recommendation
    return tuple(map(advice, newest.values()))


def advice(recommendation: Recommended) -> Advice:
    """A recommendation and its fate."""
    document = recommendation.document
    return Advice(
        id=str(document["id"]),
        cause=str(document["cause"]),
        summary=str(document["summary"]),
        changes=changes_of(document),
        fate=recommendation.fate,
        first_s=recommendation.first_s,
        last_s=recommendation.last_s,
        applied_s=recommendation.applied_s,
        before=document.get("before", {}),
        predicted=recommendation.predicted,
        measured=recommendation.measured,
        cost_usd_per_hour=document.get("cost_usd_per_hour"),
        risk=str(document.get("risk", "")),
        verify=tuple(document.get("verify", ())),
        guide=tuple(document.get("guide", ())),
    )


# --- What was recommended, what was done, and whether it did what it promised ---------------------


UNKNOWN = "unknown"


def track_record(recommended: Sequence[Recommended]) -> TrackRecord:
    """The recommendations that were made or applied in the period, newest first."""
    rows = [
        _row(recommendation)
        for recommendation in sorted(
            recommended, key=lambda recommendation: -recommendation.first_s
        )
    ]
    fates = [recommendation.fate for recommendation in recommended]
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


def _row(recommendation: Recommended) -> TrackRow:
    row_advice = advice(recommendation)
    return TrackRow(
        recommendation.tier,
        recommendation.target,
        recommendation.engine,
        row_advice,
        _comparisons(row_advice),
    )


def _comparisons(row_advice: Advice) -> tuple[Comparison, ...]:
    comparisons: list[Comparison] = []
    for signal, predicted in row_advice.predicted.items():
        ratio = m.over(row_advice.measured.get(signal), predicted)
        comparisons.append(
            Comparison(
                signal=signal,
                before=row_advice.before.get(signal),
                predicted=predicted,
                measured=row_advice.measured.get(signal),
                off_ratio=None if ratio is None else ratio - 1,
            )
        )
    return tuple(comparisons)
