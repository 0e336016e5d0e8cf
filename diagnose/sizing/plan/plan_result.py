"""The result of a plan: its steps and pools, as lines and as JSON. Pure.

Also the values that live requests are compared with.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.catalogue.gpu_specs import NETWORKS, Gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.lengths import (
    ANSWERS,
    KEYS,
    PROMPTS,
    ProfilePart,
    StatedPoint,
    StatedWorkload,
)
from kneewatch.diagnose.sizing.arithmetic import Sheet, Step, gigabytes, seconds
from kneewatch.diagnose.sizing.memory.launch import Launch, fields_of, launch_of
from kneewatch.diagnose.sizing.plan.workload_profile import (
    DeploymentTable,
    SessionShape,
    TokenLengths,
    WorkloadProfile,
)
from kneewatch.diagnose.sizing.replica_count import FleetSize, input_limit, size_fleet
from kneewatch.rules.formatting import figure, percent, plural

Value = float | int | str | bool | None

_LENGTH_ROUNDING_TOKENS = 256


class Part(Struct):
    """A decision of the plan, or a part of one.

    `output` has values by name, which ends with the unit; None means not yet known. `sheet` is the
    arithmetic. `to_measure` lists what must be measured.
    """

    decision: str = ""
    output: dict[str, Value] = field(default_factory=dict[str, Value])
    sheet: Sheet = field(default_factory=Sheet)
    to_measure: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    @property
    def steps(self) -> tuple[Step, ...]:
        """The lines of the arithmetic."""
        return self.sheet.steps

    def add(self, part: Part, *, tier: str = "", prefix: str = "") -> None:
        """Add everything from another part except its decision.

        `tier` is put before the titles of its arithmetic, `prefix` before the names of its values.
        """
        self.output |= {f"{prefix}{name}": value for name, value in part.output.items()}
        self.sheet.add(part.sheet, tier=tier)
        self.to_measure += [text for text in part.to_measure if text not in self.to_measure]
        self.notes += part.notes


class PlanStep(Part, kw_only=True):
    """One of the guide's thirteen decisions. `tier` is empty if the decision is for all traffic."""

    number: int
    title: str
    tier: str = ""


class Plan(Struct, frozen=True, kw_only=True):
    """The thirteen steps in order. With tiers, each tier has its own steps 4 to 10."""

    profile: WorkloadProfile
    tiers: tuple[str, ...]
    steps: tuple[PlanStep, ...]
    unmet: tuple[str, ...] = ()
    """Stated requirements that this plan does not meet."""

    @property
    def fits(self) -> bool:
        """Whether there is a fleet that meets every stated requirement."""
        return self.gpus is not None and not self.unmet

    def step(self, number: int, tier: str = "") -> PlanStep:
        """The step with this number; of the tier `tier` if there are several.

        Raises:
            KeyError: there is no such step.
        """
        for step in self.steps:
            if step.number == number and step.tier == tier:
                return step
        raise KeyError(f"step {number} {tier}".strip())

    @property
    def gpus(self) -> int | None:
        """GPUs to deploy; None if usable RPS is unknown."""
        gpus = self.step(11).output["gpus"]
        return gpus if isinstance(gpus, int) else None


class Pool(Struct, frozen=True, kw_only=True):
    """A fleet to size: a model on a GPU, request lengths, and a share of the traffic.

    `share_ratio` is the share of arriving requests. `peak_requests_per_s` includes growth. `phase`
    is `prefill` or `decode` for the servers of one phase; empty for servers of both. `peer_tensor`
    is the TP degree of the servers that send it KV cache.
    """

    name: str
    profile: WorkloadProfile
    deployment: DeploymentTable
    lengths: TokenLengths
    model: Model
    gpu: Gpu
    share_ratio: float
    peak_requests_per_s: float
    phase: str = ""
    peer_tensor: int = 1

    @property
    def launch(self) -> Launch:
        """One replica's launch with what the profile states of it, for requests of P95 length.

        Raises:
            SizingError: a flag cannot be read, or the lengths do not fit the model.
        """
        longest = longest_request_tokens(self)
        fields = {
            "max_model_len": longest,
            "context_tokens": min(self.tail_tokens, longest),
            "network": self.profile.hosting.network or NETWORKS[0],
        }
        return launch_of(self.model, self.gpu, fields_of(self.deployment.flags) | fields)

    @property
    def tail_tokens(self) -> int:
        """Input plus output tokens at P95; memory is planned for requests of this length."""
        return self.lengths.input_p95_tokens + self.lengths.output_p95_tokens

    @property
    def average_requests_per_s(self) -> float | None:
        """This fleet's share of the average rate; None if no average is stated."""
        average = average_requests_per_s(self.profile)
        return None if average is None else average * self.share_ratio

    @property
    def usd_per_gpu_hour(self) -> float:
        """What a GPU costs with its power and its share of the node, where these are stated."""
        hosting = self.profile.hosting
        power = self.gpu_kilowatts * hosting.usd_per_kwh
        return self.gpu_price + power + hosting.usd_per_node_hour / hosting.node_gpus

    @property
    def gpu_price(self) -> float:
        """USD per hour of the GPU alone: as stated, otherwise the catalogue's default."""
        stated = self.deployment.usd_per_gpu_hour
        return self.gpu.usd_per_hour if stated is None else stated

    @property
    def gpu_kilowatts(self) -> float:
        """The power of one GPU: as stated, otherwise the highest of its board."""
        return (self.profile.hosting.watts_per_gpu or self.gpu.power_watts) / 1000

    @property
    def usable_requests_per_s(self) -> float | None:
        """Of one replica, as stated; a rate of output tokens is divided by the mean answer."""
        tokens_per_s = self.deployment.usable_output_tokens_per_s
        if tokens_per_s is None:
            return self.deployment.usable_requests_per_s
        return tokens_per_s / self.lengths.mean_output_tokens

    def fleet(
        self, usable_requests_per_s: float | None, gpus_each: int, sheet: Sheet | None = None
    ) -> FleetSize | None:
        """The fleet for the peak, of replicas that serve so much; None if that is unknown."""
        if usable_requests_per_s is None or not self.peak_requests_per_s:
            return None
        return size_fleet(
            Sheet() if sheet is None else sheet,
            peak_requests_per_s=self.peak_requests_per_s,
            usable_requests_per_s=usable_requests_per_s,
            gpus_each=gpus_each,
            safety=self.profile.safety,
        )


def average_requests_per_s(profile: WorkloadProfile) -> float | None:
    """The stated average rate; for a batch, its own rate."""
    traffic = profile.traffic
    if traffic.batch_requests is not None and traffic.batch_window_s is not None:
        return traffic.batch_requests / traffic.batch_window_s
    return traffic.average_requests_per_s


def planned_peak_per_s(profile: WorkloadProfile) -> float:
    """The peak to size for: the stated peak, or a batch's own rate, multiplied by the growth."""
    traffic, tokens_per_s = profile.traffic, profile.traffic.peak_output_tokens_per_s
    peak = traffic.peak_requests_per_s or average_requests_per_s(profile)
    if tokens_per_s is not None:
        peak = tokens_per_s / profile.lengths.mean_output_tokens
    if peak is None:
        raise SizingError("the profile has no peak", name="peak_requests_per_s")
    return peak * (1 + profile.traffic.growth_ratio)


def call_lengths(lengths: TokenLengths, session: SessionShape | None) -> TokenLengths:
    """Lengths over all calls of a session, computed from those of its first call.

    Each call's input contains the earlier outputs and the added tokens. The mean is that of the
    middle call; P95 and P99 are those of the last call.

    Source: guide 1.2 (the session is the unit of sizing).
    """
    if session is None:
        return lengths
    later = session.calls - 1
    grown = session.added_tokens + lengths.mean_output_tokens
    last = math.ceil(later * grown)
    return replace(
        lengths,
        input_p50_tokens=lengths.input_p50_tokens + math.ceil(later * grown / 2),
        input_p95_tokens=lengths.input_p95_tokens + last,
        input_p99_tokens=lengths.input_p99_tokens + last,
        input_mean_tokens=lengths.mean_input_tokens + later * grown / 2,
    )


def longest_request_tokens(pool: Pool) -> int:
    """The `max_model_len` for the launch: the stated one, or the input limit plus the P99 output.

    Raises:
        SizingError: today's P99 lengths do not fit the model, or exceed the stated length.

    Source: guide 9.4 (the operational limit is not the model's).
    """
    lengths, own = pool.lengths, pool.model.max_context_tokens
    needed = lengths.input_p99_tokens + lengths.output_p99_tokens
    stated: int | None = pool.deployment.flags.get("max_model_len")
    limit = stated or own
    if limit and needed > limit:
        owner = "max_model_len" if stated else pool.model.id
        raise SizingError(
            f"requests at P99 take {needed:,} tokens (input plus output), more than the limit of "
            f"{limit:,} tokens of {owner}",
            name="max_model_len",
        )
    if stated:
        return stated
    allowed = input_limit(
        Sheet(),
        p95_input_tokens=lengths.input_p95_tokens,
        p99_input_tokens=lengths.input_p99_tokens,
    )
    needed_tokens = max(allowed + lengths.output_p99_tokens, needed)
    rounded = math.ceil(needed_tokens / _LENGTH_ROUNDING_TOKENS) * _LENGTH_ROUNDING_TOKENS
    return min(rounded, own) if own else rounded


# --- A plan as lines of text, and as JSON ---------------------------------------------------------


_WIDTH = 100
_UNITS = {"_requests_per_s": "requests/s", "_requests_per_s_per_instance": "requests/s"}
"""Endings of names that are units; they are printed after the value instead."""


def plan_lines(plan: Plan) -> tuple[str, ...]:
    """The plan as text: first the fleet and its cost, then every decision with its arithmetic."""
    lines = list(plan_summary(plan))
    for step in plan.steps:
        lines += ["", *_step_lines(step)]
    return tuple(lines)


def plan_summary(plan: Plan) -> tuple[str, ...]:
    """The fleet, its cost and its launches as text."""
    fleet, cost = plan.step(11).decision, plan.step(12).decision
    not_met = "".join(f"NOT MET: {requirement}; " for requirement in plan.unmet)
    lines = [f"Plan for {plan.profile.name}: {not_met}{fleet}"]
    chosen = plan.step(2).output.items()
    cards = dict.fromkeys(str(gpu) for name, gpu in chosen if name.rpartition(".")[2] == "gpu")
    lines += _folded(f"GPU: {' and '.join(cards)}. Cost: {cost}.", "  ", "  ")
    open_ends = sum(len(step.to_measure) for step in plan.steps)
    lines.append(f"  To measure before you rely on it: {plural(open_ends, 'figure')}.")
    for name, value in plan.step(13).output.items():
        tier, _, key = name.rpartition(".")
        if key == "launch" and value:
            lines += _folded(f"{tier}: {value}" if tier else str(value), "  run ", "    ")
    return tuple(lines)


def _step_lines(step: PlanStep) -> list[str]:
    tier = f" ({step.tier})" if step.tier else ""
    lines = [f"{step.number}. {step.title}{tier}"]
    lines += _wrapped("-> ", [step.decision])
    labels = {name: _label(name) for name in step.output}
    width = max((len(label) for label in labels.values()), default=0)
    for name, value in step.output.items():
        lines += _folded(f"{labels[name]:<{width}}  {shown(name, value)}", "     ", "       ")
    if step.steps:
        lines.append("   How:")
        for line in step.steps:
            first = f"{line.title}: {line.formula}"
            second = f"= {line.values} = {line.result}{line.cited}"
            lines += _folded(first, "     ", "       ") + _folded(second, "       ", "         ")
    for title, items in (("To measure", step.to_measure), ("Note", step.notes)):
        lines += _wrapped(f"{title}: ", items)
    return lines


def _wrapped(label: str, items: Iterable[str]) -> list[str]:
    return [line for item in items for line in _folded(f"{label}{item}", "   ", "     ")]


def _folded(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _label(name: str) -> str:
    tier, dot, plain = name.rpartition(".")
    words = plain.removesuffix("_s").replace("_bytes", "").split("_")
    labels = packaged_tables("diagnose.sizing.plan", "labels.toml")
    label = labels["values"].get(plain) or " ".join(labels["words"].get(w, w) for w in words)
    return f"{tier}{dot}{label}"


def shown(name: str, value: Value) -> str:
    """A value as text, with its unit, which is the end of the value's name."""
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if "_ratio" in name:
        return percent(value)
    if "_bytes" in name:
        return gigabytes(value)
    for ending, unit in _UNITS.items():
        if name.endswith(ending):
            return f"{figure(value)} {unit}"
    return seconds(value) if name.endswith("_s") else figure(value)


def plan_document(plan: Plan) -> dict[str, object]:
    """The plan as JSON types, in the order of its steps."""
    return {
        "profile": plan.profile.name,
        "tiers": list(plan.tiers),
        "unmet": list(plan.unmet),
        "instances": plan.step(11).output["instances"],
        "gpus": plan.gpus,
        "steps": [_step_document(step) for step in plan.steps],
    }


def _step_document(step: PlanStep) -> dict[str, object]:
    return {
        "number": step.number,
        "tier": step.tier,
        "title": step.title,
        "decision": step.decision,
        "output": step.output,
        "steps": [asdict(line) for line in step.steps],
        "to_measure": step.to_measure,
        "notes": step.notes,
    }


def settings_lines(plan: Plan, *, path: str) -> list[str]:
    """The settings (TOML) of the daemon for the planned servers; `path` is that of the profile.

    Of several fleets, each has a `[[targets]]` table whose url is to be filled in.
    """
    lines = ["# Settings of kneewatch run for the planned servers, with limits for the gateway."]
    for tier in plan.tiers or ("",):
        lines += ["", *_settings_of(plan, tier, path)]
    return lines


def _settings_of(plan: Plan, tier: str, path: str) -> Iterator[str]:
    def value(number: int, name: str) -> Value:
        step = next(s for s in plan.steps if s.number == number and s.tier in ("", tier))
        return step.output.get(f"{tier}.{name}", step.output.get(name))

    words, profile = packaged_tables("diagnose.sizing.plan", "labels.toml"), plan.profile
    phase = tier.rpartition("-")[2] if CONNECTOR in str(value(13, "launch")) else ""
    name = tier.removesuffix(phase).removesuffix("-") if phase else tier
    if tier:
        yield "[[targets]]"
        yield 'url = "http://SERVER:8000"  # a table for each server of this fleet'
        yield f"name = {json.dumps(tier)}"
        yield f"labels = {{ tier = {json.dumps(tier)} }}"
    if not phase:  # the servers of one phase have other lengths
        yield f"workload_profile = {json.dumps(path)}"
    models = {each.name: each.model for each in profile.tiers}
    yield f"model = {json.dumps(models.get(name, profile.deployment.model))}"
    if not tier and (hits := _expected_hits(profile)) is not None:  # it applies to all targets
        yield f"expect.prefix_hit_ratio = {hits:.3g}"
    measured = value(10, "source") == "measured"
    for setting, (number, key) in words["settings"].items():
        is_others = _LATENCY_OF_OTHER.get(phase, "?") in setting
        is_given = measured or not setting.startswith("benchmark.")
        if (given := value(number, key)) is not None and is_given and not is_others:
            yield f"{setting} = {json.dumps(given)}"
    if not measured:
        yield "# benchmark: measure a replica, and plan with its results"
    for key, text in words["gateway"].items():
        if (limit := value(13, key)) is not None:
            yield f"# {text}: {shown(key, limit)}"


CONNECTOR = "--kv-transfer-config"
_LATENCY_OF_OTHER = {"prefill": ".itl", "decode": ".ttft"}
"""The latency that the servers of one phase do not decide."""

RAG_HITS = 0.8
"""Share of a RAG workload's shared context that one replica should hit (guide 9.3)."""


def _expected_hits(profile: WorkloadProfile) -> float | None:
    """The hit ratio, of all prompt tokens, that servers should reach; None if nothing is known."""
    prefix = profile.prefix
    unmeasured = RAG_HITS if profile.traffic.archetype == "rag" else None
    if prefix is None or (ratio := prefix.hit_ratio or unmeasured) is None:
        return None
    return ratio * prefix.shared_tokens / profile.lengths.mean_input_tokens


# --- The values of a workload profile that are monitored on live servers --------------------------


PERCENTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))


def watched(profile: WorkloadProfile, *, origin: str) -> StatedWorkload:
    """Length percentiles by tier, and the peak that the plan is sized for.

    In a session, input lengths range from the first call's (stated) to the last call's.
    """
    launches: Sequence[tuple[str, DeploymentTable, TokenLengths]] = [
        (tier.name, tier, tier.lengths) for tier in profile.tiers
    ] or [("", profile.deployment, profile.lengths)]
    # A batch has no peak to exceed, and a tier's share of the peak is a result of the plan.
    judged = profile.traffic.kind == "online" and not profile.tiers
    return StatedWorkload(
        origin,
        tuple(
            ProfilePart(name, launch.model, launch.gpus, _lengths(lengths, profile))
            for name, launch, lengths in launches
        ),
        planned_peak_per_s(profile) if judged else None,
        grown=profile.session is not None,
    )


def _lengths(
    first: TokenLengths, profile: WorkloadProfile
) -> Mapping[str, tuple[StatedPoint, ...]]:
    last = call_lengths(first, profile.session)
    # The plan's P50 is of the call in the middle, its P95 and P99 are of the last one.
    grown = {PROMPTS: last.input_p99_tokens - first.input_p99_tokens, ANSWERS: 0}
    return {
        side: tuple(
            StatedPoint(ratio, float(tokens), float(tokens + grown[side]))
            for name, ratio in PERCENTILES
            for tokens in [getattr(first, f"{KEYS[side]}_{name}_tokens")]
        )
        for side in (PROMPTS, ANSWERS)
    }
