"""The pages about causes and rules, served by the daemon, and the links to them."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

import pytest

from kneewatch.agent.api import docs
from kneewatch.diagnose.doc_links import cause_page, rule_page
from tests.agent.api.serving import SICK_NAME, SICK_STATE, asking, service_of, settings_of
from tests.agent.api.test_access import READER, token_file
from tests.reference_pages import ROOT

PAGES = sorted(
    path.relative_to(ROOT / "docs").with_suffix("").as_posix()
    for path in (
        *(ROOT / "docs" / "causes").glob("*.md"),
        *(ROOT / "docs" / "rules").glob("*.md"),
        ROOT / "docs" / "glossary.md",
    )
)


def page_of(path: str) -> str | None:
    """The Markdown that is served at /docs/`path`."""
    folder, _, name = path.rpartition("/")
    return docs.source(folder, name)


@pytest.mark.parametrize("path", PAGES)
def test_every_link_of_a_page_leads_to_a_page(path: str) -> None:
    source = page_of(path)
    assert source is not None
    html = docs.rendered(source, up="../" if "/" in path else "")
    assert "<script" not in html
    assert "style=" not in html
    assert "generated:" not in html
    for link in re.findall(r'href="([^":#]+)["#]', html):
        parts: list[str] = []
        for part in (PurePosixPath(path).parent / link).parts:
            parts = parts[:-1] if part == ".." and parts else [*parts, part]
        there = "/".join(parts)
        assert there in ("../triage", "reference.css") or page_of(there) is not None, link


@pytest.mark.parametrize("name", ["no_such", "../index", "a/b", ".hidden", "", "kv_pressure.md"])
def test_no_other_file_is_served(name: str) -> None:
    assert docs.source("causes", name) is None
    assert docs.source("how-to", "index") is None
    assert docs.source("..", "README") is None


def test_markup_in_a_page_is_text() -> None:
    html = docs.rendered("# a <b>\n\n<script>alert(1)</script>\n", up="")
    assert "<title>a &lt;b&gt;</title>" in html
    assert "<script" not in html


def test_a_link_needs_a_base_and_a_page() -> None:
    assert cause_page("https://x/docs", "kv_pressure") == "https://x/docs/causes/kv_pressure"
    assert cause_page("https://x/docs", "of_another_version") == ""
    assert cause_page("", "kv_pressure") == ""
    assert rule_page("docs", "KV-FULL") == "docs/rules/KV-FULL"
    assert rule_page("", "KV-FULL") == ""


def test_a_browser_gets_html_and_curl_the_markdown() -> None:
    with asking(service_of(SICK_STATE)) as client:
        page = client.get("/docs/causes/kv_pressure", accept="text/html")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "<h2>Stop-gap now</h2>" in page.text
        assert '<a href="../rules/KV-EVICT">' in page.text
        assert page.text.count("<details><summary>") == page.text.count("</details>") == 1
        assert "## Stop-gap now" in client.get("/docs/causes/kv_pressure").text
        assert "<h1>Glossary</h1>" in client.get("/docs/glossary", accept="text/html").text
        reference = client.get("/docs", accept="text/html").text
        assert "<code>Authorization: Bearer TOKEN</code>" in reference
        assert "`" not in re.sub(r"<pre>.*?</pre>", "", reference, flags=re.DOTALL)
        assert client.get("/docs/causes/no_such").status_code == 404
        assert client.get("/docs/how-to/index").status_code == 404


@pytest.mark.parametrize(
    ("path", "there"),
    [
        ("/docs/", "../docs"),
        ("/docs/causes", "causes/index"),
        ("/docs/causes/", "index"),
        ("/docs/rules", "rules/index"),
    ],
)
def test_a_short_path_leads_to_its_page(path: str, there: str) -> None:
    with asking(service_of(SICK_STATE)) as client:
        answer = client.get(path)
        assert (answer.status_code, answer.headers["location"]) == (307, there)


def test_an_alerts_link_opens_without_a_token(tmp_path: Path) -> None:
    settings = settings_of(http__token_file=str(token_file(tmp_path / "read", READER)))
    with asking(service_of(SICK_STATE, settings=settings)) as client:
        for path in ("rules/KV-EVICT", "causes/kv_pressure", "glossary", "reference.css"):
            assert client.get(f"/docs/{path}", accept="text/html").status_code == 200, path
        refused = client.get("/triage", accept="text/html")
        assert refused.status_code == 401
        assert 'href="triage/triage.css"' in refused.text
        assert client.get("/triage/triage.css").status_code == 200
        for path in ("/docs", "/docs/causes/../../triage", "/docs/glossary/x"):
            assert client.get(path, accept="text/html").status_code in (401, 404), path


@pytest.mark.parametrize(
    ("docs_url", "page", "api"),
    [(None, "docs", "/docs"), ("https://wiki/kneewatch/", *["https://wiki/kneewatch"] * 2)],
)
def test_every_verdict_links_to_its_cause(docs_url: str | None, page: str, api: str) -> None:
    flags = {} if docs_url is None else {"docs_url": docs_url}
    with asking(service_of(SICK_STATE, settings=settings_of(**flags))) as client:
        targets = client.get("/api/v1/triage?format=json").json()["targets"]
        causes = targets[0]["causes"]
        assert [cause["docs"] for cause in causes] == [
            f"{api}/causes/{cause['id']}" for cause in causes
        ]
        assert f"docs: {api}/causes/{causes[0]['id']}" in client.get("/api/v1/triage").text
        html = client.get(f"/triage?target={SICK_NAME}", accept="text/html").text
        assert html.count(f'href="{page}/causes/{causes[0]["id"]}"') == 2
