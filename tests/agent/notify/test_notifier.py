"""The notifier with real receivers: what is told, once and in time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from kneewatch.agent.notify.events import Event, Groups, Key
from kneewatch.agent.notify.receivers import receivers
from kneewatch.rules.rule import Severity
from tests.agent.notify.conftest import Starting
from tests.agent.notify.factories import cause, healthy, settings, sick, state
from tests.agent.notify.web import Taking
from tests.agent.notify.webhooks import LONG_WAIT_S, WAIT_S, ended, settle, stats_of, webhook
from tests.waiting import PATIENCE_S, until


def test_begin_and_end_are_told_once_each(starting: Starting, taking: Taking) -> None:
    taker = taking()
    notifier = starting(webhook(taker, 'triage_url = "https://ops.example/kneewatch"'))
    for after_s in range(0, 60, 5):
        notifier.offer(state(sick(), after_s=after_s))
    settle(notifier)
    ended(notifier, from_s=60.0)
    began, over = taker.wait(2)
    settle(notifier)
    assert len(taker.posts) == 2
    assert began.body["schema"] == "kneewatch.notification/1"
    assert (began.body["status"], began.body["severity"]) == ("firing", "critical")
    (event,) = began.body["events"]
    assert event["id"] == "kv_pressure"
    assert event["stage"]["number"] == 3
    assert event["recommendation"]["changes"] == [
        {"flag": "--kv-cache-dtype", "from": "auto", "to": "fp8"}
    ]
    shown = "https://ops.example/kneewatch/triage?target=r0&at=2026-11-21T00:06:40Z"
    assert event["link"] == shown
    assert "fp8. Instead of --kv-cache-dtype auto. Needs a restart" in began.body["text"]
    assert over.body["status"] == "resolved"
    assert over.body["events"][0]["link"] == shown, "the moment that the first message was about"
    # From 40 s before the first state until the first of those without it.
    assert over.body["title"].startswith(
        "RESOLVED: kv_pressure on r0 (model llama, engine 0), after 100 s"
    )
    assert stats_of(notifier).sent == 2


def test_a_trouble_that_comes_back_within_the_hold_is_the_same(
    starting: Starting, taking: Taking
) -> None:
    taker = taking()
    notifier = starting(webhook(taker))
    for round_s in range(0, 300, 15):  # ill for 5 s, well for 10 s, again and again
        notifier.offer(state(sick(), after_s=round_s))
        notifier.offer(state(healthy(), after_s=round_s + 5))
        notifier.offer(state(healthy(), after_s=round_s + 10))
        time.sleep(WAIT_S / 10)
    settle(notifier)
    assert [post.body["status"] for post in taker.posts] == ["firing"]
    ended(notifier, from_s=300.0)
    assert taker.wait(2)[1].body["status"] == "resolved"


def test_many_targets_with_one_cause_give_one_message(starting: Starting, taking: Taking) -> None:
    taker = taking()
    notifier = starting(webhook(taker, wait_s=LONG_WAIT_S))
    for number in range(40):
        notifier.offer(state(sick(), name=f"r{number:02}"))
    notifier.offer(state(healthy(causes=[cause("gpu_fault")]), name="other"))
    notifier.close(PATIENCE_S)
    grouped, other = sorted(taker.wait(2), key=lambda post: -len(post.body["events"]))
    assert len(grouped.body["events"]) == 40
    assert "on 40 targets: r00, r01, r02, r03, r04 and 35 more" in grouped.body["title"]
    assert grouped.body["text"].endswith("and 30 more")
    assert [event["id"] for event in other.body["events"]] == ["gpu_fault"]


def test_what_gets_worse_is_told_once(starting: Starting, taking: Taking) -> None:
    taker = taking()
    notifier = starting(webhook(taker, 'severity = "warning"'))
    for after_s in (15, 20):
        notifier.offer(state(sick(Severity.WARNING, 2), after_s=after_s))
    settle(notifier)
    for after_s in (80, 85, 90):
        notifier.offer(state(sick(Severity.CRITICAL, 4), after_s=after_s))
    notifier.offer(state(sick(Severity.WARNING, 2), after_s=95))
    notifier.offer(state(sick(Severity.CRITICAL, 4), after_s=99))
    settle(notifier)
    titles = [post.body["title"] for post in taker.posts]
    assert len(titles) == 2
    assert titles[0].startswith("WARNING: kv_pressure on r0")
    assert titles[1].startswith("WORSE, CRITICAL, was WARNING: kv_pressure on r0")
    assert "stage 4 (collapsing)" in titles[1]


def test_what_gets_worse_before_it_was_told_just_begins_worse(
    starting: Starting, taking: Taking
) -> None:
    taker = taking()
    notifier = starting(webhook(taker, 'severity = "warning"', wait_s=LONG_WAIT_S))
    notifier.offer(state(sick(Severity.WARNING, 2)))
    notifier.offer(state(sick(Severity.CRITICAL, 3), after_s=5))
    notifier.close(PATIENCE_S)
    assert [post.body["title"].partition(":")[0] for post in taker.posts] == ["CRITICAL"]


def test_a_blip_that_nobody_was_told_of_has_no_end_either(
    starting: Starting, taking: Taking
) -> None:
    taker = taking()
    notifier = starting(webhook(taker, wait_s=LONG_WAIT_S))
    notifier.offer(state(sick()))
    ended(notifier, from_s=5.0)  # over before the group's wait is
    notifier.close(PATIENCE_S)
    assert taker.posts == []


def test_only_the_chosen_severity_and_targets_are_told(starting: Starting, taking: Taking) -> None:
    taker = taking()
    text = webhook(taker, 'targets = ["r*"]\nlabels = {tier = "pro?"}')
    notifier = starting(text)
    notifier.offer(state(sick(Severity.WARNING), name="r1"))
    notifier.offer(state(sick(), name="s1"))
    notifier.offer(state(sick(), name="r2", labels={"tier": "dev"}))
    notifier.offer(state(sick(), name="r3"))
    settle(notifier)
    assert [event["target"] for post in taker.posts for event in post.body["events"]] == ["r3"]


def test_what_goes_on_is_told_again_where_that_is_asked_for(
    starting: Starting, taking: Taking
) -> None:
    taker = taking()
    notifier = starting(webhook(taker, "repeat_s = 3600"))
    for after_s in (0, 1800, 3590, 3601, 3700, 7300):
        notifier.offer(state(sick(), after_s=after_s))
        settle(notifier)
    words = [post.body["title"].partition(":")[0] for post in taker.posts]
    assert words == ["CRITICAL", "STILL CRITICAL after 61 min", "STILL CRITICAL after 2.0 h"]


def test_what_nobody_watches_any_more_is_told(starting: Starting, taking: Taking) -> None:
    taker = taking()
    clock = {"clock": lambda: state(healthy(), after_s=30).t_s}
    notifier = starting(webhook(taker, hold_s=2 * WAIT_S), **clock)
    notifier.set_watched(["r0", "r1"])
    notifier.offer(state(sick()))
    settle(notifier)
    notifier.set_watched(["r1"])
    body = taker.wait(2)[1].body
    assert body["status"] == "unwatched"
    assert body["title"].startswith("NO LONGER WATCHED: kv_pressure on r0")


def test_a_discovery_that_loses_a_target_for_a_moment_is_no_news(
    starting: Starting, taking: Taking
) -> None:
    taker = taking()
    notifier = starting(webhook(taker, wait_s=0.01))
    for at in range(6):  # with each message that is due at once, also one about its end
        notifier.set_watched(["r0", "r1"])
        notifier.offer(state(sick(), after_s=5.0 * at))
        until(lambda: stats_of(notifier).sent > 0 and stats_of(notifier).queued <= 1)
        notifier.set_watched(["r1"])
    notifier.set_watched(["r0", "r1"])
    notifier.offer(state(sick(), after_s=30.0))
    ended(notifier, from_s=35.0)
    assert [post.body["status"] for post in taker.wait(2)] == ["firing", "resolved"]


def test_each_target_that_is_no_longer_watched_is_held_back() -> None:
    groups = Groups(wait_s=1.0, hold_s=20.0)

    def lost(target: str, at_s: float) -> None:
        key = Key(target, "m", "0", "kv_pressure")
        ended = Event("ended", key, Severity.CRITICAL, 3, 0.0, at_s, how="no longer watched")
        groups.gather([ended], at_s)

    for target, at_s in (("a", 0.0), ("flaps", 0.0), ("b", 0.5), ("flaps", 15.0)):
        lost(target, at_s)
    assert (groups.take(19.9), groups.due_s()) == ([], 20.0)
    assert [event.key.target for event in groups.take(20.0)] == ["a", "b"]
    assert (groups.take(34.0), groups.due_s()) == ([], 35.0)
    assert [event.key.target for event in groups.take(35.0)] == ["flaps"]
    assert not groups


def test_other_receivers_are_taken_up_and_nobody_is_told_twice(
    starting: Starting, taking: Taking, tmp_path: Path
) -> None:
    stays, changes, leaves, comes = (taking() for _ in range(4))
    before = webhook(stays, 'name = "stays"') + webhook(changes, 'name = "changes"')
    notifier = starting(before + webhook(leaves, 'name = "leaves"'))
    notifier.set_watched(["r0"])
    notifier.offer(state(sick()))
    settle(notifier)
    after = webhook(stays, 'name = "stays"') + webhook(comes, 'name = "comes"')
    after += webhook(changes, 'name = "changes"\ngive_up_s = 60')
    notifier.adopt(receivers(settings(tmp_path, after)))
    assert set(notifier.stats_by_receiver()) == {"stays", "changes", "comes"}
    notifier.offer(state(sick(), after_s=5))
    settle(notifier)
    assert [len(server.posts) for server in (stays, changes, leaves, comes)] == [1, 1, 1, 1]
    ended(notifier, from_s=10.0)
    for taker in (stays, changes, comes):
        assert taker.wait(2)[1].body["status"] == "resolved"
    assert len(leaves.posts) == 1
    notifier.adopt([])
    assert not notifier


def test_a_receiver_that_comes_back_learns_of_what_was_dropped_meanwhile(
    starting: Starting, taking: Taking, tmp_path: Path
) -> None:
    taker = taking()
    text = webhook(taker, hold_s=2 * WAIT_S)
    notifier = starting(text)
    notifier.set_watched(["r0", "r1"])
    notifier.offer(state(sick()))
    settle(notifier)
    notifier.adopt([])
    notifier.set_watched(["r1"])
    notifier.adopt(receivers(settings(tmp_path, text)))
    assert taker.wait(2)[1].body["status"] == "unwatched"


def test_slack_gets_its_own_form(starting: Starting, taking: Taking) -> None:
    taker = taking()
    text = webhook(taker, 'triage_url = "http://127.0.0.1:9877/triage"')
    starting(text.replace('"webhook"', '"slack"')).offer(state(sick()))
    (post,) = taker.wait(1)
    assert set(post.body) == {"text", "blocks", "unfurl_links", "unfurl_media"}
    assert (
        "<http://127.0.0.1:9877/triage?target=r0&at=2026-11-21T00:06:40Z|triage>"
        in post.body["text"]
    )
    assert post.path == "/services/T0/B0/SECRETPATH"
    assert post.headers["Content-Type"] == "application/json"


def test_offer_never_raises_and_says_so_once(
    starting: Starting, taking: Taking, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = starting(webhook(taking()))
    for _ in range(2):
        notifier.offer(state(replace(healthy(), findings=None)))
    assert caplog.text.count("cannot process the state") == 1
