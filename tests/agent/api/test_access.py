"""Tokens: read from files, read again, compared, told apart."""

from __future__ import annotations

import base64
import logging
import os
from codecs import BOM_UTF8
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.api.access import ALL, NOTHING, READ, Auth, Scopes, TokenFile, token
from kneewatch.collector.errors import SettingsError
from tests.agent.api.serving import asking, service_of, settings_of
from tests.agent.api.test_rate import Clock

READING: Scopes = frozenset({READ})
READER, BOSS = b"r" * 32, b"a" * 32


def token_file(path: Path, content: bytes, mode: int = 0o600) -> Path:
    """A file of tokens."""
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.fixture
def access(tmp_path: Path) -> Auth:
    """Both files."""
    files = token_file(tmp_path / "read", READER), token_file(tmp_path / "admin", BOSS)
    settings = settings_of(http__token_file=str(files[0]), http__admin_token_file=str(files[1]))
    return Auth.of(settings)


@pytest.mark.parametrize(
    ("headers", "scopes"),
    [
        ([b"Bearer " + READER], READING),
        ([b"bearer   " + READER + b" "], READING),
        ([b"Bearer " + BOSS], ALL),
        ([b"Basic " + base64.b64encode(b"anybody:" + READER)], READING),
        ([b"Basic " + base64.b64encode(b":" + BOSS)], ALL),
        ([], NOTHING),
        ([b"Bearer " + READER[:-1]], NOTHING),
        ([b"Bearer " + READER + b"r"], NOTHING),
        ([b"Bearer"], NOTHING),
        ([b"Bearer "], NOTHING),
        ([READER], NOTHING),
        ([b"Digest " + READER], NOTHING),
        ([b"Basic " + READER], NOTHING),
        ([b"Basic " + base64.b64encode(READER)], NOTHING),
        ([b"Basic " + base64.b64encode(READER + b":")], NOTHING),
        pytest.param([b"Bearer " + READER, b"Bearer x"], NOTHING, id="two headers allow nothing"),
    ],
)
def test_a_token_gives_its_scopes(access: Auth, headers: list[bytes], scopes: Scopes) -> None:
    assert access.scopes(headers) == scopes


def test_without_files_everything_is_allowed() -> None:
    assert Auth.of(settings_of()).scopes([]) == ALL


def test_a_read_file_alone_closes_the_admin_scope(tmp_path: Path) -> None:
    file = token_file(tmp_path / "read", READER)
    access = Auth.of(settings_of(http__token_file=str(file)))
    assert access.scopes([]) == NOTHING
    assert access.scopes([b"Bearer " + READER]) == {READ}


def test_an_admin_file_alone_leaves_reading_free(tmp_path: Path) -> None:
    file = token_file(tmp_path / "admin", BOSS)
    access = Auth.of(settings_of(http__admin_token_file=str(file)))
    assert access.scopes([]) == {READ}
    assert access.scopes([b"Bearer nonsense"]) == {READ}
    assert access.scopes([b"Bearer " + BOSS]) == ALL


def test_one_token_a_line_so_that_two_are_valid_while_one_replaces_the_other(
    tmp_path: Path,
) -> None:
    file = TokenFile("key", token_file(tmp_path / "t", b"old-old-old-old-old\n\n new-new-new\n"))
    file.load()
    assert file.holds(b"old-old-old-old-old")
    assert file.holds(b"new-new-new")
    assert not file.holds(b"")
    assert not file.holds(b"\n")


def test_a_changed_file_is_read_again_within_a_second(tmp_path: Path) -> None:
    clock = Clock()
    file = TokenFile("key", token_file(tmp_path / "t", READER), clock)
    file.load()
    assert file.holds(READER)
    token_file(tmp_path / "t", BOSS + b"\n")
    clock.now_s += 1.1
    assert file.holds(BOSS)
    assert not file.holds(READER)


def test_a_file_replaced_by_one_of_the_same_size_and_age_is_noticed(tmp_path: Path) -> None:
    clock = Clock()
    path = token_file(tmp_path / "t", READER)
    file = TokenFile("key", path, clock)
    file.load()
    other, status = token_file(tmp_path / "other", BOSS), path.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)
    clock.now_s += 1.1
    assert file.holds(BOSS)


def test_a_byte_order_mark_is_no_part_of_a_token(tmp_path: Path) -> None:
    file = TokenFile("key", token_file(tmp_path / "t", BOM_UTF8 + READER + b"\r\n"), Clock())
    file.load()
    assert file.holds(READER)


def test_while_the_file_is_gone_no_token_is_valid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    path = token_file(tmp_path / "t", READER)
    file = TokenFile("key", path, clock)
    file.load()
    path.unlink()
    clock.now_s += 1.1
    assert not file.holds(READER)
    assert "no token is valid" in caplog.text
    token_file(path, READER)
    clock.now_s += 1.1
    assert file.holds(READER)


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    file = token_file(tmp_path / "t", content)
    with pytest.raises(SettingsError, match=r"http.token_file = .* contains no token"):
        Auth.of(settings_of(http__token_file=str(file)))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", Path("/dev/zero")):
        with pytest.raises(SettingsError, match=r"http\.token_file"):
            Auth.of(settings_of(http__token_file=str(path)))


def test_a_file_that_everybody_can_read_and_a_short_token_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    TokenFile("key", token_file(tmp_path / "t", b"hunter2", 0o644)).load()
    assert "token file is world-readable" in caplog.text
    assert "too short and can be guessed" in caplog.text
    assert "hunter2" not in caplog.text


@given(st.binary(max_size=80))
def test_no_header_is_mistaken_for_a_token(header: bytes) -> None:
    secret = token(header)
    assert secret is None or secret


def test_tokens_over_http(tmp_path: Path) -> None:
    files = token_file(tmp_path / "read", READER), token_file(tmp_path / "admin", BOSS)
    settings = settings_of(http__token_file=str(files[0]), http__admin_token_file=str(files[1]))
    reader, boss = f"Bearer {READER.decode()}", f"Bearer {BOSS.decode()}"
    service = service_of(
        names=["secret-name"], settings=settings, restart_needed=lambda: ["listen"]
    )
    with asking(service) as client:
        assert client.get("/healthz").status_code == 200
        for path in ("/api/v1/triage", "/triage", "/metrics", "/docs", "/openapi.json", "/nothing",
                     "/api/v1/size", "/"):  # fmt: skip
            refused = client.get(path)
            assert refused.status_code == 401, path
            assert refused.headers["www-authenticate"] == 'Bearer realm="kneewatch"'
            assert "secret-name" not in refused.text
            assert client.get(path, authorization=reader).status_code != 401
        assert "Basic" in client.get("/triage", accept="text/html").headers["www-authenticate"]
        assert client.get("/readyz").json() == {"ready": False}
        ready = client.get("/readyz", authorization=reader).json()
        assert ready["reasons"] == ["secret-name: not scraped yet"]
        assert ready["restart_needed"] == ["listen"]
        assert client.post("/api/v1/alerts", {}).status_code == 401
        assert client.post("/api/v1/alerts", {}, authorization=reader).status_code == 403
        assert client.post("/api/v1/alerts", {}, authorization=boss).status_code == 422
