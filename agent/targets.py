"""Targets from arguments and `[[targets]]` tables: name, address, settings. I/O edge."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kneewatch.agent.settings.effective import (
    Effective,
    Settings,
    flattened,
    is_pairs,
    nearest,
    toml_value,
    validated,
)
from kneewatch.agent.settings.table import BY_KEY, DEPLOYMENT, SETTINGS
from kneewatch.agent.stream import capture_name
from kneewatch.collector.captures.capture import is_capture
from kneewatch.collector.errors import CollectError, SettingsError
from kneewatch.collector.http.address import METRICS_PATH, shown_url
from kneewatch.diagnose.deployment.server_facts import SourceReading

LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_NAME_CHARS = 200


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """One configured target. `name` is unique and used in URLs and in the store.

    `address` is a server's URL, or the path of a capture that is played as if it were live.
    `labels` are the user's (tier, pod, node, namespace ...), `settings` the effective settings with
    the target's own, `gpu_metrics` its DCGM exporter page if set, `origin` the place of its
    configuration, `pod` the facts of its pod's spec if the Kubernetes API listed it.
    """

    name: str
    address: str
    labels: Mapping[str, str]
    settings: Settings
    gpu_metrics: str | None
    origin: str
    pod: SourceReading | None = None

    @property
    def played(self) -> bool:
        """Whether the target is a capture."""
        return "://" not in self.address

    @property
    def shown_address(self) -> str:
        """The address without credentials."""
        return self.address if self.played else shown_url(self.address)

    @property
    def pending_text(self) -> str:
        """A sentence for people: what the first scrape waits for."""
        if self.played:
            return f"waiting for the first page of {self.address}"
        most_s = self.settings["fetch.connect_timeout_s"] + self.settings["fetch.read_timeout_s"]
        return f"waiting for {self.shown_address}, up to {most_s:g} s"


def target_name(target: str) -> str:
    """A server's name in diagnoses: its URL without credentials and without the usual path.

    Raises:
        CollectError: the target is not an HTTP(S) URL.
    """
    return shown_url(target).removesuffix(METRICS_PATH)


def spec(
    address: str,
    settings: Settings,
    origin: str,
    *,
    played: bool = False,
    name: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> TargetSpec:
    """A target; the default name is derived from the address. `played`: it is a capture.

    Raises:
        SettingsError: the address, the name or a label is invalid; the message has the origin.
    """
    try:
        default_name = capture_name(address) if played else target_name(address)
    except CollectError as error:
        raise SettingsError(f"{origin}: {error}; {error.hint}") from error
    target = name if name is not None else default_name
    if not target.strip() or not target.isprintable() or len(target) > MAX_NAME_CHARS:
        raise SettingsError(
            f"{origin}: {target!r} is not a name: write 1 to {MAX_NAME_CHARS} printable characters"
        )
    for label in labels or {}:
        if not LABEL.fullmatch(label):
            raise SettingsError(
                f"{origin}: {label!r} is not a label name: letters, digits and _, no digit first"
            )
    if not played and "://" not in address:
        address = f"http://{address.strip()}"
    return TargetSpec(
        target, address, dict(labels or {}), settings, settings["gpu_metrics"], origin
    )


def check_unique(specs: Sequence[TargetSpec]) -> None:
    """Check that no two targets have the same name or the same log.

    Raises:
        SettingsError: two have; the message names both origins.
    """
    first: dict[str, TargetSpec] = {}
    by_log: dict[str, TargetSpec] = {}
    for target in specs:
        path = target.settings["server_log"]
        if path is not None and by_log.setdefault(path, target) is not target:
            raise SettingsError(
                f"{by_log[path].origin} and {target.origin} have the same server_log {path!r}: set "
                "it only in the [[targets]] table of the server that writes it"
            )
        other = first.setdefault(target.name, target)
        if other is not target:
            raise SettingsError(
                f"two targets are called {target.name!r}: {other.origin} and {target.origin}; "
                "remove one or rename it"
            )


# --- Targets from arguments and [[targets]] tables ------------------------------------------------


TARGET_KEYS = ("url", "name", "labels")
PER_TARGET_GROUPS = ("slo.", "peak.", "benchmark.", "canary.", "fetch.", "limits.")
PER_TARGET_KEYS = frozenset(
    {"window_s", "interval_s", "gpus", "gpu_metrics", "server.probe", "server_log", *DEPLOYMENT}
)
PER_TARGET = tuple(
    setting.key
    for setting in SETTINGS
    if setting.key in PER_TARGET_KEYS or setting.key.startswith(PER_TARGET_GROUPS)
)
"""Settings that a target may override."""


def argument_specs(arguments: Sequence[str], settings: Settings) -> list[TargetSpec]:
    """The targets of the command line.

    Raises:
        SettingsError: an argument is not a target.
    """
    return [
        spec(address, settings, f"argument {number}", played=is_capture(address))
        for number, address in enumerate(arguments, 1)
    ]


def table_specs(settings: Settings) -> list[TargetSpec]:
    """The targets of the settings file.

    Raises:
        SettingsError: a key is unknown or a value invalid.
    """
    return [
        _table_spec(table, settings, f"{settings.thresholds_origin}: [[targets]] number {number}")
        for number, table in enumerate(settings.tables.get("targets", ()), 1)
    ]


def _table_spec(table: Mapping[str, Any], settings: Settings, origin: str) -> TargetSpec:
    address, name, labels = table.get("url"), table.get("name"), table.get("labels", {})
    if not isinstance(address, str):
        raise SettingsError(
            f"{origin}: url must be text" if "url" in table else f"{origin}: url is missing"
        )
    if not isinstance(name, str | None):
        raise SettingsError(f"{origin}: name must be text, not {name!r}")
    if not is_pairs(labels):
        raise SettingsError(f"{origin}: labels must be a table of texts")
    own_settings = flattened({key: value for key, value in table.items() if key not in TARGET_KEYS})
    values = {
        key: Effective(validated(BY_KEY[_checked_key(key, origin)], value, origin), origin)
        for key, value in own_settings.items()
    }
    return spec(
        address,
        settings.with_values(values) if values else settings,
        origin,
        played=is_capture(address),
        name=name,
        labels=labels,
    )


def _checked_key(key: str, origin: str) -> str:
    if key in PER_TARGET:
        return key
    if key in BY_KEY:
        raise SettingsError(f"{origin}: {key} applies to all targets: set it outside [[targets]]")
    near = nearest(key, (*TARGET_KEYS, *PER_TARGET))
    raise SettingsError(f"{origin}: unknown key {key!r} for a target; the nearest is {near!r}")


def targets_toml(settings: Settings) -> list[str]:
    """Lines of a TOML file with the same `[[targets]]`, without credentials.

    Raises:
        SettingsError: a table is not a valid target.
    """
    lines: list[str] = []
    for target in table_specs(settings):
        lines += ["", f"[[targets]]  # {target.origin}", f"url = {_text(target.shown_address)}"]
        lines.append(f"name = {_text(target.name)}")
        lines += [f"labels.{key} = {_text(value)}" for key, value in target.labels.items()]
        lines += [
            f"{setting.key} = {toml_value(setting, effective.value)}"
            for setting, effective in target.settings.rows()
            if effective.origin == target.origin
        ]
    return lines


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
