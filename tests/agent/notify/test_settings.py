"""`[[notify]]` tables: what they become, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from kneewatch.agent.notify.notifier import Notifier
from kneewatch.agent.notify.receivers import KINDS, Mail, Receiver, Web, as_toml, receivers
from kneewatch.collector.errors import SettingsError
from kneewatch.rules.rule import Severity
from tests.agent.notify.factories import receiver, settings

SECRET = "https://hooks.example/services/T0/B0/s3cr3t"
HOOK = f'kind = "slack"\nurl = "{SECRET}"'
MAIL = 'kind = "email"\nhost = "mail.example"\nfrom = "kw@example.org"\nto = ["a@example.org"]'
ALERTING = Path(__file__).parents[3] / "docs" / "how-to" / "alerting.md"


def test_defaults(tmp_path: Path) -> None:
    configured = receiver(tmp_path, HOOK)
    assert (configured.name, configured.kind, configured.severity) == (
        "slack-1",
        "slack",
        Severity.CRITICAL,
    )
    assert (
        configured.group_wait_s,
        configured.hold_s,
        configured.repeat_s,
        configured.give_up_s,
    ) == (10, 120, None, 3600)
    assert configured.own
    assert configured.alerts
    assert configured.matches("anything", {})
    two = receiver(tmp_path, MAIL)
    assert isinstance(two.endpoint, Mail)
    assert (two.endpoint.port, two.endpoint.security, two.endpoint.password) == (
        587,
        "starttls",
        None,
    )


def test_the_hold_is_stretched_with_the_window(tmp_path: Path) -> None:
    (configured,) = receivers(settings(tmp_path, f"window_s = 15\n[[notify]]\n{HOOK}"))
    assert configured.hold_s == 30


def test_ports_follow_the_security(tmp_path: Path) -> None:
    ports = [
        endpoint.port
        for word in ("starttls", "tls", "none")
        if isinstance(endpoint := receiver(tmp_path, f'{MAIL}\nsecurity = "{word}"').endpoint, Mail)
    ]
    assert ports == [587, 465, 25]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(
            'url = "https://x/"',
            "kind is missing: one of slack, teams, webhook, email, pagerduty",
            id="no kind",
        ),
        pytest.param(
            'kind = "slak"',
            "kind must be one of slack, teams, webhook, email, pagerduty",
            id="which kind",
        ),
        pytest.param(
            f"{HOOK}\nurls = 1", "unknown key 'urls' for slack; did you mean url?", id="key"
        ),
        pytest.param(
            f"{HOOK}\npassword_file = 'x'",
            "unknown key 'password_file' for slack: it is a key of email",
            id="another kind's key",
        ),
        pytest.param('kind = "slack"', "set one of url, url_file, url_env", id="no url"),
        pytest.param(
            f"{HOOK}\nurl_env = 'HOOK'", "only one of url, url_env", id="two places for the url"
        ),
        pytest.param('kind = "slack"\nurl = "hooks/x"', "url must begin with", id="no URL"),
        pytest.param('kind = "slack"\nurl = "ftp://x/y"', "url must be an HTTP", id="not HTTP"),
        pytest.param(
            f"{HOOK}\nseverity = 'info'", "severity must be one of warning", id="severity"
        ),
        pytest.param(f"{HOOK}\nrepeat_s = 0", "repeat_s = 0 is out of range", id="no time"),
        pytest.param(f"{HOOK}\ntargets = 'r0'", "targets must be a list of texts", id="kind"),
        pytest.param(
            f"{HOOK}\ntriage_url = 'https://x/<b>'", "triage_url must be an HTTP(S) URL", id="link"
        ),
        pytest.param(
            f"{HOOK}\ntriage_url = 'javascript:x'", "triage_url must be an HTTP(S) URL", id="script"
        ),
        pytest.param(
            f"{HOOK}\nclient_key_file = 'k'",
            "client_key_file requires client_cert_file",
            id="key file",
        ),
        pytest.param(
            'kind = "alertmanager"\nurl = "http://a:9093"\nrepeat_s = 60',
            "unknown key 'repeat_s' for alertmanager",
            id="repeats are Alertmanager's",
        ),
        pytest.param('kind = "email"', "host is missing: mail server", id="no server"),
        pytest.param(MAIL.replace("a@", "a b@"), "to must be mail addresses", id="recipient"),
        pytest.param(
            MAIL.replace("kw@", "kw\\nBcc: x@"), "from must be a mail address", id="header"
        ),
        pytest.param(
            f"{MAIL}\nuser = 'kw'", "one of password_file, password_env", id="no password"
        ),
        pytest.param(
            f"{MAIL}\npassword_env = 'P'", "a password requires user, the login name", id="no user"
        ),
        pytest.param(
            f"{MAIL}\nuser = 'kw'\npassword_env = 'P'\nsecurity = 'none'",
            "would send the password unencrypted",
            id="password in the clear",
        ),
    ],
)
def test_a_wrong_table_is_told_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        receiver(tmp_path, text)
    assert said in str(caught.value)
    assert f"{tmp_path / 'kneewatch.toml'}: [[notify]] number 1: " in str(caught.value)
    assert "s3cr3t" not in str(caught.value)


def test_names_are_unique(tmp_path: Path) -> None:
    table = f"[[notify]]\n{HOOK}\nname = 'night'\n"
    with pytest.raises(SettingsError, match="number 2: name = 'night': another receiver has"):
        receivers(settings(tmp_path, table * 2))


def test_secrets_show_nowhere(tmp_path: Path) -> None:
    given = settings(tmp_path, f'[[notify]]\n{HOOK}\nheaders = {{X-Key = "s3cr3t"}}')
    (configured,) = receivers(given)
    lines = "\n".join(as_toml(given))
    assert "s3cr3t" not in repr(configured) + lines
    assert '"url" = "(hidden)"' in lines
    assert '"kind" = "slack"' in lines


def test_what_config_prints_can_be_read_again(tmp_path: Path) -> None:
    text = f"[[notify]]\n{MAIL}\nlabels = {{tier = 'pr\"od'}}\nrepeat_s = 60.5\nown = false\n"
    given = settings(tmp_path, text)
    again = settings(tmp_path, "\n".join(as_toml(given)))
    assert receivers(again) == receivers(given)


def test_secrets_are_read_anew_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hook"
    file.write_text("https://one.example/a\n")
    monkeypatch.setenv("HOOK", "https://two.example")
    from_file = receiver(tmp_path, f'kind = "webhook"\nurl_file = "{file}"').endpoint
    from_env = receiver(tmp_path, 'kind = "webhook"\nurl_env = "HOOK"').endpoint
    assert isinstance(from_file, Web)
    assert isinstance(from_env, Web)
    assert from_file.address().url == "https://one.example/a"
    # Not the metrics page, as it would be for a target without a path.
    assert from_env.address().url == "https://two.example/"
    file.write_text("https://one.example/b?c=1")
    assert from_file.address().url == "https://one.example/b?c=1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('kind = "webhook"\nurl_file = "{folder}/none"', "/none: No such file or directory"),
        ('kind = "webhook"\nurl_file = "{folder}/empty"', "/empty is empty or not set"),
        ('kind = "webhook"\nurl_file = "{folder}/bytes"', "/bytes is not UTF-8 text"),
        ('kind = "webhook"\nurl_file = "{folder}/nourl"', "url must be an HTTP(S) URL"),
        ('kind = "webhook"\nurl_env = "KW_NO_SUCH"', "variable KW_NO_SUCH is empty or not set"),
        (MAIL + '\nuser = "u"\npassword_file = "{folder}/none"', "/none: No such file"),
    ],
)
def test_a_secret_that_cannot_be_read_is_told_at_the_start(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"s3cr3t\xff")
    (tmp_path / "nourl").write_text("https://s3cr3t@@x:y/")
    configured = receiver(tmp_path, text.replace("{folder}", str(tmp_path)))
    with pytest.raises(SettingsError) as caught:
        Notifier([configured], state_file=None)
    assert said in str(caught.value)
    assert "s3cr3t" not in str(caught.value)
    assert "[[notify]] number 1" in str(caught.value)


def test_patterns_and_plain_names_choose_targets(tmp_path: Path) -> None:
    configured = receiver(tmp_path, f"{HOOK}\ntargets = ['http://[::1]:8000', 'r?']")
    assert configured.matches("http://[::1]:8000", {})
    assert configured.matches("r1", {})
    assert not configured.matches("r10", {})


def test_the_documented_tables_are_right(tmp_path: Path) -> None:
    text = ALERTING.read_text().partition("```toml\n")[2].partition("```")[0]
    configured = receivers(settings(tmp_path, text))
    assert sorted(receives.kind for receives in configured) == sorted(KINDS)


def test_link_bases_lose_what_kneewatch_adds(tmp_path: Path) -> None:
    def base(url: str) -> Receiver:
        return receiver(tmp_path, f"{HOOK}\ntriage_url = '{url}'")

    assert base("https://ops.example/kw/triage/").triage_url == "https://ops.example/kw"
    assert base("https://ops.example/").triage_url == "https://ops.example"
