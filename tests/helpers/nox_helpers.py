"""What sessions of nox share: tests in the project's environment, and environments over it."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from sysconfig import get_path

import nox
from nox import Session

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable
"""The interpreter of the project's environment, in which nox is installed."""
NO_COMPILE = "--no-compile"
"""Modules are compiled when they are first imported: most never are."""
END_S = 120.0
"""Seconds that a program has after Ctrl-C to end its processes."""


def run(session: Session, *words: str, python: str = PYTHON, **variables: object) -> None:
    """Run a Python with these variables of the environment; of the project, if none is named."""
    env = {name: str(value) for name, value in variables.items()}
    session.run(python, *words, env=env, external=True, interrupt_timeout=END_S)


def pytest(session: Session, *words: str, python: str = PYTHON, **variables: object) -> None:
    """Run pytest, with the session's arguments too."""
    run(session, "-m", "pytest", *words, *session.posargs, python=python, **variables)


def suite(session: Session, name: str, *words: str, **variables: object) -> None:
    """Run the tests of a product that need no further packages, several files in parallel."""
    kinds = ("unit", "fuzz", "procs")
    patterns = [path for kind in kinds for path in (f"tests/{kind}", f"tests/plugins/*/{kind}")]
    folders = [str(one.relative_to(ROOT)) for path in patterns for one in sorted(ROOT.glob(path))]
    jobs = ("-n", os.environ.get("RUN_JOBS", "3"), "--dist", "loadfile", "--no-loadscope-reorder")
    pytest(session, *folders, "--suite", name, *jobs, *words, **variables)


def session_of_suite(name: str) -> None:
    """Register a session for a product whose tests all run without further packages."""

    def tests(session: Session) -> None:
        suite(session, name)

    tests.__doc__ = f"All tests of {name.replace('-', ' ')}."
    nox.session(tests, name=name, venv_backend="none")


def environment(session: Session) -> Path:
    """The folder of the session's environment."""
    return Path(session.virtualenv.location).absolute()


def requirements(name: str) -> str:
    """The path of a file in requirements/."""
    return str(ROOT / "requirements" / f"{name}.txt")


def install(session: Session, name: str, *options: str) -> None:
    """Install the packages of requirements/NAME.txt into the session's environment."""
    session.install(NO_COMPILE, *options, "-r", requirements(name))


def install_here(session: Session, *words: str) -> None:
    """Install into the project's environment, whose torch and numpy stay as they are."""
    pip = ("-m", "pip", "install", NO_COMPILE, "-c", kept(session, "torch", "numpy"))
    session.run_install(PYTHON, *pip, *words, external=True)


def python_of(folder: Path) -> str:
    """The interpreter of an environment."""
    return str(folder / "bin" / "python")


def site_packages(folder: Path) -> Path:
    """Where an environment of this Python has its packages."""
    return Path(get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))


def over(folder: Path) -> None:
    """Let an environment import the project's packages, unless it has its own."""
    line = f"import site; site.addsitedir({get_path('purelib')!r})\n"
    (site_packages(folder) / "over.pth").write_text(line, encoding="utf-8")


def kept(session: Session, *packages: str) -> str:
    """Write constraints to the versions that the project's environment has; returns their file."""
    file = (session.cache_dir / f"{session.name}.txt").absolute()
    file.write_text("".join(f"{one}=={version(one)}\n" for one in packages), encoding="utf-8")
    return str(file)


def debian(session: Session, programs: tuple[str, ...], *packages: str) -> None:
    """Install packages of Debian if a program is missing, as root; fails for other users."""
    path = os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    if all(shutil.which(one, path=path) for one in programs):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        session.error(f"{', '.join(programs)} not installed: apt install {' '.join(packages)}")
    session.run_install("apt-get", "update", "-q", external=True)
    options = ("-q", "-y", "--no-install-recommends")
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    session.run_install("apt-get", "install", *options, *packages, env=env, external=True)


def npm(session: Session, *packages: str) -> Path:
    """Install packages of npm into a folder of the session; returns it."""
    if not shutil.which("npm"):
        session.error("npm is not installed: apt install nodejs npm")
    folder = environment(session)
    words = ("install", "--prefix", str(folder), "--no-audit", "--no-fund")
    session.run_install("npm", *words, *packages, external=True)
    return folder
