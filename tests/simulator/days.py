"""What healthy servers are asked for, by the hour and the day of the week, with bursts."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from tests.simulator.cases import MACHINES
from tests.simulator.gpus import chunk_tokens, hardware
from tests.simulator.page import WITH_SPECULATION
from tests.simulator.scheduler import Launch
from tests.simulator.server import DOCUMENTS, SUMMARIES, Setting, Shape

DAY_S, WEEK_S = 86_400.0, 604_800.0
DEPLOYED_EVERY_S = 36 * 3600.0
NIGHT_S = 3600.0, 5.5 * 3600
"""From and until which time of the day a server may be put to sleep."""
Change = Callable[[Setting], None]


def _plain(setting: Setting) -> None:
    setting.running = 10.0


def _documents(setting: Setting) -> None:
    setting.shape, setting.running = replace(DOCUMENTS, output=300.0), 4.0


def _drafting(setting: Setting) -> None:
    setting.launch.num_speculative_tokens, setting.draft_cost_ratio = 3, 0.05
    setting.shape, setting.form = replace(setting.shape, acceptance_ratio=0.75), WITH_SPECULATION
    setting.running = 3.0


def _adapters(setting: Setting) -> None:
    setting.launch.max_loras, setting.running = 8, 8.0
    setting.shape = replace(setting.shape, adapters=3)


def _reasoning(setting: Setting) -> None:
    # Long answers: few requests fill much of the cache.
    setting.shape = Shape(prompt=800.0, output=3000.0, output_cap=12_000, prefixes=2)
    setting.running = 16.0
    setting.launch.num_gpu_blocks = int(7.0 * 16 * setting.shape.held_tokens / 16)


KINDS: tuple[tuple[str, Change], ...] = (
    ("chat", _plain),
    ("documents", _documents),
    ("speculation", _drafting),
    ("adapters", _adapters),
    ("reasoning", _reasoning),
)


def busy_at(t_s: float, rng_phase: float) -> float:
    """How busy a moment of the week is, about 1 in its mean, 1.75 at its peak."""
    hour = (t_s % DAY_S) / 3600
    weekend = 0.55 if t_s % WEEK_S >= 5 * DAY_S else 1.0
    day = 1 + 0.6 * math.sin((hour - 9) / 24 * 2 * math.pi)
    swell = 1 + 0.1 * math.sin(t_s / 1700 + rng_phase)
    return weekend * day * swell


def bursts(rng: Random, for_s: float) -> list[tuple[float, float, float]]:
    """Bursts: from, to, and how much more comes; about one in half an hour."""
    bursts_s, at_s = list[tuple[float, float, float]](), 0.0
    while at_s < for_s:
        at_s += rng.expovariate(1 / 1800)
        lasts_s = rng.uniform(40, 240)
        bursts_s.append((at_s, at_s + lasts_s, rng.uniform(1.3, 1.8)))
    return bursts_s


def setting_of(change: Change, machine: str) -> Setting:
    """What a trace's server is started with."""
    device = hardware(*MACHINES[machine])
    setting = Setting(
        hardware=device,
        launch=Launch(num_gpu_blocks=device.blocks(), max_num_batched_tokens=chunk_tokens(device)),
    )
    change(setting)
    return setting


def load(
    usual_per_s: float, from_s: float, rng: Random, *, for_s: float
) -> Callable[[float], float]:
    """Requests a second for so long, from a moment of the week on."""
    phase, extra = rng.uniform(0, 6), bursts(rng, for_s)

    def rate(now_s: float) -> float:
        burst = max((much for start, end, much in extra if start <= now_s < end), default=1.0)
        return usual_per_s * busy_at(from_s + now_s, phase) * burst

    return rate


class Operations(Struct, frozen=True):
    """What people do with a server in a stretch of time, in seconds from its beginning.

    It sleeps from and until. It is drained and started anew at `deploy_s`, which takes
    `starts_in_s`; the new release takes `step_ratio` times as long for a step. From `shift_s` on,
    `shift_ratio` times as many requests come, as when a replica is added or removed. From
    `template_s` on, prompts begin with another shared text, `template_ratio` times as long. In
    `batch_s` a batch job adds `batch_share` of the usual number of requests, each a long prompt.
    """

    asleep_s: tuple[float, float] = (math.inf, math.inf)
    deploy_s: float = math.inf
    starts_in_s: float = 0.0
    step_ratio: float = 1.0
    shift_s: float = math.inf
    shift_ratio: float = 1.0
    template_s: float = math.inf
    template_ratio: float = 1.0
    batch_s: tuple[float, float] = (math.inf, math.inf)
    batch_share: float = 0.0

    def is_asleep(self, now_s: float) -> bool:
        """Whether it is to sleep at a moment."""
        return self.asleep_s[0] <= now_s < self.asleep_s[1]

    def batch_at(self, now_s: float) -> float:
        """Requests of a batch job at a moment, over those of the usual callers."""
        return self.batch_share if self.batch_s[0] <= now_s < self.batch_s[1] else 0.0

    def rate_ratio(self, now_s: float) -> float:
        """Requests at a moment over those of the hour."""
        shifted = self.shift_ratio if now_s >= self.shift_s else 1.0
        return shifted * (1.0 + self.batch_at(now_s))

    def shapes(self, shape: Shape, now_s: float) -> dict[Shape, float]:
        """The shares of the requests at a moment, by what they are like."""
        if now_s >= self.template_s:
            tokens = round(self.template_ratio * shape.prefix_tokens)
            shape = replace(shape, prefix_tokens=tokens)
        batch = self.batch_at(now_s)
        if not batch:
            return {shape: 1.0}
        job = replace(SUMMARIES, adapters=shape.adapters, acceptance_ratio=shape.acceptance_ratio)
        return {shape: 1.0 / (1.0 + batch), job: batch / (1.0 + batch)}


def operations(from_s: float, rng: Random, *, for_s: float) -> Operations:
    """A deploy in 36 hours; of two nights one is slept through; in three days a shift of the
    traffic and a new template; a batch job every other day."""

    def at(every_s: float) -> float:
        return rng.uniform(0.2, 0.9) * for_s if rng.random() < for_s / every_s else math.inf

    asleep_s = math.inf, math.inf
    if from_s % DAY_S < NIGHT_S[0] and rng.random() < 0.5:
        asleep_s = NIGHT_S[0] - from_s % DAY_S, NIGHT_S[1] - from_s % DAY_S
    batch_s = at(2 * DAY_S)
    return Operations(
        asleep_s=asleep_s,
        deploy_s=at(DEPLOYED_EVERY_S),
        starts_in_s=rng.uniform(45.0, 280.0),
        step_ratio=rng.uniform(0.85, 1.12),
        shift_s=at(3 * DAY_S),
        shift_ratio=rng.choice((0.5, 0.67, 1.3, 1.5)),
        template_s=at(3 * DAY_S),
        template_ratio=rng.choice((0.5, 1.0, 1.5, 2.0)),
        batch_s=(batch_s, batch_s + rng.uniform(600.0, 7200.0)),
        batch_share=rng.uniform(0.05, 0.3),
    )
