"""Refused requests: a page for a browser, JSON for everybody else."""

from __future__ import annotations

import httpx
import pytest

from kneewatch.agent.api.responses import NAMES_SHOWN
from tests.agent.api.serving import (
    SICK_NAME,
    SICK_STATE,
    WELL_STATE,
    asking,
    service_of,
    settings_of,
    state_of,
)
from tests.reports.diagnoses import HEALTHY

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
CURL = "*/*"


def is_page(refused: httpx.Response) -> bool:
    """Whether it is for people; else it is JSON with a line's end."""
    page = refused.headers["content-type"] == "text/html; charset=utf-8"
    assert page or refused.headers["content-type"] == "application/problem+json"
    assert refused.text.startswith("<!doctype html>" if page else "{")
    assert refused.text.endswith("</html>" if page else "}\n")
    return page


def test_an_unknown_target_in_a_browser_leads_to_the_known_ones() -> None:
    with asking(service_of(SICK_STATE, WELL_STATE)) as client:
        refused = client.get("/triage?target=nope", accept=BROWSER)
        assert refused.status_code == 404
        assert is_page(refused)
        assert "No such target." in refused.text
        assert f"<bdi>{SICK_NAME}</bdi>" in refused.text
        for name in ("http%3A%2F%2Fgpu-7%3A8000", "r1"):
            assert f'<a href="triage?target={name}">' in refused.text
            assert client.get(f"/triage?target={name}", accept=BROWSER).status_code == 200


def test_of_many_targets_some_are_named() -> None:
    states = [state_of(f"r{number}", HEALTHY) for number in range(NAMES_SHOWN + 3)]
    with asking(service_of(*states)) as client:
        refused = client.get("/triage?target=nope", accept=BROWSER).text
    assert refused.count("<bdi>") == NAMES_SHOWN
    assert "and 3 more." in refused


def test_a_hostile_name_is_text() -> None:
    with asking(service_of(state_of("<script>alert(1)</script>\x1b\ud800", HEALTHY))) as client:
        refused = client.get("/triage?target=nope", accept=BROWSER)
    assert is_page(refused)
    assert "<script" not in refused.text
    assert "&lt;script&gt;" in refused.text
    assert "\x1b" not in refused.text


@pytest.mark.parametrize(
    ("path", "accept", "page"),
    [
        ("/triage?target=nope", BROWSER, True),
        ("/triage?target=nope", CURL, False),
        ("/triage?target=nope", "application/json", False),
        ("/triage?target=nope", "image/png", False),
        ("/no/such/path", BROWSER, True),
        ("/no/such/path", CURL, False),
        pytest.param("/api/v1/triage/nope?format=json", BROWSER, False, id="a program's address"),
    ],
)
def test_who_gets_a_page(path: str, accept: str, page: bool) -> None:
    with asking(service_of(SICK_STATE, WELL_STATE)) as client:
        refused = client.get(path, accept=accept)
    assert refused.status_code == 404
    assert is_page(refused) is page


def test_the_pages_links_lead_to_the_root_from_any_depth() -> None:
    with asking(service_of(SICK_STATE)) as client:
        refused = client.get("/no/such/path", accept=BROWSER).text
    assert 'href="../../triage/triage.css"' in refused
    assert 'href="../../triage"' in refused
    assert "No such page: see /docs for the endpoints." in refused


def test_what_is_refused_before_it_is_routed_names_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    token = tmp_path_factory.mktemp("tokens") / "token"
    token.write_text("a-secret-that-is-long-enough\n")
    token.chmod(0o600)
    settings = settings_of(http__token_file=str(token))
    with asking(service_of(SICK_STATE, settings=settings)) as client:
        refused = client.get("/triage?target=nope", accept=BROWSER)
    assert refused.status_code == 401
    assert is_page(refused)
    assert "Authorization: Bearer TOKEN" in refused.text
    assert "`" not in refused.text
    assert "All targets" not in refused.text, "it would be refused, too"
    assert "gpu-7" not in refused.text
    assert "Basic" in refused.headers["www-authenticate"]
    assert "default-src 'none'" in refused.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("/api/v1/triage?targets=r1", "unknown parameter 'targets'; did you mean target?"),
        ("/api/v1/triage/r1?form=json", "unknown parameter 'form'; did you mean format?"),
        (
            "/api/v1/triage?at=-1m&bananas=1",
            "unknown parameter 'bananas'; valid: target, at, since, format",
        ),
        ("/readyz?strct", "unknown parameter 'strct'; did you mean strict?"),
        ("/api/v1/size?modle=x", "unknown parameter 'modle'; did you mean model?"),
    ],
)
def test_an_unknown_parameter_is_refused_with_the_name_that_was_meant(
    path: str, detail: str
) -> None:
    with asking(service_of(SICK_STATE, WELL_STATE)) as client:
        refused = client.get(path, accept=CURL)
    assert refused.status_code == 422
    assert refused.json()["detail"] == detail


@pytest.mark.parametrize("path", ["/api/v1/alerts", "/api/v1/size"])
def test_a_posted_document_has_no_parameters_beside_it(path: str) -> None:
    with asking(service_of(SICK_STATE)) as client:
        refused = client.post(f"{path}?model=x", {})
    assert refused.status_code == 422
    assert refused.json()["detail"] == "unknown parameter 'model'; there are none here"
