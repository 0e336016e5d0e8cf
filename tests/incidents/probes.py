"""Incidents of the public threads' kinds with other numbers, from the step-by-step simulator: what
comes first, what is advised first, and whether and when a default install sends a message.

Each is healthy until `BEGINS_S`, unless `begins_s` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import Severity
from tests.incidents.incident import BEGUN_S
from tests.incidents.messages import first_message
from tests.incidents.pages import Load, Phases, pages
from tests.simulator.cases import hardware_of
from tests.simulator.faults import prompt_bound_per_s
from tests.simulator.gpus import chunk_tokens
from tests.simulator.requests import Closed
from tests.simulator.scheduler import Launch
from tests.simulator.server import SUMMARIES, Begin, Server, Setting, Shape, scrapes

BEGINS_S, LASTS_S = 300.0, 600.0
RIGHT_FROM = 0.8
"""Share of the judged scrapes in which a wanted cause must come first."""

PAGE_WITHIN_S = 130.0
"""Seconds from the beginning of a harm to the first message."""

Play = Callable[[float], Iterator[Entry]]
"""The scrapes of an incident, by the seconds between them."""


class Probe(Struct, frozen=True, kw_only=True):
    """An incident and what is expected.

    From `settle_s` after the beginning on, one of `first` comes first (empty: nothing at warning or
    worse), and `change` is the first flag that is advised to change. `paged`: whether a message
    must be sent, within PAGE_WITHIN_S; None where either is right.
    """

    name: str
    play: Play
    first: frozenset[str] = frozenset()
    change: str = ""
    paged: bool | None = None
    begins_s: float = BEGINS_S
    settle_s: float = 60.0
    windows_s: tuple[float, ...] = (60.0,)


class Heard(Struct, frozen=True):
    """What was said of a probe at one window."""

    probe: Probe
    window_s: float
    diagnoses: Sequence[Verdict]
    page_s: float | None = None

    @property
    def wrong(self) -> str:
        """What is wrong, in words; empty if nothing is."""
        return "; ".join(filter(None, (self._cause(), self._advice(), self._page())))

    @property
    def judged(self) -> Sequence[Verdict]:
        """The diagnoses that count."""
        from_s = self.probe.begins_s + self.probe.settle_s * max(1.0, self.window_s / 60.0)
        begun_s = self.diagnoses[0].t_s
        return [each for each in self.diagnoses if each.t_s - begun_s >= from_s]

    def _cause(self) -> str:
        if not self.probe.first:
            loud = [each for each in self.judged if each.severity >= Severity.WARNING]
            return f"says {first_word(loud[0])}" if loud else ""
        right = [each for each in self.judged if first_word(each) in self.probe.first]
        if len(right) >= RIGHT_FROM * len(self.judged):
            return ""
        others = [
            word for each in self.judged if (word := first_word(each)) not in self.probe.first
        ]
        return f"{len(right)} of {len(self.judged)} right, says {others[0]}"

    def _advice(self) -> str:
        if not self.probe.change:
            return ""
        flags = [self._advised(each) for each in self.judged]
        wrong = [flag for flag in flags if flag != self.probe.change]
        return f"advises {wrong[0]} first" if len(wrong) > (1 - RIGHT_FROM) * len(flags) else ""

    def _advised(self, diagnosis: Verdict) -> str:
        """The flag that is advised first, also while its figure is being measured."""
        if not diagnosis.recommendations:
            return "no change"
        first = diagnosis.recommendations[0]
        if first.changes:
            return first.changes[0].flag
        return self.probe.change if self.probe.change in first.summary else "no change"

    def _page(self) -> str:
        page_s, wanted = self.page_s, self.probe.paged
        if wanted is None or (page_s is None and not wanted):
            return ""
        if page_s is None:
            return "no message"
        after_s = page_s - self.probe.begins_s
        if not wanted or after_s < 0:
            return f"a message {after_s:.0f} s after the beginning"
        late = after_s > PAGE_WITHIN_S * max(1.0, self.window_s / 60.0)
        return f"a message only after {after_s:.0f} s" if late else ""


def first_word(diagnosis: Verdict) -> str:
    """The first cause's id if it is at warning or worse, else a dash."""
    first = diagnosis.causes[0] if diagnosis.causes else None
    return first.id if first is not None and first.severity >= Severity.WARNING else "-"


def heard(probe: Probe, window_s: float) -> Heard:
    """What is said of a probe by a server without settings, but for its window."""
    stream = TargetStream("m@r0", Profile(window_s=window_s), Limits())
    said = [diagnosis for entry in probe.play(5.0) for diagnosis in stream.replay(entry)]
    message = first_message(said)
    return Heard(probe, window_s, said, None if message is None else message.after_s)


# --- Servers --------------------------------------------------------------------------------------


def served(
    seed: int,
    *,
    events: Mapping[float, Begin] | None = None,
    running: float = 24.0,
    clients: int = 0,
    shape: Shape | None = None,
    rate_per_s: float | None = None,
    lasts_s: float = LASTS_S,
    **launch: int,
) -> Play:
    """A server with this launch under an open loop, or with so many clients that each wait for
    their answer."""

    def play(every_s: float) -> Iterator[Entry]:
        device = hardware_of("8B on H100")
        flags: dict[str, Any] = {
            "num_gpu_blocks": device.blocks(),
            "max_num_batched_tokens": chunk_tokens(device),
            **launch,
        }
        setting = Setting(hardware=device, launch=Launch(**flags), running=running)
        if shape is not None:
            setting.shape, setting.rate_per_s = shape, rate_per_s
        server = Server(setting, Random(seed))
        if clients:
            source = Closed(server.shape.kind([]), server.rng)
            source.resize(clients, 0.0)
            server.engine.source = source
        yield from scrapes(server, for_s=lasts_s, at=dict(events or {}), every_s=every_s)

    return play


def times(ratio: float) -> Begin:
    """As many times as many requests/s."""

    def begin(server: Server) -> None:
        server.rate_per_s *= ratio

    return begin


def seats_for_some(ratio: float) -> Begin:
    """So many times the load that keeps the usual batch."""

    def begin(server: Server) -> None:
        server.rate_per_s = server.setting.rate_for(ratio * server.setting.running)

    return begin


def at_once(requests: int) -> Begin:
    """A burst."""

    def begin(server: Server) -> None:
        engine = server.engine
        for _ in range(requests):
            engine.scheduler.waiting.append(server.source.kind.make(engine.now_s, server.rng))

    return begin


def prompt_bound(ratio: float) -> Begin:
    """So many times as many prompts as the GPU can compute."""

    def begin(server: Server) -> None:
        server.rate_per_s = ratio * prompt_bound_per_s(server.setting, server.shape.prompt)

    return begin


def late_step(pause_s: float, server: Server) -> None:
    """The next step takes so much longer."""
    server.steps.host_late_s = pause_s


def reshaped(**changes: float) -> Begin:
    """Requests are otherwise from then on."""

    def begin(server: Server) -> None:
        server.reshape(**changes)

    return begin


def pauses(pause_s: float, every_s: float) -> dict[float, Begin]:
    """The engine pauses: one step in so many seconds takes much longer."""
    events: dict[float, Begin] = {}
    at_s = BEGINS_S
    while at_s < LASTS_S:
        events[at_s] = partial(late_step, pause_s)
        events[at_s + 0.05] = partial(late_step, 0.0)
        at_s += every_s
    return events


def rated(load_at: Phases, lasts_s: float = LASTS_S) -> Play:
    """Pages with these gauges and rates."""

    def play(every_s: float) -> Iterator[Entry]:
        for at_s, page in pages([load_at], lasts_s, every_s):
            yield Entry(BEGUN_S + at_s, page, status=200)

    return play


CHAT = Load(
    running=6.0, kv_ratio=0.12, first_tokens_per_s=3.0, finished_per_s=3.0, accepted_per_s=3.0,
    generated_per_s=300.0, prompt_per_s=2400.0, prompt_tokens=800.0, answer_tokens=100.0,
    request_s=2.0, queued_s=0.01, prefill_s=0.09, steps_per_s=50.0, step_tokens=54.0,
    hit_ratio=0.4,
)  # fmt: skip


def after(load_at: Callable[[float], Load], before: Load = CHAT) -> Phases:
    """`before`, and from BEGINS_S on the load by the seconds since."""
    return lambda at_s: before if at_s < BEGINS_S else load_at(at_s - BEGINS_S)


FETCHING = replace(
    CHAT, tier_lookups_per_s=2400.0, tier_hit_ratio=0.9, failed_transfers_per_s=0.0,
    errors_per_s=0.0, accepted_per_s=None, deferred=1.0,
)  # fmt: skip
"""A server that loads prompts' KV from elsewhere."""

LOAD_TEST = replace(
    CHAT, running=30.0, waiting=7.0, kv_ratio=0.4, generated_per_s=900.0, first_tokens_per_s=9.0,
    finished_per_s=9.0, accepted_per_s=9.0, prompt_per_s=7200.0, request_s=3.3, queued_s=0.7,
)  # fmt: skip


def cancelled(since_s: float) -> Load:
    """All calls end within 5 s and no step follows: the gauges stay as they are."""
    return replace(
        LOAD_TEST, generated_per_s=0.0, first_tokens_per_s=0.0, finished_per_s=0.0,
        prompt_per_s=0.0, steps_per_s=0.0, accepted_per_s=37.0 / 5.0 if 0 <= since_s < 5.0 else 0.0,
    )  # fmt: skip


# --- What goes wrong ------------------------------------------------------------------------------

LIMITS = frozenset({"admission_limit"})
OVERLOAD = frozenset({"queue_saturation", "admission_limit"})
WINDOWS_S = (15.0, 30.0, 60.0, 120.0)
DRAINED_S = 240.0

PROBES: tuple[Probe, ...] = (
    Probe(
        name="1.12 times as many prompts as the GPU computes",
        play=served(
            11,
            shape=SUMMARIES,
            rate_per_s=6.0,
            events={BEGINS_S: prompt_bound(1.12)},
        ),
        first=OVERLOAD,
        paged=True,
        settle_s=90.0,
    ),
    Probe(
        name="1.6 times as many prompts, no quiet time before",
        play=served(
            12,
            shape=SUMMARIES,
            rate_per_s=6.0,
            lasts_s=300.0,
            events={1.0: prompt_bound(1.6)},
        ),
        first=OVERLOAD,
        paged=True,
        begins_s=0.0,
        settle_s=60.0,
    ),
    Probe(
        name="8 seats, three times the load",
        play=served(13, running=4.0, max_num_seqs=8, events={BEGINS_S: seats_for_some(3.0)}),
        first=LIMITS,
        change="--max-num-seqs",
        paged=True,
        windows_s=WINDOWS_S,
    ),
    Probe(
        name="8 seats, 139 callers in a closed loop",
        play=served(14, clients=139, max_num_seqs=8, lasts_s=300.0),
        first=LIMITS,
        change="--max-num-seqs",
        begins_s=0.0,
        settle_s=30.0,
        windows_s=WINDOWS_S,
    ),
    Probe(
        name="48 seats, 200 requests at once: drained within 15 s",
        play=served(15, running=20.0, max_num_seqs=48, events={BEGINS_S: at_once(200)}),
        paged=False,
        settle_s=DRAINED_S,
    ),
    Probe(
        name="a batch queue: 64 seats, 900 callers from the start",
        play=served(16, clients=900, max_num_seqs=64, lasts_s=420.0),
        first=LIMITS,
        begins_s=0.0,
        settle_s=120.0,
        paged=False,
    ),
    Probe(
        name="256 tokens per step, prompts of 1,500 tokens",
        play=served(
            18,
            shape=Shape(prompt=1500.0, output=60.0, prefixes=0),
            rate_per_s=3.0,
            events={BEGINS_S: times(2.6)},
            max_num_batched_tokens=256,
        ),
        first=OVERLOAD,
        change="--max-num-batched-tokens",
        paged=True,
        settle_s=90.0,
    ),
    Probe(
        name="14 adapters for 2 slots",
        play=served(
            19,
            running=10.0,
            shape=Shape(adapters=2),
            max_loras=2,
            events={BEGINS_S: reshaped(adapters=14)},
        ),
        first=frozenset({"adapter_thrash"}),
        change="--max-loras",
        settle_s=60.0,
    ),
    Probe(
        name="the API server decodes images: 25 s before the engine",
        play=rated(
            after(
                lambda since_s: replace(
                    CHAT,
                    first_tokens_per_s=1.1,
                    finished_per_s=1.1,
                    accepted_per_s=1.1,
                    generated_per_s=110.0,
                    prompt_per_s=880.0,
                    running=2.2,
                    kv_ratio=0.04,
                    ttft_s=min(25.0, 0.1 + 0.3 * since_s),
                    outside_s=min(24.8, 0.3 * since_s),
                    request_s=2.0 + min(24.8, 0.3 * since_s),
                    steps_per_s=50.0,
                    step_tokens=20.0,
                )
            )
        ),
        first=frozenset({"host_contention"}),
        paged=True,
        settle_s=90.0,
    ),
    Probe(
        name="4 of 10 KV transfers fail, and the requests with them",
        play=rated(
            after(
                lambda since_s: replace(
                    FETCHING,
                    failed_transfers_per_s=1.2,
                    errors_per_s=1.2,
                    finished_per_s=1.8,
                    generated_per_s=180.0,
                ),
                FETCHING,
            )
        ),
        first=frozenset({"requests_failing", "kv_transfer_slow"}),
        paged=True,
    ),
    Probe(
        name="12% of the calls end in HTTP 500 before the engine",
        play=rated(
            after(
                lambda since_s: replace(
                    CHAT,
                    server_errors_per_s=0.4,
                    accepted_per_s=2.9,
                    first_tokens_per_s=2.9,
                    finished_per_s=2.9,
                ),
                replace(CHAT, server_errors_per_s=0.0),
            )
        ),
        first=frozenset({"requests_failing"}),
        paged=True,
    ),
    Probe(
        name="two of three requests are aborted, calls are not counted",
        play=rated(
            after(
                lambda since_s: replace(
                    CHAT,
                    accepted_per_s=None,
                    finished_per_s=1.0,
                    aborted_per_s=2.0,
                    generated_per_s=160.0,
                ),
                replace(CHAT, accepted_per_s=None),
            )
        ),
        first=frozenset({"requests_failing"}),
        paged=True,
    ),
    Probe(
        name="some stop buttons: 8% of the requests are aborted",
        play=rated(
            after(
                lambda since_s: replace(
                    CHAT,
                    accepted_per_s=None,
                    finished_per_s=2.76,
                    aborted_per_s=0.24,
                ),
                replace(CHAT, accepted_per_s=None),
            )
        ),
        paged=False,
    ),
    Probe(
        name="a load test of 37 requests is cancelled at once",
        play=rated(after(cancelled, LOAD_TEST)),
        first=frozenset({"metrics_stale"}),
        paged=False,
    ),
    Probe(
        name="held-back requests pile up on a decode server",
        play=rated(
            after(
                lambda since_s: replace(
                    FETCHING,
                    deferred=1.0 + 0.22 * since_s,
                    kv_ratio=min(0.97, 0.3 + 0.0011 * since_s),
                    finished_per_s=2.8,
                    first_tokens_per_s=2.8,
                ),
                FETCHING,
            )
        ),
        first=frozenset({"kv_transfer_slow", "kv_held"}),
        settle_s=90.0,
    ),
    Probe(
        name="traffic ends from one scrape to the next",
        play=rated(
            after(
                lambda since_s: replace(
                    CHAT,
                    running=0.0,
                    kv_ratio=0.0,
                    first_tokens_per_s=0.0,
                    finished_per_s=0.0,
                    accepted_per_s=0.0,
                    generated_per_s=0.0,
                    prompt_per_s=0.0,
                    steps_per_s=0.0,
                )
            )
        ),
        paged=False,
    ),
    Probe(
        name="the engine pauses for 1.4 s every 9 s",
        play=served(17, running=12.0, events=pauses(1.4, 9.0)),
        first=frozenset({"unexplained_latency", "slow_steps", "host_contention"}),
        settle_s=120.0,
    ),
)
"""All probes."""


def every() -> Iterator[Heard]:
    """What is said of every probe at each of its windows."""
    for probe in PROBES:
        for window_s in probe.windows_s:
            yield heard(probe, window_s)


def table(rows: Sequence[Heard]) -> str:
    """A row per probe and window."""
    lines = [f"{'probe':56}{'window':>7}  {'ok':4}{'message':>9}  said at the end"]
    for row in rows:
        sent = "-" if row.page_s is None else f"{row.page_s - row.probe.begins_s:.0f} s"
        mark = "NO" if row.wrong else "yes"
        last = row.wrong or first_word(row.diagnoses[-1])
        lines.append(f"{row.probe.name:56}{row.window_s:>5.0f} s  {mark:4}{sent:>9}  {last}")
    right = sum(not row.wrong for row in rows)
    return "\n".join([*lines, f"\nprobes right: {right} of {len(rows)}"])


def report() -> str:
    """The table of all probes."""
    return table(list(every()))


if __name__ == "__main__":
    print(report())
