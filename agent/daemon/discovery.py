"""Target discovery: arguments, tables, and file_sd files, reread when they change. I/O edge."""

from __future__ import annotations

import glob
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.settings.sources import is_pairs, is_texts
from kneewatch.agent.targets import TargetSpec, argument_specs, check_unique, spec, table_specs
from kneewatch.collector.errors import SettingsError

log = logging.getLogger(__name__)

LARGEST_BYTES = 16 * 1024 * 1024
SUFFIXES = (".json", ".yml", ".yaml")
SCHEME, PATH = "__scheme__", "__metrics_path__"

Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Found:
    """What a file held when it could last be used. `stamp` is the state of the file that was last
    tried, None to try it again."""

    stamp: Stamp | None
    specs: tuple[TargetSpec, ...]
    error: str = ""


class FileTargets:
    """The targets of all files that the patterns name. `before` are those with settings that are
    no longer in force: every file is read again, and counts as it was where it cannot be used."""

    def __init__(
        self, patterns: Sequence[str], settings: Settings, before: FileTargets | None = None
    ) -> None:
        self._patterns, self._settings = tuple(patterns), settings
        known: dict[str, Found] = before._files if before else {}
        # What was wrong is forgotten: who reads the settings again wants to hear of it again.
        self._files: dict[str, Found] = {
            path: Found(None, found.specs) for path, found in known.items()
        }
        for pattern in self._patterns:
            if not glob.glob(pattern):  # noqa: PTH207 - a pattern may be absolute
                log.warning("file_sd: no file is there yet pattern=%s", pattern)

    def refresh(self, others: Sequence[TargetSpec]) -> bool:
        """Read what is new or has changed. Returns whether the targets may be others now.

        A file that cannot be used keeps the targets that it had, and that is logged; one that is
        gone has none. `others` are targets whose names are taken.
        """
        stamps = {path: _stamp(path) for path in self._paths()}
        if stamps == {path: found.stamp for path, found in self._files.items()}:
            return False
        for path in [path for path in self._files if path not in stamps]:
            log.info("file_sd: file is gone path=%s targets=%s", path, len(self._files[path].specs))
            del self._files[path]
        for path, stamp in stamps.items():
            before = self._files.get(path, Found(None, ()))
            # One that could not be used may have clashed with what has changed now.
            if before.stamp != stamp or before.error:
                self._files[path] = self._read(path, stamp, before, others)
        return True

    def specs(self) -> list[TargetSpec]:
        """The targets, by file."""
        return [one for path in sorted(self._files) for one in self._files[path].specs]

    def _paths(self) -> list[str]:
        return sorted({path for pattern in self._patterns for path in glob.glob(pattern)})  # noqa: PTH207 - a pattern may be absolute

    def _read(self, path: str, stamp: Stamp, before: Found, others: Sequence[TargetSpec]) -> Found:
        taken = [
            *others,
            *(one for at, found in self._files.items() if at != path for one in found.specs),
        ]
        try:
            specs = tuple(file_specs(path, self._settings))
            check_unique([*taken, *specs])
        except SettingsError as error:
            names = {one.name for one in taken}
            kept = tuple(one for one in before.specs if one.name not in names)
            if str(error) != before.error:
                log.error(  # noqa: TRY400 - no bug
                    "file_sd: file cannot be used; its targets stay as they were error=%s kept=%s",
                    error,
                    len(kept),
                )
            return Found(stamp, kept, str(error))
        log.info("file_sd: file was read path=%s targets=%s", path, len(specs))
        return Found(stamp, specs)


def file_specs(path: str, settings: Settings) -> Iterator[TargetSpec]:
    """The targets of one file.

    Raises:
        SettingsError: it cannot be read, or is not in the format.
    """
    origin = f"file_sd {path}"
    groups = _document(Path(path), origin)
    if not isinstance(groups, list):
        raise SettingsError(f"{origin}: it must be a list of groups with targets and labels")
    for number, group in enumerate(cast("list[object]", groups), 1):
        yield from _group_specs(group, settings, f"{origin}: group {number}")


def _group_specs(group: object, settings: Settings, origin: str) -> Iterator[TargetSpec]:
    if not isinstance(group, dict):
        raise SettingsError(f"{origin}: it must be a table with targets and labels")
    table = cast("dict[str, Any]", group)
    for key in table:
        if key not in ("targets", "labels"):
            raise SettingsError(f"{origin}: a group has no key {key!r}: only targets and labels")
    targets: object = table.get("targets", [])
    labels: object = table.get("labels") or {}
    if not is_texts(targets):
        raise SettingsError(f"{origin}: targets must be a list of texts")
    if not is_pairs(labels):
        raise SettingsError(f"{origin}: labels must be a table of texts")
    kept = {key: value for key, value in labels.items() if not key.startswith("__")}
    for target in targets:
        yield spec(_address(target, labels), settings, origin, labels=kept)


def _address(target: str, labels: Mapping[str, str]) -> str:
    """A target's URL: `__scheme__` and `__metrics_path__` apply where it does not say itself."""
    scheme, path = labels.get(SCHEME, "http"), labels.get(PATH, "")
    url = target if "://" in target else f"{scheme}://{target}"
    bare = "/" not in url.partition("://")[2]
    return f"{url}/{path.lstrip('/')}" if bare and path else url


def _document(path: Path, origin: str) -> object:
    if path.suffix not in SUFFIXES:
        raise SettingsError(f"{origin}: its name must end in {', '.join(SUFFIXES)}")
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise SettingsError(f"{origin}: larger than {LARGEST_BYTES // 1024**2} MiB")
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise SettingsError(f"{origin}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise SettingsError(f"{origin}: not text: {exc.reason}") from exc
    return _json(text, origin) if path.suffix == ".json" else _yaml(text, origin)


def _json(text: str, origin: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise SettingsError(f"{origin}: not JSON: {exc}") from exc


def _yaml(text: str, origin: str) -> object:
    import yaml  # here: most have no such files, and it is 1 MB of code

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise SettingsError(f"{origin}: not YAML: {' '.join(str(exc).split())}") from exc


def _stamp(path: str) -> Stamp:
    try:
        stat = Path(path).stat()
    except OSError:  # it went just now, or is a link to nothing
        return 0, 0, 0
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


# --- Which targets there are to be: arguments, tables and files taken together --------------------


NO_TARGET = (
    "no target to watch: name one (kneewatch run http://host:8000), or give it a [[targets]] table "
    "or a file_sd file in the settings; kneewatch run --demo plays a recording"
)


class Discovery:
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

    def renewed(self, settings: Settings) -> Discovery:
        """The roster with other settings, files read again; one that cannot be used now keeps the
        targets that it had.

        Raises:
            SettingsError: as at the start.
        """
        return Discovery(self._arguments, settings, self._files, may_be_empty=self._may_be_empty)

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
