"""The layout of the repository is what the decisions say it is."""

import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from repository import ROOT

FLOORS = (
    *("configs", "planning", "losses", "rollouts", "channels", "tasks", "mesh", "actors"),
    *("services", "plugins"),
)
SOURCES = sorted(path for layer in FLOORS for path in (ROOT / layer).rglob("*.py"))
LAUNCHERS = {"subprocess", "multiprocessing"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("layer", FLOORS)
def test_each_part_of_the_package_is_a_relative_link_to_its_folder(layer: str) -> None:
    link = ROOT / "src" / "composer_mesh" / layer
    assert link.is_symlink()
    assert link.readlink() == Path("..", "..", layer)
    assert (link / "__init__.py").is_file()


def test_init_files_hold_a_docstring_and_nothing_else_but_public_names() -> None:
    for path in (path for path in SOURCES if path.name == "__init__.py"):
        module = parsed(path)
        assert ast.get_docstring(module), path
        assert len(module.body) == 1 or path == ROOT / "plugins/tinker/client/__init__.py", path


def test_every_module_says_what_it_is() -> None:
    assert [path for path in SOURCES if not ast.get_docstring(parsed(path))] == []


def test_a_public_class_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path))
    twice = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert twice.keys() <= {"Turn"}  # a client of Tinker's protocol has turns of its own


def test_only_ten_places_start_processes() -> None:
    """Actors, their forks, agents of hosts, programs and their guards, boxes, their commands.

    One is a program that runs inside a box; the last two are containers and their commands.
    """
    starters = [path for path in SOURCES if starts_processes(parsed(path))]
    places = (
        "fork_server/server.py",
        "hosts/guard.py",
        "hosts/remote.py",
        "programs.py",
        "sandboxes/keeper.py",
        "sandboxes/runner.py",
        "spawn.py",
    )
    in_boxes = ROOT / "plugins/code_tasks/making/programs/try_deletions.py"
    containers = ROOT / "plugins/harbor/containers"
    in_containers = [containers / "box_exec.py", containers / "box_keeper.py"]
    assert starters == [*(ROOT / "mesh" / place for place in places), in_boxes, *in_containers]


def test_values_of_others_are_validated_in_one_place() -> None:
    """`errors()` describes every error of a value, however many; configs are bounded files."""
    configs = {"configs/load.py", "plugins/frameworks/verl/agent_loop.py", "kubernetes/names.py"}
    found = [
        f"{path}: {name}"
        for path in SOURCES
        if path != ROOT / "configs" / "validation.py"
        for name in sorted(called_names(parsed(path)))
        if name in {"errors", "model_validate", "model_validate_json"}
        if not any(path == ROOT / one or path.as_posix().endswith(one) for one in configs)
    ]
    assert found == []
    adapters = [path for path in SOURCES if "TypeAdapter" in called_names(parsed(path))]
    only_for_their_schema = ROOT / "plugins" / "openenv" / "server" / "session.py"
    assert adapters == [ROOT / "configs" / "validation.py", only_for_their_schema]


def called_names(module: ast.Module) -> set[str]:
    calls = [node.func for node in ast.walk(module) if isinstance(node, ast.Call)]
    attributes = {call.attr for call in calls if isinstance(call, ast.Attribute)}
    return attributes | {call.id for call in calls if isinstance(call, ast.Name)}


def starts_processes(module: ast.Module) -> bool:
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and node.attr in ("spawn_procs", "fork", "Popen"):
            return True
        if isinstance(node, ast.Import) and LAUNCHERS & {alias.name for alias in node.names}:
            return True
        if isinstance(node, ast.ImportFrom) and node.module in LAUNCHERS:
            return True
    return False


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [str(command), "--no-cache", "--config", str(ROOT / "pyproject.toml")],
        cwd=folder,
        env={"PYTHONPATH": str(folder / "src")},
        capture_output=True,
        text=True,
        check=False,
    )


def copied(folder: Path) -> Path:
    """The package alone, to break."""
    for layer in FLOORS:
        shutil.copytree(ROOT / layer, folder / layer, ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copytree(ROOT / "src" / "composer_mesh", folder / "src" / "composer_mesh", symlinks=True)
    return folder


FAULTS = [
    ("configs/load.py", "composer_mesh.planning", "A layer imports only"),
    ("planning/mesh_layout.py", "composer_mesh.losses", "A layer imports only"),
    ("losses/__init__.py", "composer_mesh.rollouts", "A layer imports only"),
    ("channels/step.py", "composer_mesh.tasks.task", "A layer imports only"),
    ("services/pool/replicas.py", "composer_mesh.services.run.mesh", "A package of services"),
    ("actors/models/lora.py", "composer_mesh.actors.learning.step", "A package of actors"),
    ("actors/trainer.py", "composer_mesh.actors.generator", "and no actor another"),
    ("rollouts/__init__.py", "monarch.actor", "never import Monarch"),
    ("configs/base.py", "torch", "Configs and planning never import torch"),
    ("planning/memory.py", "torch", "Configs and planning never import torch"),
    ("planning/memory.py", "monarch.actor", "never import Monarch"),
    ("services/cli.py", "subprocess", "Processes start in mesh.spawn"),
    ("services/cli.py", "composer_mesh.plugins.tinker.commands", "A layer imports only"),
    (
        "plugins/tinker/commands.py",
        "composer_mesh.plugins.islands.commands",
        "Plugins never import each other",
    ),
]
"""Files, what they must not import, and the contract that says so."""

UNLISTED = [
    ("", "A layer imports only"),
    ("services", "A package of services"),
    ("actors", "A package of actors"),
]
"""Packages that have a new folder, and the contract that names it."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said of a package with all faults and new folders, by the broken contract."""
    copy = copied(tmp_path_factory.mktemp("broken"))
    for file, module, _ in FAULTS:
        path = copy / file
        path.write_text(f"{path.read_text()}\nimport {module}\n")
    for package, _ in UNLISTED:
        folder = copy / "src" / "composer_mesh" / package / "unlisted"
        folder.mkdir()
        (folder / "__init__.py").write_text('"""New."""\n')
    report = lint_imports(copy)
    assert report.returncode == 1, report.stdout + report.stderr
    said = report.stdout.partition("Broken contracts")[2]
    parts = re.split(r"^(\S.*)\n-+$", said, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize(("file", "module", "contract"), FAULTS)
def test_a_broken_import_layer_is_found(
    broken: dict[str, str], file: str, module: str, contract: str
) -> None:
    """Reported with the file, by the contract, among all other faults."""
    (said,) = (text for name, text in broken.items() if contract in name)
    importer = f"composer_mesh.{file.removesuffix('.py').removesuffix('/__init__')}"
    imported = module.partition(".")[0] if module.startswith("monarch") else module
    assert f"{importer.replace('/', '.')} -> {imported} (l." in " ".join(said.split())


@pytest.mark.parametrize(("package", "contract"), UNLISTED)
def test_a_new_folder_that_no_layer_lists_is_found(
    broken: dict[str, str], package: str, contract: str
) -> None:
    (said,) = (text for name, text in broken.items() if contract in name)
    assert ".".join(filter(None, ("composer_mesh", package, "unlisted"))) in said.split()
