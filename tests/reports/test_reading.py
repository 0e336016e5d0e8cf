"""A document read back is the diagnosis it tells: the same document, the same words."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.diagnose.recommend.advice import Advice, FlagChange
from kneewatch.diagnose.verdict import UNKNOWN_STAGE, Verdict
from kneewatch.diagnose.verdict_json import DocumentError, encode
from kneewatch.reports.diagnosis_text import Style, markdown, text
from kneewatch.rules.library import RULES, rule_of, slo_rules
from kneewatch.rules.rule import Finding, Severity
from tests.recordings import CAPTURES, diagnoses
from tests.reports.diagnoses import HEALTHY, NOW_S, PRESSURE, SICK, UNREADABLE, changed, finding
from tests.reports.documents import diagnosis_of, document
from tests.reports.schema import problems

EVERY = 7
"""Recordings are sampled: every so many scrapes, and the last."""

STRANGE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    STRANGE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)


def sent(diagnosis: Verdict) -> dict[str, Any]:
    """A document as it arrives: through JSON."""
    return cast("dict[str, Any]", orjson.loads(orjson.dumps(document(diagnosis))))


def places(part: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where something stands in a document."""
    if isinstance(part, dict):
        for key, inner in cast("dict[str, object]", part).items():
            yield (*path, key)
            yield from places(inner, (*path, key))
    elif isinstance(part, list):
        for at, inner in enumerate(cast("list[object]", part)):
            yield (*path, at)
            yield from places(inner, (*path, at))


def with_value(json_document: Mapping[str, Any], path: tuple[str | int, ...], value: object) -> Any:  # noqa: ANN401
    """A copy of a document with something else at a place."""
    changed_document = copy.deepcopy(json_document)
    part: Any = changed_document
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return changed_document


FP8 = Advice(
    id="kv-fp8",
    cause="kv_pressure",
    changes=(
        FlagChange("--kv-cache-dtype", "auto", "fp8"),
        FlagChange("--max-num-seqs", 4_000_000, 2_000_000),
    ),
    summary="Halve what a token takes.",
    predicted={"kv_capacity_tokens": 10176.0, "kv_demand_ratio": 1.2},
    cost_usd_per_hour=0.5,
    checks=("quality of answers",),
    risk="answers change",
    verify=("kv_usage_ratio falls",),
    guide=("4.3",),
    before={"kv_capacity_tokens": 5088.0},
    unknown=("TTFT after it",),
)
FULL = changed(
    SICK,
    causes=[replace(PRESSURE, seen_s=NOW_S - 8)],
    recommendations=(FP8,),
    findings=[
        finding("KV-EVICT", "critical", 0.24),
        finding("INPUT-TAIL", "info", 4.0),
        finding("TTFT-TAIL", "unknown", None, note="no baseline from quiet times yet"),
        finding("ERRORS", "unknown", None, missing=("request_success",)),
    ],
    unknown=["gpu_dram_active_ratio: no GPU source"],
    tier="llama-h100",
)
MADE = {"healthy": HEALTHY, "sick": SICK, "unreadable": UNREADABLE, "full": FULL}


@pytest.mark.parametrize("diagnosis", MADE.values(), ids=MADE)
def test_there_and_back(diagnosis: Verdict) -> None:
    read = diagnosis_of(sent(diagnosis))
    assert encode(read) == encode(diagnosis)
    assert text([read], Style()) == text([diagnosis], Style())


@pytest.mark.parametrize("capture", sorted(CAPTURES.glob("*.jsonl.gz")), ids=lambda p: p.name)
def test_recordings_read_back(capture: Any) -> None:  # noqa: ANN401
    recorded = diagnoses(capture)
    for diagnosis in (*recorded[::EVERY], recorded[-1]):
        json_document = sent(diagnosis)
        read = diagnosis_of(json_document)
        assert document(read) == json_document
        assert text([read], Style()) == text([diagnosis], Style())
        assert markdown([read]) == markdown([diagnosis])
        assert read.severity == diagnosis.severity


def test_recommendations_read_back() -> None:
    advised = [d for d in diagnoses(CAPTURES / "kv_pressure_cascade.jsonl.gz") if d.recommendations]
    assert advised
    for diagnosis in advised[::EVERY]:
        read = diagnosis_of(sent(diagnosis))
        assert tuple(read.recommendations) == tuple(diagnosis.recommendations)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_rules_are_those_of_the_library(rule: Any) -> None:  # noqa: ANN401
    diagnosis = changed(SICK, findings=[finding(rule.id, "warning", 1.0)])
    assert rule_of(diagnosis_of(sent(diagnosis)).findings[0]) == rule


def test_a_rule_of_a_target_has_the_bounds_that_were_told() -> None:
    (rule,) = slo_rules(ttft_p99_s=2.0, itl_p99_s=None)[:1]
    eviction = Finding(rule.id, "warning", rule.signal, 3.0, bounds={"warning": 2.0})
    json_document = sent(changed(SICK, findings=[eviction]))
    assert problems(json_document) == []
    read = rule_of(diagnosis_of(json_document).findings[0])
    assert (read.id, read.summary, read.advice) == (rule.id, rule.summary, rule.advice)
    assert [(bound.severity, bound.threshold) for bound in read.bounds] == [(Severity.WARNING, 2.0)]
    del json_document["findings"][0]["bounds"]
    assert rule_of(diagnosis_of(json_document).findings[0]).bounds == (), (
        "a document of an older version"
    )


def test_a_state_that_is_clearing_reads_back() -> None:
    for was in (5.1, None):
        eviction = finding(
            "KV-EVICT",
            "info",
            0.0,
            clearing_since_s=NOW_S - 9,
            was=was,
            was_severity=Severity.CRITICAL,
        )
        json_document = sent(changed(SICK, findings=[eviction]))
        assert problems(json_document) == []
        assert diagnosis_of(json_document).findings[0] == eviction


def test_another_version_s_rule_is_a_plain_one() -> None:
    json_document = sent(FULL)
    json_document["findings"][0] |= {"rule": "KV-NEW", "signal": "kv_new_ratio"}
    json_document["findings"][1]["signal"] = "other_ratio"
    first, second, *_ = diagnosis_of(json_document).findings
    new, moved = rule_of(first), rule_of(second)
    assert (new.id, new.signal, new.bounds) == ("KV-NEW", "kv_new_ratio", ())
    assert first.severity == Severity.CRITICAL
    assert (moved.id, moved.signal, moved.bounds) == (
        "INPUT-TAIL",
        "other_ratio",
        (),
    )
    assert "KV-NEW: a rule of another version" in text([diagnosis_of(json_document)], Style())


def test_more_keys_are_passed_over() -> None:
    json_document = sent(FULL)
    more = copy.deepcopy(json_document)
    for path in [(), ("stage",), ("causes", 0), ("causes", 0, "evidence", 0), ("findings", 0)]:
        part: Any = more
        for key in path:
            part = part[key]
        part["added_later"] = {"anything": [1, None]}
    assert document(diagnosis_of(more)) == json_document


def test_an_old_document_gets_defaults() -> None:
    json_document: dict[str, Any] = {"schema": "kneewatch.diagnosis/1", "t": NOW_S, "target": "a"}
    json_document |= {"health": "warning", "causes": [{"id": "kv_pressure", "severity": "warning"}]}
    read = diagnosis_of(json_document)
    assert (read.engine, read.model, read.tier, read.stage) == ("", "", None, UNKNOWN_STAGE)
    assert read.causes[0].since_s is None
    assert read.severity == Severity.WARNING
    assert "kv_pressure" in text([read], Style())


def test_a_symptom_of_another_version_is_left_out() -> None:
    read = diagnosis_of({**sent(SICK), "symptoms": ["S8", "S99"]})
    assert "S8" in text([read], Style())
    assert "S99" not in text([read], Style())


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("schema",), "kneewatch.diagnosis/2", "Invalid enum value 'kneewatch.diagnosis/2'"),
        (("t",), None, "Expected `float`, got `null` - at `$.t`"),
        (("t",), 1e300, "at `$.t`"),
        (("t",), True, "at `$.t`"),
        (("t",), 10**400, "at `$.t`"),
        (("target",), 3, "Expected `str`, got `int` - at `$.target`"),
        (("health",), "fine", "Invalid enum value 'fine' - at `$.health`"),
        (("stage",), [], "at `$.stage`"),
        (("stage", "number"), 5, "at `$.stage.number`"),
        (("stage", "since"), -1, "at `$.stage.since`"),
        (("causes",), {}, "at `$.causes`"),
        (("causes", 0), "x", "at `$.causes[0]`"),
        (("causes", 0, "severity"), "bad", "at `$.causes[0].severity`"),
        (("causes", 0, "guide"), [1], "at `$.causes[0].guide[0]`"),
        (("causes", 0, "evidence", 1, "value"), "1", "at `$.causes[0].evidence[1].value`"),
        (("signals", "running"), "x", "at `$.signals[...]`"),
        (("findings", 0, "state"), None, "at `$.findings[0].state`"),
    ],
)
def test_what_is_no_document_is_refused(
    path: tuple[str | int, ...], value: object, said: str
) -> None:
    with pytest.raises(DocumentError) as caught:
        diagnosis_of(with_value(sent(FULL), path, value))
    assert said in str(caught.value)


@pytest.mark.parametrize("none", [[], None, "x", 3], ids=str)
def test_what_is_no_object_is_refused(none: Any) -> None:  # noqa: ANN401
    with pytest.raises(DocumentError, match="Expected `object`"):
        diagnosis_of(none)


def test_a_long_value_is_not_quoted_whole() -> None:
    with pytest.raises(DocumentError) as caught:
        diagnosis_of({**sent(SICK), "health": "x" * 10_000})
    assert len(str(caught.value)) < 300


@given(st.data())
def test_a_strange_value_anywhere_is_told_or_refused(data: st.DataObject) -> None:
    json_document = sent(FULL)
    path = data.draw(st.sampled_from(list(places(json_document))))
    changed_document = with_value(json_document, path, data.draw(JSON))
    try:
        read = diagnosis_of(changed_document)
    except DocumentError:
        return
    text([read], Style())
    markdown([read])
    json.dumps(document(read), allow_nan=False)
