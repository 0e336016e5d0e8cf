"""What is shipped: packages, data files, and papers that say the same as the code."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from kneewatch.agent.cli import cli
from kneewatch.agent.report.schedule import LIBRARIES
from kneewatch.agent.settings.table import OPTIONS
from kneewatch.reports.json_schemas import SCHEMAS

ROOT = Path(__file__).parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PYPROJECT["tool"]["setuptools"]["packages"]
DATA = (
    "kneewatch.dashboards.generated.grafana",
    "kneewatch.docs.causes",
    "kneewatch.docs.rules",
)
"""Folders of files without code, which setuptools counts among the packages."""

NOT_OURS = {"tests", "build", "dist"}
IMPORTED_AS = {"nvidia-ml-py": "pynvml", "pyyaml": "yaml", "markdown-it-py": "markdown_it"}
"""Distributions whose module has another name."""


def folders() -> list[Path]:
    """Folders with an __init__.py, but for the tests and what is built."""
    folders = [init.parent.relative_to(ROOT) for init in ROOT.glob("[!.]*/**/__init__.py")]
    return [folder for folder in folders if folder.parts[0] not in NOT_OURS]


def test_every_package_is_listed() -> None:
    named = [".".join(("kneewatch", *folder.parts)) for folder in folders()]
    assert sorted([*named, *DATA]) == sorted(PACKAGES)
    assert sorted(PACKAGES) == PACKAGES, "in the order of the alphabet"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_can_be_imported(package: str) -> None:
    import_module(package)


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("kneewatch.reports", "size.schema.json"),
        ("kneewatch.agent", "demo.jsonl.gz"),
        ("kneewatch.collector.engines", "vllm/metrics.toml"),
        ("kneewatch.collector.names", "dcgm_metrics.toml"),
        *((package, "py.typed") for package in PACKAGES if package.count(".") == 1),
    ],
)
def test_data_is_shipped(package: str, name: str) -> None:
    assert files(package).joinpath(name).is_file()
    patterns: list[str] = PYPROJECT["tool"]["setuptools"]["package-data"]["*"]
    assert any(Path(name).match(pattern) for pattern in patterns)


def test_data_that_lies_beside_the_code_is_shipped() -> None:
    patterns: list[str] = PYPROJECT["tool"]["setuptools"]["package-data"]["*"]
    for folder in folders():
        for path in (ROOT / folder).iterdir():
            code = path.suffix in (".py", ".md", ".pyc") or path.is_dir()
            assert code or any(path.match(pattern) for pattern in patterns), path


def test_the_newest_version_is_in_the_changelog() -> None:
    headings = re.findall(r"(?m)^## (.+)$", (ROOT / "CHANGELOG.md").read_text())
    version = PYPROJECT["project"]["version"]
    assert any(heading.startswith(f"{version} (") for heading in headings[:2])


def test_every_command_is_documented() -> None:
    commands = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert cli.commands
    for command in cli.commands:
        assert f"\n## kneewatch {command}\n" in commands, command


def test_the_readme_shows_what_the_demo_prints() -> None:
    readme = (ROOT / "README.md").read_text()
    transcript = readme.split("```console\n")[1].split("   ...\n")[0]
    demo = [sys.executable, "-m", "kneewatch.agent.cli", "demo"]
    printed = subprocess.run(demo, capture_output=True, text=True, check=False).stdout
    assert transcript in printed


def test_the_readme_shows_what_a_failed_start_prints() -> None:
    transcript = (ROOT / "README.md").read_text().split("```text\n")[1].split("```")[0]
    log = str(ROOT / "tests" / "fixtures" / "start_failed.log")
    command = [sys.executable, "-m", "kneewatch.agent.cli", "diagnose", "--log", log]
    done = subprocess.run(
        [*command, "--gpu", "h100-sxm"], capture_output=True, text=True, check=False
    )
    assert transcript in done.stdout


def test_links_of_the_readme_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / link).exists(), link


def test_every_dependency_is_used() -> None:
    names = [
        re.split(r"[<>=~! ]", requirement)[0]
        for requirement in PYPROJECT["project"]["dependencies"]
    ]
    code = "\n".join(path.read_text() for folder in folders() for path in folder_code(folder))
    for name in names:
        module = IMPORTED_AS.get(name, name.replace("-", "_"))
        used = rf"(?m)^\s*(?:import|from) {module}\b|import_module\(\"{module}\"\)"
        assert re.search(used, code), name


def test_an_image_needs_everything_but_what_only_reports_need() -> None:
    path = ROOT / "packaging" / "requirements.py"
    functions = runpy.run_path(str(path))
    requirements: Callable[[dict[str, Any], str], list[str]] = functions["requirements"]
    project = PYPROJECT["project"]
    report = set(project["optional-dependencies"]["report"])
    assert report < set(project["dependencies"]), "pip install kneewatch makes reports"
    assert {re.split(r"[<>=]", line)[0] for line in report} == set(LIBRARIES)
    assert set(requirements(project, "")) == set(project["dependencies"]) - report
    more = set(requirements(project, "[report, kubernetes]"))
    assert more > set(project["dependencies"])
    assert any(line.startswith("kubernetes") for line in more)
    with pytest.raises(KeyError):
        requirements(project, "[reports]")
    lock = (path.parent / "requirements.lock").read_text()
    entries: list[str] = functions["locked"](requirements(project, "[kubernetes]"), lock)
    names = {entry.partition("==")[0] for entry in entries}
    assert {"fastapi", "starlette", "kubernetes"} < names, "also what these need in turn"
    assert not names & {"numpy", "pandas"}
    assert all("--hash=sha256:" in entry for entry in entries)
    base = re.search(r"(?m)^ARG BASE=(\S+)$", (path.parent / "Containerfile").read_text())
    assert base is not None
    assert re.fullmatch(r".+@sha256:[0-9a-f]{64}", base[1]), "a tag can be moved"


def test_a_release_has_the_rules_of_every_flavor_and_the_schemas(tmp_path: Path) -> None:
    exports = runpy.run_path(str(ROOT / "packaging" / "release.py"))["exports"]
    texts: dict[str, bytes] = exports(sys.executable, tmp_path)
    assert {Path(name).parts[0] for name in texts} == {
        *OPTIONS["flavor"]["choices"],
        "json-schemas",
    }
    assert {f"json-schemas/{name}.schema.json" for name in SCHEMAS} < texts.keys()
    assert all(texts.values())


def folder_code(folder: Path) -> list[Path]:
    """The Python files of a folder."""
    return sorted((ROOT / folder).glob("*.py"))
