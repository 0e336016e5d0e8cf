"""Whether P99 and mean latencies are as predicted once an advice is followed, on the simulator.

    python -m tests.resized [SEEDS] [FAULT ...]

plants each fault on a simulated server, makes the first change advised that the simulator can make,
and prints what was predicted of TTFT and ITL beside what the pages then show, and whether the cause
comes back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from math import cos
from random import Random
from statistics import median

from msgspec import Struct

from kneewatch.agent.captures import PageReader
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.recommend.advice import REPLICAS, Advice, FlagChange
from kneewatch.diagnose.verdict import Verdict
from tests.simulator.cases import MACHINES, fault, hardware_of
from tests.simulator.gpus import chunk_tokens
from tests.simulator.page import START_S
from tests.simulator.scheduler import Launch
from tests.simulator.server import Server, Setting, scrapes

QUIET_S, FAULT_S, SETTLE_S, AFTER_S = 1800.0, 300.0, 90.0, 300.0
WINDOW_S = 60.0
WAVE_S = 150.0
"""The load swings before the fault, as over a day."""

NEAR_RATIO = 1.3
"""A prediction is near where it is off by at most this factor."""

STRENGTHS: Mapping[str, tuple[float, float]] = {
    "kv_pressure": (1.6, 2.6),
    "admission_limit": (1.5, 2.5),
    "queue_saturation": (1.05, 1.5),
    "prefix_cache_off": (1.0, 1.0),
    "prefill_interference": (0.8, 2.0),
}
"""How strong each fault is, from the weakest to the strongest drawn."""


def _blocks(server: Server, value: int) -> None:
    server.setting.launch.num_gpu_blocks = value


def _seats(server: Server, value: int) -> None:
    server.setting.launch.max_num_seqs = value


def _budget(server: Server, value: int) -> None:
    server.setting.launch.max_num_batched_tokens = value


def _caching(server: Server, _value: int) -> None:
    server.setting.launch.enable_prefix_caching = True


def _share(server: Server, value: int) -> None:
    server.rate_per_s /= value


MADE: Mapping[str, Callable[[Server, int], None]] = {
    "--num-gpu-blocks-override": _blocks,
    "--max-num-seqs": _seats,
    "--max-num-batched-tokens": _budget,
    "--no-enable-prefix-caching": _caching,
    REPLICAS: _share,
}


class Resized(Struct, frozen=True):
    """An advice that was followed: what it predicted, what then was, and what is said then."""

    advice: Advice
    measured: Mapping[str, float]
    causes: frozenset[str]

    @property
    def is_back(self) -> bool:
        """Whether the cause is concluded again."""
        return self.advice.cause in self.causes

    def off(self, key: str) -> float | None:
        """By which factor a prediction was off; None if nothing was predicted or measured."""
        said_s, was_s = self.advice.predicted.get(f"{key}_s"), self.measured.get(key)
        return max(said_s / was_s, was_s / said_s) if said_s and was_s else None

    def is_inside(self, key: str) -> bool | None:
        """Whether a P99 lies in its stated band; None without one."""
        then, was_s = self.advice.predicted, self.measured.get(key)
        low_s, high_s = then.get(f"{key}_low_s"), then.get(f"{key}_high_s")
        if low_s is None or high_s is None or was_s is None:
            return None
        return low_s <= float(f"{was_s:.2g}") <= high_s

    @property
    def words(self) -> str:
        """A line of the table."""
        then, cells = self.advice.predicted, list[str]()
        for key, was_s in self.measured.items():
            said_s, low_s = then.get(f"{key}_s"), then.get(f"{key}_low_s")
            if said_s is not None:
                high_s = then.get(f"{key}_high_s", 0.0)
                band = "" if low_s is None else f" in {low_s:g}-{high_s:g}"
                mark = " OUTSIDE" if self.is_inside(key) is False else ""
                cells.append(f"{key} {said_s:.3g}{band}, was {was_s:.3g}{mark}")
        back = " CAUSE BACK" if self.is_back else ""
        sizes = ", ".join(f"{each.flag} {each.after}" for each in self.advice.changes)
        return f"{sizes}: {'; '.join(cells) or 'no latency predicted'}{back}"


def _can_make(change: FlagChange) -> bool:
    is_drop = change.flag == "--no-enable-prefix-caching"
    return change.flag in MADE and (is_drop or isinstance(change.after, int))


def resized(cause: str, seed: int) -> Resized | None:
    """The advice against a fault, followed. None if nothing was advised that can be made."""
    rng = Random(f"{cause} {seed}")
    device, planted = hardware_of(rng.choice([*MACHINES][:3])), fault(cause)
    launch = Launch(num_gpu_blocks=device.blocks(), max_num_batched_tokens=chunk_tokens(device))
    setting = Setting(hardware=device, launch=launch)
    planted.start(setting)
    server, strength = Server(setting, rng), rng.uniform(*STRENGTHS[cause])
    server.factor = lambda now_s: 1 - 0.4 * cos(now_s / WAVE_S) * (now_s < QUIET_S)
    profile = Profile(targets=planted.targets, window_s=WINDOW_S)
    stream = TargetStream("sim", profile, Limits())
    reader = PageReader(Limits())
    verdict: Verdict | None = None
    ends_s = QUIET_S + FAULT_S
    for entry in scrapes(server, for_s=ends_s, at={QUIET_S: lambda of: planted.lay(of, strength)}):
        verdict = next(reversed([*stream.judge(entry.t_s, reader.read(entry))]), verdict)
    advice = next(_followed(verdict, cause), None)
    if advice is None:
        return None
    for change in advice.changes:
        MADE[change.flag](server, change.after if isinstance(change.after, int) else 0)
    server.restart(ends_s)
    late: list[Verdict] = []
    until_s = ends_s + SETTLE_S + AFTER_S
    for entry in scrapes_from(server, ends_s, until_s):
        verdicts = [*stream.judge(entry.t_s, reader.read(entry))]
        late += verdicts if entry.t_s - START_S > ends_s + SETTLE_S + WINDOW_S else []
    signals = {"ttft": "ttft_mean_s", "itl": "itl_mean_s"} | {
        key: f"{key}_s" for key in ("ttft_p99", "itl_p99")
    }
    shown = {key: [v.values.get(name) for v in late] for key, name in signals.items()}
    return Resized(
        advice,
        {key: median([v for v in values if v]) for key, values in shown.items() if any(values)},
        frozenset(cause.id for cause in late[-1].causes) if late else frozenset(),
    )


def scrapes_from(server: Server, from_s: float, to_s: float) -> Iterator[Entry]:
    """The scrapes of a server that has run for a while."""
    for turn in range(1, round((to_s - from_s) / 5.0) + 1):
        yield server.scrape(from_s + turn * 5.0)


def _followed(verdict: Verdict | None, cause: str) -> Iterator[Advice]:
    for each in () if verdict is None else verdict.recommendations:
        if each.cause == cause and each.changes and all(map(_can_make, each.changes)):
            yield each


def main(seeds: str = "10", *names: str) -> int:
    """Print each run, and each fault's counts."""
    for cause in names or STRENGTHS:
        runs: list[Resized] = []
        for seed in range(int(seeds)):
            run = resized(cause, seed)
            runs += [] if run is None else [run]
            print(f"  {cause}: {'nothing advised' if run is None else run.words}", flush=True)
        cells = [f"{sum(run.is_back for run in runs)} of {len(runs)} back"]
        for key in ("ttft", "itl", "ttft_p99", "itl_p99"):
            offs = [run.off(key) for run in runs if run.off(key) is not None]
            near = sum(off is not None and off <= NEAR_RATIO for off in offs)
            inside = [run.is_inside(key) for run in runs if run.is_inside(key) is not None]
            band = f", {sum(map(bool, inside))} of {len(inside)} in band" if inside else ""
            cells.append(f"{key} {near} of {len(offs)} within 30%{band}")
        print(f"{cause}: {'; '.join(cells)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
