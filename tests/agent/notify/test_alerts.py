"""The answer to a post of Alertmanager: from a real store, the board, and what is sent on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kneewatch.agent.api.alerts import DOCUMENTS_MAX, answer
from kneewatch.agent.api.responses import dumped
from kneewatch.agent.api.service import Service
from kneewatch.agent.notify.events import DiagnosedAlert, forwarded, payload_of
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Cycle, EngineCycle, Retention
from kneewatch.agent.store.writer import Store
from kneewatch.agent.target_state import TargetState
from kneewatch.diagnose.verdict import Verdict
from kneewatch.diagnose.verdict_json import DocumentError
from tests.agent.api.serving import service_of
from tests.agent.notify.conftest import Starting
from tests.agent.notify.factories import FP8, healthy, sick, state
from tests.agent.notify.posts import alert, post
from tests.agent.notify.web import Taking
from tests.agent.notify.webhooks import settle, webhook
from tests.reports.diagnoses import NOW_S
from tests.reports.documents import document
from tests.waiting import PATIENCE_S

START_S = NOW_S - 300


def answered(payload: Mapping[str, Any], asked: Service) -> dict[str, Any]:
    """The answer as it arrives: through JSON."""
    document: dict[str, Any] = json.loads(dumped(answer(payload, asked)))
    return document


def at(diagnosis: Verdict, t_s: float, name: str = "r0") -> Verdict:
    return replace(diagnosis, t_s=t_s, target=name)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """A history: five minutes ago it was bad, for a minute."""
    store = Store.open(tmp_path / "kneewatch.db", retention=Retention(), clock=lambda: NOW_S)
    for number in range(60):
        t_s = START_S - 100 + 5 * number
        ill = START_S - 30 <= t_s <= START_S + 30
        diagnosis = at(sick() if ill else healthy(), t_s)
        store.put(Cycle(t_s, "r0", {}, (EngineCycle(diagnosis),)))
    store.close(10.0)
    open_reader = Reader(tmp_path / "kneewatch.db")
    yield open_reader
    open_reader.close()


def service(*states: TargetState, **more: object) -> Service:
    watched = service_of(*states, **more)  # type: ignore[arg-type]
    specs = [
        replace(spec, address=f"http://{spec.name}:8000", labels=dict(target.labels))
        for spec, target in zip(watched.targets(), states, strict=True)
    ]
    return replace(watched, targets=lambda: specs)


def test_the_diagnosis_at_the_start_and_now(reader: Reader) -> None:
    reply = answered(
        post(alert(starts_s=START_S + 3, instance="r0:8000")),
        service(state(healthy()), reader=reader),
    )
    assert (reply["schema"], reply["t"], reply["status"]) == ("kneewatch.alerts/1", NOW_S, "firing")
    (row,) = reply["alerts"]
    assert row["match"] == {
        "text": "matched r0 by instance=r0:8000",
        "targets": [{"target": "r0", "by": ["instance=r0:8000"], "exact": True}],
        "model": None,
        "engine": None,
    }
    (look,) = row["diagnoses"]
    start = look["at_start"]
    assert (start["health"], start["stage"]["number"]) == ("critical", 3)
    assert start["t"] == START_S, "the newest scrape at or before the alert's start"
    assert [recommendation["id"] for recommendation in start["recommendations"]] == [FP8.id]
    assert start["causes"][0]["docs"] == "/docs/causes/kv_pressure"
    assert look["now"] == document(at(healthy(), NOW_S))
    assert row["text"].splitlines() == [
        "SlowFirstToken firing, since 00:01:43 UTC",
        "matched r0 by instance=r0:8000",
        "alert: TTFT P99 is over its target",
        "r0 (model llama, engine 0): at 00:01:43 UTC: CRITICAL kv_pressure: The KV cache is too "
        "small for this load. (KV cache: stage 3 of 4, queueing)",
        "now: OK (KV cache: fine)",
        "do first: Send less traffic to this replica, or shed load at the gateway (HTTP 429). "
        "Add a replica if one starts in minutes. Stop batch jobs and very long prompts first.",
        "then fix it: --kv-cache-dtype fp8. Instead of --kv-cache-dtype auto. Needs a restart, "
        "which empties the caches. Half the bytes a token: the cache holds twice as many. Quality.",
        "docs: /docs/causes/kv_pressure",
    ]
    json.dumps(reply, allow_nan=False)


@pytest.mark.parametrize("starts_s", [START_S - 4000, NOW_S + 4000, 0.0])
def test_a_start_that_nobody_watched_is_unknown(reader: Reader, starts_s: float) -> None:
    reply = answered(
        post(alert(starts_s=starts_s, instance="r0:8000")), service(state(sick()), reader=reader)
    )
    (look,) = reply["alerts"][0]["diagnoses"]
    assert (look["at_start"], look["why"]) == (None, "unknown: nothing is stored of that time")
    assert look["now"]["health"] == "critical"
    assert "unknown: nothing is stored of that time" in reply["alerts"][0]["text"]


def test_without_a_history_the_start_is_unknown() -> None:
    reply = answered(post(alert(instance="r0:8000")), service(state(sick())))
    assert reply["alerts"][0]["diagnoses"][0]["why"] == "unknown: no history is stored"


def test_a_target_that_is_down_now_was_something_before(reader: Reader, tmp_path: Path) -> None:
    down = replace(state(), diagnoses=())
    reply = answered(
        post(alert(starts_s=START_S, instance="r0:8000")), service(down, reader=reader)
    )
    (look,) = reply["alerts"][0]["diagnoses"]
    assert look["at_start"]["health"] == "critical"
    assert look["now"] is None
    assert "now: unknown: no longer watched" in reply["alerts"][0]["text"]


def test_what_matches_nothing_says_so() -> None:
    reply = answered(post(alert(instance="r9:8000")), service(state(sick())))
    (row,) = reply["alerts"]
    assert (row["match"]["targets"], row["diagnoses"]) == ([], [])
    assert row["match"]["text"].startswith("no match")
    assert reply["text"] == "1 alert, 0 of them about watched targets"


def test_an_alert_about_one_engine_gets_that_engine() -> None:
    two = state(healthy(), sick(engine="1"))
    reply = answered(post(alert(instance="r0:8000", engine="1", model_name="llama")), service(two))
    assert [look["engine"] for look in reply["alerts"][0]["diagnoses"]] == ["1"]


def test_long_answers_are_bounded_and_say_what_is_left_out() -> None:
    engines = [sick(engine=str(number)) for number in range(20)]
    posted = post(alert("resolved", instance="r0:8000"), *[alert(instance="r0:8000")] * 3)
    reply = answered(posted, service(state(*engines)))
    shown = [len(row["diagnoses"]) for row in reply["alerts"]]
    assert shown == [20, DOCUMENTS_MAX - 20, 0, 0]
    assert [row["left_out"] for row in reply["alerts"]] == [0, 8, 20, 20]
    assert [row["status"] for row in reply["alerts"]] == ["firing"] * 3 + ["resolved"]
    assert "more engines" in reply["alerts"][3]["text"]


def test_what_alertmanager_left_out_is_said() -> None:
    reply = answered(post(alert(instance="r0:8000"), truncatedAlerts=4), service(state(sick())))
    assert "Alertmanager truncated 4 more" in reply["text"]


def test_no_alerts_is_an_answer_too() -> None:
    assert answered(post(), service(state(sick())))["alerts"] == []


def test_a_wrong_post_is_refused() -> None:
    with pytest.raises(DocumentError):
        answer({"version": "4"}, service(state(sick())))


def test_alerts_are_sent_on_once_for_each_state_they_take(
    starting: Starting, taking: Taking
) -> None:
    taker = taking()
    notifier = starting(webhook(taker) + webhook(taker, 'name = "deaf"\nalerts = false'))
    asked = service(state(sick()), notifier=notifier)
    firing = post(alert(instance="r0:8000"), alert(instance="elsewhere:1"))
    assert answer(firing, asked).sent == {"webhook-1": 1}
    (sent,) = taker.wait(1)
    assert (sent.body["source"], sent.body["status"]) == ("alertmanager", "firing")
    assert sent.body["title"] == "ALERT: SlowFirstToken on r0"
    assert sent.body["events"][0]["diagnoses"][0]["now"]["health"] == "critical"
    assert "fp8. Instead of --kv-cache-dtype auto. Needs a restart" in sent.body["text"]
    settle(notifier)
    assert answer(firing, asked).sent == {"webhook-1": 0}, "Alertmanager repeats itself"
    notifier.close(PATIENCE_S)
    again = starting(webhook(taker))
    asked = replace(asked, notifier=again)
    assert answer(firing, asked).sent == {"webhook-1": 0}, "also after a restart"
    over = post(alert("resolved", instance="r0:8000"), status="resolved")
    assert answer(over, asked).sent == {"webhook-1": 1}
    assert taker.wait(2)[1].body["title"] == "ALERT RESOLVED: SlowFirstToken on r0"
    settle(again)
    anew = post(alert(instance="r0:8000", starts_s=NOW_S + 600))
    assert answer(anew, asked).sent == {"webhook-1": 1}


def test_a_receiver_is_sent_only_alerts_of_its_targets(starting: Starting, taking: Taking) -> None:
    taker = taking()
    notifier = starting(webhook(taker, 'targets = ["r1"]'))
    asked = service(state(sick()), state(sick(), name="r1"), notifier=notifier)
    reply = answered(post(alert(instance="r0:8000"), alert(instance="r1:8000")), asked)
    assert reply["sent"] == {"webhook-1": 1}
    assert taker.wait(1)[0].body["title"] == "ALERT: SlowFirstToken on r1"


def test_hostile_labels_stay_text(starting: Starting, taking: Taking) -> None:
    taker = taking()
    notifier = starting(webhook(taker).replace('"webhook"', '"slack"'))
    evil = alert(instance="r0:8000", alertname="<!here> <https://evil.example|x>\x1b[0m @channel")
    evil["annotations"] = {"summary": "<!channel> [x](https://evil.example)"}
    reply = answered(post(evil), service(state(sick()), notifier=notifier))
    assert "\x1b" not in reply["alerts"][0]["text"]
    text = taker.wait(1)[0].body["text"]
    assert "<!" not in text
    assert "<http" not in text
    assert "://evil" not in text
    assert "@channel" not in text


def test_a_forwarded_alert_links_to_the_page_of_its_cause() -> None:
    (posted,) = payload_of(post(alert(instance="r0:8000"))).alerts
    diagnosed = DiagnosedAlert(posted, (("r0", {}),), (), {}, cause_id="kv_pressure")
    message = forwarded(
        [diagnosed], receiver="hook", base="", now_s=NOW_S, docs_url="https://wiki.example/k"
    )
    assert message.parts[0].docs == "https://wiki.example/k/causes/kv_pressure"
