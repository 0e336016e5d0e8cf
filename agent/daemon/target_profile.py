"""What targets are judged by. I/O edge: what is stated of a deployment may be in files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kneewatch.agent.deployment import stated
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import SettingsError
from kneewatch.collector.exposition.grammar import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.engine.engine_monitor import Catalogue

LEAST_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class TargetProfile:
    """A profile and the limits of a page. Two that are equal judge alike."""

    profile: Profile
    limits: Limits
    catalogue: Catalogue = field(compare=False)


class TargetProfiles:
    """The basis of each target; targets with the same settings share one, made once."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Settings, TargetProfile]] = {}

    def of(self, specs: Iterable[TargetSpec]) -> dict[str, TargetProfile]:
        """By the target's name.

        Raises:
            SettingsError: a model, GPU, version or rule that is not known, a file that cannot be
                read, or an interval that is too short.
        """
        made: dict[int, tuple[Settings, TargetProfile]] = {}
        found: dict[str, TargetProfile] = {}
        for spec in specs:
            settings = spec.settings
            at = id(settings)
            if at not in made:
                made[at] = self._made.get(at) or (settings, basis(settings))
            found[spec.name] = made[at][1]
        self._made = made
        return found


def basis(settings: Settings) -> TargetProfile:
    """The basis that settings make.

    Raises:
        SettingsError: as `Bases.of`.
    """
    if settings["interval_s"] < LEAST_INTERVAL_S:
        raise SettingsError(
            f"{settings.origin('interval_s')}: interval_s = {settings['interval_s']:g} is too "
            f"short: it must be {LEAST_INTERVAL_S:g} or more"
        )
    profile = settings.profile(stated=stated(settings))
    return TargetProfile(profile, settings.limits(), Catalogue.of(profile))


def with_tier(diagnosis: Diagnosis, spec: TargetSpec, basis: TargetProfile) -> Diagnosis:
    """The diagnosis with its tier: the target's label, else model and GPU where that is stated."""
    gpu = basis.profile.stated.gpu
    tier = spec.labels.get("tier")
    if tier is None and gpu is not None and diagnosis.model:
        tier = f"{diagnosis.model}@{gpu.id}"
    return diagnosis if tier is None else replace(diagnosis, tier=tier)
