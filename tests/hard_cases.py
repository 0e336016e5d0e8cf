"""Labelled hard cases from the simulator, judged by kneewatch: `make accuracy`'s second part.

    python -m tests.hard_cases [--seed N] [--weeks N] [--jobs N] [--only TEXT] [--verbose]

A case's server is healthy at first, then its faults begin. A cause counts as told when it is told
at warning or worse in half of the scrapes from 150 s after the beginning on, by itself or within
another. Told causes that were not planted, and do not follow from what was, are wrong. The sweeps
judge the same cases with latency targets, and cases without quiet times.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from multiprocessing import get_context
from os import cpu_count

from tests.hard_judging import Judged, judge, played, said
from tests.hard_sweeps import (
    Headed,
    by_cause_and_level,
    headed,
    headed_table,
    is_swept,
    levels_table,
    quietless_table,
    said_instead,
    with_targets,
)
from tests.simulator import traces
from tests.simulator.cases import Case, cases
from tests.simulator.sweeps import LOST, quietless_cases


def judge_case(case: Case, *, seed: int) -> tuple[list[Judged], list[Headed]]:
    """Verdicts on a case: without targets, and at each level of targets where it is swept."""
    incident, own = played(case, seed), case.faults[0].targets
    diagnoses = list(said(incident, own))
    if case.group == LOST:
        return [], [headed(case, diagnoses)]
    judged = [judge(incident, diagnoses, level="none", targets=own)]
    if is_swept(case):
        judged += with_targets(incident, diagnoses)
    return judged, []


def judge_cases(
    chosen: Sequence[Case], *, seed: int, jobs: int
) -> Iterator[tuple[list[Judged], list[Headed]]]:
    """Verdicts on each case, by so many processes."""
    if jobs == 1 or len(chosen) <= 1:
        yield from map(partial(judge_case, seed=seed), chosen)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(partial(judge_case, seed=seed), chosen)


def by_group(judged: Sequence[Judged]) -> str:
    """How many cases of each group were told right."""
    heads = ("right", "first right", "of", "planted told", "wrong causes")
    lines = [f"{'cases':18}" + "".join(f"{head:>14}" for head in heads)]
    groups = dict.fromkeys(result.case.group for result in judged)
    for group in groups:
        rows = [result for result in judged if result.case.group == group]
        wanted = sum(len(result.case.wanted) for result in rows)
        concluded = sum(len(result.case.wanted & result.concluded) for result in rows)
        wrong = sum(len(result.wrong) for result in rows)
        right = sum(result.right for result in rows)
        first = sum(result.first_right for result in rows)
        cells = (right, first, len(rows), f"{concluded} of {wanted}", wrong)
        lines.append(f"{group:18}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def by_cause(judged: Sequence[Judged]) -> str:
    """Precision and recall of each cause over cases, and how soon the first right word came."""
    wanted, concluded, wrong = Counter[str](), Counter[str](), Counter[str]()
    delays = defaultdict[str, list[float]](list)
    for result in judged:
        wanted.update(result.case.wanted)
        concluded.update(result.case.wanted & result.concluded)
        wrong.update(result.wrong)
        if len(result.case.wanted) == 1 and result.delay_s is not None and result.right:
            delays[next(iter(result.case.wanted))].append(result.delay_s)
    lines = [f"{'cause':24}{'precision':>10}{'recall':>8}{'planted':>9}{'wrong':>7}{'after':>8}"]
    for cause in sorted(set(wanted) | set(wrong)):
        right = concluded[cause]
        precision = f"{right / (right + wrong[cause]):.2f}" if right + wrong[cause] else "-"
        recall = f"{right / wanted[cause]:.2f}" if wanted[cause] else "-"
        times = sorted(delays[cause])
        after = f"{times[len(times) // 2]:.0f} s" if times else "-"
        lines.append(
            f"{cause:24}{precision:>10}{recall:>8}{wanted[cause]:>9}{wrong[cause]:>7}{after:>8}"
        )
    return "\n".join(lines)


def calibration(judged: Sequence[Judged]) -> str:
    """Of causes told with a confidence, the share that was there, over judged scrapes."""
    tens = defaultdict[int, list[tuple[bool, float]]](list)
    for result in judged:
        for cause, confidence in result.confidences:
            right = cause in result.case.wanted | result.case.also | result.follows
            tens[min(9, int(confidence * 10))].append((right, confidence))
    lines = [f"{'confidence':14}{'mean':>6}{'right':>7}{'scrapes':>9}"]
    for ten, rows in sorted(tens.items()):
        mean = sum(confidence for _, confidence in rows) / len(rows)
        share = sum(right for right, _ in rows) / len(rows)
        label = f"{ten / 10:.1f} to {ten / 10 + 0.1:.1f}"
        lines.append(f"{label:14}{mean:>6.2f}{share:>7.2f}{len(rows):>9}")
    return "\n".join(lines)


def shown(result: Judged) -> str:
    """A case in a line."""
    shares = ", ".join(f"{cause} {share:.2f}" for cause, share in sorted(result.listed.items()))
    firsts = ", ".join(f"{cause} {count}" for cause, count in result.firsts.most_common(2))
    wanted = (
        "+".join(sorted(result.case.wanted)) or "/".join(sorted(result.case.accepted)) or "nothing"
    )
    early = f"  EARLY {', '.join(sorted(result.early))}" if result.early else ""
    name = (
        result.case.name[:58]
        if result.level == "none"
        else f"{result.case.name[:38]} ({result.level})"
    )
    claims = "  CLAIMS ROOM ON THE GPU" if result.unmeasured else ""
    return (
        f"{'yes' if result.ok else 'NO':4}{result.case.machine:20}{name:60}"
        f"want {wanted:38} first {firsts:44} told {shares or '-'}{early}{claims}"
    )


def report(judged: Sequence[Judged], rows: Sequence[Headed], *, verbose: bool) -> Iterator[str]:
    """The tables: cases as they are, with targets, without quiet times."""
    swept = [verdict for verdict in judged if is_swept(verdict.case)]
    quietless = [verdict for verdict in judged if verdict.is_quietless]
    plain = [verdict for verdict in judged if verdict.level == "none" and not verdict.is_quietless]
    for verdict in judged:
        # What was wrong with targets is too much for a line each: it is counted below.
        if verbose or (verdict.level == "none" and (not verdict.ok or verdict.early)):
            yield shown(verdict)
    if plain:
        early = sum(bool(verdict.early) for verdict in plain)
        yield f"\n{by_group(plain)}\n\n{by_cause(plain)}\n\n{calibration(plain)}\n"
        yield f"healthy minutes before the fault: a warning in {early} of {len(plain)} cases\n"
    if swept:
        with_any = [verdict for verdict in swept if verdict.level != "none"]
        yield f"with latency targets:\n\n{levels_table(swept)}\n\n{by_cause_and_level(swept)}\n"
        yield f"{said_instead(with_any)}\n\nright with targets: {_right(with_any)}\n"
    if quietless:
        yield f"without quiet times:\n\n{quietless_table(quietless)}\n"
        yield f"{said_instead(quietless)}\n\nright without quiet times: {_right(quietless)}\n"
    if rows:
        yield f"{headed_table(rows)}\n"
        yield f"right of a prefix lost under stalls: {sum(r.right for r in rows)} of {len(rows)}\n"


def _right(judged: Sequence[Judged]) -> str:
    return f"{sum(verdict.right_and_first for verdict in judged)} of {len(judged)}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--weeks", type=float, default=traces.WEEKS, help="engine-weeks watched")
    parser.add_argument("--jobs", type=int, default=cpu_count() or 1, help="processes")
    parser.add_argument("--detailed", action="store_true", help="weeks step by step: far slower")
    parser.add_argument("--only", default="", help="cases with this in group, name or machine")
    parser.add_argument("--verbose", action="store_true", help="a line for every case and level")
    given = parser.parse_args()
    every = chain(cases(), quietless_cases())
    chosen = [c for c in every if given.only in f"{c.group} {c.name} {c.machine}"]
    verdicts = list(judge_cases(chosen, seed=given.seed, jobs=given.jobs))
    judged = [verdict for levels, _ in verdicts for verdict in levels]
    rows = [row for _, headings in verdicts for row in headings]
    for text in report(judged, rows, verbose=given.verbose):
        print(text)
    if given.weeks:
        print(traces.report(given.seed, given.weeks, detailed=given.detailed, jobs=given.jobs))


if __name__ == "__main__":
    main()
