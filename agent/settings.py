"""Settings: defaults < TOML file < environment < flags, each with its origin.

Every setting is a row of `SETTINGS`; the TOML key is its dotted name, the environment variable
its name in capitals (`slo.ttft_p99_s` -> KNEEWATCH_SLO_TTFT_P99_S). `rules.<ID>.<severity>` sets
a threshold.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast

from kneewatch.collector.access import FetchSettings
from kneewatch.collector.base import SettingsError
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.case import Targets
from kneewatch.diagnose.profile import WINDOW_S, Profile

Kind = Literal["seconds", "count", "number", "text", "flag", "pairs"]
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting; `least` is the smallest value taken (exclusive for seconds)."""

    key: str
    kind: Kind
    default: Any
    help: str
    least: float = 0.0

    @property
    def env(self) -> str:
        """The environment variable."""
        return "KNEEWATCH_" + self.key.upper().replace(".", "_")


@dataclass(frozen=True, slots=True)
class Effective:
    """A value and where it came from."""

    value: Any
    origin: str


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "window_s", "seconds", WINDOW_S, "short window; rules' durations are stretched with it"
    ),
    Setting("interval_s", "seconds", 2.0, "time between scrapes of diagnose and record"),
    Setting("watch_s", "seconds", 30.0, "how long diagnose watches"),
    Setting(
        "slo.ttft_p99_s", "seconds", None, "TTFT P99 target; unset: a target's own quiet times"
    ),
    Setting("slo.itl_p99_s", "seconds", None, "ITL P99 target; unset: a target's own quiet times"),
    Setting("gpus", "count", None, "GPUs of one engine, for tokens per GPU-hour", 1),
    Setting("gpu.peak_flop_per_s", "number", None, "one GPU's peak, for MFU"),
    Setting("gpu.peak_bytes_per_s", "number", None, "one GPU's memory bandwidth, for MBU"),
    Setting("benchmark.ttft_p99_s", "seconds", None, "TTFT P99 the size was computed from"),
    Setting("benchmark.gpu_ratio", "number", None, "GPU activity in that benchmark, 0 to 1"),
    Setting("fetch.connect_timeout_s", "seconds", 3.0, "to connect"),
    Setting("fetch.read_timeout_s", "seconds", 10.0, "for the whole read"),
    Setting("fetch.gzip", "flag", False, "ask for compressed pages (costs CPU, saves network)"),
    Setting("fetch.bearer_token_file", "text", None, "file with a bearer token"),
    Setting("fetch.bearer_token_env", "text", None, "environment variable with a bearer token"),
    Setting("fetch.headers", "pairs", None, "extra request headers"),
    Setting("fetch.header_files", "pairs", None, "request headers whose values are in files"),
    Setting(
        "fetch.header_envs", "pairs", None, "request headers whose values are in the environment"
    ),
    Setting("fetch.ca_file", "text", None, "certificate authorities to trust"),
    Setting("fetch.client_cert_file", "text", None, "client certificate"),
    Setting("fetch.client_key_file", "text", None, "its key"),
    Setting("fetch.insecure_skip_verify", "flag", False, "do not verify certificates"),
    Setting("limits.body_bytes", "count", 64 * MIB, "largest page, also after decompression", 1),
    Setting("limits.series", "count", 200_000, "most series on a page", 1),
    Setting("limits.label_bytes", "count", 16 * 1024, "longest label value", 1),
)

BY_KEY = {setting.key: setting for setting in SETTINGS}
RULES_PREFIX = "rules."


class Settings:
    """Effective settings: read with `settings["slo.ttft_p99_s"]`."""

    def __init__(
        self, values: Mapping[str, Effective], thresholds: Mapping[str, Mapping[str, float]]
    ) -> None:
        self._values = dict(values)
        self.thresholds = thresholds

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - a setting has its own kind
        return self._values[key].value

    def rows(self) -> list[tuple[Setting, Effective]]:
        """Every setting with its value and origin, in the table's order."""
        return [(setting, self._values[setting.key]) for setting in SETTINGS]

    def profile(self, *, window_s: float | None = None) -> Profile:
        """The profile for the diagnosis; `window_s` in place of the setting."""
        return Profile(
            window_s=self["window_s"] if window_s is None else window_s,
            targets=Targets(self["slo.ttft_p99_s"], self["slo.itl_p99_s"]),
            gpus=self["gpus"],
            peak_flop_per_s=self["gpu.peak_flop_per_s"],
            peak_bytes_per_s=self["gpu.peak_bytes_per_s"],
            benchmark_ttft_p99_s=self["benchmark.ttft_p99_s"],
            benchmark_gpu_ratio=self["benchmark.gpu_ratio"],
            thresholds=self.thresholds,
        )

    def fetch(self) -> FetchSettings:
        """How pages are fetched."""
        given = {
            setting.key.removeprefix("fetch."): effective.value
            for setting, effective in self.rows()
            if setting.key.startswith("fetch.") and effective.value is not None
        }
        return FetchSettings(**given, body_limit_bytes=self["limits.body_bytes"])

    def limits(self) -> Limits:
        """What a page may hold."""
        return Limits(
            body_bytes=self["limits.body_bytes"],
            series=self["limits.series"],
            label_bytes=self["limits.label_bytes"],
        )


def load(
    *,
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
) -> Settings:
    """Effective settings. `flags` maps setting keys to values; None means not given.

    Raises:
        SettingsError: unknown key, value of the wrong kind, file unreadable; the message names
        both.
    """
    values = {setting.key: Effective(setting.default, "default") for setting in SETTINGS}
    thresholds: dict[str, dict[str, float]] = {}
    for key, value in (_from_file(file) if file else {}).items():
        origin = f"file {file}"
        if key.startswith(RULES_PREFIX):
            _threshold(thresholds, key, value, origin)
        else:
            values[key] = Effective(_checked(_known(key, origin), value, origin), origin)
    for setting in SETTINGS:
        if setting.env in environ and setting.kind != "pairs":
            origin = f"environment {setting.env}"
            parsed = _parsed(setting, environ[setting.env], origin)
            values[setting.key] = Effective(_checked(setting, parsed, origin), origin)
    for key, value in flags.items():
        if value is not None:
            values[key] = Effective(_checked(BY_KEY[key], value, "flag"), "flag")
    return Settings(values, thresholds)


def _from_file(file: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise SettingsError(f"settings file {file}: {exc}") from exc
    return _flattened(document, "")


def _flattened(document: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in document.items():
        name = prefix + key
        pairs = name in BY_KEY and BY_KEY[name].kind == "pairs"
        if isinstance(value, dict) and not pairs:
            flat |= _flattened(cast("dict[str, Any]", value), name + ".")
        else:
            flat[name] = value
    return flat


def _known(key: str, origin: str) -> Setting:
    setting = BY_KEY.get(key)
    if setting is None:
        near = get_close_matches(key, BY_KEY, n=1, cutoff=0.0)
        raise SettingsError(f"{origin}: no setting {key!r}; the nearest is {near[0]!r}")
    return setting


def _threshold(
    thresholds: dict[str, dict[str, float]], key: str, value: object, origin: str
) -> None:
    parts = key.removeprefix(RULES_PREFIX).split(".")
    if len(parts) != 2 or isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingsError(f"{origin}: {key} must be rules.<ID>.<severity> = number")
    thresholds.setdefault(parts[0], {})[parts[1]] = float(value)


def _parsed(setting: Setting, text: str, origin: str) -> object:
    if setting.kind in ("seconds", "number"):
        try:
            return float(text)
        except ValueError as exc:
            raise SettingsError(f"{origin}: {text!r} is not a number") from exc
    if setting.kind == "count":
        try:
            return int(text)
        except ValueError as exc:
            raise SettingsError(f"{origin}: {text!r} is not a whole number") from exc
    if setting.kind == "flag":
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in words:
            raise SettingsError(f"{origin}: {text!r} is neither true nor false")
        return words[text.lower()]
    return text


def _checked(setting: Setting, value: object, origin: str) -> object:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        "seconds": number,
        "number": number,
        "count": isinstance(value, int) and not isinstance(value, bool),
        "text": isinstance(value, str),
        "flag": isinstance(value, bool),
        "pairs": _is_pairs(value),
    }[setting.kind]
    if not fits:
        raise SettingsError(
            f"{origin}: {setting.key} must be {_WANTED[setting.kind]}, not {value!r}"
        )
    if number:
        amount = float(cast("float", value))
        if not setting.least <= amount < float("inf") or (
            setting.kind == "seconds" and amount <= 0
        ):
            raise SettingsError(f"{origin}: {setting.key} = {value} is out of range")
        return value if setting.kind == "count" else amount
    return value


def _is_pairs(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    pairs = cast("dict[object, object]", value)
    return all(isinstance(part, str) for pair in pairs.items() for part in pair)


_WANTED = {
    "seconds": "a number of seconds",
    "number": "a number",
    "count": "a whole number",
    "text": "text",
    "flag": "true or false",
    "pairs": "a table of texts",
}
