"""`make release`: what it writes without a build."""

from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import tarfile
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def release() -> ModuleType:
    """packaging/release.py, which is in no package."""
    spec = spec_from_file_location("release", ROOT / "packaging" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sdist(*names: str, mtime_s: int, owner: str) -> bytes:
    """An archive as setuptools writes it: by whom, when, and in any order."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=mtime_s) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uname = len(name), mtime_s + 0.5, owner
            tar.addfile(member, io.BytesIO(name.encode()))
    return packed.getvalue()


def test_sdists_of_different_builds_are_alike(release: ModuleType) -> None:
    first = release.repacked(sdist("a", "b", mtime_s=1000, owner="ci"), 500)
    second = release.repacked(sdist("b", "a", mtime_s=2000, owner="me"), 500)
    assert first == second
    assert first != release.repacked(sdist("a", "c", mtime_s=1000, owner="ci"), 500)
    with tarfile.open(fileobj=io.BytesIO(first)) as tar:
        assert [(member.name, member.mtime, member.uname) for member in tar] == [
            ("a", 500, ""),
            ("b", 500, ""),
        ]
        content = tar.extractfile("a")
        assert content is not None
        assert content.read() == b"a"


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen signs")
def test_checksums_are_signed_where_a_key_is_given(release: ModuleType, tmp_path: Path) -> None:
    folder, key = tmp_path / "dist", tmp_path / "key"
    folder.mkdir()
    (folder / "wheel").write_text("content")
    release.write_sums(folder, None)
    assert not (folder / "SHA256SUMS.sig").exists()
    make_key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
    subprocess.run(make_key, check=True)
    (folder / "SHA256SUMS").unlink()
    release.write_sums(folder, str(key))
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    signature = str(folder / "SHA256SUMS.sig")
    check = ["ssh-keygen", "-Y", "check-novalidate", "-n", "file", "-s", signature]
    sums = (folder / "SHA256SUMS").read_bytes()
    assert subprocess.run(check, input=sums, capture_output=True, check=False).returncode == 0
    forged = subprocess.run(check, input=sums + b"x", capture_output=True, check=False)
    assert forged.returncode != 0


def test_notes_are_those_of_the_version(release: ModuleType) -> None:
    changelog = "# Changelog\n\n## Unreleased\n\n- new\n\n## 1.2.0 (Nov)\n\n- old\n\n## 1.1.0\n"
    assert release.release_notes(changelog, "1.2.0") == "# kneewatch 1.2.0\n\n- old\n"
    assert release.release_notes(changelog, "2.0.0") == "# kneewatch 2.0.0, not released\n\n- new\n"
    with pytest.raises(ValueError, match=r"3\.0\.0"):
        release.release_notes("## 1.0.0\n", "3.0.0")


def test_the_changelog_has_notes_for_this_version(release: ModuleType) -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    notes = release.release_notes(changelog, version)
    assert notes.startswith(f"# kneewatch {version}\n")
    assert "### Added" in notes
    longest = max(section.count("\n") for section in changelog.split("\n## "))
    assert longest <= 60, "notes are one screen: single changes are in git, facts in docs"


def test_archives_of_the_same_files_are_alike(release: ModuleType) -> None:
    packed = release.tarred({"b/c": b"x", "a": b"y"}, 500)
    assert packed == release.tarred({"a": b"y", "b/c": b"x"}, 500)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert [(member.name, member.mtime) for member in tar] == [("a", 500), ("b/c", 500)]


def test_the_kubernetes_archive_stands_alone(release: ModuleType, tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    packed = release.tarred(release.checked_in(*release.KUBERNETES), 500)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(tmp_path, filter="data")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    example = "packaging/kubernetes/example"
    here, there = (
        subprocess.run(
            [kubectl, "kustomize", str(folder / example)], capture_output=True, check=True
        ).stdout
        for folder in (ROOT, tmp_path)
    )
    assert here == there
    assert b"kind: ConfigMap" in here
