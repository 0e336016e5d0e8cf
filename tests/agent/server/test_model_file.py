"""The config.json of a served model: found in its folder or the cache, and nothing else opened."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from kneewatch.agent.server.process import ServerProcess
from kneewatch.agent.server.watch import CONFIG_MAX_BYTES, read_model
from kneewatch.diagnose.deployment.server_facts import SourceReading
from kneewatch.diagnose.deployment.vllm_flags import CommandLine

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
SECRET = "hunter2"


def read(
    name: str,
    folder: Path | None,
    *,
    environ: Mapping[str, str] | None = None,
    user_id: int | None = None,
    shares_files: bool = True,
    **flags: str,
) -> SourceReading:
    launch = CommandLine(name, {f"--{flag}": value for flag, value in flags.items()})
    user = os.getuid() if user_id is None else user_id
    return read_model(ServerProcess(1, launch, user, folder, environ, shares_files), 5.0)


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def refused(reading: SourceReading) -> str:
    """The one note of a reading without a model; it never quotes a file."""
    assert reading.model is None
    (note,) = reading.notes
    assert SECRET not in note
    return note


def test_a_folder_on_the_command_line(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "mine")
    for name in (str(folder), "mine", "./mine"):
        reading = read(name, tmp_path)
        assert reading.notes == ()
        assert reading.model is not None
        assert (reading.model.depth, reading.model.vocab_size) == (2, 1000)
    assert "neither a folder" in refused(read("mine", None)), "its working folder is unknown"


def cached(hub: Path, commit: str = "abc123", reference: str = "main") -> Path:
    """A model in a cache as huggingface_hub lays it out: files are links to blobs."""
    folder = hub / "models--org--mine"
    blob = folder / "blobs" / "f00"
    blob.parent.mkdir(parents=True)
    blob.write_text(json.dumps(CONFIG))
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/f00")
    (folder / "refs").mkdir()
    (folder / "refs" / reference).write_text(commit)
    return folder


@pytest.mark.parametrize(
    ("variable", "hub"),
    [
        ("HF_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub"),
    ],
)
def test_the_cache_of_the_servers_user(tmp_path: Path, variable: str, hub: str) -> None:
    cached(tmp_path / hub)
    reading = read("org/mine", Path("/"), environ={variable: str(tmp_path)})
    assert reading.notes == ()
    assert reading.model is not None


def test_a_revision_of_the_command_line(tmp_path: Path) -> None:
    cached(tmp_path, reference="v2")
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    assert read("org/mine", None, environ=environ).model is None
    assert read("org/mine", None, environ=environ, revision="v2").model is not None
    assert read("org/mine", None, environ=environ, revision="abc123").model is not None
    refused(read("org/mine", None, environ=environ, revision="../../abc123"))


@pytest.mark.parametrize("text", ["../../../outside", "..", "", "a/b", "\x00"])
def test_a_reference_that_leads_elsewhere(tmp_path: Path, text: str) -> None:
    outside = model_folder(tmp_path / "outside")
    assert outside.is_dir()
    folder = cached(tmp_path / "hub")
    (folder / "refs" / "main").write_text(text)
    refused(read("org/mine", None, environ={"HF_HUB_CACHE": str(tmp_path / "hub")}))


def test_a_model_of_the_catalogue_needs_no_file(tmp_path: Path) -> None:
    reading = read("meta-llama/Llama-3.1-8B-Instruct", tmp_path, shares_files=False)
    assert reading == SourceReading("config.json", 5.0)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({**CONFIG, "model_type": SECRET}))
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").symlink_to(secret)
    assert "outside" in refused(read(str(folder), None))


def test_a_file_that_the_servers_user_may_not_read(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "mine")
    (folder / "config.json").chmod(0o600)
    stranger = os.getuid() + 12345
    assert "not readable by the server's user" in refused(read(str(folder), None, user_id=stranger))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f'{{"auths": {{"r": "{SECRET}"}}}}', id="another program's"),
        pytest.param(SECRET, id="no JSON"),
        pytest.param("[" * 100_000, id="nested"),
        pytest.param(" " * (CONFIG_MAX_BYTES + 1), id="giant"),
        pytest.param("[]", id="no object"),
    ],
)
def test_a_file_that_is_no_model_is_a_note(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert refused(read(str(tmp_path), None)).startswith("config.json of the model: ")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "not a regular file" in refused(read(str(tmp_path), None))


def test_a_server_in_a_container_is_not_read_from_this_file_system(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "mine")
    assert "set model" in refused(read(str(folder), None, shares_files=False))
