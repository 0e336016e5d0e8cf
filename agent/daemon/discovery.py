"""Target discovery: from arguments, `[[targets]]` tables, file_sd files and pods. Files and pods
are read again when they change. Also builds each target's diagnosis profile. I/O edge."""

from __future__ import annotations

import glob
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.daemon.periodic_jobs import Job
from kneewatch.agent.kubernetes import Cluster, Pod, own_namespace, pod_reading
from kneewatch.agent.settings.effective import (
    Settings,
    gathered,
    is_pairs,
    is_texts,
    reported_together,
)
from kneewatch.agent.stated_deployment import stated
from kneewatch.agent.targets import TargetSpec, argument_specs, check_unique, table_specs
from kneewatch.agent.targets import spec as target_spec
from kneewatch.collector.engines.engine_kind import engine_kinds
from kneewatch.collector.errors import CollectError, SettingsError
from kneewatch.collector.files import Stamp, read_text, stamp_of, yaml_document
from kneewatch.diagnose.deployment.deployment import stated_of
from kneewatch.diagnose.deployment.server_facts import SourceReading
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Verdict

log = logging.getLogger(__name__)

PATH_ANNOTATION = "prometheus.io/path"
FORBIDDEN = "; a Role must allow its service account `list` on `pods` there"


class ListedPod(Struct, frozen=True):
    """A pod that serves a model: its name, its target labels, the URL of its page, and the facts
    of its spec.

    The facts have no time, so two readings of an unchanged pod compare equal.
    """

    name: str
    labels: Mapping[str, str]
    url: str
    reading: SourceReading


class PodTargets(Job):
    """The pods to watch. Each run of a scheduled job lists them again.

    While the Kubernetes API cannot be read, the pods of the last list stay targets.

    Raises:
        SettingsError: the Kubernetes client is not installed, or this process is not in a pod with
            access to the API.
    """

    every_s, first_in_s = 10.0, 0.0

    def __init__(self, settings: Settings, connect: Callable[[], Cluster] = Cluster) -> None:
        self._selector: str = settings["kubernetes.pods"]
        self._namespaces: tuple[str, ...] = settings["kubernetes.namespaces"] or (own_namespace(),)
        self._node: str | None = settings["kubernetes.node"]
        self._port: str = settings["kubernetes.port"]
        self._api = connect()
        self._servers: dict[str, tuple[ListedPod, ...]] = {}
        self._errors: dict[str, str] = {}
        self._without_port: frozenset[str] = frozenset()

    def cycle(self) -> float | None:
        """List the pods of all configured namespaces once. If a list cannot be read, the previous
        one stays."""
        for namespace in self._namespaces:
            self._read(namespace)
        return None

    def servers(self) -> tuple[ListedPod, ...]:
        """The serving pods, sorted by namespace. Thread-safe."""
        by_namespace = dict(self._servers)
        return tuple(server for name in self._namespaces for server in by_namespace.get(name, ()))

    def _read(self, namespace: str) -> None:
        try:
            pods = self._api.pods(namespace, selector=self._selector, node=self._node)
        except CollectError as error:
            if self._errors.get(namespace) != str(error):
                self._errors[namespace] = str(error)
                log.error(  # noqa: TRY400 - not a bug
                    "pods: cannot be listed, keeping the previous targets namespace=%s error=%s%s",
                    namespace,
                    error,
                    FORBIDDEN if error.kind == "auth" else "",
                )
            return
        if self._errors.pop(namespace, ""):
            log.info("pods: can be listed again namespace=%s", namespace)
        self._servers[namespace] = tuple(self._serving(namespace, pods))

    def _serving(self, namespace: str, pods: Iterable[Pod]) -> Iterator[ListedPod]:
        for pod in pods:
            if not is_serving(pod):
                continue
            name = f"{namespace}/{pod['metadata']['name']}"
            port = port_number(pod, self._port)
            if port is None:
                if name not in self._without_port:
                    self._without_port |= {name}
                    log.warning("pods: no container has the port pod=%s port=%s", name, self._port)
                continue
            address = str(pod["status"]["podIP"])
            host = f"[{address}]" if ":" in address else address
            labels = {"namespace": namespace, "pod": str(pod["metadata"]["name"])}
            if node := pod["spec"].get("nodeName"):
                labels["node"] = str(node)
            url = f"http://{host}:{port}{page_path(pod)}"
            yield ListedPod(name, labels, url, pod_reading(pod, port, 0.0))


def pod_specs(servers: Iterable[ListedPod], settings: Settings) -> list[TargetSpec]:
    """The targets of these pods, named NAMESPACE/POD. The name does not contain the address, so a
    pod whose address changes continues its history.

    Raises:
        SettingsError: an address is not a URL.
    """
    return [
        replace(
            target_spec(
                server.url,
                settings,
                f"kubernetes {server.name}",
                name=server.name,
                labels=server.labels,
            ),
            pod=server.reading,
        )
        for server in servers
    ]


def is_serving(pod: Pod) -> bool:
    """Whether a pod should answer scrapes: it is or was ready, or one of its containers restarted.

    A pod that starts for the first time does not answer for minutes, and a pod that is being
    deleted stops on purpose: these are not outages.
    """
    status: Mapping[str, Any] = pod.get("status") or {}
    ending = pod["metadata"].get("deletionTimestamp") is not None
    if ending or status.get("phase") != "Running" or not status.get("podIP"):
        return False
    conditions = {condition["type"]: condition for condition in _rows(status, "conditions")}
    ready = conditions.get("Ready", {})
    if ready.get("status") == "True":
        return True
    # A pod is unready from its first moment; a later change means that it was ready in between.
    started = str(conditions.get("Initialized", {}).get("lastTransitionTime") or "")
    was_ready = bool(started) and str(ready.get("lastTransitionTime") or "") > started
    return was_ready or any(
        container.get("restartCount") and not container.get("ready")
        for container in _rows(status, "containerStatuses")
    )


def port_number(pod: Pod, port: str) -> int | None:
    """The number of a container port that is given by number or by name. None if no container has a
    port of that name."""
    if port.isdigit():
        return int(port)
    for container in _rows(pod["spec"], "containers"):
        for entry in _rows(container, "ports"):
            if entry.get("name") == port:
                return int(entry["containerPort"])
    return None


def page_path(pod: Pod) -> str:
    """The path of a pod's page: its annotation prometheus.io/path, else that of the engine whose
    image a container has; empty at /metrics."""
    annotations: Mapping[str, str] = pod["metadata"].get("annotations") or {}
    if path := annotations.get(PATH_ANNOTATION):
        return "/" + path.lstrip("/")
    images = [str(container.get("image")) for container in _rows(pod["spec"], "containers")]
    paths = (
        kind.path
        for kind in engine_kinds()
        if kind.path and any(part in image for part in kind.images for image in images)
    )
    return next(paths, "")


def _rows(table: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    """The list at `key`; empty where the API omits the list or sets it to null."""
    return table.get(key) or ()


# --- File_sd files and pods -----------------------------------------------------------------------


MAX_FILE_BYTES = 4 * 1024 * 1024
TARGETS_MAX = 10_000
"""Maximum number of targets from all files: each takes about 5 kB, and more for its pages."""
SUFFIXES = (".json", ".yml", ".yaml")
SCHEME, PATH = "__scheme__", "__metrics_path__"

UNREADABLE: Stamp = (0, 0, 0)


class FileState(Struct, frozen=True):
    """The targets of a file when it was last valid.

    `stamp` identifies the version that was read last; None forces a new read.
    """

    stamp: Stamp | None
    specs: tuple[TargetSpec, ...]
    error: str = ""


class FileTargets:
    """Targets from all files that match the patterns.

    `before` are the targets under the previous settings. All files are read again; an invalid file
    keeps its targets in `before`.
    """

    def __init__(
        self, patterns: Sequence[str], settings: Settings, before: FileTargets | None = None
    ) -> None:
        self._patterns, self._settings = tuple(patterns), settings
        files: dict[str, FileState] = before._files if before else {}
        # Errors are dropped, so that a reload logs them again.
        self._files: dict[str, FileState] = {
            path: FileState(None, file.specs)
            for path, file in files.items()
            if any(PurePath(path).match(pattern) for pattern in self._patterns)
        }
        self._unlisted: list[str] = []
        for pattern in self._patterns:
            if not glob.glob(pattern):  # noqa: PTH207 - a pattern may be absolute
                log.warning("file_sd: no file matches yet pattern=%s", pattern)

    def refresh(self, others: Sequence[TargetSpec]) -> bool:
        """Read new and changed files. Returns whether the targets may have changed.

        An invalid file keeps its previous targets, which is logged; so does a file that cannot be
        looked for. A deleted file loses its targets. `others` are targets from other sources; no
        file may use one of their names.
        """
        self._check_folders()
        found = chain.from_iterable(map(glob.glob, self._patterns))
        paths = sorted({*found, *self._files})
        stamps = {path: stamp for path in paths if (stamp := _file_stamp(path)) is not None}
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
        return [target for path in sorted(self._files) for target in self._files[path].specs]

    def problems(self) -> list[str]:
        """A line for each folder that cannot be listed, and for each file that cannot be used."""
        return [*self._unlisted, *(file.error for file in self._files.values() if file.error)]

    def _check_folders(self) -> None:
        """Find the folders that cannot be listed; glob would report them as empty."""
        unlisted = list[str]()
        for folder in sorted({_folder(pattern) for pattern in self._patterns}):
            try:
                os.scandir(folder).close()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as exc:
                unlisted.append(f"file_sd: cannot list {folder}: {exc.strerror}")
        for problem in unlisted:
            if problem not in self._unlisted:
                log.error("%s, keeping its targets", problem)
        self._unlisted = unlisted

    def _read(
        self, path: str, stamp: Stamp, before: FileState, others: Sequence[TargetSpec]
    ) -> FileState:
        other_targets = [
            *others,
            *(target for at, file in self._files.items() if at != path for target in file.specs),
        ]
        try:
            specs = self._specs_beside(len(other_targets), path)
            check_unique([*other_targets, *specs])
        except SettingsError as error:
            names = {target.name for target in other_targets}
            kept = tuple(target for target in before.specs if target.name not in names)
            if str(error) != before.error:
                log.error(  # noqa: TRY400 - not a bug
                    "file_sd: invalid file, keeping its previous targets error=%s kept=%s",
                    error,
                    len(kept),
                )
            return FileState(stamp, kept, str(error))
        log.info("file_sd: file loaded path=%s targets=%s", path, len(specs))
        return FileState(stamp, specs)

    def _specs_beside(self, others: int, path: str) -> tuple[TargetSpec, ...]:
        most = TARGETS_MAX - others
        specs = tuple(islice(file_specs(path, self._settings), max(0, most) + 1))
        if len(specs) > most:
            raise SettingsError(f"file_sd {path}: more than {TARGETS_MAX:,} targets in all")
        return specs


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
        yield target_spec(_address(target, labels), settings, origin, labels=own_labels)


def _address(target: str, labels: Mapping[str, str]) -> str:
    """The URL of a target. If `target` has no scheme or path, the labels `__scheme__` and
    `__metrics_path__` determine them."""
    scheme, path = labels.get(SCHEME, "http"), labels.get(PATH, "")
    url = target if "://" in target else f"{scheme}://{target}"
    bare = "/" not in url.partition("://")[2]
    return f"{url}/{path.lstrip('/')}" if bare and path else url


def _document(path: Path, origin: str) -> object:
    if path.suffix not in SUFFIXES:
        raise SettingsError(f"{origin}: its name must end in {', '.join(SUFFIXES)}")
    try:
        text = read_text(path, MAX_FILE_BYTES)
    except OSError as exc:
        raise SettingsError(f"{origin}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise SettingsError(f"{origin}: not text: {exc.reason}") from exc
    is_json = path.suffix == ".json"
    try:
        return json.loads(text) if is_json else yaml_document(text)
    except (ValueError, RecursionError) as exc:
        raise SettingsError(f"{origin}: not {'JSON' if is_json else 'YAML'}: {exc}") from exc


def _folder(pattern: str) -> str:
    """The folder above the first part of a pattern with a wildcard."""
    folder = Path(pattern).parent
    while glob.has_magic(str(folder)):
        folder = folder.parent
    return str(folder)


def _file_stamp(path: str) -> Stamp | None:
    """The stamp of a file; None if it does not exist. A file that cannot be looked at exists."""
    try:
        return stamp_of(path)
    except OSError as exc:
        is_gone = isinstance(exc, FileNotFoundError | NotADirectoryError)
        return None if is_gone and not os.path.lexists(path) else UNREADABLE


# --- All configured targets -----------------------------------------------------------------------


NO_TARGET = (
    "no target to watch: pass one (kneewatch run http://host:8000), or add a [[targets]] table "
    "or a file_sd file to the settings; kneewatch run --demo plays a recording"
)


class Discovery:
    """Targets from arguments, tables, files and pods.

    `before` is the discovery under the previous settings. Files that have become invalid keep their
    targets in `before`, and the pods of `before` stay targets. `may_be_empty`: no target is needed,
    because a fleet is watched.

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
        self._servers: tuple[ListedPod, ...] = ()
        self._pod_specs: list[TargetSpec] = []
        self._refresh_pods()

    def reloaded(self, settings: Settings) -> Discovery:
        """A discovery with new settings. All files are read again; invalid files keep their
        previous targets.

        Raises:
            SettingsError: as in the constructor.
        """
        return Discovery(self._arguments, settings, self, may_be_empty=self._may_be_empty)

    def poll(self) -> bool:
        """Read changed files and use the pods of the newest list. Returns whether the targets may
        have changed."""
        files = self._files.refresh(self._static)
        return self._refresh_pods() or files

    def problems(self) -> list[str]:
        """A line for each file or folder of targets that cannot be read. Thread-safe."""
        return self._files.problems()

    def specs(self) -> list[TargetSpec]:
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
            log.error("pods: keeping the previous targets error=%s", error)  # noqa: TRY400 - not a bug
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


# --- Profiles -------------------------------------------------------------------------------------


MIN_INTERVAL_S = 0.1


def check_targets(settings: Settings) -> None:
    """Check the scrape interval and the stated deployment of the settings, and those of the
    `[[targets]]` tables.

    Raises:
        SettingsError: an interval is too short, or a stated deployment is wrong; see `stated`.
    """
    # Targets without settings of their own share one object.
    stated_by_all = settings, *(spec.settings for spec in table_specs(settings))
    distinct = {id(each): each for each in stated_by_all}
    with reported_together() as mistakes:
        for stated_settings in distinct.values():
            with gathered(mistakes):
                _check_interval(stated_settings)
            with gathered(mistakes):
                stated(stated_settings)


def _check_interval(settings: Settings) -> None:
    if settings["interval_s"] < MIN_INTERVAL_S:
        raise SettingsError(
            f"{settings.origin('interval_s')}: interval_s = {settings['interval_s']:g} is too "
            f"short: it must be {MIN_INTERVAL_S:g} or more"
        )


def target_profile(settings: Settings) -> Profile:
    """The profile for these settings.

    Raises:
        SettingsError: a model, GPU or version is unknown, a file cannot be read, or the interval is
            too short.
    """
    _check_interval(settings)
    return settings.profile(stated=stated(settings))


def with_tier(diagnosis: Verdict, spec: TargetSpec, profile: Profile) -> Verdict:
    """A copy of the diagnosis with its tier. The tier is the target's label `tier`; without that
    label it is model@GPU, if the GPU is set."""
    gpu = stated_of(profile.stated).gpu
    tier = spec.labels.get("tier")
    if tier is None and gpu is not None and diagnosis.model:
        tier = f"{diagnosis.model}@{gpu.id}"
    return diagnosis if tier is None else replace(diagnosis, tier=tier)
