"""Random fleets through the judge: sentences about pools have the numbers of their verdict.

    python -m tests.diagnose.recommend.test_random_fleets [COUNT] [SEED]

prints what is wrong, each kind once.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean, median

import pytest
from msgspec import Struct, json
from msgspec.structs import replace

from kneewatch.agent.stream import new_adviser
from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.judge import Judge
from kneewatch.diagnose.fleet.diagnosis import FLEET_CAUSES, Comparisons, diagnose
from kneewatch.diagnose.fleet.inventory import Gone, Key, Observed, Past, Peak, Readings, Usual, Why
from kneewatch.diagnose.fleet.tier import FleetCause
from kneewatch.diagnose.fleet.verdict import FleetAdvice, FleetVerdict, TierVerdict
from kneewatch.diagnose.recommend.advice import REPLICAS
from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.diagnosis_text import Style
from kneewatch.reports.fleet_rendering import markdown, text
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import singular
from kneewatch.rules.rule import DAY_S, STATES, WEEK_S
from tests.contract.situations import SITUATIONS
from tests.diagnose.fleet.example_fleets import shaped
from tests.diagnose.recommend.scenes import PAGE
from tests.diagnose.recommend.test_random_verdicts import (
    STATED,
    TARGETS,
    changed,
    gpus_now,
    gpus_of,
    print_kinds,
    reading,
)
from tests.diagnose.recommend.test_texts import (
    contradictions,
    figures_with_inverses,
    unexplained,
    wrong,
)
from tests.diagnose.situations import CALM, HEALTHY, NOW_S, Situation

SCRAPE_S = 15.0
QUIET_SCRAPES, SCRAPES = 16, 12
MOST_ILL = 4
"""Most replicas with a judge of their own; the well ones of a pool have one."""

GPU_FIGURES = {"sm_clock_mhz": 1980.0, "temperature_c": 55.0, "gpus": 1.0}
COUNTED = re.compile(r"^(\d+) of (\d+) engines?, worst (\S+): ")
NO_FIGURE = re.compile(r"\b(?:nan|inf|None(?! for)|unknownx)\b|\{\}|e[-+]\d\d\b")
MOMENT = re.compile(r"\d\d:\d\d(?::\d\d)?|\d{4}-\d\d-\d\d|within the (?:last )?hour|\d+ min\b")


class DrawnPool(Struct, frozen=True):
    """A pool: its replicas by name, the situation of the ill, and what its past was."""

    name: str
    replicas: tuple[str, ...]
    ill: tuple[str, ...]
    situation: Situation
    down: tuple[str, ...]
    peak: Peak | None
    usual: Usual | None


def pools_of(rng: random.Random) -> list[DrawnPool]:
    """One to three pools with 2 to 40 replicas in all."""
    sizes = [rng.choice((1, 2, 3, 4, 8, 12)) for _ in range(rng.randint(1, 3))]
    if sum(sizes) < 2 or rng.random() < 0.1:
        sizes = [rng.randint(2, 40)]
    return [_pool(rng, f"pool-{at}", size) for at, size in enumerate(sizes)]


def _pool(rng: random.Random, name: str, size: int) -> DrawnPool:
    replicas = tuple(f"{name}-r{at}" for at in range(size))
    many = rng.choice((0, 1, 1, 2, size, size))
    others = rng.sample(replicas, min(many, size))
    peak = rng.choice((None, 0.2, 0.8, 2.0, 6.0))
    span_s = rng.choice((DAY_S, WEEK_S))
    requests = round((peak or 0.0) * 10.0 * size)
    return DrawnPool(
        name,
        replicas,
        tuple(others),
        SITUATIONS[rng.choice(sorted(SITUATIONS))],
        tuple(f"{name}-d{at}" for at in range(rng.choice((0, 0, 0, 1, 2)))),
        None if peak is None else Peak(requests, NOW_S - DAY_S, requests / 3, span_s, 1.0),
        rng.choice((None, Usual(0.6, 400.0 * size, 0.1))),
    )


class Watched(Struct, frozen=True):
    """A verdict on a fleet, what it was judged from, and its targets."""

    verdict: FleetVerdict
    observed: Observed
    targets: Targets


def watched(seed: int) -> Iterator[Watched]:
    """The verdicts on a fleet that was quiet; then each pool is in its situation."""
    rng = random.Random(f"fleet {seed}")
    pools = pools_of(rng)
    targets = rng.choice(TARGETS)
    profile = Profile(targets=targets, stated=replace(rng.choice(STATED), replicas=None))
    labels = {
        name: {"namespace": "prod", "pod": name, "model_name": pool.name, "instance": name}
        for pool in pools
        for name in pool.replicas
    }
    shape, comparisons = shaped([*labels.values()]), Comparisons(scale=1.0)
    keys = {name: shape.key(row) for name, row in labels.items()}
    groups = {member.replica: member.group for member in shape.members}
    judges = {
        name: Judge("vllm", EngineKey("vllm", "0"), profile, new_adviser)
        for pool in pools
        for name in (*pool.ill[:MOST_ILL], pool.name)
    }
    past = Past(
        {groups[p.replicas[0]]: p.peak for p in pools if p.peak is not None},
        usual={groups[p.replicas[0]]: p.usual for p in pools if p.usual is not None},
    )
    for at in range(QUIET_SCRAPES + SCRAPES):
        t_s, is_quiet = NOW_S + SCRAPE_S * at, at < QUIET_SCRAPES
        verdicts, gpus = dict[Key, Verdict](), dict[Key, Readings]()
        for pool in pools:
            judged = {
                name: _judged(rng, judges[name], pool, at, targets, is_ill=name != pool.name)
                for name in (*pool.ill[:MOST_ILL], pool.name)
            }
            for name in pool.replicas:
                own = name if name in judged else pool.ill[0] if name in pool.ill else pool.name
                verdicts[keys[name]] = replace(judged[own], target=name)
                hot = name in pool.ill and pool.situation.gpus
                gpus[keys[name]] = GPU_FIGURES | (
                    {"sm_clock_mhz": 900.0, "temperature_c": 88.0} if hot else {}
                )
        observed = Observed(
            t_s=t_s,
            source="http://prometheus:9090",
            window_s=60.0,
            shape=shape,
            verdicts=verdicts,
            values={key: {"age_s": 1e6, **_hour(verdicts[key])} for key in verdicts},
            gpus=gpus,
            past=past,
            gone=[
                Gone(name, groups[pool.replicas[0]][0], Why.DOWN, t_s - 90.0)
                for pool in pools
                for name in (() if is_quiet else pool.down)
            ],
        )
        found = diagnose(observed, profile, comparisons)
        if not is_quiet:
            yield Watched(found, observed, targets)


def _hour(verdict: Verdict) -> Readings:
    running = verdict.values.get("running_avg") or 0.0
    return {"running_hour_avg": running, "running_hour_ago": running}


def _judged(
    rng: random.Random, judge: Judge, pool: DrawnPool, at: int, targets: Targets, *, is_ill: bool
) -> Verdict:
    """What the judge of an ill replica says, or that of the well ones."""
    situation = pool.situation if is_ill and at >= QUIET_SCRAPES else CALM
    quiet = {**HEALTHY, **pool.situation.quiet, "prompt_tokens_mean": 900.0, "itl_mean_s": 0.02}
    sick = {key: v for key, v in situation.values.items() if HEALTHY.get(key) != v}
    values = changed(rng, {**quiet, **sick}) if sick else quiet
    gpus = gpus_now(rng, gpus_of(rng, situation)) if situation.gpus else ()
    config = {**PAGE, **situation.config}
    return judge.step(NOW_S + SCRAPE_S * at, reading(values, at, situation, config, targets, gpus))


# --- What is wrong about a verdict ----------------------------------------------------------------


def mistakes(seen: Watched) -> Iterator[str]:
    """Numbers of sentences that the document lacks, advice that excludes itself, counts that are
    not those of the replicas, and a health that is not the worst of its parts."""
    fleet = seen.verdict
    read = json.decode(json.encode(fleet), type=FleetVerdict)
    if read != json.decode(json.encode(read), type=FleetVerdict):
        yield "another document after reading"
    if fleet.health != "unknown" and STATES[fleet.health] != fleet.severity:
        yield f"{fleet.health} where the worst is {fleet.severity.word}"
    advised = dict[tuple[str, str | None], list[FleetAdvice]]()
    for each in fleet.advice:
        advised.setdefault((each.pool, each.tier), []).append(each)
    for tier in fleet.tiers:
        yield from _of_size(tier, advised.pop((tier.pool, tier.tier), []), seen.targets)
    yield from (f"advice for {place}, which has no replicas" for place in advised)
    for cause in fleet.causes:
        yield from _of_counts(cause, fleet)
        if cause.id in FLEET_CAUSES and cause.seen_s in (None, fleet.t_s):
            figures = [*figures_with_inverses([*_compared(cause, seen)])]
            for words in (cause.summary, *(e.text for e in (*cause.evidence, *cause.against))):
                for name in sorted(cause.replicas, key=len, reverse=True):
                    words = words.replace(name, "")
                left = unexplained(MOMENT.sub("", words), figures)
                yield from (f"{cause.id}: {number}" for number in left)
    for words in (*_words(fleet), text(fleet, Style()), markdown(fleet)):
        if found := NO_FIGURE.search(words):
            yield f"no figure: {words[max(0, found.start() - 60) : found.end() + 30]}"
    yield from (f"plural: {words}" for words in _words(fleet) if singular(words) != words)


def _words(fleet: FleetVerdict) -> Iterator[str]:
    """All sentences of a verdict."""
    for cause in fleet.causes:
        yield from (cause.summary, cause.lever)
        yield from (part.text for part in (*cause.evidence, *cause.against))
    for each in fleet.advice:
        yield from (each.summary, each.risk, *each.checks, *each.verify, *each.worsens)
    yield from (tier.size.why for tier in fleet.tiers)


def _of_size(tier: TierVerdict, advised: Sequence[FleetAdvice], targets: Targets) -> Iterator[str]:
    size = tier.size
    yield from contradictions(advised)
    counts = [change for each in advised for change in each.changes if change.flag == REPLICAS]
    if len(counts) > 1:
        yield f"two numbers of replicas: {counts}"
    for change in counts:
        if (change.before, change.after) != (size.present, size.needed):
            yield f"{change} beside {size.present} present, {size.needed} needed"
    if not counts and size.needed not in (None, size.present):
        yield f"{size.needed} of {size.present} replicas without advice"
    if counts and size.why:
        yield f"a change beside the reason for none: {size.why}"
    beside: dict[str, float] = {"present": size.present, "used": size.used_ratio or 0.0}
    if size.peak is not None:
        beside |= {"most": size.peak.requests, "days": size.peak.span_s / DAY_S}
        beside["seen"] = size.peak.seen_ratio
    for each in advised:
        complete = replace(each, basis={**each.basis, **beside})
        yield from (f"{each.id}: {what}" for what in wrong(complete, targets))


def _of_counts(cause: FleetCause, fleet: FleetVerdict) -> Iterator[str]:
    counted = COUNTED.match(cause.summary)
    if counted is None:
        return
    if int(counted[1]) != len(cause.replicas) or counted[3] not in cause.replicas:
        yield f"{counted[0]} of {cause.replicas}"
    engines = sum(engine.pool == cause.pool for engine in fleet.engines)
    if int(counted[2]) != engines:
        yield f"{counted[0]} in a pool of {engines}"


def _compared(cause: FleetCause, seen: Watched) -> Iterator[float]:
    """The figures that a comparison of replicas may name: those of its evidence, counts, and the
    values of its signals on its replicas beside all of the pool."""
    observed, fleet = seen.observed, seen.verdict
    engines = [engine for engine in fleet.engines if engine.pool == cause.pool]
    down = [gone for gone in fleet.gone if gone.pool == cause.pool]
    shown, of = len(cause.replicas), len(engines)
    yield from (*range(of + 1), shown / (of or 1), of + len(down), len(down))
    for e in engines:
        running = e.values.get("running_avg", e.values.get("running", 0.0))
        yield running + e.values.get("waiting", 0.0)  # in flight
    for part in (*cause.evidence, *cause.against):
        yield from (n for n in (part.value, part.threshold) if n is not None)
    for key in {*OF_LOAD, *(part.signal for part in (*cause.evidence, *cause.against))}:
        values = {e.name: e.values[key] for e in engines if key in e.values}
        if not values:
            continue
        others = [value for name, value in values.items() if name not in cause.replicas]
        usual = [
            median(values.values()),
            fmean(values.values()),
            *map(median, [others] if others else []),
        ]
        yield from (*usual, max(values.values()), min(values.values()), sum(values.values()))
        own = [values[name] for name in cause.replicas if name in values]
        yield from (*own, sum(own), sum(others), max(others, default=0.0))
        yield from (mine / base for mine in own for base in (*usual, sum(values.values())) if base)
    yield from (age for values in observed.values.values() for age in values.values())
    usual_of = observed.past.usual.get(next(iter(observed.past.usual), ("", "", "")))
    yield from (() if usual_of is None else (usual_of.hit_ratio,))


OF_LOAD = ("running", "waiting", "arrival_per_s", "kv_usage_ratio", "prefix_hit_ratio")


@pytest.mark.parametrize("seed", [*range(12), 1046])
def test_random_fleets(seed: int) -> None:
    assert [each for seen in watched(seed) for each in mistakes(seen)] == []


def main(count: int = 100, seed: int = 0) -> None:
    """Print what is wrong, each kind once, and how often causes and advice were seen."""
    seen_ids, wrong = Counter[str](), list[tuple[int, str]]()
    for at in range(seed, seed + count):
        for seen in watched(at):
            fleet = seen.verdict
            seen_ids.update(["verdicts", *(cause.id for cause in fleet.causes)])
            seen_ids.update(each.id for each in fleet.advice)
            wrong += [(at, each) for each in mistakes(seen)]
    print_kinds(wrong, r"pool-\d+\S*|[\d.,]+")
    print(seen_ids)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
