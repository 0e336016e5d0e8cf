"""agent/api/examples.json: the examples of the OpenAPI document, answered by the app itself."""

from __future__ import annotations

import json
from typing import Any

from kneewatch.agent.fleet.watch import FleetMoment, FleetWatch
from kneewatch.agent.stream import EngineAcceptance
from kneewatch.diagnose.learned.acceptance import Deviation
from tests.agent.api.memory_history import reader
from tests.agent.api.serving import SICK_NAME, Asker, asking, service_of, settings_of, state_of
from tests.agent.fleet.prometheus_fleet import saw
from tests.agent.notify.factories import sick
from tests.agent.notify.posts import alert, post
from tests.diagnose.fleet.example_fleets import fleet, verdict
from tests.recordings import NO_TARGETS
from tests.reports.diagnoses import NOW_S

JSON, TEXT, MARKDOWN = "application/json", "text/plain", "text/markdown"
TRIAGE = "/api/v1/triage"
SIZE = {
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "gpu": "h100-sxm",
    "input_tokens": 1000,
    "output_tokens": 300,
    "concurrency": 32,
}
ALERT = post(alert(instance="gpu-7:8000", starts_s=NOW_S - 300))
ACCEPT = {"target": SICK_NAME, "what": ["speed"]}
ACCEPTED = EngineAcceptance(
    SICK_NAME,
    "tiny",
    "0",
    [Deviation("engine_speed_ratio", "speed", 1.0, 0.62, NOW_S - 86_400)],
)
METRICS = ("kneewatch_stage{", 'kneewatch_cause{cause="kv_pressure"', "kneewatch_recommended_")


def api_examples() -> str:
    """The examples as a part of the OpenAPI document: under its paths, with its keys."""
    state = state_of(SICK_NAME, sick())
    watch = FleetWatch("http://127.0.0.1:1", settings_of(), "")
    moment = FleetMoment.of(verdict(*fleet(3)), {}, NO_TARGETS, 30.0)
    saw(watch, moment, seen_s=NOW_S - 10, cycles=1)

    def accepted(_asked: object) -> list[EngineAcceptance]:
        return [ACCEPTED]

    with (
        asking(service_of(state, reader=reader(state), fleet=watch, accept=accepted)) as client,
        asking(service_of(names=[SICK_NAME])) as starting,
    ):
        triage = {form: client.get(TRIAGE, accept=form).text for form in (TEXT, MARKDOWN)}
        document = client.get(f"{TRIAGE}?since=-2h", accept=JSON).json()
        texts = {form: client.get("/api/v1/fleet", accept=form).text for form in (TEXT, MARKDOWN)}
        overview = client.get("/api/v1/fleet", accept=JSON).json()
        size = client.post("/api/v1/size", SIZE).json()
        size["steps"] = size["steps"][:2]
        paths: dict[str, Any] = {
            "/healthz": {"get": _answers({TEXT: client.get("/healthz").text})},
            "/probe": {"get": _answers({TEXT: client.get("/probe").text})},
            "/probe/{target}": {"get": _answers({TEXT: client.get(f"/probe/{SICK_NAME}").text})},
            "/readyz": {
                "get": _answers(
                    {JSON: client.get("/readyz").json()}, {JSON: starting.get("/readyz").json()}
                )
            },
            "/metrics": {"get": _answers({TEXT: _metrics(client)})},
            TRIAGE: {"get": _answers({**triage, JSON: document})},
            "/api/v1/fleet": {"get": _answers({**texts, JSON: overview})},
            "/api/v1/size": {
                "post": _answers({JSON: size}) | {"requestBody": _content({JSON: SIZE})}
            },
            "/api/v1/accept": {
                "post": _answers({JSON: client.post("/api/v1/accept", ACCEPT).json()})
                | {"requestBody": _content({JSON: ACCEPT})}
            },
            "/api/v1/alerts": {
                "post": _answers({JSON: client.post("/api/v1/alerts", ALERT).json()})
                | {"requestBody": _content({JSON: ALERT})}
            },
        }
    return json.dumps(paths, indent=1) + "\n"


def _metrics(client: Asker) -> str:
    lines = client.get("/metrics").text.splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith(METRICS))


def _answers(ok: dict[str, Any], unavailable: dict[str, Any] | None = None) -> dict[str, Any]:
    answers = {"200": _content(ok)}
    if unavailable is not None:
        answers["503"] = _content(unavailable)
    return {"responses": answers}


def _content(examples: dict[str, Any]) -> dict[str, Any]:
    return {"content": {kind: {"example": example} for kind, example in examples.items()}}
