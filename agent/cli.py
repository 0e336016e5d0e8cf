"""The command line: results to stdout, everything else to stderr.

Exit status: 0 nothing found, 1 findings at warning or worse, 2 usage, settings or no data.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import click

from kneewatch.agent import commands, settings
from kneewatch.collector.base import CollectError, KneewatchError

SHELLS = ("bash", "zsh", "fish")
FORMATS = ("text", "json", "markdown")

Command = TypeVar("Command", bound=Callable[..., Any])


class Span(click.ParamType[float]):
    """A duration: 30, 30s, 5m, 2h, 7d; seconds inside."""

    name = "duration"
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}  # noqa: RUF012

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Seconds."""
        text = str(value).strip()
        unit = next((u for u in ("ms", "s", "m", "h", "d") if text.endswith(u)), "")
        try:
            seconds = float(text.removesuffix(unit)) * self.units.get(unit, 1.0)
        except ValueError:
            self.fail(f"{value!r} is not a duration; write 30s, 5m or 2h", param, ctx)
        if not 0 < seconds < float("inf"):
            self.fail(f"{value!r} must be longer than nothing", param, ctx)
        return seconds


SPAN = Span()


def setting_options(*names: str) -> Callable[[Command], Command]:
    """Flags for settings, by key; each sets the setting of that name."""

    def decorate(command: Command) -> Command:
        for key in reversed(names):
            row = settings.BY_KEY[key]
            flag = "--" + FLAGS.get(key, key.replace(".", "-").replace("_", "-").removesuffix("-s"))
            kinds: dict[str, Any] = {"seconds": SPAN, "count": int, "number": float, "text": str}
            extra: dict[str, Any] = (
                {"is_flag": True, "default": None}
                if row.kind == "flag"
                else {"type": kinds[row.kind]}
            )
            command = click.option(
                flag, key.replace(".", "__"), help=f"{row.help}  [{row.env}]", **extra
            )(command)
        return click.option(
            "--config",
            "config_file",
            type=click.Path(path_type=Path),
            envvar="KNEEWATCH_CONFIG",
            help="TOML settings file  [KNEEWATCH_CONFIG]",
        )(command)

    return decorate


FLAGS = {
    "watch_s": "for",
    "slo.ttft_p99_s": "slo-ttft",
    "slo.itl_p99_s": "slo-itl",
    "fetch.bearer_token_file": "bearer-token-file",
    "fetch.bearer_token_env": "bearer-token-env",
    "fetch.ca_file": "ca-file",
    "fetch.client_cert_file": "client-cert",
    "fetch.client_key_file": "client-key",
    "fetch.insecure_skip_verify": "insecure",
}
JUDGING = ("window_s", "slo.ttft_p99_s", "slo.itl_p99_s", "gpus")
FETCHING = (
    "fetch.bearer_token_file",
    "fetch.bearer_token_env",
    "fetch.ca_file",
    "fetch.client_cert_file",
    "fetch.client_key_file",
    "fetch.insecure_skip_verify",
)


def effective(given: dict[str, Any]) -> settings.Settings:
    """The effective settings of a command from its keyword arguments, which lose those it uses
    up."""
    file: Path | None = given.pop("config_file", None)
    flags = {
        key: given.pop(name) for key in settings.BY_KEY if (name := key.replace(".", "__")) in given
    }
    return settings.load(file=file, environ=os.environ, flags=flags)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("kneewatch"), prog_name="kneewatch")
def cli() -> None:
    """Watch vLLM servers: what is wrong, since when, how we know, what to change."""


@cli.command()
@click.argument("target")
@setting_options("watch_s", "interval_s", *JUDGING, *FETCHING)
@click.option("--gpu-metrics", metavar="URL", help="DCGM exporter page of the target's GPUs")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
def diagnose(target: str, form: str, gpu_metrics: str | None, **given: Any) -> int:  # noqa: ANN401
    """Watch TARGET (a server's URL or a capture) for a while, then say what is wrong."""
    return commands.diagnose(target, effective(given), form=form, gpu_metrics=gpu_metrics)


@cli.command()
@click.argument("captures", nargs=-1, required=True, type=click.Path())
@setting_options(*JUDGING)
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option("--from", "from_time", metavar="T", help="first time, unix seconds or ISO 8601")
@click.option("--to", "to_time", metavar="T", help="last time, unix seconds or ISO 8601")
def replay(
    captures: tuple[str, ...],
    form: str,
    from_time: str | None,
    to_time: str | None,
    **given: Any,  # noqa: ANN401
) -> int:
    """Diagnose recordings scrape by scrape; `--format json` prints a line per scrape and target."""
    return commands.replay(
        captures, effective(given), form=form, from_time=from_time, to_time=to_time
    )


@cli.command()
@click.argument("url")
@click.argument("file", type=click.Path(path_type=Path))
@setting_options("interval_s", *FETCHING)
@click.option("--for", "for_s", type=SPAN, help="stop after this long; else on Ctrl-C")
def record(url: str, file: Path, for_s: float | None, **given: Any) -> int:  # noqa: ANN401
    """Record URL's metrics pages to FILE; what was scraped survives a kill."""
    return commands.record(url, file, effective(given), for_s=for_s)


@cli.command()
@setting_options(*JUDGING)
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
def demo(form: str, **given: Any) -> int:  # noqa: ANN401
    """Replay a shipped recording of a real server going through the KV cascade."""
    return commands.demo(effective(given), form=form)


@cli.command()
@setting_options(
    *settings.BY_KEY.keys() - {"fetch.headers", "fetch.header_files", "fetch.header_envs"}
)
def config(**given: Any) -> int:  # noqa: ANN401
    """Print the effective settings and where each came from."""
    return commands.config(effective(given))


@cli.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> int:
    """Print a completion script, e.g. `eval "$(kneewatch completion bash)"`."""
    return commands.completion(cli, shell)


def main() -> None:
    """Run the command line; expected trouble becomes a message and exit status 2."""
    try:
        status = cli(standalone_mode=False)
    except click.exceptions.Exit as exc:
        status = exc.exit_code
    except click.ClickException as exc:
        exc.show()
        status = 2
    except (click.Abort, KeyboardInterrupt):
        status = 130
    except BrokenPipeError:
        # The reader (head, less) has seen enough; nothing more can or need be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except KneewatchError as exc:
        click.echo(f"kneewatch: {exc}", err=True)
        if isinstance(exc, CollectError) and exc.hint:
            click.echo(f"  try: {exc.hint}", err=True)
        status = 2
    sys.exit(status if isinstance(status, int) else 0)
