"""Coding tasks as rows of a file, checked before any of them is played.

A row has the fields of `TaskRow`. Files are texts, or {"base64": …} for other bytes; equal files of
many rows are kept once. A row with the fields of `TreeRow` is no task but the original files of a
package, which rows after it name and delete lines of.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from composer_mesh.configs.validation import place_and_text, validated
from composer_mesh.plugins.code_tasks.deletions import Deletion, lines_of, with_deletions
from composer_mesh.plugins.code_tasks.judge.copies import deleted_texts
from composer_mesh.plugins.code_tasks.judge.judged_task import HiddenCase, JudgedTask, file_of
from composer_mesh.plugins.code_tasks.texts import PatchFailed, apply_hunks, decoded, read_patch
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.rows import Row


class DeletedFiles(Mapping[str, bytes]):
    """A shared tree with deletions; a file that has some is made when it is read."""

    def __init__(self, tree: Mapping[str, bytes], deletions: Sequence[Deletion]) -> None:
        """Raises KeyError for a file that the tree lacks, ValueError for lines that it lacks."""
        self._tree = tree
        self._deletions: dict[str, list[Deletion]] = {}
        for one in deletions:
            self._deletions.setdefault(one.path, []).append(one)
        for path, those in self._deletions.items():
            _check_deletions(path, tree[path].decode("utf-8").count("\n") + 1, those)

    def __getitem__(self, path: str) -> bytes:
        content = self._tree[path]
        if path not in self._deletions:
            return content
        return with_deletions(content.decode("utf-8"), self._deletions[path]).encode("utf-8")

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)

    def __contains__(self, path: object) -> bool:
        return path in self._tree

    @property
    def deleted(self) -> list[str]:
        """The texts that are deleted, without the remarks around them."""
        return [
            "".join(lines_of(self._tree[path].decode("utf-8"))[one.first - 1 : one.last])
            for path, those in self._deletions.items()
            for one in those
        ]

    @property
    def solution(self) -> dict[str, str]:
        """The original text of each file that has deletions."""
        return {path: self._tree[path].decode("utf-8") for path in self._deletions}


def restoring_patch(files: Mapping[str, bytes], solution: Mapping[str, str]) -> str | None:
    """Return a unified diff from files to a solution; None where our tool cannot apply it."""
    parts: list[str] = []
    for path, original in solution.items():
        if path not in files:
            return None
        now = decoded(files[path])
        diff = difflib.unified_diff(lines_of(now), lines_of(original), f"a/{path}", f"b/{path}")
        text = "".join(diff)
        try:
            restored = apply_hunks(now, read_patch(text)[0].hunks)
        except PatchFailed:
            return None
        if restored != original:
            return None
        parts.append(text)
    return "".join(parts)


def _check_deletions(path: str, lines: int, deletions: Sequence[Deletion]) -> None:
    end = 0
    for one in sorted(deletions, key=lambda one: one.first):
        if not end < one.first <= one.last <= lines:
            raise ValueError(
                f"{path} has {lines} lines, and lines {one.first} to {one.last} cannot be deleted: "
                "state lines that exist, each once"
            )
        end = one.last


LEAKS = re.compile(
    r"(.*/)?(\.git|\.hg|\.svn|__pycache__|\.mypy_cache|\.pytest_cache|\.ruff_cache|\.tox|\.nox|"
    r"\.venv|[^/]*\.egg-info(?!/PKG-INFO$)|[^/]*\.dist-info)(/.*)?|.*\.(py[co]|orig|rej|whl|egg|tar|gz|zip|so)"
)
"""Files in which a deleted function may still be; metadata that names no code is none of them."""

PATH = re.compile(r"[^/\x00-\x1f\x7f]+(/[^/\x00-\x1f\x7f]+)*")
Path = Annotated[str, Field(min_length=1, max_length=300)]
Content = str | dict[Literal["base64"], str]
T = TypeVar("T", bound=BaseModel)
Name = Annotated[str, Field(min_length=1, max_length=300)]


class CaseRow(BaseModel):
    """A hidden case of a row; see `HiddenCase`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Name
    arguments: list[Any] = Field(default_factory=list)
    keywords: dict[str, Any] = Field(default_factory=dict)
    expected: Annotated[dict[Literal["returned", "raised"], Any], Field(min_length=1, max_length=1)]
    arguments_after: list[Any] | None = None


class TreeRow(BaseModel):
    """The original files of a package, for tasks of later rows."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    tree: Name
    files: dict[Path, Content]


class DeletionRow(BaseModel):
    """Lines of an original file that a task deletes; see `Deletion`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path
    first: Annotated[int, Field(ge=1)]
    last: Annotated[int, Field(ge=1)]
    text: str


class TaskRow(BaseModel):
    """One coding task; see `JudgedTask` for what the judge reads."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: Name
    prompt: Annotated[str, Field(min_length=1, max_length=100_000)]
    package: str = ""
    split: Literal["train", "heldout"] | None = None
    tree: Name | None = None
    """An earlier row's tree, whose files the task has besides its own."""
    deletions: list[DeletionRow] = Field(default_factory=list)
    """Lines that the task deletes of the tree's files; the original files are its solution."""
    files: dict[Path, Content] = Field(default_factory=dict)
    hidden_files: dict[Path, Content] = Field(default_factory=dict)
    sources: Annotated[list[Path], Field(min_length=1)]
    imports: list[str] = Field(default_factory=lambda: ["."])
    targets: list[Name] = Field(default_factory=list)
    fail_to_pass: Annotated[list[Name], Field(min_length=1)]
    pass_to_pass: list[Name] = Field(default_factory=list)
    visible: list[Name] | None = None
    cases: list[CaseRow] = Field(default_factory=list)
    solution: dict[Path, Content] = Field(default_factory=dict)
    """Files with the deleted functions restored; never in a box but as an agent's own edits."""


class TaskFile:
    """The tasks of some rows by name."""

    def __init__(self, rows: Sequence[Row]) -> None:
        """Raises UnusableTask where a row is no task that can be judged."""
        self._known: dict[bytes, bytes] = {}
        self._trees: dict[str, dict[str, bytes]] = {}
        self._solutions: dict[str, Mapping[str, str]] = {}
        self._prompts: dict[str, str] = {}
        self.tasks: dict[str, JudgedTask] = {}
        self.rows: list[Row] = []
        for number, row in enumerate(rows, 1):
            if is_tree(row):
                tree = _checked(number, row, TreeRow)
                self._trees[tree.tree] = self._files(number, tree.files)
            else:
                self._add(number, _checked(number, row, TaskRow))

    def solution(self, name: str) -> Mapping[str, str]:
        """Return the files of a task with what was deleted; none if its row has no solution."""
        files = self.tasks[name].files
        if isinstance(files, DeletedFiles):
            return files.solution
        return self._solutions[name]

    def deleted(self, name: str) -> list[str]:
        """Return the texts that a task lacks and its solution has."""
        task = self.tasks[name]
        if isinstance(task.files, DeletedFiles):
            return task.files.deleted
        return deleted_texts(task, self._solutions[name])

    def _add(self, number: int, row: TaskRow) -> None:
        if row.name in self.tasks:
            raise UnusableTask(f"row {number}: two tasks are called {row.name!r}: rename one")
        if (other := self._prompts.setdefault(row.prompt, row.name)) != row.name:
            raise UnusableTask(
                f"row {number}: tasks {other!r} and {row.name!r} have the same prompt, so nothing "
                "tells their conversations apart: add the task's name to one"
            )
        task = JudgedTask(
            name=row.name,
            files=self._tree(number, row),
            hidden_files=self._files(number, row.hidden_files),
            sources=tuple(row.sources),
            imports=tuple(row.imports),
            targets=tuple(row.targets),
            fail_to_pass=tuple(row.fail_to_pass),
            pass_to_pass=tuple(row.pass_to_pass),
            visible=None if row.visible is None else tuple(row.visible),
            cases=tuple(_case(one) for one in row.cases),
        )
        refuse_unjudgeable(number, task)
        self.tasks[row.name] = task
        self._solutions[row.name] = {
            path: content.decode("utf-8")
            for path, content in self._files(number, row.solution).items()
        }
        about = {"name": row.name, "package": row.package, "prompt": row.prompt}
        self.rows.append({**about, **({} if row.split is None else {"split": row.split})})

    def _tree(self, number: int, row: TaskRow) -> Mapping[str, bytes]:
        """Return the files of a task: its own, or a shared tree with its deletions."""
        own = self._files(number, row.files)
        if row.tree is None:
            return own
        if row.tree not in self._trees:
            raise UnusableTask(
                f"row {number}: no earlier row is the tree {row.tree!r}: put that row first"
            )
        if own or row.solution:
            raise UnusableTask(
                f"row {number} has a tree and also files or a solution: state deletions alone"
            )
        deletions = [Deletion(one.path, one.first, one.last, one.text) for one in row.deletions]
        try:
            return DeletedFiles(self._trees[row.tree], deletions)
        except KeyError as error:
            raise UnusableTask(f"row {number}: tree {row.tree!r} has no file {error}") from None
        except ValueError as error:
            raise UnusableTask(f"row {number}: {error}") from None

    def _files(self, number: int, files: Mapping[str, Content]) -> dict[str, bytes]:
        return {path: self._content(number, path, one) for path, one in files.items()}

    def _content(self, number: int, path: str, content: Content) -> bytes:
        try:
            found = (
                content.encode()
                if isinstance(content, str)
                else base64.b64decode(content["base64"], validate=True)
            )
        except (binascii.Error, KeyError, UnicodeEncodeError) as error:
            raise UnusableTask(f"row {number}: {path} is no text and no base64: {error}") from None
        return self._known.setdefault(found, found)


def refuse_unjudgeable(number: int, task: JudgedTask) -> None:
    """Raise UnusableTask for a tree that still has what was deleted, or lacks its tests."""
    for path in (*task.files, *task.hidden_files):
        if not PATH.fullmatch(path) or {".", ".."} & set(path.split("/")):
            raise UnusableTask(f"row {number}: {path!r} is no path of a repository: leave it out")
        if LEAKS.fullmatch(path):
            raise UnusableTask(
                f"row {number}: {path} may still hold what was deleted: leave it out of the tree"
            )
    for test in task.tests:
        if file_of(test) not in task.files and file_of(test) not in task.hidden_files:
            raise UnusableTask(f"row {number}: no file has the test {test}: add {file_of(test)}")
    unknown = sorted(set(task.visible_tests) - set(task.fail_to_pass))
    if unknown:
        raise UnusableTask(f"row {number}: {unknown[0]} is visible but not in fail_to_pass: add it")
    for case in task.cases:
        if case.target not in task.targets:
            raise UnusableTask(
                f"row {number}: a hidden case calls {case.target}, which is not deleted: name it "
                "in targets, or leave the case out"
            )


def _case(row: CaseRow) -> HiddenCase:
    after = None if row.arguments_after is None else tuple(row.arguments_after)
    expected = {str(kind): value for kind, value in row.expected.items()}
    return HiddenCase(row.target, tuple(row.arguments), row.keywords, expected, after)


def is_tree(row: Row) -> bool:
    """Whether a row is a tree and no task."""
    return "tree" in row and "name" not in row


def _checked(number: int, row: Row, kind: type[T]) -> T:
    try:
        return validated(kind, row)
    except ValidationError as error:
        raise UnusableTask(f"row {number} is no coding task: {place_and_text(error)}") from None
