"""Public incidents of SGLang, as loads of the engine model. What is to be told was written down
before anything was judged."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.simulator.cases import Case
from tests.simulator.faults import Fault, Lay, Start
from tests.simulator.server import Server, Setting, Shape
from tests.simulator.sglang_engine import SglangEngine

LONG_CONTEXTS = Shape(prompt=9000.0, output=300.0, prefixes=0, output_cap=4096)


def _engine(server: Server) -> SglangEngine:
    assert isinstance(server.engine, SglangEngine)
    return server.engine


def _served(setting: Setting, *, shape: Shape, running: float, pool_tokens: float = 0.0) -> None:
    """Requests like these, so many at a time, with a KV cache of so many tokens."""
    setting.shape, setting.running = shape, running
    if pool_tokens:
        setting.launch.num_gpu_blocks = int(pool_tokens / setting.launch.block_size)


def _seats(setting: Setting, *, seats: int, running: float) -> None:
    setting.launch.max_num_seqs, setting.running = seats, running


def _more(server: Server, ratio: float) -> None:
    server.rate_per_s = server.setting.rate_for(ratio * server.setting.running)


def _stay_slow(server: Server, late_s: float) -> None:
    """Requests that come at once fill the cache; afterwards each step takes far longer."""
    _more(server, 2.0)
    server.steps.host_late_s = late_s


def _leak(server: Server, tokens: float) -> None:
    _engine(server).leaked_tokens = tokens


def _hang(server: Server, _strength: float) -> None:
    _engine(server).hung = True


def _overflow(server: Server, ratio: float) -> None:
    _engine(server).queue_limit = 96
    _more(server, ratio)


def _fetch(server: Server, requests: float, *, seats: int) -> None:
    """So many requests wait for their KV from a prefill server, and hold all seats but a few."""
    engine = _engine(server)
    engine.in_transfer = round(requests)
    engine.launch.max_num_seqs = seats


def _fail_transfers(server: Server, ratio: float) -> None:
    _engine(server).failed_ratio = ratio


def _refuse(server: Server, _strength: float) -> None:
    _engine(server).queue_limit = 0


CHAT = Shape()
AGENTS = Shape(prompt=700.0, output=120.0, output_cap=512)
REASONING = Shape(prompt=200.0, output=4000.0, prefixes=0, output_cap=16_384)


def _case(
    name: str,
    cause: str,
    start: Start,
    lay: Lay,
    strength: float,
    *,
    accepted: frozenset[str] = frozenset(),
    machine: str = "8B on H100",
) -> Case:
    return Case(
        group="SGLang, public",
        name=f"SGLang {name}",
        faults=(Fault(cause=cause, name=name, start=start, lay=lay, strength=strength),),
        machine=machine,
        wanted=frozenset({cause} - {""}),
        accepted=accepted,
    )


def incidents() -> Iterator[Case]:
    """The incidents, by the number of their issue."""
    many = frozenset({"queue_saturation", "admission_limit"})
    full = frozenset({"kv_pressure", "kv_leak", "kv_exhaustion_ahead"})
    yield _case(
        "26248: 429 tokens/s, a full cache, then 30", "slow_steps",
        partial(_served, shape=LONG_CONTEXTS, running=2.0, pool_tokens=90_000), _stay_slow, 0.12,
        accepted=full | {"decode_bound", "host_contention"},
    )  # fmt: skip
    yield _case(
        "PR 3735: long contexts queue for 250 s by the reserve", "kv_pressure",
        partial(_served, shape=LONG_CONTEXTS, running=2.0, pool_tokens=90_000), _more, 4.0,
        accepted=many,
    )  # fmt: skip
    yield _case(
        "6778: blocks of finished requests stay, usage 0.96", "kv_held",
        partial(_served, shape=CHAT, running=36.0, pool_tokens=90_000), _leak, 30.0, accepted=full,
    )  # fmt: skip
    yield _case(
        "2741: stops with 99 requests in 100 seats", "engine_stalled",
        partial(_seats, seats=100, running=70.0), _hang, 1.0,
    )  # fmt: skip
    yield _case(
        "30160: 50 seats where 128 were asked for", "admission_limit",
        partial(_seats, seats=50, running=36.0), _more, 1.8,
        accepted=frozenset({"queue_saturation"}), machine="70B FP8 on B200",
    )  # fmt: skip
    yield _case(
        "33858: 128 seats and 96 in the queue, 3,000 calls a minute", "requests_failing",
        partial(_seats, seats=128, running=70.0), _overflow, 2.0, accepted=many,
    )  # fmt: skip
    yield _case(
        "31800: transfers that never end hold the slots", "kv_transfer_slow",
        partial(_seats, seats=64, running=40.0), partial(_fetch, seats=2), 62.0,
        accepted=many | {"kv_held"},
    )  # fmt: skip
    yield _case(
        "5450: 100 transfers take 5 minutes, 30 s before", "kv_transfer_slow",
        partial(_seats, seats=100, running=60.0), partial(_fetch, seats=20), 80.0,
        accepted=many | {"kv_held"},
    )  # fmt: skip
    yield _case(
        "10204: transfers run into their time-out", "kv_transfer_slow",
        partial(_served, shape=CHAT, running=24.0), _fail_transfers, 0.3,
        accepted=frozenset({"requests_failing"}),
    )  # fmt: skip
    yield _case(
        "9926: after idle hours every call fails", "requests_failing",
        partial(_served, shape=AGENTS, running=6.0), _refuse, 1.0,
    )  # fmt: skip
    yield _case(
        "3909: long answers slow down as they grow: no fault", "",
        partial(_served, shape=REASONING, running=8.0), _more, 1.0,
    )  # fmt: skip
