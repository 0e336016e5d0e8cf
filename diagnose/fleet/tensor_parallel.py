"""What tensor parallelism costs: tokens a second and GPU against servers of the same model that are
split less, or against the user's sweeps. Guide 5.1, 8.2. Pure.

Live servers are compared where they give all they can, those with a queue: what others give is what
they are asked for. Their requests must be alike, and their GPUs of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kneewatch.diagnose.causes.evidence import Case
from kneewatch.diagnose.causes.tensor_parallel import is_queued, split_case, weigh_live
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.engine_state import Engine
from kneewatch.diagnose.fleet.tier import FleetCause, Tier, middle, names_of
from kneewatch.diagnose.sizing.benchmark.tensor_parallel import ALIKE, FAR_BELOW
from kneewatch.rules.rule import Severity

Kind: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Group:
    """Saturated servers of one model and kind of GPU on so many GPUs each, and what they give."""

    gpus: int
    tier: Tier
    engines: tuple[Engine, ...]
    tokens_per_s_per_gpu: float
    computed_per_token: float


def tp_overhead(tiers: Sequence[Tier], profile: Profile) -> list[FleetCause]:
    """Servers on more GPUs that give far less a GPU than servers of the same model on fewer, or,
    where none of those can be seen, than the stated sweeps show of fewer."""
    found: list[FleetCause] = []
    groups = [group for tier in tiers for group in groups_of(tier)]
    held = set[tuple[Kind, int]]()
    for wide in groups:
        narrow = [
            one
            for one in groups
            if one.gpus < wide.gpus
            and _kind(one.tier) == _kind(wide.tier)
            and max(one.computed_per_token, wide.computed_per_token)
            <= ALIKE * min(one.computed_per_token, wide.computed_per_token)
        ]
        best = max(narrow, key=lambda one: one.tokens_per_s_per_gpu, default=None)
        if best is None:
            continue
        held.add((_kind(wide.tier), wide.gpus))
        if (told := _told(wide, best)) is not None:
            found.append(told)
    if profile.stated.sweeps and not several_kinds(tiers):
        found += [
            told
            for tier in tiers
            for degree, engines in degrees_of(tier, profile.stated.degree).items()
            if (_kind(tier), degree) not in held
            and (told := _by_sweeps(tier, degree, engines, profile)) is not None
        ]
    return found


def split_notes(tiers: Sequence[Tier], profile: Profile) -> list[str]:
    """Why stated sweeps say nothing of some servers."""
    if not profile.stated.sweeps:
        return []
    if several_kinds(tiers):
        return [
            "benchmark.by_tensor_parallel: several models or kinds of GPU are served, and it is "
            "of one (--selector)"
        ]
    degrees = {d for tier in tiers for d in degrees_of(tier, profile.stated.degree)}
    if not degrees:
        return ["benchmark.by_tensor_parallel: no label says the GPUs (--tensor-parallel)"]
    whys = [profile.split_at(degree).why for degree in sorted(degrees)]
    return [f"tp_overhead: {why}" for why in whys if why]


def several_kinds(tiers: Sequence[Tier]) -> bool:
    """Whether more is served than one model on one kind of GPU, which sweeps are of."""
    return len({_kind(tier)[:2] for tier in tiers}) > 1


def degrees_of(tier: Tier, stated: int | None) -> dict[int, list[Engine]]:
    """The engines of a tier that decodes by tensor-parallel degree: as stated, else their GPUs."""
    found: dict[int, list[Engine]] = {}
    each = tier.engines_each
    for engine in tier.engines if tier.role != "prefill" else ():
        gpus = (engine.gpus.get("gpus") or 0.0) / each if each else 0.0
        degree = stated or (int(gpus) if gpus == int(gpus) else 0)
        if degree:
            found.setdefault(degree, []).append(engine)
    return found


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
    cause = case.close()
    return None if cause is None else FleetCause(cause, tier.pool, tier.tier, names_of(engines))


def groups_of(tier: Tier) -> list[Group]:
    """The saturated servers of a tier by their number of GPUs; one engine of several in a replica
    does not say how many GPUs it has."""
    by_gpus: dict[int, list[Engine]] = {}
    for engine in tier.engines:
        gpus = engine.gpus.get("gpus")
        if gpus and gpus == int(gpus) and not engine.member.engine and _saturated(engine):
            by_gpus.setdefault(int(gpus), []).append(engine)
    found: list[Group] = []
    for gpus, engines in sorted(by_gpus.items()):
        tokens = middle(engine.get("generation_tokens_per_s") for engine in engines)
        computed = middle(engine.get("computed_prompt_tokens_per_s") for engine in engines)
        if tokens and computed:
            found.append(Group(gpus, tier, tuple(engines), tokens / gpus, computed / tokens))
    return found


def _saturated(engine: Engine) -> bool:
    return is_queued(engine.get("waiting_by_capacity"), engine.get("running") or 0.0)


def _kind(tier: Tier) -> Kind:
    """Model, GPU and role: what is compared is of one kind."""
    return tier.engines[0].member.model, tier.tier, tier.role


def _told(wide: Group, narrow: Group) -> FleetCause | None:
    share = wide.tokens_per_s_per_gpu / narrow.tokens_per_s_per_gpu
    if share >= FAR_BELOW:
        return None
    case = Case(
        "tp_overhead",
        f"Replicas on {wide.gpus} GPUs generate {wide.tokens_per_s_per_gpu:.0f} tokens a second "
        f"and GPU, those on {narrow.gpus} {narrow.tokens_per_s_per_gpu:.0f}: the split costs "
        f"{1 - share:.0%}.",
        f"Serve from more replicas on {narrow.gpus} GPUs, where their TTFT keeps its target.",
        ("5.1", "8.2"),
        Severity.INFO,
        log_odds=-0.2,
    )
    case.weigh(
        "generation_tokens_per_s",
        share,
        FAR_BELOW,
        1.5,
        f"{share:.0%} of the tokens a second and GPU of those on {narrow.gpus}",
        below=True,
    )
    case.weigh(
        "waiting_by_capacity",
        float(len(wide.engines) + len(narrow.engines)),
        None,
        0.5,
        f"{len(wide.engines)} and {len(narrow.engines)} of them have queues: they give what they "
        "can",
    )
    cause = case.close()
    tier = wide.tier
    return (
        None if cause is None else FleetCause(cause, tier.pool, tier.tier, names_of(wide.engines))
    )
