"""`kneewatch mcp`, asked by the protocol's own client; the daemon behind it is a real one."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from kneewatch.agent.mcp.backends import DaemonClient, HistoryRow, history_document, history_text
from kneewatch.agent.mcp.server import TEXT_MAX, daemon_tools, instructions, server_of
from kneewatch.agent.store.reader import Reader
from kneewatch.collector.errors import CollectError
from kneewatch.diagnose.ranking import CAUSES
from tests.agent.api.memory_history import Remembered
from tests.agent.api.serving import SICK_NAME, SICK_STATE, WELL_STATE, served, service_of, state_of
from tests.collector.servers import Start
from tests.recordings import CAPTURES, diagnoses
from tests.reports.diagnoses import NOW_S, SICK

TRIAGE_WORDS = "CRITICAL  kv_pressure"


@pytest.fixture(scope="module")
def daemon() -> Iterator[str]:
    """The address of a daemon with one server under KV pressure and one that is well."""
    remembered = cast("Reader", Remembered(SICK_STATE, WELL_STATE))
    with served(service_of(SICK_STATE, WELL_STATE, reader=remembered)) as server:
        yield server.url


def asked(daemon: str, *calls: tuple[str, Mapping[str, Any]]) -> list[Any]:
    """The results of calls of tools, one after the other in one session."""

    async def session(client: Client) -> list[Any]:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        results = [await client.call_tool(name, dict(arguments)) for name, arguments in calls]
        for (name, _), result in zip(calls, results, strict=True):
            if not result.is_error:
                schema = tools[name].output_schema
                assert schema is not None
                jsonschema.validate(result.structured_content, schema)
        return results

    tools = daemon_tools(DaemonClient(daemon, token_file=None, ca_file=None))
    return in_session(Client(server_of(tools)), session)


def in_session(client: Client, use: Callable[[Client], Awaitable[list[Any]]]) -> list[Any]:
    """What a function of a connected client returns."""

    async def main() -> list[Any]:
        async with client as connected:
            return await use(connected)

    return asyncio.run(main())


def text(result: Any) -> str:  # noqa: ANN401 - the SDK's result
    """The text of a result."""
    (content,) = result.content
    words: str = content.text
    return words


def test_chat_is_slow_to_the_cause_in_three_calls(daemon: str) -> None:
    worst, past, page = asked(
        daemon,
        ("triage", {}),
        ("incidents", {"since": "-2h", "target": SICK_NAME}),
        ("explain", {"id": "kv_pressure"}),
    )
    assert TRIAGE_WORDS in text(worst)
    assert "/api/v1" not in text(worst)
    (first, _) = worst.structured_content["targets"]
    assert first["target"] == SICK_NAME
    assert first["causes"][0]["id"] == "kv_pressure"
    assert "kv_pressure" in text(past)
    assert past.structured_content["incidents"][0]["end"] is None
    assert "## " in text(page)
    assert page.structured_content["kind"] == "cause"


FAULTS = {
    "kv_pressure_cascade": ("kv_pressure", "--num-gpu-blocks-override"),
    "prefix_off": ("prefix_cache_off", "--no-enable-prefix-caching"),
    "lora_thrash": ("adapter_thrash", "--max-loras"),
    "queue_overload": ("admission_limit", "--max-num-seqs"),
}


@pytest.mark.parametrize("capture", FAULTS)
def test_an_agent_finds_cause_and_command_with_what_it_reads(capture: str) -> None:
    """Each call takes only names that an earlier answer had; nothing else is known."""
    cause_id, flag = FAULTS[capture]
    recorded = diagnoses(CAPTURES / f"{capture}.jsonl.gz")
    named = [each for each in recorded if each.causes and each.causes[0].id == cause_id]
    worst = max(named, key=lambda each: (each.severity, each.t_s))
    state = state_of("llama-0", worst, t_s=worst.t_s)
    service = service_of(state, WELL_STATE, clock=lambda: worst.t_s)
    with served(service) as server:
        (first,) = asked(server.url, ("triage", {}))
        document = first.structured_content["targets"][0]
        found = document["causes"][0]["id"]
        whole, page = asked(
            server.url, ("triage", {"target": document["target"]}), ("explain", {"id": found})
        )
    assert found == cause_id
    assert not whole.is_error
    assert not page.is_error
    advice = whole.structured_content["targets"][0]["recommendations"]
    assert flag in {change["flag"] for change in advice[0]["changes"]}
    assert flag in text(whole)
    assert "## Stop-gap" in text(page)
    assert len(text(page)) < TEXT_MAX


def test_answers_are_short_and_say_what_is_left_out(daemon: str) -> None:
    (worst,) = asked(daemon, ("triage", {"limit": 1}))
    (first,) = worst.structured_content["targets"]
    assert {row["target"] for row in worst.structured_content["watching"]} == {SICK_NAME}
    assert "generation_tokens_per_s" in first["signals"]
    assert all(row["state"] not in ("ok", "unknown") for row in first["findings"])
    assert len(text(worst)) < TEXT_MAX


def test_a_signal_over_time_has_null_where_nothing_is_known(daemon: str) -> None:
    asking = {
        "target": SICK_NAME,
        "signals": ["running", "ttft_p99_s"],
        "since": "-2h",
        "points": 5,
    }
    (history,) = asked(daemon, ("signal_history", asking))
    document = history.structured_content
    assert document["times"] == [NOW_S - 7200 + 1800 * place for place in range(5)]
    values = {row["signal"]: row["values"] for row in document["series"]}
    running = SICK.values["running"]
    assert values["running"] == [None, None, running, running, running], "stored for one hour"
    assert f"- - {running:g}" in text(history)


def test_what_cannot_be_answered_says_what_to_ask(daemon: str) -> None:
    nobody, nothing, wrong, late, large = asked(
        daemon,
        ("triage", {"target": "gpu-99"}),
        ("explain", {"id": "kv_presure"}),
        ("triage", {"targets": "gpu-7"}),
        ("incidents", {"since": "yesterday"}),
        ("signal_history", {"target": SICK_NAME, "signals": ["running"], "points": 500}),
    )
    assert all(result.is_error for result in (nobody, nothing, wrong, late, large))
    assert "no such target; watched targets: " in text(nobody)
    assert all(record.id in text(nothing) for record in CAUSES)
    assert "targets" in text(wrong)
    assert "how long ago (-2h" in text(late)
    assert text(large).startswith("points: ")


def test_no_tool_is_offered_that_the_daemon_cannot_answer(daemon: str) -> None:
    offered = [
        tool.name for tool in daemon_tools(DaemonClient(daemon, token_file=None, ca_file=None))
    ]
    assert "fleet" not in offered
    (fleet,) = asked(daemon, ("fleet", {}))
    assert fleet.is_error
    assert text(fleet).startswith("unknown tool 'fleet'; tools: triage, ")
    away = daemon_tools(DaemonClient("http://127.0.0.1:9", token_file=None, ca_file=None))
    assert "fleet" in [tool.name for tool in away], "it may be started later"


def test_a_daemon_that_does_not_answer_is_named() -> None:
    (result,) = asked("http://127.0.0.1:9", ("triage", {}))
    assert result.is_error
    assert "kneewatch run" in text(result)


def test_size_needs_no_daemon() -> None:
    inputs = {"model": "meta-llama/Llama-3.1-8B-Instruct", "gpu": "h100-sxm"}
    fits, refused = asked(
        "http://127.0.0.1:9", ("size", inputs), ("size", {"model": "/etc/passwd"})
    )
    assert fits.structured_content["fits"] is True
    assert '"fits":true' in text(fits)
    assert refused.is_error


def test_every_tool_only_reads_and_has_a_route(daemon: str) -> None:
    tools = daemon_tools(DaemonClient(daemon, token_file=None, ca_file=None))

    async def listed(client: Client) -> list[Any]:
        return (await client.list_tools()).tools

    for tool in in_session(Client(server_of(tools)), listed):
        assert tool.annotations.read_only_hint is True
        assert tool.annotations.idempotent_hint is True
        assert tool.annotations.destructive_hint is False
        assert tool.input_schema["additionalProperties"] is False
        assert f"- {tool.name}: " in instructions(tools)
    assert instructions(tools).index("- triage") < instructions(tools).index("- size")


def test_over_stdio(daemon: str) -> None:
    command = ["-m", "kneewatch.agent.cli", "mcp", "--daemon", daemon]
    parameters = StdioServerParameters(command=sys.executable, args=command)

    async def triage(client: Client) -> list[Any]:
        return [await client.call_tool("triage", {})]

    (result,) = in_session(Client(stdio_client(parameters)), triage)
    assert TRIAGE_WORDS in text(result)


def test_over_streamable_http(daemon: str) -> None:
    import uvicorn

    tools = daemon_tools(DaemonClient(daemon, token_file=None, ca_file=None))
    app = server_of(tools).streamable_http_app()

    async def main() -> str:
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with Client(f"http://127.0.0.1:{port}/mcp") as client:
            words = text(await client.call_tool("triage", {}))
        server.should_exit = True
        await serving
        return words

    assert TRIAGE_WORDS in asyncio.run(main())


def test_a_history_in_words() -> None:
    rows: list[HistoryRow] = [
        ("llama", "0", "running", [1.0, None, 3.0]),
        ("llama", "1", "running", [None] * 3),
    ]
    lines = history_text(history_document("gpu-7", [1.0, 2.0, 3.0], rows)).splitlines()
    assert lines[1:] == [
        "running (engine 0): 1 to 3: 1 - 3",
        "running (engine 1): unknown throughout: - - -",
    ]


def test_a_daemons_pages_address_is_its_address() -> None:
    assert DaemonClient("http://h:9877", token_file=None, ca_file=None).url == "http://h:9877"
    with pytest.raises(CollectError):
        DaemonClient("ftp://h", token_file=None, ca_file=None)


def test_the_token_goes_to_the_daemon_only(
    serving: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, bytes] = {}

    def daemon(sock: socket.socket, request: bytes, _number: int) -> bool:
        seen["daemon"] = request
        where = f"http://127.0.0.1:{other.port}/".encode()
        sock.sendall(b"HTTP/1.1 302 Found\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % where)
        return True

    def stranger(sock: socket.socket, request: bytes, _number: int) -> bool:
        seen["stranger"] = request
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nspoof")
        return True

    other, asked_daemon = serving(stranger), serving(daemon)
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{other.port}")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{other.port}")
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login eve password eve\n")
    monkeypatch.setenv("NETRC", str(netrc))
    token = tmp_path / "token"
    token.write_text("t0ken\n")
    client = DaemonClient(f"http://127.0.0.1:{asked_daemon.port}", token_file=token, ca_file=None)
    with pytest.raises(CollectError, match="302"):
        client.text("/triage")
    assert seen.keys() == {"daemon"}
    assert b"Authorization: Bearer t0ken" in seen["daemon"]
