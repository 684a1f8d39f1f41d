# Everything a clone needs: `make quickstart` trains, `make test` tests, `make check` is what CI runs.
#
#   PYTHON      the interpreter that creates .venv (3.11 or newer)
#   TORCH_ARGS  further pip arguments for torch alone, such as the index of its CPU builds
#   PYTEST_ARGS further arguments for the tests

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
TORCH_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/.stamps

.PHONY: help quickstart test check clean

help:
	@sed -n '1p;3,5p' Makefile

quickstart: $(STAMPS)/package
	$(BIN)/composer-mesh train configs/quickstart.toml

test: $(STAMPS)/dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(STAMPS)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(STAMPS)/venv:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found: install one or pass PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not a Python 3.11 or newer: pass PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# torch comes first and alone, so that its own index never serves another package.
$(STAMPS)/torch: $(STAMPS)/venv
	$(PIP) install $(TORCH_ARGS) torch==2.13.0
	@touch $@

$(STAMPS)/package: $(STAMPS)/torch pyproject.toml
	$(PIP) install -e .
	@touch $@

$(STAMPS)/dev: $(STAMPS)/package
	$(PIP) install -e '.[dev]'
	@touch $@
