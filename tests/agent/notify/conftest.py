"""Servers that are closed when their test is over, and notifiers likewise."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from kneewatch.agent.notify.notifier import Notifier, RetryPolicy
from kneewatch.agent.notify.receivers import receivers
from tests.agent.notify.factories import settings
from tests.agent.notify.web import Reply, Taker, Taking

QUICK = RetryPolicy(first_s=0.05, most_s=0.2)

Starting = Callable[..., Notifier]


@pytest.fixture
def taking() -> Iterator[Taking]:
    takers: list[Taker] = []

    def start(*replies: Reply, tls: ssl.SSLContext | None = None) -> Taker:
        takers.append(Taker(*replies, tls=tls))
        return takers[-1]

    yield start
    for taker in takers:
        taker.close()


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Starting]:
    """Starts notifiers from the text of a settings file."""
    notifiers: list[Notifier] = []

    def start(text: str, **more: Any) -> Notifier:  # noqa: ANN401
        given: dict[str, Any] = {
            "state_file": tmp_path / "store.notify.json",
            "retry": QUICK,
            **more,
        }
        notifiers.append(Notifier(receivers(settings(tmp_path, text)), **given))
        return notifiers[-1]

    yield start
    for notifier in notifiers:
        notifier.close(0.5)


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="session")
def ca_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


@pytest.fixture
def server_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with authority.issue_cert(
        "127.0.0.1", "localhost"
    ).private_key_and_cert_chain_pem.tempfile() as pem:
        context.load_cert_chain(pem)
    return context
