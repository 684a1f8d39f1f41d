"""What is registered by the core, by plugins and by other packages, and what is not.

Validation ends at the first error, and one error is described however many there are.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from repository import ROOT
from strangers import CONFIG, Environment, install

from composer_mesh.configs import plugins
from composer_mesh.configs.validation import (
    MANY_ERRORS,
    MOST_ERRORS,
    errors_of,
    fail_fast,
    first_error,
    place_and_text,
    validated,
    validated_json,
)
from composer_mesh.services.commands.parser import Command

FOLDERS = sorted(path.parent.name for path in (ROOT / "plugins").glob("*/plugin.py"))


TABLES = [f"{plugins.PLUGINS}.{name}.plugin" for name in FOLDERS]


MARKS = "from pathlib import Path\nPath('imported').touch()\n"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Has a package with names of its own, one with a name of ours, and one with a name of that."""
    made = Environment.with_polite(tmp_path_factory.mktemp("environment"))
    both = {"composer_mesh.commands": "train = rude:train\ntwice = rude:one"}
    install(made.packages, "rude", {"rude.py": MARKS}, both)
    install(made.packages, "other", {}, {"composer_mesh.commands": "twice = rude:other"})
    return made


def test_every_name_is_registered_once_by_a_known_kind() -> None:
    tables = [plugins.CORE, *(importlib.import_module(table).TABLE for table in TABLES)]
    assert {kind for table in tables for kind in table} <= set(plugins.KINDS)
    count = Counter((kind, name) for table in tables for kind in table for name in table[kind])
    assert [name for name, times in count.items() if times > 1] == []
    assert {kind: set(plugins.own(kind)) for kind in plugins.KINDS} == {
        kind: {name for one, name in count if one == kind} for kind in plugins.KINDS
    }


def test_every_command_is_one() -> None:
    for name in plugins.own("commands"):
        assert isinstance(plugins.load("commands", name), Command), name


@pytest.mark.plugins
def test_only_the_command_that_is_run_is_imported() -> None:
    code = (
        "import sys, json; from composer_mesh.services.cli import main; main(['scale', 'x', 'y']); "
        "print(json.dumps([*sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "composer_mesh.services.commands.training" not in loaded
    folders = [plugins.PLUGINS, *(f"{plugins.PLUGINS}.{name}" for name in FOLDERS)]
    assert {one for one in loaded if one.startswith(plugins.PLUGINS)} == {*folders, *TABLES}


def test_a_command_of_another_package_runs_and_is_listed(
    environment: Environment, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    done = environment.run("greet", "run.toml", "--to", "you", cwd=tmp_path)
    assert done.stdout == "good day you\n", done.stderr
    listed = environment.run("--help", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "greet" in listed.stdout
    assert not (tmp_path / "imported").exists()


def test_a_config_may_name_what_another_package_registers(
    environment: Environment, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    done = environment.run("check", "run.toml", "--set", "manners.greeting=hi", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in (r"manners +greeting = \"hi\"", r"data +task = \"echo\"", r"type = \"notes\""):
        assert re.search(line, done.stdout)


REFUSED = {
    "manners.greting=hi": "did you mean manners.greeting?",
    "manners.greeting=1": "manners.greeting = 1",
    "generator.engine=vlm": "'vlm' is not registered: did you mean vllm?",
    "cluster.kind=cloud": "'cloud' is not registered: write one of the launchers local",
    "data.task=eco": "one of the tasks toolbox",
    "tracking=[{type='note'}]": "type must be one of 'tensorboard'",
    "tracking=[{type='notes', file='x'}]": "tracking[0].file",
}


"""What is set, and what its refusal says."""


def test_what_nobody_registers_is_refused_with_the_names_that_are(
    environment: Environment, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    code = (
        "import sys; from composer_mesh.services.cli import main\n"
        "for override in sys.argv[1:]:\n"
        "    status = main(['check', 'run.toml', '--set', override])\n"
        "    print(status, flush=True); print('=', file=sys.stderr, flush=True)"
    )
    command = [str(environment.folder / "bin" / "python"), "-c", code, *REFUSED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"] * len(REFUSED), done.stderr
    messages = done.stderr.split("=\n")
    assert messages.pop() == ""
    for said, message in zip(REFUSED.values(), messages, strict=True):
        assert said in message


def test_a_config_with_a_section_of_another_package_crosses_processes(
    tmp_path: Path, environment: Environment
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    code = (
        "import pickle; from pathlib import Path; from composer_mesh.configs.load import *; "
        "config = load_config(Path('run.toml')); sent = pickle.loads(pickle.dumps(config)); "
        "again = resolve_config(parse_toml(dump_toml(config)), [], 'again'); import polite; "
        "bare = config.model_copy(update={'manners': None}).section(polite.Manners); "
        "print(sent == config == again, sent.section(polite.Manners).greeting, bare.greeting)"
    )
    command = [str(environment.folder / "bin" / "python"), "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "True good day hello\n", done.stderr


def test_a_name_of_ours_is_not_replaced_and_both_are_named(
    environment: Environment, tmp_path: Path
) -> None:
    done = environment.run("train", "x.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert "composer_mesh.services.commands.training:train of the core" in done.stderr
    assert "the package rude registers it as rude:train" in done.stderr
    assert not (tmp_path / "imported").exists()
    assert "x.toml does not exist" in environment.run("check", "x.toml", cwd=tmp_path).stderr


def test_a_name_of_two_packages_is_neither(environment: Environment, tmp_path: Path) -> None:
    done = environment.run("twice", cwd=tmp_path)
    assert done.returncode == 2
    assert "the package rude" in done.stderr
    assert "the package other" in done.stderr
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("searched", ["", "."])
def test_metadata_in_the_working_directory_registers_nothing(
    environment: Environment, tmp_path: Path, searched: str
) -> None:
    """Neither as the place where Python was started nor as a folder of PYTHONPATH."""
    install(
        tmp_path, "planted", {"planted.py": MARKS}, {"composer_mesh.commands": "gree = planted:x"}
    )
    done = environment.run("gree", cwd=tmp_path, **({"PYTHONPATH": searched} if searched else {}))
    assert done.returncode == 2
    assert "'gree' is not a command: did you mean greet" in done.stderr
    assert not (tmp_path / "imported").exists()


def core_alone(folder: Path) -> Path:
    """A copy of the package without its plugins; returns what to put on PYTHONPATH."""
    ignored = shutil.ignore_patterns("*.pyc.*")  # what other processes are compiling
    for link in (ROOT / "src" / "composer_mesh").iterdir():
        if link.is_symlink() and link.name != "plugins":
            shutil.copytree(ROOT / link.name, folder / link.name, ignore=ignored)
    package = folder / "src" / "composer_mesh"
    shutil.copytree(ROOT / "src" / "composer_mesh", package, symlinks=True, ignore=ignored)
    return folder / "src"


def test_without_the_folder_of_plugins_the_core_says_what_is_missing(tmp_path: Path) -> None:
    core_alone(tmp_path)
    bare = Environment.make(tmp_path / "environment", tmp_path / "src")
    checked = bare.run("check", str(ROOT / "configs" / "quickstart.toml"), cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    preset = str(ROOT / "configs" / "quickstart.toml")
    wandb = "tracking=[{type='wandb'}]"
    for words, said in {
        ("dashboard",): "'dashboard' is not a command",
        ("check", preset, "--set", "data.task=code"): "data.task is 'code'",
        ("check", preset, "--set", wandb): "'wandb' is not registered",
        ("check", preset, "--set", "manners.greeting=x"): "unknown key",
    }.items():
        refused = bare.run(*words, cwd=tmp_path)
        assert refused.returncode == 2
        assert said in refused.stderr
        assert "composer_mesh.plugins is missing" in refused.stderr


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_without_the_folder_of_plugins_tests_of_the_core_are_collected_and_pass(
    tmp_path: Path,
) -> None:
    """All test files of the core are imported; those of the commands and of tasks are run.

    Tests of the user's functions, each of which starts a program, are left to the suite itself.
    """
    environment = {**os.environ, "PYTHONPATH": str(core_alone(tmp_path))}
    ignored = shutil.ignore_patterns("*.pyc.*", "plugins")
    for folder in ("tests", "benchmarks", "examples", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"):
        shutil.copy(ROOT / file, tmp_path)
    chosen = "(test_cli.py and not function) or test_users_tasks.py"
    words = ["tests/unit", "--suite", "core", "-k", chosen]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d{2,} passed, .*\d{4,} deselected", done.stdout), done.stdout[-300:]


MANY = 100_000


Count = Annotated[int, Field(ge=0)]


class Inner(BaseModel):
    counts: list[Count] = []
    metadata: dict[str, Count] = {}


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    type: list[Inner] = field(default_factory=list)
    default: tuple[Count, ...] = ()
    members: set[Count] = field(default_factory=set)
    again: list[Outer] = field(default_factory=list)
    pairs: list[tuple[int, str]] | dict[str, list[Count]] = field(default_factory=list)


class Refusing(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = ""


BAD = [-1] * MANY


OUTER = fail_fast(Outer)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"inner": {"counts": BAD}}, "inner.counts.0"),
        ({"inner": {"counts": [0, 1, *BAD]}}, "inner.counts.2"),
        ({"inner": {"metadata": {str(one): -1 for one in range(MANY)}}}, "inner.metadata.0"),
        ({"type": [{"counts": BAD}] * 3}, "type.0.counts.0"),
        ({"type": BAD}, "type.0"),
        ({"default": BAD}, "default.0"),
        ({"members": list(range(-MANY, 0))}, "members.0"),
        ({"again": [{"again": [{"default": BAD}]}]}, "again.0.again.0.default.0"),
    ],
)
def test_a_collection_at_any_depth_ends_at_its_first_invalid_entry(
    value: dict[str, Any], place: str
) -> None:
    readers: list[Callable[[], Outer]] = [
        lambda: OUTER.validate_python(value),
        lambda: OUTER.validate_json(json.dumps(value)),
    ]
    for read in readers:
        with pytest.raises(ValidationError) as refused:
            read()
        assert refused.value.error_count() == 1
        assert place_and_text(refused.value).startswith(f"{place}: Input should be")


def test_a_model_that_is_built_on_first_use_fails_fast_too() -> None:
    class Deferred(BaseModel):
        model_config = ConfigDict(defer_build=True)

        counts: list[Count]

    with pytest.raises(ValidationError) as refused:
        validated(Deferred, {"counts": BAD})
    assert refused.value.error_count() == 1
    assert validated(Deferred, {"counts": [1]}).counts == [1]


def test_each_alternative_of_a_value_has_one_error() -> None:
    with pytest.raises(ValidationError) as refused:
        OUTER.validate_python({"pairs": {str(one): BAD for one in range(3)}})
    assert refused.value.error_count() == 2


def test_valid_values_are_what_pydantic_makes_of_them() -> None:
    value = {"inner": {"counts": [1], "metadata": {"a": 2}}, "default": [3], "pairs": {"b": [4]}}
    assert OUTER.validate_python(value) == Outer(
        Inner(counts=[1], metadata={"a": 2}), default=(3,), pairs={"b": [4]}
    )
    assert validated(Inner, {}) == validated_json(Inner, "{}") == Inner()


def test_more_errors_than_are_described_are_one_with_their_number() -> None:
    extra = {str(one): 0 for one in range(MOST_ERRORS + 1)}
    with pytest.raises(ValidationError) as refused:
        validated(Refusing, extra)
    assert refused.value.error_count() == MOST_ERRORS + 1
    assert [one["type"] for one in errors_of(refused.value)] == [MANY_ERRORS]
    assert place_and_text(refused.value) == f"{MOST_ERRORS + 1} values are invalid"


def test_an_error_has_its_input_only_on_request() -> None:
    with pytest.raises(ValidationError) as refused:
        validated(Refusing, {"name": 3})
    assert "input" not in first_error(refused.value)
    assert first_error(refused.value, with_input=True)["input"] == 3
