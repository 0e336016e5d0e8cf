"""Command line options: parameter types, and a flag for each setting.

Help texts need only the flags, so this module does not import the diagnosis.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from kneewatch.agent.settings import table
from kneewatch.collector.errors import SettingsError

if TYPE_CHECKING:
    from kneewatch.agent.settings.effective import Settings

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Span(click.ParamType[float]):
    """A duration such as 30, 30s, 5m, 2h or 7d, as seconds."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The duration in seconds."""
        text = str(value).strip()
        unit = next((u for u in UNITS_S if text.endswith(u)), "")
        try:
            seconds = float(text.removesuffix(unit)) * UNITS_S.get(unit, 1.0)
        except ValueError:
            self.fail(f"{value!r} is not a duration; write 30s, 5m or 2h", param, ctx)
        if not 0 < seconds < float("inf"):
            self.fail(f"{value!r} must be longer than 0", param, ctx)
        return seconds


class Pair(click.ParamType[tuple[str, str]]):
    """A NAME=VALUE argument."""

    name = "name=value"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """The name and the value."""
        try:
            return table.pair(str(value))
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


class Target(click.ParamType[str]):
    """A server's URL or a capture file, with file completion in the shell."""

    name = "target"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """The argument, unchanged."""
        del param, ctx
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Let the shell complete file names."""
        del ctx, param
        return [CompletionItem(incomplete, type="file")]


SPAN, PAIR = Span(), Pair()


# --- Flags for settings ---------------------------------------------------------------------------


DEPLOYMENT = (
    "model",
    "gpu",
    "tensor_parallel",
    "vllm_version",
    "launch_file",
    "replicas",
    "usd_per_gpu_hour",
    "workload_profile",
)
ALIASES = {"tensor_parallel": ("--tp",)}
"""Further names of flags, as `size` has them."""

SWEEPS = "benchmark.by_tensor_parallel"
DIAGNOSIS = ("window_s", "slo.ttft_p99_s", "slo.itl_p99_s", "expect.prefix_hit_ratio", "gpus")
FETCH = tuple(setting.key for setting in table.SETTINGS if setting.key.startswith("fetch."))
FLEET = tuple(setting.key for setting in table.SETTINGS if setting.key.startswith("fleet."))

Command = TypeVar("Command", bound=Callable[..., Any])


def setting_options(*names: str) -> Callable[[Command], Command]:
    """A decorator that adds the flags of these settings, and `--config`, to a command."""

    def decorate(command: Command) -> Command:
        for key in reversed(names):
            command = setting_option(table.BY_KEY[key])(command)
        return click.option(
            "--config",
            "config_file",
            type=click.Path(path_type=Path),
            envvar="KNEEWATCH_CONFIG",
            help="TOML settings file  [KNEEWATCH_CONFIG]",
        )(command)

    return decorate


def setting_option(row: table.Setting) -> Callable[[Command], Command]:
    """The flag of one setting. It is None unless given: then file or environment decide."""
    kinds: dict[str, dict[str, Any]] = {
        "seconds": {"type": SPAN},
        "count": {"type": int},
        "number": {"type": float},
        "text": {"type": click.Path() if row.key.endswith(("_file", ".file", "_log")) else str},
        "url": {"type": str, "metavar": "URL"},
        "flag": {"default": None},
        "pairs": {"type": PAIR, "multiple": True},
        "texts": {"multiple": True},
    }
    flag = row.option
    if row.kind == "flag":
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    return click.option(
        flag,
        *ALIASES.get(row.key, ()),
        parameter(row.key),
        help=f"{row.help}  [{row.env}]",
        **kinds[row.kind],
    )


def parameter(key: str) -> str:
    """A setting's key as a Python parameter name."""
    return key.replace(".", "__")


def effective(given: dict[str, Any]) -> Settings:
    """A command's effective settings. Removes the settings' flags from its arguments `given`."""
    return loader(given)()


def loader(given: dict[str, Any], defaults: dict[str, Any] | None = None) -> Callable[[], Settings]:
    """A function that reads a command's effective settings anew at each call.

    Removes the settings' flags from the arguments `given`. `defaults` are the command's own.
    """
    from kneewatch.agent.settings.effective import load  # lazy: imports the diagnosis

    file: Path | None = given.pop("config_file", None)
    flags: dict[str, Any] = {}
    for key, row in table.BY_KEY.items():
        value = given.pop(parameter(key), None)
        if row.kind in ("pairs", "texts") and value is not None:
            value = (_paired(row, value) if row.kind == "pairs" else list(value)) or None
        flags[key] = value
    return lambda: load(file=file, environ=os.environ, flags=flags, defaults=defaults)


def _paired(row: table.Setting, given: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The pairs of a repeated flag.

    Raises:
        SettingsError: a name is given twice.
    """
    paired = dict(given)
    if len(paired) < len(given):
        names = [name for name, _ in given]
        twice = next(name for name in names if names.count(name) > 1)
        raise SettingsError(f"flag {row.option}: {twice} is given twice")
    return paired


def timestamp(text: str | None, zone: tzinfo = UTC) -> float | None:
    """A time as unix seconds; without a zone of its own it is in `zone`. None stays None.

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
