"""Target discovery: arguments, tables, file_sd files, pods; reread when they change. I/O edge."""

from __future__ import annotations

import glob
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kneewatch.agent.daemon.pod_discovery import PodTargets, Server, pod_specs
from kneewatch.agent.settings.effective import Settings, is_pairs, is_texts
from kneewatch.agent.targets import TargetSpec, argument_specs, check_unique, spec, table_specs
from kneewatch.collector.errors import SettingsError

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 16 * 1024 * 1024
SUFFIXES = (".json", ".yml", ".yaml")
SCHEME, PATH = "__scheme__", "__metrics_path__"

Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class FileState:
    """The targets of a file when it was last valid. `stamp` identifies the version last read; None
    forces a new read."""

    stamp: Stamp | None
    specs: tuple[TargetSpec, ...]
    error: str = ""


class FileTargets:
    """Targets of all files that match the patterns.

    `before` holds the targets under the previous settings: every file is read again, and an invalid
    file keeps its previous targets.
    """

    def __init__(
        self, patterns: Sequence[str], settings: Settings, before: FileTargets | None = None
    ) -> None:
        self._patterns, self._settings = tuple(patterns), settings
        files: dict[str, FileState] = before._files if before else {}
        # Errors are dropped, so that a reload logs them again.
        self._files: dict[str, FileState] = {
            path: FileState(None, file.specs) for path, file in files.items()
        }
        for pattern in self._patterns:
            if not glob.glob(pattern):  # noqa: PTH207 - a pattern may be absolute
                log.warning("file_sd: no file matches yet pattern=%s", pattern)

    def refresh(self, others: Sequence[TargetSpec]) -> bool:
        """Read new and changed files. Returns whether the targets may have changed.

        An invalid file keeps its previous targets, which is logged; a deleted file has none.
        `others` are targets whose names are taken.
        """
        stamps = {path: _file_stamp(path) for path in self._paths()}
        if stamps == {path: file.stamp for path, file in self._files.items()}:
            return False
        for path in [path for path in self._files if path not in stamps]:
            log.info("file_sd: file deleted path=%s targets=%s", path, len(self._files[path].specs))
            del self._files[path]
        for path, stamp in stamps.items():
            before = self._files.get(path, FileState(None, ()))
            # A file with an error may have conflicted with one that has changed now.
            if before.stamp != stamp or before.error:
                self._files[path] = self._read(path, stamp, before, others)
        return True

    def specs(self) -> list[TargetSpec]:
        """The targets, by file."""
        return [target for path in sorted(self._files) for target in self._files[path].specs]

    def _paths(self) -> list[str]:
        return sorted({path for pattern in self._patterns for path in glob.glob(pattern)})  # noqa: PTH207 - a pattern may be absolute

    def _read(
        self, path: str, stamp: Stamp, before: FileState, others: Sequence[TargetSpec]
    ) -> FileState:
        other_targets = [
            *others,
            *(target for at, file in self._files.items() if at != path for target in file.specs),
        ]
        try:
            specs = tuple(file_specs(path, self._settings))
            check_unique([*other_targets, *specs])
        except SettingsError as error:
            names = {target.name for target in other_targets}
            kept = tuple(target for target in before.specs if target.name not in names)
            if str(error) != before.error:
                log.error(  # noqa: TRY400 - no bug
                    "file_sd: invalid file, keeping its previous targets error=%s kept=%s",
                    error,
                    len(kept),
                )
            return FileState(stamp, kept, str(error))
        log.info("file_sd: file loaded path=%s targets=%s", path, len(specs))
        return FileState(stamp, specs)


def file_specs(path: str, settings: Settings) -> Iterator[TargetSpec]:
    """The targets of one file.

    Raises:
        SettingsError: the file cannot be read or is invalid.
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
    own_labels = {key: value for key, value in labels.items() if not key.startswith("__")}
    for target in targets:
        yield spec(_address(target, labels), settings, origin, labels=own_labels)


def _address(target: str, labels: Mapping[str, str]) -> str:
    """A target's URL; `__scheme__` and `__metrics_path__` apply where the target has none."""
    scheme, path = labels.get(SCHEME, "http"), labels.get(PATH, "")
    url = target if "://" in target else f"{scheme}://{target}"
    bare = "/" not in url.partition("://")[2]
    return f"{url}/{path.lstrip('/')}" if bare and path else url


def _document(path: Path, origin: str) -> object:
    if path.suffix not in SUFFIXES:
        raise SettingsError(f"{origin}: its name must end in {', '.join(SUFFIXES)}")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SettingsError(f"{origin}: larger than {MAX_FILE_BYTES // 1024**2} MiB")
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
    import yaml  # lazy: 1 MB of code, and few daemons have YAML files

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise SettingsError(f"{origin}: not YAML: {' '.join(str(exc).split())}") from exc


def _file_stamp(path: str) -> Stamp:
    try:
        stat = Path(path).stat()
    except OSError:  # just deleted, or a dangling link
        return 0, 0, 0
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


# --- All configured targets -----------------------------------------------------------------------


NO_TARGET = (
    "no target to watch: pass one (kneewatch run http://host:8000), or add a [[targets]] table "
    "or a file_sd file to the settings; kneewatch run --demo plays a recording"
)


class Discovery:
    """Targets from arguments, tables, files and pods; `may_be_empty` if a fleet is watched instead.

    `before` is the discovery under the previous settings: its invalid files keep their targets, and
    its pods stay.

    Raises:
        SettingsError: no target is configured, one is invalid, two have the same name, or the
            Kubernetes API cannot be used.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        settings: Settings,
        before: Discovery | None = None,
        *,
        may_be_empty: bool = False,
    ) -> None:
        self._arguments, self._settings = tuple(arguments), settings
        self._may_be_empty = may_be_empty or bool(settings["kubernetes.pods"])
        self._static = self._static_specs(settings)
        files = None if before is None else before._files
        self._files: FileTargets = FileTargets(settings["file_sd"] or (), settings, files)
        self._files.refresh(self._static)
        self.pods: PodTargets | None = None
        if before is not None:
            self.pods = before.pods
        elif settings["kubernetes.pods"]:
            self.pods = PodTargets(settings)
        self._servers: tuple[Server, ...] = ()
        self._pod_specs: list[TargetSpec] = []
        self._refresh_pods()

    def reloaded(self, settings: Settings) -> Discovery:
        """Discovery with new settings; files are read again, and invalid ones keep their previous
        targets.

        Raises:
            SettingsError: as at the start.
        """
        return Discovery(self._arguments, settings, self, may_be_empty=self._may_be_empty)

    def poll(self) -> bool:
        """Read changed files, and take over the pods of the last reading. Returns whether the
        targets may have changed."""
        files = self._files.refresh(self._static)
        return self._refresh_pods() or files

    def specs(self) -> list[TargetSpec]:
        """All targets."""
        return [*self._static, *self._files.specs(), *self._pod_specs]

    def _refresh_pods(self) -> bool:
        servers = self.pods.servers() if self.pods else ()
        if servers == self._servers:
            return False
        self._servers = servers
        try:
            specs = pod_specs(servers, self._settings)
            check_unique([*self._static, *self._files.specs(), *specs])
        except SettingsError as error:
            log.error("pods: unchanged after an error error=%s", error)  # noqa: TRY400 - no bug
            return False
        self._pod_specs = specs
        log.info("pods: changed targets=%s", len(specs))
        return True

    def _static_specs(self, settings: Settings) -> list[TargetSpec]:
        specs = [*argument_specs(self._arguments, settings), *table_specs(settings)]
        if not specs and not settings["file_sd"] and not self._may_be_empty:
            raise SettingsError(NO_TARGET)
        check_unique(specs)
        return specs
