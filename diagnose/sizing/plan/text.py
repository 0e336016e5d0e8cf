"""A plan as lines for a terminal, and as plain types for JSON and Markdown. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from kneewatch.diagnose.sizing.plan.model import Plan, PlanStep, Value
from kneewatch.diagnose.sizing.steps import Step, figure

_WIDTH = 100
_UNITS = {
    "_requests_per_s": "requests/s",
    "_requests_per_s_per_instance": "requests/s an instance",
    "_s": "s",
}
"""Endings of names that are printed as a unit behind the value instead."""

_GB, _MB = 1e9, 1e6


def plan_lines(plan: Plan) -> tuple[str, ...]:
    """The plan to read with a pencil: every decision, its figures and how they came about."""
    lines = [f"Plan for {plan.profile.name}"]
    for step in plan.steps:
        lines += ["", *_step_lines(step)]
    return tuple(lines)


def _step_lines(step: PlanStep) -> list[str]:
    tier = f" ({step.tier})" if step.tier else ""
    lines = [f"{step.number}. {step.title}{tier}"]
    lines += _wrapped("-> ", [step.decision])
    width = max((len(_words(name)) for name in step.output), default=0)
    lines += [
        f"     {_words(name):<{width}}  {shown(name, value)}" for name, value in step.output.items()
    ]
    if step.steps:
        lines.append("   How:")
        for one in step.steps:
            lines += _arithmetic(one)
    for title, items in (("To measure", step.to_measure), ("Note", step.notes)):
        lines += _wrapped(f"{title}: ", items)
    return lines


def _arithmetic(step: Step) -> list[str]:
    first = f"{step.title}: {step.formula}"
    second = f"= {step.values} = {step.result}  [{step.source}]"
    return [*_folded(first, "     ", "       "), *_folded(second, "       ", "         ")]


def _wrapped(label: str, items: Iterable[str]) -> list[str]:
    return [line for item in items for line in _folded(f"{label}{item}", "   ", "     ")]


def _folded(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _words(name: str) -> str:
    tier, dot, plain = name.rpartition(".")
    for ending in _UNITS:
        if plain.endswith(ending):
            plain = plain.removesuffix(ending)
            break
    plain = plain.removesuffix("_ratio").replace("_bytes", "").replace("_", " ")
    return f"{tier}{dot}{plain}"


def shown(name: str, value: Value) -> str:
    """A value as written by hand, with the unit that its name ends in."""
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if name.endswith("_ratio"):
        return f"{value:.1%}"
    if "_bytes" in name:
        return f"{figure(value / _GB)} GB" if value >= _GB else f"{figure(value / _MB)} MB"
    for ending, unit in _UNITS.items():
        if name.endswith(ending):
            return f"{figure(value)} {unit}"
    return figure(value)


def plan_document(plan: Plan) -> dict[str, object]:
    """The plan as plain types, in the order of its steps."""
    return {
        "profile": plan.profile.name,
        "tiers": list(plan.tiers),
        "instances": plan.instances,
        "gpus": plan.gpus,
        "steps": [_step_document(step) for step in plan.steps],
    }


def _step_document(step: PlanStep) -> dict[str, object]:
    return {
        "number": step.number,
        "tier": step.tier,
        "title": step.title,
        "decision": step.decision,
        "output": dict(step.output),
        "steps": [
            {
                "title": one.title,
                "formula": one.formula,
                "values": one.values,
                "result": one.result,
                "source": one.source,
            }
            for one in step.steps
        ],
        "to_measure": list(step.to_measure),
        "notes": list(step.notes),
    }
