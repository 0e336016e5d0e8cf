"""The flags of `size`, one row each. The module does not import the sizing code, because that
import is slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
import msgspec
from msgspec import Struct

from kneewatch.agent.settings.table import PAIR, SPAN, HeadedOption
from kneewatch.collector.packaged import packaged_tables

Command = TypeVar("Command", bound=Callable[..., Any])


KINDS: dict[str, click.ParamType[Any] | type] = {
    "text": str,
    "count": int,
    "number": float,
    "seconds": SPAN,
    "pair": PAIR,
    "file": click.Path(),
    "switch": bool,
}


class Flag(Struct, frozen=True, kw_only=True, rename={"word": "kind"}, forbid_unknown_fields=True):
    """A flag of `size`, a row of size_flags.toml."""

    name: str
    word: str
    help: str
    metavar: str | None = None
    default: Any = None
    multiple: bool = False
    alias: str | None = None
    input: str = ""
    profile: str = ""
    launch: str = ""
    first: bool = False

    @property
    def kind(self) -> click.ParamType[Any] | type:
        """The type of its value for click; `bool` is a switch."""
        return KINDS[self.word]

    @property
    def parameter(self) -> str:
        """The flag's name in Python, in JSON and in query strings, such as `max_model_len`."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def heading(self) -> str:
        """The heading in --help-all; "" for a flag that --help lists."""
        other = "vLLM's flags" if self.launch else "Other hardware, measurements and assumptions"
        return "" if self.first else other

    @property
    def names_file(self) -> bool:
        """Whether the flag's value is, or contains, a file name."""
        return self.word in ("file", "pair")


_UNSET: dict[str, dict[str, Any]] = {"switch": {"default": False}, "pair": {"default": ()}}
FLAGS = tuple(
    msgspec.convert({"name": f"--{name}", **_UNSET.get(row["kind"], {}), **row}, Flag)
    for name, row in packaged_tables("agent", "size_flags.toml").items()
)


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
            help=f"print the catalogue's ids for {of} and exit",
        )(command)
    for flag in reversed(FLAGS):
        command = click.option(
            *filter(None, (flag.alias, flag.name)),
            flag.parameter,
            type=flag.kind,
            is_flag=flag.kind is bool,
            default=flag.default,
            show_default=flag.default not in (None, (), False),
            multiple=flag.multiple,
            metavar=flag.metavar,
            help=flag.help,
            cls=HeadedOption,
            heading=flag.heading,
        )(command)
    return command
