"""`/api/v1/size`: the same answers as the command, and no file that a request names is opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jsonschema
import pytest

from tests.agent.api.serving import Asker, asking, service_of
from tests.agent.test_size import SCHEMA, document

SIZE = "/api/v1/size"
LLAMA = {"model": "meta-llama/Llama-3.3-70B-Instruct", "gpu": "h100-sxm"}


def sized(client: Asker, **given: Any) -> dict[str, Any]:  # noqa: ANN401
    """The answer, which keeps to its schema."""
    answer = client.get(f"{SIZE}?{urlencode(given)}")
    assert answer.status_code == 200, answer.text
    size: dict[str, Any] = answer.json()
    jsonschema.validate(size, SCHEMA)
    return size


def refused(client: Asker, **given: Any) -> str:  # noqa: ANN401
    """What is said of a wrong parameter."""
    answer = client.get(f"{SIZE}?{urlencode(given)}")
    assert answer.status_code == 422, answer.text
    detail: str = answer.json()["detail"]
    return detail


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        (
            {**LLAMA, "tp": 4, "max-model-len": 32768, "input-tokens": 1000, "output-tokens": 300},
            ("--tp", "4", "--max-model-len", "32768", "--input-tokens", "1000",
             "--output-tokens", "300"),
        ),
        (
            {**LLAMA, "search": "true", "input-tokens": 1000, "output-tokens": 300,
             "peak-rps": 20, "ttft-slo": "2s", "itl-slo": "50ms"},
            ("--search", "--input-tokens", "1000", "--output-tokens", "300", "--peak-rps", "20",
             "--ttft-slo", "2s", "--itl-slo", "50ms"),
        ),
    ],
)  # fmt: skip
def test_it_is_the_answer_of_the_command(given: dict[str, Any], flags: tuple[str, ...]) -> None:
    _, expected = document("--model", LLAMA["model"], "--gpu", LLAMA["gpu"], *flags)
    with asking(service_of()) as client:
        assert sized(client, **given) == expected
        posted = client.post(SIZE, {key.replace("-", "_"): value for key, value in given.items()})
    assert posted.json() == expected


def test_what_does_not_fit_is_an_answer() -> None:
    with asking(service_of()) as client:
        answer = sized(client, **LLAMA, max_model_len=8192)
    assert answer["fits"] is False
    assert answer["min_gpus"] == 2


def test_json_takes_numbers_truths_and_nothing() -> None:
    with asking(service_of()) as client:
        response = client.post(
            SIZE,
            {**LLAMA, "tp": 4, "concurrency": 8.0, "itl_slo": 0.05, "enforce_eager": True,
             "pp": None, "search": False},
        )  # fmt: skip
    assert response.status_code == 200, response.text
    assert response.json()["inputs"]["itl_slo_s"] == 0.05


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "model: must be a model in the catalogue"),
        ({"model": "nonsense"}, "model: must be a model in the catalogue"),
        ({"model": "Llama-3.1-71B"}, "choices: meta-llama/Llama-3.1-70B-Instruct, meta-llama/"),
        ({**LLAMA, "gpu": "h1000"}, "gpu: "),
        ({**LLAMA, "tp": "two"}, "tp: must be a whole number"),
        ({**LLAMA, "tp": "2.0"}, "tp: must be a whole number"),
        ({**LLAMA, "tp": 0}, "tp: 0 is out of range"),
        ({**LLAMA, "concurrency": "nan"}, "concurrency: must be a number"),
        ({**LLAMA, "concurrency": "1e99"}, "concurrency: must be a number"),
        ({**LLAMA, "itl_slo": "soon"}, "itl_slo: must be a duration"),
        ({**LLAMA, "itl_slo": "-1s"}, "itl_slo: must be a duration"),
        ({**LLAMA, "search": "perhaps"}, "search: must be true or false"),
        (
            {**LLAMA, "outputtokens": 4},
            "unknown parameter 'outputtokens'; did you mean output_tokens?",
        ),
        ({**LLAMA, "tensor": 4}, "unknown parameter 'tensor'; /docs lists the parameters"),
        ({**LLAMA, "vllm-version": "x" * 201}, "vllm_version: must be text of at most 200"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], said: str) -> None:
    with asking(service_of()) as client:
        assert said in refused(client, **given)


@pytest.mark.parametrize(
    ("name", "value"),
    [("vllm_version", 0.11), ("model", 8), ("kv_cache_dtype", 8), ("enforce_eager", 1)],
)
def test_json_of_another_type_is_refused(name: str, value: object) -> None:
    with asking(service_of()) as client:
        answer = client.post(SIZE, {**LLAMA, "tp": 4, name: value})
    assert answer.status_code == 422, answer.text
    assert f"{name}: must be" in answer.text


def test_a_parameter_given_twice_is_refused() -> None:
    with asking(service_of()) as client:
        answer = client.get(f"{SIZE}?tp=1&tp=2")
        mixed = client.get(f"{SIZE}?max-model-len=1&max_model_len=2")
    assert answer.status_code == mixed.status_code == 422


@pytest.fixture
def model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's configuration on this disk, also under the name of one of the catalogue."""
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 128,
              "max_position_embeddings": 512, "torch_dtype": "bfloat16"}  # fmt: skip
    for folder in (tmp_path, tmp_path / LLAMA["model"]):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_no_file_that_a_request_names_is_opened(model_folder: Path) -> None:
    with asking(service_of()) as client:
        for name in (str(model_folder), f"{model_folder}/config.json", "./config.json", ".",
                     "~", "/etc/passwd", "../../etc/passwd", "config.json"):  # fmt: skip
            said = refused(client, model=name)
            assert said.startswith("model: must be a model in the catalogue")
            assert str(model_folder) not in said
        layers = sized(client, **LLAMA, tp=4)["memory"]["kv_bytes_per_token_per_gpu"]
    # 80 layers x 2 x 2 heads x 128 x 2 bytes: the catalogue's model, not the folder's.
    assert layers == 81_920


@pytest.mark.parametrize("name", ["benchmark", "plan"])
def test_flags_that_name_files_are_refused(name: str) -> None:
    with asking(service_of()) as client:
        assert "requests cannot name files" in refused(client, **LLAMA, **{name: "example"})
        posted = client.post(SIZE, {**LLAMA, name: "/etc/passwd"})
    assert posted.status_code == 422
    assert "root" not in posted.text


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{}", "text/plain", 415),
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"[]", "application/json", 422),
        (b"null", "application/json", 422),
        (b'{"model": "\\ud800"}', "application/json", 400),
        (b'{"model": ["a"]}', "application/json", 422),
        (b'{"tp": 1e400}', "application/json", 400),
        (b'{"tp": 1.5}', "application/json; charset=utf-8", 422),
        (b'{"tp": true}', "application/json", 422),
        (b'{"itl_slo": true}', "application/json", 422),
        (b'{"itl_slo": {}}', "application/json", 422),
        (b'{"search": "maybe"}', "application/json", 422),
        (b'{"": 1}', "application/json", 422),
    ],
)
def test_a_body_that_cannot_be_is_refused(content: bytes, kind: str, status: int) -> None:
    with asking(service_of()) as client:
        answer = client.ask("POST", SIZE, {"content-type": kind}, content=content)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
