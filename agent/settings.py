"""Settings: every one is a row of `SETTINGS`, and has a default, a TOML key, an environment
variable and a flag.

The TOML key is its dotted name, the environment variable its name in capitals
(`slo.ttft_p99_s` -> KNEEWATCH_SLO_TTFT_P99_S). `rules.<ID>.<severity>` in a file sets a threshold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from kneewatch.collector.exposition.parser import Limits
from kneewatch.collector.http.access import FetchSettings
from kneewatch.diagnose.case import Targets
from kneewatch.diagnose.profile import Profile
from kneewatch.diagnose.recommend.deployment import NOTHING, Stated
from kneewatch.rules.model import WINDOW_S

Kind = Literal["seconds", "count", "number", "text", "flag", "pairs"]
MIB = 1024 * 1024
HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. Seconds, counts and numbers are more than nothing and at most `most`.

    `secret`: its values are never shown.
    """

    key: str
    kind: Kind
    default: Any
    help: str
    flag: str = ""
    most: float = float("inf")
    secret: bool = False

    @property
    def env(self) -> str:
        """The environment variable."""
        return "KNEEWATCH_" + self.key.upper().replace(".", "_")

    @property
    def option(self) -> str:
        """The flag: the key with dashes, without the unit's `_s`, where no other is stated."""
        plain = self.key.removesuffix("_s") if self.kind == "seconds" else self.key
        return "--" + (self.flag or plain.replace(".", "-").replace("_", "-"))


@dataclass(frozen=True, slots=True)
class Effective:
    """A value and where it came from."""

    value: Any
    origin: str


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "window_s", "seconds", WINDOW_S, "short window; rules' durations are stretched with it"
    ),
    Setting("interval_s", "seconds", 2.0, "time between scrapes of diagnose and record"),
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
)

BY_KEY = {setting.key: setting for setting in SETTINGS}


class Settings:
    """Effective settings: read with `settings["slo.ttft_p99_s"]`.

    `thresholds` are the user's bounds by rule id and severity word, `thresholds_origin` the file
    they came from.
    """

    def __init__(
        self,
        values: Mapping[str, Effective],
        thresholds: Mapping[str, Mapping[str, float]],
        thresholds_origin: str = "settings",
    ) -> None:
        self._values = dict(values)
        self.thresholds, self.thresholds_origin = thresholds, thresholds_origin

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - a setting has its own kind
        return self._values[key].value

    def origin(self, key: str) -> str:
        """Where a setting's value came from, in words; `default` for nowhere."""
        return self._values[key].origin

    def rows(self) -> list[tuple[Setting, Effective]]:
        """Every setting with its value and origin, in the table's order."""
        return [(setting, self._values[setting.key]) for setting in SETTINGS]

    def as_toml(self) -> list[str]:
        """Lines of a TOML file that says the same; what is not set is a comment."""
        lines = [
            f"# {setting.key} is not set; {setting.help}"
            if effective.value is None
            else f"{setting.key} = {_toml(setting, effective.value)}"
            f"  # {effective.origin}; {setting.help}"
            for setting, effective in self.rows()
        ]
        lines += [
            f"rules.{json.dumps(rule)}.{severity} = {threshold}  # {self.thresholds_origin}"
            for rule, bounds in self.thresholds.items()
            for severity, threshold in bounds.items()
        ]
        return lines

    def profile(self, *, window_s: float | None = None, stated: Stated = NOTHING) -> Profile:
        """The profile for the diagnosis; `window_s` in place of the setting.

        Peaks that are not set are those of the stated GPU.
        """
        gpu = stated.gpu
        return Profile(
            window_s=self["window_s"] if window_s is None else window_s,
            targets=Targets(self["slo.ttft_p99_s"], self["slo.itl_p99_s"]),
            gpus=self["gpus"],
            peak_flop_per_s=self["peak.flop_per_s"] or (gpu.bf16_flop_per_s if gpu else None),
            peak_bytes_per_s=self["peak.bytes_per_s"]
            or (gpu.memory_bandwidth_bytes_per_s if gpu else None),
            stated=stated,
            benchmark_ttft_p99_s=self["benchmark.ttft_p99_s"],
            benchmark_gpu_ratio=self["benchmark.gpu_ratio"],
            thresholds=self.thresholds,
            thresholds_origin=self.thresholds_origin,
        )

    def fetch(self) -> FetchSettings:
        """How pages are fetched."""
        given = {
            setting.key.removeprefix("fetch."): effective.value
            for setting, effective in self.rows()
            if setting.key.startswith("fetch.") and effective.value is not None
        }
        return FetchSettings(**given, body_limit_bytes=self["limits.body_bytes"])

    def limits(self) -> Limits:
        """What a page may hold."""
        return Limits(
            body_bytes=self["limits.body_bytes"],
            series=self["limits.series"],
            label_bytes=self["limits.label_bytes"],
        )


def _toml(setting: Setting, value: object) -> str:
    # JSON's numbers, texts and truths are TOML's as well; its escapes too.
    if setting.kind != "pairs":
        return json.dumps(value, ensure_ascii=False)
    pairs = cast("Mapping[str, str]", value)
    shown = {name: HIDDEN if setting.secret else told for name, told in pairs.items()}
    inner = ", ".join(f"{json.dumps(name)} = {json.dumps(told)}" for name, told in shown.items())
    return f"{{ {inner} }}"
