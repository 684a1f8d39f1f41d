"""A sandbox for tests that is none: a plain process in a temporary folder."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from composer_mesh.tasks.sandbox import CommandResult, FileTree, SandboxLimits


class ProcessSandbox:
    """Runs commands with this machine's Python; `commands` are those that were run."""

    def __init__(self) -> None:
        self.commands: list[Sequence[str]] = []

    async def run(
        self,
        tree: FileTree,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        limits: SandboxLimits = SandboxLimits(),  # noqa: B008
        environment: Mapping[str, str] = {},
    ) -> CommandResult:
        self.commands.append(argv)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for path in tree.files():
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(tree.read(path))
            return await self._run(folder, argv, stdin, limits, environment)

    async def _run(
        self,
        folder: Path,
        argv: Sequence[str],
        stdin: bytes,
        limits: SandboxLimits,
        environment: Mapping[str, str],
    ) -> CommandResult:
        before = _contents(folder)
        began = time.monotonic()
        program = sys.executable if argv[0] == "python3" else argv[0]
        process = await asyncio.create_subprocess_exec(
            *(program, *argv[1:]),
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), **environment},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(limits.wall_s):
                out, err = await process.communicate(stdin)
            ended = "exited" if process.returncode >= 0 else "signal"
        except TimeoutError:
            os.killpg(process.pid, 9)
            out, err = await process.communicate()
            ended = "wall_time"
        after = _contents(folder)
        changed = {path: after.get(path) for path in before.keys() | after.keys()}
        return CommandResult(
            exit_code=process.returncode if ended == "exited" else None,
            ended=ended,
            stdout=out[: limits.output_bytes],
            stderr=err[: limits.output_bytes],
            output_cut=max(len(out), len(err)) > limits.output_bytes,
            seconds=time.monotonic() - began,
            changed={path: new for path, new in changed.items() if new != before.get(path)},
            refused_paths=(),
        )

    async def close(self) -> None:
        """Nothing is held."""


def _contents(folder: Path) -> dict[str, bytes]:
    files = (one for one in folder.rglob("*") if one.is_file() and not one.is_symlink())
    return {str(one.relative_to(folder)): one.read_bytes() for one in files}
