"""The tools for a repository: list, read, search, edit, patch, and run a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from composer_mesh.plugins.code_tasks.patches import PatchFailed, apply_hunks, read_patch
from composer_mesh.plugins.code_tasks.texts import decoded, numbered
from composer_mesh.plugins.code_tasks.work import LONGEST_SHOWN, CodeWork, Path, Text
from composer_mesh.tasks.calls import waiting_for_others
from composer_mesh.tasks.errors import ToolError
from composer_mesh.tasks.sandbox import CommandResult
from composer_mesh.tasks.tool import tool

Line = Annotated[int, Field(ge=1, le=1_000_000)]
Count = Annotated[int, Field(ge=1, le=1000)]
Word = Annotated[str, Field(max_length=20_000)]
Words = Annotated[list[Word], Field(min_length=1, max_length=100)]
MOST_FOUND = 100
MOST_LISTED = 500


class CodeSession(CodeWork):
    """One attempt at a coding task of a repository."""

    @tool
    def list_files(self, folder: Annotated[str, Field(max_length=300)] = "") -> str:
        """Lists the files of the repository.

        Args:
            folder: Only those below this folder.
        """
        prefix = f"{folder.strip('./')}/" if folder.strip("./") else ""
        found = [path for path in self.work.list() if path.startswith(prefix)]
        if not found:
            raise self._no_file(folder, "folder")
        rest = len(found) - MOST_LISTED
        return "\n".join(found[:MOST_LISTED]) + (f"\n[{rest} more files]" if rest > 0 else "")

    @tool
    def read_file(self, path: Path, first_line: Line = 1, lines: Count = 250) -> str:
        """Reads lines of a file, with their numbers.

        Args:
            path: Path of the file from the root of the repository.
            first_line: Number of the first line.
            lines: How many lines.
        """
        return self._cut(numbered(self._text(path), first_line, lines))

    @tool
    def search(
        self,
        text: Annotated[str, Field(min_length=1, max_length=200)],
        folder: Annotated[str, Field(max_length=300)] = "",
    ) -> str:
        """Finds a text in the files of the repository; it is no pattern.

        Args:
            text: What to look for, with upper and lower case as it is.
            folder: Only in files below this folder.
        """
        prefix = folder.strip("./")
        found: list[str] = []
        for path in self.work.list():
            if path.startswith(prefix) and text in (content := decoded(self.work.read(path))):
                found += _matches(path, content, text)
        rest = len(found) - MOST_FOUND
        shown = "\n".join(found[:MOST_FOUND]) + (f"\n[{rest} more lines]" if rest > 0 else "")
        return self._cut(shown) if found else "nothing found"

    @tool
    def edit(self, path: Path, old: Text, new: Text) -> str:
        """Replaces a text that occurs exactly once in a file.

        Args:
            path: Path of the file from the root of the repository.
            old: The text as it is in the file, with its indentation and without line numbers.
            new: What stands there instead.
        """
        text = self._text(path)
        count = text.count(old) if old else 0
        if count != 1:
            facts = {"path": path, "count": str(count)}
            said = f"the text occurs {count} times in {path}, but must occur once: nothing changed"
            raise ToolError("edit_no_match" if not count else "edit_ambiguous", said, facts)
        return self._write(path, text.replace(old, new, 1))

    @tool
    def apply_patch(self, diff: Text) -> str:
        """Applies a unified diff, to all of its files or to none.

        Args:
            diff: Lines with --- and +++ and the paths, then hunks that begin with @@.
        """
        try:
            files = read_patch(diff)
            written: dict[str, str | None] = {}
            for one in files:
                path = one.new or one.old or ""
                before = self._text(one.old) if one.old is not None else ""
                written[path] = None if one.new is None else apply_hunks(before, one.hunks)
        except PatchFailed as error:
            raise ToolError("patch_failed", str(error), {"reason": str(error)}) from None
        for path, content in written.items():
            if content is None:
                self.work.remove(path)
        return "\n".join(
            self._write(path, content) for path, content in written.items() if content is not None
        )

    @tool
    async def run_command(self, command: Words) -> str:
        """Runs a program in the repository, without a network; Python is python3.

        Args:
            command: The program and its arguments, such as ["python3", "-c", "print(1)"].
        """
        with waiting_for_others():
            result = await self.work.exec(command, limits=self.task.limits.command)
        text = self._cut(_output(result))
        if result.ended in {"wall_time", "cpu_time"}:
            facts = {"command": command[0][:LONGEST_SHOWN], "limit": f"{result.seconds:.0f}"}
            raise ToolError("command_timeout", f"it took too long and was ended\n{text}", facts)
        if result.ended == "memory":
            raise ToolError("command_memory", f"it used too much memory\n{text}")
        code = "ended by a signal" if result.exit_code is None else f"exit code {result.exit_code}"
        return f"{code}\n{text}"

    def _text(self, path: str) -> str:
        if path not in self.work.list():
            raise self._no_file(path, "file")
        return decoded(self.work.read(path))


def _matches(path: str, content: str, text: str) -> Sequence[str]:
    return [
        f"{path}:{number}: {line[:LONGEST_SHOWN]}"
        for number, line in enumerate(content.splitlines(), 1)
        if text in line
    ]


def _output(result: CommandResult) -> str:
    parts = [decoded(result.stdout), decoded(result.stderr)]
    cut_off = "\n[the output was too long and is cut]" if result.output_cut else ""
    return "\n".join(part for part in parts if part.strip()) + cut_off
