"""Loads that climb on simulated servers: how early a broken TTFT target is forecast, and how often
in vain. `python -m tests.slo_ramps` prints the figures of `make accuracy`.

The target breaks at the first scrape at which TTFT P99 of the window is over it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from random import Random
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.vllm_flags import CommandLine
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Targets
from tests.ramps import BROKEN_S, Outcome, Rate, ramp, steady
from tests.recordings import diagnoses, phases
from tests.simulator.cases import MACHINES
from tests.simulator.faults import prompt_bound_per_s
from tests.simulator.gpus import Hardware, chunk_tokens, hardware
from tests.simulator.page import START_S
from tests.simulator.scheduler import Launch
from tests.simulator.server import SUMMARIES, Server, Setting

MACHINE = "70B on 4 H100"
SCRAPE_S = 5.0
SEATS = 64
PROMPTS_LATE = 14.0
"""Where prompts are the load, the target is the time that so many take: 5 s on MACHINE. With a few
prompts' time a burst breaks it, whatever the load does."""

STAYS_SEED = 9
STEADY = (0.0, 0.2, 0.3)
"""Loads that stay, between a ramp's low and high: the target holds."""

RECORDED_TARGETS = Targets(ttft_p99_s=1.0)


class Kind(Struct, frozen=True):
    """A server whose load climbs: what limits it, and its loads in requests a second."""

    name: str
    setting: Callable[[], Setting]
    low_per_s: Callable[[Setting], float]
    high_per_s: Callable[[Setting], float]
    target_s: float = 2.0


def _plain(machine: str) -> Setting:
    hardware = _hardware(machine)
    return Setting(
        hardware=hardware,
        launch=Launch(
            num_gpu_blocks=hardware.blocks(), max_num_batched_tokens=chunk_tokens(hardware)
        ),
        running=16.0,
    )


@cache
def _hardware(machine: str) -> Hardware:
    return hardware(*MACHINES[machine])


def _small_cache(machine: str, seats: int) -> Setting:
    setting = _plain(machine)
    shape = setting.shape
    tokens = seats * shape.held_tokens + shape.prefixes * shape.prefix_tokens
    setting.launch.num_gpu_blocks = int(tokens / setting.launch.block_size)
    setting.running = seats / 4
    return setting


def _few_seats(machine: str, seats: int) -> Setting:
    setting = _plain(machine)
    setting.launch.max_num_seqs = seats
    setting.running = seats / 4
    return setting


def _summaries(machine: str) -> Setting:
    setting = _plain(machine)
    setting.shape = replace(SUMMARIES)
    return setting


def _of_running(factor: float) -> Callable[[Setting], float]:
    return lambda setting: setting.rate_for(factor * setting.running)


def _of_prompts(ratio: float) -> Callable[[Setting], float]:
    return lambda setting: ratio * prompt_bound_per_s(setting, SUMMARIES.prompt)


def kinds(machine: str = MACHINE, seats: int = SEATS) -> tuple[Kind, ...]:
    """Servers that each thing limits: a cache that holds so many requests, so many seats, and
    prompts that keep the GPUs busy."""
    return (
        Kind("KV cache", partial(_small_cache, machine, seats), _of_running(1.0), _of_running(3.5)),
        Kind("seats", partial(_few_seats, machine, seats), _of_running(1.0), _of_running(3.5)),
        Kind(
            "prefill",
            partial(_summaries, machine),
            _of_prompts(0.2),
            _of_prompts(1.1),
            target_s=PROMPTS_LATE / prompt_bound_per_s(_summaries(machine), SUMMARIES.prompt),
        ),
    )


def scrapes(
    kind: Kind, rate: Callable[[Setting], Rate], *, for_s: float, seed: int
) -> Iterator[tuple[float, bool, float | None]]:
    """Each scrape's time, whether the target is broken, and the forecast."""
    setting = kind.setting()
    server = Server(setting, Random(f"{seed} {kind.name}"))
    server.source.rate = rate(setting)
    seats = CommandLine(flags={"--max-num-seqs": str(setting.launch.max_num_seqs)}, complete=False)
    profile = Profile(targets=Targets(ttft_p99_s=kind.target_s), stated=Stated(command_line=seats))
    stream = TargetStream("ramp", profile, Limits())
    for turn in range(1, round(for_s / SCRAPE_S) + 1):
        for diagnosis in stream.replay(server.scrape(turn * SCRAPE_S)):
            late_s = diagnosis.values.get("ttft_p99_s")
            over = late_s is not None and late_s > kind.target_s
            yield diagnosis.t_s - START_S, over, diagnosis.values.get("slo_breaks_in_s")


def run(
    kind: Kind,
    rate: Callable[[Setting], Rate],
    *,
    for_s: float,
    seed: int,
) -> Outcome:
    """A run until the target breaks: since when that had been forecast, and how long in all."""
    forecast_s: float | None = None
    alarmed_s, last_s = 0.0, -math.inf
    for now_s, over, left_s in scrapes(kind, rate, for_s=for_s, seed=seed):
        if over:
            return Outcome(now_s, forecast_s, alarmed_s, now_s)
        if left_s is not None:
            alarmed_s += SCRAPE_S
            if forecast_s is None or now_s - last_s > BROKEN_S:
                forecast_s = now_s
            last_s = now_s
    return Outcome(None, forecast_s, alarmed_s, for_s)


def climbs(kind: Kind, minutes: float, *, quiet_s: float = 900.0) -> Callable[[Setting], Rate]:
    """A load from low to high within so many minutes."""
    return lambda setting: ramp(
        kind.low_per_s(setting), kind.high_per_s(setting), 60.0 * minutes, quiet_s=quiet_s
    )


def stays(kind: Kind, ratio: float) -> Callable[[Setting], Rate]:
    """A load between low (0) and high (1)."""
    return lambda setting: steady(
        (1 - ratio) * kind.low_per_s(setting) + ratio * kind.high_per_s(setting)
    )


def quiet_recordings() -> tuple[int, int]:
    """Scrapes of the recordings' quiet phases that had a forecast, and all of them."""
    by_capture: dict[Path, list[Verdict]] = {}
    alarmed = judged = 0
    for phase in phases():
        if phase.first_causes:
            continue
        if phase.capture not in by_capture:
            by_capture[phase.capture] = diagnoses(phase.capture, targets=RECORDED_TARGETS)
        inside = [
            d for d in by_capture[phase.capture] if phase.judged_from_s <= d.t_s <= phase.to_s
        ]
        judged += len(inside)
        alarmed += sum(d.values.get("slo_breaks_in_s") is not None for d in inside)
    return alarmed, judged


def report(
    *,
    machine: str = MACHINE,
    seats: int = SEATS,
    first_seed: int = 0,
    seeds: int = 4,
    minutes: Sequence[float] = (10, 20),
    hours: float = 4,
) -> str:
    """Lead times on ramps, and false forecasts on loads that stay."""
    lines = [f"{'TTFT target broken by':22}{'ramp':>8}{'median lead':>13}{'from':>7}{'to':>7}"]
    chosen, turns = kinds(machine, seats), range(first_seed, first_seed + seeds)
    for kind in chosen:
        for over in minutes:
            runs = [run(kind, climbs(kind, over), for_s=4500, seed=seed) for seed in turns]
            leads = sorted(
                outcome.lead_s or 0.0 for outcome in runs if outcome.exhausted_s is not None
            )
            if not leads:
                lines.append(f"{kind.name:22}{over:>4} min  the target was kept")
                continue
            columns = f"{median(leads):.0f} s", f"{leads[0]:.0f} s", f"{leads[-1]:.0f} s"
            lines.append(
                f"{kind.name:22}{over:>4} min{columns[0]:>13}{columns[1]:>7}{columns[2]:>7}"
            )
    for kind in chosen:
        seed = first_seed + STAYS_SEED
        stood = [run(kind, stays(kind, ratio), for_s=hours * 3600, seed=seed) for ratio in STEADY]
        alarmed, lasted = (
            sum(getattr(outcome, key) for outcome in stood) for key in ("alarmed_s", "lasted_s")
        )
        lines.append(
            f"{kind.name}, load that stays: a forecast stood for {alarmed:.0f} s in "
            f"{lasted / 3600:.1f} h"
        )
    return "\n".join(lines)


def of_recordings() -> str:
    """False forecasts on quiet recordings."""
    alarmed, judged = quiet_recordings()
    return f"quiet phases of the recordings: a forecast in {alarmed} of {judged} scrapes"


def main() -> None:
    """Print the figures; other machines, seats and seeds than those that it was made with tell
    how far they hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--machine", choices=list(MACHINES), default=MACHINE)
    parser.add_argument(
        "--seats", type=int, default=SEATS, help="requests that cache or seats hold"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--runs", type=int, default=4, help="ramps of each kind")
    given = parser.parse_args()
    print(report(machine=given.machine, seats=given.seats, first_seed=given.seed, seeds=given.runs))
    print(of_recordings())


if __name__ == "__main__":
    main()
