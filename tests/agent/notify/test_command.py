"""`kneewatch notify`: who gets what, and test messages to real local receivers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agent.notify.mail_server import MailServer, Ways
from tests.agent.notify.web import Reply, Taking
from tests.agent.running import Ended, Main

Notify = Callable[..., Ended]

TARGETS = """
[[targets]]
url = "http://127.0.0.1:8000"
name = "llama-0"
labels = { tier = "prod" }
[[targets]]
url = "http://127.0.0.1:8001"
name = "dev-0"
"""


@pytest.fixture
def notify(main: Main, tmp_path: Path) -> Notify:
    def run(settings: str, *arguments: str) -> Ended:
        file = tmp_path / "kneewatch.toml"
        file.write_text(settings)
        return main("notify", "--config", file, *arguments)

    return run


def test_each_receiver_gets_a_test_message(notify: Notify, taking: Taking) -> None:
    slack, webhook, alertmanager = taking(), taking(), taking()
    mail = MailServer(Ways())
    try:
        ended = notify(
            f"""
            [[notify]]
            kind = "slack"
            name = "oncall"
            url = "{slack.url}"
            [[notify]]
            kind = "webhook"
            url = "{webhook.url}"
            triage_url = "https://gpu-7.example"
            [[notify]]
            kind = "alertmanager"
            url = "{alertmanager.url}"
            severity = "warning"
            [[notify]]
            kind = "email"
            host = "127.0.0.1"
            port = {mail.port}
            security = "none"
            from = "kneewatch@x.org"
            to = ["a@x.org"]
            """,
            "--test",
        )
    finally:
        mail.close()
    assert ended.status == 0
    assert [line.split(" in ")[0] for line in ended.out.splitlines()] == [
        f"oncall: delivered to http://127.0.0.1:{slack.port}",
        f"webhook-2: delivered to http://127.0.0.1:{webhook.port}",
        f"alertmanager-3: delivered to http://127.0.0.1:{alertmanager.port}",
        f"email-4: delivered to 127.0.0.1:{mail.port} to a@x.org",
    ]
    assert "TEST: kneewatch reaches oncall. Nothing is wrong" in slack.posts[0].body["text"]
    message = webhook.posts[0].body
    assert (message["status"], message["severity"], message["events"]) == ("test", "info", [])
    assert "https://gpu-7.example/triage" in message["text"]
    (alert,) = alertmanager.posts[0].body
    assert alertmanager.posts[0].path.endswith("/api/v2/alerts")
    assert alert["labels"] == {
        "alertname": "KneewatchTest",
        "severity": "warning",
        "kneewatch": "test",
    }
    assert alert["startsAt"] < alert["endsAt"]
    assert b"Nothing is wrong" in mail.mails[0].data


def test_a_refusal_has_its_reason_and_a_way_out_and_no_secret(
    notify: Notify, taking: Taking
) -> None:
    gone, denied, fine = taking(Reply(404)), taking(Reply(403)), taking()
    table = '[[notify]]\nkind = "slack"\nurl = "{}"\n'
    ended = notify("".join(table.format(taker.url) for taker in (gone, denied, fine)), "--test")
    assert ended.status == 1
    lines = ended.out.splitlines()
    assert (
        lines[0] == f"slack-1: NOT DELIVERED: http://127.0.0.1:{gone.port} answered 404 Not Found"
    )
    assert lines[1].startswith("  try: check the whole address")
    assert lines[3] == "  try: check the token or the headers"
    assert lines[4].startswith("slack-3: delivered")
    assert "SECRETPATH" not in ended.out + ended.err


def test_a_receiver_that_is_not_there_has_a_way_out(notify: Notify, taking: Taking) -> None:
    taker = taking()
    url = taker.url
    taker.close()
    ended = notify(f'[[notify]]\nkind = "slack"\nurl = "{url}"\n', "--test")
    assert ended.status == 1
    assert "connection refused" in ended.out
    assert "try: check host and port" in ended.out


def test_the_list_says_who_gets_what_and_what_nobody_gets(notify: Notify, taking: Taking) -> None:
    taker = taking()
    ended = notify(
        f"""
        report.send = ["oncall"]
        {TARGETS}
        [[notify]]
        kind = "slack"
        name = "oncall"
        url = "{taker.url}"
        labels = {{ tier = "prod*" }}
        repeat_s = "4h"
        """
    )
    assert taker.posts == []
    assert ended.status == 1  # nobody is paged for dev-0
    out = ended.out
    assert f"oncall: slack at http://127.0.0.1:{taker.port}\n" in out
    assert "  findings: critical\n" in out
    assert "repeated every 4.0 h" in out
    assert "  targets: with labels tier=prod*: llama-0\n" in out
    assert "  also: the reports that `run` makes\n" in out
    assert "  critical findings of dev-0 (NOBODY IS PAGED" in out
    assert "  warning findings of all targets (" in out
    assert "SECRETPATH" not in out


def test_everything_critical_reaches_somebody(notify: Notify) -> None:
    table = '[[notify]]\nkind = "slack"\nurl = "http://127.0.0.1:9/x"\n'
    ended = notify(TARGETS + table)
    assert ended.status == 0
    assert "critical findings" not in ended.out.partition("Not sent to anybody")[2]
    assert "targets: all: llama-0, dev-0" in ended.out
    named = notify(TARGETS + table + 'targets = ["llama-0", "dev-0"]', "--prometheus", "http://p")
    assert named.status == 1  # that the metrics system is down reaches nobody
    assert "critical findings of fleet (" in named.out


def test_a_receiver_whose_secret_cannot_be_read_covers_nothing(notify: Notify) -> None:
    ended = notify(TARGETS + '[[notify]]\nkind = "slack"\nurl_file = "no-such-file"\n')
    assert ended.status == 1
    assert "GETS NOTHING: `run` does not start: " in ended.out
    assert "no-such-file: No such file" in ended.out
    assert "critical findings of all targets (NOBODY IS PAGED" in ended.out


def test_without_receivers_nobody_is_notified(notify: Notify) -> None:
    ended = notify(TARGETS)
    assert ended.status == 1
    assert ended.out.startswith("Nobody is notified: the settings have no [[notify]] table.")
