"""What changed since quiet times: the split of latency into demand, work, speed and limits. Pure.

Latency = demand x work / speed, within limits. The split heads each verdict. All its numbers are
signals of the account (learned/account.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Literal

from msgspec import Struct, field

from kneewatch.diagnose import account_signals as account
from kneewatch.rules.formatting import clock, figure
from kneewatch.rules.wire import Figure, UnixTime, rounded, to_ms, written, written_as

WORK: Mapping[str, str] = {
    "prompts": account.PROMPTS,
    "answers": account.ANSWERS,
    "hits": account.HITS,
    "drafts": account.DRAFTS,
}
"""The factors of a request's work, by name, and their signals."""

Limit = Literal["seats", "kv"]
PINNED_RATIO, KV_ROOM_RATIO, KV_FULL_RATIO = 0.9, 0.8, 0.95
COMMAND_LINE, UNSET = "model_path", "not set"
NAMES = {"vllm_version": "vLLM"}
BLOCKS, SIZES_OF_BLOCKS = "num_gpu_blocks", {"kv_cache_size_tokens", "kv_cache_max_concurrency"}
"""The blocks of the KV cache, and labels that say the same again."""

ALIKE_RATIO = 0.05
"""Largest relative difference of values that vLLM measures at each start, such as its blocks. The
steps of a learned curve are further apart."""

SAMPLE_S, AFTER_START_S = 20.0, 300.0
"""What is off within so much time after a restart is off since the restart."""


class Speeds(Struct, frozen=True):
    """The speed over its usual value.

    - `ratio`: speed of decode steps at equal work.
    - `error`: the error of `ratio`.
    - `prefill`: speed of prefills of equal length.
    """

    ratio: Figure | None = None
    error: Figure | None = None
    prefill: Figure | None = None


class Restarted(Struct, frozen=True):
    """A restart of the server.

    - `t_s`: when it was.
    - `changes`: what changed with it: version and launch, in words.
    """

    t_s: UnixTime = field(name="t")
    changes: tuple[str, ...] = ()

    def words(self) -> str:
        changes = f" with {', '.join(self.changes)}" if self.changes else ""
        return f"since the restart at {clock(self.t_s)[:5]}{changes}"


class Streams(Struct, frozen=True):
    """Tokens/s of one stream.

    - `now`: the present number.
    - `usual`: the usual number.
    """

    now: Figure | None = None
    usual: Figure | None = None


class Changed(Struct, frozen=True):
    """What changed since quiet times: each factor over its usual value, 1 where nothing changed;
    null where unknown.

    - `since_s`: since when the speed, or without that another factor, has been off its usual value;
      null if none is.
    - `demand`: requests/s.
    - `follows`: whether demand fell with the speed, because callers wait for their answers; null
      while the speed is as usual.
    - `work`: prompt tokens and output tokens of a request, the cached share of its prompt, and
      tokens per sequence and step with speculation, as `prompts`, `answers`, `hits` and `drafts`.
    - `speed`: the speed of decode steps and prefills.
    - `limits`: what admits no more requests now: `seats` or `kv`.
    - `streams`: tokens/s of one stream.
    - `restart`: the restart since which something is off; null if there is none.
    """

    since_s: UnixTime | None = written_as("since", None)
    demand: Figure | None = None
    follows: bool | None = written_as("demand_follows_speed", None)
    work: Mapping[str, Figure | None] = written({})
    speed: Speeds = written(Speeds())
    limits: tuple[Limit, ...] = ()
    streams: Streams = written_as("stream_tokens_per_s", Streams())
    restart: Restarted | None = None

    def stream_words(self) -> str:
        """How far the speed of one stream is off its usual value; empty if it is not."""
        now, usual = self.streams.now, self.streams.usual
        if not now or not usual or account.is_unchanged(now / usual):
            return ""
        return f"{figure(now)} instead of {figure(usual)} tokens/s a stream"


def changed(
    values: Mapping[str, float | None], t_s: float, restart: Restarted | None = None
) -> Changed | None:
    """What changed, by a verdict's signals at `t_s`; None if no factor is known.

    `restart` is the server's last restart; it is part of the result if something has been off since
    then.
    """
    factors = {name: values.get(key) for name, key in WORK.items()}
    demand, speed = values.get(account.DEMAND), values.get(account.SPEED)
    if demand is None and speed is None:
        return None
    moved_for_s = values.get(account.MOVED_FOR)
    prefill, error = values.get(account.PREFILL_SPEED), values.get(account.SPEED_ERROR)
    return Changed(
        None if moved_for_s is None else to_ms(t_s - moved_for_s),
        rounded(demand),
        _follows(demand, speed),
        {name: rounded(ratio) for name, ratio in factors.items()},
        Speeds(rounded(speed), rounded(error), rounded(prefill)),
        _limits(values),
        Streams(
            rounded(values.get(account.STREAM_RATE)), rounded(values.get(account.STREAM_USUAL))
        ),
        restart if moved_for_s is not None and _since(restart, t_s - moved_for_s) else None,
    )


def _since(restart: Restarted | None, since_s: float) -> bool:
    """Whether something has been off since a restart, and not before: samples take a while."""
    return restart is not None and 0 <= since_s + SAMPLE_S - restart.t_s <= AFTER_START_S


def launch_changes(before: Mapping[str, object], after: Mapping[str, object]) -> tuple[str, ...]:
    """How a launch differs from the one before, as texts, the version first."""
    names = before.keys() & after.keys()
    if COMMAND_LINE in names:  # then a flag that is missing was not set
        names = before.keys() | after.keys()
    if BLOCKS in names:
        names -= SIZES_OF_BLOCKS
    return tuple(
        f"{NAMES.get(name, name)} {after.get(name, UNSET)} ({before.get(name, UNSET)} before)"
        for name in sorted(names, key=lambda name: (name not in NAMES, name))
        if not alike(str(before.get(name, UNSET)), str(after.get(name, UNSET)))
    )


def alike(text: str, other_text: str) -> bool:
    """Whether texts are equal, or numbers that differ by at most `ALIKE_RATIO`."""
    try:
        first, second = float(text), float(other_text)
    except ValueError:
        return text == other_text
    return abs(first - second) <= ALIKE_RATIO * min(abs(first), abs(second))


def _follows(demand: float | None, speed: float | None) -> bool | None:
    """Whether demand fell with the speed; None if the speed has not fallen."""
    if not demand or not speed or speed >= account.LEARNED_FROM:
        return None
    return log(demand) <= account.FALLS_ALONG * log(speed)


def _limits(values: Mapping[str, float | None]) -> tuple[Limit, ...]:
    """The limits that keep requests queued now."""
    batch, most = values.get(account.SEATED), values.get("running_max")
    usage, queued = values.get("kv_usage_avg_ratio"), values.get("waiting_by_capacity") or 0.0
    if usage is None or queued < 1:
        return ()
    if usage >= KV_FULL_RATIO:
        return ("kv",)
    pinned = batch is not None and bool(most) and batch >= PINNED_RATIO * (most or 0.0)
    has_room = usage < KV_ROOM_RATIO and not values.get(account.UNADMITTED)
    return ("seats",) if pinned and has_room else ()
