"""Effective settings, and the configuration objects that are built from them.

`rules.<ID>.<severity>` in a file sets a threshold; `[[targets]]` and `[[notify]]` are lists of
tables, read by `agent/daemon` and `agent/notify`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kneewatch.agent.settings.table import SETTINGS, Setting
from kneewatch.collector.exposition.grammar import Limits
from kneewatch.collector.http.address import shown_url
from kneewatch.collector.http.connection import FetchSettings
from kneewatch.diagnose.causes.evidence import Targets
from kneewatch.diagnose.deployment.deployment import NOTHING, Stated
from kneewatch.diagnose.diagnosis_config import Profile

HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class Effective:
    """A value and its origin."""

    value: Any
    origin: str


class Settings:
    """Effective settings: read with `settings["slo.ttft_p99_s"]`.

    `thresholds` are the user's bounds by rule id and severity word, `thresholds_origin` the file
    they came from, `tables` the file's lists of tables by key.
    """

    def __init__(
        self,
        values: Mapping[str, Effective],
        thresholds: Mapping[str, Mapping[str, float]],
        thresholds_origin: str = "settings",
        tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    ) -> None:
        self._values = dict(values)
        self.thresholds, self.thresholds_origin = thresholds, thresholds_origin
        self.tables: Mapping[str, Sequence[Mapping[str, Any]]] = tables or {}

    def with_values(self, values: Mapping[str, Effective]) -> Settings:
        """A copy of the settings with `values` replaced."""
        changed = {**self._values, **values}
        return Settings(changed, self.thresholds, self.thresholds_origin, self.tables)

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - a setting has its own kind
        return self._values[key].value

    def origin(self, key: str) -> str:
        """Origin of a setting's value: "default", "file ...", "environment ..." or "flag ..."."""
        return self._values[key].origin

    def rows(self) -> list[tuple[Setting, Effective]]:
        """Every setting with its value and origin, in the table's order."""
        return [(setting, self._values[setting.key]) for setting in SETTINGS]

    def as_toml(self) -> list[str]:
        """The settings as lines of TOML; unset ones are comments."""
        lines = [
            f"# {setting.key} is not set; {setting.help}"
            if effective.value is None
            else f"{setting.key} = {toml_value(setting, effective.value)}"
            f"  # {effective.origin}; {setting.help}"
            for setting, effective in self.rows()
        ]
        lines += [
            f"rules.{json.dumps(rule)}.{severity} = {threshold}  # {self.thresholds_origin}"
            for rule, bounds in self.thresholds.items()
            for severity, threshold in bounds.items()
        ]
        return lines

    def profile(self, *, window_s: float | None = None, stated: Stated = NOTHING) -> Profile:
        """The profile for the diagnosis. `window_s` overrides the setting.

        Unset peaks are those of the stated GPU.
        """
        gpu = stated.gpu
        return Profile(
            window_s=self["window_s"] if window_s is None else window_s,
            targets=Targets(self["slo.ttft_p99_s"], self["slo.itl_p99_s"]),
            gpus=self["gpus"],
            peak_flop_per_s=self["peak.flop_per_s"] or (gpu.bf16_flop_per_s if gpu else None),
            peak_bytes_per_s=self["peak.bytes_per_s"]
            or (gpu.memory_bandwidth_bytes_per_s if gpu else None),
            stated=stated,
            benchmark_ttft_p99_s=self["benchmark.ttft_p99_s"],
            benchmark_gpu_ratio=self["benchmark.gpu_ratio"],
            thresholds=self.thresholds,
            thresholds_origin=self.thresholds_origin,
            kv_horizon_s=self["kv_horizon_s"],
            expected_prefix_hit_ratio=self["expect.prefix_hit_ratio"],
        )

    @property
    def docs_url(self) -> str:
        """Base URL of the pages about causes and rules, without a trailing slash; empty if only the
        daemon serves them."""
        url: str = self["docs_url"] or ""
        return url.rstrip("/")

    def fetch(self) -> FetchSettings:
        """The settings for fetching pages."""
        stated = {
            setting.key.removeprefix("fetch."): effective.value
            for setting, effective in self.rows()
            if setting.key.startswith("fetch.") and effective.value is not None
        }
        return FetchSettings(**stated, body_limit_bytes=self["limits.body_bytes"])

    def limits(self) -> Limits:
        """The size limits of a scraped page."""
        return Limits(
            body_bytes=self["limits.body_bytes"],
            series=self["limits.series"],
            label_bytes=self["limits.label_bytes"],
        )


def toml_value(setting: Setting, value: object) -> str:
    """A value in TOML syntax, without secrets and without credentials in URLs."""
    if setting.kind == "url" and value not in setting.choices:
        value = shown_url(cast("str", value))
    # JSON's numbers, strings, booleans and escapes are valid TOML.
    if setting.kind != "pairs":
        return json.dumps(value, ensure_ascii=False)
    pairs = cast("Mapping[str, str]", value)
    shown = {name: HIDDEN if setting.secret else text for name, text in pairs.items()}
    inner = ", ".join(f"{json.dumps(name)} = {json.dumps(text)}" for name, text in shown.items())
    return f"{{ {inner} }}"
