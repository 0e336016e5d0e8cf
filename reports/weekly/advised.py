"""What was recommended against an incident, and what became of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.reports.weekly.figures import Advice
from kneewatch.reports.weekly.happened import EpisodeObserved, Recommended
from kneewatch.reports.weekly.levers import changes_of

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
