"""Earlier import paths of plugins lead to the modules themselves, and warn."""

import importlib
import sys
import warnings
from collections.abc import Iterator

import pytest

import composer_mesh
from composer_mesh import moved

pytestmark = pytest.mark.plugins


@pytest.fixture
def earlier() -> Iterator[None]:
    """No earlier path is imported yet, and none stays so."""
    names = tuple(f"composer_mesh.{old}" for old in moved.MOVED)
    kept = {name: one for name, one in sys.modules.items() if name.startswith(names)}
    for name in kept:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.startswith(names)]:
        del sys.modules[name]


@pytest.mark.parametrize("old", moved.MOVED)
def test_an_earlier_path_is_the_module_itself_and_warns(earlier: None, old: str) -> None:
    now = f"composer_mesh.{moved.MOVED[old]}"
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module(f"composer_mesh.{old}".rpartition(".")[0])
    with pytest.warns(DeprecationWarning, match=f"composer_mesh.{old} is {now} now") as warned:
        exec(f"import composer_mesh.{old}")
    assert warned[0].filename == "<string>"  # where it is imported
    found = importlib.import_module(f"composer_mesh.{old}")
    assert found is importlib.import_module(now)
    assert found.__name__ == found.__spec__.name == now


@pytest.mark.parametrize("name", moved.NAMES)
def test_an_earlier_name_is_the_class_itself_and_warns(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delitem(vars(composer_mesh), name, raising=False)
    now = f"composer_mesh.{moved.NAMES[name]}"
    with pytest.warns(
        DeprecationWarning, match=f"composer_mesh.{name} is {now}.{name} now"
    ) as warned:
        found = getattr(composer_mesh, name)
    assert warned[0].filename == __file__
    assert found is getattr(importlib.import_module(now), name)


def test_a_module_of_a_moved_package_has_one_copy_of_each_class(earlier: None) -> None:
    with warnings.catch_warnings(action="ignore"):
        before = importlib.import_module("composer_mesh.tasks.openenv.task")
    assert before.OpenEnvTask is importlib.import_module(before.__name__).OpenEnvTask


@pytest.mark.parametrize("name", ["composer_mesh.tasks.openenvs", "composer_mesh.tasks.absent"])
def test_a_path_that_never_was_is_still_an_error(earlier: None, name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=name):
        importlib.import_module(name)
