"""Changes that would alter the size of a tier (levers), and the outcomes of recommendations.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import chain, islice

from kneewatch.diagnose.engine_history import PastAdvice
from kneewatch.diagnose.recommend.advice import REPLICAS, Advice
from kneewatch.diagnose.recommend.ledger import QUANTIZED, order, subject
from kneewatch.diagnose.sizing.levers import as_sized, holds_few
from kneewatch.diagnose.sizing.levers import levers as sizing_levers
from kneewatch.diagnose.sizing.size import Size
from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.figures import AdviceOutcome, ReportedFlag
from kneewatch.reports.weekly.observed import EpisodeObserved
from kneewatch.reports.weekly.report import Comparison, Lever, LeverFigure, TrackRecord, TrackRow

LIVE = ("open", "applied")
"""Outcomes of recommendations whose effect is not decided yet."""

MOST_OF_SIZE = 3
"""Changes that `size` lists, beside those recommended in the period."""


def levers(
    answer: Size | None,
    replicas: int,
    replicas_needed: int | None,
    recommended: Sequence[PastAdvice],
) -> tuple[Lever, ...]:
    """The levers in the ledger's order; for a launch that holds few requests also the first changes
    that `size` lists.

    A number of replicas is not among them where `replicas_needed` is known: that is the one for the
    tier's peak, and the ledger's is for the load of an incident. One that assumed fewer than the
    present `replicas` is left out.
    """
    # Of recommendations with the same subject the newest is taken: it is for the latest load.
    newest = {
        subject(each.recommendation): each
        for each in live(recommended)
        if not _assumed_fewer(each.recommendation, replicas)
    }
    if replicas_needed is not None:
        newest.pop(frozenset({REPLICAS}), None)
    of_ledger = sorted(newest.values(), key=lambda each: order(each.recommendation))
    named = set(chain({REPLICAS}, *map(subject, (each.recommendation for each in of_ledger))))
    if any(each.recommendation.id in QUANTIZED for each in of_ledger):
        named.add("weights")
    few = answer if answer is not None and holds_few(answer) else None
    of_size = () if few is None else islice(_of_size(few, named), MOST_OF_SIZE)
    return (*map(_recommended_lever, of_ledger), *of_size)


def changes_of(recommendation: Advice) -> tuple[ReportedFlag, ...]:
    """The flag changes of a recommendation."""
    return tuple(
        ReportedFlag(change.flag, _text(change.before), _text(change.after))
        for change in recommendation.changes
    )


def _text(value: object) -> str:
    return "" if value is None else str(value)


def live(recommended: Sequence[PastAdvice]) -> list[PastAdvice]:
    """The open and the applied recommendations. They are sorted by the time at which they were last
    made, oldest first."""
    order = sorted(recommended, key=lambda recommendation: recommendation.last_s)
    return [recommendation for recommendation in order if recommendation.outcome in LIVE]


def _recommended_lever(recommended: PastAdvice) -> Lever:
    of = recommended.recommendation
    cost = of.cost_usd_per_hour
    return Lever(
        id=of.id,
        summary=of.summary,
        changes=changes_of(of),
        figures=tuple(
            LeverFigure(signal, of.before.get(signal), after)
            for signal, after in recommended.recommendation.predicted.items()
        ),
        gpus_after=None,
        saves_usd_per_hour=None if cost is None else 0.0 - cost,
    )


def _of_size(answer: Size, named: Set[str]) -> Iterator[Lever]:
    """Yields the changes that `size` lists for this launch, without those named in the ledger."""
    present = as_sized("", answer)
    for lever in sizing_levers(answer):
        if named.isdisjoint(lever.change.split()):
            usd = (present.usd_per_hour, lever.usd_per_hour)
            yield Lever(
                id="size",
                summary=lever.change,
                changes=(),
                figures=tuple(
                    LeverFigure(name, present.figures[name], after)
                    for name, after in lever.figures.items()
                ),
                gpus_after=lever.gpus,
                saves_usd_per_hour=usd[0] - usd[1] if usd[0] and usd[1] else None,
            )


# --- Outcomes of recommendations ---------------------------------------------------------------


WAS_APPLIED = ("applied", "kept", "missed", "worsened")
"""Outcomes of recommendations that were applied."""


def advised(
    incident: EpisodeObserved, recommended: Sequence[PastAdvice], replicas: int
) -> tuple[AdviceOutcome, ...]:
    """The recommendations for the incident's cause that were made during the incident, with their
    outcomes. One that assumed fewer than the `replicas` that served then is left out.

    A growing problem needs a larger change, so a recommendation may be repeated with other numbers,
    and a later one may replace an earlier one. Of those with the same subject only one is returned:
    the one that was applied, else the newest. The track record contains all of them.
    """
    episode = incident.episode
    newest: dict[frozenset[str], PastAdvice] = {}
    for recommendation in sorted(recommended, key=lambda recommendation: recommendation.first_s):
        if (
            (recommendation.target, recommendation.engine) == (incident.target, incident.engine)
            and recommendation.recommendation.cause == episode.cause
            and recommendation.first_s <= episode.until_s
            and (
                recommendation.last_s >= episode.start_s
                or recommendation.first_s >= episode.start_s
            )
            and not _assumed_fewer(recommendation.recommendation, replicas)
        ):
            before = newest.get(key := subject(recommendation.recommendation))
            if (
                before is None
                or before.outcome not in WAS_APPLIED
                or recommendation.outcome in WAS_APPLIED
            ):
                newest[key] = recommendation
    return tuple(map(advice, sorted(newest.values(), key=lambda each: order(each.recommendation))))


def _assumed_fewer(recommendation: Advice, replicas: int) -> bool:
    """Whether it counts with fewer replicas: the daemon of one server assumes one until the number
    is stated."""
    return (recommendation.before.get(REPLICAS) or replicas) < replicas or any(
        change.flag == REPLICAS and isinstance(change.before, int) and change.before < replicas
        for change in recommendation.changes
    )


def advice(recommended: PastAdvice) -> AdviceOutcome:
    """A recommendation with its outcome."""
    of = recommended.recommendation
    return AdviceOutcome(
        id=of.id,
        cause=of.cause,
        summary=of.summary,
        changes=changes_of(of),
        fate=recommended.outcome,
        first_s=recommended.first_s,
        last_s=recommended.last_s,
        applied_s=recommended.applied_s,
        before=of.before,
        predicted=recommended.recommendation.predicted,
        measured=recommended.measured,
        cost_usd_per_hour=of.cost_usd_per_hour,
        risk=of.risk,
        verify=of.verify,
        guide=of.guide,
        suffices=of.suffices,
    )


# --- Track record: recommendations, whether they were applied, and their measured effect ----------


UNKNOWN = "unknown"


def track_record(recommended: Sequence[PastAdvice]) -> TrackRecord:
    """The record of all recommendations that were made or applied in the period, newest first."""
    newest_first = sorted(recommended, key=lambda recommendation: -recommendation.first_s)
    outcomes = [recommendation.outcome for recommendation in recommended]
    return TrackRecord(
        made=len(outcomes),
        applied=sum(outcome in WAS_APPLIED for outcome in outcomes),
        kept=outcomes.count("kept"),
        missed=outcomes.count("missed"),
        worsened=outcomes.count("worsened"),
        open=outcomes.count("open"),
        lapsed=outcomes.count("lapsed"),
        rows=tuple(map(_row, newest_first)),
        unknown=outcomes.count(UNKNOWN),
    )


def _row(recommendation: PastAdvice) -> TrackRow:
    of, comparisons = advice(recommendation), list[Comparison]()
    for signal, predicted in of.predicted.items():
        measured = of.measured.get(signal)
        ratio = m.over(measured, predicted)
        off_ratio = None if ratio is None else ratio - 1
        comparisons.append(
            Comparison(signal, of.before.get(signal), predicted, measured, off_ratio)
        )
    return TrackRow(
        recommendation.tier, recommendation.target, recommendation.engine, of, tuple(comparisons)
    )
