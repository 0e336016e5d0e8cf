"""Asks a vLLM server for its version, models and state. I/O edge.

Only GETs that answer at once and make the model do no work; same server, credentials and TLS as the
scrape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

from kneewatch.collector.errors import CollectError
from kneewatch.collector.http.address import METRICS_PATH, parse_target
from kneewatch.collector.http.connection import FetchSettings
from kneewatch.collector.http.fetch import Fetcher
from kneewatch.diagnose.deployment.server_facts import (
    DEGREES_MAX,
    MAX_MODEL_LEN,
    MODEL_PATH,
    SERVER,
    TENSOR_PARALLEL,
    TEXT_MAX_CHARS,
    VERSION,
    SourceReading,
    Value,
    printable,
    version_of,
)
from kneewatch.diagnose.deployment.vllm_flags import LARGEST

BODY_MAX_BYTES = 512 * 1024
"""An answer of /v1/models has 1 kB for a model, one of /server_info up to 100 kB."""

TIMEOUT_MAX_S = 3.0
"""All answers come at once from a healthy server, and the next scrape must not wait for long."""

HEALTH = "/health"
MODELS_MAX = 100
OLDEST = (0, 2, 0)
"""The first version with an OpenAI-compatible server and metrics."""

Values = dict[str, Value]


def ask_server(target: str, settings: FetchSettings, now_s: float) -> SourceReading:
    """The facts that the server at `target` reports. A failed request leaves a note.

    The requests end at the first one without an answer: a server that hangs costs one timeout.
    """
    values: Values = {}
    notes: list[str] = []
    for request, (read, optional) in REQUESTS.items():
        try:
            values |= read(answer_of(target, request, settings))
        except CollectError as error:
            if not (optional and error.kind in ("not_found", "http_status", "auth")):
                hint = f"; {error.hint}" if error.kind == "auth" else ""
                notes.append(f"GET {request}: {error}{hint}")
            if error.kind in ("timeout", "refused", "dns", "tls"):
                break
        except (ValueError, RecursionError) as exc:
            notes.append(f"GET {request}: not an answer of vLLM: {printable(str(exc))}")
    return SourceReading(SERVER, now_s, values, notes=tuple(notes))


def is_healthy(target: str, settings: FetchSettings) -> bool:
    """Whether GET /health of the server at `target` has status 200."""
    try:
        answer_of(target, HEALTH, settings)
    except CollectError:
        return False
    return True


def answer_of(
    target: str,
    request: str,
    settings: FetchSettings,
    *,
    post: bytes | None = None,
    timeout_s: float = TIMEOUT_MAX_S,
) -> bytes:
    """The body of the answer to a GET, or to a POST of a JSON document, from the server that has
    the target's page.

    Raises:
        CollectError: there is none with status 200.
    """
    address = parse_target(target)
    path, _, _ = address.path.partition("?")
    prefix = path.removesuffix(METRICS_PATH) if path.endswith(METRICS_PATH) else ""
    settings = replace(
        settings,
        body_limit_bytes=min(settings.body_limit_bytes, BODY_MAX_BYTES),
        connect_timeout_s=min(settings.connect_timeout_s, TIMEOUT_MAX_S),
        read_timeout_s=min(settings.read_timeout_s, timeout_s),
    )
    url = replace(address, path=prefix + request).full_url()
    fetcher = Fetcher(url, settings, any_answer=True, post=post)
    try:
        return fetcher.get().body
    finally:
        fetcher.close()


def _object(body: bytes) -> Mapping[str, object]:
    document: object = json.loads(body)
    if not isinstance(document, dict):
        raise ValueError("no JSON object")  # noqa: TRY004 - wrong data, not a wrong type in code
    return cast("Mapping[str, object]", document)


def _version(body: bytes) -> Values:
    text = _object(body).get("version")
    version = version_of(text) if isinstance(text, str) else None
    # A build of the source without its git tags has 0.1.dev1.
    if not isinstance(text, str) or version is None or version < OLDEST:
        raise ValueError(f"{str(text)[:40]!r} is not the version of a release")
    return {VERSION: _text(text)}


def _models(body: bytes) -> Values:
    """The served names, the path of the one model behind them, and its longest context."""
    rows = _object(body).get("data")
    if not isinstance(rows, list) or not rows:
        raise ValueError("no models")
    cards = [
        cast("Mapping[str, object]", card)
        for card in cast("list[object]", rows)[:MODELS_MAX]
        if isinstance(card, dict)
    ]
    # Adapters have the model that they extend as parent.
    models = [card for card in cards if not card.get("parent")]
    values: Values = {}
    roots = {root for model in models if isinstance(root := model.get("root"), str)}
    if len(roots) == 1:
        values[MODEL_PATH] = _text(roots.pop())
    lengths = {
        length for model in models if (length := _count(model.get("max_model_len"))) is not None
    }
    if len(lengths) == 1:
        values[MAX_MODEL_LEN] = lengths.pop()
    return values


def _load(body: bytes) -> Values:
    load = _object(body).get("server_load")
    return {"server_load": load} if isinstance(load, int) and 0 <= load < LARGEST else {}


def _sleeping(body: bytes) -> Values:
    sleeping = _object(body).get("is_sleeping")
    return {"sleeping": sleeping} if isinstance(sleeping, bool) else {}


CONFIG_KEYS = {
    "tensor_parallel_size": TENSOR_PARALLEL,
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
}
"""Counts in vLLM's configuration, by its key, with the name of the fact."""


def _config(body: bytes) -> Values:
    """Counts of /server_info, which prints the configuration as text or has it as JSON."""
    config = _object(body).get("vllm_config")
    if isinstance(config, str):
        pairs = re.findall(r"\b(\w{1,40})=(\d{1,15})\b", config)
        texts: dict[str, object] = {key: int(text) for key, text in pairs}
    elif isinstance(config, dict):
        sections = cast("Mapping[str, object]", config).values()
        texts = {
            key: value
            for section in sections
            if isinstance(section, dict)
            for key, value in cast("dict[str, object]", section).items()
        }
    else:
        raise ValueError("no vllm_config")  # noqa: TRY004 - as above
    counts = {name: _count(texts.get(key)) for key, name in CONFIG_KEYS.items()}
    return {
        name: count
        for name, count in counts.items()
        if count is not None and (name != TENSOR_PARALLEL or count <= DEGREES_MAX)
    }


def _count(value: object) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 < cast("int", value) <= LARGEST else None  # type: ignore[return-value]


def _text(text: str) -> str:
    if not text.isprintable() or len(text) > TEXT_MAX_CHARS:
        raise ValueError(f"{text[:40]!r} is not a name")
    return text


Reader = Callable[[bytes], Values]

REQUESTS: Mapping[str, tuple[Reader, bool]] = {
    "/version": (_version, False),
    "/v1/models": (_models, False),
    HEALTH: (lambda _body: {"healthy": True}, False),
    "/load": (_load, True),
    "/is_sleeping": (_sleeping, True),
    "/server_info?config_format=json": (_config, True),
}
"""The path of each request, the reader of its answer, and whether a server may lack it.

/is_sleeping and /server_info exist with VLLM_SERVER_DEV_MODE=1.
"""
