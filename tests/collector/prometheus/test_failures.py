"""A metrics system that is busy, slow, broken or something else: clear errors, nothing invented."""

from __future__ import annotations

import os
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
import trustme

from kneewatch.collector.errors import CollectError
from kneewatch.collector.http.address import FetchSettings
from kneewatch.collector.prometheus.client import PrometheusSource, SourceSettings
from tests.collector.prometheus.replies import (
    dripping,
    failed,
    in_turn,
    json_answer,
    read_form,
    vector,
)
from tests.collector.servers import Serve, Server, Start, always, answer
from tests.waiting import PATIENCE_S

ONE = vector([({"instance": "a"}, 1.5)])
BUSY = failed("503 Service Unavailable", "starting up", "unavailable")


def silent(_sock: socket.socket, _request: bytes, _number: int) -> None:
    """Answers nothing for a while."""
    time.sleep(1.5)


def source(
    server: Server, fetch: FetchSettings | None = None, *, timeout_s: float = PATIENCE_S
) -> PrometheusSource:
    settings = SourceSettings(
        fetch=fetch or FetchSettings(), pause_s=0.01, query_timeout_s=timeout_s
    )
    return PrometheusSource(server.url, settings)


def failure(server: Server, query: str = "up", *, timeout_s: float = PATIENCE_S) -> CollectError:
    with source(server, timeout_s=timeout_s) as asked, pytest.raises(CollectError) as caught:
        asked.instant(query)
    assert caught.value.hint, "every failure says what to try"
    assert "127.0.0.1" in str(caught.value), "every failure says where"
    return caught.value


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(BUSY, id="503"),
        pytest.param(failed("429 Too Many Requests", "slow down"), id="429"),
        pytest.param(answer(b"<html>bad gateway</html>", status="502 Bad Gateway"), id="502 page"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n" + b'{"status":"success",', id="half"
        ),
    ],
)
def test_a_passing_trouble_is_asked_again(start: Start, first: bytes) -> None:
    server = start(in_turn(first, ONE))
    with source(server) as asked:
        assert [sample.value for sample in asked.instant("up").samples] == [1.5]
        assert (asked.pace.asked, asked.retried) == (2, 1)


def test_a_connection_that_ends_without_an_answer_is_asked_again(start: Start) -> None:
    def serve(sock: socket.socket, request: bytes, number: int) -> bool:
        return number > 0 and bool(in_turn(ONE)(sock, request, number))

    with source(start(serve)) as asked:
        assert len(asked.instant("up").samples) == 1
        assert asked.retried == 1


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        pytest.param(BUSY, "http_status", id="always 503"),
        pytest.param(json_answer("x")[:-1] + b"{", "truncated", id="never whole"),
    ],
)
def test_a_lasting_trouble_is_told_after_some_tries(start: Start, reply: bytes, kind: str) -> None:
    server = start(always(reply))
    assert failure(server).kind == kind
    assert len(server.requests) == SourceSettings().tries


@pytest.mark.parametrize(
    ("reply", "kind", "said"),
    [
        pytest.param(
            failed("422 Unprocessable Entity", "too many samples"),
            "query",
            "too many samples",
            id="422",
        ),
        pytest.param(failed("400 Bad Request", "parse error"), "query", "parse error", id="400"),
        pytest.param(failed("401 Unauthorized", "no org id"), "auth", "no org id", id="no tenant"),
        pytest.param(answer(b"not here", status="404 Not Found"), "not_found", "404", id="404"),
        pytest.param(answer(b"<html></html>"), "not_found", "web page", id="a page"),
        pytest.param(json_answer([1]), "not_found", "not Prometheus", id="other JSON"),
        pytest.param(
            json_answer({"status": "success"}), "not_found", "not Prometheus", id="no data"
        ),
        pytest.param(
            json_answer({"status": "success", "data": {"result": [{"metric": "up"}]}}),
            "not_found",
            "not a vector",
            id="no values",
        ),
        pytest.param(
            answer(b"", "Location: http://example.org/login", status="302 Found"),
            "redirect",
            "not followed",
            id="redirect",
        ),
        pytest.param(
            failed("503 Service Unavailable", "query timed out", "timeout"),
            "timeout",
            "no whole answer",
            id="its own timeout",
        ),
    ],
)
def test_what_asking_again_cannot_help_is_told_at_once(
    start: Start, reply: bytes, kind: str, said: str
) -> None:
    server = start(always(reply, keep=False))
    error = failure(server)
    assert (error.kind, len(server.requests)) == (kind, 1)
    assert said in str(error)


def test_a_tenant_that_is_missing_is_named_with_its_header(start: Start) -> None:
    error = failure(start(always(failed("401 Unauthorized", "no org id"))))
    assert "X-Scope-OrgID" in error.hint


@pytest.mark.parametrize(
    ("document", "said", "hint"),
    [
        ({"message": "Missing Authentication Token"}, "Missing Authentication Token", "SigV4"),
        ({"Message": "User is not authorized"}, "User is not authorized", "--selector"),
        (
            {"error": {"code": 403, "message": "Permission monitoring.read denied"}},
            "Permission monitoring.read denied",
            "--selector",
        ),
        ({"error": "", "detail": "namespace b is forbidden"}, "namespace b is", "--selector"),
        ({"code": 7}, "no reason given", "--selector"),
    ],
)
def test_a_refusal_in_anothers_words_is_kept_and_says_what_to_try(
    start: Start, document: dict[str, object], said: str, hint: str
) -> None:
    error = failure(start(always(json_answer(document, status="403 Forbidden"))))
    assert error.kind == "auth"
    assert f"403: {said}" in str(error)
    assert hint in error.hint


def test_a_long_query_is_shortened_in_the_message(start: Start) -> None:
    error = failure(start(always(failed("400 Bad Request", "bad"))), query="x" * 5000)
    assert len(str(error)) < 400


@pytest.mark.parametrize(
    "serve",
    [
        pytest.param(dripping(ONE, 0.05), id="a byte now and then"),
        pytest.param(silent, id="nothing at all"),
    ],
)
def test_a_slow_answer_ends_in_time_and_is_not_asked_again(start: Start, serve: Serve) -> None:
    server = start(serve)
    assert failure(server, timeout_s=0.4).kind == "timeout"
    assert len(server.requests) == 1


def test_an_answer_has_a_limit(start: Start) -> None:
    server = start(always(vector([({"i": str(at)}, 1.0) for at in range(1000)])))
    with (
        source(server, FetchSettings(body_limit_bytes=1000)) as asked,
        pytest.raises(CollectError) as caught,
    ):
        asked.instant("up")
    assert caught.value.kind == "too_large"


def test_nobody_listens() -> None:
    with (
        PrometheusSource("127.0.0.1:1", SourceSettings(pause_s=0.01)) as asked,
        pytest.raises(CollectError, match="refused") as caught,
    ):
        asked.instant("up")
    assert caught.value.kind == "refused"


def test_headers_and_the_form_arrive(start: Start, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    forms: list[dict[str, str]] = []

    def serve(sock: socket.socket, request: bytes, _number: int) -> bool:
        forms.append(read_form(sock, request))
        sock.sendall(ONE)
        return True

    server = start(serve)
    fetch = FetchSettings(bearer_token_file=str(token), headers={"X-Scope-OrgID": "team-a"})
    with source(server, fetch) as asked:
        asked.instant("up" * 9000, at_s=12.5)
    request = server.requests[0].decode()
    assert request.startswith("POST /api/v1/query HTTP/1.1")
    assert "Authorization: Bearer s3cret" in request
    assert "X-Scope-OrgID: team-a" in request
    assert forms == [{"query": "up" * 9000, "time": "12.500"}]


def test_a_store_that_wants_signed_requests_is_told_apart(start: Start) -> None:
    said = answer(b'{"message": "Missing Authentication Token"}', status="403 Forbidden")
    with (
        source(start(always(said)), FetchSettings()) as asked,
        pytest.raises(CollectError) as caught,
    ):
        asked.instant("up")
    assert "SigV4 proxy" in caught.value.hint


def test_a_token_that_was_renewed_is_sent_with_the_next_query(start: Start, tmp_path: Path) -> None:
    token, header = tmp_path / "token", tmp_path / "header"
    server = start(always(ONE))
    with (
        source(server, FetchSettings(bearer_token_file=str(token))) as bearer,
        source(server, FetchSettings(header_files={"Authorization": str(header)})) as basic,
    ):
        for number in range(2):
            token.write_text(f"hour-{number}\n")
            header.write_text(f"Basic {number}")
            bearer.instant("up")
            basic.instant("up")
    sent = [request.decode() for request in server.requests]
    for number in range(2):
        assert any(f"Authorization: Bearer hour-{number}\r\n" in request for request in sent)
        assert any(f"Authorization: Basic {number}\r\n" in request for request in sent)


def test_credentials_of_the_url_are_sent_and_never_shown(start: Start) -> None:
    server = start(always(failed("403 Forbidden", "no")))
    with (
        PrometheusSource(f"http://ann:pa55@127.0.0.1:{server.port}/", SourceSettings()) as asked,
        pytest.raises(CollectError) as caught,
    ):
        asked.instant("up")
    assert "Basic YW5uOnBhNTU=" in server.requests[0].decode()
    assert "pa55" not in f"{caught.value} {caught.value.hint} {asked.url}"


def test_no_token_reaches_where_a_redirect_leads(start: Start) -> None:
    other = start(always(ONE))
    moved = answer(b"", f"Location: {other.url}", status="307 Temporary Redirect")
    server = start(always(moved, keep=False))
    with (
        source(server, FetchSettings(headers={"X-Key": "k"})) as asked,
        pytest.raises(CollectError),
    ):
        asked.instant("up")
    assert other.requests == []


def test_a_netrc_does_not_replace_the_token(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login x password y\n")
    netrc.chmod(0o600)
    monkeypatch.setitem(os.environ, "NETRC", str(netrc))
    server = start(in_turn(ONE))
    with source(server, FetchSettings(headers={"Authorization": "Bearer mine"})) as asked:
        asked.instant("up")
    assert "Authorization: Bearer mine" in server.requests[0].decode()


@pytest.mark.parametrize("setting", ["ca_file", "client_cert_file", "client_key_file"])
def test_a_tls_file_that_cannot_be_read_is_named(tmp_path: Path, setting: str) -> None:
    missing = str(tmp_path / "missing.pem")
    files: dict[str, Any] = {setting: missing}
    with (
        PrometheusSource("https://127.0.0.1:1", SourceSettings(FetchSettings(**files))) as asked,
        pytest.raises(CollectError, match=f"TLS failed: cannot read {missing}") as caught,
    ):
        asked.instant("up")
    assert caught.value.kind == "tls"


def test_queries_one_after_the_other_use_one_connection(start: Start) -> None:
    connections: list[int] = []

    def serve(sock: socket.socket, request: bytes, _number: int) -> bool:
        read_form(sock, request)
        connections.append(sock.fileno())
        sock.sendall(ONE)
        return True

    with source(start(serve), FetchSettings()) as asked:
        for _ in range(5):
            asked.instant("up")
    assert connections == 5 * connections[:1]


def test_tls_needs_the_authority_and_shows_our_certificate(start: Start, tmp_path: Path) -> None:
    authority = trustme.CA()
    files = {name: tmp_path / name for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(files["ca"])
    ours = authority.issue_cert("kneewatch")
    ours.private_key_pem.write_to_path(files["key"])
    ours.cert_chain_pems[0].write_to_path(files["cert"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files["ca"]))
    with authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.tempfile() as pem:
        context.load_cert_chain(pem)
    context.verify_mode = ssl.CERT_REQUIRED
    server = start(in_turn(ONE), context)
    trusting = FetchSettings(
        ca_file=str(files["ca"]),
        client_cert_file=str(files["cert"]),
        client_key_file=str(files["key"]),
    )
    with source(server, trusting) as asked:
        assert len(asked.instant("up").samples) == 1
    for fetch in (FetchSettings(), FetchSettings(ca_file=str(tmp_path / "none"))):
        with source(server, fetch) as asked, pytest.raises(CollectError) as caught:
            asked.instant("up")
        assert caught.value.kind == "tls"
