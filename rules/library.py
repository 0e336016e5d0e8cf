"""The rules of rules.toml: those that need no setting, in display order, and those for a user's
targets. Pure."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from kneewatch.collector.packaged import packaged_tables
from kneewatch.rules.rule import BY_WORD, Bound, Finding, Rule

_ALL = [
    msgspec.convert({"id": rule_id, **table}, Rule)
    for rule_id, table in packaged_tables("rules", "rules.toml").items()
]
RULES = tuple(rule for rule in _ALL if not rule.stated)
RULES_BY_ID = {rule.id: replace(rule, bounds=()) if rule.stated else rule for rule in _ALL}
"""Rules by id. Rules for SLO targets have no bounds here: a finding contains the user's bounds."""


def slo_rules(
    *,
    ttft_p99_s: float | None,
    itl_p99_s: float | None,
    benchmark_ttft_p99_s: float | None = None,
    benchmark_gpu_ratio: float | None = None,
) -> tuple[Rule, ...]:
    """Rules for the targets that the user sets; no rule for a target that is not set.

    Source: guide 9.3 (TTFT, ITL within SLO), 9.1 step 13 (30% and 20 points off the benchmark).
    """
    thresholds = {
        "TTFT-P99": ttft_p99_s,
        "TTFT-P50": ttft_p99_s,
        "ITL-P99": itl_p99_s,
        "ITL-P50": itl_p99_s,
        "BENCH-TTFT": benchmark_ttft_p99_s and 1.3 * benchmark_ttft_p99_s,
        "BENCH-GPU": benchmark_gpu_ratio and benchmark_gpu_ratio - 0.2,
    }
    return tuple(
        replace(rule, bounds=(replace(rule.bounds[0], threshold=threshold),))
        for rule in _ALL
        if (threshold := thresholds.get(rule.id)) is not None
    )


FROM_FINDING = "setting"
"""Source of a bound that a finding contains."""


def rule_of(finding: Finding) -> Rule:
    """The rule of a finding, with the finding's bounds if it contains any.

    A rule of another version is a plain rule without bounds.
    """
    rule = RULES_BY_ID.get(finding.rule) or Rule(
        finding.rule, finding.signal, (), "a rule of another version", "", ()
    )
    if finding.signal not in ("", rule.signal):
        rule = replace(rule, signal=finding.signal, bounds=())
    if finding.bounds is None:
        return rule
    bounds = [
        Bound(BY_WORD[word], threshold, FROM_FINDING)
        for word, threshold in finding.bounds.items()
        if threshold is not None and word in BY_WORD
    ]
    return replace(rule, bounds=tuple(bounds))
