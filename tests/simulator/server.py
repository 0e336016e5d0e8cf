"""A server of the simulator under a load: model, GPUs, launch and what its requests are like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.captures.format import Entry
from tests.simulator.blocks import Chain
from tests.simulator.engine import Engine
from tests.simulator.gpus import Exporter, GpuSteps, Hardware
from tests.simulator.page import NEWEST, START_S, PageWriter
from tests.simulator.requests import Kind, Open, Source, lengths, lognormal
from tests.simulator.scheduler import Launch
from tests.simulator.work import Work

SCRAPE_S, GPU_SCRAPE_S = 5.0, 15.0
_ROUNDS = 20


class Shape(Struct, frozen=True, kw_only=True):
    """What requests are like, in means. `prefixes` shared beginnings of `prefix_tokens` each;
    `long_ratio` of the prompts are `long_tokens` more; `runaway_ratio` of the outputs go on to
    the cap; `hang_up_ratio` of the clients go away. Lengths are lognormal with this `sigma`, or
    gamma-distributed where it is 0."""

    prompt: float = 300.0
    output: float = 250.0
    prefixes: int = 4
    prefix_tokens: int = 512
    adapters: int = 0
    acceptance_ratio: float = 0.0
    output_cap: int = 1024
    runaway_ratio: float = 0.0
    long_ratio: float = 0.0
    long_tokens: int = 0
    hang_up_ratio: float = 0.0
    sigma: float = 0.0

    @property
    def prompt_tokens(self) -> float:
        """A whole prompt's."""
        return self.prompt + self.prefix_tokens * bool(self.prefixes)

    @property
    def held_tokens(self) -> float:
        """KV tokens of a running request in the mean, without what it shares."""
        return self.prompt + self.output / 2

    def scaled(self, ratio: float) -> Shape:
        """The same requests, so much longer."""
        return replace(
            self,
            prompt=ratio * self.prompt,
            output=ratio * self.output,
            prefix_tokens=round(ratio * self.prefix_tokens),
        )

    def kind(self, chains: list[Chain]) -> Kind:
        """Such requests; `chains` grows to as many prefixes as are needed."""
        chains += [Chain() for _ in range(self.prefixes - len(chains))]
        prompt, output = (
            lognormal(mean, self.sigma) if self.sigma else lengths(mean)
            for mean in (self.prompt, self.output)
        )
        ratio = self.acceptance_ratio

        def long_prompt(rng: Random) -> int:
            return prompt(rng) + (self.long_tokens if rng.random() < self.long_ratio else 0)

        def runaway(rng: Random) -> int:
            return self.output_cap if rng.random() < self.runaway_ratio else output(rng)

        return Kind(
            prompt=long_prompt,
            output=runaway,
            prefixes=chains[: self.prefixes],
            prefix_tokens=self.prefix_tokens,
            adapters=tuple(f"adapter-{at}" for at in range(self.adapters)),
            acceptance=lambda rng: min(0.98, max(0.02, rng.gauss(ratio, 0.08))),
            output_cap=self.output_cap,
            hang_up_ratio=self.hang_up_ratio,
        )


CHAT = Shape()
DOCUMENTS = Shape(prefix_tokens=3008, prefixes=8, prompt=300.0, output=120.0)
"""Long documents that many ask about, short answers."""

SUMMARIES = Shape(prompt=2500.0, output=60.0, prefixes=0)


class Setting(Struct, kw_only=True):
    """All that a server is started with; faults change it before the start."""

    hardware: Hardware
    launch: Launch
    shape: Shape = CHAT
    running: float = 24.0
    """Requests in the batch, in the mean, when all is well."""
    rate_per_s: float | None = None
    """Requests a second when all is well, where that is not told by `running`."""
    length_ratio: float = 1.0
    load_ratio: float = 1.0
    """How much longer requests and how much higher the load are than a fault's own, where that
    fault comes with requests or a load of its own."""
    draft_cost_ratio: float = 0.0
    model: str = "served"
    form: str = NEWEST
    fuller_gpu_page: bool = False

    def rate_for(self, running: float, shape: Shape | None = None) -> float:
        """Requests a second that keep so many in the batch, with the prefix cache warm."""
        shape = shape or self.shape
        steps = GpuSteps(self.hardware, self.launch.num_speculative_tokens, self.draft_cost_ratio)
        drafted = self.launch.num_speculative_tokens
        per_step = 1 + sum(shape.acceptance_ratio ** (at + 1) for at in range(drafted))
        fresh = shape.prompt if self.launch.enable_prefix_caching else shape.prompt_tokens
        fresh += shape.long_ratio * shape.long_tokens
        context = running * (shape.prompt_tokens + shape.output / 2)
        rate = 1.0
        for _ in range(_ROUNDS):
            mixed_s = steps.step_s(Work(round(running), context, fresh, 0.0, 1 + drafted))
            plain_s = steps.step_s(Work(round(running), context, 0.0, 0.0, 1 + drafted))
            # Each prompt makes one step longer for everybody.
            decode_s = shape.output / per_step * plain_s
            others = rate * decode_s * (mixed_s - plain_s)
            rate = (rate + running / (decode_s + others + mixed_s)) / 2
        return rate


class Writer(Protocol):
    """Writes an engine's pages."""

    def page(self) -> str:
        """The page now."""
        ...


@dataclass(slots=True)
class Server:
    """A running server. What faults do to it, they do to its parts."""

    setting: Setting
    rng: Random
    engine: Engine = field(init=False)
    steps: GpuSteps = field(init=False)
    source: Open = field(init=False)
    exporter: Exporter = field(init=False)
    shape: Shape = field(init=False)
    rate_per_s: float = field(init=False)
    down: bool = False
    factor: Callable[[float], float] = lambda _now_s: 1.0
    """What the rate of requests is multiplied by at a moment."""
    _writer: Writer = field(init=False)
    _chains: list[Chain] = field(default_factory=list[Chain])

    def __post_init__(self) -> None:
        setting = self.setting
        self.shape = setting.shape
        self.steps = GpuSteps(
            setting.hardware, setting.launch.num_speculative_tokens, setting.draft_cost_ratio
        )
        self.rate_per_s = setting.rate_per_s or setting.rate_for(setting.running)
        self.source = Open(
            self.shape.kind(self._chains),
            lambda now_s: self.rate_per_s * self.factor(now_s),
            self.rng,
        )
        self._start(0.0, self.source)
        self.exporter = Exporter(self.steps, self.rng, fuller=setting.fuller_gpu_page)

    def _start(self, now_s: float, source: Source) -> None:
        setting = self.setting
        self.engine = Engine(setting.launch, self.steps, source, self.rng)
        self.engine.now_s = now_s
        self._writer = PageWriter(
            self.engine, model=setting.model, form=setting.form, started_s=START_S + now_s
        )

    def restart(self, now_s: float) -> None:
        """Replace the process: all caches are empty, all counters zero."""
        for chain in self._chains:
            chain.blocks, chain.refs, chain.filling = 0.0, 0, False
        self.down = False
        self.source.resume(now_s)
        self._start(now_s, self.engine.source)

    def reshape(self, **changes: float) -> None:
        """Let requests be otherwise from now on."""
        self.shape = replace(self.shape, **changes)
        self.source.kind = self.shape.kind(self._chains)

    def scrape(self, t_s: float) -> Entry:
        """The server's page at a moment, as a capture's entry."""
        self.engine.run(t_s)
        if self.down:
            return Entry(START_S + t_s, None, error="connection refused")
        return Entry(START_S + t_s, self._writer.page(), status=200)


Begin = Callable[[Server], None]


def moments(
    server: Server, *, for_s: float, at: dict[float, Begin], every_s: float = SCRAPE_S
) -> Iterator[float]:
    """The moments at which a server is scraped, as it comes to them; `at` a moment something is
    done to it."""
    due = sorted(at.items())
    for turn in range(1, round(for_s / every_s) + 1):
        t_s = turn * every_s
        while due and due[0][0] <= t_s:
            moment_s, begin = due.pop(0)
            server.engine.run(moment_s)
            begin(server)
        server.engine.run(t_s)
        yield t_s


def scrapes(
    server: Server, *, for_s: float, at: dict[float, Begin], every_s: float = SCRAPE_S
) -> Iterator[Entry]:
    """Scrapes of a server for so long."""
    for t_s in moments(server, for_s=for_s, at=at, every_s=every_s):
        yield server.scrape(t_s)
