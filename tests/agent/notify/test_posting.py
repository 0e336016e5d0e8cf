"""Posting to real servers, good and bad."""

from __future__ import annotations

import socket
import ssl
import time
from pathlib import Path

import pytest
import trustme

from kneewatch.agent.notify.delivery import SendError, after_s, post
from kneewatch.agent.notify.receivers import Web
from tests.agent.notify.factories import receiver
from tests.agent.notify.web import Reply, Taking
from tests.collector.servers import Start

NOW_S = 1_800_000_000.0
BODY = {"text": "kv ≥ 99 %"}


def web(folder: Path, url: str, more: str = "") -> Web:
    endpoint = receiver(folder, f'kind = "webhook"\nurl = "{url}"\n{more}').endpoint
    assert isinstance(endpoint, Web)
    return endpoint


def failure(web_receiver: Web, *, timeout_s: float = 60.0) -> SendError:
    with pytest.raises(SendError) as caught:
        post(web_receiver, BODY, timeout_s=timeout_s, now_s=NOW_S)
    assert "SECRET" not in str(caught.value)
    assert "SECRET" not in str(caught.value.__cause__ or "")
    return caught.value


def test_headers_and_body_arrive(
    taking: Taking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taker = taking(Reply(status=204, body=b""))
    (tmp_path / "token").write_text("t0ken\n")
    monkeypatch.setenv("KW_TEAM", "serving")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not asked
    more = (
        f'bearer_token_file = "{tmp_path}/token"\nheader_envs = {{X-Team = "KW_TEAM"}}\n'
        'headers = {X-Key = "k"}'
    )
    post(web(tmp_path, taker.url, more), BODY, timeout_s=60, now_s=NOW_S)
    (posted,) = taker.posts
    assert posted.body == BODY
    assert posted.headers["Authorization"] == "Bearer t0ken"
    assert (posted.headers["X-Team"], posted.headers["X-Key"]) == ("serving", "k")
    assert posted.headers["Host"] == f"127.0.0.1:{taker.port}"


@pytest.mark.parametrize(
    ("status", "final"),
    [
        (429, False),
        (408, False),
        (500, False),
        (503, False),
        (400, True),
        (401, False),
        (403, False),
        (404, False),
        (410, False),
        (413, True),
        (422, True),
    ],
)
def test_what_a_status_means(taking: Taking, tmp_path: Path, status: int, final: bool) -> None:
    error = failure(web(tmp_path, taking(Reply(status=status)).url))
    assert error.final is final
    assert str(status) in str(error)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"ok": false, "error": "channel_not_found"}', "with an error: channel_not_found"),
        (b'{"success": false, "error": "https://SECRET"}', "with an error"),
        (b"\n<!DOCTYPE html><title>Sign in</title>", "with an HTML page, such as a login"),
        (b"<HTML>", "with an HTML page"),
    ],
)
def test_a_success_status_with_a_body_that_denies_it(
    taking: Taking, tmp_path: Path, body: bytes, says: str
) -> None:
    error = failure(web(tmp_path, taking(Reply(body=body)).url))
    assert not error.final, "it may be a proxy's answer during maintenance"
    assert says in str(error)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"ok",
        b'{"ok": true}',
        b'{"status": "success"}',
        b"[false]",
        b"null",
        b"[" * 4000,
        b"<a>",
    ],
)
def test_a_success_status_with_any_other_body_is_one(
    taking: Taking, tmp_path: Path, body: bytes
) -> None:
    post(web(tmp_path, taking(Reply(body=body)).url), BODY, timeout_s=60, now_s=NOW_S)


def test_redirects_are_not_followed(taking: Taking, tmp_path: Path) -> None:
    other = taking()
    taker = taking(Reply(status=302, headers={"Location": other.url}))
    error = failure(web(tmp_path, taker.url))
    assert not error.final, "a proxy may redirect to its page for maintenance"
    assert "redirects are not followed" in str(error)
    assert other.posts == []


def test_a_secret_that_cannot_be_read_now_is_tried_again(taking: Taking, tmp_path: Path) -> None:
    file = tmp_path / "hook"
    file.write_text(taking().url)
    endpoint = receiver(tmp_path, f'kind = "webhook"\nurl_file = "{file}"').endpoint
    assert isinstance(endpoint, Web)
    post(endpoint, BODY, timeout_s=60, now_s=NOW_S)
    file.unlink()
    assert not failure(endpoint).final


def test_nobody_there(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        error = failure(web(tmp_path, f"http://127.0.0.1:{port}/SECRET"))
    assert not error.final
    assert f"http://127.0.0.1:{port}: connection refused" in str(error)
    assert "vLLM" not in str(error)


def test_a_server_that_never_answers(taking: Taking, tmp_path: Path) -> None:
    error = failure(web(tmp_path, taking(Reply(hang=True)).url), timeout_s=0.3)
    assert str(error) == "no answer within 300 ms"
    assert not error.final


def test_a_byte_now_and_then_does_not_stretch_the_deadline(
    serving: Start,
    tmp_path: Path,
) -> None:
    def drip(sock: socket.socket, _request: bytes, _number: int) -> bool:
        while True:
            sock.sendall(b"H")
            time.sleep(0.05)

    error = failure(web(tmp_path, serving(drip).url), timeout_s=0.4)
    assert not error.final


@pytest.mark.parametrize("data", [b"", b"junk SECRET\r\n\r\n", b"HTTP/1.1 2000 OK\r\n\r\n"])
def test_an_answer_that_is_none(serving: Start, tmp_path: Path, data: bytes) -> None:
    def answer(sock: socket.socket, _request: bytes, _number: int) -> bool:
        sock.sendall(data)
        return False

    assert not failure(web(tmp_path, serving(answer).url)).final


def test_tls_is_verified(
    taking: Taking, tmp_path: Path, server_tls: ssl.SSLContext, ca_file: str
) -> None:
    taker = taking(tls=server_tls)
    post(web(tmp_path, taker.url, f'ca_file = "{ca_file}"'), BODY, timeout_s=60, now_s=NOW_S)
    assert len(taker.posts) == 1
    error = failure(web(tmp_path, taker.url))
    assert "signed by an unknown CA" in str(error) or "unknown self-signed CA" in str(error)
    post(
        web(tmp_path, taker.url, "insecure_skip_verify = true"),
        BODY,
        timeout_s=60,
        now_s=NOW_S,
    )
    assert len(taker.posts) == 2


def test_a_client_certificate_is_shown(
    taking: Taking, tmp_path: Path, authority: trustme.CA, ca_file: str, server_tls: ssl.SSLContext
) -> None:
    server_tls.load_verify_locations(ca_file)
    server_tls.verify_mode = ssl.CERT_REQUIRED
    taker = taking(tls=server_tls)
    client = authority.issue_cert("client.example")
    client.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    client.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    own = f'client_cert_file = "{tmp_path}/cert.pem"\nclient_key_file = "{tmp_path}/key.pem"'
    trust = f'ca_file = "{ca_file}"\n'
    post(web(tmp_path, taker.url, trust + own), BODY, timeout_s=60, now_s=NOW_S)
    assert len(taker.posts) == 1
    assert not failure(web(tmp_path, taker.url, trust)).final
    assert len(taker.posts) == 1


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        pytest.param(None, None, id="none"),
        pytest.param("120", 120.0, id="seconds"),
        pytest.param("Fri, 15 Jan 2027 08:01:00 GMT", 60.0, id="date"),
        pytest.param("Fri, 15 Jan 2027 07:00:00 GMT", 0.0, id="past"),
        pytest.param("soon", None, id="words"),
        pytest.param("-5", None, id="negative"),
        pytest.param("9" * 400, None, id="huge"),
        pytest.param("\u0663", None, id="a digit of another script"),
    ],
)
def test_retry_after(header: str | None, wait_s: float | None) -> None:
    assert after_s(header, NOW_S) == wait_s
