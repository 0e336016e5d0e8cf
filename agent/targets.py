"""Targets from the command line and from `[[targets]]` tables: their names, addresses and settings.
I/O edge."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from kneewatch.agent.captures import capture_name
from kneewatch.agent.settings.effective import (
    RULES_PREFIX,
    Effective,
    Settings,
    add_threshold,
    flattened,
    gathered,
    reported_together,
    toml_value,
    validated,
)
from kneewatch.agent.settings.table import (
    BY_KEY,
    DEPLOYMENT,
    SETTINGS,
    Setting,
    check_thresholds,
    settings_of,
)
from kneewatch.collector.captures.capture import is_capture
from kneewatch.collector.errors import CollectError, SettingsError
from kneewatch.collector.http.address import METRICS_PATH, shown_url, with_scheme
from kneewatch.collector.spelling import did_you_mean
from kneewatch.diagnose.deployment.server_facts import SourceReading
from kneewatch.rules.formatting import duration

LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_NAME_CHARS = 200


class TargetSpec(Struct, frozen=True):
    """One configured target. `name` is unique; URLs and the store use it.

    `address` is the URL of a server, or the path of a capture that is played as if it were live.
    `labels` are set by the user (tier, pod, node, namespace ...). `settings` are the effective
    settings, including those of the target's own table. `gpu_metrics` is its DCGM exporter page,
    None if not set. `origin` is the place of its configuration. `pod` are the facts of its pod's
    spec if the Kubernetes API listed the pod, else None.
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
        return "://" not in self.address

    @property
    def shown_address(self) -> str:
        """The address without credentials."""
        return self.address if self.played else shown_url(self.address)

    @property
    def pending_text(self) -> str:
        """A sentence for people that says what the first scrape is waiting for."""
        if self.played:
            return f"waiting for the first page of {self.address}"
        most_s = self.settings["fetch.connect_timeout_s"] + self.settings["fetch.read_timeout_s"]
        return f"waiting for {self.shown_address}, up to {duration(most_s)}"


def target_name(target: str) -> str:
    """The name of a server in diagnoses: its URL without credentials and without /metrics.

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
    address_key: str = "",
) -> TargetSpec:
    """A target. `name` is derived from the address by default. `played`: the target is a capture.

    `origin` is the place of its configuration. `address_key` is the key of the address there; "" if
    there is no key.

    Raises:
        SettingsError: the address, the name or labels are invalid; each message has the origin.
    """
    mistakes: list[str] = []
    target = name
    try:
        default_name = capture_name(address) if played else target_name(address)
        target = default_name if name is None else name
    except CollectError as error:
        place = f"{origin}: {address_key}" if address_key else origin
        mistakes.append(f"{place}: {error}; {error.hint}")
    mistakes += _naming_mistakes(target, labels, origin)
    if mistakes or target is None:
        raise SettingsError(*mistakes)
    url = address if played else with_scheme(address)
    return TargetSpec(target, url, dict(labels or {}), settings, settings["gpu_metrics"], origin)


def _naming_mistakes(
    name: str | None, labels: Mapping[str, str] | None, origin: str
) -> Iterator[str]:
    valid = name is None or (name.strip() and name.isprintable() and len(name) <= MAX_NAME_CHARS)
    if not valid:
        yield f"{origin}: name = {name!r}: write 1 to {MAX_NAME_CHARS} printable characters"
    for label in labels or {}:
        if not LABEL.fullmatch(label):
            yield (
                f"{origin}: labels: {label!r} is not a label name: letters, digits and _, no "
                "digit first"
            )


def check_unique(specs: Sequence[TargetSpec]) -> None:
    """Check that no two targets have the same name, and that no two targets have the same log.

    Raises:
        SettingsError: two targets have the same name or log; each message names both origins.
    """
    first: dict[str, TargetSpec] = {}
    by_log: dict[str, TargetSpec] = {}
    with reported_together() as mistakes:
        for target in specs:
            path = target.settings["server_log"]
            if path is not None and by_log.setdefault(path, target) is not target:
                mistakes.append(
                    f"{by_log[path].origin} and {target.origin} have the same server_log {path!r}: "
                    "set it only in the [[targets]] table of the server that writes it"
                )
            other = first.setdefault(target.name, target)
            if other is not target:
                mistakes.append(
                    f"two targets are called {target.name!r}: {other.origin} and {target.origin}; "
                    "remove one or rename it"
                )


# --- Targets from arguments and [[targets]] tables ------------------------------------------------


OWN_KEYS = {row.key: row for row in settings_of("targets")}
"""The keys of a `[[targets]]` table that are not settings."""

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
        SettingsError: arguments are not targets; a message for each.
    """
    specs: list[TargetSpec] = []
    with reported_together() as mistakes:
        for number, address in enumerate(arguments, 1):
            with gathered(mistakes):
                played = is_capture(address)
                specs.append(spec(address, settings, f"argument {number}", played=played))
    return specs


def table_specs(settings: Settings) -> list[TargetSpec]:
    """The targets in the settings' `[[targets]]` tables.

    Raises:
        SettingsError: keys are unknown, values are invalid, or two targets have the same name; a
            message for each mistake names the table and the key.
    """
    specs: list[TargetSpec] = []
    with reported_together() as mistakes:
        for number, table in enumerate(settings.tables.get("targets", ()), 1):
            origin = f"{settings.thresholds_origin}: [[targets]] number {number}"
            with gathered(mistakes):
                specs.append(_table_spec(table, settings, origin))
        with gathered(mistakes):
            check_unique(specs)
    return specs


def _table_spec(table: Mapping[str, Any], settings: Settings, origin: str) -> TargetSpec:
    mistakes: list[str] = []
    own = {key: table[key] for key in OWN_KEYS if key in table}
    values: dict[str, Any] = {}
    thresholds: dict[str, dict[str, float]] = {}
    for key, value in (own | flattened({k: table[k] for k in table if k not in own})).items():
        with gathered(mistakes):
            if key.startswith(RULES_PREFIX):
                add_threshold(thresholds, key, value, origin)
                continue
            values[key] = validated(_setting_of(key, origin), value, origin)
    address, name, labels = (values.pop(key, None) for key in OWN_KEYS)
    overrides = {key: Effective(value, origin) for key, value in values.items()}
    if "url" not in table:
        mistakes.append(f'{origin}: url is missing: write url = "http://HOST:PORT"')
    if address is None:
        mistakes += _naming_mistakes(name, labels, origin)
        raise SettingsError(*mistakes)
    with gathered(mistakes):
        target = spec(
            address,
            settings.with_values(overrides, thresholds, origin),
            origin,
            played=is_capture(address),
            name=name,
            labels=labels,
            address_key="url",
        )
        if thresholds:
            check_thresholds(target.settings)
        if not mistakes:
            return target
    raise SettingsError(*mistakes)


def _setting_of(key: str, origin: str) -> Setting:
    setting = OWN_KEYS.get(key) or BY_KEY.get(key)
    if setting is None:
        hint = did_you_mean(
            key,
            (*OWN_KEYS, *PER_TARGET),
            f"valid: {', '.join(OWN_KEYS)}, and the settings of one target",
        )
        raise SettingsError(f"{origin}: unknown key {key!r}; {hint}")
    if key not in OWN_KEYS and key not in PER_TARGET:
        raise SettingsError(f"{origin}: {key} applies to all targets: set it outside [[targets]]")
    return setting


def targets_toml(settings: Settings) -> list[str]:
    """The `[[targets]]` tables as lines of TOML. Credentials are left out.

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
        lines += [
            f"rules.{json.dumps(rule)}.{severity} = {threshold}"
            for rule, bounds in target.settings.thresholds.items()
            for severity, threshold in bounds.items()
            if settings.thresholds.get(rule, {}).get(severity) != threshold
        ]
    return lines


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
