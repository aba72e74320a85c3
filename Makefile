# Everything a developer does, from a fresh clone. Needs Python 3.11+ and the package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cat requirements.lock pyproject.toml 2>/dev/null | cksum | cut -d' ' -f1)

.DEFAULT_GOAL := help
.PHONY: help setup demo up test check fmt bench soak lock clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(STAMP) ## make the environment in .venv from the hash-pinned lock

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Fallow needs Python 3.11 or newer; this is $$($(PYTHON) --version). Name another with: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "Installing Fallow into $(VENV) (once)..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "Could not make a virtual environment; on Debian and Ubuntu install python3-venv."; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: setup ## the main job, end to end, with real parts
	@$(BIN)/fallow demo

up: setup ## run everything on this machine until Ctrl-C
	@$(BIN)/fallow up

# Hundreds of gateways come and go in one process; with an arena a thread, what each leaves behind adds up to gigabytes.
test: setup ## the whole suite, two files at a time
	@MALLOC_ARENA_MAX=2 $(BIN)/python -m pytest -m "not soak" -n 2 --dist loadfile

check: setup ## lint, types, import contracts, migrations against models
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m tests.check_migrations

fmt: setup ## format and mend what the linter can
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

bench: setup ## measure; FIGURES=prefix for a part
	@$(BIN)/python -m tests.bench $(if $(FIGURES),--figures $(FIGURES))

soak: setup ## the long runs
	@$(BIN)/python -m pytest -m soak --timeout 3600

lock: setup ## resolve requirements.lock anew (needs uv)
	@$(BIN)/python -m pip install --quiet uv
	@$(BIN)/uv pip compile pyproject.toml --all-extras --group model --group dev --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --excludes requirements.excludes --output-file requirements.lock --quiet

clean: ## remove the environment and caches
	@rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .import_linter_cache .bench
