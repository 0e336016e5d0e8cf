"""The fetcher over TLS: certificates that are good, and every way in which they are not."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from kneewatch.collector.errors import CollectError
from kneewatch.collector.http.address import FetchSettings
from tests.collector.servers import PAGE, QUICK, Fetch, Start, always, answer, failure


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


def server_tls(certificate: trustme.LeafCert) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with certificate.private_key_and_cert_chain_pem.tempfile() as pem:
        context.load_cert_chain(pem)
    return context


def test_tls_page_and_kept_connection(
    start: Start, fetcher: Fetch, authority: trustme.CA, ca_file: str
) -> None:
    server = start(always(answer()), server_tls(authority.issue_cert("127.0.0.1")))
    page_fetcher = fetcher(server.url, FetchSettings(ca_file=ca_file))
    for _ in range(3):
        assert page_fetcher.get().body == PAGE
    assert (server.connections, len(server.requests)) == (1, 3)


def test_tls_connection_closed_between_scrapes(
    start: Start, fetcher: Fetch, authority: trustme.CA, ca_file: str
) -> None:
    tls = server_tls(authority.issue_cert("127.0.0.1"))
    page_fetcher = fetcher(
        start(always(answer(), keep=False), tls).url, FetchSettings(ca_file=ca_file)
    )
    for _ in range(3):
        assert page_fetcher.get().body == PAGE
        time.sleep(0.02)


def good(authority: trustme.CA) -> trustme.LeafCert:
    return authority.issue_cert("127.0.0.1")


def elsewhere(authority: trustme.CA) -> trustme.LeafCert:
    return authority.issue_cert("127.0.0.2")


def expired(authority: trustme.CA) -> trustme.LeafCert:
    past = datetime.now(UTC) - timedelta(days=1)
    return authority.issue_cert("127.0.0.1", not_before=past - timedelta(days=9), not_after=past)


@pytest.mark.parametrize(
    ("issue", "trusted", "said", "hint"),
    [
        pytest.param(expired, True, "expired", "renew", id="expired"),
        pytest.param(elsewhere, True, "not list this IP", "name", id="other address"),
        pytest.param(good, False, "unknown", "ca_file", id="unknown authority"),
    ],
)
def test_certificate_is_not_accepted(
    start: Start,
    fetcher: Fetch,
    authority: trustme.CA,
    ca_file: str,
    issue: Callable[[trustme.CA], trustme.LeafCert],
    trusted: bool,
    said: str,
    hint: str,
) -> None:
    server = start(always(answer()), server_tls(issue(authority)))
    problem = failure(fetcher(server.url, FetchSettings(ca_file=ca_file if trusted else None)))
    assert problem.kind == "tls"
    assert said in str(problem)
    assert hint in problem.hint
    unsafe = FetchSettings(insecure_skip_verify=True)
    assert fetcher(server.url, unsafe).get().body == PAGE


def test_certificate_for_another_name(
    start: Start, fetcher: Fetch, authority: trustme.CA, ca_file: str
) -> None:
    server = start(always(answer()), server_tls(authority.issue_cert("other.example")))
    with pytest.raises(CollectError, match="another host name") as caught:
        fetcher(f"https://localhost:{server.port}", FetchSettings(ca_file=ca_file)).get()
    assert caught.value.kind == "tls"


def test_self_signed_certificate(start: Start, fetcher: Fetch, tmp_path: Path) -> None:
    own = trustme.CA()
    pem = tmp_path / "own.pem"
    pem.write_bytes(own.private_key_pem.bytes() + own.cert_pem.bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    problem = failure(fetcher(start(always(answer()), context).url))
    assert problem.kind == "tls"
    assert "self-signed" in str(problem)
    assert "ca_file" in problem.hint


def test_client_certificate(
    start: Start, fetcher: Fetch, authority: trustme.CA, ca_file: str, tmp_path: Path
) -> None:
    context = server_tls(authority.issue_cert("127.0.0.1"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority.cert_pem.bytes().decode())
    server = start(always(answer()), context)
    problem = failure(fetcher(server.url, FetchSettings(ca_file=ca_file)))
    assert problem.kind == "tls"
    assert "client_cert_file" in problem.hint
    mine = authority.issue_cert("me@example.org")
    mine.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    mine.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    settings = FetchSettings(
        ca_file=ca_file,
        client_cert_file=str(tmp_path / "cert.pem"),
        client_key_file=str(tmp_path / "key.pem"),
    )
    assert fetcher(server.url, settings).get().body == PAGE


def test_ca_file_that_changes_is_read_again(
    start: Start, fetcher: Fetch, authority: trustme.CA, tmp_path: Path
) -> None:
    file = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(file))
    server = start(always(answer()), server_tls(authority.issue_cert("127.0.0.1")))
    page_fetcher = fetcher(server.url, FetchSettings(ca_file=str(file)))
    assert failure(page_fetcher).kind == "tls"
    authority.cert_pem.write_to_path(str(file))
    assert page_fetcher.get().body == PAGE


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(FetchSettings(ca_file="missing.pem"), id="no CA file"),
        pytest.param(FetchSettings(ca_file=__file__), id="CA file is no certificate"),
        pytest.param(FetchSettings(client_cert_file=__file__), id="no client certificate"),
        pytest.param(FetchSettings(client_key_file="key.pem"), id="key alone"),
    ],
)
def test_unusable_tls_files(fetcher: Fetch, settings: FetchSettings) -> None:
    with pytest.raises(CollectError) as caught:
        fetcher("https://127.0.0.1:9", settings).get()
    assert caught.value.kind == "tls"
    assert caught.value.hint


def test_https_to_a_plain_port(fetcher: Fetch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def refuse() -> None:
            sock, _ = plain.accept()
            with sock, contextlib.suppress(OSError):
                sock.recv(65_536)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                sock.recv(65_536)

        thread = threading.Thread(target=refuse)
        thread.start()
        problem = failure(fetcher(f"https://127.0.0.1:{plain.getsockname()[1]}"))
        thread.join()
    assert problem.kind == "tls"
    assert "http://" in problem.hint


def test_http_to_a_tls_port(start: Start, fetcher: Fetch, authority: trustme.CA) -> None:
    server = start(always(answer()), server_tls(authority.issue_cert("127.0.0.1")))
    problem = failure(fetcher(f"http://127.0.0.1:{server.port}"))
    assert problem.kind in ("tls", "truncated")  # OpenSSL sends an alert, or only closes
    assert "https://" in problem.hint


def test_handshake_takes_too_long(fetcher: Fetch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        problem = failure(fetcher(f"https://127.0.0.1:{silent.getsockname()[1]}", QUICK))
    assert problem.kind == "timeout"
    assert "handshake" in str(problem)
