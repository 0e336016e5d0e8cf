"""What an installed wheel must do with nothing but its own dependencies; standard library only.

    ENV/bin/python -I tests/installed.py WHEEL

`make test` has tried the same code from its folder. What a wheel can lack is a file, a module's
dependency or an entry point: every module is imported, every file is looked for, and each command
and page that reads files is asked once.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import kneewatch

ROOT = Path(__file__).parent.parent
KNEEWATCH = str(Path(sys.executable).with_name("kneewatch"))
CAPTURE = str(ROOT / "tests" / "fixtures" / "captures" / "healthy_light.jsonl.gz")
LLAMA = ("--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "h100-sxm")
COMMANDS: tuple[tuple[int, str, tuple[str, ...]], ...] = (
    (0, "kneewatch, version", ("--version",)),
    (1, "CRITICAL", ("demo",)),
    (1, '"schema"', ("demo", "--format", "json")),
    (0, "OK", ("diagnose", CAPTURE, "--window", "15s")),
    (0, '"kneewatch.diagnosis/1"', ("replay", CAPTURE, "--window", "15s", "--format", "json")),
    (0, "KV", ("size", *LLAMA)),
    (0, "listen", ("config",)),
    (0, "kneewatch", ("completion", "bash")),
    (0, "grafana", ("export", "grafana", "grafana")),
    (0, "rules", ("export", "prometheus-rules", "rules")),
    (0, "tests", ("export", "prometheus-tests", "tests")),
    (0, "dcgm", ("export", "dcgm", "dcgm")),
    (0, "report.schema.json", ("export", "json-schemas", "schemas")),
)
"""Exit status, a word of stdout, and the command."""

OPTIONAL = ("kneewatch.dashboards.grafana.", "kneewatch.agent.mcp.")
"""Modules that need more than the dependencies: those that make the dashboards, which are shipped,
and the command of an extra."""

PAGES = ("/triage", "/docs", "/openapi.json", "/metrics", "/healthz", "/api/v1/triage?format=json",
         "/docs/causes/kv_pressure", "/docs/rules/KV-EVICT",
         "/api/v1/size?model=meta-llama/Llama-3.1-8B-Instruct&gpu=h100-sxm")  # fmt: skip


def wheel_files() -> Iterator[str]:
    """The files that the wheel must have, by the packages of pyproject.toml."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in setuptools["packages"]:
        folder = ROOT.joinpath(*package.split(".")[1:])
        data = setuptools["package-data"]
        for pattern in ("*.py", *data["*"], *data.get(package, ())):
            yield from (f"kneewatch/{path.relative_to(ROOT)}" for path in folder.glob(pattern))


def check_files(wheel: str) -> None:
    """Look for every file."""
    missing = {*wheel_files()} - {*zipfile.ZipFile(wheel).namelist()}
    assert not missing, f"the wheel lacks {sorted(missing)}"


def check_imports() -> None:
    """Import every module: only those of OPTIONAL need what is no dependency."""
    for module in pkgutil.walk_packages(kneewatch.__path__, "kneewatch."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if not module.name.startswith(OPTIONAL) or str(error.name).startswith("kneewatch"):
                raise


def check_commands(folder: Path) -> None:
    """Run every command that needs no server."""
    for status, word, args in COMMANDS:
        ran = subprocess.run(
            [KNEEWATCH, *args], cwd=folder, capture_output=True, text=True, check=False
        )
        assert ran.returncode == status, (args, ran.returncode, ran.stderr)
        assert word in ran.stdout, (args, ran.stdout[:500])


def wait_until_judged(origin: str) -> None:
    """Wait for the first verdict: a daemon stopped before has nothing to report on."""
    deadline_s = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(origin + "/readyz", timeout=60).close()
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
        else:
            return


def check_daemon(folder: Path) -> None:
    """Ask a daemon for its pages and all that they link to, and report on what it has stored."""
    store = ("--store", str(folder / "kneewatch.db"))
    command = [KNEEWATCH, "run", "--demo", "--listen", "127.0.0.1:0", *store]
    with (
        (folder / "log").open("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as daemon,
    ):
        try:
            assert daemon.stdout is not None
            url = next(line for line in daemon.stdout if "/triage" in line).split()[1]
            origin = url.removesuffix("/triage")
            wait_until_judged(origin)
            pages, asked = list(PAGES), set[str]()
            while pages:
                path = pages.pop()
                asked.add(path)
                request = urllib.request.Request(origin + path, headers={"Accept": "text/html"})
                with urllib.request.urlopen(request, timeout=60) as answer:
                    text = answer.read().decode()
                assert text, path
                links = re.findall(r'(?:href|src)="(/[^"#]*)"', text)
                pages += {link.replace("&amp;", "&") for link in links} - asked - {*pages}
        finally:
            daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(60) == 0
        log.seek(0)
        assert "Traceback" not in (lines := log.read()), lines
    for name in ("report.html", "report.json", "report.md"):
        report = [KNEEWATCH, "report", *store, "--since", "1h", "--out", name]
        ran = subprocess.run(report, cwd=folder, capture_output=True, text=True, check=False)
        assert ran.returncode in (0, 1), ran.stderr
        assert (folder / name).stat().st_size > 1000, name


def main() -> None:
    """Try everything."""
    agent = importlib.import_module("kneewatch.agent")
    assert "site-packages" in str(agent.__file__)
    check_files(sys.argv[1])
    check_imports()
    with tempfile.TemporaryDirectory() as folder:
        check_commands(Path(folder))
        check_daemon(Path(folder))


if __name__ == "__main__":
    main()
