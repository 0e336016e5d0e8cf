"""Sentences of recommendations have the numbers of their document, and contradict nothing.

    python -m tests.diagnose.recommend.test_texts [PART PARTS]

looks at what is said of all hard cases, or of a part of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations, islice
from math import ceil, inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.recommend.ledger import order, subject
from kneewatch.diagnose.sizing.replica_count import SAFETY_DEFAULT
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import singular
from tests.diagnose.recommend.scenes import ADVISED, FULL, LLAMA, advised, changes
from tests.diagnose.situations import Situation
from tests.examples import examples
from tests.hard_judging import played, said
from tests.incidents import rebuilt
from tests.recordings import CAPTURES, LAB, diagnoses
from tests.simulator.cases import Case, cases

NEEDS = re.compile(r"at ([\d.]+)x the rate|take ([\d.]+)x the KV cache")
TOTAL = re.compile(r"it needs (?:\d+, or )?(\d+) with a safety factor")
HELD = re.compile(r"of ([\d,]+) tokens holds ([\d.]+) requests of the present mean size \(([\d,]+)")
WHY = re.compile(r"First (\d+), now (\d+): [^.]* (rose|fell) from")
MORE = re.compile(r" \(and (\d+) more\)")
"""A sentence about the first piece of evidence, and how many there are besides."""

QUIET = re.compile(
    r"[\d.]+% in its newest part|are above [\d.]+ tokens|chance explains at most [\d.]+%"
    r"|(?:baseline|usual: TTFT P99) [\d.,]+(?: ?(?:ms|s|%))?|longest 1% of prompts"
    r"|since the restart at \d\d:\d\d"
)
"""A value of quiet times, a bound of a bucket, or a time of the day: not in the document."""

NAMED = re.compile(r"GPUs? \d+(?:(?:, | and )\d+)*(?: of [\w.-]+)?")
CLOCK = re.compile(r"SM clock \d+ MHz")
"""GPUs by their names, and what a verdict has no figure of."""

TIMES = re.compile(r"hold (?:up to )?([\d.]+)x as many")


DRAFTS = (
    re.compile(r"([\d.]+) of \d+ draft tokens"),
    re.compile(r"([\d.]+)x the speed without it"),
)


def number(text: str) -> float:
    return float(text.replace(",", ""))


NUMBER = re.compile(
    r"(?<![\w.\-])(\d[\d,]*(?:\.\d+)?)(?!xx)\s*"
    r"(%|percentage points|GB/s|MHz|ms\b|s\b|min\b|h\b|GiB)?"
)
SCALES = {
    "%": 100.0,
    "percentage points": 100.0,
    "GB/s": 1e-9,
    "MHz": 1e-6,
    "ms": 1e3,
    "min": 1 / 60,
    "h": 1 / 3600,
    "GiB": 1 / 2**30,
}


class Beside(Struct, frozen=True):
    """What the sources show beside a verdict's signals: figures, and names of GPUs and adapters."""

    figures: tuple[float, ...]
    names: tuple[str, ...]


NOT_MEASURED = (SAFETY_DEFAULT, 0.5)
"""The safety factor, and the length of a gap that counts as a stall."""


def unexplained(text: str, figures: Iterable[float]) -> list[str]:
    """Numbers of a text that are none of these figures, as the text rounds them."""
    known, found = [*figures, *NOT_MEASURED], list[str]()
    for match in NUMBER.finditer(text):
        said, decimals = number(match[1]), len(match[1].partition(".")[2])
        near = 0.5001 * 10**-decimals + 0.006 * said
        scale = SCALES.get(match[2], 1.0)
        if not any(abs(scale * abs(figure) - said) <= near for figure in known):
            found.append(text[max(0, match.start() - 40) : match.end() + 20])
    return found


def figures_of(advice: Advice) -> Iterator[float]:
    """The figures of a recommendation's document."""
    for figures in (advice.before, advice.predicted, advice.basis):
        yield from figures.values()
    for change in advice.changes:
        for value in (change.before, change.after):
            yield from map(number, re.findall(r"\d[\d.]*", str(value)))


def wrong(advice: Advice, targets: Targets) -> Iterator[str]:
    """What a recommendation's sentences say that its numbers do not."""
    words, before, then = advice.summary, advice.before, advice.predicted
    if (said := NEEDS.search(words)) and advice.changes:
        ratio = before["load_ratio"]
        (now, total) = changes(advice)["replicas"]
        assert isinstance(now, int)
        assert isinstance(total, int)
        if number(said[1] or said[2]) != pytest.approx(ratio, rel=0.06):
            yield "the ratio"
        needed = TOTAL.search(words)
        if needed is None or int(needed[1]) != ceil(round(now * ratio * SAFETY_DEFAULT, 6)):
            yield "the number that it needs"
        elif int(needed[1]) != total and "recommended before" not in words:
            yield "the change"
        elif int(needed[1]) <= now and "recommended before" not in words:
            yield "more replicas than the load needs"
        if then.get("load_ratio", ratio * now / total) != pytest.approx(
            ratio * now / total, rel=2e-3
        ):
            yield "the ratio after the change"
    if said := HELD.search(words):
        tokens, fits, mean = map(number, said.groups())
        if fits != pytest.approx(tokens / mean, rel=0.01, abs=0.1):
            yield "the requests that fit"
    if (said := TIMES.search(words)) and number(said[1]) != pytest.approx(
        then["kv_capacity_ratio"], abs=0.06
    ):
        yield "the larger cache"
    # Nobody waits then: TTFT is no longer than with the present queue.
    if then.get("waiting") == 0 and then.get("ttft_s", 0.0) > 1.01 * before.get("ttft_s", inf):
        yield "a TTFT of requests that wait, where none does"
    if then.get("preemption_per_s") == 0 and "still preempt" in words:
        yield "preemptions"
    if (said := WHY.search(words)) and (change := advice.changes[0]).before is not None:
        assert isinstance(change.before, int)
        is_more, is_raised = int(said[2]) > int(said[1]), int(said[2]) > change.before
        if is_raised and is_more != (said[3] == "rose"):
            yield "a higher size for a lower load"
    if "takes more time than the accepted" in words and before["speedup_at_most_ratio"] >= 1:
        yield "drafts that cost time and gain speed"
    itl_s, target_s = then.get("itl_s"), targets.itl_p99_s
    if (
        itl_s
        and target_s
        and before.get("itl_s")
        and itl_s > target_s
        and "still missed" not in words
    ):
        yield "an ITL target that stays missed"
    for key, name in (("itl_s", "ITL"), ("ttft_s", "TTFT"), ("prefill_p99_s", "prefill")):
        rises = then.get(key, 0.0) > 1.26 * before.get(key, inf)
        if rises and not any(name in each for each in advice.worsens):
            yield f"{name} that rises in passing"
    stated = [target_s for target_s in (targets.ttft_p99_s, targets.itl_p99_s) if target_s]
    yield from unexplained(words, [*figures_of(advice), *stated])


def contradictions(recommendations: Sequence[Advice]) -> Iterator[str]:
    """Pairs that exclude each other, and changes that are not in the ledger's order."""
    for first, second in combinations(recommendations, 2):
        if subject(first) == subject(second):
            yield f"{first.id} and {second.id}"
        if first.cause == second.cause and order(first) > order(second):
            yield f"{first.id} before {second.id}"


@examples(1000)
@given(
    cause_id=st.sampled_from(ADVISED),
    running=st.floats(1, 300),
    waiting=st.floats(0, 3000),
    growth_per_s=st.sampled_from([-2.0, -0.3, 0.0, 0.05, 0.8, 6.0]),
    usage=st.floats(0.05, 1.0),
    prompt=st.floats(20, 20_000),
    target_s=st.sampled_from([None, 0.02, 0.2]),
    replicas=st.sampled_from([None, 1, 2, 9]),
    is_known=st.booleans(),
    fixed=st.sampled_from([{}, {"num_gpu_blocks_override": "10001"},
                           {"kv_cache_memory_bytes": "20000000000"}]),
)  # fmt: skip
def test_random_loads(
    cause_id: str, running: float, waiting: float, growth_per_s: float, usage: float,
    prompt: float, target_s: float | None, replicas: int | None, *, is_known: bool,
    fixed: dict[str, Any],
) -> None:  # fmt: skip
    situation: Situation = FULL.but(
        running=running, running_avg=running, running_max=running, waiting=waiting,
        waiting_avg=waiting, waiting_by_capacity=waiting, waiting_slope_per_s=growth_per_s,
        kv_usage_avg_ratio=usage, prompt_tokens_mean=prompt, prompt_tokens_p99=2 * prompt,
        itl_p99_s=0.09, ttft_p99_s=9.0, spec_acceptance_ratio=0.1, spec_draft_tokens_per_s=40.0,
        spec_accepted_per_draft_tokens=0.4,
    )  # fmt: skip
    targets = Targets(itl_p99_s=target_s)
    stated = replace(LLAMA if is_known else Stated(version=(0, 32, 0)), replicas=replicas)
    levers = advised(
        cause_id, situation=replace(situation, targets=targets), stated=stated, **fixed
    )
    assert [(each.id, what) for each in levers.values() for what in wrong(each, targets)] == []
    assert [*contradictions([*levers.values()])] == []
    for each in levers.values():
        assert each.guide
        if fixed and each.id == "fp8-weights":
            assert "stays unused" in each.summary


OVER = re.compile(r"(TTFT|ITL)(?: P99)? is over its target")


def disagreements(verdict: Verdict, targets: Targets) -> Iterator[str]:
    """Two figures of one quantity, changes in opposite directions, and targets that are met."""
    shapes = dict[str, str]()
    for cause in verdict.causes:
        if cause.seen_s == verdict.t_s and cause.id not in NOT_OF_SIGNALS:
            for text in (cause.summary, *(part.text for part in (*cause.evidence, *cause.against))):
                other = shapes.setdefault(NUMBER.sub("#", text), text)
                if other != text:
                    yield f"{other} / {text}"
                for name in OVER.findall(text):
                    key, stated = ("ttft_p99_s", targets.ttft_p99_s)
                    if name == "ITL":
                        key, stated = ("itl_p99_s", targets.itl_p99_s)
                    now = verdict.values.get(key)
                    if stated is None or (now is not None and now <= stated):
                        yield f"{text}: {now} of {stated}"
    ways = dict[str, float]()
    for each in verdict.recommendations:
        for change in each.changes:
            match change.before, change.after:
                case (int() | float() as before, int() | float() as after):
                    if ways.setdefault(change.flag, after - before) * (after - before) < 0:
                        yield f"{change.flag} up and down"
                case _:
                    pass
    at_once = dict[tuple[str, object], float]()
    for each in verdict.recommendations:
        for key, value in each.before.items():
            if at_once.setdefault((key, each.as_of_s), value) != value:
                yield f"{key} before {each.id}: {at_once[key, each.as_of_s]} and {value}"


RECORDINGS = {path.name: path for path in [*CAPTURES.glob("*.gz"), *LAB.glob("*.gz")]}
HARD = [case for at, case in enumerate(cases()) if at % 40 == 0]


def mistakes(
    verdicts: Iterable[Verdict], targets: Targets, beside: Beside | None = None
) -> Iterator[object]:
    """What is wrong in the texts of verdicts. What GPUs, processes and adapters did is compared
    with what the sources show `beside` the signals, if that is given."""
    not_of_signals, lists = NOT_OF_SIGNALS, LISTS
    if beside is not None:
        not_of_signals, lists = NOT_OF_SIGNALS - {"engine_restarted"}, set[str]()
    for verdict in verdicts:
        yield from contradictions(verdict.recommendations)
        yield from disagreements(verdict, targets)
        words = [cause.summary for cause in verdict.causes]
        words += [each.summary for each in verdict.recommendations]
        words += [part.text for cause in verdict.causes for part in cause.evidence]
        for drafts in DRAFTS:
            if len(told := {match for text in words for match in drafts.findall(text)}) > 1:
                yield f"two figures of one draft: {sorted(told)}"
        for each in verdict.recommendations:
            yield from wrong(each, targets)
            if is_too_full(each):
                yield "the usage of a larger cache for which nobody waited"
        now = [value for value in verdict.values.values() if value is not None]
        points = verdict.values.get("finished_length_drift_points")
        if points is not None:  # a share in quiet times is the present share less its growth
            now.append((verdict.values["finished_length_ratio"] or 0.0) - points)
        now += [] if beside is None else beside.figures
        for cause in verdict.causes:
            parts = [*cause.evidence, *cause.against]
            of_parts = [n for part in parts for n in (part.value, part.threshold) if n is not None]
            alone, more = MORE.sub("", cause.summary), MORE.search(cause.summary)
            if more and int(more[1]) != len(cause.evidence) - 1:
                yield f"{more[0]} of {len(cause.evidence)} pieces of evidence"
            if cause.seen_s == verdict.t_s and cause.id not in not_of_signals:
                figures = [*figures_with_inverses(now, of_parts)]
                for text in (alone, *(part.text for part in parts if part.signal not in lists)):
                    yield from unexplained(QUIET.sub("", _without_names(text, beside)), figures)
                    if beside is not None:
                        named = NAMED.findall(text)
                        yield from (f"no {name}" for name in named if name not in beside.names)
        yield from (f"plural: {text}" for text in words_of(verdict) if singular(text) != text)


def _without_names(text: str, beside: Beside | None) -> str:
    for name in () if beside is None else beside.names:
        text = text.replace(name, "")
    return text if beside is not None else CLOCK.sub("", NAMED.sub("", text))


def words_of(verdict: Verdict) -> Iterator[str]:
    """All sentences of a verdict."""
    for cause in verdict.causes:
        yield from (cause.summary, cause.lever)
        yield from (part.text for part in (*cause.evidence, *cause.against))
    for each in verdict.recommendations:
        yield from (each.summary, each.risk, *each.checks, *each.verify, *each.worsens)


def is_too_full(advice: Advice) -> bool:
    """Whether more is predicted to be held than now; a twentieth of a cache is a request or two."""
    now = advice.before.get("kv_usage_ratio", 1.0)
    then = advice.predicted.get("kv_usage_ratio", 0.0)  # unknown claims nothing
    grown = advice.predicted.get("kv_capacity_ratio", 1.0)
    is_alone = advice.before.get("waiting") == 0 and not advice.before.get("preemption_per_s")
    # Lengths of finished requests may say more than is in use.
    is_alone = is_alone and advice.before.get("kv_demand_ratio", 0.0) <= 1.3 * now
    return is_alone and grown > 1 and now < 0.9 and then > max(1.3 * now / grown, 0.05)


LISTS = {"process_start", "lora_turns"}
"""Evidence that lists what other processes and adapters did, of which a verdict has no figures."""

NOT_OF_SIGNALS = {
    *("engine_restarted", "target_down", "spec_decode_poor", "metrics_stale", "host_memory_leak"),
}
"""Their sentences count restarts and failed scrapes, estimate a speed, or name hours."""


def figures_with_inverses(*figures: Sequence[float]) -> Iterator[float]:
    """Figures, their inverses (a speed of 0.5 takes 2x as long), and rates per minute."""
    for figure in chain(*figures):
        yield from (figure, 1 / figure if figure else 0.0, 60 * figure)


@pytest.mark.parametrize("name", RECORDINGS)
def test_recordings(name: str) -> None:
    assert [*mistakes(diagnoses(RECORDINGS[name]), Targets())] == []


@pytest.mark.parametrize("name", rebuilt.cases())
def test_rebuilt_incidents(name: str) -> None:
    assert [*mistakes(rebuilt.diagnoses(name), Targets())] == []


@pytest.mark.parametrize("case", HARD, ids=[case.name for case in HARD])
def test_hard_cases(case: Case) -> None:
    targets = case.faults[0].targets
    assert [*mistakes(said(played(case, 1), targets), targets)] == []


def test_a_target_that_stays_missed_is_named() -> None:
    situation = replace(FULL.but(itl_p99_s=0.09), targets=Targets(itl_p99_s=0.02))
    advice = advised("kv_pressure", situation=situation, stated=LLAMA)["replicas"]
    assert "does not mend the ITL P99 target of 20 ms: still missed" in advice.summary


def test_a_seat_for_each_request_leaves_no_ttft_of_a_queue() -> None:
    pinned = FULL.but(running=64.0, running_avg=64.0, running_max=64.0, kv_usage_avg_ratio=0.3,
                      waiting=10.0, waiting_avg=10.0, waiting_by_capacity=10.0,
                      waiting_slope_per_s=0.0, ttft_mean_s=6.0)  # fmt: skip
    levers = advised("admission_limit", situation=pinned, stated=LLAMA, max_num_seqs="64")
    more = levers["max-num-seqs-up"]
    assert more.predicted["waiting"] == 0
    assert more.predicted["ttft_s"] < 0.5
    assert [*wrong(more, Targets())] == []


def test_no_replicas_where_the_arithmetic_needs_none() -> None:
    """A third of the KV cache of two replicas: 0.34 x 2 x 1.3 is less than one replica."""
    little = FULL.but(running=20.0, running_avg=20.0, running_max=20.0, waiting=2.0,
                      waiting_avg=2.0, waiting_by_capacity=2.0, kv_usage_avg_ratio=0.2)  # fmt: skip
    assert "replicas" not in advised("kv_pressure", situation=little, stated=LLAMA)


def main(part: str = "0", parts: str = "1") -> int:
    """Print what is wrong about the hard cases, each kind once."""
    failed = 0
    for case in islice(cases(), int(part), None, int(parts)):
        targets = case.faults[0].targets
        found = dict.fromkeys(map(str, mistakes(said(played(case, 1), targets), targets)))
        failed += bool(found)
        print(f"{case.name}: {'; '.join(list(found)[:3]) or 'right'}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
