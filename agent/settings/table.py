"""The table of settings: each has a default, a TOML key, an environment variable and a flag.

The TOML key is its dotted name, the environment variable its name in capitals
(`slo.ttft_p99_s` -> KNEEWATCH_SLO_TTFT_P99_S).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kneewatch.diagnose.learned.forecast import AHEAD_S
from kneewatch.rules.rule import WINDOW_S

Kind = Literal["seconds", "count", "number", "text", "texts", "url", "flag", "pairs"]
MIB = 1024 * 1024
DAY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. Seconds, counts and numbers are above 0, at least `least` and at most `most`.

    `secret`: its values are never shown. `choices`: the allowed texts, empty for any; a URL setting
    accepts them in place of a URL.
    """

    key: str
    kind: Kind
    default: Any
    help: str
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
        """The command line flag: `flag` if set, else the key with dashes and without `_s`."""
        plain = self.key.removesuffix("_s") if self.kind == "seconds" else self.key
        return "--" + (self.flag or plain.replace(".", "-").replace("_", "-"))


def pair(text: str) -> tuple[str, str]:
    """The name and the value of NAME=VALUE.

    Raises:
        ValueError: the name or the equals sign is missing. The message does not contain the value,
            which may be a secret.
    """
    name, equals, value = text.partition("=")
    if not name.strip() or not equals:
        raise ValueError("write NAME=VALUE")
    return name.strip(), value.strip()


SETTINGS: tuple[Setting, ...] = (
    Setting("window_s", "seconds", WINDOW_S, "short window; the rules' durations scale with it"),
    Setting("interval_s", "seconds", 2.0, "time between scrapes; default 5 s in run", most=DAY_S),
    Setting("watch_s", "seconds", 30.0, "how long diagnose watches", "for"),
    Setting(
        "kv_horizon_s",
        "seconds",
        AHEAD_S,
        "warn this long before the KV cache is exhausted at its trend",
        most=DAY_S,
    ),
    Setting(
        "slo.ttft_p99_s",
        "seconds",
        None,
        "TTFT P99 target; unset: the target's own baseline",
        "slo-ttft",
    ),
    Setting(
        "slo.itl_p99_s",
        "seconds",
        None,
        "ITL P99 target; unset: the target's own baseline",
        "slo-itl",
    ),
    Setting(
        "slo.objective_ratio",
        "number",
        0.99,
        "share of requests that must meet the targets",
        most=0.99999,
    ),
    Setting(
        "expect.prefix_hit_ratio",
        "number",
        None,
        "prefix hit ratio that the workload is known to reach; lower ones are reported even if "
        "they never changed",
        most=1.0,
    ),
    Setting("gpus", "count", None, "GPUs of one engine, for tokens per GPU-hour", most=1e6),
    Setting(
        "peak.flop_per_s",
        "number",
        None,
        "one GPU's peak FLOP/s, for MFU; unset: from the catalogue",
    ),
    Setting(
        "peak.bytes_per_s",
        "number",
        None,
        "one GPU's memory bandwidth, for MBU; unset: from the catalogue",
    ),
    Setting("model", "text", None, "served model: a catalogue id or the path of a config.json"),
    Setting("gpu", "text", None, "GPU type: a catalogue id or the driver's name for it"),
    Setting("tensor_parallel", "count", None, "tensor parallel size of one replica", most=1024),
    Setting("vllm_version", "text", None, "vLLM's version, such as 0.32.0"),
    Setting("launch_file", "text", None, "file with the server's command line (vllm serve ...)"),
    Setting("server_log", "text", None, "vLLM log file of one target", "log"),
    Setting(
        "server.probe",
        "flag",
        True,
        "read version, model and launch flags from the server and its process on this node",
    ),
    Setting(
        "replicas", "count", None, "replicas of this server behind the load balancer", most=1e6
    ),
    Setting(
        "workload_profile",
        "text",
        None,
        "workload profile of size --plan; live requests are compared with it",
    ),
    Setting(
        "usd_per_gpu_hour", "number", None, "price of one GPU; unset: from the catalogue", most=1e6
    ),
    Setting(
        "benchmark.ttft_p99_s",
        "seconds",
        None,
        "TTFT P99 measured in the benchmark behind the size",
    ),
    Setting(
        "benchmark.gpu_ratio", "number", None, "GPU activity in that benchmark, 0 to 1", most=1.0
    ),
    Setting(
        "benchmark.by_tensor_parallel",
        "pairs",
        None,
        "benchmark sweeps by tensor parallel size, in the format of size --benchmark: 4=tp4.csv",
    ),
    Setting(
        "canary.interval_s",
        "seconds",
        None,
        "time between canary requests of run, each for one token; unset: none is sent",
        most=DAY_S,
    ),
    Setting("canary.timeout_s", "seconds", 30.0, "time in which a canary must be answered"),
    Setting("canary.model", "text", None, "model of the canary; unset: the first on the page"),
    Setting("canary.bearer_token_file", "text", None, "file with the canary's own bearer token"),
    Setting("fetch.connect_timeout_s", "seconds", 3.0, "timeout for connecting"),
    Setting("fetch.read_timeout_s", "seconds", 10.0, "timeout for reading the whole page"),
    Setting("fetch.gzip", "flag", False, "request compressed pages (costs CPU, saves network)"),
    Setting(
        "fetch.bearer_token_file", "text", None, "file with a bearer token", "bearer-token-file"
    ),
    Setting(
        "fetch.bearer_token_env",
        "text",
        None,
        "environment variable with a bearer token",
        "bearer-token-env",
    ),
    Setting("fetch.headers", "pairs", None, "extra request headers", "header", secret=True),
    Setting(
        "fetch.header_files",
        "pairs",
        None,
        "request headers whose values are in files",
        "header-file",
    ),
    Setting(
        "fetch.header_envs",
        "pairs",
        None,
        "request headers whose values are in the environment",
        "header-env",
    ),
    Setting("fetch.ca_file", "text", None, "certificate authorities to trust", "ca-file"),
    Setting("fetch.client_cert_file", "text", None, "client certificate", "client-cert"),
    Setting("fetch.client_key_file", "text", None, "key of the client certificate", "client-key"),
    Setting("fetch.insecure_skip_verify", "flag", False, "do not verify certificates", "insecure"),
    Setting("limits.body_bytes", "count", 64 * MIB, "largest page, before and after decompression"),
    Setting("limits.series", "count", 200_000, "most series on a page"),
    Setting("limits.label_bytes", "count", 16 * 1024, "longest label value"),
    Setting(
        "gpu_metrics",
        "url",
        None,
        "URL of a target's DCGM exporter; in run also nvml or none; unset: discovered on the node",
        choices=("nvml", "none"),
    ),
    Setting("gpu_interval_s", "seconds", 15.0, "time between GPU readings in run", most=DAY_S),
    Setting(
        "fleet.labels",
        "pairs",
        None,
        "--prometheus labels by role: replica, namespace, pool, model, tier, engine, node",
        "fleet-label",
    ),
    Setting("fleet.queries_at_once", "count", 4, "most concurrent queries", most=64),
    Setting("fleet.queries_per_s", "number", 20.0, "most queries per second", most=1e4),
    Setting(
        "fleet.lookback_s",
        "seconds",
        7 * DAY_S,
        "how far back --prometheus looks for a tier's peak",
    ),
    Setting(
        "fleet.interval_s",
        "seconds",
        60.0,
        "time between diagnoses in run --prometheus",
        most=DAY_S,
    ),
    Setting("fleet.query_timeout_s", "seconds", 30.0, "timeout for one query"),
    Setting("file_sd", "texts", None, "files with targets in Prometheus's file_sd format; globs"),
    Setting(
        "kubernetes.pods",
        "text",
        None,
        "label selector of vLLM's pods: run finds them through the Kubernetes API",
    ),
    Setting("kubernetes.namespaces", "texts", None, "namespaces of the pods; unset: its own"),
    Setting("kubernetes.node", "text", None, "only pods of this node; unset: of every node"),
    Setting("kubernetes.port", "text", "8000", "port of the pods: number, or a container's name"),
    Setting(
        "docs_url",
        "url",
        None,
        "base URL of the pages about causes and rules; unset: those that run serves at /docs",
    ),
    Setting("listen", "text", "127.0.0.1:9877", "address of run's HTTP endpoint: HOST:PORT"),
    Setting(
        "store.file",
        "text",
        None,
        "history database; unset: kneewatch.db in the state folder",
        "store",
    ),
    Setting("store.keep_s", "seconds", 15 * DAY_S, "how long every scrape is kept"),
    Setting(
        "store.keep_coarse_s",
        "seconds",
        400 * DAY_S,
        "how long values downsampled to one minute are kept",
    ),
    Setting(
        "store.max_bytes",
        "count",
        4 * 1024 * MIB,
        "largest size of the history; the oldest data is deleted first",
        least=MIB,
    ),
    Setting("http.token_file", "text", None, "file with the tokens for read access"),
    Setting(
        "http.admin_token_file", "text", None, "file with the tokens for read and write access"
    ),
    Setting("http.tls_cert_file", "text", None, "certificate for HTTPS"),
    Setting("http.tls_key_file", "text", None, "key of the HTTPS certificate"),
    Setting(
        "http.client_ca_file",
        "text",
        None,
        "certificate authorities for required client certificates",
    ),
    Setting("http.behind_proxy", "flag", False, "a reverse proxy authenticates clients"),
    Setting("http.body_bytes", "count", MIB, "largest request body"),
    Setting("http.requests_per_s", "number", 200.0, "most requests per second from one address"),
    Setting("http.hosts", "texts", None, "accepted host names, besides the listen address"),
    Setting(
        "report.cron",
        "text",
        None,
        "when run creates a report, in cron syntax: 0 6 * * mon; unset: never",
    ),
    Setting(
        "report.timezone", "text", "UTC", "time zone of reports, such as Europe/Berlin", "timezone"
    ),
    Setting(
        "report.folder",
        "text",
        None,
        "folder for run's reports; unset: reports in the state folder",
    ),
    Setting("report.keep", "count", 26, "how many of the newest reports to keep"),
    Setting("report.since_s", "seconds", 7 * DAY_S, "period of run's reports"),
    Setting("report.send", "texts", None, "receivers of reports ([[notify]] names)"),
    Setting(
        "report.profile", "text", None, "workload profile for reports; unset: workload_profile"
    ),
    Setting(
        "log.format", "text", "logfmt", "format of run's log on stderr", choices=("logfmt", "json")
    ),
    Setting(
        "log.level",
        "text",
        "info",
        "lowest level that run logs",
        choices=("debug", "info", "warning", "error"),
    ),
)

BY_KEY = {setting.key: setting for setting in SETTINGS}
