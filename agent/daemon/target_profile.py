"""The profile each target is diagnosed with. I/O edge: stated deployments may be in files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stated_deployment import stated
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import SettingsError
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.engine.engine_monitor import Catalogue

MIN_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class TargetProfile:
    """A diagnosis profile and the limits of a page. Equal ones give equal diagnoses."""

    profile: Profile
    limits: Limits
    catalogue: Catalogue = field(compare=False)


class TargetProfiles:
    """Builds the profile of each target; targets with the same settings share one."""

    def __init__(self) -> None:
        self._cache: dict[int, tuple[Settings, TargetProfile]] = {}

    def of(self, specs: Iterable[TargetSpec]) -> dict[str, TargetProfile]:
        """Profiles by target name.

        Raises:
            SettingsError: a model, GPU, version or rule is unknown, a file cannot be read, or an
                interval is too short.
        """
        cache: dict[int, tuple[Settings, TargetProfile]] = {}
        profiles: dict[str, TargetProfile] = {}
        for spec in specs:
            settings = spec.settings
            at = id(settings)
            if at not in cache:
                cache[at] = self._cache.get(at) or (settings, target_profile(settings))
            profiles[spec.name] = cache[at][1]
        self._cache = cache
        return profiles


def target_profile(settings: Settings) -> TargetProfile:
    """The profile for these settings.

    Raises:
        SettingsError: as `TargetProfiles.of`.
    """
    if settings["interval_s"] < MIN_INTERVAL_S:
        raise SettingsError(
            f"{settings.origin('interval_s')}: interval_s = {settings['interval_s']:g} is too "
            f"short: it must be {MIN_INTERVAL_S:g} or more"
        )
    profile = settings.profile(stated=stated(settings))
    return TargetProfile(profile, settings.limits(), Catalogue.of(profile))


def with_tier(diagnosis: Diagnosis, spec: TargetSpec, profile: TargetProfile) -> Diagnosis:
    """The diagnosis with its tier: the target's label, else model@GPU if the GPU is stated."""
    gpu = profile.profile.stated.gpu
    tier = spec.labels.get("tier")
    if tier is None and gpu is not None and diagnosis.model:
        tier = f"{diagnosis.model}@{gpu.id}"
    return diagnosis if tier is None else replace(diagnosis, tier=tier)
