"""What settings say of the HTTP endpoint, checked before anything is opened."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import trustme

from kneewatch.agent.api.access import check_http
from kneewatch.collector.errors import SettingsError
from tests.agent.api.serving import settings_of
from tests.agent.api.test_access import READER, token_file
from tests.agent.running import Main


@pytest.fixture(autouse=True)
def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a socket nor a look-up of a name."""

    def refuse(*args: object, **more: object) -> None:
        raise AssertionError((args, more))

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def mistakes(**flags: Any) -> list[str]:  # noqa: ANN401
    """What is wrong with these settings."""
    try:
        check_http(settings_of(**flags))
    except SettingsError as error:
        return list(error.messages)
    return []


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:9877", "localhost:1", "gpu-7.invalid:1"])
def test_loopback_and_names_are_taken(listen: str) -> None:
    assert mistakes(listen=listen) == []


@pytest.mark.parametrize(
    "listen", ["9877", "127.0.0.1", "localhost:x", "127.0.0.1:70000", "http://localhost:1", "[::1]"]
)
def test_what_is_no_address_is_refused(listen: str) -> None:
    (message,) = mistakes(listen=listen)
    assert message.startswith(f"flag --listen: listen = {listen!r} is not HOST:PORT, such as 127")


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", ":0", "*:0", "10.0.0.7:9877"])
def test_an_address_open_to_others_needs_protection(listen: str, tmp_path: Path) -> None:
    (message,) = mistakes(listen=listen)
    assert "is reachable from other machines: set http.token_file or" in message
    assert mistakes(listen=listen, http__behind_proxy=True) == []
    file = str(token_file(tmp_path / "t", READER))
    assert mistakes(listen=listen, http__token_file=file) == []
    assert mistakes(listen=listen, http__admin_token_file=file) == [message]


def test_each_token_file_is_told_of(tmp_path: Path) -> None:
    empty = token_file(tmp_path / "t", b"\n")
    assert mistakes(http__token_file="no-such", http__admin_token_file=str(empty)) == [
        "flag --http-token-file: http.token_file = no-such: No such file or directory",
        f"flag --http-admin-token-file: http.admin_token_file = {empty} contains no token; "
        "write one per line",
    ]


def test_what_belongs_to_tls_needs_a_certificate() -> None:
    assert mistakes(http__tls_key_file="k", http__client_ca_file="ca") == [
        "flag --http-client-ca-file: http.client_ca_file requires http.tls_cert_file: client "
        "certificates are part of TLS",
        "flag --http-tls-key-file: http.tls_key_file requires http.tls_cert_file",
    ]


def test_files_of_tls_that_cannot_be_used(tmp_path: Path) -> None:
    authority = trustme.CA()
    ours, others = authority.issue_cert("localhost"), authority.issue_cert("localhost")
    cert, key, other = (str(tmp_path / name) for name in ("cert", "key", "other"))
    ours.cert_chain_pems[0].write_to_path(cert)
    ours.private_key_pem.write_to_path(key)
    others.private_key_pem.write_to_path(other)
    assert mistakes(http__tls_cert_file=cert, http__tls_key_file=key) == []
    (alone,) = mistakes(http__tls_cert_file=cert)
    assert alone.startswith(f"flag --http-tls-cert-file: http.tls_cert_file = {cert}: [SSL]")
    assert alone.endswith(
        "; the file must hold a certificate in PEM, and its key unless http.tls_key_file is set"
    )
    both = mistakes(http__tls_cert_file=cert, http__tls_key_file=other, http__client_ca_file=other)
    assert [message.rpartition("; ")[2] for message in both] == [
        "the files must hold a certificate and its own key in PEM",
        "the file must hold certificates in PEM",
    ]
    assert "key values mismatch" in both[0]


def test_config_does_not_warn_of_what_run_warns_of(main: Main, tmp_path: Path) -> None:
    file = token_file(tmp_path / "t", b"hunter2", 0o644)
    ended = main("config", "--listen", "0.0.0.0:0", "--http-token-file", file)
    assert (ended.status, ended.err) == (0, "")
    assert f'http.token_file = "{file}"' in ended.out
    assert "hunter2" not in ended.out
