"""Cases without quiet times: faults that are there from the first scrape on, and servers that are
always a little in trouble before a fault comes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from tests.simulator.cases import Case, fault
from tests.simulator.faults import FAULTS, Fault, prompt_bound_per_s, seats_for
from tests.simulator.gpus import GpuSteps, Hardware
from tests.simulator.requests import Kind, Request
from tests.simulator.server import Server, Setting, Shape
from tests.simulator.work import Work

FROM_THE_START, NEVER_QUIET, LOST = "from the start", "never quiet", "lost under stalls"
SILENCE = "-"

SWEPT_MACHINES = ("8B on H100", "70B on 4 H100", "70B FP8 on B200")
NEVER_QUIET_MACHINES = SWEPT_MACHINES[:2]
"""Fewer than all: a sweep takes no longer than the cases without it."""


class Accepted(Struct, frozen=True, kw_only=True):
    """What may come first of a fault that a page without a past cannot show well, and why.

    `wanted`: whether the cause must be told beside it. `gpu_page`: the cases it is for.
    """

    cause: str
    words: frozenset[str]
    why: str
    wanted: bool = False
    gpu_page: bool = True


ACCEPTED = (
    Accepted(
        cause="prefix_reuse_lost",
        words=frozenset({SILENCE, "prefill_bound", "queue_saturation"}),
        why="nothing shows that prompts shared a prefix once: a note at most, or what follows",
    ),
    Accepted(
        cause="runaway_generation",
        words=frozenset({SILENCE, "runaway_generation"}),
        why="how many answers end at their limit depends on the use: no past, no lengths stated",
    ),
    Accepted(
        cause="gpu_fault",
        words=frozenset({"engine_stalled"}),
        why="an Xid has no date and may be weeks old; that no token comes out is seen now",
        wanted=True,
    ),
    Accepted(
        cause="admission_limit",
        words=frozenset({"admission_limit", "queue_saturation"}),
        why="without the GPUs and a quiet ITL nothing shows whether a larger batch would help",
        gpu_page=False,
    ),
)

QUEUED = 3
"""Requests that are always in the queue: less than a second's wait, which hurts nobody."""

POOR_RATIO = 0.35


class ToppedUp:
    """A server's own requests, and short ones from a client that keeps some in the queue."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._kind, self._shape = Kind(prompt=_no_tokens, output=_no_tokens), Shape()

    def next_s(self) -> float:
        """When the next one comes."""
        engine, own_s = self._server.engine, self._server.source.next_s()
        short = len(engine.scheduler.waiting) < QUEUED
        return min(own_s, engine.now_s) if short else own_s

    def take(self) -> Request:
        """The next one."""
        now_s, source = self._server.engine.now_s, self._server.source
        if source.next_s() <= now_s:
            return source.take()
        if self._shape is not self._server.shape:
            # The client's requests change with all others, but for their prompts.
            self._shape = self._server.shape
            self._kind = replace(self._shape, prompt=64.0, prefixes=0, long_ratio=0.0).kind([])
        return self._kind.make(now_s, self._server.rng)

    def ended(self, request: Request, now_s: float) -> None:
        """Nobody waits for it: the queue is topped up by its length."""


def _no_tokens(_rng: Random) -> int:
    return 0


def _top_up(server: Server, _strength: float) -> None:
    # Seats for what runs of its own accord when all is well, and no more.
    server.setting.launch.max_num_seqs = seats_for(server.setting)
    server.engine.source = ToppedUp(server)


def _poor_drafts(setting: Setting) -> None:
    fault("spec_decode_poor").start(setting)
    setting.shape = replace(setting.shape, acceptance_ratio=POOR_RATIO)


TROUBLES = (
    replace(fault("prefill_interference"), name="constant prefill stalls"),
    Fault(
        cause="admission_limit",
        name="a small steady queue",
        lay=_top_up,
        also=frozenset({"queue_saturation"}),
    ),
    Fault(cause="spec_decode_poor", name="a poor draft", start=_poor_drafts),
)
"""What a server has from its start on; its cause is true for ever and may come first."""

UNSUITED = {
    "prefill_interference": {
        "kv_pressure": "a book is longer than the small cache",
        "prefix_churn": "each book evicts all documents: they churn from the start",
        "queue_saturation": "whole prompts fill the cache: the flood becomes KV pressure",
    },
    "admission_limit": {
        "kv_pressure": "who tops up the queue fills the small cache",
        "queue_saturation": "the batch is at its seats as well as short of prompt tokens",
        "prefill_bound": "the queue alone misses the TTFT target",
    },
}
"""Faults that do not go with a trouble, and why."""


def quietless_cases() -> Iterator[Case]:
    """Every case without quiet times."""
    yield from _from_the_start()
    for machine in NEVER_QUIET_MACHINES:
        for trouble in TROUBLES:
            for planted in FAULTS:
                if planted.cause not in {trouble.cause, *UNSUITED.get(trouble.cause, ())}:
                    yield _in_trouble(planted, trouble, machine)
    for machine in ("70B on 4 H100", "32B on H200"):
        for kept_ratio in (0.0, 0.15):
            yield _lost_under_stalls(machine, kept_ratio)


def _from_the_start() -> Iterator[Case]:
    for machine in SWEPT_MACHINES:
        for planted in FAULTS:
            for gpu_page in (True, False):
                if not gpu_page and planted.cause not in ("admission_limit", "queue_saturation"):
                    continue
                accepted = next(
                    (a for a in ACCEPTED if (a.cause, a.gpu_page) == (planted.cause, gpu_page)),
                    None,
                )
                must_say = accepted is None or accepted.wanted
                yield Case(
                    group=FROM_THE_START,
                    name=planted.name if gpu_page else f"{planted.name}, no GPU page",
                    faults=(planted,),
                    machine=machine,
                    gpu_page=gpu_page,
                    wanted=frozenset({planted.cause} if must_say else ()),
                    accepted=accepted.words if accepted else frozenset(),
                    begins_s=0.0,
                )


def _in_trouble(planted: Fault, trouble: Fault, machine: str) -> Case:
    return Case(
        group=NEVER_QUIET,
        name=f"{trouble.name}; {planted.name}",
        faults=(planted,),
        machine=machine,
        wanted=frozenset({planted.cause}),
        accepted=frozenset({trouble.cause}) | trouble.also,
        trouble=trouble,
    )


CHUNK_S, FRESH_EVERY_S = 1.0, 4.0
SHARED_LOAD = 10.0
"""Requests a second, against those that the GPUs could compute without what they share."""

QUEUE = 220


@cache
def _shared_tokens(hardware: Hardware) -> int:
    """A prompt that is computed for CHUNK_S."""
    steps, tokens = GpuSteps(hardware), 512
    while steps.step_s(Work(0, 0.0, tokens, tokens * tokens / 2, 1)) < CHUNK_S:
        tokens += 512
    return tokens


def _long_shared_prompts(setting: Setting) -> None:
    # A step takes a whole prompt: whenever one is fresh all streams pause for a second.
    shared = _shared_tokens(setting.hardware)
    setting.launch.max_num_batched_tokens = shared
    setting.shape = Shape(prompt=0.01 * shared, output=12.0, prefixes=4, prefix_tokens=shared)
    setting.rate_per_s = SHARED_LOAD * prompt_bound_per_s(setting, setting.shape.prompt_tokens)


def _fresh_now_and_then(server: Server, _strength: float) -> None:
    ratio = 1 / (FRESH_EVERY_S * server.rate_per_s)
    server.reshape(long_ratio=ratio, long_tokens=server.shape.prefix_tokens)


def _lose(server: Server, kept_ratio: float) -> None:
    """Prompts share only their first part; clients back off once the queue is long."""
    whole, begun_s = server.shape.prompt_tokens, server.engine.now_s
    before_per_s, bound_per_s = server.rate_per_s, prompt_bound_per_s(server.setting, whole)
    until_s = begun_s + QUEUE / (before_per_s - bound_per_s)
    kept = int(kept_ratio * whole)
    server.reshape(prefixes=4 if kept else 0, prefix_tokens=kept, prompt=whole - kept)

    def rate_per_s(now_s: float) -> float:
        return before_per_s if now_s < until_s else bound_per_s

    server.source.rate = rate_per_s


def _lost_under_stalls(machine: str, kept_ratio: float) -> Case:
    trouble = Fault(
        cause="prefill_interference",
        name="constant prefill stalls",
        start=_long_shared_prompts,
        lay=_fresh_now_and_then,
    )
    lost = Fault(
        cause="prefix_reuse_lost",
        name=f"hit ratio from 0.97 to {kept_ratio:g}, {QUEUE} queued",
        lay=_lose,
        strength=kept_ratio,
        also=frozenset({"queue_saturation"}),
    )
    return Case(
        group=LOST,
        name=lost.name,
        faults=(lost,),
        machine=machine,
        wanted=frozenset({lost.cause}),
        trouble=trouble,
    )
