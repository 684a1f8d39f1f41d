"""An attempt at a coding task: a tree that tools change and test, and the verdict on it.

The tree is data. A box exists only while a command runs in it. `CodeSession` has the tools for a
repository: list, read, search, edit, patch, and run a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from composer_mesh.plugins.code_tasks.judge.judged_task import JudgedTask, Verdict, file_of
from composer_mesh.plugins.code_tasks.judge.tests_box import TestResults, run_tests
from composer_mesh.plugins.code_tasks.monitor import model_findings
from composer_mesh.plugins.code_tasks.texts import (
    PatchFailed,
    apply_hunks,
    cut,
    decoded,
    numbered,
    read_patch,
    syntax_error,
)
from composer_mesh.tasks.calls import waiting_for_others
from composer_mesh.tasks.errors import ToolError, UnusableTask
from composer_mesh.tasks.sandbox import CommandResult, FileTree, SandboxSession
from composer_mesh.tasks.session import Session
from composer_mesh.tasks.tool import tool

if TYPE_CHECKING:
    from composer_mesh.plugins.code_tasks.task import CodeTask

Path = Annotated[str, Field(min_length=1, max_length=300)]
Text = Annotated[str, Field(max_length=400_000)]
Files = Annotated[list[Path], Field(max_length=50)]
LONGEST_SHOWN = 200


class CodeWork(Session):
    """One attempt at a coding task: edits, tests, and the verdict on them."""

    task: CodeTask
    judged: JudgedTask
    work: SandboxSession
    test_runs = 0
    _verdict: Verdict | None = None
    _read = False

    def start(self) -> None:
        self.judged = self.task.judged(self.row)
        self.work = SandboxSession(self.task.boxes, FileTree(self.judged.files))

    async def close(self) -> None:
        await self.work.close()

    @property
    def edits(self) -> dict[str, bytes | None]:
        """What the agent has changed so far; None stands for a removed file."""
        return dict(self.work.tree.edits)

    @property
    def judgement(self) -> Verdict:
        """The verdict, once rewards have requested it."""
        if self._verdict is None:
            raise UnusableTask("the session is not judged yet: its rewards are computed first")
        return self._verdict

    async def verdict(self) -> Verdict:
        """Judge the session's edits, once. Waits for two boxes; raises SandboxError."""
        if self._verdict is None:
            with waiting_for_others():
                self._verdict = await self.task.judge_of_code.judge(self.judged, self.edits)
        return self._verdict

    async def read_by_model(self) -> Verdict:
        """Return the verdict with what the model that the options name finds, queried once.

        Waits for the judge. Raises JudgeFailed and JudgesSpent, which are no finding.
        """
        verdict = await self.verdict()
        judge = self.task.model_judge
        if judge is not None and not self._read:
            found = await model_findings(judge, self.judged, self.edits)
            self._read = True
            self._verdict = verdict = replace(verdict, flags={**verdict.flags, **found})
        return verdict

    @tool
    def write_file(self, path: Path, content: Text) -> str:
        """Writes a whole file; one that exists is replaced.

        Args:
            path: Path of the file from the root of the repository.
            content: All that the file contains afterwards.
        """
        return self._write(path, content)

    @tool
    async def run_tests(self, files: Files = []) -> str:  # noqa: B006  a default of a schema
        """Runs tests with pytest and says which failed and why.

        Args:
            files: Paths of test files; by default those that the task names.
        """
        wanted = files or self._known_tests()
        if not wanted:
            raise ToolError("no_tests", "no tests of the task are shown: write some, and name them")
        for path in wanted:
            if path not in self.work.list():
                raise self._no_file(path, "file")
        self.test_runs += 1
        with waiting_for_others():
            results = await run_tests(
                self.task.boxes,
                self.work.tree,
                wanted,
                None,
                self.judged.imports,
                [],
                self.task.limits.tests,
            )
        return self._describe(results)

    @tool
    def submit(self) -> str:
        """Ends the work; what the repository is now is judged."""
        self.end()
        return "submitted"

    def _known_tests(self) -> list[str]:
        """Return the test files of the feature that are shown, or those of everything else."""
        shown = set(self.work.list())
        feature = {file_of(one) for one in self.judged.visible_tests} & shown
        return sorted(feature or set(self.judged.test_files) & shown)

    def _describe(self, results: TestResults) -> str:
        """Return what a run of tests says; raise ToolError where one failed."""
        outcomes = results.outcomes
        bad = [one for one, how in outcomes.items() if how not in {"passed", "skipped", "xfail"}]
        counts = f"{len(outcomes) - len(bad)} passed or skipped, {len(bad)} failed"
        if not bad and outcomes and not results.collection and results.box.report.end is not None:
            return counts
        if results.box.result.ended in {"wall_time", "cpu_time"}:
            limit = f"{results.box.result.seconds:.0f}"
            raise ToolError("tests_timeout", f"{counts}; then they took too long", {"limit": limit})
        texts = [results.failures.get(one, "") for one in bad] + list(results.collection)
        facts = {"test": bad[0] if bad else "none", "assertion": _assertion(texts)}
        body = "\n\n".join([*bad[:20], *texts[:5]])
        if not bad and not texts:
            body = "pytest ended early\n" + decoded(results.box.result.stderr)
        kind = "test_failed" if bad else "tests_not_run"
        raise ToolError(kind, self._cut(f"{counts}\n{body}"), facts)

    def _write(self, path: str, content: str) -> str:
        try:
            self.work.write(path, content.encode("utf-8", errors="replace"))
        except ValueError as error:
            raise ToolError("bad_path", str(error), {"path": path[:LONGEST_SHOWN]}) from None
        broken = syntax_error(path, content)
        if broken is not None:
            line, message = broken
            facts = {"path": path, "line": str(line), "message": message}
            raise ToolError(
                "syntax_error", f"{path} was written, but line {line} is wrong: {message}", facts
            )
        return f"{path} was written"

    def _no_file(self, path: str, what: str) -> ToolError:
        shown = path[:LONGEST_SHOWN]
        return ToolError("no_such_file", f"there is no {what} {shown}", {"path": shown})

    def _cut(self, text: str) -> str:
        return cut(text, self.task.output_characters)


def _assertion(texts: Sequence[str]) -> str:
    """Return the lines of the first failure that pytest marks as the error."""
    for text in texts:
        marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
        if marked:
            return " ".join(marked[:3])[:400]
    return "nothing was asserted"


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
