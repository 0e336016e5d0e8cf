"""Effective settings: reading them from all sources, and building objects from them. I/O edge.

In a file, `rules.<ID>.<severity>` sets a threshold. `[[targets]]` and `[[notify]]` are lists of
tables; `agent/targets.py` and `agent/notify/receivers.py` read them.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from msgspec import Struct

from kneewatch.agent.settings.table import BENCHMARK, BY_KEY, SETTINGS, Setting, duration_s, pair
from kneewatch.collector.errors import CollectError, SettingsError
from kneewatch.collector.exposition import Limits
from kneewatch.collector.files import read_text
from kneewatch.collector.http.address import FetchSettings, parse_target, shown_url
from kneewatch.collector.spelling import did_you_mean

if TYPE_CHECKING:
    from kneewatch.diagnose.deployment.deployment import Stated
    from kneewatch.diagnose.diagnosis_config import Profile

HIDDEN = "(hidden)"


FILE_MAX_BYTES = 4 * 1024 * 1024


class Effective(Struct, frozen=True):
    """The value of a setting, and its origin."""

    value: Any
    origin: str


class Settings:
    """Effective settings. A value is read with `settings["slo.ttft_p99_s"]`.

    `thresholds` are the user's bounds by rule id and severity. `thresholds_origin` is the file that
    contains them. `tables` are the lists of tables in the file, by key.
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

    def with_values(
        self,
        values: Mapping[str, Effective],
        thresholds: Mapping[str, Mapping[str, float]] | None = None,
        origin: str = "",
    ) -> Settings:
        """A copy of the settings in which `values` and `thresholds` replace the present ones.

        `origin` contains the thresholds.
        """
        changed, own = {**self._values, **values}, thresholds or {}
        bounds = {
            rule: {**self.thresholds.get(rule, {}), **own.get(rule, {})}
            for rule in dict.fromkeys((*self.thresholds, *own))
        }
        return Settings(changed, bounds, origin if own else self.thresholds_origin, self.tables)

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - a setting has its own kind
        return self._values[key].value

    def origin(self, key: str) -> str:
        """The origin of a setting's value: "default", "file ...", "environment ..." or "flag
        ..."."""
        return self._values[key].origin

    def rows(self) -> list[tuple[Setting, Effective]]:
        """All settings with value and origin, in the order of the table of settings."""
        return [(setting, self._values[setting.key]) for setting in SETTINGS]

    def as_toml(self) -> list[str]:
        """The settings as lines of TOML. Settings without a value are comments."""
        lines: list[str] = []
        heading = ""
        for setting, effective in self.rows():
            if setting.heading != heading:
                heading = setting.heading
                lines += [*([""] if lines else []), f"# --- {heading} ---"]
            lines.append(
                f"# {setting.key} is not set; {setting.help}"
                if effective.value is None
                else f"{setting.key} = {toml_value(setting, effective.value)}"
                f"  # {effective.origin}; {setting.help}"
            )
        lines += [
            f"rules.{json.dumps(rule)}.{severity} = {threshold}  # {self.thresholds_origin}"
            for rule, bounds in self.thresholds.items()
            for severity, threshold in bounds.items()
        ]
        return lines

    def profile(self, *, window_s: float | None = None, stated: Stated | None = None) -> Profile:
        """The profile for a diagnosis. `window_s` replaces the setting.

        Peak figures that are not set are taken from the GPU in `stated`.
        """
        # Lazy: slow to import, and the first page is fetched without them.
        from kneewatch.diagnose.deployment.deployment import NOTHING
        from kneewatch.diagnose.diagnosis_config import Profile
        from kneewatch.rules.facts import Targets

        stated = NOTHING if stated is None else stated
        gpu = stated.gpu
        return Profile(
            window_s=self["window_s"] if window_s is None else window_s,
            targets=Targets(self["slo.ttft_p99_s"], self["slo.itl_p99_s"]),
            gpus=self["gpus"],
            peak_flop_per_s=self["peak.flop_per_s"] or (gpu.bf16_flop_per_s if gpu else None),
            peak_bytes_per_s=self["peak.bytes_per_s"]
            or (gpu.memory_bandwidth_bytes_per_s if gpu else None),
            stated=stated,
            benchmark={key: self[key] for key in BENCHMARK},
            thresholds=self.thresholds,
            thresholds_origin=self.thresholds_origin,
            kv_horizon_s=self["kv_horizon_s"],
            expected_prefix_hit_ratio=self["expect.prefix_hit_ratio"],
            usual_after_s=self["usual_after_s"],
        )

    @property
    def docs_url(self) -> str:
        """Base URL of the pages about causes and rules, without a trailing slash. Empty if it is
        not set: then only the daemon serves these pages."""
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
    """A value in TOML syntax. Secrets, and credentials in URLs, are hidden."""
    if setting.kind == "url" and value not in setting.choices:
        value = shown_url(cast("str", value))
    # JSON's numbers, strings, booleans and escapes are valid TOML.
    if setting.kind != "pairs":
        return json.dumps(value, ensure_ascii=False)
    pairs = cast("Mapping[str, str]", value)
    shown = {name: HIDDEN if setting.secret else text for name, text in pairs.items()}
    inner = ", ".join(f"{json.dumps(name)} = {json.dumps(text)}" for name, text in shown.items())
    return f"{{ {inner} }}"


# --- Where they come from: defaults < TOML file < environment < flags -----------------------------


RULES_PREFIX = "rules."
CONFIG_VARIABLE = "KNEEWATCH_CONFIG"
ALL_SETTINGS = "`kneewatch config` prints all settings"
TABLES = ("targets", "notify")
"""Keys whose value is a list of tables."""

BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
KIND_NAMES = {
    "seconds": "a number of seconds",
    "number": "a number",
    "count": "a whole number",
    "text": "text",
    "url": "a URL",
    "texts": "a list of texts",
    "flag": "true or false",
    "pairs": "a table with text values",
}


def load(
    *,
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    checks: Sequence[Callable[[Settings], object]] = (),
) -> Settings:
    """The effective settings. `flags` has the values of flags by setting; None means that the flag
    was not given.

    `defaults` belong to the command and replace the defaults in the table of settings. `checks` are
    called with the settings and raise SettingsError for further mistakes.

    Raises:
        SettingsError: keys are unknown, values are of the wrong kind, the file is unreadable, or a
            check failed; a message for each mistake names key and origin.
    """
    command_defaults = defaults or {}
    values = {
        setting.key: Effective(command_defaults.get(setting.key, setting.default), "default")
        for setting in SETTINGS
    }
    tables: dict[str, list[dict[str, Any]]] = {}
    thresholds: dict[str, dict[str, float]] = {}
    origin = f"file {file}"
    with reported_together() as mistakes:
        for key, value in (_from_file(file) if file else {}).items():
            with gathered(mistakes):
                if key.startswith(RULES_PREFIX):
                    add_threshold(thresholds, key, value, origin)
                elif key in TABLES:
                    tables[key] = _tables(key, value, origin)
                else:
                    values[key] = Effective(
                        validated(_setting_of(key, origin), value, origin), origin
                    )
        for setting in SETTINGS:
            if setting.env in environ:
                place = f"environment {setting.env}"
                with gathered(mistakes):
                    parsed = _parsed(setting, environ[setting.env], place)
                    values[setting.key] = Effective(validated(setting, parsed, place), place)
        for key, value in flags.items():
            if value is not None:
                place = f"flag {BY_KEY[key].option}"
                with gathered(mistakes):
                    given = _of_flag(BY_KEY[key], value, place)
                    values[key] = Effective(validated(BY_KEY[key], given, place), place)
        mistakes += _unknown_variables(environ, [*tables.values(), *values.values()])
        settings = Settings(values, thresholds, origin, tables)
        for check in checks:
            with gathered(mistakes):
                check(settings)
    return settings


@contextmanager
def gathered(mistakes: list[str]) -> Generator[None]:
    """A context that catches SettingsError and adds its messages to `mistakes`."""
    try:
        yield
    except SettingsError as error:
        mistakes += error.messages


@contextmanager
def reported_together() -> Generator[list[str]]:
    """A context that yields an empty list for messages about mistakes. At its end it raises a
    SettingsError with all messages in the list, each once."""
    mistakes: list[str] = []
    yield mistakes
    if mistakes:
        raise SettingsError(*dict.fromkeys(mistakes))  # two checks can find the same


def _from_file(file: Path) -> dict[str, Any]:
    try:
        return flattened(tomllib.loads(read_text(file, FILE_MAX_BYTES)))
    except OSError as exc:
        raise SettingsError(f"settings file {file}: {exc.strerror or exc}") from exc
    except ValueError as exc:  # not UTF-8, not TOML, or an integer of thousands of digits
        raise SettingsError(f"settings file {file}: {exc}") from exc
    except RecursionError as exc:
        raise SettingsError(f"settings file {file}: nested too deeply") from exc


def _tables(key: str, value: object, origin: str) -> list[dict[str, Any]]:
    rows = cast("list[object]", value) if isinstance(value, list) else None
    if rows is None or not all(isinstance(row, dict) for row in rows):
        raise SettingsError(f"{origin}: write {key} as [[{key}]], one table per entry")
    return cast("list[dict[str, Any]]", rows)


def flattened(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a document by dotted key. Settings whose value is a table are not flattened."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        name = prefix + key
        whole = name in TABLES or (name in BY_KEY and BY_KEY[name].kind == "pairs")
        if isinstance(value, dict) and not whole:
            flat |= flattened(cast("dict[str, Any]", value), name + ".")
        else:
            flat[name] = value
    return flat


def _setting_of(key: str, origin: str) -> Setting:
    setting = BY_KEY.get(key)
    if setting is None:
        hint = did_you_mean(key, (*BY_KEY, *TABLES), ALL_SETTINGS)
        raise SettingsError(f"{origin}: unknown setting {key!r}; {hint}")
    return setting


def add_threshold(
    thresholds: dict[str, dict[str, float]], key: str, value: object, origin: str
) -> None:
    """Add the threshold of a key rules.<ID>.<severity>.

    Raises:
        SettingsError: the key has other parts, or the value is no number.
    """
    parts = key.removeprefix(RULES_PREFIX).split(".")
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    if len(parts) != 2 or not number:
        raise SettingsError(f"{origin}: {key} must be rules.<ID>.<severity> = number")
    thresholds.setdefault(parts[0], {})[parts[1]] = float(cast("float", value))


SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
"""The end of a variable that Kubernetes sets in every pod for a service, here one that is named
kneewatch."""


def _unknown_variables(environ: Mapping[str, str], read: Sequence[object]) -> list[str]:
    """A message for each variable KNEEWATCH_* that is no setting, and that no setting in `read`
    names, such as `bearer_token_env`."""
    known = [CONFIG_VARIABLE, *(setting.env for setting in SETTINGS)]
    named = str(read)
    return [
        f"environment {name}: no such setting; {did_you_mean(name, known, ALL_SETTINGS)}"
        for name, value in environ.items()
        if name.startswith("KNEEWATCH_")
        and name not in known
        and name not in named
        and not SERVICE_LINK.search(name)
        and not (name.endswith("_PORT") and "://" in value)
    ]


def _of_flag(setting: Setting, given: Any, place: str) -> object:  # noqa: ANN401 - as click has it
    """The value of a flag whose text is `given`; texts, where it may be repeated."""
    if isinstance(given, str):
        return _parsed(setting, given, place)
    if not isinstance(given, tuple):
        return given
    texts = cast("tuple[str, ...]", given)
    if setting.kind == "texts":
        return list(texts)
    pairs: dict[str, str] = {}
    for text in texts:
        try:
            name, value = pair(text)
        except ValueError as exc:
            raise SettingsError(f"{place}: {exc}") from exc
        if name in pairs:
            raise SettingsError(f"{place}: {name} is given twice")
        pairs[name] = value
    return pairs


def _parsed(setting: Setting, text: str, origin: str) -> object:
    if setting.kind == "seconds":
        return _duration_s(text, origin)
    if setting.kind in ("number", "count"):
        try:
            return int(text) if setting.kind == "count" else float(text)
        except ValueError as exc:
            raise SettingsError(f"{origin}: {text!r} is not {KIND_NAMES[setting.kind]}") from exc
    if setting.kind == "flag":
        if text.lower() not in BOOLEANS:
            raise SettingsError(f"{origin}: {text!r} is neither true nor false")
        return BOOLEANS[text.lower()]
    if setting.kind == "pairs":
        try:
            return dict(pair(part) for part in text.split(",") if part.strip())
        except ValueError as exc:
            raise SettingsError(f"{origin}: {exc}, separated by commas") from exc
    if setting.kind == "texts":
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _duration_s(text: str, origin: str) -> float:
    try:
        return duration_s(text)
    except ValueError as exc:
        raise SettingsError(f"{origin}: {exc}") from exc


def validated(setting: Setting, value: object, origin: str) -> object:
    """Check that the value of a setting has the right kind and is within its bounds. Returns the
    value.

    Raises:
        SettingsError: the value is of the wrong kind or out of range.
    """
    if setting.kind == "seconds" and isinstance(value, str):
        value = _duration_s(value, f"{origin}: {setting.key}")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        "seconds": number,
        "number": number,
        "count": isinstance(value, int) and not isinstance(value, bool),
        "text": isinstance(value, str),
        "url": isinstance(value, str),
        "texts": is_texts(value),
        "flag": isinstance(value, bool),
        "pairs": is_pairs(value),
    }[setting.kind]
    if not fits:
        given = "" if setting.secret else f", not {value!r}"
        raise SettingsError(f"{origin}: {setting.key} must be {KIND_NAMES[setting.kind]}{given}")
    if isinstance(value, str):
        _check_text(setting, value, origin)
    if not number:
        return value
    try:
        amount = float(cast("float", value))
    except OverflowError as exc:
        raise SettingsError(f"{origin}: {setting.key} is out of range") from exc
    within = amount > 0 and setting.least <= amount <= setting.most
    if not within or not math.isfinite(amount):
        least = f"{setting.least:,.0f} or more" if setting.least else "more than 0"
        limit = f" and at most {setting.most:g}" if math.isfinite(setting.most) else ""
        unit = ", in seconds" if setting.kind == "seconds" else ""
        raise SettingsError(
            f"{origin}: {setting.key} = {value} is out of range: it must be {least}{limit}{unit}"
        )
    return value if setting.kind == "count" else amount


def _check_text(setting: Setting, text: str, origin: str) -> None:
    if text in setting.choices:
        return
    if setting.choices and setting.kind == "text":
        raise SettingsError(
            f"{origin}: {setting.key} must be one of {', '.join(setting.choices)}, not {text!r}"
        )
    if setting.kind == "url":
        try:
            parse_target(text)
        except CollectError as error:
            raise SettingsError(f"{origin}: {setting.key}: {error}; {error.hint}") from error


def is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(
        isinstance(item, str) for item in cast("list[object]", value)
    )


def is_pairs(value: object) -> TypeGuard[dict[str, str]]:
    """Whether a value is a table with string values."""
    return isinstance(value, dict) and all(
        isinstance(part, str)
        for both in cast("dict[object, object]", value).items()
        for part in both
    )
