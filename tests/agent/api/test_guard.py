"""What a request must pass before anything is done for it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kneewatch.agent.api.guard import CSP
from tests.agent.api.serving import SICK_STATE, WELL_STATE, asking, service_of, settings_of

TRIAGE = "/api/v1/triage"
ALERTS = "/api/v1/alerts"


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:9877", "localhost:9877", "LOCALHOST", "localhost.", "[::1]:9877",
     "10.1.2.3:80", "kneewatch.example:8443", "Kneewatch.Example."],
)  # fmt: skip
def test_addresses_and_known_names_are_answered(host: str) -> None:
    settings = settings_of(http__hosts=["kneewatch.example"])
    with asking(service_of(WELL_STATE, settings=settings)) as client:
        assert client.get(TRIAGE, host=host).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        pytest.param("evil.example:9877", 421, id="a name that was pointed here"),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421),
        ("2130706433", 421),
        ("", 400),
        ("a b", 400),
        ("user@localhost", 400),
        ("localhost:99999999", 400),
        ("[::1", 400),
    ],
)
def test_other_host_names_are_refused(host: str, status: int) -> None:
    with asking(service_of(SICK_STATE)) as client:
        refused = client.get(TRIAGE, host=host)
    assert refused.status_code == status
    assert refused.headers["content-type"] == "application/problem+json"
    assert "kv_pressure" not in refused.text
    if status == 421:
        assert "add the name to http.hosts" in refused.json()["detail"]


def test_two_host_headers_are_refused() -> None:
    with asking(service_of(SICK_STATE)) as client:
        refused = client.ask(
            "GET", TRIAGE, raw_headers=[("host", "localhost"), ("host", "evil.example")]
        )
    assert refused.status_code == 400


@pytest.mark.parametrize("path", [TRIAGE, "/triage", "/healthz", "/nothing", "/api/v1/size"])
def test_every_answer_has_the_security_headers(path: str) -> None:
    with asking(service_of(SICK_STATE)) as client:
        headers = client.get(path).headers
    assert headers["content-security-policy"] == CSP
    for part in ("default-src 'none'", "style-src 'self'", "script-src 'self'", "base-uri 'none'",
                 "frame-ancestors 'none'", "form-action 'self'"):  # fmt: skip
        assert part in CSP
    assert "unsafe" not in CSP
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in headers
    assert "server" not in headers


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 403),
        ("GET", {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
        ("GET", {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, 200),
        ("POST", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 403),
        ("POST", {"origin": "http://evil.example"}, 403),
        ("POST", {"origin": "null"}, 403),
        ("POST", {"origin": "http://127.0.0.1"}, 422),
        ("POST", {}, 422),
    ],
)
def test_pages_of_other_sites_cannot_ask(method: str, headers: dict[str, str], status: int) -> None:
    with asking(service_of(WELL_STATE)) as client:
        if method == "GET":
            assert client.ask("GET", TRIAGE, headers).status_code == status
        else:
            assert client.ask("POST", ALERTS, headers, json={}).status_code == status


def test_a_form_of_another_site_cannot_post_either() -> None:
    """Without headers about its origin, as from an old browser: forms cannot send JSON's type."""
    with asking(service_of(WELL_STATE)) as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            refused = client.ask("POST", ALERTS, {"content-type": kind}, content=b"{}")
            assert refused.status_code == 415


def test_too_many_requests_are_put_off_and_health_is_still_told() -> None:
    settings = settings_of(http__requests_per_s=2.0)
    with asking(service_of(WELL_STATE, settings=settings)) as client:
        statuses = [client.get(TRIAGE).status_code for _ in range(3)]
        refused = client.get(TRIAGE)
        assert client.get("/healthz").status_code == 200
    assert statuses == [200, 200, 429]
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"


def test_behind_a_proxy_its_own_word_of_the_client_counts() -> None:
    settings = settings_of(http__requests_per_s=1.0, http__behind_proxy=True)
    with asking(service_of(WELL_STATE, settings=settings)) as client:
        statuses = [
            client.get(TRIAGE, x_forwarded_for=f"{n}, 10.0.0.1").status_code for n in range(3)
        ]
        other = client.get(TRIAGE, x_forwarded_for="10.0.0.1, 10.0.0.2").status_code
    assert statuses == [200, 429, 429]
    assert other == 200


def test_without_a_proxy_a_client_cannot_say_who_it_is() -> None:
    settings = settings_of(http__requests_per_s=1.0)
    with asking(service_of(WELL_STATE, settings=settings)) as client:
        statuses = [client.get(TRIAGE, x_forwarded_for=f"10.0.0.{n}").status_code for n in range(3)]
    assert statuses == [200, 429, 429]


def test_a_body_that_is_announced_or_turns_out_too_large_is_refused() -> None:
    settings = settings_of(http__body_bytes=1000)
    kind = {"content-type": "application/json"}

    async def chunks() -> Any:  # noqa: ANN401
        for _ in range(100):
            yield b" " * 100

    with asking(service_of(WELL_STATE, settings=settings)) as client:
        assert client.ask("POST", ALERTS, kind, content=b" " * 1001).status_code == 413
        assert client.ask("POST", ALERTS, kind, content=chunks()).status_code == 413
        huge = {**kind, "content-length": "9" * 30}
        assert client.ask("POST", ALERTS, huge, content=b"").status_code == 413
        assert client.ask("POST", ALERTS, kind, content=b" " * 1000).status_code == 400


def test_a_head_is_a_get_without_its_body() -> None:
    with asking(service_of(WELL_STATE)) as client:
        head, get = client.ask("HEAD", TRIAGE), client.get(TRIAGE)
    assert head.status_code == 200
    assert head.content == b""
    assert head.headers["content-length"] == str(len(get.content))


def test_other_methods_are_405_and_say_which_there_are() -> None:
    with asking(service_of(WELL_STATE)) as client:
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "POST"):
            refused = client.ask(method, TRIAGE)
            assert refused.status_code == 405
            assert "GET" in refused.headers["allow"]
            assert refused.headers["content-type"] == "application/problem+json"


def test_a_bug_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> float:
        raise RuntimeError("a secret at /root/secret")

    caplog.set_level(logging.ERROR)
    with asking(service_of(WELL_STATE, clock=broken)) as client:
        failed = client.get(TRIAGE)
    assert failed.status_code == 500
    assert failed.json()["detail"] == "internal error; see kneewatch's log"
    assert "secret" not in failed.text
    assert "Traceback" not in failed.text
    assert "a secret at" in caplog.text
    assert failed.headers["content-security-policy"] == CSP
