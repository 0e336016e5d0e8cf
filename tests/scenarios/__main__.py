"""What is said of each scenario: `python -m tests.scenarios [WORD] [--seed N]`; `-v` lists it."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections import Counter

from kneewatch.reports.diagnosis_text import changed_words
from tests.incidents.rebuilt import worded
from tests.scenarios.cases import SCENARIOS
from tests.scenarios.load import said


def main() -> int:
    """Print a line for each scenario."""
    parser = ArgumentParser(prog="tests.scenarios", description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="only scenarios with this in the name")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-v", "--verbose", action="store_true", help="each change of the diagnosis")
    given = parser.parse_args()
    chosen = [each for each in SCENARIOS if given.word in each.name]
    right = 0
    for scenario in chosen:
        row = said(scenario, given.seed)
        right += row.right
        counts = ", ".join(
            f"{words} {n}" for words, n in Counter(map(worded, row.judged)).most_common(3)
        )
        needless = f"; needless: {row.needless}" if row.needless else ""
        mark = "yes" if row.right else "NO"
        print(f"{scenario.name:34}{mark:4}{row.share:5.2f}  {counts}{needless}", flush=True)
        if given.verbose:
            last = ""
            for at_s, verdict in scenario.verdicts(given.seed):
                if (words := worded(verdict)) != last:
                    summary = verdict.causes[0].summary if verdict.causes else ""
                    print(f"  {at_s:5.0f} {words}: {summary} [{changed_words(verdict)}]")
                last = words
    print(f"\nright: {right} of {len(chosen)}")
    return right < len(chosen)


if __name__ == "__main__":
    sys.exit(main())
