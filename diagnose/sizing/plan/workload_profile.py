"""A workload profile: its fields, and how it is read from TOML. Pure."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from itertools import pairwise
from typing import Any, cast

from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.sizing.plan.profile_schema import (
    DEPLOYMENT,
    LENGTHS,
    TABLES,
    TIER,
    known_keys,
    read_table,
)

_Z95 = 1.6449
"""The 95th percentile of a normal distribution, in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of inputs and outputs; a mean that is not stated is estimated."""

    input_p50_tokens: int
    input_p95_tokens: int
    input_p99_tokens: int
    output_p50_tokens: int
    output_p95_tokens: int
    output_p99_tokens: int
    input_mean_tokens: float | None = None
    output_mean_tokens: float | None = None

    @property
    def mean_input_tokens(self) -> float:
        """The stated mean, or that of a log-normal distribution with this P50 and P95."""
        stated = self.input_mean_tokens
        return stated or _mean(p50=self.input_p50_tokens, p95=self.input_p95_tokens)

    @property
    def mean_output_tokens(self) -> float:
        """The stated mean, or that of a log-normal distribution with this P50 and P95."""
        stated = self.output_mean_tokens
        return stated or _mean(p50=self.output_p50_tokens, p95=self.output_p95_tokens)


def _mean(*, p50: float, p95: float) -> float:
    return p50 * math.exp((math.log(p95 / p50) / _Z95) ** 2 / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests: how many, when, and how well that is known."""

    kind: str
    archetype: str
    average_requests_per_s: float | None = None
    peak_requests_per_s: float | None = None
    lowest_requests_per_s: float | None = None
    rise_per_s_per_s: float | None = None
    growth_ratio: float = 0.0
    predictability: str | None = None
    utilization_ratio: float | None = None
    batch_requests: float | None = None
    batch_window_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Targets at P99; None: none was set."""

    ttft_p99_s: float | None = None
    itl_p99_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What is known of the launch; None: the plan decides, or does without."""

    model: str
    gpus: tuple[str, ...]
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    max_model_len: int | None = None
    concurrency: int | None = None
    usable_requests_per_s: float | None = None
    usd_per_gpu_hour: float | None = None
    baseline_benchmark: str | None = None
    final_benchmark: str | None = None
    benchmark_gpu_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A prefix that requests share; `hit_ratio` None: not measured, so not counted on."""

    shared_tokens: int
    distinct: int = 1
    hit_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Adapters of the model, of which so many are in one batch at most.

    `max_lora_rank` is what vLLM keeps buffers for; the bytes of one are stated without it.
    """

    adapters: int
    max_simultaneous_adapters: int
    adapter_bytes: float = 0.0
    max_lora_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A draft's length and, measured, its acceptance per token and its cost."""

    draft_tokens: int
    acceptance_ratio: float
    draft_cost_ratio: float = 0.0
    draft_weights_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionShape:
    """Dependent calls of an agentic session, each adding tokens to the context."""

    calls: int
    added_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """Nodes and what joins them."""

    node_gpus: int = 8
    network: str | None = None
    storage_path: str | None = None
    provision_s: float | None = None
    initialise_s: float | None = None
    host_memory_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How requests are dealt to tiers: route, cascade or hardware."""

    method: str = "route"
    simple_ratio: float | None = None
    small_model_acceptable: bool | None = None
    router_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierProfile:
    """A tier: its share of the requests, or what it hands on, and its own launch and lengths."""

    name: str
    deployment: Deployment
    lengths: Lengths
    share_ratio: float | None = None
    escalation_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadProfile:
    """Everything that the thirteen steps take; None: not stated."""

    name: str
    lengths: Lengths
    traffic: Traffic
    deployment: Deployment
    slo: Slo
    hosting: Hosting
    routing: Routing
    prefix: Prefix | None = None
    lora: Lora | None = None
    speculation: Speculation | None = None
    session: SessionShape | None = None
    tiers: tuple[TierProfile, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """The models that the profile names, each once."""
        launches = [self.deployment, *(tier.deployment for tier in self.tiers)]
        return tuple(dict.fromkeys(launch.model for launch in launches))

    @property
    def benchmark_files(self) -> tuple[str, ...]:
        """The benchmark tables that the profile names, each once."""
        launches = [self.deployment, *(tier.deployment for tier in self.tiers)]
        named = [n for d in launches for n in (d.baseline_benchmark, d.final_benchmark)]
        return tuple(dict.fromkeys(name for name in named if name is not None))


# --- A workload profile out of its TOML text, read strictly. Pure ---------------------------------
#
# What the keys mean is in docs/how-to/plan.md and in the packaged example_profile.toml.


_NEEDED = ("lengths", "traffic", "deployment")
_SHARE_TOLERANCE = 1e-6


def example_profile() -> str:
    """The text of the packaged example."""
    folder = resources.files("kneewatch.diagnose.sizing.plan")
    return folder.joinpath("example_profile.toml").read_text("utf-8")


Stated = Mapping[str, Mapping[str, object]]
"""Values by table and key that win over a profile's own."""


def read_profile(
    text: str, *, origin: str = "profile", stated: Stated | None = None
) -> WorkloadProfile:
    """The profile that a TOML text holds, with what is stated beside it laid over it.

    Raises:
        SettingsError: it is no TOML, or a key or value cannot be; `origin` and the key are named.
    """
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise SettingsError(f"{origin}: {exc}") from exc
    except RecursionError as exc:
        raise SettingsError(f"{origin}: is nested too deeply") from exc
    for place, values in (stated or {}).items():
        own: object = document.get(place, {})
        if isinstance(own, dict):
            document[place] = {**cast("dict[str, object]", own), **values}
    known_keys(document, known=("name", *TABLES, "tiers"), place="", origin=origin)
    for place in _NEEDED:
        if place not in document:
            raise SettingsError(f"{origin}: the table [{place}] is missing")
    tables = {
        place: read_table(document[place], keys, place=place, origin=origin)
        for place, keys in TABLES.items()
        if place in document
    }
    lengths = _lengths(tables["lengths"], place="lengths", origin=origin)
    deployment = Deployment(**tables["deployment"])
    routing = Routing(**tables.get("routing", {}))
    profile = WorkloadProfile(
        name=_name(document, origin),
        lengths=lengths,
        traffic=Traffic(**tables["traffic"]),
        deployment=deployment,
        slo=Slo(**tables.get("slo", {})),
        hosting=Hosting(**tables.get("hosting", {})),
        routing=routing,
        prefix=Prefix(**tables["prefix"]) if "prefix" in tables else None,
        lora=Lora(**tables["lora"]) if "lora" in tables else None,
        speculation=Speculation(**tables["speculation"]) if "speculation" in tables else None,
        session=SessionShape(**tables["session"]) if "session" in tables else None,
    )
    tiers = _tiers(document.get("tiers", []), profile, origin)
    _check_shares(tiers, routing.method, origin)
    _check_traffic(profile.traffic, origin)
    _check_prefix(profile, origin)
    return replace(profile, tiers=tiers)


def _name(document: Mapping[str, object], origin: str) -> str:
    name = document.get("name", "workload")
    if not isinstance(name, str) or not name.strip():
        raise SettingsError(f"{origin}: name is {name!r}; it must be a non-empty string")
    return name


def _lengths(values: Mapping[str, Any], *, place: str, origin: str) -> Lengths:
    lengths = Lengths(**values)
    for side in ("input", "output"):
        names = [f"{side}_{level}_tokens" for level in ("p50", "p95", "p99")]
        p50, p95, p99 = (cast("int", getattr(lengths, name)) for name in names)
        for name, low, high in ((names[1], p50, p95), (names[2], p95, p99)):
            if high < low:
                raise SettingsError(
                    f"{origin}: {place}.{name} is {high}, below the lower percentile's {low}"
                )
    return lengths


def _tiers(listed: object, profile: WorkloadProfile, origin: str) -> tuple[TierProfile, ...]:
    if not isinstance(listed, list):
        raise SettingsError(f"{origin}: tiers is {listed!r}; write each as a table [[tiers]]")
    tiers: list[TierProfile] = []
    for number, given in enumerate(cast("list[object]", listed), start=1):
        place = f"tiers[{number}]"
        if not isinstance(given, Mapping):
            raise SettingsError(f"{origin}: {place} is {given!r}; it must be a table")
        table = dict(cast("Mapping[str, object]", given))
        lengths = profile.lengths
        own = table.pop("lengths", None)
        if own is not None:
            inner = f"{place}.lengths"
            values = read_table(own, LENGTHS, place=inner, origin=origin)
            lengths = _lengths(values, place=inner, origin=origin)
        keys = (*TIER, *(replace(key, needed=False) for key in DEPLOYMENT))
        members = read_table(table, keys, place=place, origin=origin)
        tier = {key.name: members.pop(key.name) for key in TIER if key.name in members}
        members.setdefault("model", profile.deployment.model)
        members.setdefault("gpus", profile.deployment.gpus)
        tiers.append(TierProfile(**tier, deployment=Deployment(**members), lengths=lengths))
    names = [tier.name for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"{origin}: two tiers are called {name!r}")
    return tuple(tiers)


def _check_shares(tiers: tuple[TierProfile, ...], method: str, origin: str) -> None:
    if not tiers:
        return
    if len(tiers) == 1:
        raise SettingsError(
            f"{origin}: a single tier is not enough; set two or more, or use [deployment]"
        )
    needed, other = "share_ratio", "escalation_ratio"
    if method == "cascade":
        needed, other = other, needed
    for number, tier in enumerate(tiers, start=1):
        place = f"{origin}: tiers[{number}]"
        if getattr(tier, other) is not None:
            raise SettingsError(f"{place}.{other} has no effect with routing.method {method!r}")
        last = method == "cascade" and number == len(tiers)
        if last and tier.escalation_ratio is not None:
            raise SettingsError(
                f"{place}.escalation_ratio: the last tier has no next tier to escalate to"
            )
        if not last and getattr(tier, needed) is None:
            raise SettingsError(f"{place}.{needed} is missing")
    if method != "cascade":
        total = sum(tier.share_ratio or 0.0 for tier in tiers)
        if abs(total - 1) > _SHARE_TOLERANCE:
            raise SettingsError(f"{origin}: tiers: share_ratio adds up to {total:g}, not 1")


def _check_traffic(traffic: Traffic, origin: str) -> None:
    stated = [traffic.batch_requests is not None, traffic.batch_window_s is not None]
    place = f"{origin}: traffic"
    if any(stated) and traffic.kind == "online":
        raise SettingsError(f"{place}.batch_requests and batch_window_s go with kind 'batch'")
    if any(stated) and not all(stated):
        missing = "batch_window_s" if stated[0] else "batch_requests"
        raise SettingsError(f"{place}.{missing} is missing: the two go together")
    if traffic.peak_requests_per_s is None and not all(stated):
        raise SettingsError(
            f"{place}.peak_requests_per_s is missing"
            + ("; or set batch_requests and batch_window_s" if traffic.kind == "batch" else "")
        )
    if traffic.peak_requests_per_s is not None and all(stated):
        raise SettingsError(
            f"{place}.peak_requests_per_s is stated together with batch_requests; remove one "
            "of them"
        )
    rates = (
        ("lowest_requests_per_s", traffic.lowest_requests_per_s),
        ("average_requests_per_s", traffic.average_requests_per_s),
        ("peak_requests_per_s", traffic.peak_requests_per_s),
    )
    stated_rates = [(name, value) for name, value in rates if value is not None]
    for (low_name, low), (high_name, high) in pairwise(stated_rates):
        if high < low:
            raise SettingsError(f"{place}.{high_name} is {high:g}, below {low_name} of {low:g}")


def _check_prefix(profile: WorkloadProfile, origin: str) -> None:
    prefix, lora = profile.prefix, profile.lora
    if prefix is not None and prefix.shared_tokens > profile.lengths.mean_input_tokens:
        raise SettingsError(
            f"{origin}: prefix.shared_tokens is {prefix.shared_tokens}, above the mean input of "
            f"{profile.lengths.mean_input_tokens:g} tokens"
        )
    if lora is not None and (lora.max_lora_rank is None) == (not lora.adapter_bytes):
        raise SettingsError(f"{origin}: lora: set max_lora_rank, or adapter_bytes")
    if lora is not None and lora.max_simultaneous_adapters > lora.adapters:
        raise SettingsError(
            f"{origin}: lora.max_simultaneous_adapters is {lora.max_simultaneous_adapters}, above "
            f"the {lora.adapters} adapters in total"
        )
