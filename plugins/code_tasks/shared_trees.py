"""Trees that many tasks of one package share: the original files, and what each task deletes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

from composer_mesh.plugins.code_tasks.deletions import Deletion, lines_of, with_deletions
from composer_mesh.plugins.code_tasks.patches import PatchFailed, apply_hunks, read_patch
from composer_mesh.plugins.code_tasks.texts import decoded


class DeletedFiles(Mapping[str, bytes]):
    """A shared tree with deletions; a file that has some is made when it is read."""

    def __init__(self, tree: Mapping[str, bytes], deletions: Sequence[Deletion]) -> None:
        """Raises KeyError for a file that the tree lacks, ValueError for lines that it lacks."""
        self._tree = tree
        self._deletions: dict[str, list[Deletion]] = {}
        for one in deletions:
            self._deletions.setdefault(one.path, []).append(one)
        for path, those in self._deletions.items():
            _check(path, tree[path].decode("utf-8").count("\n") + 1, those)

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


def _check(path: str, lines: int, deletions: Sequence[Deletion]) -> None:
    end = 0
    for one in sorted(deletions, key=lambda one: one.first):
        if not end < one.first <= one.last <= lines:
            raise ValueError(
                f"{path} has {lines} lines, and lines {one.first} to {one.last} cannot be deleted: "
                "state lines that exist, each once"
            )
        end = one.last
