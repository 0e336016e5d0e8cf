"""A fake vLLM API server: pages and facts by path, with a log of what was asked."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence

from tests.collector.servers import Serve, Server, answer

Answers = dict[str, bytes]


def document(value: object) -> bytes:
    """A JSON answer."""
    return answer(json.dumps(value).encode(), "Content-Type: application/json")


MISSING = answer(b'{"detail":"Not Found"}', status="404 Not Found")
ROOT = "meta-llama/Llama-3.1-8B-Instruct"


def models(root: str = ROOT, **more: object) -> bytes:
    card = {"id": "chat", "object": "model", "root": root, "parent": None, "max_model_len": 8192}
    adapter = {"id": "sql", "root": "/adapters/sql", "parent": "chat", "max_model_len": None}
    return document({"object": "list", "data": [{**card, **more}, adapter]})


def vllm_answers(**changed: bytes) -> Answers:
    """The answers of a vLLM 0.32.0 by path; `changed` by the path with _ for /."""
    answers = {
        "/version": document({"version": "0.32.0"}),
        "/v1/models": models(),
        "/health": answer(b""),
    }
    return answers | {path.replace("_", "/"): data for path, data in changed.items()}


def vllm_server(pages: Sequence[bytes], answers: Mapping[str, bytes]) -> Serve:
    """Serves pages in turn at /metrics, and the answers at other paths."""
    served = iter(range(10**9))

    def serve(sock: socket.socket, request: bytes, _number: int) -> bool:
        path = path_of(request)
        if path == "/metrics":
            sock.sendall(answer(pages[min(next(served), len(pages) - 1)]))
        else:
            sock.sendall(answers.get(path.partition("?")[0], MISSING))
        return True

    return serve


def path_of(request: bytes) -> str:
    return request.split(b" ", 2)[1].decode()


def asked(server: Server, *, but: str = "/metrics") -> list[str]:
    """The paths that were requested, pages left out."""
    return [path for path in map(path_of, server.requests) if path != but]


Start = Callable[..., Server]
