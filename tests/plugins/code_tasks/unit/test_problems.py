"""Files of problems like HumanEval become a package with a module and a test for each."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.plugins.code_tasks.command.problems import package_of_problems
from composer_mesh.plugins.code_tasks.command.sources import SourceUnavailable, opened
from composer_mesh.plugins.code_tasks.making.functions import functions_in
from composer_mesh.plugins.code_tasks.making.package import package_of

PROBLEM = {
    "task_id": "Small/0",
    "prompt": 'def twice(number: int) -> int:\n    """Return the double."""\n',
    "entry_point": "twice",
    "canonical_solution": "    return 2 * number\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
}


def written(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_a_problem_is_a_module_whose_function_can_be_deleted_and_a_test(tmp_path: Path) -> None:
    file = tmp_path / "small-problems.jsonl.gz"
    file.write_bytes(gzip.compress(written(PROBLEM, PROBLEM)))
    found = opened(str(file), ())
    package = package_of(found.name, found.version, found.sha256, found.files)
    path = "small_problems/problem_001.py"
    content = package.files[path]
    assert [one.qualname for one in functions_in(path, "m", content, 1).functions] == ["twice"]
    assert functions_in(path, "m", content).functions == []
    assert package.test_files == ("tests/test_problem_000.py", "tests/test_problem_001.py")
    assert found.fewest_lines == 1


def test_its_test_checks_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = package_of_problems("small", written(PROBLEM))
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)
    space: dict[str, Any] = {}
    exec(files["tests/test_problem_000.py"], space)
    space["test_problem_000"]()
    space["check"] = lambda _: pytest.fail("checked")
    with pytest.raises(pytest.fail.Exception):
        space["test_problem_000"]()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it has no problem"),
        (written(PROBLEM) + b"{\n", "small.jsonl cannot be read: line 2 is not JSON in UTF-8"),
        (b'{"prompt": "\xe9"}\n', "line 1 is not JSON in UTF-8 .*0xe9 in position 12"),
        (b"[1]\n", "line 1 is no problem: it needs the texts prompt"),
        (written({**PROBLEM, "test": 3}), "line 1 is no problem"),
        (written({**PROBLEM, "entry_point": "a.b"}), "no name of a function"),
        (written({**PROBLEM, "canonical_solution": "    return (\n"}), "problem 0 is no Python"),
        (b"\x1f\x8bno gzip", "cannot be read"),
    ],
)
def test_a_file_that_holds_no_problems_is_refused(
    content: bytes, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "small.jsonl"
    file.write_bytes(content)
    with pytest.raises(SourceUnavailable, match=says):
        opened(str(file), ())
