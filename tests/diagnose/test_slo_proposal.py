"""Without latency targets, quiet hours propose some; with targets, nothing is proposed."""

from __future__ import annotations

import re

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import NO_TARGETS, Targets
from tests.continued import COUNTED, SAMPLE
from tests.diagnose.streams import START_S, bodies

PROPOSAL = re.compile(
    r"suggest TTFT P99 [\d.]+ m?s, ITL P99 [\d.]+ m?s: accept with --slo-ttft ([\d.]+) "
    r"--slo-itl ([\d.]+)\. Until then slow first tokens are critical only from 10x"
)
EVERY_S, APART_S = 30.0, 20.0


def quiet(hours: float, targets: Targets = NO_TARGETS) -> list[Verdict]:
    """Verdicts on a healthy recording whose rates go on for hours."""
    pages = bodies("healthy_light")
    first, last = pages[len(pages) // 2], pages[len(pages) // 2 + int(APART_S / 2)]
    before = {match[1] + (match[2] or ""): float(match[3]) for match in SAMPLE.finditer(first)}
    stream = TargetStream("tiny", Profile(window_s=60.0, targets=targets), Limits())

    def page(number: int) -> str:
        def now(match: re.Match[str]) -> str:
            name, value = match[1] + (match[2] or ""), float(match[3])
            if match[1].endswith(COUNTED):
                value += (value - before.get(name, value)) * number * EVERY_S / APART_S
            return f"{name} {value!r}"

        return SAMPLE.sub(now, last)

    return [
        verdict
        for number in range(round(hours * 3600 / EVERY_S))
        for verdict in stream.take(START_S + number * EVERY_S, page(number), "")
    ]


def test_quiet_hours_propose_targets_that_were_met() -> None:
    told = quiet(5.0)
    early, late = told[round(3.5 * 3600 / EVERY_S)], told[-1]
    assert early.judged_against == "its own baseline (no SLO configured)"
    proposal = PROPOSAL.search(late.judged_against)
    assert proposal is not None, late.judged_against
    ttft_s, itl_s = map(float, proposal.groups())
    usual = late.values
    assert (usual["ttft_p99_s"] or 0.0) < ttft_s < 2 * (usual["ttft_p99_s"] or 0.0)
    assert (usual["itl_p99_s"] or 0.0) < itl_s < 2 * (usual["itl_p99_s"] or 0.0)
    accepted = quiet(0.1, Targets(ttft_s, itl_s))[-1]
    assert accepted.health == "ok"
    assert accepted.judged_against.startswith("targets: ")
