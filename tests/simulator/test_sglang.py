"""Pages of SGLang's own collector classes: each fault is diagnosed, each quiet load is quiet."""

from __future__ import annotations

from functools import cache
from itertools import chain

import pytest

from kneewatch.reports.diagnosis_text import Style, text
from kneewatch.rules.facts import Targets
from tests.hard_judging import judge, said
from tests.simulator.cases import Case
from tests.simulator.sglang_cases import (
    StoredCase,
    recorded,
    replayed,
    restored,
    sglang_cases,
    stored,
)


@cache
def pages() -> list[StoredCase]:
    return recorded()


def test_pages_are_restored_as_they_were() -> None:
    texts = ["# a\nx 1\ny 2\n", "# a\nx 1\ny 3\n", None, "# a\nx 5\ny 3\nz 1\n"]
    rows = list(zip((1.0, 2.0, 3.0, 4.0), texts, strict=True))
    kept = stored(rows)
    assert list(restored(kept)) == rows
    assert kept[1].changes == [(2, "3")]


def test_each_case_was_recorded() -> None:
    assert [(each.machine, each.name) for each in pages()] == [
        (case.machine, case.name) for case in sglang_cases()
    ]


@pytest.mark.parametrize(
    ("at", "case"), [pytest.param(at, case, id=case.name) for at, case in enumerate(sglang_cases())]
)
def test_a_recorded_load_is_diagnosed_as_it_was_planted(at: int, case: Case) -> None:
    targets, incident = case.faults[0].targets, replayed(case, pages()[at])
    verdicts = list(said(incident, targets))
    judged = judge(incident, verdicts, level="none", targets=targets)
    assert judged.right_and_first, (judged.firsts, judged.listed)
    causes = list(chain.from_iterable(verdict.causes for verdict in verdicts))
    texts = [(cause.summary, cause.lever, *(e.text for e in cause.evidence)) for cause in causes]
    spoken = " ".join(chain.from_iterable(texts))
    assert not [word for word in ("vLLM", "preempt", "--max-num-") if word in spoken]
    whole = text([max(verdicts, key=lambda verdict: verdict.severity)], Style())
    flags = ("vLLM", "--max-num-", "--gpu-memory", "--kv-cache-metrics", "--speculative-config")
    assert not [word for word in flags if word in whole]


def test_a_flag_that_is_cheaper_comes_before_replicas() -> None:
    rows = zip(sglang_cases(), pages(), strict=True)
    case, stored_case = next(row for row in rows if [*row[0].wanted] == ["admission_limit"])
    verdicts = list(said(replayed(case, stored_case), Targets(ttft_p99_s=1.0)))
    worst = max(verdicts, key=lambda verdict: (verdict.severity, verdict.t_s))
    flag, replicas = worst.recommendations
    assert (flag.changes, flag.summary.split("; ")[0]) == ((), "Raise --max-running-requests")
    assert [change.flag for change in replicas.changes] == ["replicas"]
    told = text([worst], Style())
    assert "then fix it: Raise --max-running-requests" in told
    assert "alternatives: replicas 1 -> " in told
