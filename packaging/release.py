"""`make release`: builds wheel and sdist, checks that a second build gives the same bytes, and
writes checksums, an SBOM, release notes, the Kubernetes files, the Helm chart, and what the wheel
generates: rules and JSON schemas.

Needs the tools of the dependency group `release`. All files in the archives have the time of the
last commit, so that everyone who builds from this commit gets the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUT = ROOT / "dist"
NOTES = "RELEASE_NOTES.md"
KUBERNETES = ("packaging/kubernetes", "dashboards/generated/grafana")
"""The Kustomize files and what they refer to."""

BASE = "packaging/kubernetes/"
OTHER_ENGINES = ("sglang", "tensorrt-llm", "llama.cpp")
CHART = {
    "packaging/helm": "",
    "dashboards/generated/grafana": "grafana",
    **{f"{BASE}{part}": part for part in ("fleet", "service-monitor", "pod-monitor", "rules")},
    **{f"{BASE}rules-{engine}": f"rules-{engine}" for engine in OTHER_ENGINES},
}
"""The Helm chart: folders of the repository, and where the chart has them. Its template reads the
objects of the Kustomize base."""


def main() -> None:
    """Write the files of a release to dist/."""
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    epoch_s = int(output("git", "log", "-1", "--format=%ct"))
    notes = release_notes((ROOT / "CHANGELOG.md").read_text(), version)
    if output("git", "status", "--porcelain", "--untracked-files=no").strip():
        sys.exit("release: the working tree differs from its commit")
    OUT.mkdir(exist_ok=True)
    for old in OUT.iterdir():
        old.unlink()
    first, second = build(epoch_s), build(epoch_s)
    for name in first.keys() | second.keys():
        if first.get(name) != second.get(name):
            sys.exit(f"release: two builds of {name} differ")
    for name, content in first.items():
        (OUT / name).write_bytes(content)
    (wheel,) = OUT.glob("*.whl")
    with tempfile.TemporaryDirectory() as folder:
        python = installed(wheel, Path(folder) / "env")
        write_sbom(python, OUT / f"kneewatch-{version}.cdx.json")
        generated = tarred(exports(python, Path(folder) / "generated"), epoch_s)
        (OUT / f"kneewatch-{version}-generated.tar.gz").write_bytes(generated)
    kubernetes = tarred(checked_in(*KUBERNETES), epoch_s)
    (OUT / f"kneewatch-{version}-kubernetes.tar.gz").write_bytes(kubernetes)
    chart()
    (OUT / NOTES).write_text(notes)
    write_sums(OUT, os.environ.get("SIGNING_KEY"))
    for file in files():
        print(f"{file.stat().st_size:>10,} {file.relative_to(ROOT)}")


def write_sums(folder: Path, key: str | None) -> None:
    """Write the checksums of a folder's files, and with an SSH key their signature."""
    sums = folder / "SHA256SUMS"
    files = sorted(folder.iterdir())
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    sums.write_text("".join(lines))
    if key:
        sign = ["ssh-keygen", "-q", "-Y", "sign", "-n", "file", "-f", key, sums]
        subprocess.run(sign, check=True)


def checked_in(*folders: str) -> dict[str, bytes]:
    """The files of folders in the repository, by path."""
    paths = output("git", "ls-files", *folders).splitlines()
    return {path: (ROOT / path).read_bytes() for path in paths}


def chart_files() -> dict[str, bytes]:
    """The files of the Helm chart, by path."""
    return {
        f"kneewatch/{place}{path.removeprefix(folder)}".replace("//", "/"): content
        for folder, place in CHART.items()
        for path, content in checked_in(folder).items()
        if not path.endswith("/kustomization.yaml")
    }


def files() -> list[Path]:
    """The files in dist/ so far, sorted by name."""
    return sorted(OUT.iterdir())


def output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def build(epoch_s: int) -> dict[str, bytes]:
    """The contents of sdist and wheel by file name. They are built from a checkout of the last
    commit.

    The wheel is built from the sdist, so the build fails if the sdist is incomplete.
    """
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch_s)}
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "source", Path(folder) / "built"
        archive = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(source, filter="data")
        subprocess.run(
            [sys.executable, "-m", "build", "--outdir", str(built), str(source)],
            env=environ, check=True, capture_output=True,
        )  # fmt: skip
        return {
            file.name: repacked(file.read_bytes(), epoch_s)
            if file.name.endswith(".tar.gz")
            else file.read_bytes()
            for file in built.iterdir()
        }


def repacked(sdist: bytes, epoch_s: int) -> bytes:
    """An sdist with its members sorted, without owners, and all with the same time. setuptools
    itself would write the time of the build."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(sdist)) as before,
        zipped_tar(packed, epoch_s) as after,
    ):
        for member in sorted(before.getmembers(), key=lambda member: member.name):
            member.mtime, member.pax_headers = epoch_s, {}
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            after.addfile(member, before.extractfile(member) if member.isfile() else None)
    return packed.getvalue()


@contextmanager
def zipped_tar(packed: io.BytesIO, epoch_s: int) -> Generator[tarfile.TarFile]:
    """A compressed tar to write to; the same members give the same bytes."""
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=epoch_s) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        yield tar


def tarred(texts: Mapping[str, bytes], epoch_s: int) -> bytes:
    """Files by path as a compressed tar."""
    packed = io.BytesIO()
    with zipped_tar(packed, epoch_s) as tar:
        for name, content in sorted(texts.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), epoch_s
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def installed(wheel: Path, folder: Path) -> str:
    """The Python of a new environment that contains the wheel and its dependencies only."""
    venv.create(folder, with_pip=True)
    python = f"{folder}/bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "pip"], check=True)
    return python


def exports(python: str, folder: Path) -> dict[str, bytes]:
    """What the installed kneewatch generates, by path: the rules of every flavor, and the JSON
    schemas. The repository has one flavor of the rules."""
    listing = "from kneewatch.dashboards.prometheus.rule_files import Flavor; print(*Flavor)"
    flavors = subprocess.run(
        [python, "-Ic", listing], capture_output=True, text=True, check=True
    ).stdout.split()
    kinds = [("prometheus-rules", flavor, ("--flavor", flavor)) for flavor in flavors]
    for kind, name, flags in (*kinds, ("json-schemas", "json-schemas", ())):
        subprocess.run(
            [python, "-Im", "kneewatch.agent.cli", "export", kind, str(folder / name), *flags],
            check=True, capture_output=True,
        )  # fmt: skip
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def write_sbom(python: str, file: Path) -> None:
    """Write the CycloneDX document of an environment."""
    subprocess.run(
        [sys.executable, "-m", "cyclonedx_py", "environment", python, "--output-reproducible",
         "--pyproject", str(ROOT / "pyproject.toml"), "--output-file", str(file)],
        check=True, capture_output=True,
    )  # fmt: skip


def release_notes(changelog: str, version: str) -> str:
    """The section of the changelog about a version. If there is none, the section about unreleased
    changes."""
    parts = re.split(r"(?m)^## ", changelog)[1:]
    by_heading = {
        part.partition("\n")[0].strip(): part.partition("\n")[2].strip() for part in parts
    }
    for heading, text in by_heading.items():
        if heading.partition(" ")[0] == version:
            return f"# kneewatch {version}\n\n{text}\n"
    if "Unreleased" not in by_heading:
        raise ValueError(f"the changelog has neither {version} nor Unreleased")
    return f"# kneewatch {version}, not released\n\n{by_heading['Unreleased']}\n"


def chart() -> None:
    """Write the Helm chart to dist/."""
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    packed = tarred(chart_files(), int(output("git", "log", "-1", "--format=%ct")))
    OUT.mkdir(exist_ok=True)
    (OUT / f"kneewatch-chart-{version}.tgz").write_bytes(packed)


if __name__ == "__main__":
    chart() if sys.argv[1:] == ["chart"] else main()
