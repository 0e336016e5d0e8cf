"""Published benchmarks of 2026 held against the sizing: output tokens/s, TPOT and TTFT.

Each point is judged against what it is (`load`): a wave, where a benchmark starts `concurrency`
prompts at once (and `prompts` in all, if more); steady arrivals, where lengths vary or requests
come at a rate; or the decode step alone. `doubt` says why a point is shown, not counted.

Usage: python -m tests.throughput_2026 [--ranges]
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from msgspec import Struct

from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.models import is_listed, model
from kneewatch.diagnose.sizing.memory.launch import Launch, parse_version
from kneewatch.diagnose.sizing.memory.weights import Parallel
from kneewatch.diagnose.sizing.requirements import Question
from kneewatch.diagnose.sizing.size import size
from kneewatch.diagnose.sizing.speed.roofline_inputs import measured_class, measured_ratios
from tests.kvtruth import Case, cases
from tests.kvtruth_2026 import within
from tests.peers import aiconfigurator_estimates
from tests.throughput import SYSTEMS, configuration, errors, family, launch, steady, trusted

GIVEN, PUBLIC, UNSEEN = RECORDED = (
    "throughput_2026.jsonl",
    "throughput_2026_public.jsonl",
    "throughput_2026_unseen.jsonl",
)
THIRD, FOURTH = "throughput_2026_third.jsonl", "throughput_2026_fourth.jsonl"
"""Points of later in 2026, written down before anything of them was computed, and in no fit."""
AIMS: Mapping[str, float] = {"output tokens/s": 0.25, "TPOT": 0.25, "TTFT": 0.5}
"""How far measured over predicted may be from 1, by figure."""
_NAMES = {"TPOT": "ITL"}
"""What answers call a benchmark's figure."""
AICONFIGURATOR = "aiconfigurator 0.12, on 58 such points: output tokens/s 31%, TPOT 24%, TTFT 4.4x"
"""Its errors as they were measured once, on points of which most are not among these."""


def question_of(case: Case) -> Question:
    """The launch and the load of a point, nothing of its outcome."""
    return Question(
        launch=Launch(
            model=model(case["model"]),
            gpu=gpu(case["gpu"]),
            parallel=Parallel(
                tensor=case["tp"],
                pipeline=case.get("pp", 1),
                experts=case.get("expert_parallel", False),
                data=case.get("dp", 1),
            ),
            quantization=case.get("quantization"),
            kv_cache_dtype=case.get("kv_cache_dtype", "auto"),
            version=parse_version(case["vllm_version"]),
            gpu_memory_utilization=case.get("gpu_memory_utilization"),
            max_model_len=case.get("max_model_len"),
            max_num_seqs=case.get("max_num_seqs"),
            max_num_batched_tokens=case.get("max_num_batched_tokens"),
            enforce_eager=case.get("enforce_eager", False),
            other_flags=tuple(map(tuple, case.get("other_flags", ()))),
        ),
        concurrency=float(case["concurrency"]),
        input_tokens=float(case["input_tokens"]),
        output_tokens=float(case["output_tokens"]),
    )


class Row(Struct, frozen=True):
    """One point: measured over predicted by figure; None where the source does not state it."""

    case: Case
    ratios: Mapping[str, float | None]
    bands: Mapping[str, tuple[float, float]]

    def is_in_band(self, name: str) -> bool | None:
        """Whether the measured figure is in the stated band; None if not stated, or doubted."""
        ratio = self.ratios[name]
        if ratio is None or "doubt" in self.case:
            return None
        low, high = self.bands[_NAMES.get(name, name)]
        return low <= ratio <= high


def row_of(case: Case) -> Row:
    """The point beside what the sizing says of its launch."""
    question = question_of(case)
    answer = size(question)
    rounds = round(case.get("prompts", case["concurrency"]) / case["concurrency"])
    speed, waves = answer.performance, answer.in_waves(rounds)
    assert speed is not None
    assert waves is not None
    predicted = {
        "wave": (waves.output_tokens_per_s, waves.itl_s, waves.ttft_s),
        "steady": (speed.decode_tokens_per_s, speed.itl_s, speed.ttft_s),
        "decode": (speed.decode_tokens_per_s, speed.decode_step.total_s, speed.ttft_s),
    }[case["load"]]
    tpot_ms = case["tpot_ms"]
    measured = (case["output_tokens_per_s"], tpot_ms and tpot_ms / 1e3, case["ttft_s"])
    ratios = {
        name: seen / said if seen else None
        for name, seen, said in zip(AIMS, measured, predicted, strict=True)
    }
    return Row(case, ratios, measured_ratios(question.launch))


def rows(name: str) -> list[Row]:
    """Every point of the file, judged."""
    return [row_of(case) for case in cases(name)]


def counted(judged: Sequence[Row], name: str) -> list[float]:
    """Measured over predicted less one, of the points without a doubt."""
    ratios = [row.ratios[name] for row in judged if "doubt" not in row.case]
    return [ratio - 1 for ratio in ratios if ratio is not None]


class Ratio(Struct, frozen=True):
    """Measured over predicted of one figure of one benchmark, with its class and its model."""

    figure: str
    kind: str
    model: str
    value: float


def ratios() -> list[Ratio]:
    """Those of all benchmarks of 2026 without a doubt, and of the older ones in a steady state."""
    found = [
        Ratio(figure, measured_class(question_of(row.case).launch)[0], row.case["model"], value)
        for name in (*RECORDED, THIRD, FOURTH)
        for row in rows(name)
        for figure, value in row.ratios.items()
        if value is not None and "doubt" not in row.case
    ]
    chosen = [point for point in trusted() if steady(point)]
    for point, error in zip(chosen, errors(chosen), strict=True):
        kind = measured_class(launch(point))[0]
        columns = error.output_tokens_per_s, error.tpot_s, error.ttft_s
        found += [
            Ratio(figure, kind, family(point), 1 / (1 + off))
            for figure, off in zip(AIMS, columns, strict=True)
            if not math.isnan(off)
        ]
    return found


_FEWEST, _WIDER = 8, 1.1


def calibrated(found: Sequence[Ratio]) -> dict[str, dict[str, tuple[float, float]]]:
    """The ranges of measured.toml that these benchmarks give, by class and figure."""
    ranges: dict[str, dict[str, tuple[float, float]]] = {}
    for kind in sorted({ratio.kind for ratio in found} - {"few"}):
        for figure in AIMS:
            values = sorted(r.value for r in found if (r.kind, r.figure) == (kind, figure))
            if len(values) >= _FEWEST:
                aside = math.ceil(len(values) / 20)
                band = values[aside] / _WIDER, values[-1 - aside] * _WIDER
                ranges.setdefault(kind, {})[figure] = band
    few: dict[str, tuple[float, float]] = {}
    for figure in AIMS:
        bands = [each[figure] for each in ranges.values() if figure in each]
        lowest, highest = min(low for low, _ in bands), max(high for _, high in bands)
        few[figure] = lowest / _WIDER, highest * _WIDER
    every = {kind: {**few, **each} for kind, each in ranges.items()} | {"few": few}
    return {
        kind: {figure: (round(low, 2), round(high, 2)) for figure, (low, high) in each.items()}
        for kind, each in every.items()
    }


def covered(found: Sequence[Ratio], *, left_out: bool = False) -> dict[str, float]:
    """The share of the benchmarks in the range of their class, by figure; if `left_out`, in the
    range that the benchmarks of other models give."""
    ranges = calibrated(found)
    inside: dict[str, list[bool]] = {figure: [] for figure in AIMS}
    for ratio in found:
        if left_out:
            ranges = _without(ratio.model, tuple(found))
        low, high = ranges.get(ratio.kind, ranges["few"])[ratio.figure]
        inside[ratio.figure].append(low <= ratio.value <= high)
    return {figure: statistics.fmean(each) for figure, each in inside.items()}


@cache
def _without(name: str, found: tuple[Ratio, ...]) -> dict[str, dict[str, tuple[float, float]]]:
    return calibrated([ratio for ratio in found if ratio.model != name])


def ranges_text() -> Iterator[str]:
    """The tables of measured.toml, and how often they and those of other models hold."""
    found = ratios()
    for kind, ranges in calibrated(found).items():
        yield f"\n[{kind}]"
        for figure, (low, high) in ranges.items():
            name = _NAMES.get(figure, figure)
            yield f"{json.dumps(name) if ' ' in name else name} = [{low:g}, {high:g}]"
    shares = covered(found), covered(found, left_out=True)
    yield "\n# covered: {}; by ranges without the model: {}".format(*shares)


def beside_aiconfigurator(judged: Sequence[Row]) -> Iterator[str]:
    """Errors of AIConfigurator and of the sizing on the counted points that it can estimate.

    It is given the concurrency as its batch.
    """
    able = [
        row
        for row in judged
        if row.case["gpu"] in SYSTEMS and "doubt" not in row.case and is_listed(row.case["model"])
    ]
    estimates = aiconfigurator_estimates([_asked(row.case) for row in able])
    both = [pair for pair in zip(able, estimates, strict=False) if pair[1] is not None]
    yield f"  on the {len(both)} points that aiconfigurator estimates here, median error:"
    for index, name in enumerate(AIMS):
        ours, theirs = list[float](), list[float]()
        for row, estimate in both:
            ratio, tpot_ms = row.ratios[name], row.case["tpot_ms"]
            if ratio is None or estimate is None:
                continue
            case = row.case
            seen = (case["output_tokens_per_s"], (tpot_ms or 0.0) / 1e3, case["ttft_s"])[index]
            ours.append(abs(ratio - 1))
            theirs.append(abs(seen / estimate[index] - 1))
        if ours:
            nearer = sum(own < other for own, other in zip(ours, theirs, strict=True))
            yield (
                f"    {name:<16} kneewatch {statistics.median(ours):.0%}, aiconfigurator "
                f"{statistics.median(theirs):.0%}; kneewatch is nearer in {nearer} of {len(ours)}"
            )


def _asked(case: Case) -> dict[str, object]:
    """A point's arguments of AIConfigurator's `cli_estimate`."""
    tensor, experts = case["tp"], case.get("expert_parallel", False)
    mixture = {"moe_tp_size": 1 if experts else tensor, "moe_ep_size": tensor if experts else 1}
    return {
        "config": configuration(case["model"]),
        "model_path": case["model"],
        "system_name": SYSTEMS[case["gpu"]],
        "isl": case["input_tokens"],
        "osl": case["output_tokens"],
        "batch_size": case["concurrency"],
        "tp_size": tensor,
        "pp_size": case.get("pp", 1),
        "ctx_tokens": case.get("max_num_batched_tokens") or 8192,
        **(mixture if model(case["model"]).experts.count else {}),
    }


def report() -> Iterator[str]:
    """The tables of all files as lines."""
    yield f"  {AICONFIGURATOR}"
    for name in (*RECORDED, THIRD, FOURTH):
        yield from _table(name)


def _table(name: str) -> Iterator[str]:
    judged = rows(name)
    yield f"Speed against published benchmarks of 2026 (measured / predicted; {name})"
    for figure, bound_ratio in AIMS.items():
        errors = counted(judged, figure)
        hits, count = within(errors, bound_ratio)
        size_of_error = statistics.median(map(abs, errors))
        yield (
            f"  {figure:<18}{hits:>3} of {count} within {bound_ratio:.0%}, median "
            f"{1 + statistics.median(errors):.2f}, error {size_of_error:.0%}, in the band "
            f"{sum(row.is_in_band(figure) is True for row in judged)}"
        )
    yield from beside_aiconfigurator(judged)
    yield f"    {'point':<46}{'load':>8}{'tokens/s':>10}{'TPOT':>7}{'TTFT':>7}"
    for row in judged:
        shown = "".join(
            f"{'-' if ratio is None else f'{ratio:.2f}':>{width}}"
            for ratio, width in zip(row.ratios.values(), (10, 7, 7), strict=True)
        )
        doubt = f"  not counted: {row.case['doubt']}" if "doubt" in row.case else ""
        yield f"    {row.case['case_id']:<46}{row.case['load']:>8}{shown}{doubt}"


if __name__ == "__main__":
    print("\n".join(ranges_text() if "--ranges" in sys.argv else report()))
