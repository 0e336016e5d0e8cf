"""The table of settings: each has a default, a TOML key, an environment variable and a flag. Also
the command line options for these flags, and those of `size`. Pure.

The TOML key is the dotted name of the setting. The environment variable is the name in capitals
(`slo.ttft_p99_s` -> KNEEWATCH_SLO_TTFT_P99_S). Of the diagnosis the module imports only the table
of vLLM's flags, so that help texts appear fast.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Sequence
from datetime import UTC, datetime, tzinfo
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import click
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.errors import SettingsError
from kneewatch.collector.packaged import packaged_tables, read_as
from kneewatch.diagnose.deployment.vllm_flags import FLAGS, number_of

if TYPE_CHECKING:
    from kneewatch.agent.settings.effective import Settings


Kind = Literal["seconds", "count", "number", "text", "texts", "url", "flag", "pairs"]


class Setting(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One setting, a row of settings.toml. Seconds, counts and numbers must be above 0, at least
    `least` and at most `most`.

    `secret`: the value is never shown. `choices` are the allowed texts; empty allows any text. A
    URL setting accepts either a URL or one of `choices`. `shown` says which help lists the flag;
    `heading` is that of the setting's group.
    """

    key: str
    help: str
    kind: Kind
    default: Any = None
    flag: str = ""
    most: float = float("inf")
    least: float = 0.0
    secret: bool = False
    choices: tuple[str, ...] = ()
    heading: str = ""
    shown: Literal["first", "all", "never"] = "all"

    @property
    def env(self) -> str:
        """The name of the environment variable."""
        return "KNEEWATCH_" + self.key.upper().replace(".", "_")

    @property
    def option(self) -> str:
        """The command line flag. If `flag` is not set, it is the key with dashes and without
        `_s`."""
        plain = self.key.removesuffix("_s") if self.kind == "seconds" else self.key
        return "--" + (self.flag or plain.replace(".", "-").replace("_", "-"))


def pair(words: str) -> tuple[str, str]:
    """Split NAME=VALUE into name and value.

    Raises:
        ValueError: the name or the equals sign is missing. The message does not contain the value,
            which may be a secret.
    """
    name, equals, value = words.partition("=")
    if not name.strip() or not equals:
        raise ValueError("write NAME=VALUE")
    return name.strip(), value.strip()


def settings_of(section: str) -> tuple[Setting, ...]:
    """The rows of a section of settings.toml. A heading holds for all rows up to the next one."""
    rows, heading = packaged_tables("agent.settings", "settings.toml")[section], ""
    settings: list[Setting] = []
    for key, row in rows.items():
        heading = row.get("heading", heading)
        settings.append(read_as({"key": key, **row, "heading": heading}, Setting))
    return tuple(settings)


SETTINGS = settings_of("settings")
BY_KEY = {setting.key: setting for setting in SETTINGS}
TTFT_TARGET_MOST_S = BY_KEY["slo.ttft_p99_s"].most
RUN_DEFAULTS = {"interval_s": 5.0}
"""Defaults of the daemon that differ from the table's."""

ITL_TARGET_MOST_S = BY_KEY["slo.itl_p99_s"].most
"""Maximum latency targets in seconds. A longer target was probably meant in milliseconds."""


# --- Command line options: parameter types, and a flag for each setting ---------------------------


UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
"""Units of durations in settings and flags, and of relative times such as -2h in HTTP requests.
Values in seconds."""


def duration_s(text: str) -> float:
    """Parse a duration such as 30, 30s, 5m, 2h, 7d or 1w. Returns seconds.

    Raises:
        ValueError: it is no duration.
    """
    text = text.strip()
    unit = next((u for u in UNITS_S if text.endswith(u)), "")
    try:
        return float(text.removesuffix(unit)) * UNITS_S.get(unit, 1.0)
    except ValueError:
        raise ValueError(f"{text!r} is not a duration; write 30s, 5m or 2h") from None


class Parsed(click.ParamType[Any]):
    """An argument that a function parses; the message of its ValueError is shown."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:  # noqa: ANN401 - as the function
        """What the argument is."""
        try:
            return self._parse(str(value))
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


def _span_s(text: str) -> float:
    seconds = duration_s(text)
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{text!r} must be longer than 0")
    return seconds


SPAN, PAIR = Parsed("duration", _span_s), Parsed("name=value", pair)
FILE = click.Path()
TARGET = click.Path(readable=False)
"""A server's URL or a capture file. The shell completes file names."""


# --- Flags for settings ---------------------------------------------------------------------------


DEPLOYMENT = (
    "model",
    "gpu",
    "tensor_parallel",
    "vllm_version",
    "launch_file",
    "launch_flags",
    "replicas",
    "usd_per_gpu_hour",
    "workload_profile",
)
ALIASES = {"tensor_parallel": ("--tp",)}
"""Additional names of flags; `size` uses the same ones."""

SWEEPS = "benchmark.by_tensor_parallel"
BENCHMARK = tuple(key for key in BY_KEY if key.startswith("benchmark.") and key != SWEEPS)
DIAGNOSIS = ("window_s", "slo.ttft_p99_s", "slo.itl_p99_s", "expect.prefix_hit_ratio", "gpus")
FETCH = tuple(setting.key for setting in SETTINGS if setting.key.startswith("fetch."))
FLEET = tuple(setting.key for setting in SETTINGS if setting.key.startswith("fleet."))

Command = TypeVar("Command", bound=Callable[..., Any])


METAVARS = {
    "seconds": "DURATION",
    "count": "INTEGER",
    "number": "FLOAT",
    "url": "URL",
    "pairs": "NAME=VALUE",
}


class HeadedOption(click.Option):
    """An option that only --help-all lists, under a heading. Without a heading --help lists it.
    `variable` is the environment variable of the same meaning."""

    def __init__(
        self,
        *args: Any,  # noqa: ANN401 - as click has them
        heading: str = "",
        variable: str = "",
        **attributes: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(*args, **attributes)
        self.heading, self.variable = heading, variable


class HeadedCommand(click.Command):
    """A command whose --help lists the options without a heading, and --help-all the others
    too."""

    def __init__(self, *args: Any, **attributes: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **attributes)
        if any(getattr(option, "heading", "") for option in self.params):
            whole = click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_help_all,
                help="Show all options and exit.",
            )
            self.params.append(whole)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings."""
        rows: dict[str, list[tuple[str, str]]] = {"": []}
        whole = ctx.meta.get(HELP_ALL)
        for option in self.get_params(ctx):
            row = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if row is not None:
                variable = getattr(option, "variable", "") if whole else ""
                row = (row[0], f"{row[1]}  [{variable}]") if variable else row
                rows.setdefault(getattr(option, "heading", ""), []).append(row)
        for heading, records in rows.items():
            if not heading or whole:
                with formatter.section(heading or "Options"):
                    formatter.write_dl(records)


HELP_ALL = "kneewatch.help_all"
"""Key in a click context: all options are shown."""


def _help_all(ctx: click.Context, _: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def setting_options(*names: str) -> Callable[[Command], Command]:
    """A decorator that adds the flags of these settings, and `--config`, to a command."""

    def decorate(command: Command) -> Command:
        for key in reversed(names):
            command = setting_option(BY_KEY[key])(command)
        return click.option(
            "--config",
            "config_file",
            type=click.Path(path_type=Path),
            envvar="KNEEWATCH_CONFIG",
            help="TOML settings file, or KNEEWATCH_CONFIG",
        )(command)

    return decorate


def setting_option(row: Setting) -> Callable[[Command], Command]:
    """A decorator that adds the option of one setting to a command.

    Click passes the text as it is: `load` parses it, so that its mistakes are reported with all
    others. Without the option on the command line, Click passes None, or () for a repeatable
    option. The setting's value then comes from the environment or the file.
    """
    flag, attributes = row.option, dict[str, Any](metavar=METAVARS.get(row.kind, "TEXT"))
    if row.kind == "flag":
        flag, attributes = f"{flag}/--no-{flag.removeprefix('--')}", {"default": None}
    elif row.key.endswith(("_file", ".file", "_log")):
        attributes = {"type": FILE}
    return click.option(
        flag,
        *ALIASES.get(row.key, ()),
        parameter(row.key),
        cls=cast("type[click.Option]", _shared_option),
        help=row.help,
        multiple=row.kind in ("pairs", "texts"),
        heading="" if row.shown == "first" else row.heading,
        variable=row.env,
        hidden=row.shown == "never",
        **attributes,
    )


class Count(click.ParamType[int]):
    """A whole number; 32k is 32,000 and 32K is 32,768, as vLLM reads them."""

    name = click.INT.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401 - as click has it
        large = number_of(str(value)) if str(value)[-1:].isalpha() else None
        return click.INT.convert(value if large is None else int(large), param, ctx)


COUNT = Count()
KINDS: dict[str, click.ParamType[Any] | type] = {
    "text": str,
    "texts": str,
    "count": COUNT,
    "number": float,
    "gib": float,
    "bytes": str,
    "sizes": str,
    "limits": str,
    "above_zero": click.FloatRange(0, min_open=True),
    "seconds": SPAN,
    "pair": PAIR,
    "file": FILE,
    "path": click.Path(path_type=Path),
    "switch": bool,
}
"""The type of an option's value for click, by its kind in options.toml and flags.toml."""

OPTIONS = packaged_tables("agent.settings", "options.toml")["options"]


def options(*names: str) -> Callable[[Command], Command]:
    """A decorator that adds options of options.toml to a command, in this order."""

    def decorate(command: Command) -> Command:
        for name in reversed(names):
            row, key = dict(OPTIONS[name]), name.rpartition(".")[2]
            kind, flag = row.pop("kind", "text"), row.pop("flag", key.replace("_", "-"))
            choices, shown = row.pop("choices", None), row.get("default") not in (None, "")
            attributes = dict[str, Any]({"show_default": shown, **row})
            command = click.option(
                f"--{flag}",
                key,
                type=click.Choice(choices) if choices else KINDS[kind],
                is_flag=kind == "switch",
                multiple=kind == "texts",
                **attributes,
            )(command)
        return command

    return decorate


@cache
def _shared_option(declarations: tuple[str, ...], **attributes: Hashable) -> click.Option:
    """The option for a setting. All commands share the same object; they do not change it."""
    return HeadedOption(declarations, **cast("dict[str, Any]", attributes))


def parameter(key: str) -> str:
    """The key of a setting as a Python parameter name."""
    return key.replace(".", "__")


Check = Callable[["Settings"], object]
"""A function that raises SettingsError if the settings contain a mistake that no single setting
shows."""


def effective(given: dict[str, Any], checks: Sequence[Check] = ()) -> Settings:
    """The effective settings of a command, read once. See `loader`."""
    return loader(given, checks=checks)()


def loader(
    given: dict[str, Any],
    defaults: dict[str, Any] | None = None,
    checks: Sequence[Check] = (),
) -> Callable[[], Settings]:
    """A function that reads a command's effective settings again at each call.

    The flags of settings are removed from the arguments `given`. `defaults` belong to the command.
    `checks` are additional checks of the command; their mistakes are reported together with all
    others.
    """
    from kneewatch.agent.settings.effective import load  # lazy: slow to import

    file: Path | None = given.pop("config_file", None)
    flags: dict[str, Any] = {}
    for key in BY_KEY:
        value = given.pop(parameter(key), None)
        flags[key] = None if value == () else value
    return lambda: load(
        file=file,
        environ=os.environ,
        flags=flags,
        defaults=defaults,
        checks=(_check_targets, _check_receivers, check_thresholds, *checks),
    )


# The imports are lazy: few files have tables or thresholds.


def _check_targets(settings: Settings) -> None:
    if "targets" in settings.tables:
        from kneewatch.agent.targets import table_specs

        table_specs(settings)


def _check_receivers(settings: Settings) -> None:
    if "notify" in settings.tables:
        from kneewatch.agent.notify.receivers import receivers

        receivers(settings)


def check_thresholds(settings: Settings) -> None:
    """Check that each threshold is one of a rule that there is with these settings.

    Raises:
        SettingsError: a rule or severity does not exist; each message lists the valid ones.
    """
    if not settings.thresholds:
        return
    from kneewatch.collector.spelling import did_you_mean
    from kneewatch.rules.rule import WORDS

    ids = [rule.id for rule in replace(settings.profile(), thresholds={}).rules]
    words = [word for severity, word in WORDS.items() if severity]
    origin, mistakes = settings.thresholds_origin, list[str]()
    for rule_id, bounds in settings.thresholds.items():
        if rule_id not in ids:
            mistakes.append(f"{origin}: no rule {rule_id!r}; {did_you_mean(rule_id, ids)}")
            continue
        mistakes += [
            f"{origin}: rule {rule_id} has no severity {word!r}; use {', '.join(words)}"
            for word in bounds
            if word not in words
        ]
    if mistakes:
        raise SettingsError(*mistakes)


def timestamp(text: str | None, zone: tzinfo = UTC) -> float | None:
    """Parse a time. Returns Unix seconds; None for None. A time without its own zone is in `zone`.

    Raises:
        SettingsError: the text is not a time.
    """
    if text is None:
        return None
    try:
        t_s = float(text)
    except ValueError:
        t_s = _iso_timestamp(text, zone)
    if not math.isfinite(t_s):
        raise SettingsError(f"{text!r} is not a time")
    return t_s


def _iso_timestamp(text: str, zone: tzinfo) -> float:
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError as exc:
        raise SettingsError(
            f"{text!r} is neither unix seconds nor an ISO 8601 time such as 2026-11-21T00:03:00Z"
        ) from exc
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=zone)).timestamp()


# --- The flags of `size` for its command line -----------------------------------------------------


SIZE_FLAGS = tuple(flag for flag in FLAGS if flag.help)


def _print_ids(context: click.Context, option: click.Parameter, given: bool) -> None:
    """Print the ids of the catalogue and exit. click calls this for --list-models and
    --list-gpus."""
    if not given or context.resilient_parsing:
        return
    # Lazy: slow to import.
    from kneewatch.diagnose.catalogue.gpu_specs import GIB, gpus
    from kneewatch.diagnose.catalogue.models import model_ids

    listed = [
        f"{gpu_id:22}{gpu.name:52}{gpu.memory_sold_bytes / GIB:4.0f} GB"
        f" ({gpu.memory_bytes / GIB:.1f} GiB usable)"
        for gpu_id, gpu in gpus().items()
    ]
    click.echo("\n".join(model_ids() if option.name == "list_models" else listed))
    context.exit()


def size_options(command: Command) -> Command:
    """Add all flags of `size` to a command."""
    for name, of in (("--list-models", "--model"), ("--list-gpus", "--gpu")):
        command = click.option(
            name,
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_ids,
            help=f"print the ids for {of} and exit",
        )(command)
    for flag in reversed(SIZE_FLAGS):
        other = "vLLM's flags" if flag.launch else "Other hardware, measurements and assumptions"
        command = click.option(
            *filter(None, (flag.alias, flag.name)),
            flag.parameter,
            type=KINDS[flag.kind],
            is_flag=flag.kind == "switch",
            default=flag.default,
            show_default=flag.default not in (None, (), False),
            multiple=flag.multiple,
            metavar=flag.metavar,
            help=flag.help,
            cls=HeadedOption,
            heading="" if flag.first else other,
        )(command)
    return command
