"""Receivers that fail, hang or refuse, and daemons that are restarted or killed."""

from __future__ import annotations

import json
import logging
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kneewatch.agent.notify import alert_state
from kneewatch.agent.notify import notifier as notifying
from kneewatch.agent.notify.events import Alert, DiagnosedAlert
from kneewatch.agent.notify.notifier import Notifier, RetryPolicy
from kneewatch.agent.notify.receivers import receivers
from kneewatch.collector.files import replace_file
from kneewatch.rules.rule import Severity
from tests.agent.notify.conftest import Starting
from tests.agent.notify.factories import cause, healthy, settings, sick, state
from tests.agent.notify.web import Reply, Taking
from tests.agent.notify.webhooks import LONG_WAIT_S, ended, settle, stats_of, webhook
from tests.reports.diagnoses import NOW_S
from tests.waiting import PATIENCE_S, until


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_a_restart_tells_nothing_again(starting: Starting, taking: Taking) -> None:
    taker = taking()
    first = starting(webhook(taker))
    first.offer(state(sick()))
    settle(first)
    first.close(PATIENCE_S)
    second = starting(webhook(taker))
    # After a start the cause has to be concluded anew: it is not over for that.
    for after_s in range(100, 135, 5):
        second.offer(state(healthy(), after_s=after_s))
    for after_s in range(135, 200, 5):
        second.offer(state(sick(), after_s=after_s))
    settle(second)
    assert len(taker.posts) == 1
    ended(second, from_s=200.0)
    over = taker.wait(2)[1]
    assert over.body["status"] == "resolved"
    assert "after 4 min" in over.body["title"]  # since 40 s before the very first state


def test_a_message_that_was_sent_is_logged(
    starting: Starting, taking: Taking, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = starting(webhook(taking()))
    notifier.offer(state(sick()))
    settle(notifier)
    assert "notify: sent receiver=webhook-1 message=CRITICAL: kv_pressure on r0" in caplog.text


def test_an_end_during_the_downtime_is_told(starting: Starting, taking: Taking) -> None:
    taker = taking()
    first = starting(webhook(taker))
    first.offer(state(sick()))
    settle(first)
    first.close(PATIENCE_S)
    second = starting(webhook(taker))
    for after_s in range(100, 150, 5):
        second.offer(state(healthy(), after_s=after_s))
    assert taker.wait(2)[1].body["status"] == "resolved"


def test_what_a_kill_kept_from_being_told_is_told_after_the_start(
    starting: Starting, taking: Taking, tmp_path: Path
) -> None:
    dead = taking(Reply(status=503))
    first = starting(webhook(dead))
    first.offer(state(sick()))
    dead.wait(1)
    first.close(PATIENCE_S)
    (row,) = json.loads((tmp_path / "store.notify.json").read_text())["receivers"]["webhook-1"][
        "troubles"
    ]
    assert row["told"] is None
    alive = taking()
    second = starting(webhook(alive))
    second.offer(state(sick(), after_s=30))
    (post,) = alive.wait(1)
    assert post.body["title"].startswith("CRITICAL: kv_pressure on r0")


def test_what_got_worse_and_could_not_be_told_is_told_after_the_start(
    starting: Starting, taking: Taking
) -> None:
    taker = taking(Reply(), Reply(status=503))
    text = webhook(taker, 'severity = "warning"')
    first = starting(text)
    for after_s in (15, 20):
        first.offer(state(sick(Severity.WARNING, 2), after_s=after_s))
    settle(first)
    first.offer(state(sick(Severity.CRITICAL, 4), after_s=80))
    taker.wait(2)
    first.close(PATIENCE_S)
    taker.replies = [Reply()]
    second = starting(text)
    second.offer(state(sick(Severity.CRITICAL, 4), after_s=95))
    settle(second)
    assert taker.posts[-1].body["title"].startswith("WORSE, CRITICAL, was WARNING: kv_pressure")
    assert len({post.body["id"] for post in taker.posts}) == 2


def test_a_memory_that_cannot_be_read_or_written_keeps_nothing_from_being_told(
    starting: Starting, taking: Taking, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taker = taking()
    file = tmp_path / "store.notify.json"
    for text in ("{", "[]", '{"receivers": 1}', '{"receivers": {"webhook-1": {"troubles": [{}]}}}'):
        file.write_text(text)
        caplog.clear()
        starting(webhook(taker)).close(0.1)
        assert "notify: alert state" in caplog.text, text
    (tmp_path / "store.notify.json.new").mkdir()  # the file cannot be replaced
    caplog.clear()
    notifier = starting(webhook(taker))
    notifier.offer(state(sick()))
    taker.wait(1)
    settle(notifier)
    assert caplog.text.count("cannot write the alert state") == 1


def test_a_refusal_for_now_is_tried_again_when_asked(starting: Starting, taking: Taking) -> None:
    taker = taking(
        Reply(status=500), Reply(status=429, headers={"Retry-After": "1"}), Reply(status=200)
    )
    notifier = starting(webhook(taker), retry=RetryPolicy(first_s=0.05, most_s=5.0))
    notifier.offer(state(sick()))
    _, refused, taken = taker.wait(3)
    assert taken.at_s - refused.at_s >= 1.0
    settle(notifier)
    stats = stats_of(notifier)
    assert (stats.sent, stats.failed, stats.queued, stats.dropped) == (1, 2, 0, 0)
    assert len({post.body["id"] for post in taker.posts}) == 1


def test_a_refusal_for_good_is_dropped_and_logged_without_the_address(
    starting: Starting, taking: Taking, caplog: pytest.LogCaptureFixture
) -> None:
    taker = taking(Reply(status=400, body=b"no_text"), Reply(status=200))
    notifier = starting(webhook(taker))
    notifier.offer(state(sick()))
    settle(notifier)
    assert (len(taker.posts), stats_of(notifier).dropped) == (1, 1)
    assert "given up receiver=webhook-1" in caplog.text
    assert "answered 400 Bad Request" in caplog.text
    assert "SECRETPATH" not in caplog.text
    notifier.offer(state(healthy(causes=[cause("gpu_fault")]), after_s=5))
    taker.wait(2)  # the next message is not kept by the lost one


def test_a_receiver_that_keeps_failing_is_a_problem(starting: Starting, taking: Taking) -> None:
    taker = taking(Reply(status=404))  # a route that is not there yet: the message is kept
    notifier = starting(webhook(taker))
    notifier.offer(state(sick()))
    until(lambda: stats_of(notifier).failed >= notifying.FAILING_ATTEMPTS)
    (problem,) = notifier.problems()
    assert "attempts in a row failed" in problem
    taker.replies = [Reply()]
    settle(notifier)
    assert notifier.problems() == []
    assert (stats_of(notifier).sent, stats_of(notifier).dropped) == (1, 0)


def test_a_message_is_given_up_in_the_end(starting: Starting, taking: Taking) -> None:
    taker = taking(Reply(status=503))
    notifier = starting(webhook(taker, "give_up_s = 0.3"))
    notifier.offer(state(sick()))
    settle(notifier)
    stats = stats_of(notifier)
    assert (stats.sent, stats.dropped) == (0, 1)
    assert stats.failed == len(taker.posts)


def test_a_receiver_that_hangs_delays_neither_a_cycle_nor_another_receiver(
    starting: Starting, taking: Taking
) -> None:
    hanging, quick = taking(Reply(hang=True)), taking()
    notifier = starting(webhook(hanging) + webhook(quick))
    notifier.offer(state(sick()))
    hanging.wait(1)
    quick.wait(1)  # else all that follows may go with the first
    # Nothing ends the hanging request before the test's time limit: who waits for it fails.
    for number in range(200):
        notifier.offer(state(sick(), name=f"t{number}", after_s=5))
    quick.wait(2)
    assert notifier.stats_by_receiver()["webhook-2"].sent >= 1
    notifier.close(0.3)


def test_closing_sends_what_is_left(starting: Starting, taking: Taking) -> None:
    taker = taking()
    notifier = starting(webhook(taker, wait_s=LONG_WAIT_S))
    notifier.offer(state(sick()))
    assert stats_of(notifier).queued == 1
    notifier.close(PATIENCE_S)
    assert len(taker.posts) == 1
    assert stats_of(notifier).queued == 0


def test_without_receivers_nobody_is_told(tmp_path: Path) -> None:
    assert not Notifier.of(settings(tmp_path, ""), store=tmp_path / "kneewatch.db")
    text = '[[notify]]\nkind = "webhook"\nurl = "http://127.0.0.1:9/"'
    notifier = Notifier.of(settings(tmp_path, text), store=tmp_path / "kneewatch.db")
    assert notifier
    notifier.offer(state(sick()))
    notifier.close(0.5)
    assert (tmp_path / "kneewatch.notify.json").exists()


def forwarded(number: int = 0) -> DiagnosedAlert:
    begun = datetime.fromtimestamp(NOW_S, tz=UTC)
    alert = Alert("firing", {"alertname": "Slow"}, begun, given_fingerprint=f"f{number}")
    return DiagnosedAlert(alert, (("r0", {}),), (), {"number": number})


@pytest.mark.parametrize("kind", ["webhook", "alertmanager"])
def test_no_answer_silences_a_receiver(starting: Starting, taking: Taking, kind: str) -> None:
    taker = taking(Reply(status=503, headers={"Retry-After": "999999999"}), Reply())
    text = f'[[notify]]\nkind = "{kind}"\nurl = "{taker.url}"\n'
    notifier = starting(text + ("group_wait_s = 0.1\n" if kind == "webhook" else ""))
    notifier.offer(state(sick()))
    taker.wait(2)


def test_a_rotated_token_is_read_again(starting: Starting, taking: Taking, tmp_path: Path) -> None:
    taker, token = taking(Reply(status=401), Reply()), tmp_path / "token"
    token.write_text("old")
    notifier = starting(
        webhook(taker, f'bearer_token_file = "{token}"'), retry=RetryPolicy(0.5, 0.5)
    )
    notifier.offer(state(sick()))
    taker.wait(1)
    token.write_text("new")
    assert taker.wait(2)[1].headers["Authorization"] == "Bearer new"
    settle(notifier)
    assert stats_of(notifier).sent == 1


def test_the_whole_time_to_give_up_is_used(starting: Starting, taking: Taking) -> None:
    taker = taking(Reply(status=503))
    notifier = starting(webhook(taker, "give_up_s = 1.0"), retry=RetryPolicy(20.0, 300.0))
    notifier.offer(state(sick()))
    settle(notifier)
    assert len(taker.posts) == 2


def test_a_forwarded_alert_survives_the_end_of_the_daemon(
    starting: Starting, taking: Taking, tmp_path: Path
) -> None:
    taker = taking(Reply(hang=True))
    first = starting(webhook(taker))
    assert first.forward([forwarded(1)], NOW_S) == {"webhook-1": 1}
    first.forward([forwarded(2)], NOW_S + 1)
    folder = tmp_path / "store.notify.outbox"
    assert len(list(folder.glob("*.json"))) == 2  # what `kill -9` leaves
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    alive = taking()
    second = starting(webhook(alive))
    posts = alive.wait(2)
    settle(second)
    assert [post.body["events"] for post in posts] == [[{"number": 1}], [{"number": 2}]]
    assert second.forward([forwarded(1)], NOW_S) == {"webhook-1": 0}, "it was delivered"
    second.close(PATIENCE_S)
    assert not list(folder.iterdir())


def test_an_alert_that_is_repeated_while_it_is_stored_is_answered_after_that(
    starting: Starting, taking: Taking, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, may_store, answers = threading.Event(), threading.Event(), list[dict[str, int]]()

    def slowly(file: Path, content: bytes) -> None:
        stores.set()
        may_store.wait(PATIENCE_S)
        replace_file(file, content)

    monkeypatch.setattr(alert_state, "replace_file", slowly)
    notifier = starting(webhook(taking()))

    def forward() -> None:
        answers.append(notifier.forward([forwarded()], NOW_S))

    threads = [threading.Thread(target=forward) for _ in range(2)]
    threads[0].start()
    assert stores.wait(PATIENCE_S)
    threads[1].start()
    threads[1].join(0.2)
    assert not answers
    may_store.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert answers == [{"webhook-1": 1}, {"webhook-1": 0}]


def test_a_message_that_cannot_be_stored_is_sent_and_is_a_problem(
    starting: Starting, taking: Taking, tmp_path: Path
) -> None:
    taker = taking()
    notifier = starting(webhook(taker))
    folder = tmp_path / "store.notify.outbox"
    folder.touch()  # not a folder
    assert notifier.forward([forwarded(1)], NOW_S) == {"webhook-1": 1}
    taker.wait(1)
    assert notifier.problems() == ["notify: cannot store messages: they are lost if kneewatch ends"]
    folder.unlink()
    notifier.forward([forwarded(2)], NOW_S)
    assert not notifier.problems()


def test_stored_messages_wait_on_disk_for_room_in_the_queue(
    starting: Starting, taking: Taking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifying, "QUEUE_MAX", 3)
    taker = taking(Reply(status=503))
    first = starting(webhook(taker))
    for number in range(5):
        first.forward([forwarded(number)], NOW_S + number)
    taker.replies = [Reply()]
    settle(first)
    posts = [post.body["events"][0]["number"] for post in taker.posts]
    assert list(dict.fromkeys(posts)) == [0, 1, 2, 3, 4]
    assert stats_of(first).dropped == 0


def test_a_receiver_that_is_gone_does_not_fill_the_disk(
    starting: Starting, taking: Taking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert_state, "FILES_MAX", 20)
    monkeypatch.setattr(notifying, "QUEUE_MAX", 3)
    folder, gone = tmp_path / "store.notify.outbox", taking(Reply(status=400))
    first = starting(webhook(gone))
    for number in range(30):
        first.forward([forwarded(number)], NOW_S + number)
    until(lambda: stats_of(first).queued == 0)
    first.close(PATIENCE_S)
    assert len(list(folder.iterdir())) == 20
    taker = taking()
    settle(starting(webhook(taker)))
    delivered = [post.body["events"][0]["number"] for post in taker.posts]
    assert delivered == list(range(10, 30)), "the newest, in their order"


def test_what_was_given_up_is_not_delivered_and_is_tried_again(
    starting: Starting, taking: Taking, tmp_path: Path
) -> None:
    taker, text = taking(Reply(status=400)), ""
    text = webhook(taker)
    first = starting(text)
    first.offer(state(sick()))
    first.forward([forwarded()], NOW_S)
    until(lambda: stats_of(first).dropped == 2)
    assert first.problems() == ["notify: webhook-1: 2 messages given up; a reload tries them again"]
    first.adopt(receivers(settings(tmp_path, text)))  # SIGHUP
    taker.wait(4)
    until(lambda: stats_of(first).dropped == 4)
    first.close(PATIENCE_S)
    taker.replies = [Reply()]
    second = starting(text)
    second.offer(state(sick(), after_s=30))
    taker.wait(6)
    settle(second)
    assert second.problems() == []
    ids = [post.body["id"] for post in taker.posts]
    assert sorted(ids[-2:]) == sorted(set(ids[:2])), "the same messages"


def test_the_state_file_is_private_and_follows_no_link(
    starting: Starting, taking: Taking, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "store.notify.json.new").symlink_to(victim)
    notifier = starting(webhook(taking()))
    notifier.offer(state(sick()))
    settle(notifier)
    notifier.close(PATIENCE_S)
    assert victim.read_text() == "kept"
    assert (tmp_path / "store.notify.json").stat().st_mode & 0o777 == 0o600
