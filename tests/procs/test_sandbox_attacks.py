"""Attacks on boxes, as code of an agent makes them: none leaves its box.

The probes of a start are tried too: in a box with holes they must find them.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from real_boxes import boxes_of_each as boxes
from sandbox_attempts import ATTEMPTS

from composer_mesh.mesh.sandboxes.boxes import Boxes
from composer_mesh.mesh.sandboxes.launchers import find_launcher
from composer_mesh.mesh.sandboxes.probes import (
    ATTACKS,
    ProbeFinding,
    open_sandbox,
    probed,
    refuse_leaks,
    targets,
)
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.sandbox import MIB, CommandResult, FileTree, SandboxLimits

__all__ = ["boxes"]
LIMITS = SandboxLimits(
    wall_s=120.0, cpu_s=10, memory_bytes=256 * MIB, processes=16, disk_bytes=8 * MIB
)
FOUND_BY_LOOKING = """
import os, sys, zipfile
found = []
for root, folders, files in os.walk("/", onerror=None):
    if root.startswith("/proc"):
        folders.clear()
        continue
    for name in folders + files:
        ends = (".pyc", ".whl", ".zip", ".gz", ".egg", ".git", ".orig")
        if name in WANTED or name.endswith(ends):
            found.append(root + "/" + name)
print(found)
"""


async def python(boxes: Boxes, source: str, limits: SandboxLimits = LIMITS) -> CommandResult:
    """Run Python source in a box."""
    return await boxes.run(FileTree({}), ["python3", "-c", source], limits=limits)


@pytest.fixture(scope="module")
def attempts(boxes: Boxes) -> Mapping[str, CommandResult]:
    """Results of all attempts, some at a time."""
    os.environ["COMPOSER_MESH_SECRET"] = "SECRET"

    async def all_of_them() -> Sequence[CommandResult]:
        return await asyncio.gather(*(python(boxes, one) for one in ATTEMPTS.values()))

    try:
        return dict(zip(ATTEMPTS, asyncio.run(all_of_them()), strict=True))
    finally:
        del os.environ["COMPOSER_MESH_SECRET"]


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_no_attempt_leaves_its_box(attempt: str, attempts: Mapping[str, CommandResult]) -> None:
    if "syscall(" in ATTEMPTS[attempt] and platform.machine() != "x86_64":
        pytest.skip("its numbers of system calls are those of x86_64")
    result = attempts[attempt]
    by_memory = attempt.startswith("62") and result.ended == "memory"
    assert result.exit_code == 0 or by_memory, result


async def test_what_was_deleted_is_nowhere_in_a_box(boxes: Boxes) -> None:
    wanted = ("pip", "ensurepip", "site-packages", "git", "uv", ".mypy_cache", ".pytest_cache")
    source = FOUND_BY_LOOKING.replace("WANTED", repr(wanted))
    result = await python(boxes, source)
    assert result.stdout == b"[]\n", result


async def test_a_fork_bomb_is_bounded_and_ends_with_its_box(boxes: Boxes) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = await python(boxes, bomb, replace(LIMITS, wall_s=1.0))
    assert result.ended in ("wall_time", "signal")
    assert (await python(boxes, "print(1)")).stdout == b"1\n"


async def test_no_start_of_a_sandbox_finds_a_leak_in_our_boxes(boxes: Boxes) -> None:
    findings = await probed(boxes)
    assert [one.attack for one in findings if one.got and one.needed] == []
    assert len(findings) == 23


def test_a_sandbox_is_opened_with_what_it_holds(boxes: Boxes) -> None:
    sandbox = open_sandbox(boxes=1, packages=())
    try:
        lines = list(sandbox.describe())
    finally:
        asyncio.run(sandbox.close())
    assert "bubblewrap" in lines[0]
    assert len(lines) == 24
    assert lines[1].split() == ["read", "host", "file", "held"]


@pytest.fixture
def leaks(boxes: Boxes) -> Iterator[dict[str, str]]:
    """What the attacks get in a box with holes, as a user without rights."""
    binary = find_launcher("bubblewrap").binary
    with targets(boxes.folder) as (facts, arrived):
        box = (
            *(str(binary), "--ro-bind", "/", "/", "--dev", "/dev", "--unshare-user"),
            *("--tmpfs", "/w" if Path("/w").exists() else "/mnt", "--setenv", "API_KEY", "1"),
        )
        command = [*box, "/usr/bin/python3", "-c", ATTACKS, json.dumps(facts)]
        user = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
        done = subprocess.run(command, capture_output=True, check=False, **user)  # type: ignore[call-overload]
        got = json.loads(done.stdout)
        got["udp_to_host"] = arrived()
        yield got


def test_the_probes_find_the_holes_of_a_box_that_has_them(leaks: dict[str, str]) -> None:
    found = {name for name, got in leaks.items() if got}
    assert found >= {
        *("read_host_file", "tcp_to_host", "udp_to_host", "abstract_socket", "other_families"),
        *("host_processes", "user_namespace", "kernel_interfaces", "environment_secrets"),
        *("terminal_input", "control_groups"),
    }
    with pytest.raises(UnusableTask, match="boxes are not safe") as refused:
        refuse_leaks([ProbeFinding(name, got) for name, got in leaks.items()])
    assert "tcp_to_host" in str(refused.value)


def test_what_bounds_nothing_without_a_control_group_is_said_and_not_refused() -> None:
    finding = ProbeFinding("memory_of_all_processes", "400 MiB", needed=False)
    refuse_leaks([finding])
    assert "not bounded" in str(finding)
