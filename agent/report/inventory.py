"""Which engines a report covers, their tiers, and what the settings state about them. I/O edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from kneewatch.agent.deployment import PROFILE_SETTING, named_profile, stated
from kneewatch.agent.report.history import History
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.store.records import StoredEngine
from kneewatch.agent.targets import table_specs
from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.deployment.deployment import deployment
from kneewatch.diagnose.sizing.plan.plan_result import (
    average_requests_per_s,
    call_lengths,
    planned_peak_per_s,
)
from kneewatch.reports.weekly.hours import Grid
from kneewatch.reports.weekly.observed import TierStated, WorkloadStated
from kneewatch.rules.rule import WINDOW_S

UNNAMED = "unknown model"


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """What a report covers. Empty `tiers` or `targets` mean all."""

    grid: Grid
    before: Grid | None
    stated: Callable[[str], TierStated]
    targets: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    window_s: float = WINDOW_S


@dataclass(frozen=True, slots=True)
class Member:
    """An engine and its tier; `document` is its newest diagnosis of the period.

    A target that was unreachable at first is stored as an engine without a name. It has
    incidents, but does not count as an engine if the target has others (`counts` is false).
    """

    engine: StoredEngine
    tier: str
    gpu: str
    document: dict[str, Any] | None
    counts: bool = True


def members_of(history: History, request: ReportRequest) -> list[Member]:
    """The requested engines of both periods.

    Raises:
        SettingsError: there are engines, but none in a requested tier.
    """
    members: list[Member] = []
    for engine in history.engines():
        if request.targets and engine.target not in request.targets:
            continue
        if not any(seen(engine, grid) for grid in (request.grid, request.before) if grid):
            continue
        members.append(_member(history, engine, request))
    named = {member.engine.target: member.tier for member in members if member.engine.model}
    placed = [
        replace(member, tier=named[member.engine.target], counts=False)
        if not member.engine.model and member.engine.target in named
        else member
        for member in members
    ]
    _check_tiers(placed, request.tiers)
    return [
        member for member in placed if not request.tiers or names_of(member) & set(request.tiers)
    ]


def names_of(member: Member) -> set[str]:
    """Names that select the engine's tier: the report's name for it, or its `tier` label."""
    return {member.tier, member.engine.labels.get("tier") or member.tier}


def _check_tiers(members: Sequence[Member], tiers: Sequence[str]) -> None:
    names = set[str]().union(*map(names_of, members))
    for tier in tiers:
        if members and tier not in names:
            there = ", ".join(sorted({member.tier for member in members})[:20])
            raise SettingsError(f"--tier {tier}: no such tier in that period; it has {there}")


def seen(engine: StoredEngine, grid: Grid) -> bool:
    """Whether an engine was present in a period."""
    return engine.first_s < grid.to_s and engine.last_s >= grid.from_s


def _member(history: History, engine: StoredEngine, request: ReportRequest) -> Member:
    document = history.document(engine.id, min(engine.last_s, request.grid.to_s))
    tier = (document or {}).get("tier") or engine.labels.get("tier") or ""
    gpu = request.stated(engine.target).stated.gpu
    name = gpu.id if gpu else ""
    model = engine.model or UNNAMED
    if not tier:
        shown = f"{model}@{name}" if name else model
    else:
        shown = tier if model in tier else f"{model} on {tier}"
    return Member(engine, shown, name, document)


# --- What the settings say about each target, as a report takes it. I/O edge: files may be named --


def stated_of(settings: Settings) -> Callable[[str], TierStated]:
    """What is stated about a target, by its name: in its own table, else for all.

    Raises:
        SettingsError: a model, GPU, file or table that cannot be.
    """
    own = {spec.name: spec.settings for spec in table_specs(settings)}
    cached = cache(_stated)
    cached(settings)  # what cannot be is said before anything is read
    return lambda target: cached(own.get(target, settings))


def _stated(settings: Settings) -> TierStated:
    deployment_stated = stated(settings)
    profile = settings.profile(stated=deployment_stated)
    price, source = settings["usd_per_gpu_hour"], "stated (usd_per_gpu_hour)"
    if price is None and deployment_stated.gpu is not None:
        price, source = (
            deployment_stated.gpu.usd_per_hour,
            f"the catalogue's price of {deployment_stated.gpu.id}",
        )
    return TierStated(
        targets=profile.targets,
        gpus=settings["gpus"] or deployment({}, deployment_stated).gpus,
        usd_per_gpu_hour=price,
        price_source=source if price is not None else "",
        benchmark_ttft_p99_s=settings["benchmark.ttft_p99_s"],
        benchmark_gpu_ratio=settings["benchmark.gpu_ratio"],
        stated=deployment_stated,
        workload=_workload(settings),
        rules=profile.rules(),
    )


def _workload(settings: Settings) -> WorkloadStated | None:
    """The workload of the profile set for reports, else of the general one; None without one."""
    key = PROFILE_SETTING if settings["report.profile"] is None else "report.profile"
    profile = named_profile(settings, key)
    if profile is None:
        return None
    lengths = call_lengths(profile.lengths, profile.session)
    return WorkloadStated(
        origin=Path(settings[key]).name,
        input_mean_tokens=lengths.mean_input_tokens,
        # Of a session only the last call's length is known, not the distribution over all calls.
        input_p95_tokens=None if profile.session else float(lengths.input_p95_tokens),
        output_mean_tokens=lengths.mean_output_tokens,
        output_p95_tokens=float(lengths.output_p95_tokens),
        average_requests_per_s=average_requests_per_s(profile),
        peak_requests_per_s=planned_peak_per_s(profile),
        archetype=profile.traffic.archetype,
    )
