"""The images are built from the lock file, without a network and without what git ignores."""

from __future__ import annotations

import fnmatch
import re
from types import SimpleNamespace

import pytest
from repository import ROOT

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
LINES = re.sub(r"(?m)^#.*\n", "", TEXT).replace("\\\n", " ").splitlines()
STEPS = [tuple(line.split(maxsplit=1)) for line in LINES if line.strip()]
STAGES = re.findall(r"(?m)^FROM (\S+) AS (\S+)$", TEXT)
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()


def test_a_stage_comes_from_the_base_or_from_a_stage_above_it() -> None:
    known = {"${PYTHON_IMAGE}"}
    for base, name in STAGES:
        assert base in known
        known.add(name)
    assert {"cpu", "cuda"} <= known
    assert STAGES[-1][1] == "cpu", "the stage that is built when none is named"


def test_packages_come_from_the_folder_of_wheels_alone() -> None:
    installs = [text for step, text in STEPS if step == "RUN" and "-m pip " in text]
    assert len(installs) == 2
    for text in installs:
        assert text.count("-m pip install ") == text.count(" --no-index ") > 0
        assert ("from=wheels,target=/wheels" in text) == ("--find-links /wheels" in text)
    assert not re.search(r"https?://|apt-get|curl|git clone", TEXT)


def test_locked_packages_are_installed_by_hash_and_torch_is_of_the_projects_range() -> None:
    packages, installed = [text for step, text in STEPS if step == "RUN" and "-m pip " in text]
    assert "--require-hashes --no-deps -r /requirements.txt" in " ".join(packages.split())
    assert packages.endswith(" torch")
    assert installed.endswith("-m pip check")


@pytest.mark.parametrize(("stage", "found"), [("cpu", "13.0"), ("cuda", None)])
def test_a_stage_refuses_the_other_build_of_torch(stage: str, found: str | None) -> None:
    (code,) = re.findall(rf"FROM runtime AS {stage}\n(?:ENV .*\n)?RUN python -c '(.*)'", TEXT)
    torch = SimpleNamespace(version=SimpleNamespace(cuda=found))
    with pytest.raises(AssertionError, match="build --target"):
        exec(code.removeprefix("import torch; "), {"torch": torch})
    torch.version.cuda = None if found else "13.0"
    exec(code.removeprefix("import torch; "), {"torch": torch})


def is_sent(path: str) -> bool:
    """Whether a builder gets a path of the top level: the last line that fits it decides."""
    sent = True
    for line in filter(None, IGNORED):
        if not line.startswith("#") and fnmatch.fnmatch(path, line.removeprefix("!")):
            sent = line.startswith("!")
    return sent


@pytest.mark.plugins
def test_the_builder_gets_the_package_and_nothing_of_a_run() -> None:
    links = (ROOT / "src" / "composer_mesh").iterdir()
    needed = {one.readlink().name for one in links if one.is_symlink()}
    for path in ("src", "pyproject.toml", "README.md", "LICENSE", "requirements/run.txt", *needed):
        assert is_sent(path), path
        assert (ROOT / path).exists()
    for path in (".git", ".venv", "runs", ".cache", "build", "tests", "wheels", ".env"):
        assert not is_sent(path), path


def test_a_container_runs_as_a_user_without_rights() -> None:
    (user,) = [text for step, text in STEPS if step == "USER"]
    assert user != "root"
    assert ("ENTRYPOINT", '["composer-mesh"]') in STEPS
