"""The table of settings: each has a default, a TOML key, an environment variable and a flag. Also
the command line options for these flags.

The TOML key is the dotted name of the setting. The environment variable is the name in capitals
(`slo.ttft_p99_s` -> KNEEWATCH_SLO_TTFT_P99_S). The module does not import the diagnosis, so that
help texts appear fast.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, tzinfo
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.learned.kv_forecast import AHEAD_S
from kneewatch.rules.rule import WINDOW_S

if TYPE_CHECKING:
    from kneewatch.agent.settings.effective import Settings


Kind = Literal["seconds", "count", "number", "text", "texts", "url", "flag", "pairs"]
MIB = 1024 * 1024
DAY_S = 24 * 3600.0
TTFT_TARGET_MOST_S, ITL_TARGET_MOST_S = 600.0, 10.0
"""Maximum latency targets in seconds. A longer target was probably meant in milliseconds."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. Seconds, counts and numbers must be above 0, at least `least` and at most
    `most`.

    `secret`: the value is never shown. `choices` are the allowed texts; empty allows any text. A
    URL setting accepts either a URL or one of `choices`.
    """

    key: str
    help: str
    default: Any = None
    _: KW_ONLY
    kind: Kind
    flag: str = ""
    most: float = float("inf")
    least: float = 0.0
    secret: bool = False
    choices: tuple[str, ...] = ()

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


seconds = partial(Setting, kind="seconds")
count = partial(Setting, kind="count")
number = partial(Setting, kind="number")
text = partial(Setting, kind="text")
texts = partial(Setting, kind="texts")
url = partial(Setting, kind="url")
flag = partial(Setting, kind="flag")
pairs = partial(Setting, kind="pairs")

SETTINGS: tuple[Setting, ...] = (
    seconds("window_s", "short window; the rules' durations scale with it", WINDOW_S),
    seconds("interval_s", "time between scrapes; default in run: 5 s", 2.0, most=DAY_S),
    seconds("watch_s", "how long diagnose watches", 30.0, flag="for"),
    seconds(
        "kv_horizon_s",
        "warn when the KV cache is forecast to be full within this time",
        AHEAD_S,
        most=DAY_S,
    ),
    seconds(
        "slo.ttft_p99_s",
        "TTFT P99 target; unset: the target's own baseline",
        flag="slo-ttft",
        most=TTFT_TARGET_MOST_S,
    ),
    seconds(
        "slo.itl_p99_s",
        "ITL P99 target; unset: the target's own baseline",
        flag="slo-itl",
        most=ITL_TARGET_MOST_S,
    ),
    number(
        "slo.objective_ratio", "share of requests that must meet the targets", 0.99, most=0.99999
    ),
    seconds(
        "usual_after_s",
        "time after which a changed value becomes the usual one; kneewatch accept does it at once",
        DAY_S,
        most=30 * DAY_S,
    ),
    number(
        "expect.prefix_hit_ratio",
        "prefix hit ratio that this workload should reach; a lower one is always reported",
        most=1.0,
    ),
    count("gpus", "GPUs of one engine, for tokens per GPU-hour", most=1e6),
    number("peak.flop_per_s", "one GPU's peak FLOP/s, for MFU; unset: from the catalogue"),
    number("peak.bytes_per_s", "one GPU's memory bandwidth, for MBU; unset: from the catalogue"),
    text("model", "served model: a catalogue id or the path of a config.json"),
    text("gpu", "GPU type: a catalogue id or the driver's name for it"),
    count("tensor_parallel", "tensor parallel size of one replica", most=1024),
    text("vllm_version", "vLLM's version, such as 0.32.0"),
    text("launch_file", "file with the server's command line (vllm serve ...)"),
    text("server_log", "vLLM's log file, of one target", flag="log"),
    flag(
        "server.probe",
        "read version, model and flags from the server and its process on this node",
        True,
    ),
    count("replicas", "replicas of this server behind the load balancer", most=1e6),
    count(
        "replicas_max",
        "most replicas that kneewatch_recommended_replicas may name; unset: no limit",
        most=1e6,
    ),
    text(
        "workload_profile",
        "workload profile, as for size --plan; live requests are compared with it",
    ),
    number("usd_per_gpu_hour", "price of one GPU; unset: from the catalogue", most=1e6),
    seconds("benchmark.ttft_p99_s", "TTFT P99 that the sizing benchmark measured"),
    number("benchmark.gpu_ratio", "GPU activity in that benchmark, 0 to 1", most=1.0),
    pairs(
        "benchmark.by_tensor_parallel",
        "benchmark sweeps by tensor parallel size, in the format of size --benchmark: 4=tp4.csv",
    ),
    seconds(
        "canary.interval_s",
        "time between canary requests of run, each for one token; unset: no canary",
        most=DAY_S,
    ),
    flag(
        "canary.on_silence",
        "send canary requests also when traffic ends at once on a server that is not idle "
        "otherwise, even without canary.interval_s",
        False,
    ),
    seconds("canary.timeout_s", "time limit for the answer to a canary request", 30.0),
    text("canary.model", "model that the canary requests; unset: the first on the page"),
    text("canary.bearer_token_file", "file with a bearer token for the canary"),
    seconds("fetch.connect_timeout_s", "timeout for connecting", 3.0),
    seconds("fetch.read_timeout_s", "timeout for reading the whole page", 10.0),
    flag("fetch.gzip", "request compressed pages: more CPU, less network traffic", False),
    text("fetch.bearer_token_file", "file with a bearer token", flag="bearer-token-file"),
    text(
        "fetch.bearer_token_env",
        "environment variable with a bearer token",
        flag="bearer-token-env",
    ),
    pairs("fetch.headers", "extra request headers", flag="header", secret=True),
    pairs("fetch.header_files", "request headers whose values are in files", flag="header-file"),
    pairs(
        "fetch.header_envs",
        "request headers whose values are in the environment",
        flag="header-env",
    ),
    text("fetch.ca_file", "certificate authorities to trust", flag="ca-file"),
    text("fetch.client_cert_file", "client certificate", flag="client-cert"),
    text("fetch.client_key_file", "key of the client certificate", flag="client-key"),
    flag("fetch.insecure_skip_verify", "do not verify certificates", False, flag="insecure"),
    count("limits.body_bytes", "largest page, before and after decompression", 64 * MIB),
    count("limits.series", "most series on a page", 200_000),
    count("limits.label_bytes", "longest label value", 16 * 1024),
    url(
        "gpu_metrics",
        "URL of a target's DCGM exporter; in run also nvml or none; unset: run searches this node",
        choices=("nvml", "none"),
    ),
    seconds("gpu_interval_s", "time between GPU readings in run", 15.0, most=DAY_S),
    url("fleet.prometheus", "run: metrics system of the fleet to watch; --prometheus replaces it"),
    pairs(
        "fleet.labels",
        "--prometheus: labels to read first for replica, namespace, pool, model, tier, role, "
        "engine, node or goal: pool=app",
        flag="fleet-label",
    ),
    texts(
        "fleet.throughput_pools",
        "pools, with * and ?, whose requests may queue by design (batch work): only goodput, "
        "errors and stalls count; the label kneewatch_goal=throughput says the same",
    ),
    count("fleet.queries_at_once", "most concurrent queries to a metrics system", 4, most=64),
    number("fleet.queries_per_s", "most queries per second to a metrics system", 20.0, most=1e4),
    seconds(
        "fleet.lookback_s", "how far back --prometheus looks for a tier's peak load", 7 * DAY_S
    ),
    seconds("fleet.interval_s", "time between diagnoses in run --prometheus", 15.0, most=DAY_S),
    text("fleet.shard", "part of the pools for this daemon, such as 1/2; unset: all pools"),
    seconds("fleet.query_timeout_s", "time limit for one query to a metrics system", 30.0),
    texts("file_sd", "target files in Prometheus's file_sd format, with * and ?"),
    text(
        "kubernetes.pods",
        "label selector of vLLM's pods: run finds them through the Kubernetes API",
    ),
    texts("kubernetes.namespaces", "namespaces of the pods; unset: kneewatch's own"),
    text("kubernetes.node", "only pods on this node; unset: on every node"),
    text("kubernetes.port", "port of the pods: a number or the name of a container port", "8000"),
    url(
        "docs_url", "base URL of the pages about causes and rules; unset: /docs of a running daemon"
    ),
    text("listen", "address of run's HTTP endpoint: HOST:PORT", "127.0.0.1:9877"),
    text("store.file", "history database; unset: kneewatch.db in the state folder", flag="store"),
    seconds("store.keep_s", "how long every scrape is kept", 15 * DAY_S),
    seconds("store.keep_coarse_s", "how long one-minute values are kept", 400 * DAY_S),
    count(
        "store.max_bytes",
        "largest size of the history; the oldest data is deleted first",
        4 * 1024 * MIB,
        least=MIB,
    ),
    text("http.token_file", "file with the tokens for read access"),
    text("http.admin_token_file", "file with the tokens for read and write access"),
    text("http.tls_cert_file", "certificate for HTTPS"),
    text("http.tls_key_file", "key of the HTTPS certificate"),
    text(
        "http.client_ca_file",
        "certificate authorities for client certificates, which are then required",
    ),
    flag("http.behind_proxy", "a reverse proxy authenticates clients", False),
    count("http.body_bytes", "largest request body", MIB),
    number("http.requests_per_s", "most requests per second from one address", 200.0),
    texts("http.hosts", "further host names that requests may use, besides the listen address"),
    text(
        "report.cron",
        "when run creates a report, in cron syntax, such as 0 6 * * mon; unset: never",
    ),
    text("report.timezone", "time zone of reports, such as Europe/Berlin", "UTC", flag="timezone"),
    text("report.folder", "folder for run's reports; unset: reports/ in the state folder"),
    count("report.keep", "how many of the newest reports to keep", 26),
    seconds("report.since_s", "period of run's reports", 7 * DAY_S),
    texts("report.send", "names of the [[notify]] receivers that get run's reports"),
    text("report.profile", "workload profile for reports; unset: that of workload_profile"),
    text("log.format", "format of run's log on stderr", "logfmt", choices=("logfmt", "json")),
    text(
        "log.level",
        "lowest level that run logs",
        "info",
        choices=("debug", "info", "warning", "error"),
    ),
)

BY_KEY = {setting.key: setting for setting in SETTINGS}


# --- Command line options: parameter types, and a flag for each setting ---------------------------


UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
"""Units of durations in flags, and of relative times such as -2h in HTTP requests. Values in
seconds."""


class Span(click.ParamType[float]):
    """A duration such as 30, 30s, 5m, 2h, 7d or 1w, converted to seconds."""

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
            return pair(str(value))
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


class Target(click.ParamType[str]):
    """A server's URL or a capture file. The shell completes file names."""

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


SPAN, PAIR, FILE = Span(), Pair(), click.Path()


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
"""Additional names of flags; `size` uses the same ones."""

SWEEPS = "benchmark.by_tensor_parallel"
DIAGNOSIS = ("window_s", "slo.ttft_p99_s", "slo.itl_p99_s", "expect.prefix_hit_ratio", "gpus")
FETCH = tuple(setting.key for setting in SETTINGS if setting.key.startswith("fetch."))
FLEET = tuple(setting.key for setting in SETTINGS if setting.key.startswith("fleet."))

Command = TypeVar("Command", bound=Callable[..., Any])


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
            help="TOML settings file  [KNEEWATCH_CONFIG]",
        )(command)

    return decorate


def setting_option(row: Setting) -> Callable[[Command], Command]:
    """A decorator that adds the option of one setting to a command.

    Without the option on the command line, Click passes None, or () for a repeatable option. The
    setting's value then comes from the environment or the file.
    """
    kinds: dict[str, dict[str, Any]] = {
        "seconds": {"type": SPAN},
        "count": {"type": int},
        "number": {"type": float},
        "text": {"type": FILE if row.key.endswith(("_file", ".file", "_log")) else str},
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
        cls=cast("type[click.Option]", _shared_option),
        help=f"{row.help}  [{row.env}]",
        **kinds[row.kind],
    )


@cache
def _shared_option(declarations: tuple[str, ...], **attributes: Hashable) -> click.Option:
    """The option for a setting. All commands share the same object; they do not change it."""
    return click.Option(declarations, **cast("dict[str, Any]", attributes))


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
    for key, row in BY_KEY.items():
        value = given.pop(parameter(key), None)
        if row.kind in ("pairs", "texts") and value is not None:
            value = (_paired(row, value) if row.kind == "pairs" else list(value)) or None
        flags[key] = value
    return lambda: load(
        file=file,
        environ=os.environ,
        flags=flags,
        defaults=defaults,
        checks=(_check_targets, _check_receivers, _check_thresholds, *checks),
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


def _check_thresholds(settings: Settings) -> None:
    if settings.thresholds:
        settings.profile().rules()


def _paired(row: Setting, given: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Combine the NAME=VALUE pairs of a repeated flag into a dict.

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
