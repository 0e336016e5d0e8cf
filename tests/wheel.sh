#!/bin/sh
# Build the wheel, try it with nothing but its own dependencies, then pass the tests against it.
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
"$out/env/bin/python" -m pip install --quiet --upgrade 'pip>=25.1'
"$out/env/bin/python" -m pip install --quiet "$wheel"
"$out/env/bin/kneewatch" --version
status=0
"$out/env/bin/kneewatch" demo > "$out/demo.txt" || status=$?
[ "$status" -eq 1 ] || { echo "demo from the wheel: exit status $status" >&2; exit 1; }
"$out/env/bin/kneewatch" run --demo --for 2s --listen 127.0.0.1:0 >/dev/null 2>&1
"$out/env/bin/kneewatch" export grafana "$out/grafana" >/dev/null
"$out/env/bin/python" -m pip install --quiet --group dev
# What a wheel can lack is a module, a template, a schema, a catalogue: these tests meet each of them.
# Many requests made at random, and pages measured in a browser, find nothing more of that kind.
"$out/env/bin/python" -m pytest -q -p no:cacheprovider \
    --ignore tests/agent/api/test_schemathesis.py --ignore tests/agent/api/test_fuzz.py \
    --ignore tests/reports/triage/test_browser.py --ignore tests/reports/weekly/page/test_browser.py \
    tests/test_packaging.py tests/agent/test_*.py tests/agent/api tests/agent/notify/test_render.py \
    tests/agent/report tests/collector/test_names.py tests/diagnose/catalogue tests/reports tests/rules
