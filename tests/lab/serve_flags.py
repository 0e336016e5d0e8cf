"""The flags that a real vLLM's `vllm serve` takes, recorded for the tests.

Run once for each vLLM whose flags are to be held, with the lab's interpreter (`make lab` installs
it), from the repository's root; no GPU is needed:

    LAB/venv/bin/python -m tests.lab.serve_flags tests/fixtures/serve_flags.json

For each flag how many values it takes (0, 1, or "+") and the values it allows, if they are listed.
`tests/diagnose/sizing/test_launch_command.py` holds the commands of `size` and of plans to them.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def record() -> dict[str, Any]:
    """The version of the vLLM that ran, and its flags."""
    arguments = import_module("vllm.entrypoints.launchers.cli_args")
    utils = import_module("vllm.utils.argparse_utils")
    layers = import_module("vllm.model_executor.layers.quantization")
    parser: argparse.ArgumentParser = arguments.make_arg_parser(utils.FlexibleArgumentParser())
    flags = {name: _values(action) for action in parser._actions for name in action.option_strings}
    # The parser takes any word; the model's configuration refuses those that are no method.
    flags["--quantization"]["choices"] = list(layers.QUANTIZATION_METHODS)
    return {"vllm": import_module("vllm").__version__, "flags": dict(sorted(flags.items()))}


def _values(action: argparse.Action) -> dict[str, Any]:
    takes = 1 if action.nargs is None else action.nargs
    listed = [str(choice) for choice in action.choices or ()]
    return {"takes": takes, "choices": listed} if listed else {"takes": takes}


if __name__ == "__main__":
    rows = record()
    lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(v)}" for n, v in rows["flags"].items())
    text = f'{{"vllm": {json.dumps(rows["vllm"])}, "flags": {{\n{lines}\n}}}}\n'
    Path(sys.argv[1]).write_text(text)
