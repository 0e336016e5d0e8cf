"""Targets from file_sd files: formats, labels, changes, files that are broken."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.daemon.discovery import FileTargets, file_specs
from kneewatch.collector.errors import KneewatchError, SettingsError
from kneewatch.collector.files import read_file
from tests.agent.daemon.factories import settings, target

GROUPS: list[dict[str, object]] = [
    {
        "targets": ["gpu-1:8000", "gpu-2:8000"],
        "labels": {
            "tier": "chat",
            "__scheme__": "https",
            "__metrics_path__": "/m",
            "__meta_x": "y",
        },
    },
    {"targets": ["http://gpu-3:8000/own", "[::1]:8000"]},
    {"targets": [], "labels": {}},
]
YAML = """
- targets: [gpu-1:8000, "gpu-2:8000"]
  labels: {tier: chat, __scheme__: https, __metrics_path__: /m, __meta_x: "y"}
- targets:
    - http://gpu-3:8000/own
    - "[::1]:8000"
- targets: []
  labels:
"""
FOUND: list[tuple[str, str, dict[str, str]]] = [
    ("https://gpu-1:8000/m", "https://gpu-1:8000/m", {"tier": "chat"}),
    ("https://gpu-2:8000/m", "https://gpu-2:8000/m", {"tier": "chat"}),
    ("http://gpu-3:8000/own", "http://gpu-3:8000/own", {}),
    ("http://[::1]:8000", "http://[::1]:8000", {}),
]


def put(file: Path, *addresses: str) -> None:
    """A file with one group; its time of change is another one for certain."""
    before = file.stat().st_mtime_ns if file.exists() else 0
    file.write_text(json.dumps([{"targets": list(addresses)}]))
    os.utime(file, ns=(before + 10**9, before + 10**9))


def names(files: FileTargets) -> list[str]:
    return [spec.name.removeprefix("http://") for spec in files.specs()]


@pytest.mark.parametrize(
    ("name", "text"), [("a.json", json.dumps(GROUPS)), ("a.yml", YAML), ("a.yaml", YAML)]
)
def test_formats(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    specs = list(file_specs(str(tmp_path / name), settings()))
    assert [(spec.name, spec.address, spec.labels) for spec in specs] == FOUND
    assert specs[0].origin == f"file_sd {tmp_path / name}: group 1"
    assert not any(spec.played for spec in specs)


WRONG = {
    ("a.json", "[{"): "not JSON: ",
    ("a.json", "[" * 100_000): "not JSON: ",
    ("a.json", "{}"): "it must be a list of groups",
    ("a.json", "[3]"): "group 1: it must be a table",
    ("a.json", '[{"targets": "a"}]'): "group 1: targets must be a list of texts",
    ("a.json", '[{"targets": [8000]}]'): "group 1: targets must be a list of texts",
    ("a.json", '[{"targets": ["a"], "label": {}}]'): "a group has no key 'label'",
    ("a.json", '[{"targets": ["a"], "labels": {"a": 1}}]'): "labels must be a table of texts",
    ("a.json", '[{"targets": ["a"], "labels": {"a-b": ""}}]'): "'a-b' is not a label name",
    ("a.json", '[{"targets": ["a b"]}]'): "not a target",
    ("a.json", '[{"targets": ["a"], "labels": {"__scheme__": "file"}}]'): "the scheme must be http",
    ("a.yml", "a: ["): "not YAML: ",
    ("a.yml", "- targets: [!!python/object/apply:os.getcwd []]"): "not YAML: ",
    ("a.yml", '- targets: [!!int ""]'): "not YAML: ",
    ("a.yml", "- targets: [!!timestamp x]"): "not YAML: ",
    ("a.yml", "- targets: [!!bool x]"): "not YAML: ",
    ("a.yml", '- targets: [!!float ""]'): "not YAML: ",
    ("a.yml", "- &a {targets: *a}"): "aliases written out",
    ("a.yml", f"- targets: [{'a,' * 100_001}]"): "more than 100,000 keys and values",
    ("a.yml", f"- targets: &a [{'a,' * 1000}]" + "\n- targets: *a" * 100): "aliases written out",
    ("a.txt", "[]"): "its name must end in .json, .yml, .yaml",
}


@pytest.mark.parametrize(("name", "text"), WRONG, ids=lambda text: text[:30])
def test_a_wrong_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SettingsError, match=f"^file_sd {tmp_path / name}: ") as caught:
        list(file_specs(str(tmp_path / name), settings()))
    assert WRONG[name, text] in str(caught.value)


@given(st.binary(max_size=200))
def test_any_bytes_give_targets_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp()
    for name in ("any.json", "any.yml"):
        (folder / name).write_bytes(data)
        with contextlib.suppress(KneewatchError):
            assert all(file_spec.name for file_spec in file_specs(str(folder / name), settings()))


def test_aliases_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text("- targets: [a]\n  labels: &l {tier: x}\n- targets: [b]\n  labels: *l\n")
    assert [dict(spec.labels) for spec in file_specs(str(file), settings())] == [{"tier": "x"}] * 2


def test_more_targets_than_a_daemon_watches_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kneewatch.agent.daemon.discovery.TARGETS_MAX", 3)
    files = FileTargets([f"{tmp_path}/*.json"], settings())
    put(tmp_path / "a.json", "a:1", "a:2")
    assert files.refresh([])
    put(tmp_path / "b.json", "b:1")
    put(tmp_path / "c.json", "c:1")
    files.refresh([])
    assert names(files) == ["a:1", "a:2", "b:1"]
    assert files.problems() == [f"file_sd {tmp_path}/c.json: more than 3 targets in all"]


def test_changes_are_followed(tmp_path: Path) -> None:
    files = FileTargets([f"{tmp_path}/*.json", f"{tmp_path}/b.json"], settings())
    assert not files.refresh([])
    put(tmp_path / "b.json", "b:1")
    assert files.refresh([])
    put(tmp_path / "a.json", "a:1", "a:2")
    assert files.refresh([])
    assert names(files) == ["a:1", "a:2", "b:1"]
    assert not files.refresh([])
    put(tmp_path / "a.json", "a:2")
    assert files.refresh([])
    assert names(files) == ["a:2", "b:1"]
    (tmp_path / "b.json").unlink()
    assert files.refresh([])
    assert names(files) == ["a:2"]


def test_a_broken_file_keeps_its_targets_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.json"
    put(file, "a:1")
    files = FileTargets([str(file)], settings())
    files.refresh([])
    with caplog.at_level(logging.ERROR):
        for later_s in (5, 6):
            file.write_text("[")
            os.utime(file, (later_s, later_s))
            assert files.refresh([])
            assert names(files) == ["a:1"]
            assert not files.refresh([])
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "keeping its previous targets" in caplog.text
    assert str(file) in caplog.text
    put(file, "a:2")
    assert files.refresh([])
    assert names(files) == ["a:2"]


def test_who_reads_the_settings_again_hears_of_what_is_still_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "targets.json"
    file.write_text("[")
    patterns = [str(tmp_path / "*.json"), str(tmp_path / "*.yml")]
    files = FileTargets(patterns, settings())
    files.refresh([])
    again = FileTargets(patterns, settings(), files)
    again.refresh([])
    missing = f"no file matches yet pattern={tmp_path}/*.yml"
    said = [record.getMessage() for record in caplog.records]
    assert [missing in text for text in said].count(True) == 2
    assert ["not JSON" in text for text in said].count(True) == 2


def test_a_name_that_is_taken_breaks_the_later_file_until_it_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path / "a.json", "x:1")
    put(tmp_path / "b.json", "x:1", "y:1")
    files = FileTargets([f"{tmp_path}/*.json"], settings())
    files.refresh([])
    assert names(files) == ["x:1"]
    assert f"file_sd {tmp_path}/a.json: group 1 and file_sd {tmp_path}/b.json" in caplog.text
    put(tmp_path / "a.json", "z:1")
    files.refresh([])
    assert names(files) == ["z:1", "x:1", "y:1"]


def test_a_name_that_an_argument_has_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path / "a.json", "x:1")
    files = FileTargets([f"{tmp_path}/*.json"], settings())
    files.refresh([target("x:1")])
    assert files.specs() == []
    assert "argument 1 and file_sd" in caplog.text


def test_what_a_broken_file_keeps_makes_room_for_an_argument(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    put(file, "x:1", "y:1")
    first = FileTargets([str(file)], settings())
    first.refresh([])
    file.write_text("[")
    second = FileTargets([str(file)], settings(), first)
    second.refresh([target("x:1")])
    assert names(second) == ["y:1"]


def test_other_settings_read_the_files_again(tmp_path: Path) -> None:
    put(tmp_path / "a.json", "a:1")
    (tmp_path / "b.json").write_text("[")
    first = FileTargets([f"{tmp_path}/*.json"], settings())
    first.refresh([])
    other = settings(window_s=30.0)
    (tmp_path / "a.json").write_text("[")
    second = FileTargets([f"{tmp_path}/*.json"], other, first)
    assert second.refresh([])
    assert names(second) == ["a:1"], "what it was before it broke"
    put(tmp_path / "a.json", "a:1")
    second.refresh([])
    assert [spec.settings["window_s"] for spec in second.specs()] == [30.0]
    third = FileTargets([f"{tmp_path}/c.json"], other, second)
    third.refresh([])
    assert third.specs() == []


def test_a_folder_that_cannot_be_looked_into_keeps_its_targets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, aside = tmp_path / "targets", tmp_path / "aside"
    folder.mkdir()
    put(folder / "a.json", "a:1")
    files = FileTargets([f"{folder}/*.json"], settings())
    files.refresh([])
    assert not files.problems()
    folder.rename(aside)
    folder.symlink_to(folder)  # it exists, but no program can enter it
    for _ in range(2):
        files.refresh([])
        assert names(files) == ["a:1"]
    assert any("cannot list" in problem for problem in files.problems())
    assert caplog.text.count("cannot list") == 1
    folder.unlink()
    aside.rename(folder)
    files.refresh([])
    assert (names(files), files.problems()) == (["a:1"], [])
    (folder / "a.json").unlink()
    files.refresh([])
    assert names(files) == []


def test_files_of_a_pattern_that_was_removed_are_not_kept(tmp_path: Path) -> None:
    put(tmp_path / "a.json", "a:1")
    before = FileTargets([f"{tmp_path}/*.json"], settings())
    before.refresh([])
    after = FileTargets([f"{tmp_path}/*.yml"], settings(), before)
    after.refresh([])
    assert names(after) == []


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "a.json"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
    with pytest.raises(SettingsError, match="not a regular file"):
        list(file_specs(str(file), settings()))


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b" " * 11)
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_file(file, 10)
