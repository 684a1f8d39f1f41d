"""The public names: imported when they are used, and all that examples outside the tree need."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from guides import Guide
from repository import ROOT

import composer_mesh
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.tinker import client

PACKAGES = sorted(path.parent for path in (ROOT / "examples").glob("*/pyproject.toml"))
SCRIPTS = sorted((ROOT / "examples").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONFIGS = sorted(path for path in (ROOT / "examples").rglob("*.toml") if "runs" not in path.parts)
OTHER = ("pyproject.toml", "task.toml")
"""Files that are no config of a run: of packages, and of Harbor tasks."""
MODULES = vars(composer_mesh)["_modules"]()
PUBLIC = {
    "composer_mesh": composer_mesh.__all__,
    "composer_mesh.plugins.tinker.client": client.__all__,
}
IMPORTED = (
    "import sys, json, os, composer_mesh; names = dir(composer_mesh); "
    "print(json.dumps([names, sorted(sys.modules), os.environ['MONARCH_LOG_SUFFIX']]))"
)


def test_importing_the_package_needs_python_alone_and_sets_one_variable() -> None:
    bare = [sys.executable, "-S", "-c", IMPORTED]  # as the keepers of sandboxes import it
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(bare, check=True, capture_output=True, env=env)
    names, modules, suffix = json.loads(done.stdout)
    assert set(composer_mesh.__all__) <= set(names)
    assert not [one for one in modules if one.startswith("composer_mesh.")]
    assert not {"torch", "monarch"} & set(modules)
    assert len(suffix) == 32


@pytest.mark.parametrize("name", composer_mesh.__all__)
def test_every_public_name_says_what_it_is(name: str) -> None:
    try:
        assert getattr(composer_mesh, name).__doc__
    except ImportError:
        assert name.startswith("verl_")  # verl is in an environment of its own
        path = MODULES[name].replace(".", "/")
        assert docstring_of(ROOT / f"{path}.py", name)


def docstring_of(path: Path, name: str) -> str | None:
    """The docstring in a file that cannot be imported here."""
    kinds = ast.ClassDef | ast.FunctionDef
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = [one for one in tree.body if isinstance(one, kinds) and one.name == name]
    return ast.get_docstring(found)


def test_service_is_the_module_that_spawns() -> None:
    assert composer_mesh.service is importlib.import_module("composer_mesh.services.service")


@pytest.mark.parametrize(
    ("package", "name", "install"),
    [
        ("trl", "ComposerGRPOTrainer", r"'composer-mesh\[trl\]'"),
        ("websockets", "environment_factory", r"'composer-mesh\[openenv\]'"),
        ("verl", "verl_episode_rows", "verl"),
    ],
)
def test_a_name_whose_package_is_missing_says_what_to_install(
    package: str, name: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(vars(composer_mesh), name, raising=False)
    own = f"composer_mesh.{MODULES[name]}"
    monkeypatch.delitem(sys.modules, own, raising=False)
    for loaded in [one for one in sys.modules if one.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"composer_mesh\.{name} needs .* pip install {install}"):
        getattr(composer_mesh, name)


def test_a_former_name_warns_and_names_the_present_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(composer_mesh)["_RENAMED"], "Trace", "RunReader")
    with pytest.warns(DeprecationWarning, match=r"composer_mesh\.Trace is now composer_mesh\.Run"):
        assert composer_mesh.Trace is composer_mesh.RunReader  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", client.__all__)
def test_every_name_for_clients_is_what_its_module_has_and_says_what_it_is(name: str) -> None:
    path = ROOT / f"{client._MODULES[name].replace('.', '/')}.py"  # some import the Tinker SDK
    assert docstring_of(path, name)


@pytest.mark.parametrize("module", [composer_mesh, client])
def test_another_name_is_no_attribute(module: Any) -> None:
    with pytest.raises(AttributeError, match="nothing"):
        module.nothing  # noqa: B018


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_uses_public_names_only(path: Path) -> None:
    for block in Guide(path.read_text(encoding="utf-8")).blocks("python"):
        check_imports(block)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_uses_public_names_only(path: Path) -> None:
    check_imports(path.read_text(encoding="utf-8"))


def check_imports(code: str) -> None:
    """Fail on an import of this package's that is not public."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            assert not any(one.name.startswith("composer_mesh.") for one in node.names)
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            public = PUBLIC.get(node.module, ())
            assert node.module in PUBLIC or not node.module.startswith("composer_mesh.")
            assert node.module not in PUBLIC or {one.name for one in node.names} <= set(public)


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_a_package_of_the_examples_names_its_modules_and_has_a_config(folder: Path) -> None:
    table = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    named = table["tool"]["setuptools"]
    modules = {path.stem for path in folder.glob("*.py")}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert (modules, packages) == (
        set(named.get("py-modules", ())),
        set(named.get("packages", ())),
    )
    assert "composer-mesh" in table["project"]["dependencies"]
    assert [path for path in CONFIGS if path.parent == folder and path.name != "pyproject.toml"]


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if path.name not in OTHER], ids=lambda path: path.stem
)
def test_a_config_of_the_examples_is_a_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# Hardware: ")
    assert Config.model_validate(tomllib.loads(text)).run.name == tomllib.loads(text)["run"]["name"]
