"""Reads pods from the Kubernetes API, by its official client. I/O edge.

The client is an optional dependency that takes 35 MiB of memory. Target discovery imports it at its
first use. kneewatch's own pod is read by a child process (`python -m kneewatch.agent.kubernetes`),
so that the daemon does not keep the memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from kneewatch.agent.server.process import DEFAULT_PORT, is_local, shown_variables, text_of
from kneewatch.collector.errors import CollectError, SettingsError
from kneewatch.collector.http.address import parse_target
from kneewatch.diagnose.catalogue.gpu_specs import recognise
from kneewatch.diagnose.deployment.server_facts import GPU, POD, VERSION, SourceReading, printable
from kneewatch.diagnose.deployment.vllm_flags import (
    CommandLine,
    image_command,
    image_version,
    parse_command,
    process_command,
)
from kneewatch.diagnose.verdict import Value

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api


TIMEOUT_S = (3.0, 10.0)
"""Seconds to connect, and to wait for the next part of an answer."""

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Token, certificate authority and namespace of the pod's service account."""

Pod = Mapping[str, Any]
"""A pod as a JSON object of the API."""


class Cluster:
    """The Kubernetes cluster in which kneewatch runs. Requests have the rights of the pod's service
    account.

    Raises:
        SettingsError: the client is not installed, or this process is not in a pod with a service
            account token.
    """

    def __init__(self, account: Path = ACCOUNT, environ: Mapping[str, str] = os.environ) -> None:
        try:
            from kubernetes.client import ApiClient, Configuration, CoreV1Api
            from kubernetes.config import ConfigException, incluster_config
        except ModuleNotFoundError as error:
            raise SettingsError(
                "the Kubernetes client is not installed: pip install './WHEEL[kubernetes]'"
            ) from error
        configuration = Configuration()
        # No retries and no redirects: the token is for this server alone.
        configuration.retries = False
        loader = cast("Any", incluster_config).InClusterConfigLoader(
            token_filename=str(account / "token"),
            cert_filename=str(account / "ca.crt"),
            environ=environ,
        )
        try:
            loader.load_and_set(configuration)
        except ConfigException as error:
            raise SettingsError(
                f"Kubernetes API: {error} Mount the service account's token into kneewatch's pod"
            ) from error
        self._api: CoreV1Api = CoreV1Api(ApiClient(configuration))

    def pods(self, namespace: str, *, selector: str, node: str | None) -> Sequence[Pod]:
        """The pods of a namespace that match the label selector; only those on one node if `node`
        is set.

        Raises:
            CollectError: the API cannot be reached, or refuses the request.
        """
        # For resource version 0 the API server answers from its cache.
        pods = _answer(
            self._api.list_namespaced_pod,
            namespace,
            label_selector=selector,
            field_selector=f"spec.nodeName={node}" if node else "",
            resource_version="0",
        ).get("items")
        if not isinstance(pods, list):
            raise CollectError("Kubernetes API: not a list of pods", kind="truncated")
        return cast("list[Pod]", pods)

    def pod(self, namespace: str, name: str) -> Pod:
        """The object of one pod.

        Raises:
            CollectError: the API cannot be reached, or refuses the request.
        """
        return _answer(self._api.read_namespaced_pod, name, namespace)


def _answer(ask: Callable[..., Any], *names: str, **options: str) -> Mapping[str, Any]:
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        # Raw, because the client's own parsing of a pod costs more than all the rest.
        answer = ask(*names, **options, _preload_content=False, _request_timeout=TIMEOUT_S)
        document: object = json.loads(answer.data)
    except ApiException as error:
        status: int | None = cast("Any", error).status
        auth = status in (401, 403)
        raise CollectError(
            f"Kubernetes API: status {status} {cast('Any', error).reason}",
            kind="auth" if auth else "http_status",
            status=status,
        ) from error
    except (HTTPError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CollectError(f"Kubernetes API: {reason}", kind="refused") from error
    except (ValueError, RecursionError) as error:
        raise CollectError("Kubernetes API: not JSON", kind="truncated") from error
    if not isinstance(document, dict):
        raise CollectError("Kubernetes API: not an object", kind="truncated")
    return cast("dict[str, Any]", document)


def own_namespace() -> str:
    """The namespace of this pod.

    Raises:
        SettingsError: this process is not in a pod with a service account token.
    """
    try:
        return (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingsError(
            "set kubernetes.namespaces, or mount the service account's token into kneewatch's pod"
        ) from error


# --- Reads the pod that kneewatch runs in, for a server in the same pod. I/O edge -----------------


CHILD_TIMEOUT_S = 15.0
"""Maximum seconds that the child process may take. Importing the client alone takes seconds on a
busy node."""

GPU_LIMITS = ("nvidia.com/gpu", "amd.com/gpu")
GPU_PRODUCT = "nvidia.com/gpu.product"
"""The node label that NVIDIA's GPU feature discovery sets to the GPU's name."""

NAMELESS = "kneewatch's own pod name is unknown: set POD_NAME and POD_NAMESPACE (downward API)"
CLIENT_MISSING = "cannot read the pod's spec: install kneewatch[kubernetes], or set launch_file"
FORBIDDEN = "; allow kneewatch's service account to `get` `pods`, or set launch_file"

_REFERENCE = re.compile(r"\$\$|\$\(([-._a-zA-Z0-9]+)\)")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")

Json = Mapping[str, object]


def read_pod(
    target: str, now_s: float, *, environ: Mapping[str, str] = os.environ, account: Path = ACCOUNT
) -> SourceReading:
    """The facts of the container that serves the target, if the target is in kneewatch's own pod.

    Empty outside Kubernetes, and for a target in another pod. If the pod cannot be read, a note
    contains the reason.
    """
    own = own_pod(target, now_s, environ=environ, account=account)
    pod = own.values.get("pod")
    if pod is None:
        return own
    namespace, _, name = str(pod).partition("/")
    try:
        document = _asked(name, namespace, environ, account)
        return pod_reading(document, parse_target(target).port, now_s)
    except SettingsError as exc:
        return replace(own, notes=(printable(f"pod {pod}: {exc}"),))


def own_pod(
    target: str, now_s: float, *, environ: Mapping[str, str] = os.environ, account: Path = ACCOUNT
) -> SourceReading:
    """The name of kneewatch's own pod, if the target is in it. Empty outside Kubernetes, and for a
    target in another pod."""
    nothing = SourceReading(POD, now_s)
    if not environ.get("KUBERNETES_SERVICE_HOST") or not is_local(parse_target(target).host):
        return nothing
    # A pod's host name is the pod's name, unless the pod uses the node's network.
    name = environ.get("POD_NAME") or environ.get("HOSTNAME", "")
    namespace = environ.get("POD_NAMESPACE") or text_of(account / "namespace").strip()
    if not _NAME.fullmatch(name) or not _NAME.fullmatch(namespace):
        return replace(nothing, notes=(NAMELESS,))
    return replace(nothing, values={"pod": f"{namespace}/{name}"})


def pod_reading(pod: Json, port: int, now_s: float) -> SourceReading:
    """The facts of the container that serves a port, read from the pod's object."""
    spec, metadata = _object(pod.get("spec")), _object(pod.get("metadata"))
    name = f"{metadata.get('namespace')}/{metadata.get('name')}"
    container, launch = _server(spec, port)
    if launch is None:
        note = printable(f"pod {name}: no container serves vLLM on port {port}")
        return SourceReading(POD, now_s, notes=(note,))
    values: dict[str, Value] = {"pod": printable(name)}
    image = container.get("image")
    for key, text in (
        ("pod_container", container.get("name")),
        ("image", image),
        ("node", spec.get("nodeName")),
    ):
        if isinstance(text, str):
            values[key] = printable(text)
    version = image_version(image) if isinstance(image, str) else None
    if version is not None:
        values[VERSION] = version
    product = _object(spec.get("nodeSelector")).get(GPU_PRODUCT)
    gpu = recognise(product) if isinstance(product, str) else None
    if gpu is not None:
        values[GPU] = gpu.id
    limits = _object(_object(container.get("resources")).get("limits"))
    count = next((str(limits[key]) for key in GPU_LIMITS if key in limits), "")
    if count.isdecimal() and len(count) < 5:
        values["gpu_limit"] = int(count)
    values |= shown_variables(_variables(container))
    unread = "--config: the file is in the server's container; set launch_file"
    notes = (unread,) if "--config" in launch.flags else ()
    return SourceReading(POD, now_s, values, command_line=launch, notes=notes)


def _server(spec: Json, port: int) -> tuple[Json, CommandLine | None]:
    """The container that serves vLLM on a port, and its launch. ({}, None) if no container or
    several serve it."""
    served = [
        (container, launch)
        for container in _objects(spec.get("containers"))
        if (launch := _launch(container)) is not None
    ]
    there = [row for row in served if (row[1].count("--port") or DEFAULT_PORT) == port]
    return there[0] if len(there) == 1 else ({}, None)


def _launch(container: Json) -> CommandLine | None:
    """The launch of vLLM in a container's command and arguments. None if the container does not
    serve vLLM."""
    variables = _variables(container)
    command = [expanded(word, variables) for word in _words(container.get("command"))]
    arguments = [expanded(word, variables) for word in _words(container.get("args"))]
    words = [*command, *arguments]
    launch = process_command(words)
    if launch is not None or not words:
        return launch
    if len(words) >= 3 and words[1].startswith("-") and words[1].endswith("c"):
        try:
            return parse_command(words[2], origin="args")
        except SettingsError:
            return None
    return None if command else image_command(str(container.get("image") or ""), arguments)


def expanded(word: str, variables: Mapping[str, str]) -> str:
    """A word of a container's command, with `$(NAME)` replaced as Kubernetes does. `$$` becomes a
    dollar sign."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] is None else variables.get(match[1], match[0])

    return _REFERENCE.sub(value, word)


def _variables(container: Json) -> dict[str, str]:
    """The environment variables whose values are in the container's spec. Values from secrets and
    other fields are left out."""
    rows = _objects(container.get("env"))
    return {
        name: value
        for row in rows
        if isinstance(name := row.get("name"), str) and isinstance(value := row.get("value"), str)
    }


def _asked(name: str, namespace: str, environ: Mapping[str, str], account: Path) -> Json:
    """The object of a pod in the Kubernetes API, read by a child process.

    Raises:
        SettingsError: the pod cannot be read.
    """
    if find_spec("kubernetes") is None:
        raise SettingsError(CLIENT_MISSING)
    command = (sys.executable, "-P", "-m", __name__, namespace, name, str(account))
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environ),
            timeout=CHILD_TIMEOUT_S,
            check=False,
        )
        answer: object = json.loads(done.stdout)
    except (OSError, ValueError, RecursionError, subprocess.TimeoutExpired) as exc:
        raise SettingsError(f"Kubernetes API: {type(exc).__name__}") from exc
    error = _object(answer).get("error")
    if error is not None:
        raise SettingsError(str(error))
    return _object(_object(answer).get("pod"))


def ask_api(
    namespace: str, name: str, account: Path, environ: Mapping[str, str] = os.environ
) -> Json:
    """The output of the child process: `pod` with the pod's object, or `error` with the reason."""
    try:
        return {"pod": Cluster(account, environ).pod(namespace, name)}
    except CollectError as exc:
        return {"error": f"{exc}{FORBIDDEN if exc.kind == 'auth' else ''}"}
    except SettingsError as exc:
        return {"error": f"{exc}, or set launch_file"}


def _object(value: object) -> Json:
    return cast("Json", value) if isinstance(value, dict) else {}


def _objects(value: object) -> Iterator[Json]:
    rows = cast("list[object]", value) if isinstance(value, list) else []
    return (cast("Json", row) for row in rows if isinstance(row, dict))


def _words(value: object) -> Sequence[str]:
    rows = cast("list[object]", value) if isinstance(value, list) else []
    return [word for word in rows if isinstance(word, str)]


if __name__ == "__main__":
    json.dump(ask_api(sys.argv[1], sys.argv[2], Path(sys.argv[3])), sys.stdout)
