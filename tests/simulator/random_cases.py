"""Random cases: a drawn server under a drawn load, with a drawn fault or none.

A case is its seed. What is drawn is what operators choose and what clients do, over the ranges that
are seen in operation; nothing is drawn again for what is said of it.
"""

from __future__ import annotations

import math
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from tests.simulator.cases import FULLER, LASTS_S, MACHINES, VERSIONS, Case, hardware_of
from tests.simulator.days import bursts
from tests.simulator.faults import FAULTS, Fault, prompt_bound_per_s
from tests.simulator.gpus import chunk_tokens
from tests.simulator.harm import Ledger
from tests.simulator.page import NEWEST
from tests.simulator.scheduler import Launch
from tests.simulator.server import Begin, Server, Setting, Shape, moments

RATE_MAX_PER_S = 20.0
"""More requests than these cost too much of this machine's time."""

HANG_UPS = 0.01
"""The share of clients that go away before their answer is complete."""

DRAINED_S, STARTS_IN_S = 120.0, (45.0, 200.0)
SEATS = (32, 64, 128, 256, 512)
BLOCK_SIZES = (16, 16, 16, 32, 64, 128)
SCRAPES_S = (1.0, 2.0, 5.0, 5.0, 5.0, 10.0, 15.0, 15.0)
MOST_OF_PROMPTS = 0.9
"""Share of what the GPUs can prefill that is taken for their capacity: they decode as well."""

DEPLOY = Fault(cause="target_down", name="a deploy", also=frozenset({"engine_restarted"}))
CACHING_OFF = Fault(cause="prefix_cache_off", name="caching off")
OF_REQUESTS = frozenset({"prefix_cache_off", "prefix_reuse_lost", "prefix_churn"})
"""Faults that need the prefix cache as they set it."""


class Load(Struct, frozen=True, kw_only=True):
    """What comes over time: the rate is multiplied by a wave and by bursts. A deploy drains the
    server from `deploy_s` on, and it starts for `starts_in_s`."""

    wave: float
    wave_s: float
    phase: float
    bursts_s: tuple[tuple[float, float, float], ...]
    deploy_s: float = math.inf
    starts_in_s: float = 0.0

    @property
    def down_s(self) -> float:
        """When the process of before the deploy ends."""
        return self.deploy_s + DRAINED_S

    @property
    def up_s(self) -> float:
        """When the process of after the deploy is up."""
        return self.down_s + self.starts_in_s

    def factor(self, now_s: float) -> float:
        """What the rate of requests is multiplied by at a moment."""
        if self.deploy_s <= now_s < self.up_s:
            return 0.0
        wave = 1 + self.wave * math.sin(now_s / self.wave_s * 2 * math.pi + self.phase)
        burst = max((much for start, end, much in self.bursts_s if start <= now_s < end), default=1)
        return wave * burst


class RandomCase(Case, frozen=True, kw_only=True):
    """A case as it was drawn. `share`: its load in shares of what the server could take; `ratios`:
    latency targets in multiples of its healthy P99, of TTFT and of ITL."""

    seed: int
    launch: Launch
    shape: Shape
    share: float
    drafting: bool
    load: Load
    fuller_gpu_page: bool
    length_ratio: float
    ratios: tuple[float | None, float | None]

    @property
    def ends_s(self) -> float:
        """When the last scrape is; without a fault it is healthy until then."""
        return self.begins_s + (LASTS_S if self.faults else 0.0)

    def healthy_setting(self) -> Setting:
        """What a server without faults is started with."""
        setting = Setting(
            hardware=hardware_of(self.machine),
            launch=replace(self.launch),
            shape=self.shape,
            form=self.form,
            fuller_gpu_page=self.fuller_gpu_page,
            length_ratio=self.length_ratio,
            load_ratio=2 * self.share,
        )
        if self.drafting:
            setting.launch.num_speculative_tokens, setting.draft_cost_ratio = 3, 0.05
        setting.running = _running(setting, self.share)
        return setting

    def setting(self) -> Setting:
        """What the server is started with: all requests with the tail that was drawn."""
        own = Case.setting(self)
        own.shape = replace(
            own.shape,
            sigma=self.shape.sigma,
            hang_up_ratio=HANG_UPS,
            acceptance_ratio=own.shape.acceptance_ratio or self.shape.acceptance_ratio,
        )
        return own

    def server(self, seed: int) -> Server:
        """The server, not yet started."""
        server = Case.server(self, seed)
        server.factor = self.load.factor
        return server

    def events(self) -> dict[float, Begin]:
        """What is done to the server, and when, in seconds from its start."""
        return Case.events(self) | self._deploy()

    def _deploy(self) -> dict[float, Begin]:
        if math.isinf(self.load.deploy_s):
            return {}
        return {self.load.down_s: _end, self.load.up_s: self._start}

    def _start(self, server: Server) -> None:
        server.restart(self.load.up_s)

    def without_fault(self) -> Ledger:
        """The books of the same server and load had the fault not come."""
        server = self.server(self.seed)
        if any(fault.cause == "prefix_cache_off" for fault in self.faults):
            server.setting.launch.enable_prefix_caching = True
        return self._lived(server, self._deploy())

    def without_drafts(self) -> Ledger:
        """The books with the fault, had the server not speculated."""
        setting = self.setting()
        setting.rate_per_s = setting.rate_per_s or setting.rate_for(setting.running)
        setting.launch.num_speculative_tokens = 0
        server = Server(setting, Random(self.seed), factor=self.load.factor)
        return self._lived(server, self.events())

    def _lived(self, server: Server, at: dict[float, Begin]) -> Ledger:
        ledger = Ledger()
        for t_s in moments(server, for_s=self.ends_s, at=at, every_s=self.scrape_s):
            ledger.note(t_s, server)
        return ledger


def _end(server: Server) -> None:
    server.down = True


def _running(setting: Setting, share: float) -> float:
    """Requests in the batch at this share of the load that seats, KV cache and GPUs allow."""
    launch, shape = setting.launch, setting.shape
    shared = shape.prefixes * shape.prefix_tokens if launch.enable_prefix_caching else 0
    held = shape.held_tokens + (0 if launch.enable_prefix_caching else shape.prefix_tokens)
    room = (launch.num_gpu_blocks * launch.block_size - shared) / held
    most = max(1.0, min(launch.max_num_seqs, room))
    fresh = shape.prompt if launch.enable_prefix_caching else shape.prompt_tokens
    bound_per_s = MOST_OF_PROMPTS * prompt_bound_per_s(setting, fresh)
    wanted_per_s = min(share * min(setting.rate_for(most), bound_per_s), RATE_MAX_PER_S)
    low, high = 0.01, most
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if setting.rate_for(middle) < wanted_per_s else (low, middle)
    return high


def random_case(seed: int) -> RandomCase:
    """The case of a seed."""
    rng = Random(f"{seed} random case")
    planted = _fault(rng)
    machine = rng.choice(list(MACHINES))
    launch = _launch(rng, machine, planted)
    drafting = rng.random() < 0.15
    form = NEWEST if drafting or rng.random() < 0.6 else rng.choice(VERSIONS)
    scrape_s = rng.choice(SCRAPES_S)
    begins_s = rng.uniform(240.0, 420.0) // 30 * 30
    load, troubles = _load(rng, begins_s), list[Fault]()
    if planted is None:
        begins_s += LASTS_S
    if rng.random() < 0.2:
        load = replace(load, deploy_s=rng.uniform(60, 150), starts_in_s=rng.uniform(*STARTS_IN_S))
        begins_s = max(begins_s, (load.up_s + 240) // 30 * 30)
        troubles.append(DEPLOY)
    if not launch.enable_prefix_caching:
        troubles.append(CACHING_OFF)
    return RandomCase(
        group="random",
        name=f"seed {seed}",
        seed=seed,
        faults=() if planted is None else (planted,),
        machine=machine,
        form=form,
        gpu_page=rng.random() < 0.7 or (planted is not None and planted.cause == "gpu_fault"),
        wanted=frozenset(() if planted is None else {planted.cause}),
        trouble=_together(troubles),
        begins_s=begins_s,
        scrape_s=scrape_s,
        launch=launch,
        shape=_shape(rng, drafting=drafting),
        share=rng.uniform(0.05, 0.8),
        drafting=drafting,
        load=load,
        fuller_gpu_page=machine in FULLER or rng.random() < 0.3,
        length_ratio=math.exp(rng.gauss(0.0, 0.4)),
        ratios=(_ratio(rng), _ratio(rng)),
    )


def _fault(rng: Random) -> Fault | None:
    if rng.random() < 0.35:
        return None
    drawn = rng.choice(FAULTS)
    low, high = drawn.strength, drawn.mildest
    if low == high:
        return drawn
    return replace(drawn, strength=low * (high / low) ** rng.random())


def _launch(rng: Random, machine: str, planted: Fault | None) -> Launch:
    device, size = hardware_of(machine), rng.choice(BLOCK_SIZES)
    own = planted is not None and planted.cause in OF_REQUESTS
    return Launch(
        num_gpu_blocks=int(device.blocks(size) * rng.uniform(0.3, 1.0)),
        block_size=size,
        max_num_seqs=rng.choice(SEATS),
        max_num_batched_tokens=round(chunk_tokens(device) * rng.choice((0.5, 1, 1, 1, 2))),
        enable_prefix_caching=own or rng.random() < 0.85,
    )


def _shape(rng: Random, *, drafting: bool) -> Shape:
    output = math.exp(rng.uniform(math.log(60), math.log(800)))
    return Shape(
        prompt=math.exp(rng.uniform(math.log(80), math.log(3000))),
        output=output,
        output_cap=round(output * rng.choice((3, 6, 12))),
        prefixes=rng.choice((0, 1, 4, 8, 20)),
        prefix_tokens=rng.choice((256, 512, 1024, 2048)),
        acceptance_ratio=rng.uniform(0.6, 0.85) if drafting else 0.0,
        sigma=rng.uniform(0.4, 1.1),
    )


def _load(rng: Random, quiet_s: float) -> Load:
    drawn = bursts(rng, quiet_s + LASTS_S) if rng.random() < 0.4 else []
    return Load(
        wave=rng.uniform(0.0, 0.3),
        wave_s=rng.uniform(600.0, 7200.0),
        phase=rng.uniform(0.0, 2 * math.pi),
        bursts_s=tuple(drawn),
    )


def _ratio(rng: Random) -> float | None:
    return math.exp(rng.uniform(math.log(0.7), math.log(5.0))) if rng.random() < 0.3 else None


def _together(troubles: list[Fault]) -> Fault | None:
    if not troubles:
        return None
    first, *rest = troubles
    return replace(first, also=first.also.union(*({r.cause} | r.also for r in rest)))
