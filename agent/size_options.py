"""The flags of `size` for its command line. Does not import the sizing code: that is slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from kneewatch.agent.settings.table import KINDS, HeadedOption
from kneewatch.diagnose.deployment.vllm_flags import FLAGS as ALL_FLAGS

Command = TypeVar("Command", bound=Callable[..., Any])


FLAGS = tuple(flag for flag in ALL_FLAGS if flag.help)


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
    for flag in reversed(FLAGS):
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
