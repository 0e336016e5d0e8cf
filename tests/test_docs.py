"""Each cause and each rule has a page with all its sections, and every name on it exists."""

from __future__ import annotations

import re

import pytest

from kneewatch.diagnose.ranking import BY_ID, CAUSES
from kneewatch.rules.library import RULES
from tests.generated import HEAD
from tests.house import ROOMS
from tests.reference_pages import (
    BEGIN,
    CAUSE_SECTIONS,
    END,
    ROOT,
    RULE_SECTIONS,
    SETTING_RULES,
    draft,
    filled,
    page_problems,
)

CAUSE_IDS = [record.id for record in CAUSES]
RULE_IDS = [rule.id for rule in (*RULES, *SETTING_RULES)]
PAGES = [
    *((f"docs/causes/{name}.md", CAUSE_SECTIONS) for name in CAUSE_IDS),
    *((f"docs/rules/{name}.md", RULE_SECTIONS) for name in RULE_IDS),
]


@pytest.mark.parametrize(("path", "sections"), PAGES, ids=[path for path, _ in PAGES])
def test_every_cause_and_rule_has_a_whole_page(path: str, sections: tuple[str, ...]) -> None:
    page = (ROOT / path).read_text()
    name = path.rsplit("/", 1)[1].removesuffix(".md")
    assert page.startswith(f"# {name}: ")
    assert page_problems(page, sections) == []


@pytest.mark.parametrize("name", CAUSE_IDS)
def test_a_cause_says_what_to_do_first_and_how_it_is_detected_last(name: str) -> None:
    page = (ROOT / "docs" / "causes" / f"{name}.md").read_text()
    assert re.findall(r"(?m)^## (.+)$", page) == list(CAUSE_SECTIONS)
    summary = re.sub(r"`[^`]*`", "", page.partition("\n")[2].partition("\n## ")[0])
    assert len(re.findall(r"[.!?]\s", summary)) == 1, "one sentence"
    lines = page.splitlines()
    fix = lines[:25].index("## Fix")
    assert any(line.startswith("- ") for line in lines[fix:25]), "no step of the fix"
    assert lines.index("## Meaning") < 45, "two screens before the meaning"
    assert page.rstrip().endswith(f"</details>\n{END}") or len(page.partition(BEGIN)[2]) < 1000


def test_each_concept_is_where_the_documentation_has_it_and_nowhere_else() -> None:
    page = (ROOT / "docs" / "explanation" / "source.md").read_text()
    rows = re.findall(r"(?m)^\| `(\w+)` \| .* \| `([\w/]+\.py)` \|$", page)
    assert len(rows) == 10
    texts = {str(path.relative_to(ROOT)): path.read_text()
             for room in ROOMS for path in (ROOT / room).rglob("*.py")}  # fmt: skip
    for name, module in rows:
        named = {path for path, text in texts.items() if re.search(rf"(?m)^class {name}\b", text)}
        assert named == {module}, name


def test_the_pages_stay_short() -> None:
    """Words outside of generated pages and blocks, without marks such as those of tables; raised
    only for what a reader acts on."""
    pages = {path: path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    written = [
        re.sub(f"(?s){BEGIN}.*?{END}", "", page) for page in pages.values() if HEAD not in page
    ]
    assert sum(len(re.findall(r"\S*\w\S*", page)) for page in written) <= 42_000


@pytest.mark.parametrize(("folder", "names"), [("causes", CAUSE_IDS), ("rules", RULE_IDS)])
def test_every_page_is_of_a_cause_or_rule_and_in_the_index(folder: str, names: list[str]) -> None:
    pages = {path.stem for path in (ROOT / "docs" / folder).glob("*.md")} - {"index"}
    assert pages == set(names)
    index = (ROOT / "docs" / folder / "index.md").read_text()
    assert [name for name in names if f"[{name}]({name}.md)" not in index] == []


def test_a_page_with_a_gap_is_noticed() -> None:
    page = "# x: y\n\n## Meaning\n\n`vllm:num_requests_flying` and DCGM_FI_DEV_MOOD\n"
    assert page_problems(page, ("Meaning", "Fix")) == [
        "section 'Fix' is missing",
        "no such metric: DCGM_FI_DEV_MOOD",
        "no such metric: vllm:num_requests_flying",
    ]


def test_a_cause_without_a_page_gets_a_draft_with_all_sections() -> None:
    page = filled(draft(BY_ID["client_errors"]), "block")
    assert page.startswith("# client_errors: many calls are refused as wrong\n")
    assert re.findall(r"(?m)^## (.+)$", page) == list(CAUSE_SECTIONS)
    assert page_problems(page, CAUSE_SECTIONS) == []


def test_only_the_block_is_generated() -> None:
    page = f"# x: y\n\n{BEGIN}\nold\n{END}\n\n## Fix\n"
    assert filled(page, "new") == f"# x: y\n\n{BEGIN}\nnew\n{END}\n\n## Fix\n"
    with pytest.raises(ValueError, match="no <!-- generated"):
        filled("# x: y\n", "new")
