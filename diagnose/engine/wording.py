"""A verdict in the words, flags and levers of its engine. Pure.

Causes, rules and recommendations are written with vLLM's flags. For another engine its folder has
the flag for each of them, and a lever where none is the same. What would remain in vLLM's words is
left out and named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import VLLM, EngineKind, kind_named
from kneewatch.diagnose.cause import Cause
from kneewatch.diagnose.recommend.advice import REPLICAS, Advice
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.formatting import as_sentence

FLAG = re.compile(r"--[a-z][-a-z]+|\b[A-Z]+_[A-Z_]+\b")
OWN_FLAGS = (
    "--slo-ttft", "--slo-itl", "--plan", "--fleet-label", "--prometheus", "--pid", "--previous"
)  # fmt: skip
"""Flags of kneewatch itself, of py-spy and of kubectl."""

NO_LEVER = "{title} has no flag like vLLM's for this: see the cause's page for what binds."
NOT_COMPUTED = (
    "recommendations: changes of flags with numbers are computed for vLLM only, not for {title}"
)
AnyCause = TypeVar("AnyCause", bound=Cause)


def spoken(verdict: Verdict, text: str) -> str:
    """A text of a rule or a manual page in the words and flags of a verdict's engine."""
    kind = kind_named(verdict.program)
    return text if kind is VLLM else spelled(text, kind)


def in_own_words(verdict: Verdict, kind: EngineKind) -> Verdict:
    """The verdict as this engine's; unchanged for vLLM."""
    if kind.title.startswith(VLLM.title):
        return verdict
    causes = [cause_of(cause, kind) for cause in verdict.causes]
    unknown = [*map(kind.said, verdict.unknown), *(_unjudged(kind) if verdict.values else ())]
    kept = [advice for cause in causes for advice in _kept(verdict, cause, kind)]
    if any(not _is_of_replicas(advice) for advice in verdict.recommendations):
        unknown.append(NOT_COMPUTED.format(title=kind.title))
    return replace(
        verdict,
        causes=causes,
        recommendations=kept,
        unknown=unknown,
        program=kind.title,
    )


def cause_of(cause: AnyCause, kind: EngineKind) -> AnyCause:
    """A cause as this engine's."""
    return replace(
        cause,
        summary=kind.said(cause.summary),
        lever=lever_of(cause, kind),
        evidence=tuple(replace(each, text=kind.said(each.text)) for each in cause.evidence),
        against=tuple(replace(each, text=kind.said(each.text)) for each in cause.against),
    )


def lever_of(cause: Cause, kind: EngineKind) -> str:
    """What to do first, in this engine's flags."""
    own = kind.levers.get(cause.id)
    return own or spelled(cause.lever, kind) or NO_LEVER.format(title=kind.title)


def spelled(text: str, kind: EngineKind) -> str:
    """A text in this engine's words and flags. A part of a sentence with a flag that it lacks is
    dropped, and what only leads to it."""
    spoken = {*OWN_FLAGS, *kind.flags, *FLAG.findall(kind.switch_on)}
    kept: list[str] = []
    for sentence in re.split(r"(?<=\.) ", text):
        parts = re.split(r"(?<=[:;]) ", sentence)
        own = [part for part in parts if spoken.issuperset(FLAG.findall(part))]
        while len(own) < len(parts) and own and own[-1].endswith(":"):
            own.pop()
        said = kind.said(" ".join(own))
        kept += [said if len(own) == len(parts) else as_sentence(said.rstrip(";"))] * bool(own)
    return " ".join(kept)


def _is_of_replicas(advice: Advice) -> bool:
    return bool(advice.changes) and all(change.flag == REPLICAS for change in advice.changes)


def _kept(verdict: Verdict, cause: Cause, kind: EngineKind) -> Iterable[Advice]:
    """The recommendations for a cause that hold for this engine: numbers of replicas, behind the
    cause's lever if that is a flag, whose numbers are not computed."""
    own = [advice for advice in verdict.recommendations if advice.cause == cause.id]
    replicas = [_replicas(advice, kind) for advice in own if _is_of_replicas(advice)]
    if replicas and "--" in cause.lever:
        yield Advice(id="lever", cause=cause.id, summary=cause.lever, guide=cause.guide)
    yield from replicas


def _replicas(advice: Advice, kind: EngineKind) -> Advice:
    texts = {name: kind.said(getattr(advice, name)) for name in ("summary", "risk")}
    lists = {
        name: tuple(map(kind.said, getattr(advice, name)))
        for name in ("unknown", "checks", "verify")
    }
    return replace(advice, command=None, **texts, **lists)


def _unjudged(kind: EngineKind) -> Iterable[str]:
    return (f"{what}: {why}" for what, why in kind.unjudged.items())
