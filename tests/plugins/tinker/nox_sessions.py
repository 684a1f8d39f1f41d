"""Sessions of the Tinker protocol."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import nox
from nox_helpers import (
    NO_COMPILE,
    PYTHON,
    ROOT,
    environment,
    install,
    over,
    pytest,
    python_of,
    requirements,
    run,
    site_packages,
    suite,
)

SDKS = ("0.25.0", "0.38.0")
"""The oldest and the newest version that is served."""
NEWER_TYPES = (
    "import sys, typing, typing_extensions; sys.version_info < (3, 12) "
    'and setattr(typing, "TypedDict", typing_extensions.TypedDict)'
)
"""A line of a .pth file: Python 3.11 lacks only this of what SkyRL needs."""


@nox.session(venv_backend="none")
def tinker(session: nox.Session) -> None:
    """All tests of serving, also with the oldest and newest SDK and with tinker-cookbook."""
    place = ROOT / ".nox" / "tinker"
    for sdk in SDKS:
        install_sdk(session, place / sdk, f"tinker=={sdk}")
    install_sdk(
        session, place / "cookbook", f"tinker=={SDKS[-1]}", "-r", requirements("tinker-cookbook")
    )
    suite(session, "tinker")
    words = ("tests/plugins/tinker/sdk", "-rs", "--timeout=1200")
    pytest(session, *words, COMPOSER_MESH_TEST_TINKER=place)


def install_sdk(session: nox.Session, folder: Path, *words: str) -> None:
    """Make an environment over the project's, whose packages the SDK uses."""
    session.run_install(PYTHON, "-m", "venv", str(folder), external=True)
    over(folder)
    pip = ("-m", "pip", "install", NO_COMPILE, "--no-deps")
    session.run_install(
        python_of(folder), *pip, *words, "-r", requirements("tinker"), external=True
    )


@nox.session
def skyrl(session: nox.Session) -> None:
    """Benchmark SkyRL's own server alongside ours, with the SDK that it allows."""
    torch = shlex.split(os.environ.get("TORCH_ARGS", ""))
    session.run_install("python", "requirements/install_torch.py", *torch)
    install(session, "skyrl", "-c", requirements("torch"))
    install(session, "skyrl-no-deps", "--no-deps", "--ignore-requires-python")
    types = site_packages(environment(session)) / "typed_dict.pth"
    types.write_text(f"{NEWER_TYPES}\n", encoding="utf-8")
    run(session, "benchmarks/serve_peer.py", str(environment(session)), *session.posargs)
