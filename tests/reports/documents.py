"""Verdicts as JSON documents and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import orjson

from kneewatch.agent.store.reader import Reader
from kneewatch.diagnose.doc_links import linked
from kneewatch.diagnose.verdict import Verdict
from kneewatch.diagnose.verdict_json import decode, encode


def document(verdict: Verdict, *, docs_url: str = "") -> dict[str, Any]:
    """The document of a verdict."""
    return cast("dict[str, Any]", orjson.loads(encode(linked(verdict, docs_url))))


def diagnosis_of(json_document: Mapping[str, Any] | object) -> Verdict:
    """The verdict of a document."""
    return decode(json.dumps(json_document))


def document_then(reader: Reader, engine_id: int, at_s: float) -> dict[str, Any] | None:
    """The document of the verdict that was valid at a time; None if there is none."""
    verdict = reader.verdict(engine_id, at_s)
    return None if verdict is None else document(verdict)
