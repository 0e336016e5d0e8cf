"""Which targets there are to be: arguments, tables and files taken together."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.agent.daemon.file_sd import FileTargets
from kneewatch.agent.daemon.target_tables import argument_specs, table_specs
from kneewatch.agent.settings import Settings
from kneewatch.agent.targets import TargetSpec, check_unique
from kneewatch.collector.base import SettingsError

NO_TARGET = (
    "no target to watch: name one (kneewatch run http://host:8000), or give it a [[targets]] table "
    "or a file_sd file in the settings; kneewatch run --demo plays a recording"
)


class Roster:
    """The configured targets; `may_be_empty` where something else is watched.

    Raises:
        SettingsError: none is configured, one cannot be a target, or two have one name.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        settings: Settings,
        before: FileTargets | None = None,
        *,
        may_be_empty: bool = False,
    ) -> None:
        self._arguments, self._may_be_empty = tuple(arguments), may_be_empty
        self._static = self._stated(settings)
        self._files = FileTargets(settings["file_sd"] or (), settings, before)
        self._files.refresh(self._static)

    def renewed(self, settings: Settings) -> Roster:
        """The roster with other settings, files read again; one that cannot be used now keeps the
        targets that it had.

        Raises:
            SettingsError: as at the start.
        """
        return Roster(self._arguments, settings, self._files, may_be_empty=self._may_be_empty)

    def poll(self) -> bool:
        """Look at the files again. Returns whether the targets may be others now."""
        return self._files.refresh(self._static)

    def specs(self) -> list[TargetSpec]:
        """All targets."""
        return [*self._static, *self._files.specs()]

    def _stated(self, settings: Settings) -> list[TargetSpec]:
        specs = [*argument_specs(self._arguments, settings), *table_specs(settings)]
        if not specs and not settings["file_sd"] and not self._may_be_empty:
            raise SettingsError(NO_TARGET)
        check_unique(specs)
        return specs
