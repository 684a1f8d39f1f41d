"""The root of a box has what is named, and nothing in which deleted code could still be found."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pydantic_core._pydantic_core as compiled
import pytest

from composer_mesh.mesh import programs
from composer_mesh.mesh.sandboxes.root import build_root
from composer_mesh.tasks.errors import UnusableTask


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with pytest in it."""
    return build_root(tmp_path_factory.mktemp("boxes") / "root", ["pytest"], [])


def names_in(root: Path) -> set[str]:
    return {name for _, folders, files in os.walk(root) for name in (*folders, *files)}


def test_a_root_has_no_pip_no_installed_packages_and_no_version_control(root: Path) -> None:
    names = names_in(root)
    assert not names & {"pip", "ensurepip", "site-packages", "dist-packages", "git", ".git", "uv"}
    assert not [one for one in names if one.endswith((".whl", ".zip", ".tar.gz", ".pyc"))]
    assert {"pytest", "pluggy", "iniconfig"} <= {one.name for one in (root / "packages").iterdir()}
    assert not (root / "packages" / "torch").exists()


def test_each_user_can_read_a_root_and_only_its_owner_write_it(root: Path) -> None:
    for path, folders, files in os.walk(root):
        for name in (*folders, *files):
            one = Path(path, name)
            if not one.is_symlink():
                assert one.stat().st_mode & 0o044 == 0o044, one
                assert not one.stat().st_mode & 0o022, one


def test_a_root_names_no_folder_of_this_machine_as_a_link(root: Path) -> None:
    links = [Path(path, one) for path, d, f in os.walk(root) for one in (*d, *f)]
    absolute = {
        str(one.readlink()) for one in links if one.is_symlink() and one.readlink().is_absolute()
    }
    assert absolute == {"/proc/self/fd"}  # a box has its own /proc


def test_a_package_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableTask, match="no-such-package"):
        build_root(tmp_path / "root", ["no-such-package"], [])


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableTask, match="name another"):
        build_root(tmp_path / "root", [], [tmp_path / "missing"])


def test_bytecode_that_was_asked_for_is_there_for_packages_and_names_no_folder_of_this_machine(
    tmp_path: Path,
) -> None:
    root = build_root(tmp_path / "root", ["iniconfig"], [], bytecode=True)
    compiled = list((root / "packages").rglob("*.pyc"))
    assert {one.name.partition(".")[0] for one in compiled} >= {"__init__", "exceptions"}
    assert not [one for one in compiled if bytes(tmp_path) in one.read_bytes()]


def test_compiled_modules_of_a_folder_find_the_libraries_that_they_load(tmp_path: Path) -> None:
    extension = Path(compiled.__file__)
    folder = tmp_path / "needed"
    folder.mkdir()
    shutil.copyfile(extension, folder / extension.name)
    root = build_root(tmp_path / "root", [], [folder])
    loaded = programs.run(["ldd", str(extension)]).stdout
    if "libgcc_s" not in loaded:
        pytest.skip("no compiled module here loads a library that Python itself does not")
    assert (root / "usr/lib/libgcc_s.so.1").is_file()
    assert (root / "packages" / extension.name).is_file()
