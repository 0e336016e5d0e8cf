#!/bin/sh
# Build the wheel and try it in an environment with nothing but its own dependencies.
# Usage: sh tests/wheel.sh PYTHON   (any Python of the development environment)
set -eu
python=$1
out=build/wheel
rm -rf "$out" build/lib build/bdist.*
mkdir -p "$out"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$out" .
wheel=$(ls "$out"/kneewatch-*.whl)
"$(dirname "$python")"/check-wheel-contents "$wheel"
"$python" -m venv "$out/env"
"$out/env/bin/python" -I -m pip install --quiet "$wheel"
"$out/env/bin/python" -I tests/installed.py "$wheel"
