"""A recommendation's changes applied to a command line."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.command_line import ChangeError, edited

FLAGS = ("--max-num-seqs", "128", "--no-enable-prefix-caching", "--block-size=32")


def change(flag: str, before: object, after: object) -> dict[str, Any]:
    """A change as it stands in kneewatch's documents."""
    return {"flag": flag, "from": before, "to": after}


@pytest.mark.parametrize(
    ("flag_change", "expected"),
    [
        pytest.param(
            change("--max-num-seqs", 128, 22),
            ["--no-enable-prefix-caching", "--block-size=32", "--max-num-seqs", "22"],
            id="another value",
        ),
        pytest.param(
            change("--max-num-seqs", 128.0, None),
            ["--no-enable-prefix-caching", "--block-size=32"],
            id="dropped with its value",
        ),
        pytest.param(
            change("--no-enable-prefix-caching", True, None),
            ["--max-num-seqs", "128", "--block-size=32"],
            id="a switch dropped",
        ),
        pytest.param(
            change("--enable-prefix-caching", False, True),
            ["--max-num-seqs", "128", "--block-size=32", "--enable-prefix-caching"],
            id="a switch turned round",
        ),
        pytest.param(
            change("--block-size", 32, 64),
            ["--max-num-seqs", "128", "--no-enable-prefix-caching", "--block-size", "64"],
            id="written with =",
        ),
        pytest.param(
            change("--max-num-queued-reqs", None, 13),
            [*FLAGS, "--max-num-queued-reqs", "13"],
            id="a new one",
        ),
    ],
)
def test_a_change_made(flag_change: dict[str, Any], expected: list[str]) -> None:
    assert edited(FLAGS, [flag_change]) == expected


def test_a_json_value_is_one_word() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4}'
    flags = ["--speculative-config", text, "--max-num-seqs", "8"]
    assert edited(flags, [change("--speculative-config", text, None)]) == ["--max-num-seqs", "8"]


def test_changes_are_made_one_after_the_other() -> None:
    flags = ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"]
    changes = [
        change("--no-enable-chunked-prefill", True, None),
        change("--max-num-batched-tokens", 8192, 256),
    ]
    assert edited(flags, changes) == ["--max-num-batched-tokens", "256"]


@pytest.mark.parametrize(
    ("flag_change", "words"),
    [
        pytest.param(change("replicas", 1, 2), "replicas is no flag", id="no flag"),
        pytest.param(change("--max-num-seqs", 64, 32), "'128' on the command line", id="untrue"),
        pytest.param(change("--quantization", "fp8", None), "not on the", id="not there"),
    ],
)
def test_a_change_that_cannot_be_made(flag_change: dict[str, Any], words: str) -> None:
    with pytest.raises(ChangeError, match=words):
        edited(FLAGS, [flag_change])
