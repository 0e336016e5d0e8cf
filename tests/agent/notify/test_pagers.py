"""PagerDuty, Opsgenie and Teams: what a stub of each service gets."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from kneewatch.agent.notify.notifier import Notifier
from kneewatch.agent.report.schedule import receivers_of
from kneewatch.collector.errors import SettingsError
from kneewatch.rules.rule import Severity
from tests.agent.notify.conftest import Starting
from tests.agent.notify.factories import cause, settings, sick, state
from tests.agent.notify.web import Reply, Taker, Taking
from tests.agent.notify.webhooks import ended, settle, stats_of, webhook
from tests.agent.running import Main
from tests.waiting import PATIENCE_S

KEY = "R0UTINGKEYSECRET"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PAGER_KEY", KEY)
    caplog.set_level(logging.DEBUG)


def pager(taker: Taker, kind: str = "pagerduty", more: str = "") -> str:
    address = f"http://127.0.0.1:{taker.port}"
    table = webhook(taker, f'key_env = "PAGER_KEY"\nseverity = "warning"\n{more}')
    return table.replace('"webhook"', f'"{kind}"').replace(taker.url, address)


def actions(taker: Taker) -> list[tuple[str, str]]:
    return [(posted.body["event_action"], posted.body["dedup_key"]) for posted in taker.posts]


def test_a_problem_is_an_incident_from_its_trigger_to_its_resolve(
    starting: Starting, taking: Taking, caplog: pytest.LogCaptureFixture
) -> None:
    taker = taking(Reply(202, body=b'{"status": "success"}'))
    base = "https://ops.example"
    notifier = starting(pager(taker, more=f'triage_url = "{base}"'))
    notifier.offer(state(sick(), name="gpu-7"))
    settle(notifier)
    ended(notifier, "gpu-7")
    settle(notifier)
    opened = taker.posts[0].body
    assert taker.posts[0].path == "/v2/enqueue"
    assert opened["routing_key"] == KEY
    assert opened["client_url"] == f"{base}/triage?target=gpu-7&at=2026-11-21T00:06:40Z"
    payload = opened["payload"]
    assert payload["summary"].startswith("CRITICAL: kv_pressure on gpu-7 (model llama, engine 0)")
    assert (payload["severity"], payload["source"]) == (
        "critical",
        "gpu-7 (model llama, engine 0)",
    )
    assert list(payload["custom_details"])[:3] == ["what", "do first", "then fix it"]
    assert payload["custom_details"]["then fix it"].startswith("--kv-cache-dtype fp8 Instead of")
    incident = opened["dedup_key"]
    assert actions(taker)[0] == ("trigger", incident)
    assert ("resolve", incident) in actions(taker)[1:]
    assert all(action == "resolve" for action, _ in actions(taker)[1:])
    assert KEY not in caplog.text


def test_each_problem_is_an_incident_of_its_own(starting: Starting, taking: Taking) -> None:
    taker = taking()
    notifier = starting(pager(taker))
    notifier.offer(state(sick(), name="gpu-7"))
    notifier.offer(state(sick(), name="gpu-8"))
    settle(notifier)
    assert [posted.body["payload"]["source"][:5] for posted in taker.posts] == ["gpu-7", "gpu-8"]
    first, second = (incident for _, incident in actions(taker))
    ended(notifier, "gpu-8")
    settle(notifier)
    assert ("resolve", second) in actions(taker)
    assert ("resolve", first) not in actions(taker)


def test_what_gets_worse_is_a_new_incident_that_replaces_the_milder(
    starting: Starting, taking: Taking
) -> None:
    taker = taking()
    notifier = starting(pager(taker))
    values = {**sick().values, "ttft_p50_s": 0.1}
    warned = [cause("gpu_throttled", Severity.WARNING)]
    milder = sick(Severity.WARNING, stage=0, causes=warned, values=values)
    slower = {**values, "ttft_p50_s": 2.0}
    worse = sick(stage=0, causes=[cause("gpu_throttled")], values=slower)
    notifier.offer(state(milder))
    notifier.offer(state(milder, after_s=70))  # a warning that makes requests wait is held
    settle(notifier)
    notifier.offer(state(worse, after_s=140))
    settle(notifier)
    (_, warning), (_, critical), replaced = actions(taker)
    assert critical != warning
    assert replaced == ("resolve", warning)
    ended(notifier, from_s=150.0)
    settle(notifier)
    left = {incident for action, incident in actions(taker) if action == "trigger"}
    assert left <= {incident for action, incident in actions(taker) if action == "resolve"}


def killed(notifier: Notifier, starting: Starting, text: str, folder: Path) -> Notifier:
    """The notifier that starts after a kill: from the state file as it is, the other is forgotten
    by its daemon."""
    copy = folder / "after.notify.json"
    copy.write_bytes((folder / "store.notify.json").read_bytes())
    notifier.close(0.0)
    return starting(text, state_file=copy)


def test_a_kill_opens_no_second_incident_and_leaves_none_open(
    starting: Starting, taking: Taking, tmp_path: Path
) -> None:
    taker = taking()
    first = starting(pager(taker))
    first.offer(state(sick()))
    settle(first)
    second = killed(first, starting, pager(taker), tmp_path)
    for after_s in range(100, 200, 5):
        second.offer(state(sick(), after_s=after_s))
    settle(second)  # a kill before the delivery was recorded sends it again
    assert len(set(actions(taker))) == 1
    ended(second, from_s=200.0)
    settle(second)
    assert ("resolve", actions(taker)[0][1]) in actions(taker)


def test_a_busy_pager_is_tried_again_with_the_same_incident(
    starting: Starting, taking: Taking
) -> None:
    # 400: what PagerDuty answers to a key that is being replaced
    taker = taking(Reply(429, {"Retry-After": "0"}), Reply(400), Reply(503), Reply(202))
    notifier = starting(pager(taker))
    notifier.offer(state(sick()))
    settle(notifier)
    assert len(set(actions(taker))) == 1
    assert (len(taker.posts), stats_of(notifier).sent, stats_of(notifier).dropped) == (4, 1, 0)


def test_an_end_that_fails_halfway_closes_all_incidents_in_the_end(
    starting: Starting, taking: Taking
) -> None:
    taker = taking(Reply(202), Reply(202), Reply(503), Reply(202))
    notifier = starting(pager(taker))
    notifier.offer(state(sick()))
    settle(notifier)
    ended(notifier)
    settle(notifier)
    taker.wait(5)
    assert ("resolve", actions(taker)[0][1]) in actions(taker)[3:]


def test_opsgenie_gets_an_alert_and_its_close(starting: Starting, taking: Taking) -> None:
    taker = taking(Reply(202))
    notifier = starting(pager(taker, "opsgenie"))
    notifier.offer(state(sick()))
    settle(notifier)
    ended(notifier)
    settle(notifier)
    opened, *closed = taker.posts
    assert opened.path == "/v2/alerts"
    assert opened.headers["Authorization"] == f"GenieKey {KEY}"
    assert len(opened.body["message"]) <= 130
    assert opened.body["priority"] == "P1"
    assert "do first: " in opened.body["description"]
    path = f"/v2/alerts/{opened.body['alias']}/close?identifierType=alias"
    assert path in [posted.path for posted in closed]


def test_teams_gets_a_card(starting: Starting, taking: Taking) -> None:
    taker = taking(Reply(202))
    text = webhook(taker, 'triage_url = "https://ops.example"')
    notifier = starting(text.replace('"webhook"', '"teams"'))
    notifier.offer(state(sick()))
    settle(notifier)
    (attachment,) = taker.posts[0].body["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    heading, *blocks = attachment["content"]["body"]
    assert heading["text"].startswith("CRITICAL: kv_pressure on r0")
    words = "\n".join(block["text"] for block in blocks)
    assert "[triage](https://ops.example/triage?target=r0" in words
    assert "\n- then fix it: " in words


def test_a_test_message_closes_its_incident(main: Main, taking: Taking, tmp_path: Path) -> None:
    taker = taking(Reply(202))
    file = tmp_path / "kneewatch.toml"
    file.write_text(pager(taker))
    ran = main("notify", "--config", file, "--test")
    assert ran.status == 0, ran.err
    (opened, incident), closed = actions(taker)
    assert (opened, closed) == ("trigger", ("resolve", incident))
    assert taker.posts[0].body["payload"]["severity"] == "warning"
    assert "may have paged" in ran.out
    assert KEY not in ran.out + ran.err + str(main("config", "--config", file).out)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("", "set one of key_file, key_env"),
        ('key_env = "PAGER_KEY"\nalerts = false', "unknown key 'alerts' for pagerduty"),
    ],
)
def test_a_pager_without_a_key_or_with_alerts_is_refused(
    tmp_path: Path, more: str, says: str
) -> None:
    text = f'report.send = ["p"]\n[[notify]]\nkind = "pagerduty"\nname = "p"\n{more}\n'
    with pytest.raises(SettingsError, match=says):
        receivers_of(settings(tmp_path, text))


def test_a_pager_gets_no_reports(tmp_path: Path) -> None:
    text = 'report.send = ["p"]\n[[notify]]\nkind = "pagerduty"\nname = "p"\nkey_env = "PAGER_KEY"'
    with pytest.raises(SettingsError, match="'p' is of kind pagerduty, which gets no reports"):
        receivers_of(settings(tmp_path, text))


def test_any_answer_will_do_where_the_receiver_answers_with_a_page(
    starting: Starting, taking: Taking
) -> None:
    page = Reply(body=b"<!DOCTYPE html><p>thanks")
    strict, lax = taking(page), taking(page)
    notifier = starting(webhook(strict) + webhook(lax, "any_answer = true"))
    notifier.offer(state(sick()))
    deadline_s = time.monotonic() + PATIENCE_S
    while (stats := notifier.stats_by_receiver())["webhook-2"].sent < 1 or (
        stats["webhook-1"].failed < 1
    ):
        assert time.monotonic() < deadline_s, stats
        time.sleep(0.01)
    assert stats["webhook-1"].sent == 0
