"""The rules of rules.toml: those that need no setting, in display order, and those for a user's
targets. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from kneewatch.collector.packaged import packaged_tables, read_as
from kneewatch.rules.rule import BY_WORD, Bound, Finding, Guard, Rule

_ALL = [
    read_as({"id": rule_id, **table}, Rule)
    for rule_id, table in packaged_tables("rules", "rules.toml").items()
]
RULES = tuple(rule for rule in _ALL if not rule.setting)
RULES_BY_ID = {rule.id: replace(rule, bounds=()) if rule.setting else rule for rule in _ALL}
"""Rules by id. Rules for SLO targets have no bounds here: a finding contains the user's bounds."""


BENCHMARK, BENCHMARK_LOAD = "benchmark.", "benchmark.requests_per_s"
AT_LOAD = 0.8, 1.2
"""A benchmark is compared while the load is within these shares of its requests/s."""
OTHER_LOAD = "the load is more than 20% off the benchmark's"


def slo_rules(
    *,
    ttft_p99_s: float | None,
    itl_p99_s: float | None,
    benchmark: Mapping[str, float | None] | None = None,
) -> tuple[Rule, ...]:
    """Rules for the targets and the benchmark's figures (by setting) that the user sets; none for
    the benchmark without its load.

    Source: guide 9.3 (TTFT, ITL within SLO), 9.1 step 13 (30% and 20 points off the benchmark, at
    equivalent RPS).
    """
    measured = benchmark or {}
    load_per_s = measured.get(BENCHMARK_LOAD)
    if load_per_s is None:
        measured, load_per_s = {}, 0.0
    stated = {"slo.ttft_p99_s": ttft_p99_s, "slo.itl_p99_s": itl_p99_s, **measured}
    guards = tuple(
        Guard("arrival_per_s", load_per_s * share, OTHER_LOAD, below=share > 1) for share in AT_LOAD
    )
    return tuple(
        replace(
            rule,
            bounds=(replace(rule.bounds[0], threshold=rule.times * value + rule.plus),),
            guards=rule.guards + guards * rule.setting.startswith(BENCHMARK),
            stated=True,
        )
        for rule in _ALL
        if (value := stated.get(rule.setting)) is not None
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


def with_thresholds(
    rules: tuple[Rule, ...], thresholds: Mapping[str, Mapping[str, float]], origin: str
) -> tuple[Rule, ...]:
    """The rules with the user's thresholds in place of the defaults.

    `thresholds` is {rule id: {severity word: threshold}}; `origin` says where they were set.
    """
    return tuple(_with_bounds(rule, thresholds.get(rule.id, {}), origin) for rule in rules)


def _with_bounds(rule: Rule, thresholds: Mapping[str, float], origin: str) -> Rule:
    if not thresholds:
        return rule
    bounds = {bound.severity: bound for bound in rule.bounds}
    for word, threshold in thresholds.items():
        bounds[BY_WORD[word]] = Bound(BY_WORD[word], threshold, origin)
    return replace(rule, bounds=tuple(bounds[severity] for severity in sorted(bounds)), stated=True)
