"""Reads a workload profile, with its tables and keys, strictly from TOML. Pure.

docs/how-to/plan.md and the packaged example_profile.toml explain the keys.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, cast

from msgspec import Meta, Struct, ValidationError, field

from kneewatch.collector.errors import SettingsError
from kneewatch.collector.packaged import packaged_tables, read_as
from kneewatch.collector.spelling import did_you_mean
from kneewatch.diagnose.catalogue.gpu_specs import LINK_BYTES_PER_S
from kneewatch.diagnose.deployment.vllm_flags import FLAGS
from kneewatch.diagnose.sizing.arithmetic import compiled
from kneewatch.diagnose.sizing.replica_count import STORAGE_PATHS
from kneewatch.rules.facts import Targets

SAFETY_BY_PREDICTABILITY = {"predictable": 1.2, "typical": 1.3, "uncertain": 1.5}
"""Guide 8.3: 20% for known patterns, 50% for new deployments; its example uses 30%."""

MIXED_RATIO = 8
"""A P95 prompt above this multiple of the median: short and long requests share the fleet."""

Z95 = 1.6449
"""Standard deviations from the mean to the 95th percentile of a normal distribution."""


_TABLES = packaged_tables("diagnose.sizing.plan", "labels.toml")
ARCHETYPES: Mapping[str, Mapping[str, str]] = _TABLES["archetypes"]
"""The guide's four archetypes (1.2; hardware: 3.5 and 9.1, step 2)."""

TARGETS: Mapping[str, Mapping[str, str]] = _TABLES["targets"]
"""Online streaming and offline batch are optimized differently (guide 1.4)."""

# Numbers are whole or not, so that a whole number stays one in the documents made of it.
_ABOVE_0, _FROM_0, _SHARE = Meta(gt=0, le=10**15), Meta(ge=0, le=10**15), Meta(ge=0, le=1)
Count = Annotated[int, _ABOVE_0]
CountOrZero = Annotated[int, _FROM_0]
Number = Annotated[int, _ABOVE_0] | Annotated[float, _ABOVE_0]
NumberOrZero = Annotated[int, _FROM_0] | Annotated[float, _FROM_0]
Ratio = Annotated[int, _SHARE] | Annotated[float, _SHARE]
Text = Annotated[str, Meta(pattern=r"\S")]
Texts = Annotated[tuple[Text, ...], Meta(min_length=1)]


def one_of(choices: Iterable[str]) -> Meta:
    """A text that must be one of `choices`."""
    return Meta(pattern=f"^({'|'.join(choices)})$")


class Table(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a profile."""


class TokenLengths(Table, frozen=True, kw_only=True):
    """Input and output tokens per request. If a mean is not stated, it is estimated."""

    input_p50_tokens: Count
    input_p95_tokens: Count
    input_p99_tokens: Count
    output_p50_tokens: Count
    output_p95_tokens: Count
    output_p99_tokens: Count
    input_mean_tokens: Number | None = None
    output_mean_tokens: Number | None = None

    @property
    def are_mixed(self) -> bool:
        """Whether short and long prompts share the fleet."""
        return self.input_p95_tokens >= MIXED_RATIO * self.input_p50_tokens

    @property
    def mean_input_tokens(self) -> float:
        """The stated mean, otherwise that of a log-normal distribution with this P50 and P95."""
        stated = self.input_mean_tokens
        return stated or _mean(p50=self.input_p50_tokens, p95=self.input_p95_tokens)

    @property
    def mean_output_tokens(self) -> float:
        """The stated mean, otherwise that of a log-normal distribution with this P50 and P95."""
        stated = self.output_mean_tokens
        return stated or _mean(p50=self.output_p50_tokens, p95=self.output_p95_tokens)


LOG_NORMAL_MEAN = "{P50} x exp((ln({P95} / {P50}) / {1.645})^2 / 2)"


def _mean(*, p50: float, p95: float) -> float:
    return compiled(LOG_NORMAL_MEAN)(p50, p95, Z95)


class Traffic(Table, frozen=True, kw_only=True):
    """Request rates, when they occur, and how predictable they are."""

    kind: Annotated[str, one_of(TARGETS)]
    archetype: Annotated[str, one_of(ARCHETYPES)]
    average_requests_per_s: Number | None = None
    peak_requests_per_s: Number | None = None
    peak_output_tokens_per_s: Number | None = None
    lowest_requests_per_s: NumberOrZero | None = None
    rise_per_s_per_s: NumberOrZero | None = None
    growth_ratio: Annotated[float, Meta(ge=0, le=100)] = 0.0
    predictability: Annotated[str, one_of(SAFETY_BY_PREDICTABILITY)] | None = None
    utilization_ratio: Ratio | None = None
    batch_requests: Number | None = None
    batch_window_s: Number | None = None


class Slo(Targets, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Targets for P99, with their valid ranges."""

    ttft_p99_s: Annotated[float, Meta(gt=0, le=600)] | None = None
    itl_p99_s: Annotated[float, Meta(gt=0, le=10)] | None = None
    e2e_p99_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None

    def beside(
        self, ttft_s: float, itl_s: float, latency_s: float | None = None
    ) -> Iterator[tuple[str, float, float]]:
        """As for other targets; with that of whole requests where their latency is known."""
        yield from Targets.beside(self, ttft_s, itl_s)
        if self.e2e_p99_s is not None and latency_s is not None:
            yield "E2E", latency_s, self.e2e_p99_s


LAUNCH_KEYS = {
    flag.profile_key.removeprefix("deployment."): flag
    for flag in FLAGS
    if flag.launch and flag.profile_key.startswith("deployment.")
}
"""The flags of vLLM by their keys in the table of a launch."""


class DeploymentTable(Table, frozen=True, kw_only=True):
    """What is stated of a launch, and of its load; None for what the plan decides or does not need.

    `flags` are the stated flags of vLLM, by their parameters; the table has them as its own keys.
    """

    model: Text
    gpus: Texts
    concurrency: Annotated[int, Meta(gt=0, le=100_000)] | None = None
    usable_requests_per_s: Number | None = None
    usable_output_tokens_per_s: Number | None = None
    usd_per_gpu_hour: NumberOrZero | None = None
    provision_s: NumberOrZero | None = None
    initialise_s: NumberOrZero | None = None
    baseline_benchmark: Text | None = None
    final_benchmark: Text | None = None
    benchmark_gpu_ratio: Ratio | None = None
    flags: dict[str, Any] = field(default_factory=dict[str, Any])


class Prefix(Table, frozen=True, kw_only=True):
    """A prefix that requests share. If `hit_ratio` is None (not measured), no hits are assumed."""

    shared_tokens: Count
    distinct: Count = 1
    hit_ratio: Ratio | None = None


class Lora(Table, frozen=True, kw_only=True):
    """LoRA adapters of the model, and the most adapters per batch.

    `max_lora_rank` is the rank that vLLM reserves buffers for. Without it, the bytes of one adapter
    must be stated.
    """

    adapters: Count
    max_simultaneous_adapters: Count
    adapter_bytes: Number = 0.0
    max_lora_rank: Count | None = None


class Speculation(Table, frozen=True, kw_only=True):
    """Tokens per draft and, if measured, acceptance per token and cost."""

    draft_tokens: Annotated[int, Meta(gt=0, le=64)]
    acceptance_ratio: Ratio
    draft_cost_ratio: Annotated[float, Meta(ge=0, le=10)] = 0.0
    draft_weights_bytes: NumberOrZero = 0.0


class SessionShape(Table, frozen=True, kw_only=True):
    """The dependent calls of an agentic session; each call adds tokens to the context.

    `held_tokens` of the first call's input were sent before. `hit_ratio` is the measured share of
    what was sent before that hits the prefix cache.
    """

    calls: Annotated[int, Meta(gt=0, le=10_000)]
    added_tokens: CountOrZero
    held_tokens: CountOrZero = 0
    hit_ratio: Ratio | None = None


class Hosting(Table, frozen=True, kw_only=True):
    """Nodes, their interconnect, and what they cost beside the GPUs.

    `watts_per_gpu` includes cooling; without it, the GPU's highest power counts.
    """

    node_gpus: Annotated[int, Meta(gt=0, le=128)] = 8
    network: Annotated[str, one_of(LINK_BYTES_PER_S)] | None = None
    storage_path: Annotated[str, one_of(STORAGE_PATHS)] | None = None
    provision_s: NumberOrZero | None = None
    initialise_s: NumberOrZero | None = None
    host_memory_bytes: Number | None = None
    usd_per_node_hour: NumberOrZero = 0.0
    usd_per_kwh: NumberOrZero = 0.0
    watts_per_gpu: Number | None = None


class Routing(Table, frozen=True, kw_only=True):
    """How requests are assigned to tiers: by route, cascade or hardware."""

    method: Annotated[str, one_of(("route", "cascade", "hardware"))] = "route"
    simple_ratio: Ratio | None = None
    small_model_acceptable: bool | None = None
    router_s: NumberOrZero | None = None


class TierProfile(DeploymentTable, frozen=True, kw_only=True):
    """A tier: its launch, its request lengths, and its share of requests.

    In a cascade, `escalation_ratio` is stated instead: the share of its requests that it passes on.
    """

    name: Text
    lengths: TokenLengths
    share_ratio: Ratio | None = None
    escalation_ratio: Ratio | None = None


class WorkloadProfile(Table, frozen=True, kw_only=True):
    """All inputs of the thirteen steps; None if not stated."""

    name: Text = "workload"
    lengths: TokenLengths
    traffic: Traffic
    deployment: DeploymentTable
    slo: Slo = Slo()
    hosting: Hosting = Hosting()
    routing: Routing = Routing()
    prefix: Prefix | None = None
    lora: Lora | None = None
    speculation: Speculation | None = None
    session: SessionShape | None = None
    tiers: tuple[TierProfile, ...] = ()

    @property
    def safety(self) -> float:
        """1.2 to 1.5, depending on the traffic's predictability; unstated, and prompts whose
        lengths vary much, count as uncertain (guide 8.3)."""
        stated = None if self.lengths.are_mixed else self.traffic.predictability
        return SAFETY_BY_PREDICTABILITY[stated or "uncertain"]

    @property
    def models(self) -> tuple[str, ...]:
        """The models that the profile names, without repetition."""
        return tuple(dict.fromkeys(launch.model for launch in (self.deployment, *self.tiers)))

    @property
    def benchmark_files(self) -> tuple[str, ...]:
        """The benchmark files that the profile names, without repetition."""
        launches = (self.deployment, *self.tiers)
        named = [n for d in launches for n in (d.baseline_benchmark, d.final_benchmark)]
        return tuple(dict.fromkeys(name for name in named if name is not None))


_SHARE_TOLERANCE = 1e-6
_FIELD = re.compile(r"Object (contains unknown|missing required) field `(\w+)`")
_AT = re.compile(r" - at `\$\.?(.*)`")
_INDEX = re.compile(r"\[(\d+)\]")
_ALL_KEYS = "docs/how-to/plan.md lists the keys"
_READ: Sequence[type[Struct]] = (*Table.__subclasses__(), Slo, TierProfile)
_KEYS = (*LAUNCH_KEYS, *(key for table in _READ for key in table.__struct_fields__))


def example_profile() -> str:
    folder = resources.files("kneewatch.diagnose.sizing.plan")
    return folder.joinpath("example_profile.toml").read_text("utf-8")


Stated = Mapping[str, Mapping[str, object]]
"""Values by table and key, which override the profile's."""


def read_profile(
    text: str, *, origin: str = "profile", stated: Stated | None = None
) -> WorkloadProfile:
    """The profile of a TOML text, with `stated` values in place of its own.

    Raises:
        SettingsError: TOML, keys or values are invalid; each message names `origin` and a key.
    """
    try:
        document = tomllib.loads(text)
    except RecursionError as exc:
        raise SettingsError(f"{origin}: is nested too deeply") from exc
    except ValueError as exc:
        raise SettingsError(f"{origin}: {exc}") from exc
    for place, values in (stated or {}).items():
        document[place] = _over(document.get(place, {}), values)
    launch, tiers = document.get("deployment"), document.get("tiers")
    for place, table in [("deployment", launch), *_numbered(tiers)]:
        _gather_flags(table, f"{origin}: {place}")
    _complete_tiers(document)
    try:
        profile = read_as(document, WorkloadProfile)
    except ValidationError as exc:
        raise SettingsError(f"{origin}: {_mistake(str(exc))}") from exc
    problems = [
        *_problems_of_lengths(profile.lengths, "lengths"),
        *_problems_of_tiers(profile.tiers, profile.routing.method, profile.lengths),
        *_problems_of_traffic(profile.traffic),
        *_problems_of_memory(profile),
    ]
    if problems:
        raise SettingsError(*(f"{origin}: {problem}" for problem in problems))
    return profile


def _mistake(error: str) -> str:
    """msgspec's error with the key first; tables of a list are counted from 1."""
    what, (at, field) = _AT.sub("", error), (_AT.search(error), _FIELD.search(error))
    place = _INDEX.sub(lambda index: f"[{int(index[1]) + 1}]", at[1]) if at else ""
    if field is None:
        return f"{place}: {what}" if place else what
    key = f"{place}.{field[2]}".removeprefix(".")
    if field[1].startswith("missing"):
        return f"{key} is missing"
    return f"unknown key {key}; {did_you_mean(field[2], _KEYS, 'see docs/how-to/plan.md')}"


def _numbered(tiers: object) -> list[tuple[str, object]]:
    listed = cast("list[object]", tiers) if isinstance(tiers, list) else []
    return [(f"tiers[{number}]", tier) for number, tier in enumerate(listed, start=1)]


_KINDS: Mapping[str, tuple[type | UnionType, float, str]] = {
    "count": (int, 1, "a whole number above 0"),
    "number": (int | float, 0, "a number of 0 or more"),
    "gib": (int | float, 0, "a number of GiB"),
    "switch": (bool, 0, "true or false"),
}
"""By the kind of a flag: the type of its value, the least number, and what it must be in words."""


def _gather_flags(table: object, place: str) -> None:
    """Put the flags of vLLM in a table under the key `flags`.

    Raises:
        SettingsError: a value is of another kind than the flag's.
    """
    if not isinstance(table, dict):
        return
    keys = cast("dict[str, object]", table)
    if "flags" in keys:
        raise SettingsError(f"{place}.flags: state flags of vLLM as keys of the table itself")
    flags: dict[str, object] = {}
    for name in LAUNCH_KEYS.keys() & keys.keys():
        value, flag = keys.pop(name), LAUNCH_KEYS[name]
        kind, least, words = _KINDS.get(flag.kind, (str, 0, "a non-empty string"))
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        is_empty = value < least if isinstance(value, int | float) else not value
        if not is_kind or is_empty:
            raise SettingsError(f"{place}.{name} is {value!r}; it must be {words}")
        flags[flag.parameter] = value
    if flags:
        keys["flags"] = flags


def _over(table: object, values: Mapping[str, object]) -> object:
    """A table updated with `values`. If it is not a table, it is returned unchanged and refused
    later."""
    return {**cast("dict[str, object]", table), **values} if isinstance(table, dict) else table


def _complete_tiers(document: dict[str, Any]) -> None:
    """Add the workload's model, GPUs and lengths to each tier that does not state its own."""
    launch, tiers = document.get("deployment"), document.get("tiers")
    if not isinstance(launch, dict) or not isinstance(tiers, list):
        return
    given = {**cast("dict[str, object]", launch), "lengths": document.get("lengths")}
    shared = {key: given[key] for key in ("model", "gpus", "lengths") if key in given}
    document["tiers"] = [
        {**shared, **cast("dict[str, object]", tier)} if isinstance(tier, dict) else tier
        for tier in cast("list[object]", tiers)
    ]


def _falling(table: object, place: str, names: Iterable[str]) -> Iterator[str]:
    """Where a stated value is below an earlier one, though it cannot be."""
    stated = [(name, value) for name in names if (value := getattr(table, name)) is not None]
    for (low_name, low), (high_name, high) in pairwise(stated):
        if high < low:
            yield f"{place}.{high_name} is {high:g}, below {low_name} of {low:g}"


def _problems_of_lengths(lengths: TokenLengths, place: str) -> Iterator[str]:
    for side in ("input", "output"):
        levels = (f"{side}_{level}_tokens" for level in ("p50", "p95", "p99"))
        yield from _falling(lengths, place, levels)


def _problems_of_tiers(
    tiers: tuple[TierProfile, ...], method: str, shared: TokenLengths
) -> Iterator[str]:
    names = [tier.name for tier in tiers]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"two tiers are called {name!r}"
    if len(tiers) == 1:
        yield "a single tier is not enough; set two or more, or use [deployment]"
        return
    needed, other = "share_ratio", "escalation_ratio"
    if method == "cascade":
        needed, other = other, needed
    for number, tier in enumerate(tiers, start=1):
        place = f"tiers[{number}]"
        if tier.lengths != shared:
            yield from _problems_of_lengths(tier.lengths, f"{place}.lengths")
        if getattr(tier, other) is not None:
            yield f"{place}.{other} has no effect with routing.method {method!r}"
        last = method == "cascade" and number == len(tiers)
        if last and tier.escalation_ratio is not None:
            yield f"{place}.escalation_ratio: the last tier has no next tier to escalate to"
        if not last and getattr(tier, needed) is None:
            yield f"{place}.{needed} is missing"
    shares = [tier.share_ratio for tier in tiers]
    if tiers and method != "cascade" and None not in shares:
        total = sum(share or 0.0 for share in shares)
        if abs(total - 1) > _SHARE_TOLERANCE:
            yield f"tiers: share_ratio adds up to {total:g}, not 1"


def _problems_of_traffic(traffic: Traffic) -> Iterator[str]:
    stated = [traffic.batch_requests is not None, traffic.batch_window_s is not None]
    if any(stated) and traffic.kind == "online":
        yield "traffic.batch_requests and batch_window_s go with kind 'batch'"
    elif any(stated) and not all(stated):
        missing = "batch_window_s" if stated[0] else "batch_requests"
        yield f"traffic.{missing} is missing: the two go together"
    elif traffic.peak_requests_per_s is not None and traffic.peak_output_tokens_per_s is not None:
        yield "traffic.peak_requests_per_s and peak_output_tokens_per_s are both stated"
    elif traffic.peak_requests_per_s is None and not (
        all(stated) or traffic.peak_output_tokens_per_s
    ):
        yield "traffic.peak_requests_per_s is missing" + (
            "; or set batch_requests and batch_window_s" if traffic.kind == "batch" else ""
        )
    elif traffic.peak_requests_per_s is not None and all(stated):
        yield (
            "traffic.peak_requests_per_s is stated together with batch_requests; remove one of them"
        )
    rates = (f"{rate}_requests_per_s" for rate in ("lowest", "average", "peak"))
    yield from _falling(traffic, "traffic", rates)


def _problems_of_memory(profile: WorkloadProfile) -> Iterator[str]:
    prefix, lora = profile.prefix, profile.lora
    if prefix is not None and prefix.shared_tokens > profile.lengths.mean_input_tokens:
        yield (
            f"prefix.shared_tokens is {prefix.shared_tokens}, above the mean input of "
            f"{profile.lengths.mean_input_tokens:g} tokens"
        )
    session = profile.session
    if session is not None and session.held_tokens > profile.lengths.input_p50_tokens:
        yield (
            f"session.held_tokens is {session.held_tokens}, above the first call's input P50 of "
            f"{profile.lengths.input_p50_tokens}"
        )
    for number, launch in enumerate((profile.deployment, *profile.tiers)):
        if launch.usable_requests_per_s and launch.usable_output_tokens_per_s:
            place = f"tiers[{number}]" if number else "deployment"
            yield f"{place}: set usable_requests_per_s or usable_output_tokens_per_s"
    if lora is not None and (lora.max_lora_rank is None) == (not lora.adapter_bytes):
        yield "lora: set max_lora_rank, or adapter_bytes"
    if lora is not None and lora.max_simultaneous_adapters > lora.adapters:
        yield (
            f"lora.max_simultaneous_adapters is {lora.max_simultaneous_adapters}, above "
            f"the {lora.adapters} adapters in total"
        )
