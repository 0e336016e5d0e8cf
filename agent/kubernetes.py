"""The Kubernetes API, by its official client, which is an extra. I/O edge.

The client is imported when it is first used: it takes 35 MiB of memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from kneewatch.collector.errors import CollectError, SettingsError

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api

TIMEOUT_S = (3.0, 10.0)
"""For connecting, and between two parts of an answer."""

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Token, certificate authority and namespace of the pod's service account."""

Pod = Mapping[str, Any]
"""A pod as the API's JSON has it."""


class Pods(Protocol):
    """Lists pods."""

    def pods(self, namespace: str, *, selector: str, node: str | None) -> Sequence[Pod]:
        """The pods of a namespace that have the labels, on one node if `node` is set.

        Raises:
            CollectError: the API cannot be reached, or refuses.
        """
        ...


class Cluster:
    """The cluster that this pod runs in, with the rights of its service account.

    Raises:
        SettingsError: the client is not installed, or this is no pod with a service account's
            token.
    """

    def __init__(self, account: Path = ACCOUNT, environ: Mapping[str, str] = os.environ) -> None:
        try:
            from kubernetes.client import ApiClient, Configuration, CoreV1Api
            from kubernetes.config import ConfigException, incluster_config
        except ModuleNotFoundError as error:
            raise SettingsError(
                "the Kubernetes client is not installed: pip install 'kneewatch[kubernetes]'"
            ) from error
        configuration = Configuration()
        # Neither repeated nor redirected: the token is for this server alone.
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
        """The pods of a namespace that have the labels, on one node if `node` is set.

        Raises:
            CollectError: the API cannot be reached, or refuses.
        """
        # Version 0 is answered from the API server's cache.
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
        """One pod.

        Raises:
            CollectError: the API cannot be reached, or refuses.
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
        SettingsError: this is no pod with a service account's token.
    """
    try:
        return (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingsError(
            "set kubernetes.namespaces, or mount the service account's token into kneewatch's pod"
        ) from error
