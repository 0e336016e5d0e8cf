"""The command line: results to stdout, everything else to stderr. I/O edge.

Exit status: 0 nothing found, 1 findings at warning or worse, 2 usage, settings or no data.

Commands import their modules when they run: version and help texts need none of them.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import get_completion_class

from kneewatch.agent.console import NO_DATA, OK, infrequent_gc, say
from kneewatch.agent.settings import table
from kneewatch.agent.settings.table import (
    BENCHMARK,
    DEPLOYMENT,
    DIAGNOSIS,
    FETCH,
    FLEET,
    SWEEPS,
    TARGET,
    Check,
    effective,
    loader,
    options,
    setting_options,
    size_options,
    timestamp,
)
from kneewatch.collector.errors import CollectError, KneewatchError, SettingsError

if TYPE_CHECKING:
    from kneewatch.agent.settings.effective import Settings

SHELLS = ("bash", "zsh", "fish")
EXPORTS = ("prometheus-rules", "prometheus-tests", "grafana", "dcgm", "json-schemas")
INTERRUPTED = 130
DIAGNOSE_ONLY = ("watch_s",)
"""Settings that the daemon does not use."""


class CommandGroup(click.Group):
    """The group of all commands. It handles a broken pipe itself: click would exit with status 1,
    which here means "findings"."""

    command_class = table.HeadedCommand

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's own signature
        """Run the command. Returns its exit status."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of stdout, such as `head` or `less`, closed it
            _discard_output()
            return OK


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 nothing found; 1 findings at warning or worse; 2 wrong usage or "
    "settings, or no data.",
)
@click.version_option(package_name="kneewatch", prog_name="kneewatch")
def cli() -> None:
    """Monitor vLLM servers: what is wrong, since when, the evidence, and what to change."""


@cli.command(short_help="Watch a server for a while, then report what is wrong.")
@click.argument("target", type=TARGET, required=False)
@options("diagnose.prometheus", "selector", "at")
@setting_options(
    "watch_s",
    "interval_s",
    "gpu_metrics",
    "docs_url",
    "server.probe",
    "server_log",
    SWEEPS,
    *DIAGNOSIS,
    *DEPLOYMENT,
    *FETCH,
    *FLEET,
)
@options("form")
def diagnose(
    target: str | None,
    form: str,
    prometheus: str | None,
    selector: str,
    at: str | None,
    **given: Any,  # noqa: ANN401
) -> int:
    """Watch TARGET (a server's URL or a capture) for a while, then report what is wrong.

    A capture is diagnosed as of its last scrape; the first line says if it was worse before.

    With --prometheus instead of TARGET: diagnose all replicas that a Prometheus, Thanos, Mimir or
    VictoriaMetrics scrapes, with causes across replicas.

    With --log: add facts from vLLM's log. Without TARGET: report from the log alone why the server
    did not start or died.

    Exit status: 0 nothing at warning or worse, 1 findings at warning or worse, 2 no data.
    """
    settings = effective(given)
    if target is None and prometheus is None and settings["server_log"]:
        from kneewatch.agent.diagnose_command import diagnose_log

        return diagnose_log(settings, form=form)
    if target is None and prometheus is None:
        raise click.UsageError("Missing argument 'TARGET' (or --prometheus or --log).")
    if target is not None and prometheus is not None:
        raise click.UsageError("Give TARGET or --prometheus, not both.")
    if target is not None and (selector or at):
        raise click.UsageError("--selector and --at need --prometheus.")
    if prometheus is not None and settings.origin("server_log").startswith("flag"):
        raise click.UsageError("--log belongs to one server: it cannot be used with --prometheus.")
    if target is not None:
        return _diagnose_target(target, settings, form)
    from kneewatch.agent.fleet import command as fleet

    return fleet.diagnose(
        prometheus or "", settings, selector=selector, at_s=timestamp(at), form=form
    )


def _diagnose_target(target: str, settings: Settings, form: str) -> int:
    from kneewatch.collector.captures.capture import is_capture

    if is_capture(target):
        from kneewatch.agent.diagnose_command import diagnose_capture

        return diagnose_capture(target, settings, form=form)
    from kneewatch.collector.http.fetch import Fetcher, metrics_url

    with closing(Fetcher(metrics_url(target), settings.fetch())) as fetcher:
        first = fetcher.scrape(time.time())
        # Imported after the first scrape: the import takes longer than most servers take to answer.
        from kneewatch.agent.diagnose_command import diagnose

        return diagnose(target, settings, fetcher, first, form=form)


@cli.command(short_help="Show a server's version, model and launch flags, and what is unknown.")
@click.argument("target", type=TARGET)
@setting_options("server.probe", "server_log", *DEPLOYMENT, *FETCH)
@options("without_markdown.form")
def inspect(target: str, form: str, **given: Any) -> int:  # noqa: ANN401
    """Show the version, model and launch flags of TARGET (a server's URL or a capture).

    Each fact has its source and age. Conflicts and unreadable sources follow, then what is unknown
    and how to supply it. No inference request is sent.
    """
    from kneewatch.agent.server import command as server

    return server.inspect(target, effective(given), form=form)


@cli.command(short_help="Monitor servers until stopped: the sidecar daemon.")
@click.argument("targets", nargs=-1, type=TARGET)
@setting_options(*(key for key in table.BY_KEY if key not in DIAGNOSE_ONLY))
@options("run.prometheus", "selector", "demo", "run.for_s")
def run(targets: tuple[str, ...], *, demo: bool, **given: Any) -> None:  # noqa: ANN401
    """Monitor TARGETs until stopped, store their history, serve HTTP on --listen.

    A TARGET is a server's URL, host:port, or a capture, which is played as if it were live.
    [[targets]] tables and file_sd files in the settings add more. SIGHUP reloads the settings.

    With --prometheus: also monitor the fleet that a metrics system scrapes, at /triage and
    /api/v1/fleet; TARGETs are optional then.

    Exit status: 0 stopped, 2 it cannot start, or a part of the history could not be written.
    """
    from kneewatch.agent.daemon import command as daemon
    from kneewatch.agent.targets import argument_specs

    defaults = daemon.DEMO_DEFAULTS if demo else table.RUN_DEFAULTS
    load = loader(given, defaults, (*_checks_of_run(), partial(argument_specs, targets)))
    daemon.run(targets, load, demo=demo, **given)


def _checks_of_run() -> tuple[Check, ...]:
    """Checks of settings that only the daemon uses. The command `config` runs them too and reports
    their errors."""
    from kneewatch.agent.api.access import check_http
    from kneewatch.agent.daemon.discovery import check_targets
    from kneewatch.agent.notify.receivers import check_secrets
    from kneewatch.agent.report.schedule import cron_of

    return check_targets, check_secrets, check_http, cron_of


@cli.command(short_help="Diagnose recordings scrape by scrape.")
@click.argument("captures", nargs=-1, required=True, type=click.Path())
@setting_options("docs_url", SWEEPS, *DIAGNOSIS, *DEPLOYMENT)
@options("form", "replay.from_time", "replay.to_time")
def replay(captures: tuple[str, ...], **given: Any) -> int:  # noqa: ANN401
    """Diagnose recordings scrape by scrape.

    `--format json` prints one line per scrape, target and engine.
    """
    from kneewatch.agent import diagnose_command as command

    return command.replay(captures, effective(given), **given)


@cli.command(short_help="Record a server's metrics pages to a file.")
@click.argument("url")
@click.argument("file", type=click.Path(path_type=Path))
@setting_options("interval_s", "gpu_metrics", "server.probe", *FETCH)
@options("record.for_s")
def record(url: str, file: Path, for_s: float | None, **given: Any) -> int:  # noqa: ANN401
    """Record URL's metrics pages to FILE, a capture that other commands take as TARGET.

    Each page is written at once, so a kill loses none. An existing FILE is appended to. On the
    server's node the host's memory use, CPU pressure and steal time are recorded as well, and with
    --gpu-metrics the page of a DCGM exporter.
    """
    from kneewatch.agent import captures

    return captures.record(url, file, effective(given), for_s=for_s)


@cli.command(short_help="Replay the shipped recording of an overloaded server.")
@setting_options("docs_url", *DIAGNOSIS)
@options("form")
def demo(form: str, **given: Any) -> int:  # noqa: ANN401
    """Replay the shipped recording of a real server whose KV cache fills up and overflows."""
    from kneewatch.agent import diagnose_command as command

    return command.demo(effective(given), form=form)


@cli.command("size", short_help="Size a launch: memory, speed, GPUs and cost.")
@size_options
@options("whole", "size.form")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[COMMAND]")
def size_command(form: str, words: tuple[str, ...], **given: Any) -> int:  # noqa: ANN401
    """Size a launch: memory, KV capacity, speed at a load, fleet and cost. No server needed.

    COMMAND is a model and its GPUs, such as `qwen3-32b 8xh200`, or a whole `vllm serve ...` line
    in quotes or behind `--`.

    Exit status: 0 fits and serves the load, 1 does not, 2 cannot be sized.
    """
    from kneewatch.agent import size_command as size

    return size.run(form=form, words=words, **given)


@cli.command()
@setting_options(*table.BY_KEY)
def config(**given: Any) -> int:  # noqa: ANN401
    """Print the settings that `run` would use, and where each came from."""
    from kneewatch.agent.notify.receivers import as_toml as receivers_toml
    from kneewatch.agent.targets import targets_toml

    settings = loader(given, table.RUN_DEFAULTS, _checks_of_run())()
    for line in (*settings.as_toml(), *targets_toml(settings), *receivers_toml(settings)):
        click.echo(line)
    return OK


@cli.command(short_help="List who is notified of what; send test messages.")
@click.argument("targets", nargs=-1, type=TARGET)
@setting_options()
@options("run.prometheus", "test")
def notify(
    targets: tuple[str, ...],
    *,
    prometheus: str | None,
    test: bool,
    **given: Any,  # noqa: ANN401
) -> int:
    """List who is notified of what, and what nobody is notified of, under the settings of `run`.

    TARGETs are those that `run` gets as arguments. Secrets are not shown.

    Exit status: 0 everything critical reaches somebody, or each test message was delivered; 1 not;
    2 wrong settings.
    """
    from kneewatch.agent.notify import command

    return command.notify(targets, effective(given), prometheus=prometheus, test=test)


@cli.command("export", short_help="Write rules, dashboards or JSON schemas to a folder.")
@click.argument("kind", type=click.Choice(EXPORTS))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@setting_options(
    "window_s", "slo.ttft_p99_s", "slo.itl_p99_s", "slo.objective_ratio", "gpus", "docs_url"
)
@options("evaluation_s", "scrape_s", "engines", "prefix", "selector", "labels", "triage_url")
@options("grafana_url", "gpu_joins", "lean", "gpu_selector", "flavor")
def export_command(
    kind: str,
    folder: Path,
    flavor: str,
    gpu_joins: tuple[str, ...],
    **given: Any,  # noqa: ANN401
) -> int:
    """Write recording and alerting rules, their promtool tests, Grafana dashboards,
    dcgm-exporter's configuration, or the schemas of JSON documents to FOLDER.

    The rules record the signals that the dashboards draw. Each alert is one expression. Rules and
    dashboards of a fleet with several engines name each: --engine vllm --engine sglang.
    """
    from kneewatch.agent import export

    del gpu_joins  # accepted because scripts state it
    settings = effective(given)
    return export.export(kind, folder, export.plan_of(settings, **given), flavor)


@cli.command(short_help="Serve diagnoses to AI agents (Model Context Protocol).")
@options("daemon", "token_file", "mcp.prometheus", "selector", "mcp.listen")
@setting_options("docs_url", *DIAGNOSIS, *DEPLOYMENT, *FETCH, *FLEET)
def mcp(listen: str | None, **given: Any) -> int:  # noqa: ANN401 - listen is a setting as well
    """Serve kneewatch's diagnoses to AI agents over the Model Context Protocol.

    All tools are read-only. Requires the extra mcp: pip install './WHEEL[mcp]' with the
    release's wheel, or '.[mcp]' in a checkout.
    """
    try:
        from kneewatch.agent.mcp import server
    except ModuleNotFoundError as exc:
        raise click.UsageError("mcp is not installed: pip install './WHEEL[mcp]'") from exc

    return server.run(effective(given), listen=listen, **given)


@cli.command(short_help="Make changed values the usual ones in a running daemon.")
@click.argument("target")
@options("accept.model", "accept.engine", "what", "dry_run", "daemon", "token_file")
@options("without_markdown.form")
def accept(target: str, **given: Any) -> int:  # noqa: ANN401
    """Make present values of TARGET the usual ones: after a wanted change of model or launch.

    A value that left its usual range is not learned for usual_after_s (a day). TARGET is a name as
    on the triage page, or a replica of the fleet. The daemon needs the admin token if tokens are
    set. Exit status: 0 accepted, 2 nothing deviates.
    """
    from kneewatch.agent import accept_command as command

    return command.accept(target, **given)


@cli.command(short_help="Show servers or a running daemon live in the terminal.")
@click.argument("targets", nargs=-1, type=TARGET)
@setting_options("interval_s", "gpu_metrics", "docs_url", SWEEPS, *DIAGNOSIS, *DEPLOYMENT, *FETCH)
@options("attach", "token_file", "speed")
def watch(targets: tuple[str, ...], **given: Any) -> int:  # noqa: ANN401
    """Show TARGETs (servers' URLs or captures) live in the terminal; press ? for the keys.

    With --attach, the daemon's settings apply. Exit status by the last state: 0 nothing at warning
    or worse, 1 findings, 2 no data.
    """
    from kneewatch.agent.watch import command as terminal

    return terminal.run(targets, effective(given), **given)


@cli.command("report", short_help="Create the weekly report: health, size, cost, changes to make.")
@setting_options(
    "store.file",
    "report.timezone",
    "report.profile",
    "docs_url",
    *BENCHMARK,
    *DIAGNOSIS,
    *DEPLOYMENT,
    *FETCH,
    *FLEET,
)
@options("report.prometheus", "selector", "since_s", "report.to_time", "compare", "out")
@options("report.form", "summary", "tiers", "targets")
def report_command(
    to_time: str | None,
    compare: str | None,
    **given: Any,  # noqa: ANN401
) -> int:
    """Report on a period, a week by default, from the history that `run` stores.

    With --prometheus: from a Prometheus, Thanos, Mimir or VictoriaMetrics that scrapes the servers.

    Exit status: 0 nothing at warning or worse, 1 findings, 2 no data in the period.
    """
    from kneewatch.agent.report.schedule import check_libraries

    check_libraries()
    from kneewatch.agent.report import command

    settings = effective(given)
    to_s, compare_s = (
        command.end_s(to_time, settings),
        command.compared_s(compare, given["since_s"]),
    )
    return command.run(settings, to_s=to_s, compare_s=compare_s, **given)


@cli.command(short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> int:
    """Print a completion script for SHELL.

    For bash: eval "$(kneewatch completion bash)"
    """
    completion_class = get_completion_class(shell)
    if completion_class is None:
        raise SettingsError(f"no completion for {shell}")
    click.echo(completion_class(cli, {}, "kneewatch", "_KNEEWATCH_COMPLETE").source())
    return OK


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit; an expected error becomes a message and exit status 2."""
    atexit.register(gc.freeze)  # a search for garbage at exit takes longer than most commands
    _open_closed_streams()
    try:
        with infrequent_gc():
            status = cli(args, prog_name="kneewatch", standalone_mode=False)
    except click.ClickException as exc:
        with suppress(OSError):  # a full disk on stderr
            exc.show()
        status = NO_DATA
    except (click.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except OSError as exc:
        # Sources raise KneewatchError, so only writing to stdout can fail here: a full disk.
        _discard_output()
        say(f"cannot write the results: {exc.strerror or exc}")
        status = NO_DATA
    except KneewatchError as exc:
        for message in exc.messages if isinstance(exc, SettingsError) else [str(exc)]:
            say(message)
        if isinstance(exc, CollectError) and exc.hint:
            with suppress(OSError):
                click.echo(f"  try: {exc.hint}", err=True)
        status = NO_DATA
    except Exception:  # noqa: BLE001 - Python's own status for a bug is 1, which means findings
        traceback.print_exc()
        status = NO_DATA
    sys.exit(status if isinstance(status, int) else OK)


def _open_closed_streams() -> None:
    """Open /dev/null for each closed standard stream. Otherwise stdout would be None, and the next
    opened file would get the stream's number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - open until exit


def _discard_output() -> None:
    """Discard the buffered output. Otherwise the interpreter would try to write it at exit, and
    fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
