"""A server's facts in the program: when they are read, what they change, how they are shown."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kneewatch.agent.server.watch import READ_EVERY_S, ServerWatch
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.exposition import Limits
from kneewatch.collector.http.address import FetchSettings
from kneewatch.diagnose.deployment.server_facts import SourceReading
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Value
from kneewatch.diagnose.verdict_json import encode
from kneewatch.reports.diagnosis_text import server_words
from kneewatch.reports.json_schemas import schema as schema_of
from tests.agent.running import Main, bodies, capture
from tests.agent.server.test_probe import ALL
from tests.agent.server.vllm_server import ROOT, asked, vllm_answers, vllm_server
from tests.collector.servers import Start, always, answer
from tests.reports.documents import diagnosis_of, document

PAGES = bodies("kv_pressure_cascade", 40, 60)
SHORT = ("--for", "0.4s", "--interval", "0.1s")


def test_diagnose_names_what_the_server_said(serving: Start, main: Main) -> None:
    server = serving(vllm_server(PAGES, vllm_answers()))
    ended = main("diagnose", server.url, *SHORT, "--server-probe", "--format", "json")
    (diagnosis,) = ended.documents
    facts = {fact["name"]: fact for fact in diagnosis["server"]["facts"]}
    assert facts["model"]["value"] == ROOT
    assert facts["vllm_version"]["value"] == "0.32.0"
    assert facts["vllm_version"]["source"] == "server"
    assert facts["vllm_version"]["age_s"] >= 0
    assert asked(server) == ALL, "asked once, however many pages were read"


def test_text_has_a_line_with_sources(serving: Start, main: Main) -> None:
    server = serving(vllm_server(PAGES, vllm_answers()))
    ended = main("diagnose", server.url, *SHORT, "--server-probe", "--tp", "2")
    shown = " ".join(ended.out.split())
    assert f"server: vLLM 0.32.0, {ROOT}, TP 2, max-model-len 8192, KV cache 5120 tokens" in shown
    markdown = main("diagnose", server.url, *SHORT, "--server-probe", "--format", "markdown").out
    assert "Server: vLLM 0.32.0" in markdown


def test_switched_off_nothing_but_the_page_is_read(serving: Start, main: Main) -> None:
    server = serving(vllm_server(PAGES, vllm_answers()))
    ended = main("diagnose", server.url, *SHORT, "--no-server-probe", "--format", "json")
    assert "server" not in ended.documents[0]
    assert asked(server) == []


def test_what_is_no_vllm_is_asked_nothing(serving: Start, main: Main) -> None:
    server = serving(always(answer(b"up 1\n")))
    assert main("diagnose", server.url, *SHORT, "--server-probe").status == 2
    assert asked(server) == []


def test_inspect_lists_facts_and_what_is_missing(serving: Start, main: Main) -> None:
    server = serving(vllm_server(PAGES, vllm_answers()))
    ended = main("inspect", server.url, "--server-probe", "--vllm-version", "0.30.0")
    assert ended.status == 0
    rows = [line.split() for line in ended.out.splitlines()]
    assert ["vllm_version", "setting"] in [row[:2] for row in rows]
    assert ["model", "server"] in [row[:2] for row in rows]
    assert "0.30.0 from setting is used, not 0.32.0 from server" in " ".join(ended.out.split())
    assert "gpu: set gpu (--gpu)" in ended.out
    document = json.loads(main("inspect", server.url, "--server-probe", "--format", "json").out)
    schema = schema_of("server")
    validator: Any = Draft202012Validator(schema)
    validator.validate(document)
    assert document["schema"] == "kneewatch.server/1"
    assert {fact["source"] for fact in document["facts"]} >= {"page", "server"}


def test_inspect_of_a_capture_has_the_facts_of_its_page(main: Main) -> None:
    ended = main("inspect", capture("kv_pressure_cascade"), "--format", "json")
    assert {fact["source"] for fact in json.loads(ended.out)["facts"]} == {"page"}


def test_inspect_without_a_page(serving: Start, main: Main, tmp_path: Path) -> None:
    server = serving(always(answer(b"", status="503 Service Unavailable")))
    ended = main("inspect", server.url, "--server-probe")
    assert (ended.status, ended.out) == (2, "")
    assert asked(server) == ["/health"]
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"t": 1, "error": "refused"}\n')
    assert main("inspect", empty).status == 2


class Reads:
    """Counts readings; each has the values that are set."""

    def __init__(self, **values: Value) -> None:
        self.values: Mapping[str, Value] = values
        self.times_s: list[float] = []

    def __call__(self, _address: str, _fetch: FetchSettings, now_s: float) -> list[SourceReading]:
        self.times_s.append(now_s)
        return [SourceReading("server", now_s, self.values)]


@pytest.fixture
def reads() -> Reads:
    return Reads(vllm_version="0.32.0", model_path=ROOT)


@pytest.fixture
def stream(reads: Reads) -> TargetStream:
    stream = TargetStream("tiny", Profile(), Limits())
    stream.server = ServerWatch("http://127.0.0.1:1/metrics", FetchSettings(), read=reads)
    return stream


TYPE = "text/plain"
PAGE = PAGES[0]


def of_a_new_process(page: bytes) -> bytes:
    """The page with a later start of the process."""
    line = re.compile(rb"(?m)^(process_start_time_seconds) (\S+)$")
    assert line.search(page)
    return line.sub(lambda match: b"%s %f" % (match[1], float(match[2]) + 60), page)


def test_facts_are_read_again_each_hour(stream: TargetStream, reads: Reads) -> None:
    for t_s in (1000.0, 1005.0, 1000.0 + READ_EVERY_S - 1, 1000.0 + READ_EVERY_S):
        stream.take(t_s, PAGE, TYPE)
    assert reads.times_s == [1000.0, 1000.0 + READ_EVERY_S]


def test_a_clock_that_is_set_back_does_not_stop_the_reading(
    stream: TargetStream, reads: Reads
) -> None:
    for t_s in (9e6, 1000.0):
        stream.take(t_s, PAGE, TYPE)
        stream.take(t_s + 5, PAGE, TYPE)
    assert len(reads.times_s) == 2


def test_a_restart_replaces_the_facts(stream: TargetStream, reads: Reads) -> None:
    stream.take(1000.0, PAGE, TYPE)
    reads.values = {"vllm_version": "0.33.0"}
    stream.take(1005.0, of_a_new_process(PAGE), TYPE)
    assert reads.times_s == [1000.0, 1005.0]
    (after,) = stream.take(1010.0, of_a_new_process(PAGE), TYPE)
    assert after.server is not None
    facts = {fact.name: fact.value for fact in after.server.facts}
    assert facts["vllm_version"] == "0.33.0"
    assert "model" not in facts, "facts of the old process are gone"


def test_a_page_that_cannot_be_read_is_no_reason_to_ask(stream: TargetStream, reads: Reads) -> None:
    stream.take(1000.0, b"nonsense", TYPE)
    assert reads.times_s == []


def test_facts_survive_the_document(stream: TargetStream) -> None:
    stream.take(1000.0, PAGE, TYPE)
    (diagnosis,) = stream.take(1005.0, PAGE, TYPE)
    restored = diagnosis_of(document(diagnosis))
    assert encode(restored) == encode(diagnosis)
    assert server_words(restored.server) == server_words(diagnosis.server) != ""


def test_recommendations_use_the_facts(reads: Reads) -> None:
    plain = TargetStream("tiny", Profile(), Limits())
    informed = TargetStream("tiny", Profile(), Limits())
    reads.values = {"vllm_version": "0.32.0", "model_path": ROOT, "tensor_parallel": 1}
    informed.server = ServerWatch("http://127.0.0.1:1/metrics", FetchSettings(), read=reads)
    pages = bodies("kv_pressure_cascade", 40, 60)
    unknown: list[set[str]] = []
    for stream in (plain, informed):
        *_, last = [stream.take(1000.0 + 2 * at, page, TYPE) for at, page in enumerate(pages)]
        advice = last[0].recommendations
        assert advice
        unknown.append({line for item in advice for line in item.unknown})
    assert any("tensor_parallel" in line for line in unknown[0])
    assert not any("tensor_parallel" in line for line in unknown[1])
