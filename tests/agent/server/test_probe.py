"""What is asked of a server, and what hostile answers change: nothing but a note."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from kneewatch.agent.server.probe import BODY_MAX_BYTES, ask_server
from kneewatch.collector.http.address import FetchSettings
from tests.agent.server.vllm_server import (
    ROOT,
    asked,
    document,
    models,
    path_of,
    vllm_answers,
    vllm_server,
)
from tests.collector.servers import QUICK, Start, always, answer

ALL = [
    "/version",
    "/v1/models",
    "/health",
    "/load",
    "/is_sleeping",
    "/server_info?config_format=json",
]


def test_a_server_is_asked_once_for_each_fact(serving: Start) -> None:
    server = serving(vllm_server([], vllm_answers()))
    reading = ask_server(server.url, FetchSettings(), 5.0)
    assert asked(server) == ALL
    assert all(request.startswith(b"GET ") for request in server.requests)
    assert (reading.source, reading.read_s, reading.notes) == ("server", 5.0, ())
    assert reading.values == {
        "vllm_version": "0.32.0",
        "model_path": ROOT,
        "max_model_len": 8192,
        "healthy": True,
    }


def test_facts_of_a_server_in_development_mode(serving: Start) -> None:
    more = {
        "/load": document({"server_load": 3}),
        "/is_sleeping": document({"is_sleeping": False}),
        "/server_info": document(
            {"vllm_config": {"parallel_config": {"tensor_parallel_size": 4}, "other": None}}
        ),
    }
    server = serving(vllm_server([], vllm_answers() | more))
    values = ask_server(server.url, FetchSettings(), 0.0).values
    assert (values["server_load"], values["sleeping"], values["tensor_parallel"]) == (3, False, 4)


def test_a_configuration_that_is_printed_as_text(serving: Start) -> None:
    info = {"vllm_config": "model='/m', tensor_parallel_size=2, max_num_seqs=0, seed=0"}
    server = serving(vllm_server([], vllm_answers() | {"/server_info": document(info)}))
    values = ask_server(server.url, FetchSettings(), 0.0).values
    assert values["tensor_parallel"] == 2
    assert "max_num_seqs" not in values


def test_the_configuration_of_sglang_is_read_by_its_flags(serving: Start) -> None:
    info = {"tp_size": 4, "pp_size": 1, "dp_size": 1, "version": "0.5.23",
            "max_running_requests": 96, "chunked_prefill_size": 8192, "api_key": "x"}  # fmt: skip
    answers = {"/server_info": document(info), "/v1/models": vllm_answers()["/v1/models"]}
    server = serving(vllm_server([], answers))
    reading = ask_server(server.url, FetchSettings(), 0.0)
    assert reading.values["program_version"] == "SGLang 0.5.23"
    assert reading.values["tensor_parallel"] == 4
    assert reading.values["max_num_seqs"] == 96
    assert not [note for note in reading.notes if "/version" in note]


def test_the_address_of_the_page_is_the_base_and_credentials_go_along(serving: Start) -> None:
    server = serving(vllm_server([], vllm_answers()))
    url = f"http://user:secret@127.0.0.1:{server.port}/tenant/metrics"
    notes = ask_server(url, FetchSettings(headers={"X-Tenant": "a"}), 0.0).notes
    assert path_of(server.requests[0]) == "/tenant/version"
    assert all(b"Authorization: Basic " in request for request in server.requests)
    assert all(b"X-Tenant: a" in request for request in server.requests)
    assert "secret" not in "".join(notes)


def test_a_missing_token_is_a_note_that_says_what_to_set(serving: Start) -> None:
    refused = answer(b'{"error":"Unauthorized"}', status="401 Unauthorized")
    server = serving(vllm_server([], vllm_answers() | {"/v1/models": refused}))
    reading = ask_server(server.url, FetchSettings(), 0.0)
    (note,) = reading.notes
    assert note.startswith("GET /v1/models: ")
    assert "bearer_token_file" in note
    assert reading.values["vllm_version"] == "0.32.0"


def test_a_redirect_elsewhere_is_not_followed(serving: Start) -> None:
    other = serving(always(answer(b"")))
    away = answer(b"", f"Location: http://localhost:{other.port}/v1/models", status="302 Found")
    server = serving(vllm_server([], vllm_answers() | {"/v1/models": away}))
    reading = ask_server(server.url, FetchSettings(bearer_token_env="HOME"), 0.0)
    assert other.requests == []
    assert "redirects to another server" in reading.notes[0]
    assert "model_path" not in reading.values


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(answer(b"\x00\xff\xfe" * 100), id="binary"),
        pytest.param(answer(b'{"data": [' + b"0," * BODY_MAX_BYTES), id="giant"),
        pytest.param(answer(b"[" * 100_000), id="nested"),
        pytest.param(document({"data": []}), id="no model"),
        pytest.param(document({"data": "x"}), id="no list"),
        pytest.param(document(["x"]), id="no object"),
        pytest.param(models("a\x1b[31m"), id="control characters"),
        pytest.param(models("x" * 10_000), id="long name"),
        pytest.param(answer(b"<html>", "Content-Type: text/html"), id="web page"),
    ],
)
def test_a_hostile_list_of_models_is_a_note(serving: Start, body: bytes) -> None:
    server = serving(vllm_server([], vllm_answers() | {"/v1/models": body}))
    reading = ask_server(server.url, FetchSettings(), 0.0)
    assert reading.values == {"vllm_version": "0.32.0", "healthy": True}
    (note,) = reading.notes
    assert note.startswith("GET /v1/models: ")
    assert note.isprintable()
    assert len(note) < 500


@pytest.mark.parametrize("length", [-1, 0, True, 1e300, "8192", None, 10**400])
def test_an_impossible_context_is_no_fact(serving: Start, length: object) -> None:
    listed = models(max_model_len=length)
    server = serving(vllm_server([], vllm_answers() | {"/v1/models": listed}))
    assert "max_model_len" not in ask_server(server.url, FetchSettings(), 0.0).values


@pytest.mark.parametrize(
    "version", ["dev", "0.1.dev1+g1234", "", 32, None, ["0.32.0"], "0.32.0\x1b]0;x", "v" * 9999]
)
def test_a_version_that_is_none_is_a_note(serving: Start, version: object) -> None:
    lie = {"/version": document({"version": version})}
    server = serving(vllm_server([], vllm_answers() | lie))
    reading = ask_server(server.url, FetchSettings(), 0.0)
    assert "vllm_version" not in reading.values
    assert reading.notes[0].startswith("GET /version: ")


def endless(sock: socket.socket) -> None:
    sock.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        sock.sendall(b"1\r\n[\r\n")


def silent(_sock: socket.socket) -> None:
    return


@pytest.mark.parametrize(("reply", "requests"), [(endless, 6), (silent, 2)])
def test_an_answer_without_an_end_costs_one_limit(
    serving: Start, reply: Callable[[socket.socket], None], requests: int
) -> None:
    rest = vllm_server([], vllm_answers())

    def serve(sock: socket.socket, request: bytes, number: int) -> bool | None:
        if path_of(request) != "/v1/models":
            return rest(sock, request, number)
        reply(sock)
        return True

    for read_timeout_s in (0.5, 4.0, 32.0):  # a busy machine may be too slow for the first
        server = serving(serve)
        reading = ask_server(server.url, FetchSettings(read_timeout_s=read_timeout_s), 0.0)
        if "vllm_version" in reading.values:
            break
    assert reading.values["vllm_version"] == "0.32.0"
    assert reading.notes[0].startswith("GET /v1/models: ")
    assert len(server.requests) <= requests, "a server that hangs is not asked further"


def test_without_an_answer_nothing_more_is_asked(serving: Start) -> None:
    server = serving(always(b""))
    reading = ask_server(server.url, QUICK, 0.0)
    assert (reading.values, len(reading.notes), len(server.requests)) == ({}, 1, 1)
