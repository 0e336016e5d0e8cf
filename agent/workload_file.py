"""The workload profile that the settings name. I/O edge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kneewatch.agent.settings import Settings
from kneewatch.collector.base import SettingsError

if TYPE_CHECKING:
    from kneewatch.diagnose.sizing.plan.profile import WorkloadProfile
    from kneewatch.diagnose.stated_workload import StatedWorkload

SETTING = "workload_profile"


def stated_workload(settings: Settings) -> StatedWorkload | None:
    """What of the stated profile live requests are held against; None: none is stated.

    Raises:
        SettingsError: as `named_profile`.
    """
    profile = named_profile(settings)
    if profile is None:
        return None
    from kneewatch.diagnose.sizing.plan.watched import watched

    return watched(profile, origin=Path(settings[SETTING]).name)


def named_profile(settings: Settings, key: str = SETTING) -> WorkloadProfile | None:
    """The profile, as for `size --plan`, that a setting names; None: it names none.

    Raises:
        SettingsError: it cannot be read, or a key or value cannot be; the message has the setting's
            origin, the file and the key.
    """
    path: str | None = settings[key]
    if path is None:
        return None
    # Here: no daemon without a profile pays for the plan's modules.
    from kneewatch.agent.size_inputs import profile_text
    from kneewatch.diagnose.sizing.inputs import SizingError
    from kneewatch.diagnose.sizing.plan.profile_reader import read_profile

    try:
        return read_profile(profile_text(path, key), origin=path)
    except (SettingsError, SizingError) as exc:
        raise SettingsError(f"{settings.origin(key)}: {exc}") from exc
