"""The program that is the first process of a container."""

from __future__ import annotations

import os
import platform
import struct
from pathlib import Path

import pytest

from composer_mesh.plugins.harbor.containers import first_process


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 62), ("aarch64", 183)])
def test_it_is_a_static_executable_of_its_machine(machine: str, number: int) -> None:
    content = first_process.program(machine)
    kind, found = struct.unpack_from("<HH", content, 16)
    entry, size = *struct.unpack_from("<Q", content, 24), *struct.unpack_from("<Q", content, 96)
    assert (content[:4], kind, found) == (b"\x7fELF", 2, number)
    assert entry == first_process.BASE + first_process.HEADERS
    assert size == len(content) < 256


def test_it_reports_and_pauses_and_ignores_its_children(tmp_path: Path) -> None:
    if platform.machine() not in ("x86_64", "aarch64"):
        with pytest.raises(NotImplementedError, match="x86_64 and aarch64"):
            first_process.program()
        return
    file = tmp_path / "init"
    file.write_bytes(first_process.program())
    file.chmod(0o755)
    said, says = os.pipe()
    process = os.posix_spawn(file, [str(file)], {}, file_actions=[(os.POSIX_SPAWN_DUP2, says, 1)])
    try:
        os.close(says)
        assert os.read(said, 9) == first_process.READY
        ignored = next(
            line.split()[1]
            for line in Path(f"/proc/{process}/status").read_text().splitlines()
            if line.startswith("SigIgn")
        )
        assert int(ignored, 16) >> first_process.SIGCHLD - 1 & 1
        assert os.waitpid(process, os.WNOHANG) == (0, 0)
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(said)


def test_other_machines_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="not riscv64"):
        first_process.program("riscv64")
