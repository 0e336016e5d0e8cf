"""Verdicts as JSON documents. Pure."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec.structs import replace

from kneewatch.collector.errors import KneewatchError
from kneewatch.collector.packaged import decoder, read_as
from kneewatch.diagnose.cause import told
from kneewatch.diagnose.recommend.advice import Advice, FlagChange, Value, in_document
from kneewatch.diagnose.verdict import SCHEMA, SYMPTOMS, Verdict

Kind = TypeVar("Kind")

SHOWN = 200
"""Most characters of an error that are shown: it may quote the document."""


class DocumentError(KneewatchError):
    """The document is not what it should be. The message has the path of the wrong key."""


def change_words(change: FlagChange) -> str:
    """A change as words. A flag stands with its new value, to be pasted: "--flag 128 (now
    256)"."""
    if change.after is None or change.flag.startswith("--no-"):
        return f"drop {change.flag}"
    is_flag = change.flag.startswith("--")
    if is_flag and isinstance(change.after, bool):
        return f"add {change.flag if change.after else f'--no-{change.flag[2:]}'}"
    after = _value(change.after)
    if change.before is None:
        return f"{change.flag} {after}"
    before = _value(change.before)
    return f"{change.flag} " + (f"{after} (now {before})" if is_flag else f"{before} -> {after}")


def _value(value: Value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def changes_words(recommendation: Advice) -> str:
    return ", ".join(map(change_words, recommendation.changes))


def symptom_actions(verdict: Verdict) -> dict[str, str]:
    """What to do first about each symptom: the first change that is recommended against its causes,
    else the verdict's first change. Without changes, the first cause is named if the symptom is not
    its own, else what the guide says."""
    changes = [advice for advice in verdict.recommendations if advice.changes]
    first = verdict.causes[0].id if verdict.causes else ""
    actions: dict[str, str] = {}
    for each in verdict.symptoms:
        if (symptom := SYMPTOMS.get(each)) is not None:
            own = [advice for advice in changes if advice.cause in symptom.causes] or changes
            guided = f"see {first}" if first and first not in symptom.causes else symptom.action
            actions[each] = changes_words(own[0]) if own else guided
    return actions


_ENCODER = msgspec.json.Encoder()
_DECODER = decoder(Verdict)


def documented(verdict: Verdict) -> Verdict:
    """The verdict as documents contain it: symptoms have their actions, costs are rounded, and
    causes lack what only the judge needs."""
    if not (verdict.causes or verdict.recommendations or verdict.symptoms):
        return verdict
    return replace(
        verdict,
        causes=[told(cause) for cause in verdict.causes],
        symptom_actions=symptom_actions(verdict),
        recommendations=[in_document(advice) for advice in verdict.recommendations],
    )


def encode(verdict: Verdict) -> bytes:
    """The verdict as JSON. NaN and infinity, which JSON lacks, become null."""
    return _ENCODER.encode(documented(verdict))


def decode(data: bytes | str) -> Verdict:
    """Decode a verdict. Unknown keys are ignored, because keys are only ever added.

    Raises:
        DocumentError: it is not such a document, or a value has the wrong type.
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise _refused(SCHEMA, exc) from exc


def converted(document: object, kind: type[Kind], *, schema: str) -> Kind:
    """Parsed JSON as a record of this kind.

    Raises:
        DocumentError: it is not such a document, or a value has the wrong type.
    """
    try:
        return read_as(document, kind)
    except msgspec.ValidationError as exc:
        raise _refused(schema, exc) from exc


def _refused(schema: str, error: Exception) -> DocumentError:
    return DocumentError(f"not a {schema} document: {str(error)[:SHOWN]}")
