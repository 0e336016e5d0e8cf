"""The JSON document: what the schema promises, and that the schema knows the program's words."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kneewatch.collector.signals.table import GPU_SIGNALS, VLLM_SIGNALS, configured
from kneewatch.diagnose.ranking import EXPLAINS
from kneewatch.diagnose.verdict import SYMPTOMS, Evidence, Verdict
from kneewatch.reports.json_schemas import schema as schema_of
from kneewatch.rules.cascade import NAMES
from kneewatch.rules.library import RULES
from kneewatch.rules.rule import WORDS
from kneewatch.rules.wire import rounded
from tests.recordings import CAPTURES, FIRST_CAUSES, diagnoses
from tests.reference_pages import DERIVED_HELP
from tests.reports.diagnoses import HEALTHY, NUMBERS, PRESSURE, SICK, UNREADABLE, changed, finding
from tests.reports.documents import document
from tests.reports.schema import problems, schema

MADE = {
    "healthy": HEALTHY,
    "sick": SICK,
    "unreadable": UNREADABLE,
    "with findings": changed(
        SICK,
        findings=[
            finding("KV-EVICT", "critical", 0.24),
            finding("TTFT-TAIL", "unknown", None, note="no baseline from quiet times yet"),
            finding("ERRORS", "unknown", None, missing=("request_success",)),
        ],
    ),
    "with a tier": changed(HEALTHY, tier="llama-h100"),
}
RECOMMENDATION = {
    "id": "kv-fp8",
    "cause": "kv_pressure",
    "changes": [{"flag": "--kv-cache-dtype", "from": "auto", "to": "fp8"}],
    "summary": "store the KV cache in 8 bits",
    "as_of_s": None,
    "before": {"kv_capacity_tokens": 5088},
    "predicted": {"kv_capacity_tokens": 10176},
    "basis": {},
    "suffices": None,
    "unmet": [],
    "worsens": [],
    "cost_usd_per_hour": 0.0,
    "unknown": [],
    "risk": "answers change slightly",
    "guide": ["7.4"],
    "command": None,
    "checks": ["quality of answers"],
    "verify": ["kv_usage_ratio"],
}
PLAIN_COUNTS = re.compile(
    r"running(_avg|_max|_min|_queued_avg)?|waiting(_avg|_min|_by_capacity|_deferred|_deferred_avg"
    r"|_deferred_min)?|lora_(running|waiting|max)|gpu_xid_last"
    r"|kv_fetch_(waiting|queued|moving|arrived)|kv_handover_waiting"
    r"|gpu_ecc_uncorrectable|gpu_remapped_rows_uncorrectable|gpu_row_remap_failures|cascade_stage"
    r"|cascade_severity"
    r"|(preempted|errors|accepted)_in_window|lmcache_healthy|awake(_min)?"
    r"|backlog_drains|engine_speed_samples|open_(calls|files)|piled_calls|queue_limit"
)


@pytest.mark.parametrize("diagnosis", MADE.values(), ids=MADE)
def test_a_document_is_as_promised(diagnosis: Verdict) -> None:
    json_document = document(diagnosis)
    assert problems(json_document) == []
    assert json.loads(json.dumps(json_document, allow_nan=False)) == json_document
    assert json_document.keys() == set(schema()["required"])


def test_documents_of_a_recording() -> None:
    for diagnosis in diagnoses(CAPTURES / "restart_mid_run.jsonl.gz"):
        assert problems(document(diagnosis)) == []


def test_no_number_that_json_lacks() -> None:
    evidence = (Evidence("x", math.nan, math.inf, "words"),)
    diagnosis = changed(
        SICK,
        values={"a_s": math.nan, "b_s": math.inf, "c_s": -math.inf, "d_s": 1 / 3},
        causes=[replace(PRESSURE, evidence=evidence)],
        findings=[finding("ERRORS", "ok", math.nan)],
    )
    json_document = document(diagnosis)
    json.dumps(json_document, allow_nan=False)
    assert json_document["signals"] == {"a_s": None, "b_s": None, "c_s": None, "d_s": 1 / 3}
    assert json_document["causes"][0]["evidence"][0]["value"] is None
    assert json_document["causes"][0]["evidence"][0]["threshold"] is None
    assert json_document["findings"][0]["value"] is None


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, None),
        (0.0, 0.0),
        (1 / 3, 0.333333),
        (123456789.0, 123456789.0),
        (1.23456789e-9, 1.23457e-9),
    ],
)
def test_rounded(value: float | None, shown: float | None) -> None:
    assert rounded(value) == shown


def test_a_recommendation_as_designed() -> None:
    json_document = document(SICK) | {"recommendations": [RECOMMENDATION]}
    assert problems(json_document) == []
    json_document["recommendations"] = [{**RECOMMENDATION, "cause": "bad_luck"}]
    assert problems(json_document)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema", "kneewatch.diagnosis/2"),
        ("t", "now"),
        ("health", "fine"),
        ("stage", {"number": 5}),
        ("causes", [{"id": "kv_pressure"}]),
        ("symptoms", ["S9"]),
        ("signals", {"kv_usage_ratio": "high"}),
        ("signals", {"Kv": 1}),
        ("unknown", None),
    ],
)
def test_the_schema_refuses(key: str, value: object) -> None:
    assert problems(document(SICK) | {key: value})


@pytest.mark.parametrize("key", schema()["required"])
def test_a_key_that_is_missing_is_noticed(key: str) -> None:
    json_document = document(SICK)
    del json_document[key]
    assert problems(json_document) == [f"$: {key!r} is a required property"]


def test_more_keys_are_no_problem() -> None:
    assert problems(document(SICK) | {"new": 1}) == []


def properties(part: object, path: str = "$") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every property of the schema with its path."""
    if isinstance(part, dict):
        node = cast("dict[str, Any]", part)
        for group in ("properties", "patternProperties"):
            for name, inner in node.get(group, {}).items():
                yield f"{path}.{name}", inner
        for name, inner in node.items():
            yield from properties(inner, f"{path}.{name}")


@pytest.mark.parametrize("name", ["diagnosis", "fleet", "server"])
def test_every_key_is_described(name: str) -> None:
    node_of_path = dict(properties(schema_of(name)))
    assert len(node_of_path) > 10
    assert [path for path, node in node_of_path.items() if not node.get("description")] == []


def test_what_a_record_keeps_to_itself_is_in_no_schema() -> None:
    fleet = schema_of("fleet")["$defs"]
    assert not {"apart", "root"} & fleet["FleetCause"]["properties"].keys()
    assert "advice" not in fleet["TierSize"]["properties"]
    assert "Advice" not in fleet


def enum_of(name: str) -> set[str]:
    """The words that the schema allows for a definition."""
    return set(schema()["$defs"][name]["enum"])


def test_the_schema_knows_every_word() -> None:
    stage = schema()["$defs"]["Stage"]["properties"]
    assert set(stage["name"]["enum"]) == {*NAMES, "unknown"}
    assert set(schema()["properties"]["health"]["enum"]) == {*WORDS.values(), "unknown"}
    assert enum_of("Severity") == set(WORDS.values())
    assert set(schema()["properties"]["symptoms"]["items"]["enum"]) == set(SYMPTOMS)
    causes = {*EXPLAINS, *(c for explained in EXPLAINS.values() for c in explained)}
    causes.update(*FIRST_CAUSES.values())
    assert causes <= enum_of("cause_id")
    rule = re.compile(schema()["$defs"]["Finding"]["properties"]["rule"]["pattern"])
    assert all(rule.search(library_rule.id) for library_rule in RULES)


def test_every_signal_has_a_unit_or_is_a_count() -> None:
    stated = configured(ttft_slo_s=1.0, gpus=1, peak_flop_per_s=1.0, peak_bytes_per_s=1.0)
    keys = {signal.key for signal in (*VLLM_SIGNALS, *GPU_SIGNALS, *stated)}
    keys |= DERIVED_HELP.keys()
    units = [re.compile(p) for p in schema()["$defs"]["signals"]["patternProperties"]]
    lacking = {key for key in keys if not any(unit.search(key) for unit in units)}
    assert {key for key in lacking if not PLAIN_COUNTS.fullmatch(key)} == set()
    assert NUMBERS.keys() <= keys
