"""Weekly reports made up by hand: a rich fleet, one target, an empty week, many tiers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from zoneinfo import ZoneInfo

from kneewatch.reports.weekly.figures import DataQuality, Period, ReportedFlag, Trend
from kneewatch.reports.weekly.measures import NOISE_TEST
from kneewatch.reports.weekly.report import (
    Action,
    EngineSpan,
    Incident,
    Tier,
    TrackRecord,
    WeeklyReport,
    WeeklyVerdict,
)
from tests.reports.weekly.page import (
    example_incidents,
    example_planning,
    example_quality,
    example_service,
)

ZONE = "Europe/Berlin"
FROM_S = datetime(2026, 11, 9, tzinfo=ZoneInfo(ZONE)).timestamp()
DAY_S = 86400.0
TO_S = FROM_S + 7 * DAY_S

CHAT, CODE = "llama-3.1-70b on H100", "qwen2.5-coder-32b on H200"
TREND = Trend("ttft_p99_s", "TTFT P99", "s", 4.21, 1.32, 0.4, "up", good=False)
CHEAPER = Trend("usd_per_million_tokens", "Cost", "usd_per_million_tokens", 1.84, 2.31, 0.2, "down",
                good=True)  # fmt: skip


def tier(name: str, gpu: str, targets: Sequence[str], *, gpus: int | None) -> Tier:
    """A tier with an engine on each target, all watched for the whole week."""
    return Tier(
        id=name,
        model=name.partition(" ")[0],
        gpu=gpu,
        engines=tuple(EngineSpan(target, "0", target, FROM_S, TO_S, 0.998) for target in targets),
        engines_present=len(targets),
        gpus=gpus,
    )


def sick(name: str = CHAT) -> WeeklyVerdict:
    """The verdict on a tier that had a cascade."""
    return WeeklyVerdict(
        tier=name,
        health="critical",
        health_text="The KV cache was too small for the load of two afternoons: requests were "
        "thrown out and computed again, and the first token came late.",
        incidents=2,
        incident_s=5340.0,
        size="too small",
        size_text="12 GPUs needed, 8 present: the peak takes 41% more than the fleet carries.",
        money_text="2,688 USD, 1.84 USD per million tokens at 46% utilization.",
        action=Action(
            text="Store the KV cache in fp8.",
            why="It doubles the KV tokens, and the peak then needs 74% of them.",
            recommendation="kv-fp8",
            changes=(ReportedFlag("--kv-cache-dtype", "auto", "fp8"),),
        ),
        trends=(TREND, CHEAPER),
    )


def calm(name: str = CODE) -> WeeklyVerdict:
    """The verdict on a tier without trouble that is larger than it needs to be."""
    return WeeklyVerdict(
        tier=name,
        health="ok",
        health_text="No incident, every target kept.",
        incidents=0,
        incident_s=0.0,
        size="too large",
        size_text="2 GPUs needed, 4 present.",
        money_text="1,848 USD, 6.10 USD per million tokens at 18% utilization.",
        action=Action(
            text="Run one replica instead of two.",
            why="The peak takes 31% of what two carry.",
            recommendation="fewer-replicas",
            changes=(ReportedFlag("replicas", "2", "1"),),
        ),
        trends=(Trend("ttft_p99_s", "TTFT P99", "s", 0.62, 0.6, 0.1, "same"),),
    )


def report(
    tiers: Sequence[Tier],
    verdicts: Sequence[WeeklyVerdict],
    *,
    incidents: Sequence[Incident] = (),
    track_record: TrackRecord | None = None,
    data_quality: DataQuality | None = None,
    notices: Sequence[str] = (),
) -> WeeklyReport:
    """A report in which every tier has all sections, each its own way."""
    ids = [fleet_tier.id for fleet_tier in tiers]
    return WeeklyReport(
        made_s=TO_S + 6 * 3600,
        version="0.1.0",
        source="the embedded store (/var/lib/kneewatch/history.db)",
        timezone=ZONE,
        period=Period(FROM_S, TO_S, 7 * DAY_S - 5400, 7),
        compared=Period(FROM_S - 7 * DAY_S, FROM_S, 7 * DAY_S, 7),
        filters=(),
        notices=tuple(notices),
        severity="critical" if incidents else "ok",
        noise_test=NOISE_TEST,
        tiers=tuple(tiers),
        verdicts=tuple(verdicts),
        incidents=tuple(incidents),
        tables=tuple(example_service.tables(tier_id, place) for place, tier_id in enumerate(ids)),
        slo=tuple(example_service.slo(tier_id, FROM_S, place) for place, tier_id in enumerate(ids)),
        knees=tuple(
            example_service.knee(tier_id, FROM_S, place) for place, tier_id in enumerate(ids)
        ),
        workloads=tuple(
            example_planning.workload(tier_id, FROM_S, place) for place, tier_id in enumerate(ids)
        ),
        sizes=tuple(example_planning.size(tier_id, place) for place, tier_id in enumerate(ids)),
        money=tuple(example_planning.money(tier_id, place) for place, tier_id in enumerate(ids)),
        track_record=track_record or example_quality.nothing_advised(),
        data_quality=data_quality or example_quality.quality((), FROM_S),
    )


def fleet() -> WeeklyReport:
    """Two tiers: one with a cascade and a queue, one idle and healthy; unknown rows in both."""
    chat = [f"gpu-node-{number}:8000" for number in range(1, 5)]
    code = ["coder-a:8000", "coder-b:8000"]
    return report(
        (tier(CHAT, "H100", chat, gpus=8), tier(CODE, "H200", code, gpus=4)),
        (sick(), calm()),
        incidents=example_incidents.both(CHAT, FROM_S),
        track_record=example_quality.track_record(CHAT, FROM_S),
        data_quality=example_quality.quality((*chat, *code), FROM_S),
        notices=("gpu-node-2:8000 was not watched on Sunday from 02:00 to 03:30.",),
    )


def one() -> WeeklyReport:
    """One target, a quiet week."""
    return report(
        (tier(CODE, "H200", ["coder-a:8000"], gpus=2),),
        (calm(),),
        data_quality=example_quality.quality(("coder-a:8000",), FROM_S),
    )


def empty() -> WeeklyReport:
    """A week in which nothing was watched."""
    return report((), (), notices=("No target was watched in this time.",))


def many(tiers: int, *, engines_each: int = 1, incidents: int = 0) -> WeeklyReport:
    """So many tiers, with incidents in the first one."""
    names = [f"model-{number:02} on H100" for number in range(tiers)]
    targets = [
        [f"node-{number:02}-{engine}:8000" for engine in range(engines_each)]
        for number in range(tiers)
    ]
    tier_incidents = example_incidents.many(names[0], FROM_S, incidents)
    return report(
        [
            tier(name, "H100", addresses, gpus=2 * engines_each)
            for name, addresses in zip(names, targets, strict=True)
        ],
        [sick(name) if place % 5 == 0 else calm(name) for place, name in enumerate(names)],
        incidents=tier_incidents,
        track_record=example_quality.track_record(names[0], FROM_S),
        data_quality=example_quality.quality(
            [target for some in targets for target in some], FROM_S
        ),
    )
