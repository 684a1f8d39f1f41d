"""Sessions of nox: what needs packages of others, or hours. `nox -l` lists them.

    nox -s NAME [-- ARGUMENTS]     run one; pytest gets the arguments
    nox -s NAME --install-only     only install its packages, into .nox/NAME

nox is in the project's environment, which `make dev` creates. Sessions are in the files
`nox_sessions.py` of tests/ and of the plugins' tests, their packages in requirements/.
"""

import os
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import nox

TESTS = Path(__file__).with_name("tests")
sys.path.insert(0, str(TESTS / "helpers"))

from nox_helpers import session_of_suite  # noqa: E402
from selection import suites  # noqa: E402

if find_spec("composer_mesh") is None:
    sys.exit("this nox is not in the project's environment: run `make dev`, then .venv/bin/nox")

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what one process compiles, the next ones load
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = []

for file in (TESTS / "nox_sessions.py", *sorted(TESTS.glob("plugins/*/nox_sessions.py"))):
    spec = spec_from_file_location(f"{file.parent.name}_sessions", file)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module_from_spec(spec))

for product in sorted(suites().keys() - {"core", "long"} - nox.registry.get().keys()):
    session_of_suite(product)
