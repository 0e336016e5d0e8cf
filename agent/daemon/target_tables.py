"""Targets that are configured one by one: arguments, and the `[[targets]]` tables. I/O edge: it
looks whether an address is a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kneewatch.agent.setting_options import DEPLOYMENT
from kneewatch.agent.settings import Effective, Settings, toml_value
from kneewatch.agent.settings_sources import checked, flattened, is_pairs, nearest
from kneewatch.agent.settings_table import BY_KEY, SETTINGS
from kneewatch.agent.targets import TargetSpec, spec
from kneewatch.collector.base import SettingsError
from kneewatch.collector.captures.capture import is_capture

OWN = ("url", "name", "labels")
GROUPS = ("slo.", "peak.", "benchmark.", "fetch.", "limits.")
SINGLE = frozenset({"window_s", "interval_s", "gpus", "gpu_metrics", *DEPLOYMENT})
PER_TARGET = tuple(
    setting.key for setting in SETTINGS if setting.key in SINGLE or setting.key.startswith(GROUPS)
)
"""Settings that a target may have to itself."""


def argument_specs(arguments: Sequence[str], settings: Settings) -> list[TargetSpec]:
    """The targets of the command line.

    Raises:
        SettingsError: one cannot be a target.
    """
    return [
        spec(address, settings, f"argument {number}", played=is_capture(address))
        for number, address in enumerate(arguments, 1)
    ]


def table_specs(settings: Settings) -> list[TargetSpec]:
    """The targets of the settings file.

    Raises:
        SettingsError: an unknown key, or a value that is not what it must be.
    """
    return [
        _table_spec(table, settings, f"{settings.thresholds_origin}: [[targets]] number {number}")
        for number, table in enumerate(settings.tables.get("targets", ()), 1)
    ]


def _table_spec(table: Mapping[str, Any], settings: Settings, origin: str) -> TargetSpec:
    own = {key: table[key] for key in OWN if key in table}
    address, name, labels = own.get("url"), own.get("name"), own.get("labels", {})
    if not isinstance(address, str):
        raise SettingsError(
            f"{origin}: url must be text" if "url" in own else f"{origin}: url is missing"
        )
    if not isinstance(name, str | None):
        raise SettingsError(f"{origin}: name must be text, not {name!r}")
    if not is_pairs(labels):
        raise SettingsError(f"{origin}: labels must be a table of texts")
    rest = flattened({key: value for key, value in table.items() if key not in OWN})
    values = {
        key: Effective(checked(BY_KEY[_known(key, origin)], value, origin), origin)
        for key, value in rest.items()
    }
    return spec(
        address,
        settings.with_values(values) if values else settings,
        origin,
        played=is_capture(address),
        name=name,
        labels=labels,
    )


def _known(key: str, origin: str) -> str:
    if key in PER_TARGET:
        return key
    if key in BY_KEY:
        raise SettingsError(f"{origin}: {key} is set once for all targets: write it above them")
    near = nearest(key, (*OWN, *PER_TARGET))
    raise SettingsError(f"{origin}: a target has no key {key!r}; the nearest is {near!r}")


def targets_toml(settings: Settings) -> list[str]:
    """Lines of a TOML file with the same `[[targets]]`, without credentials.

    Raises:
        SettingsError: a table cannot be a target.
    """
    lines: list[str] = []
    for made in table_specs(settings):
        lines += ["", f"[[targets]]  # {made.origin}", f"url = {_text(made.shown_address)}"]
        lines.append(f"name = {_text(made.name)}")
        lines += [f"labels.{key} = {_text(value)}" for key, value in made.labels.items()]
        lines += [
            f"{setting.key} = {toml_value(setting, effective.value)}"
            for setting, effective in made.settings.rows()
            if effective.origin == made.origin
        ]
    return lines


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
