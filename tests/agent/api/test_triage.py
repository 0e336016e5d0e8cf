"""`/api/v1/triage` about now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from jsonschema import Draft202012Validator
from msgspec.structs import replace

from kneewatch.agent.api.openapi import schemas
from kneewatch.agent.api.triage import body
from kneewatch.diagnose.recommend.advice import Advice, FlagChange
from kneewatch.reports.diagnosis_text import Style, markdown, text
from kneewatch.reports.lines import WIDTH
from tests.agent.api.serving import (
    SICK_NAME,
    SICK_STATE,
    WELL_STATE,
    Asker,
    asking,
    service_of,
    settings_of,
    state_of,
)
from tests.agent.api.test_access import READER, token_file
from tests.reports.diagnoses import HEALTHY, NOW_S, SICK, UNREADABLE, finding
from tests.reports.schema import problems

TRIAGE = "/api/v1/triage"
LONG = "the number of preempted requests falls to 0 within 5 minutes at the same load"
SICK_ADVISED = replace(
    SICK,
    recommendations=(
        Advice(
            id="kv-blocks",
            cause="kv_pressure",
            changes=(FlagChange("--num-gpu-blocks-override", 160, 1152),),
            summary="The flag caps the KV cache at 160 blocks, whatever memory is free.",
            predicted={"kv_capacity_tokens": 36832.0, "max_concurrency": 121.0},
            cost_usd_per_hour=None,
            unknown=("TTFT and ITL after the change",),
            checks=(LONG, LONG),
            verify=(LONG, LONG, LONG),
            risk="",
            guide=(),
        ),
    ),
)
JSON = "application/json"


def complaints(document: Any) -> list[str]:  # noqa: ANN401
    """What is wrong with a triage document, by its schema."""
    schema = {"$ref": "#/components/schemas/Triage", "components": {"schemas": schemas()}}
    validator: Any = Draft202012Validator(schema)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def told(client: Asker, path: str = TRIAGE) -> dict[str, Any]:
    """The JSON answer, which keeps to its schema."""
    answer = client.get(path, accept=JSON)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    assert complaints(document) == []
    assert all(problems(target) == [] for target in document["targets"])
    return document


def test_all_targets_worst_first_unknown_before_healthy() -> None:
    unknown = state_of("r2", replace(HEALTHY, health="unknown"))
    noted = state_of("r3", replace(HEALTHY, health="info"))
    with asking(service_of(WELL_STATE, noted, unknown, SICK_STATE)) as client:
        triage = told(client)
    assert triage["schema"] == "kneewatch.triage/1"
    assert triage["t"] == NOW_S
    assert [target["target"] for target in triage["targets"]] == [SICK_NAME, "r2", "r3", "r1"]
    assert [target["schema"] for target in triage["targets"]] == ["kneewatch.diagnosis/1"] * 4
    assert "intervals" not in triage
    watching = {row["target"]: row for row in triage["watching"]}
    assert watching["r1"]["labels"] == {"tier": "chat"}
    assert watching["r1"]["sources"][0]["success"] is True


TOKEN_CHARS = 3
"""The fewest characters that a token of English text with numbers has on average."""


def test_ten_bad_targets_fit_a_models_context() -> None:
    names = [f"http://gpu-{number}.chat.example:8000" for number in range(10)]
    sick = [state_of(name, SICK_ADVISED) for name in names[:8]]
    down = [state_of(name, UNREADABLE) for name in names[8:]]
    with asking(service_of(*down, *sick)) as client:
        text_answer = client.get(TRIAGE).text
        alone = client.get(f"{TRIAGE}/http://gpu-5.chat.example:8000").text
    assert len(text_answer) < 1500 * TOKEN_CHARS
    lines = text_answer.splitlines()
    assert all(any(name in line for line in lines) for name in names)
    assert text_answer.count("verify:") == 1, "only the worst is shown in full"
    assert sum("fix: " in line or "fix it: " in line for line in lines) >= 8
    assert all(len(line) <= WIDTH for line in lines)
    assert "/api/v1/triage/TARGET" in lines[-3], "what to ask next"
    assert "verify:" in alone


def test_two_bad_targets_are_shown_in_full() -> None:
    second = state_of("r2", SICK_ADVISED)
    with asking(service_of(SICK_STATE, second, WELL_STATE)) as client:
        assert client.get(TRIAGE).text.count("explains: queue_saturation") == 2


def test_two_long_ones_among_ten_fit_a_models_context() -> None:
    more = ("why " * 120).strip()
    long = replace(SICK_ADVISED, unknown=[f"signal_{number}: {more}" for number in range(3)])
    names = [f"gpu-{number}" for number in range(8)]
    with asking(
        service_of(
            state_of("r1", long), state_of("r2", long), *(state_of(n, HEALTHY) for n in names)
        )
    ) as client:
        text_answer = client.get(TRIAGE).text
    assert len(text_answer) < 1500 * TOKEN_CHARS
    assert text_answer.count("verify:") == 1
    assert sum("fix it: " in line or "fix: " in line for line in text_answer.splitlines()) == 2
    with asking(service_of(state_of("r1", long), state_of("r2", long))) as client:
        assert client.get(TRIAGE).text.count("verify:") == 2, "none follows"


def test_one_target_whose_name_has_slashes_and_colons() -> None:
    with asking(service_of(WELL_STATE, SICK_STATE)) as client:
        for name in (SICK_NAME, quote(SICK_NAME, safe="")):
            triage = told(client, f"{TRIAGE}/{name}")
            assert [target["target"] for target in triage["targets"]] == [SICK_NAME]


@pytest.mark.parametrize("name", ["a b", "ä/ö", "a?b#c", "%2F", "..", "a//b", "-", "triage.css"])
def test_any_name_can_be_asked_for(name: str) -> None:
    with asking(service_of(state_of(name, HEALTHY), SICK_STATE)) as client:
        triage = told(client, f"{TRIAGE}/{quote(name, safe='').replace('.', '%2E')}")
    assert [target["target"] for target in triage["targets"]] == [name]


def test_a_target_can_be_a_parameter() -> None:
    with asking(service_of(WELL_STATE, SICK_STATE)) as client:
        by_path = told(client, f"{TRIAGE}/{quote(SICK_NAME, safe='')}")
        by_parameter = told(client, f"{TRIAGE}?target={quote(SICK_NAME, safe='')}")
    assert [target["target"] for target in by_parameter["targets"]] == [SICK_NAME]
    assert by_parameter["targets"] == by_path["targets"]


@pytest.mark.parametrize("path", [f"{TRIAGE}/nope", f"{TRIAGE}?target=nope"])
def test_an_unknown_target_is_404_with_those_that_are_known(path: str) -> None:
    with asking(service_of(WELL_STATE, SICK_STATE, names=["r9"])) as client:
        missing = client.get(path)
    assert missing.status_code == 404
    assert missing.headers["content-type"] == "application/problem+json"
    detail = missing.json()["detail"]
    assert "no such target; watched targets: r1, http%3A%2F%2Fgpu-7%3A8000, r9" in detail


def test_a_target_without_a_cycle_is_pending_and_not_healthy() -> None:
    with asking(service_of(WELL_STATE, state_of("r8"), names=["r9"])) as client:
        assert told(client)["pending"] == ["r8", "r9"]
        alone = told(client, f"{TRIAGE}/r9")
        empty = told(client, f"{TRIAGE}/r8")
        plain = client.get(TRIAGE).text
    assert alone["targets"] == []
    assert alone["pending"] == ["r9"]
    assert empty["pending"] == ["r8"]
    assert "not scraped yet, so its state is unknown: r9" in plain
    assert "1 ok" in plain.splitlines()[0]


def test_before_the_first_scrape_it_says_what_is_waited_for() -> None:
    with asking(service_of(names=["r8", "r9"])) as client:
        lines = " ".join(client.get(TRIAGE).text.split())
        page_text = " ".join(client.get(f"{TRIAGE}/r9").text.split())
    assert "waiting for the first scrape of 2 targets" in lines
    assert "r8; waiting for http://gpu-7:8000/metrics, up to 13 s" in lines
    assert "waiting for the first scrape of 1 target not scraped" in page_text
    assert "r8" not in page_text


def test_a_target_without_news_is_unknown_unless_it_was_worse() -> None:
    late_s = NOW_S - 100
    states = [state_of("r1", replace(HEALTHY, t_s=late_s), t_s=late_s),
              state_of("r2", SICK, t_s=late_s), WELL_STATE]  # fmt: skip
    with asking(service_of(*states[:2])) as client:
        by_target = {target["target"]: target for target in told(client)["targets"]}
        watching = {row["target"]: row["late"] for row in told(client)["watching"]}
        plain, page = client.get(TRIAGE).text, client.get("/triage").text
    assert by_target["r1"]["health"] == "unknown"
    assert by_target["r1"]["unknown"][0] == "every signal: no scrape since 2026-11-21 00:05:00 UTC"
    assert by_target["r2"]["health"] == "critical"
    assert watching == {"r1": True, "r2": True}
    assert "no scrape of r1 for 100 s: its last state may be out of date" in plain
    assert "OK" not in plain
    assert "No data for 100 s" in page


def test_it_becomes_late_without_any_change_on_the_board() -> None:
    """What was rendered while the news was fresh is not shown when it is not any more."""
    now_s = NOW_S
    with asking(service_of(WELL_STATE, clock=lambda: now_s)) as client:
        assert told(client)["targets"][0]["health"] == "ok"
        assert "OK" in client.get(TRIAGE).text
        now_s = NOW_S + 60
        assert told(client)["targets"][0]["health"] == "unknown"
        assert "UNKNOWN" in client.get(TRIAGE).text


def test_a_new_cycle_is_shown_at_once() -> None:
    service = service_of(WELL_STATE)
    with asking(service) as client:
        assert told(client)["targets"][0]["health"] == "ok"
        service.board.put(state_of("r1", SICK))
        assert told(client)["targets"][0]["health"] == "critical"
        assert "CRITICAL" in client.get(TRIAGE).text
        service.board.drop("r1")
        assert told(client)["targets"] == []


def test_curl_gets_the_text_that_diagnose_prints() -> None:
    with asking(service_of(SICK_STATE, WELL_STATE)) as client:
        answer = client.get(TRIAGE, user_agent="curl/8.5.0", accept="*/*")
        alone = client.get(f"{TRIAGE}/r1").text
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    first, _, rest = answer.text.partition("\n\n")
    assert first == "2026-11-21 00:06:40 UTC: 1 critical, 1 ok"
    assert rest.startswith(text([replace(SICK, target=SICK_NAME)], Style(docs_url="/docs")))
    assert "OK       stage 0  r1 (model llama, engine 0)  KV 46%" in rest
    assert "?at=03:07" in rest
    assert text([replace(HEALTHY, target="r1")], Style(docs_url="/docs")) in alone
    assert all(len(line) <= 100 for line in answer.text.splitlines())


def test_markdown_for_a_ticket() -> None:
    with asking(service_of(SICK_STATE, WELL_STATE)) as client:
        answer = client.get(TRIAGE, accept="text/markdown")
        assert client.get(f"{TRIAGE}?format=markdown").text == answer.text
    assert answer.headers["content-type"] == "text/markdown; charset=utf-8"
    assert answer.text.startswith("# 2026-11-21 00:06:40 UTC: 1 critical, 1 ok\n")
    assert markdown([replace(SICK, target=SICK_NAME)], docs_url="/docs") in answer.text
    assert "## OK\n\n- OK       stage 0  r1" in answer.text


def test_a_browser_is_led_to_the_page() -> None:
    with asking(service_of(SICK_STATE)) as client:
        accept = "text/html,application/xhtml+xml,*/*;q=0.8"
        response = client.get(f"{TRIAGE}?at=-1h", accept=accept)
        of_target = client.get(f"{TRIAGE}/{SICK_NAME}", accept=accept)
    assert response.status_code == of_target.status_code == 307
    assert response.headers["location"] == "../../triage?at=-1h"
    assert of_target.headers["location"] == (
        "../../../../../triage?target=http%3A%2F%2Fgpu-7%3A8000"
    )


def test_a_page_that_could_not_be_read_is_told_with_its_cause() -> None:
    with asking(service_of(state_of("r1", UNREADABLE))) as client:
        target = told(client)["targets"][0]
        assert "target_down" in client.get(TRIAGE).text
    assert target["health"] == "critical"
    assert target["stage"]["number"] is None


def test_without_targets_it_says_so() -> None:
    with asking(service_of()) as client:
        assert told(client)["targets"] == []
        assert "no target is watched" in client.get(TRIAGE).text
        assert client.get("/triage").status_code == 200


def test_the_past_is_503_where_no_history_is_kept() -> None:
    with asking(service_of(WELL_STATE)) as client:
        for query in ("?at=-2h", "?since=-2h", "?at=-1h&since=-2h"):
            answer = client.get(TRIAGE + query)
            assert answer.status_code == 503
            assert answer.json()["detail"] == "no history is stored"


@pytest.mark.parametrize("query", ["at=x", "since=x", "at=9999999999", "format=xml", "at=%00"])
def test_a_wrong_parameter_is_422_and_says_what_would_be_right(query: str) -> None:
    with asking(service_of(WELL_STATE)) as client:
        answer = client.get(f"{TRIAGE}?{query}")
    assert answer.status_code == 422
    document = answer.json()
    assert document.keys() == {"type", "title", "status", "detail"}
    assert query[:2] in document["detail"]


def test_an_empty_parameter_is_as_good_as_none() -> None:
    with asking(service_of(WELL_STATE)) as client:
        assert client.get(f"{TRIAGE}?at=&since=").status_code == 200


HOSTILE = [
    "<script>alert(1)</script>",
    "a\x1b]0;owned\x07\x1b[31m",
    "x\r\nset-cookie: a=b",
    "| a | [b](javascript:alert(1)) `c`",
    "'\"&amp;{{7*7}}",
    "half a pair \ud800",
    "right\u202eto left",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_wherever_they_are_shown(name: str) -> None:
    """A name may hold anything; where it is shown it is neither markup nor a command."""
    sick = replace(SICK, model=name, engine=name)
    service = service_of(state_of(name, sick, labels={name: name}), names=[f"{name}2"])
    with asking(service) as client:
        plain = client.get(TRIAGE)
        marked = client.get(TRIAGE, accept="text/markdown")
        page = client.get("/triage")
        document = client.get(TRIAGE, accept=JSON)
        missing = client.get(f"{TRIAGE}/nope")
        metrics = client.get("/metrics")
    answers = (plain, marked, page, document, missing, metrics)
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 404, 200]
    for answer in (plain, marked, page, metrics, missing):
        shown = answer.text.replace("\n", "")
        assert "\x1b" not in shown or answer is metrics
        assert "\x07" not in shown or answer is metrics
        assert "set-cookie" not in answer.headers
    for answer in (plain, marked, page):
        assert answer.text.replace("\n", "").isprintable()
    assert "<script>alert" not in page.text
    assert "[b](javascript" not in marked.text
    assert "<script>alert" not in marked.text.replace("\\<", "")
    assert "49" not in page.headers["content-type"]
    json.loads(document.text)


def test_no_secret_is_in_any_answer(tmp_path: Path) -> None:
    file = token_file(tmp_path / "t", READER)
    settings = settings_of(
        fetch__headers={"x-key": "hunter2"},
        fetch__bearer_token_file="/secret/path",
        http__admin_token_file=str(file),
    )
    with asking(service_of(SICK_STATE, settings=settings)) as client:
        for path in (TRIAGE, f"{TRIAGE}?format=json", "/triage", "/metrics", "/docs", "/readyz"):
            answer = client.get(path)
            assert answer.status_code == 200
            for secret in ("hunter2", "/secret/path", READER.decode(), str(tmp_path)):
                assert secret not in answer.text


def test_an_engine_with_a_note_among_others_says_which() -> None:
    note = finding("QUEUE-SHARE", "info", 0.2)
    with_note = replace(HEALTHY, health="info", findings=[note])
    first, _ = body("text", [with_note, HEALTHY], alone=False).splitlines()
    assert "QUEUE-SHARE" in first
