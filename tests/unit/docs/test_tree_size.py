"""`make size` counts what it says, and puts each file into the package that it is of."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import tree_size
from tree_size import Size, size_of

MODULE = '''"""What it is,
in two lines."""

import os  # a reason


# Another reason.
def root() -> str:
    """Where it is."""
    return os.sep if os else "# not a comment"


FIELD = 1
"""A sentence under a field."""
'''


def written(root: Path, files: dict[str, str]) -> Path:
    subprocess.run(["git", "init", "-q", root], check=True)
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def printed(root: Path) -> dict[str, list[str]]:
    lines = [line.split() for line in tree_size.table(root).splitlines()[1:]]
    return {name: counts for name, *counts in lines}


def test_statements_docstrings_and_comments_are_counted_by_the_grammar(tmp_path: Path) -> None:
    root = written(tmp_path, {"mesh/one.py": MODULE})
    assert size_of(root, "mesh/one.py") == Size(1, 14, 7, 4, 2, (14, "mesh/one.py"))


def test_a_file_that_cannot_be_parsed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError, match=r"one\.py"):
        size_of(written(tmp_path, {"mesh/one.py": "def"}), "mesh/one.py")


def test_the_core_is_all_but_plugins_benchmarks_examples_and_tests(tmp_path: Path) -> None:
    files = ["configs/a.py", "mesh/b.py", "mesh/hosts/c.py", "src/composer_mesh/d.py"]
    others = ["plugins/e/f.py", "plugins/e/g/h.py", "plugins/i/j.py", "plugins/__init__.py"]
    around = ["benchmarks/k.py", "examples/l.py", "tests/unit/m.py", "setup.py", "unknown/n.py"]
    root = written(tmp_path, dict.fromkeys([*files, *others, *around], "pass\n"))
    counts = {name: int(row[0]) for name, row in printed(root).items()}
    core = {"configs": 1, "mesh": 2, "src": 1, ".": 1, "unknown": 1, "core": 6}
    plugins = {"plugins/e": 2, "plugins/i": 1, "plugins": 4}
    assert counts == {**core, **plugins, "benchmarks": 1, "examples": 1, "tests": 1, "all": 13}


def test_the_longest_file_is_named_with_its_lines(tmp_path: Path) -> None:
    root = written(
        tmp_path, {"mesh/a.py": "a = 1\n" * 1200, "mesh/b.py": "pass\n", "tests/c.py": ""}
    )
    assert printed(root)["mesh"] == ["2", "1,201", "1,201", "0", "0", "mesh/a.py", "(1,200)"]


def test_links_ignored_files_and_deleted_files_are_not_counted(tmp_path: Path) -> None:
    files = {"mesh/a.py": "pass\n", "build/b.py": "pass\n", "mesh/c.py": "pass\n"}
    root = written(tmp_path, {**files, ".gitignore": "build\n"})
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    (root / "mesh/c.py").unlink()
    (root / "src/composer_mesh").mkdir(parents=True)
    (root / "src/composer_mesh/mesh").symlink_to("../../mesh")
    assert {name: row[0] for name, row in printed(root).items()} == dict.fromkeys(
        ("mesh", "core", "all"), "1"
    )
