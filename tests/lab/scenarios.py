"""Incidents that `python -m tests.lab.record` makes on a real vLLM, with what is true in each
phase. The labels are written here, before a server runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from tests.lab import model
from tests.lab.load import Shape

HEALTHY = "healthy"
SETTLE_S = 20.0
"""After a fault's beginning, before it must be named."""

CHAT = Shape(prompt_tokens=60, output_tokens=40, pause_s=0.5)
LONG_ANSWERS = Shape(prompt_tokens=100, output_tokens=300)
GIANT = Shape(prompt_tokens=1900, output_tokens=60)
SHARED = Shape(prompt_tokens=1040, output_tokens=30, shared_tokens=1000, pause_s=0.2)

Loads = Sequence[tuple[Shape, int]]
"""Kinds of requests, with the number of clients that each send one after the other."""


class Phase(Struct, frozen=True, kw_only=True):
    """A part of a scenario. `state` is the label, a key of `FIRST_CAUSES` where it is a fault.

    `crashes`: the server is killed and started again at its beginning; `lasts_s` begins when it is
    ready, and it gets further `flags`. `busy_processes` are other programs on the server's CPUs.
    `stopped` is the share of time for which the engine is stopped, at the beginning and at the end.
    """

    name: str
    state: str
    lasts_s: float
    loads: Loads
    settle_s: float = SETTLE_S
    ramp_s: float = 5.0
    crashes: bool = False
    flags: Sequence[str] = ()
    busy_processes: int = 0
    stopped: tuple[float, float] = (0.0, 0.0)


class Scenario(Struct, frozen=True):
    """A server, and phases one after the other."""

    name: str
    fault: str
    flags: Sequence[str]
    phases: Sequence[Phase]
    config: Mapping[str, Any] = field(default_factory=lambda: model.CONFIG)


def quiet(name: str, loads: Loads, lasts_s: float = 60.0, *, settle_s: float = SETTLE_S) -> Phase:
    """A phase in which nothing is wrong."""
    return Phase(name=name, state=HEALTHY, lasts_s=lasts_s, loads=loads, settle_s=settle_s)


def recovered(loads: Loads) -> Phase:
    """What follows a slowed phase: its cause stays while the account's newest samples hold it."""
    return quiet("after", loads, AGAIN_S, settle_s=60.0)


def drained(lasts_s: float = 30.0, loads: Loads = ()) -> Phase:
    """A phase that is not judged: what was queued is worked off."""
    return Phase(name="draining", state="draining", lasts_s=lasts_s, loads=loads)


def slow(
    name: str,
    loads: Loads,
    lasts_s: float,
    stopped: float,
    *,
    until: float | None = None,
    state: str = "slow_steps",
) -> Phase:
    """A phase whose engine is stopped for a share of the time, or for ever more until that."""
    return Phase(
        name=name,
        state=state,
        lasts_s=lasts_s,
        loads=loads,
        settle_s=min(60.0, lasts_s / 3),
        stopped=(stopped, stopped if until is None else until),
    )


WARM_S, SLOW_S, AGAIN_S = 200.0, 180.0, 100.0
SEATS = ("--max-num-seqs", "32", "--max-model-len", "4096")
OPEN = Shape(prompt_tokens=120, output_tokens=60, every_s=1.0)
OPEN_LONG = Shape(prompt_tokens=300, output_tokens=120, every_s=2.0)
ONE_CALLER = Shape(prompt_tokens=200, output_tokens=60, pause_s=1.0)

SMALL: Mapping[str, Any] = {
    **model.CONFIG,
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""A model whose steps are short also where the CPU has other work."""

SLOWED = (
    Scenario(
        "loads",
        "none: twice and half the load, longer prompts, longer answers",
        SEATS,
        (
            quiet("base", ((OPEN, 1), (OPEN_LONG, 1)), WARM_S),
            quiet("twice", ((OPEN, 2), (OPEN_LONG, 2)), 90),
            quiet("half", ((OPEN, 1),), 90),
            Phase(
                name="long_prompts",
                state="long_prompts",
                lasts_s=60,
                loads=((Shape(prompt_tokens=1200, output_tokens=60, every_s=1.0), 1),),
            ),
            quiet("base_again", ((OPEN, 1), (OPEN_LONG, 1)), 60),
            quiet("long_answers", ((Shape(prompt_tokens=120, output_tokens=400, every_s=1.5), 1),)),
            quiet("base_at_last", ((OPEN, 1), (OPEN_LONG, 1)), 60),
        ),
        SMALL,
    ),
    Scenario(
        "slow_closed",
        "the engine is stopped for 60% of the time, callers wait for their answers",
        SEATS,
        (
            quiet("before", ((CHAT, 3), (LONG_ANSWERS, 2)), WARM_S),
            slow("slow", ((CHAT, 3), (LONG_ANSWERS, 2)), SLOW_S, 0.6),
            recovered(((CHAT, 3), (LONG_ANSWERS, 2))),
        ),
        SMALL,
    ),
    Scenario(
        "slow_single",
        "the engine of a single caller is stopped for half of the time",
        SEATS,
        (
            quiet("before", ((ONE_CALLER, 1),), WARM_S),
            slow("slow", ((ONE_CALLER, 1),), SLOW_S, 0.5),
            recovered(((ONE_CALLER, 1),)),
        ),
        SMALL,
    ),
    Scenario(
        "slow_creeping",
        "within five minutes the engine comes to be stopped for 70% of the time",
        SEATS,
        (
            quiet("before", ((OPEN, 1), (OPEN_LONG, 1)), WARM_S),
            slow("creeping", ((OPEN, 1), (OPEN_LONG, 1)), 300, 0.0, until=0.7, state="creeping"),
            slow("slow", ((OPEN, 1), (OPEN_LONG, 1)), 60, 0.7),
            recovered(((OPEN, 1), (OPEN_LONG, 1))),
        ),
        SMALL,
    ),
    Scenario(
        "slower_launch",
        "restarted with a data type that this CPU has no instructions for",
        SEATS,
        (
            quiet("before", ((CHAT, 3),), WARM_S),
            Phase(
                name="relaunched",
                state="slower_launch",
                lasts_s=SLOW_S,
                loads=((CHAT, 3),),
                settle_s=140.0,
                crashes=True,
                flags=("--dtype", "bfloat16"),
            ),
        ),
    ),
    Scenario(
        "slower_prefill",
        "restarted with such a data type: prefills take three times as long, steps do not",
        SEATS,
        (
            quiet("before", ((CHAT, 3),), WARM_S),
            Phase(
                name="relaunched",
                state="slower_launch",
                lasts_s=SLOW_S,
                loads=((CHAT, 3),),
                settle_s=140.0,
                crashes=True,
                flags=("--dtype", "bfloat16"),
            ),
        ),
        SMALL,
    ),
    Scenario(
        "slow_from_start",
        "the engine is stopped for 60% of the time from its first second on",
        SEATS,
        (
            slow("slow", ((OPEN, 1), (CHAT, 1)), SLOW_S, 0.6, state="never_quiet"),
            recovered(((OPEN, 1), (CHAT, 1))),
        ),
        SMALL,
    ),
    Scenario(
        "slow_open",
        "the engine is stopped for half of the time while requests come as before",
        SEATS,
        (
            quiet("before", ((OPEN, 1), (OPEN_LONG, 1)), WARM_S),
            slow("slow", ((OPEN, 1), (OPEN_LONG, 1)), SLOW_S, 0.5),
            recovered(((OPEN, 1), (OPEN_LONG, 1))),
        ),
        SMALL,
    ),
)
"""Engines that lose speed, and healthy ones under other loads."""

SCENARIOS = (
    *SLOWED,
    Scenario(
        "hang_ups",
        "clients hang up after 2 s, and nearly nobody gets an answer",
        ("--max-num-seqs", "6", "--max-model-len", "2048"),
        (
            quiet("few_clients", ((CHAT, 3),)),
            Phase(
                name="hang_ups",
                state="clients_give_up",
                lasts_s=80,
                loads=((CHAT, 3), (Shape(output_tokens=300, hangs_up_after_s=2.0), 40)),
            ),
            drained(),
            quiet("few_again", ((CHAT, 3),)),
        ),
    ),
    Scenario(
        "crash_loop",
        "the process dies and is started again, three times",
        ("--max-num-seqs", "32", "--max-model-len", "2048"),
        (
            quiet("before", ((CHAT, 3),), 45),
            *(
                Phase(
                    name=f"crash_{number}",
                    state="crashes",
                    lasts_s=40,
                    loads=((CHAT, 3),),
                    settle_s=10,
                    crashes=True,
                )
                for number in (1, 2, 3)
            ),
        ),
    ),
    Scenario(
        "bad_requests",
        "a burst that fits, then clients whose prompts are longer than the model takes",
        ("--max-num-seqs", "32", "--max-model-len", "1024"),
        (
            quiet("base", ((CHAT, 3),)),
            quiet("burst", ((CHAT, 10),), 45),
            quiet("base_again", ((CHAT, 3),)),
            Phase(
                name="refused",
                state="client_errors",
                lasts_s=60,
                loads=((CHAT, 3), (Shape(prompt_tokens=1500, output_tokens=20), 1)),
            ),
        ),
    ),
    Scenario(
        "giants_among_chat",
        "requests that hold half of a small KV cache each, with chat behind them",
        (
            *("--num-gpu-blocks-override", "120", "--max-num-seqs", "64"),
            *("--max-model-len", "2048", "--no-enable-prefix-caching"),
        ),
        (
            quiet("chat", ((CHAT, 4),)),
            Phase(
                name="giants",
                state="kv_full",
                lasts_s=80,
                loads=((CHAT, 12), (GIANT, 6)),
            ),
            drained(40, ((CHAT, 4),)),
            quiet("chat_again", ((CHAT, 4),)),
        ),
    ),
    Scenario(
        "slow_ramp",
        "concurrency climbs slowly until the KV cache is full",
        ("--num-gpu-blocks-override", "160", "--max-num-seqs", "64", "--max-model-len", "2048"),
        (
            quiet("low", ((LONG_ANSWERS, 3),), 45),
            Phase(
                name="ramp",
                state="filling",
                lasts_s=150,
                loads=((LONG_ANSWERS, 26),),
                ramp_s=150,
            ),
            Phase(
                name="full",
                state="kv_full",
                lasts_s=60,
                loads=((LONG_ANSWERS, 26),),
                settle_s=10,
            ),
        ),
    ),
    Scenario(
        "noisy_neighbour",
        "other programs take the server's CPUs while its load stays",
        ("--max-num-seqs", "32", "--max-model-len", "2048"),
        (
            quiet("alone", ((LONG_ANSWERS, 3),)),
            Phase(
                name="neighbours",
                state="host_contention",
                lasts_s=75,
                loads=((LONG_ANSWERS, 3),),
                busy_processes=4,
            ),
            quiet("alone_again", ((LONG_ANSWERS, 3),)),
        ),
    ),
    Scenario(
        "prefix_loss_never_quiet",
        "a busy server's prompts stop sharing their prefix, and a queue grows",
        (
            *("--max-num-seqs", "8", "--max-model-len", "4096"),
            *("--max-num-batched-tokens", "2048"),
        ),
        (
            quiet("busy", ((SHARED, 7),), 75),
            Phase(
                name="prefix_lost",
                state="prefix_hits_lost",
                lasts_s=80,
                loads=((Shape(prompt_tokens=1040, output_tokens=30, pause_s=0.2), 16),),
            ),
            drained(),
            quiet("busy_again", ((SHARED, 7),)),
        ),
    ),
    Scenario(
        "other_model",
        "another model and block size; too many long answers for its KV cache, then no seats",
        (
            *("--num-gpu-blocks-override", "48", "--max-num-seqs", "40"),
            *("--max-model-len", "4096", "--block-size", "128"),
        ),
        (
            quiet("low", ((Shape(prompt_tokens=200, output_tokens=200), 4),)),
            Phase(
                name="too_many",
                state="kv_full",
                lasts_s=80,
                loads=((Shape(prompt_tokens=200, output_tokens=500), 24),),
            ),
            drained(45),
            quiet("low_again", ((Shape(prompt_tokens=200, output_tokens=200), 4),)),
        ),
        {
            **model.CONFIG,
            "num_hidden_layers": 4,
            "hidden_size": 384,
            "intermediate_size": 1152,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
    ),
    Scenario(
        "large_blocks",
        "prompts with a common prefix that is shorter than the prefix cache's block",
        ("--max-num-seqs", "16", "--max-model-len", "2048", "--block-size", "512"),
        (
            Phase(
                name="short_prompts",
                state="block_too_large",
                lasts_s=75,
                loads=((Shape(prompt_tokens=400, output_tokens=30, shared_tokens=360), 4),),
            ),
            quiet(
                "long_prompts",
                ((Shape(prompt_tokens=1560, output_tokens=30, shared_tokens=1536), 2),),
                75,
            ),
        ),
    ),
    Scenario(
        "few_seats",
        "more clients than --max-num-seqs admits, with KV memory to spare",
        ("--max-num-seqs", "6", "--max-model-len", "2048"),
        (
            quiet("base", ((CHAT, 4),)),
            Phase(name="queue", state="queueing", lasts_s=80, loads=((CHAT, 40),)),
            drained(30, ((CHAT, 4),)),
            quiet("base_again", ((CHAT, 4),)),
        ),
    ),
)
