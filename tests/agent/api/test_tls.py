"""HTTPS and client certificates, with real certificates and handshakes."""

from __future__ import annotations

import shutil
import socket
import ssl
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import trustme

from kneewatch.agent.api.access import ServerTls
from kneewatch.agent.api.app import make_app
from kneewatch.agent.api.server import HttpServer
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.errors import SettingsError
from tests.agent.api.serving import WELL_STATE, served, service_of, settings_of
from tests.agent.api.test_access import BOSS, READER, token_file
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Who signs everything."""
    return trustme.CA()


def written(leaf: trustme.LeafCert, folder: Path, name: str = "server") -> dict[str, Any]:
    """A certificate and its key as settings."""
    chain, key = folder / f"{name}.pem", folder / f"{name}.key"
    leaf.cert_chain_pems[0].write_to_path(chain)
    leaf.private_key_pem.write_to_path(key)
    return {"http__tls_cert_file": str(chain), "http__tls_key_file": str(key)}


@pytest.fixture
def tls(authority: trustme.CA, tmp_path: Path) -> dict[str, Any]:
    """The server's settings."""
    return written(authority.issue_cert("127.0.0.1", "localhost"), tmp_path)


@pytest.fixture
def client_ca(authority: trustme.CA, tmp_path: Path) -> str:
    """The authorities that clients are asked for."""
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return str(tmp_path / "ca.pem")


def trusting(authority: trustme.CA, client: trustme.LeafCert | None = None) -> ssl.SSLContext:
    """What a client brings."""
    context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    if client is not None:
        with client.private_key_and_cert_chain_pem.tempfile() as pem:
            context.load_cert_chain(pem)
    return context


def status(url: str, context: ssl.SSLContext, **headers: str) -> int:
    """The answer's status."""
    with httpx.Client(verify=context, timeout=PATIENCE_S) as client:
        return client.get(f"{url}/api/v1/triage", headers=headers).status_code


def test_https(authority: trustme.CA, tls: dict[str, Any]) -> None:
    with served(service_of(WELL_STATE, settings=settings_of(**tls))) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert status(server.url, trusting(authority)) == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http"), timeout=PATIENCE_S)
        old = trusting(authority)
        with pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError):
            status(server.url, old)


def test_a_client_certificate_is_needed_where_authorities_are_set(
    authority: trustme.CA, tls: dict[str, Any], client_ca: str
) -> None:
    settings = settings_of(listen="0.0.0.0:0", http__client_ca_file=client_ca, **tls)
    with served(service_of(WELL_STATE, settings=settings)) as server:
        ours = trusting(authority, authority.issue_cert("oncall@example.org"))
        assert status(server.url, ours) == 200
        for stranger in (None, trustme.CA().issue_cert("oncall@example.org")):
            with pytest.raises(httpx.HTTPError):
                status(server.url, trusting(authority, stranger))


def test_a_token_is_asked_for_beside_the_certificate_where_both_are_set(
    authority: trustme.CA, tls: dict[str, Any], client_ca: str, tmp_path: Path
) -> None:
    file = token_file(tmp_path / "t", READER)
    settings = settings_of(http__client_ca_file=client_ca, http__token_file=str(file), **tls)
    with served(service_of(WELL_STATE, settings=settings)) as server:
        ours = trusting(authority, authority.issue_cert("oncall@example.org"))
        assert status(server.url, ours) == 401
        assert status(server.url, ours, authorization=f"Bearer {READER.decode()}") == 200
        assert status(server.url, ours, authorization=f"Bearer {BOSS.decode()}") == 401


def test_a_renewed_certificate_is_taken_up_and_a_broken_one_is_not(
    tls: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = ServerTls.of(settings_of(**tls))
    assert context is not None
    chain = Path(tls["http__tls_cert_file"])
    renewed = trustme.CA()
    new = written(renewed.issue_cert("127.0.0.1"), tmp_path, "new")
    chain.write_text("half a certificate")
    context.refresh()
    assert "cannot reload TLS files" in caplog.text
    shutil.copy(new["http__tls_cert_file"], chain)
    shutil.copy(new["http__tls_key_file"], tls["http__tls_key_file"])
    context.refresh()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        client.setblocking(False)
        server, _ = listening.accept()
        server.settimeout(5.0)
        theirs = trusting(renewed).wrap_socket(
            client, server_hostname="127.0.0.1", do_handshake_on_connect=False
        )
        with pytest.raises(ssl.SSLWantReadError):
            theirs.do_handshake()
        ours = context.context.wrap_socket(server, server_side=True, do_handshake_on_connect=False)
        ours.setblocking(False)
        for _ in range(100):
            done = 0
            for end in (ours, theirs):
                try:
                    end.do_handshake()
                    done += 1
                except ssl.SSLWantReadError:
                    time.sleep(0.005)
            if done == 2:
                break
        assert theirs.version() in ("TLSv1.2", "TLSv1.3")
        ours.close()
        theirs.close()


@pytest.mark.parametrize("wrong", ["http__tls_cert_file", "http__tls_key_file"])
def test_a_file_that_cannot_be_used_is_named(tls: dict[str, Any], wrong: str) -> None:
    key = wrong.replace("__", ".")
    for path in ("/nonexistent.pem", "/dev/null"):
        with pytest.raises(SettingsError, match=path) as refused:
            bound(settings_of(**{**tls, wrong: path}))
        assert key in str(refused.value) or "http.tls_cert_file" in str(refused.value)


def test_a_key_with_a_password_is_refused_and_not_waited_for(
    tls: dict[str, Any], tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives import serialization

    plain = Path(tls["http__tls_key_file"]).read_bytes()
    locked = serialization.load_pem_private_key(plain, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.BestAvailableEncryption(b"hunter2"),
    )
    (tmp_path / "locked.key").write_bytes(locked)
    with pytest.raises(SettingsError, match="the key is encrypted"):
        bound(settings_of(**{**tls, "http__tls_key_file": str(tmp_path / "locked.key")}))


def test_a_handshake_that_does_not_come_holds_up_nobody(
    authority: trustme.CA, tls: dict[str, Any]
) -> None:
    with served(service_of(WELL_STATE, settings=settings_of(**tls))) as server:
        place = urlsplit(server.url)
        with socket.create_connection((place.hostname, place.port)):
            assert status(server.url, trusting(authority)) == 200


def bound(settings: Settings) -> HttpServer:
    """A server that has taken its address."""
    server = HttpServer(make_app(service_of(WELL_STATE, settings=settings)), settings)
    server.bind()
    return server
