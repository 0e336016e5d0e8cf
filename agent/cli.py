"""The command line: results to stdout, everything else to stderr.

Exit status: 0 nothing found, 1 findings at warning or worse, 2 usage, settings or no data.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from kneewatch.agent import commands, recording, settings
from kneewatch.agent import settings_table as table
from kneewatch.agent.options import PAIR, SPAN, Target
from kneewatch.agent.printing import NO_DATA, OK, say
from kneewatch.agent.settings_sources import load
from kneewatch.agent.size_options import size_options
from kneewatch.collector.base import CollectError, KneewatchError

SHELLS = ("bash", "zsh", "fish")
FORMATS = ("text", "json", "markdown")
INTERRUPTED = 130

DEPLOYMENT = (
    "model",
    "gpu",
    "tensor_parallel",
    "vllm_version",
    "launch_file",
    "replicas",
    "usd_per_gpu_hour",
)
JUDGING = ("window_s", "slo.ttft_p99_s", "slo.itl_p99_s", "gpus")
FETCHING = tuple(setting.key for setting in table.SETTINGS if setting.key.startswith("fetch."))

Command = TypeVar("Command", bound=Callable[..., Any])


class ReaderGone(Exception):  # noqa: N818 - nothing went wrong
    """Whoever read our output (head, less) has seen enough."""


class Program(click.Group):
    """The group of commands; click itself would end a broken pipe with status 1: "findings"."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's own signature
        """The command's exit status."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as exc:
            raise ReaderGone from exc


def setting_options(*names: str) -> Callable[[Command], Command]:
    """Flags for settings, by key; each sets the setting of that name."""

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
    """The flag of one setting. Not given it is None, and file or environment decide."""
    kinds: dict[str, dict[str, Any]] = {
        "seconds": {"type": SPAN},
        "count": {"type": int},
        "number": {"type": float},
        "text": {"type": click.Path() if row.key.endswith("_file") else str},
        "flag": {"default": None},
        "pairs": {"type": PAIR, "multiple": True},
        "texts": {"multiple": True},
    }
    flag = row.option
    if row.kind == "flag":
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    return click.option(
        flag, parameter(row.key), help=f"{row.help}  [{row.env}]", **kinds[row.kind]
    )


def parameter(key: str) -> str:
    """A setting's name as a Python parameter."""
    return key.replace(".", "__")


def effective(given: dict[str, Any], defaults: dict[str, Any] | None = None) -> settings.Settings:
    """The effective settings of a command from its keyword arguments, which lose those it uses
    up. `defaults` are the command's own."""
    file: Path | None = given.pop("config_file", None)
    flags: dict[str, Any] = {}
    for key, row in table.BY_KEY.items():
        value = given.pop(parameter(key), None)
        if row.kind in ("pairs", "texts") and value is not None:
            value = (dict(value) if row.kind == "pairs" else list(value)) or None
        flags[key] = value
    return load(file=file, environ=os.environ, flags=flags, defaults=defaults)


form_option = click.option(
    "--format", "form", type=click.Choice(FORMATS), default="text", show_default=True
)


@click.group(
    cls=Program,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 nothing found; 1 findings at warning or worse; 2 wrong usage or "
    "settings, or no data.",
)
@click.version_option(package_name="kneewatch", prog_name="kneewatch")
def cli() -> None:
    """Watch vLLM servers: what is wrong, since when, how we know, what to change."""


@cli.command(short_help="Watch a server for a while, then say what is wrong.")
@click.argument("target", type=Target())
@setting_options("watch_s", "interval_s", *JUDGING, *DEPLOYMENT, *FETCHING)
@click.option("--gpu-metrics", metavar="URL", help="DCGM exporter page of the target's GPUs")
@form_option
def diagnose(target: str, form: str, gpu_metrics: str | None, **given: Any) -> int:  # noqa: ANN401
    """Watch TARGET (a server's URL or a capture) for a while, then say what is wrong."""
    return commands.diagnose(target, effective(given), form=form, gpu_metrics=gpu_metrics)


@cli.command(short_help="Diagnose recordings scrape by scrape.")
@click.argument("captures", nargs=-1, required=True, type=click.Path())
@setting_options(*JUDGING, *DEPLOYMENT)
@form_option
@click.option("--from", "from_time", metavar="T", help="first time: unix seconds or ISO 8601, UTC")
@click.option("--to", "to_time", metavar="T", help="last time: unix seconds or ISO 8601, UTC")
def replay(
    captures: tuple[str, ...],
    form: str,
    from_time: str | None,
    to_time: str | None,
    **given: Any,  # noqa: ANN401
) -> int:
    """Diagnose recordings scrape by scrape.

    `--format json` prints one line per scrape, target and engine.
    """
    return commands.replay(
        captures, effective(given), form=form, from_time=from_time, to_time=to_time
    )


@cli.command(short_help="Record a server's metrics pages to a file.")
@click.argument("url")
@click.argument("file", type=click.Path(path_type=Path))
@setting_options("interval_s", *FETCHING)
@click.option("--for", "for_s", type=SPAN, help="stop after this long; else on Ctrl-C")
def record(url: str, file: Path, for_s: float | None, **given: Any) -> int:  # noqa: ANN401
    """Record URL's metrics pages to FILE, a capture that every command reads.

    What was scraped survives a kill; a FILE that exists is added to.
    """
    return recording.record(url, file, effective(given), for_s=for_s)


@cli.command(short_help="Replay a shipped recording of a server in trouble.")
@setting_options(*JUDGING)
@form_option
def demo(form: str, **given: Any) -> int:  # noqa: ANN401
    """Replay a shipped recording of a real server going through the KV cascade."""
    return commands.demo(effective(given), form=form)


@cli.command("size", short_help="What fits, how fast, how many GPUs, at what price.")
@size_options
@form_option
def size_command(form: str, **given: Any) -> int:  # noqa: ANN401
    """Size a launch: memory, KV capacity, speed at a load, fleet and cost. No server needed.

    Exit status: 0 it fits, 1 it does not, 2 it cannot be sized.
    """
    from kneewatch.agent import size  # here, so that no other command pays for the math

    return size.run(form=form, **given)


@cli.command()
@setting_options(*table.BY_KEY)
def config(**given: Any) -> int:  # noqa: ANN401
    """Print the effective settings and where each came from."""
    return commands.config(effective(given))


@cli.command(short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> int:
    """Print a completion script for SHELL.

    For bash: eval "$(kneewatch completion bash)"
    """
    return commands.completion(cli, shell)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit; expected trouble becomes a message and exit status 2."""
    try:
        status = cli(args, prog_name="kneewatch", standalone_mode=False)
    except click.ClickException as exc:
        exc.show()
        status = NO_DATA
    except (click.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except ReaderGone:
        _drop_output()
        status = OK
    except OSError as exc:
        # Every source turns its own into a KneewatchError: what is left is a full disk on stdout.
        _drop_output()
        say(f"the results cannot be written: {exc.strerror or exc}")
        status = NO_DATA
    except KneewatchError as exc:
        say(str(exc))
        if isinstance(exc, CollectError) and exc.hint:
            click.echo(f"  try: {exc.hint}", err=True)
        status = NO_DATA
    except Exception:  # noqa: BLE001 - Python's own status for a bug is 1, which means findings
        traceback.print_exc()
        status = NO_DATA
    sys.exit(status if isinstance(status, int) else OK)


def _drop_output() -> None:
    """What is still buffered would fail again at the interpreter's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
