"""The command that makes coding tasks: refusals, the split of packages, the file and the table.

Source distributions are read and never run. Files of problems like HumanEval become a package with
a module and a test for each.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytest_httpserver import HTTPServer
from small_packages import FILES, archive

from composer_mesh.plugins.code_tasks.command.command import (
    MakeOptions,
    MakeRefused,
    Results,
    held_out,
    make_code_tasks_command,
    table_of,
)
from composer_mesh.plugins.code_tasks.command.sources import (
    SourceUnavailable,
    opened,
    package_of_problems,
    unpacked,
)
from composer_mesh.plugins.code_tasks.making.functions import functions_in
from composer_mesh.plugins.code_tasks.making.make import Made
from composer_mesh.plugins.code_tasks.making.package import PackageRefused, package_of

HERE = Path(__file__)
OPTIONS = MakeOptions(
    sources=("toolz",),
    output=Path("tasks.jsonl"),
    limit=None,
    jobs=None,
    heldout=(),
    packages=(),
    folders=(),
    indexes=(),
    suite_s=240.0,
    generated=4,
    bugs=0,
    rename=False,
    check=None,
    sample=None,
    gradings=1,
)


def made(name: str, tasks: int = 2) -> Made:
    rows: list[dict[str, Any]] = [
        {
            "name": f"{name}/{number}",
            "kind": "function",
            "lines": number + 3,
            "fail_to_pass": ["t"],
            "cases": [],
        }
        for number in range(tasks)
    ]
    return Made(name, "1", [{"tree": name}, *rows], 9, 5, {"no test": 3}, 2.0, 8, rows)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"sources": ()}, "name a SOURCE"),
        ({"sources": ("toolz", "toolz")}, "toolz is named twice"),
        ({"output": None}, "--output is None"),
        ({"output": Path("tasks.txt")}, "ends in .jsonl"),
        ({"output": Path("no/such/folder/tasks.jsonl")}, "has no folder"),
        ({"limit": 0}, "--limit is 0: give 1 or more"),
        ({"generated": 9}, "--generated is 9: give 0 to 8"),
        ({"bugs": -1}, "--bugs is -1: give 0 to 100"),
        ({"gradings": 0}, "--gradings is 0"),
        ({"check": Path("tasks.jsonl")}, "name no SOURCE"),
        (
            {"check": HERE, "sources": (), "output": HERE},
            "name another file for --output",
        ),
        ({"check": Path("none.jsonl"), "sources": (), "output": None}, "is not a file"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_a_box_is_made(
    changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(MakeRefused, match=says):
        make_code_tasks_command(replace(OPTIONS, **changed), print)


def test_whole_packages_are_held_out() -> None:
    packages = [f"p{number}" for number in range(10)]
    assert held_out(packages, []) == {"p4", "p9"}
    assert held_out(packages, ["p1"]) == {"p1"}
    assert held_out(["one"], []) == frozenset()


def test_rows_are_written_in_the_order_of_the_sources_with_their_split(tmp_path: Path) -> None:
    done: dict[str, Made | str] = {"b": made("b"), "c": "it has no tests", "a": made("a")}
    results, file = Results(["a", "b", "c"], done), tmp_path / "tasks.jsonl"
    assert results.write(file, []) == 4
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row.get("name", row.get("tree")) for row in rows] == [
        "a",
        "a/0",
        "a/1",
        "b",
        "b/0",
        "b/1",
    ]
    assert [row.get("split") for row in rows] == [None, *["train"] * 2, None, *["heldout"] * 2]
    assert [one.name for one in tmp_path.iterdir()] == ["tasks.jsonl"]


def test_nothing_is_written_where_no_task_was_made(tmp_path: Path) -> None:
    assert Results(["a"], {"a": made("a", 0)}).write(tmp_path / "tasks.jsonl", []) == 0
    assert list(tmp_path.iterdir()) == []


def test_the_table_tells_each_package_and_what_was_refused() -> None:
    table = "\n".join(table_of(Results(["a", "c"], {"a": made("a"), "c": "it has no tests"})))
    assert table.split("\n")[1].split() == ["a", "1", "9", "8", "5", "2", "0", "3.5", "1.0", "2"]
    assert "candidates refused: 3: no test" in table
    assert table.endswith("c: refused: it has no tests")


PAGE = '<a href="/small-1.2.tar.gz#sha256={}">small-1.2.tar.gz</a>'


def served(server: HTTPServer, sha256: str) -> list[str]:
    server.expect_request("/simple/small/").respond_with_data(
        PAGE.format(sha256), content_type="text/html"
    )
    server.expect_request("/small-1.2.tar.gz").respond_with_data(archive())
    return [server.url_for("/simple")]


def test_an_archive_is_read_without_its_first_folder(tmp_path: Path) -> None:
    file = tmp_path / "small-1.2.tar.gz"
    file.write_bytes(archive())
    found = opened(str(file), [])
    assert found.files == FILES
    assert (found.name, found.version) == ("small", "1.2")
    assert found.sha256 == hashlib.sha256(archive()).hexdigest()


def test_a_folder_has_a_checksum_of_its_files(tmp_path: Path) -> None:
    for path, content in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    found = opened(str(tmp_path), [])
    assert found.files == FILES
    (tmp_path / "README.md").write_bytes(b"Other.")
    assert opened(str(tmp_path), []).sha256 != found.sha256


def test_a_package_of_an_index_is_fetched_with_its_checksum(httpserver: HTTPServer) -> None:
    indexes = served(httpserver, hashlib.sha256(archive()).hexdigest())
    assert opened("small", indexes).files == FILES


def test_an_archive_that_is_not_what_the_index_states_is_refused(httpserver: HTTPServer) -> None:
    with pytest.raises(SourceUnavailable, match="but the index states"):
        opened("small", served(httpserver, "0" * 64))


def test_a_package_that_no_index_has_is_refused(httpserver: HTTPServer) -> None:
    httpserver.expect_request("/simple/small/").respond_with_data("", content_type="text/html")
    with pytest.raises(SourceUnavailable, match="no index has a source distribution of small"):
        opened("small", [httpserver.url_for("/simple")])


def test_links_and_devices_of_an_archive_are_left_out() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            member = tarfile.TarInfo(f"small-1/{kind.decode()}")
            member.type, member.linkname = kind, "/etc/passwd"
            packed.addfile(member)
    assert unpacked("small-1.tar.gz", buffer.getvalue()).files == {}


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK]
)
def test_a_header_that_states_gigabytes_is_refused_and_not_read(kind: bytes) -> None:
    stated = tarfile.TarInfo("small-1/x")
    stated.type, stated.size = kind, 4 << 30
    content = gzip.compress(stated.tobuf(tarfile.GNU_FORMAT) + bytes(64 << 20), 1)
    tracemalloc.start()
    try:
        with pytest.raises(PackageRefused, match="a header of 4,294,967,296 bytes"):
            unpacked("small-1.tar.gz", content)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE])
@pytest.mark.parametrize("size", [-512, 4 << 30])
def test_a_file_that_states_an_impossible_size_is_refused(kind: bytes, size: int) -> None:
    stated = tarfile.TarInfo("small-1/x")
    stated.type, stated.size = kind, size
    content = gzip.compress(stated.tobuf(tarfile.GNU_FORMAT) + bytes(10_240))
    with pytest.raises(PackageRefused, match=r"a header of -512 bytes|unpacks to too much"):
        unpacked("small-1.tar.gz", content)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("small-1.tar.gz", b"no archive", "cannot be read"),
        ("small-1.zip", b"no archive", "cannot be read"),
        ("small.whl", b"", "is not a source distribution"),
    ],
)
def test_what_is_no_source_distribution_is_refused(name: str, content: bytes, says: str) -> None:
    with pytest.raises(SourceUnavailable, match=says):
        unpacked(name, content)


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(SourceUnavailable, match="is neither a file nor a folder"):
        opened("none/small-1.tar.gz", [])


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
        (b"[1]\n", "line 1 is not a problem: it needs the texts prompt"),
        (written({**PROBLEM, "test": 3}), "line 1 is not a problem"),
        (written({**PROBLEM, "entry_point": "a.b"}), "is not a name of a function"),
        (written({**PROBLEM, "canonical_solution": "    return (\n"}), "problem 0 is not Python"),
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
