"""The made-up week as a store, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.notify.mail_server import MailServer, Ways
from tests.shared_folders import filled_once
from tests.weeks import EVERY_S, Week, week


@pytest.fixture(scope="session")
def made_week() -> Week:
    """Four servers of four kinds in three tiers, six incidents."""
    return week()


@pytest.fixture(scope="session")
def made_store(made_week: Week, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its store."""
    folder = filled_once(
        tmp_path_factory,
        "week",
        lambda folder: made_week.write(folder / "week.db", every_s=EVERY_S),
    )
    return folder / "week.db"


@pytest.fixture
def mail() -> Iterator[MailServer]:
    """A server that takes mail."""
    server = MailServer(Ways())
    yield server
    server.close()
