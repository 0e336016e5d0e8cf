"""Which engines a report is about, and of which tier each is. I/O edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kneewatch.agent.report.history import History
from kneewatch.agent.store.model import StoredEngine
from kneewatch.collector.base import SettingsError
from kneewatch.reports.weekly.grid import Grid
from kneewatch.reports.weekly.observed import TierStated
from kneewatch.rules.model import WINDOW_S

UNNAMED = "unknown model"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a report is to be about. Empty `tiers` or `targets`: all of them."""

    grid: Grid
    before: Grid | None
    stated: Callable[[str], TierStated]
    targets: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    window_s: float = WINDOW_S


@dataclass(frozen=True, slots=True)
class Member:
    """An engine and the tier that it is of; `document` is its newest diagnosis of the period.

    A target that could not be read at first left an engine without a name: it has incidents, but
    does not count as an engine where the target showed others.
    """

    engine: StoredEngine
    tier: str
    gpu: str
    document: dict[str, Any] | None
    counts: bool = True


def members_of(history: History, wanted: Wanted) -> list[Member]:
    """The engines of both periods that are asked for.

    Raises:
        SettingsError: there were engines, and none of a tier that is asked for.
    """
    found: list[Member] = []
    for engine in history.engines():
        if wanted.targets and engine.target not in wanted.targets:
            continue
        if not any(seen(engine, grid) for grid in (wanted.grid, wanted.before) if grid):
            continue
        found.append(_member(history, engine, wanted))
    named = {member.engine.target: member.tier for member in found if member.engine.model}
    placed = [
        replace(member, tier=named[member.engine.target], counts=False)
        if not member.engine.model and member.engine.target in named
        else member
        for member in found
    ]
    _check_tiers(placed, wanted.tiers)
    return [one for one in placed if not wanted.tiers or names_of(one) & set(wanted.tiers)]


def names_of(member: Member) -> set[str]:
    """What an engine's tier may be asked for by: as the report names it, or by its label."""
    return {member.tier, member.engine.labels.get("tier") or member.tier}


def _check_tiers(members: Sequence[Member], tiers: Sequence[str]) -> None:
    known = set[str]().union(*map(names_of, members))
    for tier in tiers:
        if members and tier not in known:
            there = ", ".join(sorted({member.tier for member in members})[:20])
            raise SettingsError(f"--tier {tier}: no such tier in that time; it has {there}")


def seen(engine: StoredEngine, grid: Grid) -> bool:
    """Whether an engine was there in a period."""
    return engine.first_s < grid.to_s and engine.last_s >= grid.from_s


def _member(history: History, engine: StoredEngine, wanted: Wanted) -> Member:
    document = history.document(engine.id, min(engine.last_s, wanted.grid.to_s))
    tier = (document or {}).get("tier") or engine.labels.get("tier") or ""
    gpu = wanted.stated(engine.target).stated.gpu
    name = gpu.id if gpu else ""
    model = engine.model or UNNAMED
    if not tier:
        shown = f"{model}@{name}" if name else model
    else:
        shown = tier if model in tier else f"{model} on {tier}"
    return Member(engine, shown, name, document)
