"""What a report covers: its periods, targets and tiers, and what the settings state of them. I/O
edge: settings may name files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

from msgspec import Struct

from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stated_deployment import PROFILE_SETTING, named_profile, stated
from kneewatch.agent.targets import table_specs
from kneewatch.collector.errors import SettingsError
from kneewatch.reports.weekly.observed import Grid, TierStated
from kneewatch.rules.rule import WINDOW_S

# --- What a report covers: period, targets, tiers, and what the settings state of them ------------


UNNAMED = "unknown model"
LISTED_MOST = 20


class ReportRequest(Struct, frozen=True):
    """What a report covers. Empty `tiers` or `targets` mean all."""

    grid: Grid
    before: Grid | None
    stated: Callable[[str], TierStated]
    targets: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    window_s: float = WINDOW_S


def tier_name(model: str, tier: str, gpu: str, program: str | None = "") -> str:
    """The name of a tier in the report: its `tier` label with the model; without the label, the
    model and GPU. `program` are engines that are not vLLM: they are a tier of their own."""
    if program and not model:
        return program
    model = model or UNNAMED
    name = f"{model}@{gpu}" if gpu else model
    if tier:
        name = tier if model in tier else f"{model} on {tier}"
    return f"{name} on {program}" if program and program not in name else name


def check_names(
    kind: str, requested: Sequence[str], existing: Iterable[str], place: str, listed: Iterable[str]
) -> None:
    """Check that all names given by `--target` or `--tier` exist.

    Raises:
        SettingsError: a name does not exist; the message lists the first names of `listed`.
    """
    names = set(existing)
    for name in requested:
        if name not in names:
            some = ", ".join(sorted(set(listed))[:LISTED_MOST]) or "none"
            raise SettingsError(f"--{kind} {name}: no such {kind} in {place}; it has {some}")


# --- What the settings state about each target. I/O edge: settings may name files -----------------


def stated_of(settings: Settings) -> Callable[[str], TierStated]:
    """A function from a target's name to the settings of its tier. They come from the target's own
    table if it has one, else from the general settings.

    Raises:
        SettingsError: a model, GPU, file or table is not valid.
    """
    own = {spec.name: spec.settings for spec in table_specs(settings)}
    cached = cache(_stated)
    cached(settings)  # fail on invalid settings before anything is read
    return lambda target: cached(own.get(target, settings))


def _stated(settings: Settings) -> TierStated:
    own_profile = settings["report.profile"] is not None
    return TierStated(
        profile=settings.profile(stated=stated(settings)),
        workload=named_profile(settings, "report.profile" if own_profile else PROFILE_SETTING),
    )


ReportProgress = Callable[[int, int], None]
"""Called with the number of steps done and the total number of steps."""
