"""What a package and its tests need, by its metadata, and how pip's answer becomes a folder."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from composer_mesh.plugins.code_tasks.command.needs import (
    NeedsUnresolved,
    install,
    needed_by,
    resolved_together,
)
from composer_mesh.plugins.code_tasks.command.sources import SourceDistribution


def names(found: list[Requirement]) -> list[str]:
    return [str(one) for one in found]


def test_requirements_and_those_of_the_extra_for_tests_are_needed() -> None:
    about = (
        "Metadata-Version: 2.4\nName: small\nProvides-Extra: tests\nProvides-Extra: dev\n"
        "Requires-Dist: attrs>=22\nRequires-Dist: other; python_version < '3'\n"
        "Requires-Dist: freezegun; extra == 'tests'\nRequires-Dist: pytest-cov; extra == 'tests'\n"
        "Requires-Dist: jsonpointer; extra == 'dev'\nRequires-Dist: not a requirement\n"
    )
    found = needed_by(SourceDistribution("small", "1", "", {"PKG-INFO": about.encode()}))
    assert names(found) == ["attrs>=22", "freezegun"]


def test_groups_of_pyproject_include_others_and_themselves_never_twice() -> None:
    pyproject = (
        "[dependency-groups]\nTest = ['a', {include-group = 'more'}, 3]\n"
        "more = ['b==1', {include-group = 'Test'}]\ndev = ['c']\n"
    )
    found = needed_by(SourceDistribution("small", "1", "", {"pyproject.toml": pyproject.encode()}))
    assert names(found) == ["a", "b==1"]


def test_a_group_for_development_is_taken_where_none_is_for_tests() -> None:
    pyproject = b"[dependency-groups]\ndev = ['c', 'mypy', 'sphinx-design']\n"
    found = needed_by(SourceDistribution("small", "1", "", {"pyproject.toml": pyproject}))
    assert names(found) == ["c"]


def test_an_older_distribution_states_its_requirements_in_egg_info() -> None:
    text = "six>=1.8\n\n[:python_version < '3']\nold\n\n[testing]\nmock\n\n[docs]\nfuro\n"
    found = needed_by(
        SourceDistribution("small", "1", "", {"small.egg-info/requires.txt": text.encode()})
    )
    assert names(found) == ["six>=1.8", "mock"]


def test_a_broken_pyproject_and_no_metadata_need_nothing() -> None:
    assert needed_by(SourceDistribution("a", "1", "", {})) == []
    assert needed_by(SourceDistribution("a", "1", "", {"pyproject.toml": b"= no toml"})) == []


def wheel(folder: Path, name: str, version: str = "1.0", requires: str = "") -> None:
    """Write a wheel with one module."""
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": about,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        path: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        for path, text in files.items()
    }
    record = "".join(f"{path},sha256={sum_},\n" for path, sum_ in digests.items())
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    (folder / f"{name}-{version}-py3-none-any.whl").write_bytes(content.getvalue())


@pytest.fixture
def index(tmp_path: Path) -> tuple[str, ...]:
    folder = tmp_path / "index"
    folder.mkdir()
    wheel(folder, "liba", requires="Requires-Dist: libb\n")
    wheel(folder, "libb")
    wheel(folder, "libb", "2.0")
    wheel(folder, "libc")
    return ("--no-index", "--find-links", str(folder))


def test_wheels_are_pinned_and_installed_without_the_packages_of_tasks(
    index: tuple[str, ...], tmp_path: Path
) -> None:
    needs = {"small": [Requirement("liba")], "libc": [Requirement("libc")]}
    said: list[str] = []
    wheels = resolved_together(needs, ["libb==1.0"], {"libc"}, index, said.append)
    assert [(one.name, one.version) for one in wheels] == [("liba", "1.0"), ("libb", "1.0")]
    folder = tmp_path / "tasks.packages"
    folder.mkdir()
    (folder / "left_over.py").touch()
    (folder / "requirements.txt").touch()
    install(wheels, folder, index)
    there = {one.name for one in folder.iterdir()}
    assert there >= {"liba.py", "libb.py", "requirements.txt"}
    assert not there & {"left_over.py", "libc.py"}
    pins = (folder / "requirements.txt").read_text().splitlines()
    assert all("--hash=sha256:" in one for one in pins)
    assert not said


def test_a_requirement_that_does_not_fit_is_reported_and_the_others_stay(
    index: tuple[str, ...],
) -> None:
    needs = {
        "first": [Requirement("libb==2.0")],
        "second": [Requirement("libb==1.0"), Requirement("libc")],
    }
    said: list[str] = []
    wheels = resolved_together(needs, [], (), index, said.append)
    assert [(one.name, one.version) for one in wheels] == [("libb", "2.0"), ("libc", "1.0")]
    assert len(said) == 1
    assert said[0].startswith("second: libb==1.0 is left out: ")


def test_a_failed_installation_leaves_what_was_there(
    index: tuple[str, ...], tmp_path: Path
) -> None:
    wheels = resolved_together({"a": [Requirement("libc")]}, [], (), index, print)
    folder = tmp_path / "tasks.packages"
    folder.mkdir()
    (folder / "kept.py").touch()
    (folder / "requirements.txt").touch()
    with pytest.raises(NeedsUnresolved):
        install(wheels, folder, ("--no-index",))
    assert {one.name for one in tmp_path.iterdir()} == {"index", "tasks.packages"}
    assert (folder / "kept.py").exists()


def test_one_requirement_that_does_not_fit_is_reported_once(index: tuple[str, ...]) -> None:
    said: list[str] = []
    assert (
        resolved_together({"a": [Requirement("libc==9")], "b": []}, [], (), index, said.append)
        == []
    )
    assert len(said) == 1


def test_a_folder_of_the_user_is_not_replaced(index: tuple[str, ...], tmp_path: Path) -> None:
    wheels = resolved_together({"a": [Requirement("libc")]}, [], (), index, print)
    folder = tmp_path / "tasks.packages"
    folder.mkdir()
    (folder / "notes.txt").touch()
    with pytest.raises(NeedsUnresolved, match="not a folder of ours"):
        install(wheels, folder, index)
    assert (folder / "notes.txt").exists()
