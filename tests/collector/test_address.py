"""What people type as a target, and what it means."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kneewatch.collector.errors import CollectError
from kneewatch.collector.http.address import metrics_url, parse_target, shown_url
from kneewatch.collector.http.fetch import Fetcher


@pytest.mark.parametrize(
    ("target", "url"),
    [
        ("host:8000", "http://host:8000/metrics"),
        ("host", "http://host/metrics"),
        ("8000", "http://localhost:8000/metrics"),
        ("host/v1/metrics", "http://host/v1/metrics"),
        ("  HOST:8000 ", "http://host:8000/metrics"),
        ("host:8000/metrics", "http://host:8000/metrics"),
        ("http://host:8000", "http://host:8000/metrics"),
        ("http://host:8000/", "http://host:8000/metrics"),
        ("http://host:8000/metrics", "http://host:8000/metrics"),
        ("http://host:80/metrics", "http://host/metrics"),
        ("https://host", "https://host/metrics"),
        ("HTTPS://host:8443/x/", "https://host:8443/x/"),
        ("http://[::1]:8000/prefix/metrics", "http://[::1]:8000/prefix/metrics"),
        ("[::1]:8000", "http://[::1]:8000/metrics"),
        ("http://[fe80::1%eth0]:8000", "http://[fe80::1%eth0]:8000/metrics"),
        ("http://host/m?match=a&b=c#part", "http://host/m?match=a&b=c"),
        ("http://host/é", "http://host/%C3%A9"),
        ("http://u:p%2F@host/m", "http://u:p%2F@host/m"),
        ("u:p@host:8000", "http://u:p@host:8000/metrics"),
    ],
)
def test_target_means_url(target: str, url: str) -> None:
    assert metrics_url(target) == url
    assert metrics_url(url) == url


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("http://", "host is missing"),
        ("http://:8000", "host is missing"),
        ("host:", "malformed"),
        ("http://host:8000/v1", "drop /v1"),
        ("host:8000/v1/chat/completions", "drop /v1/chat/completions"),
        ("65536", "number"),
        ("host:port", "number"),
        ("host:0", "port 0"),
        ("host:65536", "number"),
        ("host:-1", "number"),
        ("::1", "brackets"),
        ("fe80::1:8000", "brackets"),
        ("http://[::1", "malformed"),
        ("ftp://host/metrics", "must be http"),
        ("file:///etc/passwd", "must be http"),
        ("unix://socket", "must be http"),
        ("http://ho st/", "space"),
        ("http://host/\r\nX: y", "space"),
        ("http://host\x00/", "space"),
        ("http://ho%73t/", "malformed"),
        ("http://user:se/cret@host/", "%2F"),
        ("http://user:8/cret@host/", "%2F"),
        ("http://user:8?cret@host/", "%2F"),
        ("user:8#cret@host", "%2F"),
    ],
)
def test_bad_target_is_refused(target: str, why: str) -> None:
    with pytest.raises(CollectError) as caught:
        metrics_url(target)
    assert caught.value.kind == "url"
    assert why in str(caught.value)
    assert "http://host:8000/metrics" in caught.value.hint
    assert "cret" not in str(caught.value)


@settings(deadline=None)
@given(st.text() | st.text("htps:/[]@%?#.1a\\ ", max_size=20))
@example("http://[a]")
@example("http://ex℀mple")
def test_any_text_is_a_url_or_an_error(text: str) -> None:
    url = url_or_kind(text)
    assert url == "url" or metrics_url(url) == url


def url_or_kind(target: str) -> str:
    try:
        return metrics_url(target)
    except CollectError as exc:
        return exc.kind


@settings(deadline=None)
@given(st.text(min_size=1), st.sampled_from(["host", "host:x", "host:99999", "", "[::1", "h\n"]))
@example("://", "host")
def test_password_is_never_shown(extra: str, host: str) -> None:
    target = f"http://user:SECRET{extra}SECRET@{host}/metrics"
    try:
        shown = shown_url(target) + repr(Fetcher(target).url)
    except CollectError as exc:
        shown = f"{exc} {exc.hint} {exc.__cause__!r}"
    assert "SECRET" not in shown


@pytest.mark.parametrize("name", ["api_key", "X-Amz-Signature", "access_token", "Password", "jwt"])
def test_a_secret_in_the_query_is_not_shown(name: str) -> None:
    address = parse_target(f"http://host:1/m?target=a&{name}=s3cret&b=1")
    shown = f"http://host:1/m?target=a&{name}=***&b=1"
    assert (address.url, shown_url(address.full_url())) == (shown, shown)
    assert address.full_url() == f"http://host:1/m?target=a&{name}=s3cret&b=1"
    assert "s3cret" not in repr(address)
    with pytest.raises(CollectError) as caught:
        parse_target(f"http://ho st:1/m?{name}=s3cret")
    assert "s3cret" not in str(caught.value)
