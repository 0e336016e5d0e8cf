"""Changes that would alter the size of a tier (levers), and the outcomes of recommendations.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from msgspec.structs import replace

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.recommend.recommendation import (
    REPLICAS,
    Recommendation,
    order,
    subject,
)
from kneewatch.diagnose.sizing.memory.kv_formats import kv_format
from kneewatch.diagnose.sizing.memory.launch_setup import Setup
from kneewatch.diagnose.sizing.size import Size, size
from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.figures import Advice, FlagChange
from kneewatch.reports.weekly.observed import EpisodeObserved, Recommended
from kneewatch.reports.weekly.report import Comparison, TrackRecord, TrackRow
from kneewatch.reports.weekly.tier_sections import Lever, LeverFigure

LIVE = ("open", "applied")
"""Outcomes of recommendations whose effect is not decided yet."""


def levers(
    answer: Size | None,
    replicas_needed: int | None,
    gpus_each: int | None,
    recommended: Sequence[Recommended],
) -> tuple[Lever, ...]:
    """The levers in the ledger's order, then the computed ones that it lacks.

    A number of replicas is not among them where `replicas_needed` is known: that is the one for the
    tier's peak, and the ledger's is for the load of an incident.
    """
    # Of recommendations with the same subject the newest is taken: it is for the latest load.
    newest = {subject(each.recommendation): each for each in live(recommended)}
    if replicas_needed is not None:
        newest.pop(frozenset({REPLICAS}), None)
    of_ledger = sorted(newest.values(), key=lambda each: order(each.recommendation))
    levers = {subject(each.recommendation): _recommended_lever(each) for each in of_ledger}
    for lever in _computed(answer, replicas_needed, gpus_each):
        levers.setdefault(frozenset(change.flag for change in lever.changes), lever)
    return tuple(levers.values())


def changes_of(recommendation: Recommendation) -> tuple[FlagChange, ...]:
    """The flag changes of a recommendation."""
    return tuple(
        FlagChange(change.flag, _text(change.before), _text(change.after))
        for change in recommendation.changes
    )


def _text(value: object) -> str:
    return "" if value is None else str(value)


def live(recommended: Sequence[Recommended]) -> list[Recommended]:
    """The open and the applied recommendations. They are sorted by the time at which they were last
    made, oldest first."""
    order = sorted(recommended, key=lambda recommendation: recommendation.last_s)
    return [recommendation for recommendation in order if recommendation.outcome in LIVE]


def _recommended_lever(recommended: Recommended) -> Lever:
    of = recommended.recommendation
    cost = of.cost_usd_per_hour
    return Lever(
        id=of.id,
        summary=of.summary,
        changes=changes_of(of),
        figures=tuple(
            LeverFigure(signal, of.before.get(signal), after)
            for signal, after in recommended.predicted.items()
        ),
        gpus_after=None,
        saves_usd_per_hour=None if cost is None else 0.0 - cost,
    )


def _computed(
    answer: Size | None, replicas_needed: int | None, gpus_each: int | None
) -> Iterator[Lever]:
    """Yields the levers fp8 KV cache and fp8 weights. A lever is left out if the present format is
    already as small, or if the change cannot be sized."""
    if answer is None or answer.question.setup.gpu is None:
        return
    setup = answer.question.setup
    if not kv_format(setup.kv_cache_dtype).is_quantized:
        flag = FlagChange("--kv-cache-dtype", setup.kv_cache_dtype, "fp8")
        changed = replace(setup, kv_cache_dtype="fp8")
        yield from _lever(
            "kv-fp8", "fp8 KV cache", flag, answer, changed, replicas_needed, gpus_each
        )
    if setup.quantization is None and setup.scheme.id == "bf16":
        flag = FlagChange("--quantization", "", "fp8")
        changed = replace(setup, quantization="fp8")
        yield from _lever(
            "weights-fp8", "fp8 weights", flag, answer, changed, replicas_needed, gpus_each
        )


def _lever(
    lever_id: str,
    summary: str,
    flag: FlagChange,
    before: Size,
    changed: Setup,
    replicas_needed: int | None,
    gpus_each: int | None,
) -> Iterator[Lever]:
    """Yields the lever for a changed setup. Yields nothing if the setup cannot be sized or does not
    fit."""
    try:
        after = size(replace(before.question, setup=changed))
    except SizingError:
        return
    if not after.fits:
        return
    usable_before, usable_after = before.usable_requests_per_s, after.usable_requests_per_s
    gpus_after = None
    if replicas_needed and gpus_each and usable_before and usable_after:
        # The learned capacity is assumed to change by the same factor as the predicted one.
        scaled = replicas_needed * usable_before / usable_after
        gpus_after = max(1, ceil(scaled)) * gpus_each
    yield Lever(
        id=lever_id,
        summary=summary,
        changes=(flag,),
        figures=(
            LeverFigure(
                "kv_capacity_tokens",
                before.memory.held_tokens.expected,
                after.memory.held_tokens.expected,
            ),
            LeverFigure("usable_requests_per_s", usable_before, usable_after),
        ),
        gpus_after=gpus_after,
        saves_usd_per_hour=_saved(before, replicas_needed, gpus_each, gpus_after),
    )


def _saved(
    before: Size, replicas_needed: int | None, gpus_each: int | None, gpus_after: int | None
) -> float | None:
    gpu, price = before.question.setup.gpu, before.question.usd_per_gpu_hour
    if gpu is None or replicas_needed is None or gpus_each is None or gpus_after is None:
        return None
    usd_per_hour = gpu.usd_per_hour if price is None else price
    return (replicas_needed * gpus_each - gpus_after) * usd_per_hour


# --- Outcomes of recommendations ---------------------------------------------------------------


WAS_APPLIED = ("applied", "kept", "missed", "worsened")
"""Outcomes of recommendations that were applied."""


def advised(incident: EpisodeObserved, recommended: Sequence[Recommended]) -> tuple[Advice, ...]:
    """The recommendations for the incident's cause that were made during the incident, with their
    outcomes.

    A growing problem needs a larger change, so a recommendation may be repeated with other numbers,
    and a later one may replace an earlier one. Of those with the same subject only one is returned:
    the one that was applied, else the newest. The track record contains all of them.
    """
    episode = incident.episode
    newest: dict[frozenset[str], Recommended] = {}
    for recommendation in sorted(recommended, key=lambda recommendation: recommendation.first_s):
        if (
            (recommendation.target, recommendation.engine) == (incident.target, incident.engine)
            and recommendation.recommendation.cause == episode.cause
            and recommendation.first_s <= episode.until_s
            and (
                recommendation.last_s >= episode.start_s
                or recommendation.first_s >= episode.start_s
            )
        ):
            before = newest.get(key := subject(recommendation.recommendation))
            if (
                before is None
                or before.outcome not in WAS_APPLIED
                or recommendation.outcome in WAS_APPLIED
            ):
                newest[key] = recommendation
    return tuple(map(advice, sorted(newest.values(), key=lambda each: order(each.recommendation))))


def advice(recommended: Recommended) -> Advice:
    """A recommendation with its outcome."""
    of = recommended.recommendation
    return Advice(
        id=of.id,
        cause=of.cause,
        summary=of.summary,
        changes=changes_of(of),
        fate=recommended.outcome,
        first_s=recommended.first_s,
        last_s=recommended.last_s,
        applied_s=recommended.applied_s,
        before=of.before,
        predicted=recommended.predicted,
        measured=recommended.measured,
        cost_usd_per_hour=of.cost_usd_per_hour,
        risk=of.risk,
        verify=of.verify,
        guide=of.guide,
    )


# --- Track record: recommendations, whether they were applied, and their measured effect ----------


UNKNOWN = "unknown"


def track_record(recommended: Sequence[Recommended]) -> TrackRecord:
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


def _row(recommendation: Recommended) -> TrackRow:
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
