"""Mail handed to a real server, over TLS from the start, STARTTLS, and neither."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path

import pytest

from kneewatch.agent.notify.delivery import SendError, deliver
from kneewatch.agent.notify.receivers import Mail
from tests.agent.notify.conftest import Starting
from tests.agent.notify.factories import receiver, sick, state
from tests.agent.notify.mail_server import MailServer, Ways
from tests.waiting import PATIENCE_S

Mailing = Callable[[Ways], MailServer]


@pytest.fixture
def mailing() -> Iterator[Mailing]:
    servers: list[MailServer] = []

    def start(ways: Ways) -> MailServer:
        servers.append(MailServer(ways))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def table(port: int, more: str = "", to: str = '"a@x.org", "b@x.org"') -> str:
    return (
        f'kind = "email"\nhost = "127.0.0.1"\nport = {port}\nfrom = "kw@x.org"\nto = [{to}]\n{more}'
    )


def mail(folder: Path, text: str) -> Mail:
    endpoint = receiver(folder, text).endpoint
    assert isinstance(endpoint, Mail)
    return endpoint


def letter() -> EmailMessage:
    message = EmailMessage()
    message["Subject"] = "kv_pressure"
    message["From"], message["To"] = "kw@x.org", "a@x.org, b@x.org"
    message.set_content("evidence\n.\nmore\n")
    return message


def failure(mail_receiver: Mail, timeout_s: float = 60.0) -> SendError:
    with pytest.raises(SendError) as caught:
        deliver(mail_receiver, letter(), timeout_s=timeout_s)
    assert "s3cr3t" not in str(caught.value)
    return caught.value


def test_in_the_clear(mailing: Mailing, tmp_path: Path) -> None:
    server = mailing(Ways())
    deliver(mail(tmp_path, table(server.port, 'security = "none"')), letter(), timeout_s=60)
    (taken,) = server.mails
    assert taken.recipients == ["a@x.org", "b@x.org"]
    assert b"evidence\r\n.\r\nmore" in taken.data
    assert not taken.is_encrypted


@pytest.mark.parametrize("security", ["starttls", "tls"])
def test_encrypted_and_logged_in(
    mailing: Mailing, tmp_path: Path, security: str, server_tls: ssl.SSLContext, ca_file: str
) -> None:
    endpoint = {security: server_tls}
    server = mailing(Ways(login=("kw", "s3cr3t"), **endpoint))  # type: ignore[arg-type]
    (tmp_path / "password").write_text("s3cr3t\n")
    own = f'security = "{security}"\nuser = "kw"\npassword_file = "{tmp_path}/password"\n'
    deliver(
        mail(tmp_path, table(server.port, f'{own}ca_file = "{ca_file}"')),
        letter(),
        timeout_s=60,
    )
    (taken,) = server.mails
    assert (taken.is_encrypted, taken.user) == (True, "kw")
    (tmp_path / "password").write_text("s3cr3t but wrong")
    error = failure(mail(tmp_path, table(server.port, f'{own}ca_file = "{ca_file}"')))
    assert not error.final, "passwords rotate: the file is read again"
    assert "535" in str(error)
    error = failure(mail(tmp_path, table(server.port, own)))  # its CA is not known
    assert "certificate" in str(error).lower() or "CERTIFICATE" in str(error)
    assert len(server.mails) == 1


def test_encryption_is_not_given_up(mailing: Mailing, tmp_path: Path) -> None:
    server = mailing(Ways())  # offers no STARTTLS
    error = failure(mail(tmp_path, table(server.port)))
    assert not error.final
    assert "STARTTLS" in str(error)
    assert server.mails == []


def test_one_recipient_refused_keeps_nothing_from_the_other(
    mailing: Mailing, tmp_path: Path
) -> None:
    server = mailing(Ways())
    to = '"nobody@x.org", "b@x.org"'
    deliver(mail(tmp_path, table(server.port, 'security = "none"', to)), letter(), timeout_s=60)
    assert server.mails[0].recipients == ["b@x.org"]
    error = failure(mail(tmp_path, table(server.port, 'security = "none"', '"nobody@x.org"')))
    assert not error.final
    assert "refused all recipients (SMTP 550)" in str(error)


@pytest.mark.parametrize(
    ("replies", "final"),
    [
        pytest.param({"": "421 busy"}, False, id="busy at once"),
        pytest.param({"": "554 not you"}, False, id="not wanted"),
        pytest.param({"MAIL": "451 later"}, False, id="greylisted"),
        pytest.param({"DATA": "552 too large"}, True, id="too large"),
        pytest.param({"": "what?"}, False, id="no mail server"),
        pytest.param({"": "2" * 9000}, False, id="a line without an end"),
    ],
)
def test_what_an_answer_means(
    mailing: Mailing, tmp_path: Path, replies: dict[str, str], final: bool
) -> None:
    server = mailing(Ways(replies=replies))
    error = failure(mail(tmp_path, table(server.port, 'security = "none"')))
    assert error.final is final
    assert f"127.0.0.1:{server.port}" in str(error)


def test_nobody_there(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        error = failure(mail(tmp_path, table(port)))
    assert str(error) == f"127.0.0.1:{port}: connection refused"
    assert not error.final


def test_a_byte_now_and_then_does_not_stretch_the_deadline(
    mailing: Mailing, tmp_path: Path
) -> None:
    server = mailing(Ways(drip=True))
    assert not failure(mail(tmp_path, table(server.port)), timeout_s=0.4).final


def test_the_notifier_mails(mailing: Mailing, starting: Starting, tmp_path: Path) -> None:
    server = mailing(Ways())
    endpoint = table(server.port, 'security = "none"')
    notifier = starting(f"[[notify]]\n{endpoint}\ngroup_wait_s = 0.05")
    notifier.offer(state(sick()))
    notifier.close(PATIENCE_S)
    message = message_from_bytes(server.mails[0].data, policy=policy.default)
    assert message["Subject"].startswith("[kneewatch] CRITICAL: kv_pressure on r0")
    plain = message.get_body(("plain",))
    assert plain is not None
    assert "fp8. Instead of --kv-cache-dtype auto. Needs a restart" in plain.get_content()
