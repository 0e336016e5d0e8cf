"""`POST /api/v1/accept` and `kneewatch accept`: who may, what is answered, and what is logged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from kneewatch.agent.stream import AcceptRequest, EngineAcceptance
from kneewatch.diagnose.learned.acceptance import Deviation
from tests.agent.api.serving import asking, served, service_of, settings_of
from tests.agent.running import Main

NOW_S = 1_795_300_000.0
READER, BOSS = "a-token-that-only-reads", "a-token-that-may-write"


class Accepting:
    """Notes requests, and knows one target."""

    def __init__(self, *deviations: Deviation) -> None:
        self.asked: list[AcceptRequest] = []
        self.deviations = deviations

    def __call__(self, request: AcceptRequest) -> Sequence[EngineAcceptance]:
        self.asked.append(request)
        if request.target != "gpu-7":
            return []
        return [EngineAcceptance("gpu-7", "tiny", "0", self.deviations)]


SLOWER = Deviation("stream_tokens_per_s", "speed", 126.0, 17.6, NOW_S)


def test_it_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    accepting = Accepting(SLOWER)
    with asking(service_of(accept=accepting)) as client, caplog.at_level(logging.INFO):
        document = client.post("/api/v1/accept", {"target": "gpu-7", "dry_run": True}).json()
        assert document["accepted"] is False
        assert "accepted usual values" not in caplog.text
        request = {"target": "gpu-7", "what": ["speed"]}
        document = client.post("/api/v1/accept", request).json()
    (deviation,) = document["engines"][0]["deviations"]
    assert (deviation["usual"], deviation["now"], deviation["since"]) == (126.0, 17.6, NOW_S)
    assert accepting.asked[-1].what == ("speed",)
    (line,) = [line for line in caplog.messages if line.startswith("accepted usual values")]
    assert "target=gpu-7 what=speed" in line
    assert "stream_tokens_per_s 17.6/s instead of 126/s" in line


@pytest.mark.parametrize(
    ("request_body", "status"),
    [
        ({"target": "gpu-8"}, 404),
        ({}, 422),
        ({"target": 7}, 422),
        ({"target": "gpu-7", "what": ["everything"]}, 422),
        ({"target": "gpu-7", "force": True}, 422),
    ],
)
def test_it_is_refused(request_body: dict[str, object], status: int) -> None:
    with asking(service_of(accept=Accepting(SLOWER))) as client:
        assert client.post("/api/v1/accept", request_body).status_code == status


def test_it_needs_the_admin_token(tmp_path: Path) -> None:
    files = {"read": READER, "admin": BOSS}
    for name, token in files.items():
        (tmp_path / name).write_text(token)
    settings = settings_of(
        http__token_file=str(tmp_path / "read"), http__admin_token_file=str(tmp_path / "admin")
    )
    accepting = Accepting(SLOWER)
    with asking(service_of(accept=accepting, settings=settings)) as client:
        body = {"target": "gpu-7"}
        assert client.post("/api/v1/accept", body).status_code == 401
        for token, status in ((READER, 403), (BOSS, 200)):
            answer = client.post("/api/v1/accept", body, authorization=f"Bearer {token}")
            assert answer.status_code == status
    assert len(accepting.asked) == 1


def test_the_command(main: Main, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text(BOSS)
    settings = settings_of(http__admin_token_file=str(tmp_path / "admin"))
    accepting = Accepting(SLOWER)
    with served(service_of(accept=accepting, settings=settings)) as server:
        own = ("accept", "gpu-7", "--daemon", server.url)
        refused = main(*own)
        assert refused.status == 2
        assert "--token-file" in refused.err
        boss = ("--token-file", tmp_path / "admin")
        done = main(*own, *boss, "--what", "speed", "--engine", "0", "--dry-run")
        assert done.status == 0
        assert "usual 126/s, now 17.6/s, since 2026-11-21 22:26:40 UTC" in done.out
        assert "nothing was changed" in done.err
        asked = AcceptRequest(target="gpu-7", engine="0", what=("speed",), dry_run=True)
        assert accepting.asked == [asked]
        assert main(*own, *boss, "--format", "json").documents[0]["accepted"] is True
        accepting.deviations = ()
        none = main(*own, *boss)
        assert (none.status, "nothing deviates" in none.out) == (2, True)
        unknown = main("accept", "gpu-8", "--daemon", server.url, *boss)
        assert unknown.status == 2
        assert "triage page" in unknown.err
