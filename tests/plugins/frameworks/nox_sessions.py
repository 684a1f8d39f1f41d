"""Sessions of other training stacks, each with its release in an environment of its own.

Most of these environments lie over the project's: each has what its stack needs, and imports torch
and the rest from .venv. So does a stack that pins another torch, whose requirements are then only
those that it imports. What the project also has keeps its version.
"""

from __future__ import annotations

import os
from pathlib import Path

import nox
from nox_helpers import (
    environment,
    install,
    kept,
    over,
    pytest,
    python_of,
    requirements,
    run,
    site_packages,
)

TESTS = "tests/plugins/frameworks"
SHARED = ("torch", "numpy", "datasets", "peft", "pydantic", "httpx")
PRIME_RL = "https://github.com/PrimeIntellect-ai/prime-rl"
PRIME_RL_COMMIT = "559b44772e471d1538537b8805cc77f3824a5e64"


@nox.session(venv_backend="none")
def trl(session: nox.Session) -> None:
    """TRL's trainer with three channels: killed, resumed, sharded; compared with ours."""
    pytest(session, f"{TESTS}/trl", "-rs", COMPOSER_MESH_TEST_TRL=1)
    run(session, "benchmarks/trl_channels.py")


@nox.session
def areal(session: nox.Session) -> None:
    """AReaL 1.0.4: its workflows on our generators, its engine with three channels, its losses."""
    over(environment(session))
    install(session, "areal", "-c", kept(session, *SHARED, "transformers"))
    install(session, "areal-no-deps", "--no-deps")
    tests_over(session, "areal", COMPOSER_MESH_TEST_AREAL=1)


@nox.session
def verl(session: nox.Session) -> None:
    """verl 0.9.1: its estimator, its agent loop and three steps in its FSDP2 engine on a CPU."""
    over(environment(session))
    install(session, "verl", "-c", kept(session, *SHARED, "accelerate"))
    install(session, "verl-no-deps", "--no-deps")
    tests_over(session, "verl", COMPOSER_MESH_TEST_VERL=1)


def tests_over(session: nox.Session, folder: str, **variables: object) -> None:
    """Run a folder of tests in the session's environment, which lies over the project's."""
    words = (f"{TESTS}/{folder}", "-rs", "-p", "no:cacheprovider")
    pytest(session, *words, python=python_of(environment(session)), **variables)


@nox.session(name="prime-rl")
def prime_rl(session: nox.Session) -> None:
    """PRIME-RL's own loss module, from a clone or the checkout COMPOSER_MESH_PRIME_RL."""
    install(session, "prime-rl-no-deps", "--no-deps")
    given = os.environ.get("COMPOSER_MESH_PRIME_RL")
    source = given or str(environment(session) / "repository")
    if given is None and not Path(source).is_dir():
        clone = ("git", "clone", "-q", "--filter=blob:none", PRIME_RL, source)
        session.run_install(*clone, external=True)
    if given is None:
        session.run_install("git", "-C", source, "checkout", "-q", PRIME_RL_COMMIT, external=True)
    packages = site_packages(environment(session))
    variables = {"COMPOSER_MESH_PRIME_RL": source, "COMPOSER_MESH_PRIME_RL_PACKAGES": packages}
    pytest(session, f"{TESTS}/prime_rl", "-rs", **variables)


@nox.session(name="data-juicer")
def data_juicer(session: nox.Session) -> None:
    """Both recipes of the pair filters, run by data-juicer's own command."""
    over(environment(session))
    install(session, "data-juicer", "-c", kept(session, "torch"))
    programs = environment(session) / "bin"
    pytest(session, f"{TESTS}/data_juicer", "-rs", COMPOSER_MESH_TEST_DATA_JUICER=programs)


@nox.session
def verifiers(session: nox.Session) -> None:
    """Environments of verifiers against the agent endpoint, up to a training run."""
    # Modules are compiled here: each run would do it again otherwise.
    session.install("-r", requirements("verifiers"))
    pytest(session, f"{TESTS}/verifiers", "-rs", COMPOSER_MESH_TEST_VERIFIERS=1)
