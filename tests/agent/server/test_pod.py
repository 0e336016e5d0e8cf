"""The pod that kneewatch runs in: its spec from the Kubernetes API, and what it says of vLLM."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from kneewatch.agent.kubernetes import NAMELESS, ask_api, expanded, pod_reading, read_pod
from kneewatch.diagnose.deployment.deployment import NOTHING
from kneewatch.diagnose.deployment.server_facts import SourceReading, merge
from kneewatch.diagnose.deployment.vllm_flags import image_version
from tests.agent.server.vllm_server import document
from tests.collector.servers import Serve, Server, answer
from tests.waiting import PATIENCE_S

IMAGE = "registry.example/vllm/vllm-openai:v0.26.0-cu129"
ARGS = ["--model", "$(MODEL)", "--tensor-parallel-size=2", "--max-num-seqs", "64"]
ENV = [
    {"name": "MODEL", "value": "meta-llama/Llama-3.1-8B-Instruct"},
    {"name": "VLLM_USE_V1", "value": "1"},
    {"name": "VLLM_API_KEY", "value": "s3cret"},
    {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
]
MALFORMED: dict[str, object] = {"name": "a", "args": "text", "env": [1], "command": {}}
SIDECAR = {"name": "kneewatch", "image": "kneewatch:0.1.0", "args": ["run"]}


def pod(*containers: dict[str, Any], **spec: object) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {"name": "chat-0", "namespace": "llm"},
        "spec": {"nodeName": "gpu-7", "containers": [*containers, SIDECAR], **spec},
    }


def vllm(**changed: object) -> dict[str, Any]:
    return {"name": "vllm", "image": IMAGE, "args": ARGS, "env": ENV, **changed}


def test_the_container_says_model_flags_version_and_gpu() -> None:
    limits = {"limits": {"nvidia.com/gpu": "2", "memory": "64Gi"}}
    selector = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    reading = pod_reading(pod(vllm(resources=limits), nodeSelector=selector), 8000, 5.0)
    facts, stated = merge(NOTHING, [reading], config={}, model_names=(), settings_s=0.0, page_s=0.0)
    values = {fact.name: fact.value for fact in facts.facts}
    assert {fact.source for fact in facts.facts} == {"pod"}
    assert values["vllm_version"] == "0.26.0"
    assert values["model"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert values["tensor_parallel"] == 2
    assert values["max_num_seqs"] == 64
    assert values["gpu"] == "h100-sxm"
    assert values["gpu_limit"] == 2
    assert (values["pod"], values["pod_container"], values["node"]) == (
        "llm/chat-0",
        "vllm",
        "gpu-7",
    )
    assert values["VLLM_USE_V1"] == "1"
    assert "s3cret" not in str(facts)
    assert stated.version == (0, 26, 0)
    assert stated.gpu is not None
    assert facts.notes == ()


@pytest.mark.parametrize(
    "container",
    [
        pytest.param({"command": ["vllm", "serve", "m", "--port", "8000"], "args": []}, id="vllm"),
        pytest.param(
            {"command": ["python3", "-m", "vllm.entrypoints.openai.api_server"], "args": ["m"]},
            id="module",
        ),
        pytest.param(
            {"command": ["/bin/bash", "-c"], "args": ["sleep 5 && exec vllm serve m --seed 1"]},
            id="shell",
        ),
        pytest.param({"args": ["m"], "image": "vllm/vllm-openai"}, id="the image's own command"),
        pytest.param({"args": ["vllm", "serve", "m"], "image": "own:1"}, id="whole line as args"),
    ],
)
def test_each_way_to_start_vllm_is_read(container: dict[str, object]) -> None:
    launch = pod_reading(pod(vllm(**container)), 8000, 5.0).command_line
    assert launch is not None
    assert launch.model == "m"


@pytest.mark.parametrize(
    "containers",
    [
        pytest.param([vllm(args=[*ARGS, "--port", "8001"])], id="another port"),
        pytest.param([vllm(), vllm(name="second")], id="two servers on the port"),
        pytest.param([vllm(image="own/llm:2.0.0")], id="arguments of another image's command"),
        pytest.param([vllm(command=["sh", "-c"], args=["sleep 9"])], id="a script without vLLM"),
        pytest.param([MALFORMED], id="malformed"),
        pytest.param([], id="no other container"),
    ],
)
def test_a_container_that_cannot_be_told_is_a_note(containers: list[dict[str, Any]]) -> None:
    note = "pod llm/chat-0: no container serves vLLM on port 8000"
    assert pod_reading(pod(*containers), 8000, 5.0) == SourceReading("pod", 5.0, notes=(note,))


def test_a_server_that_answers_another_version_wins_over_the_images_tag() -> None:
    readings = [
        SourceReading("server", 4.0, {"vllm_version": "0.32.0"}),
        pod_reading(pod(vllm()), 8000, 5.0),
    ]
    facts, _ = merge(NOTHING, readings, config={}, model_names=(), settings_s=0.0, page_s=0.0)
    assert facts.value("vllm_version") == "0.32.0"
    assert facts.notes == ("vllm_version: 0.32.0 from server is used, not 0.26.0 from pod",)


@pytest.mark.parametrize(
    ("image", "version"),
    [
        (IMAGE, "0.26.0"),
        ("vllm/vllm-openai:v0.10.1.post1", "0.10.1.post1"),
        ("vllm/vllm-openai:v0.32.0@sha256:00ff", "0.32.0"),
        ("registry:5000/vllm:0.11.0-gpu-py312", "0.11.0"),
        ("vllm/vllm-openai:latest", None),
        ("vllm/vllm-openai@sha256:00ff", None),
        ("ours/vllm-router:v1.2.3", None),
        ("ours/llm:v2.3.4", None),
        ("vllm/vllm-openai:nightly-0.32.0", None),
    ],
)
def test_the_version_of_an_image(image: str, version: str | None) -> None:
    assert image_version(image) == version


def test_references_are_replaced_as_kubernetes_does() -> None:
    variables = {"A": "1", "B": "$(A)"}
    assert expanded("$(A) $$(A) $(NO) $(B) $A", variables) == "1 $(A) $(NO) $(A) $A"


# --- The API --------------------------------------------------------------------------------------


Api = Callable[[Serve], tuple[Server, dict[str, str]]]


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("t0ken")
    (tmp_path / "namespace").write_text("llm\n")
    return tmp_path


@pytest.fixture
def api(account: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """Starts an API server; returns it with the environment of a pod."""

    def start(serve: Serve) -> tuple[Server, dict[str, str]]:
        authority = trustme.CA()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.tempfile() as pem:
            tls.load_cert_chain(pem)
        if not (account / "ca.crt").exists():
            authority.cert_pem.write_to_path(str(account / "ca.crt"))
        server = Server(serve, tls)
        servers.append(server)
        places = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(server.port),
        }
        return server, {**places, "HOSTNAME": "chat-0", "PATH": ""}

    monkeypatch.setattr("kneewatch.agent.kubernetes.CHILD_TIMEOUT_S", PATIENCE_S)
    servers: list[Server] = []
    yield start
    for server in servers:
        server.close()


def serves(data: bytes) -> Serve:
    def serve(sock: Any, _request: bytes, _number: int) -> None:  # noqa: ANN401
        sock.sendall(data)

    return serve


TARGET = "http://127.0.0.1:8000"


def test_only_its_own_pod_is_asked_for_with_its_token(api: Api, account: Path) -> None:
    server, environ = api(serves(document(pod(vllm()))))
    # The downward API's names count: a pod with the node's network has the node's host name.
    named = {"POD_NAME": "chat-1", "HOSTNAME": "the-node"}
    reading = read_pod(TARGET, 5.0, environ=environ | named, account=account)
    assert reading.command_line is not None
    assert reading.values["pod"] == "llm/chat-0"
    (request,) = server.requests
    assert request.startswith(b"GET /api/v1/namespaces/llm/pods/chat-1 ")
    assert b"t0ken" in request


def refused(status: str, *headers: str) -> bytes:
    return answer(b"{}", "Content-Type: application/json", *headers, status=status)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (
            refused("403 Forbidden"),
            "status 403 Forbidden; allow kneewatch's service account",
        ),
        (refused("404 Not Found"), "status 404 Not Found"),
        (refused("302 Found", "Location: http://169.254.169.254/"), "status 302"),
        (answer(b"[1", "Content-Type: application/json"), ""),
    ],
    ids=["forbidden", "gone", "redirected", "not JSON"],
)
def test_what_the_api_refuses_is_an_error(api: Api, account: Path, data: bytes, error: str) -> None:
    server, environ = api(serves(data))
    facts = ask_api("llm", "chat-0", account, environ)
    assert facts.keys() == {"error"}
    assert error in str(facts["error"])
    assert len(server.requests) == 1, "neither repeated nor redirected"


def test_another_servers_certificate_is_refused(api: Api, account: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(account / "ca.crt"))
    server, environ = api(serves(document(pod(vllm()))))
    assert "SSLError" in str(ask_api("llm", "chat-0", account, environ)["error"])
    assert server.requests == [], "the token is not sent"


def test_without_a_token_nothing_is_asked(api: Api, account: Path) -> None:
    server, environ = api(serves(document(pod(vllm()))))
    (account / "token").unlink()
    facts = ask_api("llm", "chat-0", account, environ)
    assert "Mount the service account's token" in str(facts["error"])
    assert server.requests == []


@pytest.mark.parametrize(
    ("target", "changed"),
    [
        ("http://192.0.2.7:8000", {}),
        (TARGET, {"KUBERNETES_SERVICE_HOST": ""}),
    ],
    ids=["a target elsewhere", "outside Kubernetes"],
)
def test_the_api_is_not_asked(
    api: Api, account: Path, target: str, changed: dict[str, str]
) -> None:
    server, environ = api(serves(document(pod(vllm()))))
    reading = read_pod(target, 5.0, environ=environ | changed, account=account)
    assert reading == SourceReading("pod", 5.0)
    assert server.requests == []


def test_what_cannot_be_a_pods_name_is_not_asked_for(api: Api, account: Path) -> None:
    server, environ = api(serves(document(pod(vllm()))))
    for name in ("../../secrets/x", "a b", ""):
        named = environ | {"POD_NAME": name, "HOSTNAME": ""}
        reading = read_pod(TARGET, 5.0, environ=named, account=account)
        assert reading.notes == (NAMELESS,)
    assert server.requests == []
