"""Verdicts as JSON documents, and what is wrong with a document. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from kneewatch.collector.errors import KneewatchError
from kneewatch.collector.packaged import decoder, read_as
from kneewatch.diagnose.cause import told
from kneewatch.diagnose.recommend.advice import Advice, FlagChange, Value, in_document
from kneewatch.diagnose.verdict import SCHEMA, SYMPTOMS, Verdict
from kneewatch.rules.rule import STATES, WORDS

Kind = TypeVar("Kind")

SHOWN = 60
_TYPES = {
    "str": "text",
    "int": "a finite number",
    "float": "a finite number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
    "datetime": "a time such as 2026-11-21T03:07:00Z",
}
_SAID = {
    "Number out of range": "a finite number",
    "Invalid RFC3339 encoded datetime": _TYPES["datetime"],
}
_PARTS = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_EXPECTED = re.compile(r"Expected `([^`]+)`( [<>]=? \S+| matching .*)?")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")


class DocumentError(KneewatchError):
    """The document is not what it should be. The message names the wrong key."""


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
WORDS_OF = {
    "schema": (SCHEMA,),
    "health": tuple(STATES),
    "state": tuple(STATES),
    "severity": tuple(WORDS.values()),
    "held": tuple(WORDS.values()),
}
"""The allowed words of a document's keys."""


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
    return read(_DECODER, data, schema=SCHEMA, words=WORDS_OF)


# --- What is wrong with a document


def read(
    decoder: msgspec.json.Decoder[Kind],
    data: bytes | str,
    *,
    schema: str,
    words: Mapping[str, Iterable[str]],
) -> Kind:
    """A document of this schema as a record. `words` are the allowed words of keys.

    Raises:
        DocumentError: it is not such a document, or a value has the wrong type.
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        try:
            mistake = _mistake(str(exc), msgspec.json.decode(data), words)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            mistake = "it is not JSON"
        raise DocumentError(f"not a {schema} document: {mistake}") from exc


def converted(
    document: object, kind: type[Kind], *, schema: str, words: Mapping[str, Iterable[str]]
) -> Kind:
    """Parsed JSON as a record of this kind. `words` are the allowed words of keys.

    Raises:
        DocumentError: it is not such a document, or a value has the wrong type.
    """
    try:
        return read_as(document, kind)
    except msgspec.ValidationError as exc:
        raise DocumentError(
            f"not a {schema} document: {_mistake(str(exc), document, words)}"
        ) from exc


def _mistake(error: str, document: object, words: Mapping[str, Iterable[str]]) -> str:
    if not isinstance(document, dict):
        return f"{_shown(document)} is not a JSON object"
    what, _, path = error.partition(" - at `$")
    place, value = _place(path.rstrip("`"), document)
    if missing := _MISSING.match(what):
        return f"{place}{'.' if place else ''}{missing[1]} is missing"
    key = place.rpartition(".")[2]
    if expected := _EXPECTED.match(what):
        kinds = [_TYPES.get(kind, kind) for kind in expected[1].split(" | ")]
        must = " or ".join(dict.fromkeys(kinds)) + (expected[2] or "")
    elif what in _SAID:
        must = _SAID[what]
    else:
        must = f"one of {', '.join(words.get(key, ()))}"
    return f"{place} must be {must}, it is {_shown(value)}"


def _place(path: str, document: Any) -> tuple[str, object]:  # noqa: ANN401 - JSON
    """A path of msgspec as words, and the value there. Keys of mappings are filled in."""
    place, value = "", document
    for name, index in _PARTS.findall(path):
        if index == "...":
            name = max(value, key=lambda key: _strangeness(value[key]))
        if index.isdecimal():
            place, value = f"{place}[{index}]", value[int(index)]
        else:
            place, value = f"{place}{'.' if place else ''}{name}", value[name]
    return place, value


def _strangeness(value: object) -> int:
    """A rank of values of a mapping: the highest one is the one that is no number or text."""
    if isinstance(value, float | int) and not isinstance(value, bool):
        return 0
    if isinstance(value, str):
        return 1
    return 2 if value is None else 3


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."
