"""An autoscaler that follows the exported replicas, over hours of simulated load."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from math import ceil, inf, sqrt

import pytest
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.api.service import Recommended
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.recommend.adviser import Adviser
from tests.diagnose.recommend.scenes import cause
from tests.diagnose.situations import CALM, NOW_S

EACH_PER_S, SEATS = 4.0, 26.0
STEP_S, WINDOW_S, DELAY_S, POLL_S = 15.0, 60.0, 180.0, 30.0
SAFETY = 1.3


class Scene(Struct, frozen=True):
    """Arrivals/s at a time, and what happens to one of the replicas between two times."""

    arrivals_per_s: Callable[[float], float]
    start: int = 2
    lost_s: tuple[float, float] = (inf, inf)
    hung_s: tuple[float, float] = (inf, inf)
    unknown_s: tuple[float, float] = (inf, inf)


def simulated(scene: Scene, hours: float, *, seed: int) -> tuple[list[float], list[int]]:
    """The exported numbers, and the replicas that run."""
    chance = random.Random(seed)
    adviser, told = Adviser(Stated(replicas=scene.start)), Recommended()
    ordered: list[tuple[float, int]] = []
    wanted = present = stated = scene.start
    queue = 0.0
    seen: deque[tuple[float, float, float]] = deque(maxlen=int(WINDOW_S / STEP_S) + 1)
    values: list[float] = []
    runs: list[int] = []
    for step in range(int(hours * 3600 / STEP_S)):
        t_s = step * STEP_S
        for ready_s, count in [each for each in ordered if each[0] <= t_s]:
            wanted = count
            ordered.remove((ready_s, count))
        present = wanted - (scene.lost_s[0] <= t_s < scene.lost_s[1])
        serving = present - (scene.hung_s[0] <= t_s < scene.hung_s[1])
        if present != stated:
            adviser.set_stated(Stated(replicas=present))
            stated = present
        mean = scene.arrivals_per_s(t_s) * STEP_S
        arrived = max(0.0, chance.gauss(mean, sqrt(mean)))
        served = min(queue + arrived, serving * EACH_PER_S * STEP_S)
        queue += arrived - served
        seen.append((t_s, queue / serving, served / STEP_S / serving))
        need: float | None = float(present)
        if queue / serving >= 2 and len(seen) > 1:
            facts = replace(situation(seen), now_s=NOW_S + t_s, window_s=WINDOW_S)
            for advice in adviser.advise(facts, [cause("queue_saturation")]):
                if advice.id == "replicas":
                    need = float(str(advice.changes[0].after))
        else:
            adviser.advise(situation(seen), [])
        if scene.unknown_s[0] <= t_s < scene.unknown_s[1]:
            need = None
        told = told.at(t_s, need, present, inf)
        assert told.value is not None
        values.append(told.value)
        runs.append(present)
        target = ordered[-1][1] if ordered else wanted
        if t_s % POLL_S == 0 and told.value != target:
            ordered.append((t_s + DELAY_S if told.value > target else t_s, int(told.value)))
    return values, runs


def situation(seen: deque[tuple[float, float, float]]) -> Facts:
    """The signals of a mean replica."""
    (first_s, was, _), (last_s, waiting, _) = seen[0], seen[-1]
    served = sum(each[2] for each in seen) / len(seen)
    running = SEATS * served / EACH_PER_S
    return CALM.but(
        running=running, running_avg=running, running_max=running, waiting=waiting,
        waiting_avg=waiting, waiting_by_capacity=waiting, completed_per_s=served,
        arrival_per_s=served, waiting_slope_per_s=(waiting - was) / max(STEP_S, last_s - first_s),
        kv_usage_avg_ratio=0.2,
    ).facts()  # fmt: skip


def turns(numbers: list[float]) -> int:
    """How often the numbers change their direction."""
    steps = [after - before for before, after in pairwise(numbers) if after != before]
    return sum(first * second < 0 for first, second in pairwise(steps))


def overload(t_s: float) -> float:
    return 6.4 * EACH_PER_S if t_s >= 300 else 1.6 * EACH_PER_S


def day(t_s: float) -> float:
    return (6.4 if 300 <= t_s < 4500 else 1.2) * EACH_PER_S


MOST = ceil(SAFETY * 6.4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "scene",
    [
        pytest.param(Scene(overload), id="overload"),
        pytest.param(Scene(day), id="recovery and night"),
        pytest.param(Scene(overload, hung_s=(5000.0, 6000.0)), id="a hung replica"),
        pytest.param(Scene(overload, lost_s=(5000.0, 5600.0)), id="a lost replica"),
        pytest.param(Scene(overload, unknown_s=(400.0, 4000.0)), id="unknown for an hour"),
    ],
)
def test_an_autoscaler_that_follows_settles_at_what_the_load_needs(scene: Scene, seed: int) -> None:
    values, runs = simulated(scene, 3.0, seed=seed)
    allowed = MOST + (scene.hung_s[0] < inf) * ceil(SAFETY)
    assert max(values) <= allowed
    assert turns(values) == 0
    for before, now, present in zip(values, values[1:], runs[1:], strict=False):
        assert now <= before or now <= 2 * present + 1
    assert min(values[-40:]) >= 6.4, "enough at the end"
    assert len({*values[-120:]}) == 1
