"""Servers and fetchers that are closed when their test is over."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pytest

from kneewatch.collector.http.address import FetchSettings
from kneewatch.collector.http.fetch import Fetcher
from tests.collector.servers import PATIENT, Fetch, Serve, Server, Start


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[Server] = []

    def start_one(serve: Serve, tls: ssl.SSLContext | None = None) -> Server:
        servers.append(Server(serve, tls))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


@pytest.fixture
def fetcher() -> Iterator[Fetch]:
    fetchers: list[Fetcher] = []

    def make(url: str, settings: FetchSettings = PATIENT) -> Fetcher:
        fetchers.append(Fetcher(url, settings))
        return fetchers[-1]

    yield make
    for open_fetcher in fetchers:
        open_fetcher.close()
