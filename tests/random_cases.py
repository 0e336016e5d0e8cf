"""Random servers, loads and faults, judged by kneewatch and by the simulator's own books.

    python -m tests.random_cases [--seed N] [--count N] [--jobs N] [--verbose]

Expected: without a fault and without harm by the books, no warning. With a fault that harms
clients, one of its causes comes first in four of five judged scrapes. With a fault that harms
nobody, nothing critical. Between these a fault harms a little: then no other root cause may come
first in most scrapes.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from os import cpu_count

from msgspec import Struct

from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import WINDOW_S
from tests.hard_judging import Incident, Judged, judge, played, said
from tests.simulator.harm import ITL, TTFT, Harm, Ledger, harm
from tests.simulator.random_cases import RandomCase, random_case
from tests.target_levels import LATENCY_CAUSES

FIRST_RATIO = 0.8
NO_FAULT = "no fault"
SILENCE = "-"
OF_LOAD = frozenset({"kv_pressure", "queue_saturation", "admission_limit"})
"""Causes of too much load: the books tell which of them hold, since seats, cache and GPUs are
drawn."""

ALWAYS_TOLD = frozenset({"gpu_fault"})
"""What must be told though nobody is harmed yet: the GPU has to be replaced."""

AS_RIGHT = {
    "gpu_fault": {"engine_stalled"},
    "decode_bound": {"host_contention", "slow_steps", "slo_conflict"},
    "prefill_bound": {"slo_conflict", "prefill_interference"},
    "runaway_generation": {"workload_drift"},
}
"""What may come first as well: the same trouble by another name, or one that follows at once."""

QUEUES_UP = frozenset({"prefill_interference"})
"""Faults beside which the queue that they make may come first, where they are told as well."""

WITHOUT_GPU_PAGE = {
    "gpu_throttled": {"decode_bound", "slow_steps", "host_contention", SILENCE},
    "decode_bound": set[str](),
}
"""What may come first as well where no page shows the GPUs, beside a queue that follows."""


class Verdict(Struct, frozen=True):
    """A random case and what was wrong with what was said of it: nothing where `wrong` is empty.

    `early`: causes at warning or worse while nobody was harmed, before the fault or without any.
    """

    case: RandomCase
    harm: Harm
    healthy: bool
    early: frozenset[str]
    firsts: Counter[str]
    wrong: str

    @property
    def fault(self) -> str:
        """The fault's row in the table."""
        return self.case.faults[0].name if self.case.faults else NO_FAULT


def targets_of(case: RandomCase, incident: Incident) -> Targets:
    """The case's latency targets: what its fault needs, else multiples of its healthy P99."""
    ledger = incident.books.ledger
    p99s_s = [ledger.p99_s(name, WINDOW_S, case.begins_s) for name in (TTFT, ITL)]
    ttft_s, itl_s = (
        None if ratio is None or p99_s is None else ratio * p99_s
        for ratio, p99_s in zip(case.ratios, p99s_s, strict=True)
    )
    own = case.faults[0].targets if case.faults else Targets()
    return Targets(ttft_p99_s=own.ttft_p99_s or ttft_s, itl_p99_s=own.itl_p99_s or itl_s)


def judge_seed(seed: int) -> Verdict:
    """The verdict on a seed's case."""
    case = random_case(seed)
    incident = played(case, seed)
    targets, ledger = targets_of(case, incident), incident.books.ledger
    judged = judge(incident, list(said(incident, targets)), level="own", targets=targets)
    done = _harm(case, ledger, targets) if case.faults else Harm.NONE
    healthy = ledger.is_healthy(WINDOW_S, case.begins_s)
    early = judged.early if healthy else frozenset[str]()
    wrong = [f"early {', '.join(sorted(early))}"] if early else []
    if case.faults:
        late = _wrong(case, judged, done, _accepted(case, judged, ledger))
        wrong += [late] if late else []
    elif healthy and judged.paged - early:
        wrong.append(f"paged {', '.join(sorted(judged.paged))}")
    return Verdict(case, done, healthy, early, judged.firsts, "; ".join(wrong))


def _harm(case: RandomCase, ledger: Ledger, targets: Targets) -> Harm:
    """The harm in the judged time: against targets where there are some, else against the same
    time without the fault. What is missed without the fault as well is not its harm."""
    span_s, otherwise = (case.judged_from_s, case.ends_s), case.without_fault()

    def of_target(name: str, target_s: float | None) -> Harm | None:
        done = ledger.of_target(name, target_s, *span_s)
        before = otherwise.of_target(name, target_s, *span_s)
        return Harm.NONE if done is not None and done == before else done

    return harm(
        ledger.served(*span_s),
        otherwise.served(*span_s),
        ttft=of_target(TTFT, targets.ttft_p99_s),
        itl=of_target(ITL, targets.itl_p99_s),
    )


def _accepted(case: RandomCase, judged: Judged, ledger: Ledger) -> frozenset[str]:
    """Causes of which one must come first where the fault harms."""
    cause, follows = case.faults[0].cause, judged.follows
    words = {cause} | AS_RIGHT.get(cause, set())
    if cause in OF_LOAD:
        words |= follows
    if cause in WITHOUT_GPU_PAGE and not case.gpu_page:
        words |= WITHOUT_GPU_PAGE[cause] | follows
    if cause in QUEUES_UP and cause in judged.concluded:
        words |= follows
    if cause == "spec_decode_poor" and _still_pays(case, ledger):
        words |= {SILENCE} | follows
    if case.trouble is not None and (case.wanted | words & follows) & judged.concluded:
        words.add(case.trouble.cause)
    return frozenset(words)


def _still_pays(case: RandomCase, ledger: Ledger) -> bool:
    """Whether clients are served worse without speculation than with it, poor as it is."""
    span_s = case.judged_from_s, case.ends_s
    with_it, without = ledger.served(*span_s), case.without_drafts().served(*span_s)
    return without is None or with_it is None or with_it.pace_s < without.pace_s


def _wrong(case: RandomCase, judged: Judged, done: Harm, accepted: frozenset[str]) -> str:
    """What is wrong after the fault, in words; empty for nothing."""
    count, of = sum(judged.firsts[cause] for cause in accepted), judged.firsts.total()
    first = ", ".join(f"{cause} {n}" for cause, n in judged.firsts.most_common(3))
    if done == Harm.CLEAR or case.faults[0].cause in ALWAYS_TOLD:
        return "" if count >= FIRST_RATIO * of else f"first {first} of {of}"
    true = accepted | case.also | judged.follows | {SILENCE}
    true |= LATENCY_CAUSES if judged.missed else frozenset()
    misled = sum(n for cause, n in judged.firsts.items() if cause not in true)
    if misled > of / 2:
        return f"misled: {first} of {of}"
    if done == Harm.NONE and judged.paged - judged.follows:
        return f"paged {', '.join(sorted(judged.paged))}"
    return ""


def judge_seeds(seeds: Sequence[int], *, jobs: int) -> Iterator[Verdict]:
    """Verdicts on cases, by so many processes."""
    if jobs == 1:
        yield from map(judge_seed, seeds)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(judge_seed, seeds, chunksize=4)


def shown(verdict: Verdict) -> str:
    """A case in a line."""
    case = verdict.case
    strength = f" {case.faults[0].strength:.2g}" if case.faults else ""
    launch = case.launch
    first = ", ".join(f"{cause} {n}" for cause, n in verdict.firsts.most_common(2))
    return (
        f"{case.seed:>7}  {verdict.fault + strength:46}{verdict.harm.name.lower():8}"
        f"{'healthy' if verdict.healthy else 'strained':10}{case.machine:20}"
        f"load {case.share:.2f}  seats {launch.max_num_seqs:<4} each {case.scrape_s:.0f} s  "
        f"{'' if case.gpu_page else 'no GPU page  '}{verdict.wrong or 'right: ' + first}"
    )


def table(verdicts: Sequence[Verdict]) -> str:
    """For each fault how many cases are right at each harm, and the seeds of the wrong ones."""
    heads = ("clear harm", "a little", "none", "quiet before")
    lines = [f"{'fault':40}" + "".join(f"{head:>14}" for head in heads) + "  wrong seeds"]
    names = sorted(
        {verdict.fault for verdict in verdicts}, key=lambda name: (name != NO_FAULT, name)
    )
    for name in [*names, "all"]:
        rows = [verdict for verdict in verdicts if name in (verdict.fault, "all")]
        cells = list[str]()
        for level in (Harm.CLEAR, Harm.LITTLE, Harm.NONE):
            planted = [row for row in rows if row.harm == level and row.case.faults]
            right = sum(not row.wrong.removeprefix("early") or _only_early(row) for row in planted)
            cells.append(f"{right} of {len(planted)}" if planted else "-")
        before = [row for row in rows if row.healthy]
        cells.append(f"{sum(not row.early for row in before)} of {len(before)}")
        wrong = ", ".join(str(row.case.seed) for row in rows if row.wrong) if name != "all" else ""
        lines.append(f"{name:40}" + "".join(f"{cell:>14}" for cell in cells) + f"  {wrong}")
    return "\n".join(lines)


def _only_early(verdict: Verdict) -> bool:
    return verdict.wrong.startswith("early") and ";" not in verdict.wrong


def main() -> None:
    """Print the wrong cases and the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="cases are of this seed and the next")
    parser.add_argument("--count", type=int, default=100, help="how many cases")
    parser.add_argument("--jobs", type=int, default=cpu_count() or 1, help="processes")
    parser.add_argument("--verbose", action="store_true", help="a line for every case")
    given = parser.parse_args()
    verdicts = list[Verdict]()
    for verdict in judge_seeds(range(given.seed, given.seed + given.count), jobs=given.jobs):
        verdicts.append(verdict)
        if given.verbose or verdict.wrong:
            print(shown(verdict), flush=True)
    print(f"\n{table(verdicts)}\n")
    print(f"right: {sum(not verdict.wrong for verdict in verdicts)} of {len(verdicts)}")


if __name__ == "__main__":
    main()
