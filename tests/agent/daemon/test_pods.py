"""Targets from the Kubernetes API: a fake API server over TLS, pods in every state."""

from __future__ import annotations

import json
import logging
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import trustme

from kneewatch.agent.daemon import discovery
from kneewatch.agent.daemon.discovery import (
    Discovery,
    PodTargets,
    is_serving,
    page_path,
    pod_specs,
    port_number,
)
from kneewatch.agent.kubernetes import Cluster
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import CollectError, SettingsError
from tests.agent.daemon.factories import Kept, settings, watch
from tests.agent.running import bodies
from tests.agent.server.vllm_server import vllm_server
from tests.collector.servers import Start

BEGAN, LATER = "2026-03-01T10:00:00Z", "2026-03-01T10:06:40Z"
V026, V032 = "vllm/vllm-openai:v0.26.0", "vllm/vllm-openai:v0.32.0"
CHAT: dict[str, Any] = {"kubernetes__pods": "app=vllm", "kubernetes__namespaces": ("chat",)}


def pod(
    name: str = "llama-0",
    *,
    ready: bool = True,
    changed: str = LATER,
    restarts: int = 0,
    phase: str = "Running",
    ip: str | None = "10.0.0.7",
    ending: bool = False,
    **container: object,
) -> dict[str, Any]:
    """A pod as the API answers it; `container` are keys of the one that serves."""
    answer = "True" if ready else "False"
    conditions = [
        {"type": "Initialized", "status": "True", "lastTransitionTime": BEGAN},
        {"type": "Ready", "status": answer, "lastTransitionTime": changed},
    ]
    return {
        "metadata": {
            "name": name,
            "namespace": "chat",
            **({"deletionTimestamp": LATER} if ending else {}),
        },
        "spec": {
            "nodeName": "gpu-7",
            "containers": [
                {"name": "istio-proxy"},
                {
                    "name": "vllm",
                    "ports": [{"name": "http", "containerPort": 8080}],
                    **container,
                },
            ],
        },
        "status": {
            "phase": phase,
            **({"podIP": ip} if ip else {}),
            "conditions": conditions,
            "containerStatuses": [{"name": "vllm", "ready": ready, "restartCount": restarts}],
        },
    }


@pytest.mark.parametrize(
    ("state", "serving"),
    [
        pytest.param({}, True, id="ready"),
        pytest.param({"ready": False, "changed": BEGAN}, False, id="loads its model"),
        pytest.param({"ready": False}, True, id="was ready, and hangs"),
        pytest.param({"ready": False, "changed": BEGAN, "restarts": 1}, True, id="crashes at load"),
        pytest.param({"restarts": 3}, True, id="ready again"),
        pytest.param({"ending": True}, False, id="is deleted"),
        pytest.param({"phase": "Pending", "ip": None}, False, id="waits for a GPU"),
        pytest.param({"phase": "Failed"}, False, id="evicted"),
    ],
)
def test_a_pod_that_starts_or_ends_is_no_outage(state: dict[str, Any], serving: bool) -> None:
    assert is_serving(pod(**state)) is serving


def test_a_pod_without_status_is_not_serving() -> None:
    assert not is_serving({"metadata": {"name": "new"}, "spec": {}})
    assert not is_serving({"metadata": {"name": "new"}, "spec": {}, "status": None})


def test_a_port_is_a_number_or_a_name() -> None:
    assert port_number(pod(), "8000") == 8000
    assert port_number(pod(), "http") == 8080
    assert port_number(pod(), "metrics") is None


def test_a_page_is_where_the_pod_or_its_engine_has_it() -> None:
    assert page_path(pod(image="vllm/vllm-openai:v0.32.0")) == ""
    other = pod(image="nvcr.io/nvidia/tensorrt-llm/release:1.2")
    assert page_path(other) == "/prometheus/metrics"
    other["metadata"]["annotations"] = {"prometheus.io/path": "engine/metrics"}
    assert page_path(other) == "/engine/metrics"
    targets = PodTargets(settings(**CHAT), lambda: Api(chat=[other]))
    assert found(targets) == [("chat/llama-0", "http://10.0.0.7:8000/engine/metrics")]
    assert pod_specs(targets.servers(), settings(**CHAT))[0].address.endswith(
        ":8000/engine/metrics"
    )


class Api(Cluster):
    """Pods by namespace; what is asked for is kept. `error` is raised in place of an answer."""

    def __init__(self, **pods: Sequence[Mapping[str, Any]]) -> None:
        self.by_namespace: Mapping[str, Sequence[Mapping[str, Any]]] = pods
        self.asked: list[tuple[str, str, str | None]] = []
        self.error: CollectError | None = None

    def pods(
        self, namespace: str, *, selector: str, node: str | None
    ) -> Sequence[Mapping[str, Any]]:
        self.asked.append((namespace, selector, node))
        if self.error:
            raise self.error
        return self.by_namespace[namespace]


def found(targets: PodTargets) -> list[tuple[str, str]]:
    """Names and URLs after one more reading."""
    targets.cycle()
    return [(server.name, server.url) for server in targets.servers()]


def test_pods_of_this_node_are_targets() -> None:
    api = Api(chat=[pod(), pod("llama-1", ready=False, changed=BEGAN)], search=[pod(ip="fd00::7")])
    values: dict[str, Any] = {
        **CHAT,
        "kubernetes__namespaces": ("chat", "search"),
        "kubernetes__node": "gpu-7",
    }
    targets = PodTargets(settings(**values), lambda: api)
    assert found(targets) == [
        ("chat/llama-0", "http://10.0.0.7:8000"),
        ("search/llama-0", "http://[fd00::7]:8000"),
    ]
    assert api.asked == [("chat", "app=vllm", "gpu-7"), ("search", "app=vllm", "gpu-7")]
    assert targets.servers()[0].labels == {"namespace": "chat", "pod": "llama-0", "node": "gpu-7"}


def test_pods_stay_while_the_api_fails_and_that_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    api = Api(chat=[pod()])
    targets = PodTargets(settings(**CHAT), lambda: api)
    before = found(targets)
    api.error = CollectError("Kubernetes API: status 403 Forbidden", kind="auth")
    assert found(targets) == found(targets) == before
    assert caplog.text.count("keeping the previous targets namespace=chat") == 1
    assert "status 403 Forbidden; a Role must allow its service account `list`" in caplog.text
    api.error, api.by_namespace = None, {"chat": []}
    assert found(targets) == []
    assert "can be listed again namespace=chat" in caplog.text


def test_a_pod_without_the_named_port_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    api = Api(chat=[pod()])
    targets = PodTargets(settings(**CHAT, kubernetes__port="metrics"), lambda: api)
    assert found(targets) == found(targets) == []
    assert caplog.text.count("no container has the port pod=chat/llama-0 port=metrics") == 1


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    """The API that a Discovery asks."""
    api = Api(chat=[pod()])

    def listing(values: Settings) -> PodTargets:
        return PodTargets(values, lambda: api)

    monkeypatch.setattr(discovery, "PodTargets", listing)
    return api


def names(targets: Discovery) -> list[str]:
    """Names after a reading, and once the main loop has looked."""
    assert targets.pods is not None
    targets.pods.cycle()
    targets.poll()
    return [spec.name for spec in targets.specs()]


def test_pods_come_and_go_beside_other_targets(api: Api) -> None:
    targets = Discovery(["a:1"], settings(**CHAT))
    assert not targets.poll()
    assert names(targets) == ["http://a:1", "chat/llama-0"]
    assert not targets.poll()
    api.by_namespace = {"chat": [pod(ip="10.0.0.8"), pod("llama-1")]}
    assert names(targets) == ["http://a:1", "chat/llama-0", "chat/llama-1"]
    assert targets.specs()[1].address == "http://10.0.0.8:8000", "the pod that replaced the first"
    api.by_namespace = {"chat": []}
    assert names(targets) == ["http://a:1"]


def test_pods_alone_are_enough_and_get_reloaded_settings(api: Api) -> None:
    targets = Discovery([], settings(**CHAT))
    assert names(targets) == ["chat/llama-0"]
    again = targets.reloaded(settings(**CHAT, window_s=30.0))
    assert [spec.settings["window_s"] for spec in again.specs()] == [30.0]
    assert again.pods is targets.pods, "the scheduler's job goes on"


def test_a_taken_name_leaves_the_pods_as_they_were(
    api: Api, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "kneewatch.toml"
    file.write_text('[[targets]]\nurl = "http://a:1"\nname = "chat/llama-1"\n')
    targets = Discovery([], settings(file, **CHAT))
    assert names(targets) == ["chat/llama-1", "chat/llama-0"]
    api.by_namespace = {"chat": [pod("llama-1")]}
    assert names(targets) == ["chat/llama-1", "chat/llama-0"]
    assert "two targets are called 'chat/llama-1'" in caplog.text


def test_a_new_spec_of_a_pod_is_taken_over_and_its_new_status_is_not_a_change(api: Api) -> None:
    targets = Discovery([], settings(**CHAT))
    assert names(targets) == ["chat/llama-0"]
    for image, restarts, changed in ((V026, 0, True), (V026, 1, False), (V032, 1, True)):
        api.by_namespace = {"chat": [pod(image=image, args=["m"], restarts=restarts)]}
        assert targets.pods is not None
        targets.pods.cycle()
        assert targets.poll() is changed
    (spec,) = targets.specs()
    assert spec.pod is not None
    assert spec.pod.values["vllm_version"] == "0.32.0"


# --- The official client, against a server --------------------------------------------------------


class ApiServer:
    """An API server that knows one token; `answers` are statuses and bodies, the last one stays."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / "ca.crt"))
        (folder / "token").write_text("secret")
        self.answers: list[tuple[int, bytes]] = [(200, json.dumps({"items": [pod()]}).encode())]
        self.requests: list[tuple[str, str | None]] = []
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.requests.append((self.path, self.headers["Authorization"]))
                status, body = served.answers[0]
                if len(served.answers) > 1:
                    served.answers.pop(0)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing is printed."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.tempfile() as pem:
            tls.load_cert_chain(pem)
        self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.environ = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self.server.server_port),
        }
        self.cluster = Cluster(folder, self.environ)


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def api_server(tmp_path: Path) -> Iterator[ApiServer]:
    fake = ApiServer(tmp_path)
    thread = threading.Thread(target=fake.server.serve_forever, args=(0.01,))
    thread.start()
    yield fake
    fake.server.shutdown()
    thread.join()
    fake.server.server_close()


def test_the_api_is_asked_for_the_pods_of_one_node(api_server: ApiServer) -> None:
    assert list(api_server.cluster.pods("chat", selector="app=vllm", node="gpu-7")) == [pod()]
    ((path, authorization),) = api_server.requests
    assert urlsplit(path).path == "/api/v1/namespaces/chat/pods"
    assert parse_qs(urlsplit(path).query) == {
        "labelSelector": ["app=vllm"],
        "fieldSelector": ["spec.nodeName=gpu-7"],
        "resourceVersion": ["0"],
    }
    assert authorization == "bearer secret"


def test_the_listed_specs_are_facts_of_the_targets(
    api_server: ApiServer, serving: Start, kept: Kept
) -> None:
    vllm = serving(vllm_server(bodies("healthy_light", 10, 30), {}))
    port = str(vllm.port)
    arguments = ["--model", "meta-llama/Llama-3.1-8B-Instruct", "--max-num-seqs", "64"]
    values: dict[str, Any] = {**CHAT, "kubernetes__port": port, "server__probe": True}

    def listed(image: str) -> TargetSpec:
        answer = pod(ip="127.0.0.1", image=image, args=[*arguments, "--port", port])
        api_server.answers = [(200, json.dumps({"items": [answer]}).encode())]
        targets.cycle()
        (spec,) = pod_specs(targets.servers(), settings(**values))
        return spec

    def facts() -> dict[str, tuple[object, str]]:
        for _ in range(2):  # a cycle reads the facts after its diagnosis
            target_watch.cycle()
        (diagnosis,) = kept.states[-1].diagnoses
        assert diagnosis.server is not None
        assert all(fact.age_s is not None for fact in diagnosis.server.facts)
        return {fact.name: (fact.value, fact.source) for fact in diagnosis.server.facts}

    targets = PodTargets(settings(**values), lambda: api_server.cluster)
    target_watch = watch(listed(V026), kept)
    first = facts()
    assert first["pod"] == ("chat/llama-0", "pod")
    assert first["model"] == (arguments[1], "pod")
    assert first["max_num_seqs"] == (64, "pod")
    assert first["vllm_version"] == ("0.26.0", "pod")
    target_watch.adopt(listed(V032))
    assert facts()["vllm_version"] == ("0.32.0", "pod")
    target_watch.retire()
    assert not [path for path, _ in api_server.requests if "/pods/" in path], "no pod is asked for"


def test_without_a_node_all_pods_are_asked_for(api_server: ApiServer) -> None:
    api_server.cluster.pods("chat", selector="app=vllm", node=None)
    assert "fieldSelector=&" in api_server.requests[0][0] + "&"


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (403, b"{}", "auth", "Kubernetes API: status 403"),
        (500, b"{}", "http_status", "Kubernetes API: status 500"),
        (200, b"[1, 2]", "truncated", "Kubernetes API: not an object"),
        (200, b"{}", "truncated", "Kubernetes API: not a list of pods"),
        (200, b'{"items": [', "truncated", "Kubernetes API: not JSON"),
    ],
)
def test_what_the_api_refuses(
    api_server: ApiServer, status: int, body: bytes, kind: str, text: str
) -> None:
    api_server.answers = [(status, body)]
    with pytest.raises(CollectError, match=text) as caught:
        api_server.cluster.pods("chat", selector="app=vllm", node=None)
    assert caught.value.kind == kind
    assert len(api_server.requests) == 1, "not asked again at once"


def test_an_api_that_is_gone(api_server: ApiServer, tmp_path: Path) -> None:
    environ = {**api_server.environ, "KUBERNETES_SERVICE_PORT": "1"}
    with pytest.raises(CollectError, match="Kubernetes API: ") as caught:
        Cluster(tmp_path, environ).pods("chat", selector="app=vllm", node=None)
    assert caught.value.kind == "refused"


def test_outside_of_a_pod_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"Mount the service account's token"):
        Cluster(tmp_path, {})
    with pytest.raises(SettingsError, match=r"set kubernetes\.namespaces"):
        PodTargets(settings(kubernetes__pods="app=vllm"), lambda: Api())
