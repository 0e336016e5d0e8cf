"""The table of settings: every one has a default, a TOML key, an environment variable and a flag.

The TOML key is its dotted name, the environment variable its name in capitals
(`slo.ttft_p99_s` -> KNEEWATCH_SLO_TTFT_P99_S).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kneewatch.rules.rule import WINDOW_S

Kind = Literal["seconds", "count", "number", "text", "texts", "url", "flag", "pairs"]
MIB = 1024 * 1024
DAY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. Seconds, counts and numbers are more than nothing, `least` or more, and at most
    `most`.

    `secret`: its values are never shown. `choices`: the texts that it may be, empty: any; an
    address may be one of them instead.
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
        """The environment variable."""
        return "KNEEWATCH_" + self.key.upper().replace(".", "_")

    @property
    def option(self) -> str:
        """The flag: the key with dashes, without the unit's `_s`, where no other is stated."""
        plain = self.key.removesuffix("_s") if self.kind == "seconds" else self.key
        return "--" + (self.flag or plain.replace(".", "-").replace("_", "-"))


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "window_s", "seconds", WINDOW_S, "short window; rules' durations are stretched with it"
    ),
    Setting("interval_s", "seconds", 2.0, "time between scrapes; 5 s in run", most=DAY_S),
    Setting("watch_s", "seconds", 30.0, "how long diagnose watches", "for"),
    Setting(
        "slo.ttft_p99_s",
        "seconds",
        None,
        "TTFT P99 target; unset: a target's own quiet times",
        "slo-ttft",
    ),
    Setting(
        "slo.itl_p99_s",
        "seconds",
        None,
        "ITL P99 target; unset: a target's own quiet times",
        "slo-itl",
    ),
    Setting(
        "slo.objective_ratio",
        "number",
        0.99,
        "share of requests that must meet the targets",
        most=0.99999,
    ),
    Setting("gpus", "count", None, "GPUs of one engine, for tokens per GPU-hour", most=1e6),
    Setting(
        "peak.flop_per_s", "number", None, "one GPU's peak, for MFU; unset: the catalogue's for gpu"
    ),
    Setting(
        "peak.bytes_per_s",
        "number",
        None,
        "one GPU's memory bandwidth, for MBU; unset: the catalogue's for gpu",
    ),
    Setting("model", "text", None, "what is served: a catalogue id, or the path of a config.json"),
    Setting("gpu", "text", None, "its GPU: a catalogue id or a driver's name for it"),
    Setting(
        "tensor_parallel", "count", None, "GPUs that one copy's layers are split over", most=1024
    ),
    Setting("vllm_version", "text", None, "vLLM's version, such as 0.32.0"),
    Setting("launch_file", "text", None, "file with the server's command line (vllm serve ...)"),
    Setting("replicas", "count", None, "copies of this server behind the load balancer", most=1e6),
    Setting(
        "workload_profile",
        "text",
        None,
        "workload that the size was computed for, size's --plan: live requests are held against it",
    ),
    Setting(
        "usd_per_gpu_hour",
        "number",
        None,
        "price of a GPU; unset: the catalogue's for gpu",
        most=1e6,
    ),
    Setting("benchmark.ttft_p99_s", "seconds", None, "TTFT P99 the size was computed from"),
    Setting(
        "benchmark.gpu_ratio", "number", None, "GPU activity in that benchmark, 0 to 1", most=1.0
    ),
    Setting(
        "benchmark.by_tensor_parallel",
        "pairs",
        None,
        "sweeps at several tensor-parallel degrees, as size --benchmark reads them: 4=tp4.csv",
    ),
    Setting("fetch.connect_timeout_s", "seconds", 3.0, "to connect"),
    Setting("fetch.read_timeout_s", "seconds", 10.0, "for the whole read"),
    Setting("fetch.gzip", "flag", False, "ask for compressed pages (costs CPU, saves network)"),
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
    Setting("fetch.client_key_file", "text", None, "its key", "client-key"),
    Setting("fetch.insecure_skip_verify", "flag", False, "do not verify certificates", "insecure"),
    Setting("limits.body_bytes", "count", 64 * MIB, "largest page, also after decompression"),
    Setting("limits.series", "count", 200_000, "most series on a page"),
    Setting("limits.label_bytes", "count", 16 * 1024, "longest label value"),
    Setting(
        "gpu_metrics",
        "url",
        None,
        "DCGM exporter page of a target's GPUs; in run also nvml or none; unset: what the node has",
        choices=("nvml", "none"),
    ),
    Setting(
        "gpu_interval_s", "seconds", 15.0, "time between readings of the GPUs in run", most=DAY_S
    ),
    Setting(
        "fleet.labels",
        "pairs",
        None,
        "what says what with --prometheus: replica, namespace, pool, model, tier, engine, node",
        "fleet-label",
    ),
    Setting("fleet.queries_at_once", "count", 4, "most queries at a time", most=64),
    Setting("fleet.queries_per_s", "number", 20.0, "most queries a second", most=1e4),
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
    Setting("fleet.query_timeout_s", "seconds", 30.0, "for the whole answer to a query"),
    Setting("file_sd", "texts", None, "files with targets in Prometheus's file_sd format; globs"),
    Setting(
        "docs_url",
        "url",
        None,
        "base URL of the pages about causes and rules; unset: the daemon's own",
    ),
    Setting("listen", "text", "127.0.0.1:9877", "where run answers: HOST:PORT"),
    Setting(
        "store.file", "text", None, "the history; unset: kneewatch.db in the state folder", "store"
    ),
    Setting("store.keep_s", "seconds", 15 * DAY_S, "how long every scrape is kept"),
    Setting("store.keep_coarse_s", "seconds", 400 * DAY_S, "how long a value a minute is kept"),
    Setting(
        "store.max_bytes",
        "count",
        4 * 1024 * MIB,
        "what the history may take; the oldest goes first",
        least=MIB,
    ),
    Setting("http.token_file", "text", None, "file with the token that reads"),
    Setting("http.admin_token_file", "text", None, "file with the token that may also post"),
    Setting("http.tls_cert_file", "text", None, "certificate to serve HTTPS with"),
    Setting("http.tls_key_file", "text", None, "its key"),
    Setting(
        "http.client_ca_file", "text", None, "authorities of the client certificates to ask for"
    ),
    Setting("http.behind_proxy", "flag", False, "a proxy in front checks who asks"),
    Setting("http.body_bytes", "count", MIB, "largest request body"),
    Setting("http.requests_per_s", "number", 200.0, "most requests a second from one address"),
    Setting(
        "http.hosts", "texts", None, "host names that requests may be for, besides the address"
    ),
    Setting(
        "report.cron",
        "text",
        None,
        "when run makes a report, as cron has it: 0 6 * * mon; unset: never",
    ),
    Setting("report.timezone", "text", "UTC", "time zone of reports: Europe/Berlin", "timezone"),
    Setting(
        "report.folder", "text", None, "where run puts reports; unset: reports in the state folder"
    ),
    Setting("report.keep", "count", 26, "how many reports stay there, the newest"),
    Setting("report.since_s", "seconds", 7 * DAY_S, "how long a time a report of run is about"),
    Setting("report.send", "texts", None, "receivers ([[notify]] names) that a report is sent to"),
    Setting("report.profile", "text", None, "the same for reports alone; unset: workload_profile"),
    Setting("log.format", "text", "logfmt", "how run logs to stderr", choices=("logfmt", "json")),
    Setting(
        "log.level",
        "text",
        "info",
        "what run logs: this and worse",
        choices=("debug", "info", "warning", "error"),
    ),
)

BY_KEY = {setting.key: setting for setting in SETTINGS}
