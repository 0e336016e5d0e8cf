"""Whether a cause stays away once the first advice of a short watch is followed, on the simulator.

    python -m tests.watched [SEEDS [FIRST]] [--for SECONDS] [--open] [FAULT ...]

starts servers of random models, requests and clients in trouble, watches each as `diagnose` does,
makes the first change advised, and prints whether the cause is concluded again.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from random import Random
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.captures import PageReader
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.vllm_flags import CommandLine
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.recommend.advice import REPLICAS, Advice
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import Severity
from tests.resized import MADE
from tests.simulator.cases import MACHINES, fault, hardware_of
from tests.simulator.gpus import chunk_tokens
from tests.simulator.page import WITH_SPECULATION
from tests.simulator.requests import Closed
from tests.simulator.scheduler import Launch
from tests.simulator.server import Server, Setting

FAULTS = ("kv_pressure", "admission_limit", "prefill_interference", "prefix_cache_off",
          "spec_decode_poor")  # fmt: skip
WARM_S, SETTLE_S, AFTER_S = 120.0, 120.0, 240.0
INTERVAL_S, WINDOW_S = 2.0, 60.0
OFTEN = 0.1
"""A cause that is concluded in this share of the verdicts is back."""


def _chunked(server: Server, _value: int) -> None:
    server.setting.launch.enable_chunked_prefill = True


def _undrafted(server: Server, _value: int) -> None:
    server.setting.launch.num_speculative_tokens = 0


def _shared_out(server: Server, replicas: int) -> None:
    source = server.engine.source
    if isinstance(source, Closed):
        source.size = max(1, round(source.size / replicas))
    else:
        server.rate_per_s /= replicas


FOLLOWED: Mapping[str, Callable[[Server, int], None]] = {
    **MADE,
    "--no-enable-chunked-prefill": _chunked,
    "--speculative-config": _undrafted,
    REPLICAS: _shared_out,
}


class Watched(Struct, frozen=True):
    """What was advised after a watch, and what was seen once it was followed. Without advice that
    can be followed, `advice` is None and `causes` are those concluded before."""

    words: str
    advice: Advice | None
    causes: frozenset[str]
    kv_usage_ratio: float = 0.0
    measured: Mapping[str, float] = {}

    @property
    def is_back(self) -> bool:
        """Whether the cause is concluded again."""
        return self.advice is not None and self.advice.cause in self.causes

    def off(self, key: str) -> float | None:
        """By which factor a predicted latency was off; None if it was not predicted or measured."""
        said_s = None if self.advice is None else self.advice.predicted.get(f"{key}_s")
        was_s = self.measured.get(key)
        return max(said_s / was_s, was_s / said_s) if said_s and was_s else None


def watched(cause: str, seed: int, *, watch_s: float, is_closed: bool = True) -> Watched:
    """A server in trouble, watched, and its first advice followed."""
    server, words = _server(cause, Random(f"watched {cause} {seed}"), is_closed=is_closed)
    targets, stated = fault(cause).targets, _stated(server, with_gpu=seed % 2 == 0)
    server.engine.run(WARM_S)
    profile = Profile(window_s=min(watch_s, WINDOW_S), targets=targets, stated=stated)
    verdicts = [*_verdicts(server, profile, WARM_S, watch_s)]
    advice = next(_to_follow(verdicts[-1], cause), None)
    if advice is None:
        return Watched(words, None, frozenset(each.id for each in verdicts[-1].causes))
    for change in advice.changes:
        FOLLOWED[change.flag](server, change.after if isinstance(change.after, int) else 0)
    from_s = WARM_S + watch_s
    server.restart(from_s)
    if isinstance(server.engine.source, Closed):
        server.engine.source.resume(from_s)
    server.engine.run(from_s + SETTLE_S)
    profile = Profile(window_s=WINDOW_S, targets=targets)
    after = [*_verdicts(server, profile, from_s + SETTLE_S, AFTER_S)]
    late = after[round(WINDOW_S / INTERVAL_S) :]
    counts: dict[str, int] = {}
    for each in (each for verdict in late for each in verdict.causes):
        counts[each.id] = counts.get(each.id, 0) + (each.severity >= Severity.WARNING)
    shown = {
        key: [value for verdict in late if (value := verdict.values.get(signal))]
        for key, signal in (("ttft", "ttft_mean_s"), ("itl", "itl_mean_s"),
                            ("ttft_p99", "ttft_p99_s"), ("itl_p99", "itl_p99_s"),
                            ("prefill_p99", "prefill_p99_s"))
    }  # fmt: skip
    return Watched(
        words,
        advice,
        frozenset(name for name, count in counts.items() if count > OFTEN * len(late)),
        max(verdict.values.get("kv_usage_ratio") or 0.0 for verdict in late),
        {key: median(values) for key, values in shown.items() if values},
    )


def _server(cause: str, rng: Random, *, is_closed: bool) -> tuple[Server, str]:
    """A server that is in trouble from its start, and what is drawn, in words."""
    device, planted = hardware_of(rng.choice([*MACHINES][:3])), fault(cause)
    launch = Launch(num_gpu_blocks=device.blocks(), max_num_batched_tokens=chunk_tokens(device))
    setting = Setting(hardware=device, launch=launch)
    clients, strength = round(8 * 12 ** rng.random()), rng.uniform(1.3, 3.0)
    shape = setting.shape.scaled(rng.uniform(0.4, 2.0))
    setting.shape = shape = replace(shape, output=rng.uniform(75.0, 500.0))
    setting.running = float(clients)
    if cause == "kv_pressure":
        shared = shape.prefixes * shape.prefix_tokens
        tokens = clients * shape.held_tokens / strength + shared
        launch.num_gpu_blocks, launch.is_overridden = int(tokens / launch.block_size), True
    elif cause == "admission_limit":
        launch.max_num_seqs = max(2, round(clients / strength))
    else:
        clients = min(clients, 40)
        planted.start(setting)
    if launch.num_speculative_tokens:
        setting.form = WITH_SPECULATION
    server = Server(setting, rng)
    if cause == "prefill_interference":
        planted.lay(server, rng.uniform(0.8, 2.0))
    elif cause == "spec_decode_poor":
        planted.lay(server, rng.uniform(0.02, 0.1))
    if is_closed:
        source = Closed(server.source.kind, rng)
        source.resize(clients, 0.0)
        server.engine.source = source
    who = f"{clients} clients" if is_closed else f"{server.rate_per_s:.1f} requests/s"
    return server, f"{who} x{strength:.1f}, {shape.prompt:.0f} + {shape.output:.0f} tokens"


def _stated(server: Server, *, with_gpu: bool) -> Stated:
    """What kneewatch reads of the server's process, with the model and its GPU or without."""
    launch, device = server.setting.launch, server.setting.hardware
    flags = {
        "--max-num-batched-tokens": str(launch.max_num_batched_tokens),
        "--max-model-len": str(launch.max_model_len),
        "--max-num-seqs": str(min(launch.max_num_seqs, launch.max_num_batched_tokens)),
    }
    if launch.is_overridden:
        flags["--num-gpu-blocks-override"] = str(launch.num_gpu_blocks)
    if not launch.enable_prefix_caching:
        flags["--no-enable-prefix-caching"] = ""
    if not launch.enable_chunked_prefill:
        flags["--no-enable-chunked-prefill"] = ""
    if tokens := launch.num_speculative_tokens:
        flags["--speculative-config"] = f'{{"method": "eagle", "num_speculative_tokens": {tokens}}}'
    return Stated(
        command_line=CommandLine(device.model.id, flags),
        version=(0, 32, 0),
        model=device.model if with_gpu else None,
        gpu=device.gpu if with_gpu else None,
        tensor_parallel=device.tensor_parallel,
    )


def _verdicts(server: Server, profile: Profile, from_s: float, lasts_s: float) -> Iterator[Verdict]:
    stream, reader = TargetStream("sim", profile, Limits()), PageReader(Limits())
    for turn in range(round(lasts_s / INTERVAL_S) + 1):
        entry = server.scrape(from_s + turn * INTERVAL_S)
        yield from stream.judge(entry.t_s, reader.read(entry))


def _to_follow(verdict: Verdict, cause: str) -> Iterator[Advice]:
    for each in verdict.recommendations:
        can_make = all(
            change.flag in FOLLOWED and (change.after is None or isinstance(change.after, int))
            for change in each.changes
        )
        if each.cause == cause and each.changes and can_make:
            yield each


def main() -> int:
    """Print each run, and each fault's counts."""
    parser = ArgumentParser(prog="python -m tests.watched")
    parser.add_argument("numbers", nargs="*", help="seeds, the first seed, and names of faults")
    parser.add_argument("--for", dest="watch_s", type=float, default=20.0)
    parser.add_argument("--open", action="store_true")
    asked = parser.parse_args()
    seeds, first = [*(int(each) for each in asked.numbers if each.isdigit()), 10, 0][:2]
    failed = 0
    for cause in [each for each in asked.numbers if not each.isdigit()] or FAULTS:
        runs = [
            watched(cause, seed, watch_s=asked.watch_s, is_closed=not asked.open)
            for seed in range(first, first + seeds)
        ]
        for run in runs:
            advice = run.advice
            changes = () if advice is None else advice.changes
            sizes = ", ".join(f"{each.flag} {each.before} -> {each.after}" for each in changes)
            offs = {key: off for key in run.measured if (off := run.off(key)) is not None}
            latencies = ", ".join(f"{key} off {off:.2f}x" for key, off in offs.items())
            print(
                f"  {'BACK' if run.is_back else 'right' if advice else 'NOTHING'} {run.words}: "
                f"{sizes or 'no advice'}; {', '.join(sorted(run.causes)) or 'no cause'}; at most "
                f"{run.kv_usage_ratio:.2f} of the KV cache; {latencies}",
                flush=True,
            )
        advised = [run for run in runs if run.advice is not None]
        back = sum(run.is_back for run in advised)
        failed += back
        print(f"{cause}: back in {back} of {len(advised)}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
