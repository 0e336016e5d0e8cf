"""What tensor parallelism costs: tokens a second and GPU against servers of the same model that are
split less. Guide 5.1, 8.2. Pure.

Only servers that give all they can are compared, those with a queue: what others give is what they
are asked for. Their requests must be alike, and their GPUs of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.diagnose.case import Case
from kneewatch.diagnose.fleet.judging import Engine
from kneewatch.diagnose.fleet.spread import middle
from kneewatch.diagnose.fleet.verdict import FleetCause, Tier, names_of
from kneewatch.rules.model import Severity

FAR_BELOW = 0.75
"""On PCIe the all-reduce takes 20 to 30 % of a step (guide 5.1): more than that is lost here."""

QUEUED_MIN = 2.0
QUEUED_SHARE = 0.1

ALIKE = 1.5
"""Prompt tokens computed for one that is generated, at most so many times the other's."""


@dataclass(frozen=True, slots=True)
class Group:
    """Saturated servers of one model and kind of GPU on so many GPUs each, and what they give."""

    gpus: int
    tier: Tier
    engines: tuple[Engine, ...]
    tokens_per_s_per_gpu: float
    computed_per_token: float


def tp_overhead(tiers: Sequence[Tier]) -> list[FleetCause]:
    """Servers on more GPUs that give far less a GPU than servers of the same model on fewer."""
    found: list[FleetCause] = []
    groups = [group for tier in tiers for group in groups_of(tier)]
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
        if best is not None and (told := _told(wide, best)) is not None:
            found.append(told)
    return found


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
    waiting, running = engine.get("waiting_by_capacity"), engine.get("running")
    return waiting is not None and waiting >= max(QUEUED_MIN, QUEUED_SHARE * (running or 0.0))


def _kind(tier: Tier) -> tuple[str, str, str]:
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
