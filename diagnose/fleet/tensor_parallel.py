"""The cost of tensor parallelism: tokens/s per GPU against servers of the same model on fewer GPUs,
or against the user's benchmark sweeps. Guide 5.1, 8.2. Pure.

Only servers with a queue are compared, because theirs is capacity and not load. Their requests must
be alike and their GPUs of one type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kneewatch.diagnose.causes.evidence import Case
from kneewatch.diagnose.causes.tensor_parallel import is_queued, split_case, weigh_live
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.engine_state import Engine
from kneewatch.diagnose.fleet.tier import FleetCause, Tier, closed, middle
from kneewatch.diagnose.sizing.benchmark.operating_point import ALIKE, FAR_BELOW
from kneewatch.rules.rule import Severity

Kind: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Group:
    """Saturated servers of one model and GPU type with `gpus` GPUs each, and their throughput."""

    gpus: int
    tier: Tier
    engines: tuple[Engine, ...]
    tokens_per_s_per_gpu: float
    computed_per_token: float


def tp_overhead(tiers: Sequence[Tier], profile: Profile) -> list[FleetCause]:
    """A cause for each group of servers with far less throughput per GPU than servers of the same
    model on fewer GPUs, or where there are none, than the stated sweeps give for fewer."""
    causes: list[FleetCause] = []
    groups = [group for tier in tiers for group in groups_of(tier)]
    compared = set[tuple[Kind, int]]()
    for wide in groups:
        narrow = [
            group
            for group in groups
            if group.gpus < wide.gpus
            and _kind(group.tier) == _kind(wide.tier)
            and max(group.computed_per_token, wide.computed_per_token)
            <= ALIKE * min(group.computed_per_token, wide.computed_per_token)
        ]
        best = max(narrow, key=lambda group: group.tokens_per_s_per_gpu, default=None)
        if best is None:
            continue
        compared.add((_kind(wide.tier), wide.gpus))
        if (cause := _by_peers(wide, best)) is not None:
            causes.append(cause)
    if profile.stated.sweeps and not several_kinds(tiers):
        causes += [
            cause
            for tier in tiers
            for degree, engines in degrees_of(tier, profile.stated.degree).items()
            if (_kind(tier), degree) not in compared
            and (cause := _by_sweeps(tier, degree, engines, profile)) is not None
        ]
    return causes


def split_notes(tiers: Sequence[Tier], profile: Profile) -> list[str]:
    """Why the stated sweeps cannot be applied to some servers, one line each."""
    if not profile.stated.sweeps:
        return []
    if several_kinds(tiers):
        return [
            "benchmark.by_tensor_parallel: several models or GPU types are served; select one "
            "(--selector)"
        ]
    degrees = {d for tier in tiers for d in degrees_of(tier, profile.stated.degree)}
    if not degrees:
        return ["benchmark.by_tensor_parallel: number of GPUs unknown (set --tensor-parallel)"]
    whys = [profile.split_at(degree).why for degree in sorted(degrees)]
    return [f"tp_overhead: {why}" for why in whys if why]


def several_kinds(tiers: Sequence[Tier]) -> bool:
    """Whether more than one model or GPU type is served; sweeps are of one."""
    return len({_kind(tier)[:2] for tier in tiers}) > 1


def degrees_of(tier: Tier, stated: int | None) -> dict[int, list[Engine]]:
    """The engines of a decoding tier by tensor-parallel degree: as stated, else by their GPUs."""
    by_degree: dict[int, list[Engine]] = {}
    engines_each = tier.engines_each
    for engine in tier.engines if tier.role != "prefill" else ():
        gpus = (engine.gpus.get("gpus") or 0.0) / engines_each if engines_each else 0.0
        degree = stated or (int(gpus) if gpus == int(gpus) else 0)
        if degree:
            by_degree.setdefault(degree, []).append(engine)
    return by_degree


def _by_sweeps(
    tier: Tier, degree: int, engines: Sequence[Engine], profile: Profile
) -> FleetCause | None:
    split = profile.split_at(degree)
    case = split_case(split)
    if case is None:
        return None
    queued = [engine for engine in engines if _saturated(engine)]
    weigh_live(
        case,
        split,
        tokens_per_s=middle(engine.get("generation_tokens_per_s") for engine in queued),
        tokens_per_request=middle(engine.get("output_tokens_mean") for engine in queued),
        queued=bool(queued),
    )
    return closed(case, tier.pool, tier.tier, engines)


def groups_of(tier: Tier) -> list[Group]:
    """The saturated servers of a tier by number of GPUs. Data-parallel engines are left out: the
    GPUs of each are unknown."""
    by_gpus: dict[int, list[Engine]] = {}
    for engine in tier.engines:
        gpus = engine.gpus.get("gpus")
        if gpus and gpus == int(gpus) and not engine.member.engine and _saturated(engine):
            by_gpus.setdefault(int(gpus), []).append(engine)
    groups: list[Group] = []
    for gpus, engines in sorted(by_gpus.items()):
        tokens = middle(engine.get("generation_tokens_per_s") for engine in engines)
        computed = middle(engine.get("computed_prompt_tokens_per_s") for engine in engines)
        if tokens and computed:
            groups.append(Group(gpus, tier, tuple(engines), tokens / gpus, computed / tokens))
    return groups


def _saturated(engine: Engine) -> bool:
    return is_queued(engine.get("waiting_by_capacity"), engine.get("running") or 0.0)


def _kind(tier: Tier) -> Kind:
    """Model, GPU type and role; only tiers of one kind are compared."""
    return tier.engines[0].member.model, tier.tier, tier.role


def _gpus(group: Group) -> str:
    return f"{group.gpus} GPU{'s' if group.gpus > 1 else ''}"


def _by_peers(wide: Group, narrow: Group) -> FleetCause | None:
    share = wide.tokens_per_s_per_gpu / narrow.tokens_per_s_per_gpu
    if share >= FAR_BELOW:
        return None
    case = Case(
        "tp_overhead",
        f"Replicas on {wide.gpus} GPUs generate {wide.tokens_per_s_per_gpu:.0f} tokens/s per GPU, "
        f"replicas on {_gpus(narrow)} {narrow.tokens_per_s_per_gpu:.0f}: {wide.gpus} GPUs lose "
        f"{1 - share:.0%}.",
        f"Serve from more replicas on {_gpus(narrow)} if their TTFT meets its target.",
        ("5.1", "8.2"),
        Severity.INFO,
        log_odds=-0.2,
    )
    case.weigh(
        "generation_tokens_per_s",
        share,
        FAR_BELOW,
        1.5,
        f"{share:.0%} of the tokens/s per GPU of replicas on {_gpus(narrow)}",
        below=True,
    )
    case.weigh(
        "waiting_by_capacity",
        float(len(wide.engines) + len(narrow.engines)),
        None,
        0.5,
        f"{len(wide.engines)} and {len(narrow.engines)} of them have queues: they run at capacity",
    )
    return closed(case, wide.tier.pool, wide.tier.tier, wide.engines)
