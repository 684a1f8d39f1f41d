"""The lock files, pyproject.toml and the Makefile name the same packages."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from repository import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, TOOLS = PYPROJECT["project"], PYPROJECT["tool"]
EXTRAS = PROJECT["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()
ENTRY = re.compile(
    r"^([a-z0-9-]+)==([^ ]+)(?: ; (.*?))? \\\n((?: +--hash=sha256:[0-9a-f]{64}.*\n)+)", re.M
)
MACHINES = [
    {"python_version": python, "python_full_version": f"{python}.5", "sys_platform": system}
    | {"platform_python_implementation": "CPython", "implementation_name": "cpython"}
    | {"platform_machine": "x86_64"}
    for python in ("3.11", "3.12", "3.13")
    for system in ("linux", "darwin")
]


def locked(name: str, machine: dict[str, str]) -> dict[str, Version]:
    """The packages that a lock file installs on a machine."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert ENTRY.sub("", text) == "", "every line is a pinned package or its hash"
    return {
        package: Version(version)
        for package, version, marker, _ in ENTRY.findall(text)
        if not marker or Marker(marker).evaluate(machine)
    }


def wanted(*extras: str) -> Iterator[Requirement]:
    """Direct requirements but torch, those of extras of extras included."""
    for text in [*PROJECT["dependencies"], *(one for extra in extras for one in EXTRAS[extra])]:
        one = Requirement(text)
        if one.name == PROJECT["name"]:
            yield from wanted(*one.extras)
        elif one.name != "torch":
            yield one


@pytest.mark.parametrize(
    "machine", MACHINES, ids=lambda m: f"{m['sys_platform']}-{m['python_version']}"
)
@pytest.mark.parametrize(("name", "extras"), [("run", ()), ("dev", ("dev",))])
def test_a_lock_file_has_a_fitting_version_of_each_dependency(
    name: str, extras: tuple[str, ...], machine: dict[str, str]
) -> None:
    found = locked(name, machine)
    for one in wanted(*extras):
        if one.marker and not one.marker.evaluate(machine):
            continue
        version = found.get(canonicalize_name(one.name))
        assert version is not None, f"{one} is not in requirements/{name}.txt: run make lock"
        assert one.specifier.contains(version), f"{one}, locked is {version}: run make lock"


@pytest.mark.parametrize(
    "machine", MACHINES, ids=lambda m: f"{m['sys_platform']}-{m['python_version']}"
)
def test_the_tests_run_with_the_versions_that_runs_have(machine: dict[str, str]) -> None:
    run, dev = locked("run", machine), locked("dev", machine)
    assert {package: dev.get(package) for package in run} == run


@pytest.mark.parametrize("name", ["run", "dev"])
def test_a_lock_file_names_no_host(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert not re.search(r"://|index-url|find-links|trusted-host", text)


def test_a_file_of_a_session_pins_what_it_installs_and_is_used() -> None:
    files = {path.stem: path.read_text() for path in (ROOT / "requirements").glob("*.txt")}
    sessions = "".join(path.read_text() for path in (ROOT / "tests").rglob("nox_sessions.py"))
    for name in files.keys() - {"run", "dev"}:
        lines = [line for line in files[name].splitlines() if not line.startswith("#")]
        operators = [[one.operator for one in Requirement(line).specifier] for line in lines]
        assert operators == [["=="]] * len(lines), name
        assert f'"{name}"' in sessions, name


def test_every_dependency_has_a_lower_and_an_upper_bound() -> None:
    extras = [text for texts in EXTRAS.values() for text in texts]
    build = PYPROJECT["build-system"]["requires"]
    for text in [*PROJECT["dependencies"], *extras, *build]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            assert requirement.extras <= EXTRAS.keys()
            continue
        operators = {one.operator for one in requirement.specifier}
        assert operators in ({"=="}, {">=", "<"}), text


def test_templates_are_rendered_by_a_jinja2_whose_sandbox_holds() -> None:
    (jinja,) = [one for one in wanted() if one.name == "jinja2"]
    assert not jinja.specifier.contains("3.1.5")


def test_the_table_of_versions_has_the_ranges_and_what_is_locked() -> None:
    table = (ROOT / "docs" / "install.md").read_text()
    *_, torch = (ROOT / "requirements" / "torch.txt").read_text().split("==")
    versions = locked("run", MACHINES[0]) | {"torch": Version(torch)}
    for one in map(Requirement, PROJECT["dependencies"]):
        if one.name in ("torch", "torchmonarch", "transformers"):
            bounds = {bound.operator: bound.version for bound in one.specifier}
            range_ = f"{bounds['>=']} to below {bounds['<']}"
            assert f"| {one.name} | {range_} | {versions[one.name]} |" in table


def test_the_makefile_installs_the_locked_packages_with_hashes_and_a_fitting_torch() -> None:
    wanted = [Requirement(one) for one in PROJECT["dependencies"]]
    (torch,) = [one for one in wanted if one.name == "torch"]
    *_, pinned = (ROOT / "requirements" / "torch.txt").read_text().split()
    assert torch.specifier.contains(pinned.removeprefix("torch=="))
    (metadata,) = TOOLS["uv"]["dependency-metadata"]
    assert f"torch=={metadata['version']}" == pinned
    assert pinned in TOOLS["uv"]["constraint-dependencies"]
    assert "$(BIN)/python requirements/install_torch.py $(TORCH_ARGS)\n" in MAKEFILE
    assert "INSTALL_LOCKED := $(INSTALL) --require-hashes --no-deps -r\n" in MAKEFILE
    assert "then $(INSTALL_LOCKED) requirements/run.txt; fi" in MAKEFILE
    assert "then $(INSTALL_LOCKED) requirements/dev.txt; else" in MAKEFILE


def test_the_sbom_lists_the_locked_packages_and_no_other() -> None:
    file = os.environ.get("COMPOSER_MESH_TEST_SBOM")
    if not file:
        pytest.skip(
            "set COMPOSER_MESH_TEST_SBOM to an SBOM of the environment, as nox -s audit does"
        )
    found = {
        canonicalize_name(one["name"]): Version(one["version"])
        for one in json.loads(Path(file).read_text())["components"]
    }
    for package in ("torch", "pip", "setuptools"):  # as the machine has them
        found.pop(package, None)
    here = locked("dev", dict(default_environment()))
    here.pop("setuptools", None)
    assert found == here
