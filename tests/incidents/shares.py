"""Sentences of a verdict that print a share above 100%."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kneewatch.diagnose.verdict import Verdict

PERCENT = re.compile(r"(\d[\d,]*(?:\.\d+)?)%")
DEMAND = re.compile(r"demand is [\d,.]+%|load (?:would )?uses? [\d,.]+%")
"""A demand may exceed what there is."""


def sentences(verdict: Verdict) -> Iterator[str]:
    """All texts of a verdict."""
    for cause in verdict.causes:
        yield cause.summary
        yield cause.lever
        yield from (item.text for item in (*cause.evidence, *cause.against))
    for finding in verdict.findings:
        yield str(finding)
    for advice in verdict.recommendations:
        yield advice.summary
        yield from (*advice.checks, advice.risk, *advice.verify)
    yield from verdict.stage.reasons
    yield from verdict.unknown


def above_whole(verdict: Verdict) -> list[str]:
    """The sentences with a share above 100%; empty if there is none."""
    return [
        text
        for text in sentences(verdict)
        if any(
            float(number.replace(",", "")) > 100 for number in PERCENT.findall(DEMAND.sub("", text))
        )
    ]
