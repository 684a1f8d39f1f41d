# make quickstart   trains the quickstart's agent, from a fresh clone; `make new-user` a task of your own
# make test         tests the core in minutes; `make test-all` everything that needs no further package
# make test-NAME    runs a session of nox, such as a product's tests; `make dev`, then `.venv/bin/nox -l` lists them
# make check        checks format, lint, types and imports, and builds the site; CI runs it and `make test-all`
# make docs         builds the documentation as a site in build/site; `make size` counts statements by package
# make gpu-day      measures what a GPU does for a run in nine minutes, and installs nothing (docs/gpu.md)
# make lock         updates requirements/; `make mutations` says which faults the tests catch; `make clean` deletes outputs
#
#   PYTHON      interpreter that creates .venv (3.11 or newer)
#   LOCKED      0 installs the newest versions that pyproject.toml allows, in place of those in requirements/
#   TORCH_ARGS  pip arguments for torch, such as --index-url (default: those of a CPU build where no GPU is found)
#   TEST_JOBS   unit tests in parallel (default: cores plus one, at most 4); RUN_JOBS: whole runs (default: 3)
#   PYTEST_ARGS further arguments for the tests; GPU_ARGS for `make gpu-day`; MUTATIONS sets of faults (default: core)

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
LOCKED ?= 1
export TEST_JOBS ?= $(shell python3 -c 'import os; print(min(4, len(os.sched_getaffinity(0)) + 1))' 2>/dev/null || echo 3)
export RUN_JOBS ?= 3
export TORCH_ARGS
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMPS := .venv/.stamps
PYTEST := $(BIN)/python -m pytest
BARE_PYTHON = $(or $(wildcard $(BIN)/python),$(PYTHON))
# Modules are compiled when they are first imported: most of the 16,000 never are.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
INSTALL_LOCKED := $(INSTALL) --require-hashes --no-deps -r

.PHONY: help quickstart new-user dev test test-all check types imports docs size gpu-day lock mutations clean
help:
	@sed '/^$$/q' Makefile
quickstart: $(STAMPS)/package
	$(BIN)/composer-mesh train configs/quickstart.toml
new-user: $(STAMPS)/package
	$(BIN)/python benchmarks/new_user.py
dev: $(STAMPS)/dev
test: dev
	$(PYTEST) tests/unit --suite core -n $(TEST_JOBS) $(PYTEST_ARGS)
	$(PYTEST) tests/procs/runs --suite core $(PYTEST_ARGS)
test-all: dev
	$(PYTEST) tests/unit tests/fuzz $(wildcard tests/plugins/*/unit tests/plugins/*/fuzz) -n $(TEST_JOBS) $(PYTEST_ARGS)
	$(PYTEST) tests/procs/runs $(PYTEST_ARGS)
	$(PYTEST) tests/procs $(wildcard tests/plugins/*/procs) --ignore=tests/procs/runs -n $(RUN_JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
test-%: dev
	$(BIN)/nox -s $* -- $(PYTEST_ARGS)
check: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --jobs=$(TEST_JOBS) --output-sync=target types imports docs
types: dev
	$(BIN)/python tests/helpers/check_types.py
imports: dev
	$(BIN)/lint-imports
	$(BIN)/python tests/helpers/import_cycles.py
docs: dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build
size:
	@$(BARE_PYTHON) tests/helpers/tree_size.py
gpu-day:
	PYTHONPATH=src $(BARE_PYTHON) benchmarks/gpu_day.py $(GPU_ARGS)
lock mutations: dev
	$(BIN)/nox -s $@ -- $(if $(filter mutations,$@),$(MUTATIONS))
clean:
	rm -rf .venv .nox build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(STAMPS)/venv:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "no Python 3.11 or newer found: install one or pass PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv && mkdir -p $(STAMPS) && touch $@
$(STAMPS)/package: $(STAMPS)/venv requirements/run.txt requirements/torch.txt pyproject.toml
	if [ "$(LOCKED)" = 1 ]; then $(INSTALL_LOCKED) requirements/run.txt; fi
	$(BIN)/python requirements/install_torch.py $(TORCH_ARGS)
	if [ "$(LOCKED)" = 1 ]; then $(INSTALL) --no-deps --no-build-isolation -e .; else $(INSTALL) -e .; fi
	@touch $@
$(STAMPS)/dev: $(STAMPS)/package requirements/dev.txt
	if [ "$(LOCKED)" = 1 ]; then $(INSTALL_LOCKED) requirements/dev.txt; else $(INSTALL) -e '.[dev]'; fi
	@touch $@
