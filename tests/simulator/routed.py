"""Pools of replicas behind a router: which prompt tokens each replica's prefix cache has.

A request is served at once: its prompt is looked up in the replica's blocks, and what is missing
is computed and cached. That is all that routing changes; steps and queues are not simulated, and
TTFT is the time of the computed tokens on a server that is busy with the others' prompts.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import exp, inf, log

from msgspec import Struct

from kneewatch.collector.window import Buckets
from kneewatch.diagnose.fleet.inventory import Usual, usual_of
from tests.fleets import TOKENS_LE, TTFT_LE
from tests.simulator.blocks import Blocks, Chain

BLOCK_TOKENS = 16
WINDOW_S = 60.0
PREFILL_TOKENS_PER_S = 12_000.0
FIRST_STEP_S = 0.03
BUSY_OVER_S = 30.0
"""Time constant of how busy a replica is with prompts."""

HELD_RATIO = 0.4
"""The share of a cache that live requests hold."""


class Workload(Struct, frozen=True):
    """Sessions of 1 to `turns` turns. Each prompt starts with one of `systems` system prompts, then
    `documents_each` of `documents` documents, then the session so far, then a new question."""

    name: str
    turns: int = 1
    systems: int = 1
    system_tokens: int = 0
    documents: int = 0
    documents_each: int = 0
    document_tokens: int = 0
    question_tokens: float = 100.0
    answer_tokens: float = 200.0
    spread: float = 0.7
    """Standard deviation of the logarithm of questions and answers."""
    think_s: float = 25.0


Part = tuple[int, int]
"""A run of a prompt's tokens: the key of its content, and tokens."""


class Prompt(Struct, frozen=True):
    """A request that arrives: its session, its parts in order, and what it adds at their end."""

    t_s: float
    session: int
    parts: tuple[Part, ...]
    new_tokens: int
    answer_tokens: int

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return sum(tokens for _, tokens in self.parts) + self.new_tokens


class Traffic(Struct):
    """Prompts in the order of arrival, `per_s` on average; both may be changed in between."""

    workload: Workload
    per_s: float
    rng: random.Random
    nonce: bool = False
    """Whether a token that differs starts each prompt."""
    _keys: int = 1_000_000

    def prompts(self) -> Iterator[Prompt]:
        """All prompts, without end."""
        due: list[tuple[float, int, Workload, tuple[Part, ...], int, int]] = []
        start_s = 0.0
        while True:
            mean_turns = (1 + self.workload.turns) / 2
            start_s += self.rng.expovariate(self.per_s / mean_turns)
            key = self._key()
            turns = self.rng.randint(1, self.workload.turns)
            heappush(due, (start_s, key, self.workload, self._shared(), turns, 0))
            while due and due[0][0] <= start_s:
                t_s, session, kind, shared, left, said = heappop(due)
                question, answer = (
                    self._length(kind.question_tokens, kind.spread),
                    self._length(kind.answer_tokens, kind.spread),
                )
                parts = (*shared, (session, said))
                if self.nonce:
                    parts = tuple((self._key(), tokens) for _, tokens in parts)
                yield Prompt(t_s, session, parts, question, answer)
                if left > 1:
                    pause_s = 1.0 + self.rng.expovariate(1 / kind.think_s)
                    said += question + answer
                    heappush(due, (t_s + pause_s, session, kind, shared, left - 1, said))

    def _shared(self) -> tuple[Part, ...]:
        kind, rng = self.workload, self.rng
        system = int(kind.systems * rng.random() ** 2)
        # Few documents are asked for often: the rank is log-uniform.
        ranks = [int(kind.documents ** rng.random()) for _ in range(kind.documents_each)]
        return (
            (system, kind.system_tokens),
            *((1000 + rank, kind.document_tokens) for rank in ranks),
        )

    def _length(self, middle_tokens: float, spread: float) -> int:
        return max(1, int(self.rng.lognormvariate(log(middle_tokens), spread)))

    def _key(self) -> int:
        self._keys += 1
        return self._keys


class Served(Struct, frozen=True):
    """A served prompt, as the replica counts it."""

    t_s: float
    prompt_tokens: int
    hit_tokens: int
    ttft_s: float
    answer_tokens: int

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the cache did not have."""
        return self.prompt_tokens - self.hit_tokens


@dataclass(slots=True)
class Server:
    """One replica: its blocks, and what it served within the window."""

    number: int
    capacity_tokens: int
    started_s: float
    served: deque[Served] = field(default_factory=deque[Served])
    busy_tokens_per_s: float = 0.0

    def __post_init__(self) -> None:
        self.restart(self.started_s)

    def restart(self, t_s: float) -> None:
        """Begin with an empty cache."""
        usable = int(self.capacity_tokens * (1 - HELD_RATIO)) // BLOCK_TOKENS
        self.started_s, self._blocks, self._chains = t_s, Blocks(usable, BLOCK_TOKENS), {}
        self.served.clear()

    _blocks: Blocks = field(init=False)
    _chains: dict[int, Chain] = field(init=False)
    _last_s: float = 0.0

    def serve(self, prompt: Prompt) -> Served:
        """Look a prompt up, and cache it with its answer."""
        held: list[Chain] = []
        hit_blocks, whole = 0.0, True
        *shared, (session, said) = prompt.parts
        for key, tokens in shared:
            chain, needed = self._held(key, held), tokens // BLOCK_TOKENS
            if whole:
                hit_blocks += min(chain.blocks, needed)
                whole = chain.blocks >= needed
            self._fill(chain, needed)
        chain = self._held(session, held)
        hit_blocks += min(chain.blocks, said // BLOCK_TOKENS) if whole else 0.0
        self._fill(chain, (said + prompt.new_tokens + prompt.answer_tokens) // BLOCK_TOKENS)
        for chain in reversed(held):
            self._blocks.release(chain)
        return self._count(prompt, int(hit_blocks) * BLOCK_TOKENS)

    def _held(self, key: int, held: list[Chain]) -> Chain:
        chain = self._chains.setdefault(key, Chain())
        self._blocks.hold(chain)
        held.append(chain)
        return chain

    def _fill(self, chain: Chain, needed: int) -> None:
        missing = max(0.0, needed - chain.blocks)
        if self._blocks.take(missing):
            chain.blocks += missing

    def _count(self, prompt: Prompt, hit_tokens: int) -> Served:
        computed = prompt.tokens - hit_tokens
        kept = exp(-(prompt.t_s - self._last_s) / BUSY_OVER_S)
        self.busy_tokens_per_s = self.busy_tokens_per_s * kept + computed / BUSY_OVER_S
        self._last_s = prompt.t_s
        idle = max(0.05, 1 - self.busy_tokens_per_s / PREFILL_TOKENS_PER_S)
        ttft_s = FIRST_STEP_S + computed / PREFILL_TOKENS_PER_S / idle
        row = Served(prompt.t_s, prompt.tokens, hit_tokens, ttft_s, prompt.answer_tokens)
        self.served.append(row)
        return row

    def values(self, t_s: float) -> dict[str, float]:
        """The signals of the window that ends at a moment."""
        while self.served and self.served[0].t_s < t_s - WINDOW_S:
            self.served.popleft()
        newest = signals(
            [row for row in self.served if row.t_s >= t_s - WINDOW_S / 2], WINDOW_S / 2
        )
        hits = newest.get("prefix_hit_ratio")
        return {
            **signals(self.served, WINDOW_S),
            **({} if hits is None else {"prefix_hit_recent_ratio": hits}),
            "kv_capacity_tokens": float(self.capacity_tokens),
            "kv_usage_ratio": HELD_RATIO,
            "kv_usage_avg_ratio": HELD_RATIO,
            "age_s": t_s - self.started_s,
        }


def signals(served: Sequence[Served] | deque[Served], span_s: float) -> dict[str, float]:
    """What diagnose/fleet reads of served prompts, by the arithmetic of Prometheus."""
    prompts = sum(row.prompt_tokens for row in served)
    hits = sum(row.hit_tokens for row in served)
    prefill_s = sum(row.computed_tokens / PREFILL_TOKENS_PER_S for row in served)
    values = {
        "arrival_per_s": len(served) / span_s,
        "prefix_query_per_s": prompts / span_s,
        "computed_prompt_tokens_per_s": (prompts - hits) / span_s,
        "generation_tokens_per_s": sum(row.answer_tokens for row in served) / span_s,
    }
    if not prompts:
        return values
    ttft = buckets(TTFT_LE, [row.ttft_s for row in served])
    computed = buckets(TOKENS_LE, [row.computed_tokens for row in served])
    lengths = buckets(TOKENS_LE, [row.prompt_tokens for row in served])
    quantiles = {
        "ttft_p50_s": ttft.quantile(0.5),
        "ttft_p99_s": ttft.quantile(0.99),
        "prefill_tokens_p10": computed.quantile(0.1),
        "prefill_tokens_p90": computed.quantile(0.9),
        "prompt_tokens_p50": lengths.quantile(0.5),
    }
    values |= {"prefix_hit_ratio": hits / prompts, "prefill_mean_s": prefill_s / len(served)}
    return values | {key: value for key, value in quantiles.items() if value is not None}


def buckets(edges: Sequence[float], values: Sequence[float]) -> Buckets:
    """A histogram of values."""
    bounds = (*map(float, edges), inf)
    ordered = sorted(values)
    return Buckets.of(bounds, tuple(float(bisect_right(ordered, edge)) for edge in bounds))


class Pool(Struct):
    """Replicas behind a router: `sticky` and `prefix` hash consistently, by session and by the
    first document or system prompt; `modulo` hashes sessions by the number of replicas."""

    router: str
    servers: list[Server]
    _turn: int = 0

    def route(self, prompt: Prompt) -> Server:
        """The replica that serves a prompt."""
        servers, session = self.servers, prompt.session
        if self.router == "round robin":
            self._turn += 1
            return servers[self._turn % len(servers)]
        if self.router == "least loaded":
            return min(servers, key=lambda server: server.busy_tokens_per_s)
        if self.router == "modulo":
            return servers[hash((session, 7)) % len(servers)]
        key = prompt.parts[-2][0] if self.router == "prefix" else session
        return max(servers, key=lambda server: hash((key, server.number)))


# --- Cases ----------------------------------------------------------------------------------------

WARM_S, PAST_S, JUDGED_S, STEP_S = 500.0, 900.0, 240.0, 20.0
CHANGE_S = WARM_S + PAST_S

CHANGES: Mapping[str, str] = {
    "": "nothing changes",
    "to round robin": "the router starts to turn in a circle",
    "to least loaded": "the router starts to look at the load alone",
    "rehash": "twice the replicas, sessions hashed modulo their number",
    "scale-out": "twice the replicas, sessions hashed consistently",
    "nonce": "a token that differs starts each prompt",
    "load x2": "twice the sessions",
    "other prompts": "new sessions are long single questions",
    "restarts": "replicas restart one by one, a minute apart",
}
BAD_CHANGES = ("to round robin", "to least loaded", "rehash")


class RoutedCase(Struct, frozen=True):
    """A pool, and what changes at CHANGE_S. `young`: its past is unknown."""

    workload: Workload
    replicas: int
    router: str
    capacity_tokens: int
    change: str = ""
    young: bool = False
    per_s: float = 1.0
    """Requests a second and replica."""


class RoutedMoment(Struct, frozen=True):
    """A pool at one moment: its replicas' values by name, and seconds since the change."""

    after_s: float
    values: Mapping[str, Mapping[str, float]]


class Routed(Struct, frozen=True):
    """A played case: `usual` and `lengths` are its past, `harm` the computed tokens in the minutes
    after the change over those before."""

    case: RoutedCase
    usual: Usual | None
    lengths: Mapping[float, float]
    moments: Sequence[RoutedMoment]
    harm: float


LONG = Workload("long questions", question_tokens=3000.0, answer_tokens=100.0)


def play(case: RoutedCase, seed: int) -> Routed:
    """Serve a case's prompts from start to end."""
    rng = random.Random(f"{case} {seed}")
    traffic = Traffic(case.workload, case.per_s * case.replicas, rng)
    servers = [Server(at, case.capacity_tokens, -1e5) for at in range(case.replicas)]
    pool = Pool(case.router, servers)
    past: list[Served] = []
    after: list[Served] = []
    moments: list[RoutedMoment] = []
    next_s, changed = CHANGE_S, False
    for prompt in traffic.prompts():
        if not changed and prompt.t_s >= CHANGE_S:
            change(case.change, pool, traffic)
            changed = True
        if prompt.t_s >= next_s:
            rows = {f"r{server.number}": server.values(next_s) for server in pool.servers}
            moments.append(RoutedMoment(next_s - CHANGE_S, rows))
            next_s += STEP_S
            at = len(moments) // 3
            if case.change == "restarts" and len(moments) % 3 == 1 and at < len(servers):
                servers[at].restart(next_s)
        if prompt.t_s >= CHANGE_S + JUDGED_S:
            break
        row = pool.route(prompt).serve(prompt)
        if WARM_S <= row.t_s < CHANGE_S:
            past.append(row)
        elif CHANGE_S + 30.0 <= row.t_s < CHANGE_S + 180.0:
            after.append(row)
    lengths = buckets(TOKENS_LE, [row.prompt_tokens for row in past])
    return Routed(
        case,
        None if case.young else usual_of({900.0: signals(past, PAST_S)}),
        {} if case.young else dict(zip(lengths.bounds, lengths.rates_per_s, strict=True)),
        moments,
        missed(after) / missed(past),
    )


def missed(served: Sequence[Served]) -> float:
    """The share of prompt tokens that was computed."""
    return sum(row.computed_tokens for row in served) / sum(row.prompt_tokens for row in served)


def change(name: str, pool: Pool, traffic: Traffic) -> None:
    """Do what CHANGES says to a running pool."""
    if name in ("to round robin", "to least loaded"):
        pool.router = name.removeprefix("to ")
    elif name in ("rehash", "scale-out"):
        more = [
            Server(len(pool.servers) + at, pool.servers[0].capacity_tokens, CHANGE_S)
            for at in range(len(pool.servers))
        ]
        pool.servers += more
    elif name == "nonce":
        traffic.nonce = True
    elif name == "load x2":
        traffic.per_s *= 2
    elif name == "other prompts":
        traffic.workload = LONG


CHAT = Workload("chat", turns=12, systems=3, system_tokens=400)
SHORT_CHAT = Workload("short chat", turns=3, systems=4, system_tokens=800, question_tokens=300.0)
RAG = Workload(
    "documents", documents=400, documents_each=1, document_tokens=4000, system_tokens=300
)
AGENTS = Workload(
    "agents",
    turns=24,
    system_tokens=3000,
    question_tokens=600.0,
    answer_tokens=150.0,
    think_s=6.0,
)
SYSTEMS = Workload("system prompts", systems=5, system_tokens=2000, question_tokens=400.0)
NOTHING = Workload("nothing shared", question_tokens=1200.0, spread=1.0)
WORKLOADS = (CHAT, SHORT_CHAT, RAG, AGENTS, SYSTEMS, NOTHING)

SMALL, LARGE = 60_000, 600_000
"""Capacities of a replica's cache in tokens."""


SIZES = ((2, LARGE), (4, SMALL))
"""Replicas of a pool, and the capacity of each one's cache."""


def cases(sizes: Sequence[tuple[int, int]] = SIZES) -> list[RoutedCase]:
    """Every workload with every change and with unknown pasts, on pools of these sizes."""
    all_cases: list[RoutedCase] = []
    for workload in WORKLOADS:
        good = "prefix" if workload.documents else "sticky"
        for replicas, capacity in sizes:
            all_cases += [
                RoutedCase(
                    workload, replicas, "modulo" if name == "rehash" else good, capacity, name
                )
                for name in CHANGES
            ]
            all_cases += [
                RoutedCase(workload, replicas, router, capacity, young=young)
                for router, young in ((good, True), ("round robin", True), ("round robin", False))
            ]
    return all_cases
