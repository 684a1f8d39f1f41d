"""Real boxes: what goes in and comes out, what bounds them, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from real_boxes import LAUNCHERS, left_of, why_no_boxes
from real_boxes import boxes_of_each as boxes

from composer_mesh.mesh.programs import PACKAGES
from composer_mesh.mesh.sandboxes.box_process import UID_BLOCKS, UIDS_A_KEEPER
from composer_mesh.mesh.sandboxes.boxes import Boxes
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.sandbox import (
    MIB,
    CommandResult,
    FileTree,
    SandboxError,
    SandboxLimits,
    SandboxSession,
)

__all__ = ["boxes"]
FIRST_UID = 900_000
TREE = FileTree({"lib/a.py": b"x = 1\n", "b.txt": b"before"})
LIMITS = SandboxLimits(
    wall_s=120.0, cpu_s=10, memory_bytes=256 * MIB, processes=16, disk_bytes=8 * MIB
)


async def python(
    boxes: Boxes, source: str, limits: SandboxLimits = LIMITS, stdin: bytes = b""
) -> CommandResult:
    """Run Python source in a box."""
    return await boxes.run(TREE, ["python3", "-c", source], limits=limits, stdin=stdin)


async def test_a_command_gets_the_tree_and_its_input_and_its_changes_come_out(
    boxes: Boxes,
) -> None:
    source = """
import os, sys
print(os.getcwd(), open("lib/a.py").read().strip(), sys.stdin.read())
print("err", file=sys.stderr)
os.makedirs("new/folder"); open("new/folder/c.py", "w").write("made")
open("b.txt", "w").write("after"); os.remove("lib/a.py")
sys.exit(3)
"""
    result = await python(boxes, source, stdin=b"hello")
    assert (result.exit_code, result.ended, result.output_cut) == (3, "exited", False)
    assert (result.stdout, result.stderr) == (b"/w x = 1 hello\n", b"err\n")
    assert result.changed == {"new/folder/c.py": b"made", "b.txt": b"after", "lib/a.py": None}


async def test_a_session_advances_and_what_a_test_runs_with_is_in_the_box(
    boxes: Boxes,
) -> None:
    session = SandboxSession(boxes, FileTree({"lib.py": b"def one(): return 2\n"}))
    session.write("test_lib.py", b"import lib\ndef test_one(): assert lib.one() == 1\n")
    tests = ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    failed = await session.exec(tests)
    assert (failed.exit_code, dict(failed.changed)) == (1, {}), failed
    session.write("lib.py", b"def one(): return 1\n")
    passed = await session.exec(tests)
    assert (passed.exit_code, b"1 passed" in passed.stdout) == (0, True)


async def test_only_regular_files_with_plain_names_come_out(boxes: Boxes) -> None:
    source = r"""
import os, socket
os.symlink("/etc/passwd", "link.py"); os.symlink("/", "slash"); os.mkfifo("pipe")
os.link("b.txt", "hard.txt"); socket.socket(socket.AF_UNIX).bind("socket")
open("new\nline", "w"); open(b"\xff\xfe.py", "w"); open("good.py", "w").write("good")
os.makedirs("d/" * 200)
os.makedirs("y" * 200 + "/" + "z" * 200); open("x" * 200, "w")
os.remove("lib/a.py"); os.symlink("/etc/passwd", "lib/a.py")
open("shut", "w").write("s"); os.chmod("shut", 0); os.makedirs("dark/in"); os.chmod("dark", 0)
"""
    result = await python(boxes, source)
    assert result.exit_code == 0, result.stderr
    names = {"hard.txt": b"before", "good.py": b"good", "shut": b"s"}
    assert result.changed == {**names, "x" * 200: b""}
    refused = "\n".join(result.refused_paths)
    for name in ("link.py", "slash", "pipe", "socket", "new", "lib/a.py", "yyy/zzz", "d/d"):
        assert name in refused or name.replace("\n", "") in refused, name


async def test_a_million_files_are_bounded_where_they_come_out(boxes: Boxes) -> None:
    source = "for i in range(12_000): open(str(i), 'w')"
    result = await python(boxes, source)
    assert result.ended == "exited"
    assert len(result.changed) <= 10_000
    assert 0 < len(result.refused_paths) <= 100


BEGINS = "import time; print('began', flush=True); time.sleep(600)"
ENDINGS = {
    "cpu_time": ("while True: pass", {"cpu_s": 1, "wall_s": 200.0}),
    "signal": ("import os; os.kill(os.getpid(), 11)", {}),
}


@pytest.mark.parametrize("ended", ENDINGS)
async def test_a_command_that_is_ended_says_by_what(boxes: Boxes, ended: str) -> None:
    source, limits = ENDINGS[ended]
    result = await python(boxes, source, replace(LIMITS, **limits))
    assert (result.exit_code, result.ended) == (None, ended)


async def test_a_command_that_is_ended_by_its_time_says_what_it_has_written(boxes: Boxes) -> None:
    for wall_s in (2.0, 60.0):  # a busy machine may take the longer one to start Python
        result = await python(boxes, BEGINS, replace(LIMITS, wall_s=wall_s))
        assert (result.exit_code, result.ended) == (None, "wall_time")
        if result.stdout:
            break
    assert result.stdout == b"began\n"


async def test_output_is_kept_up_to_its_limit_and_a_flood_ends_nothing(boxes: Boxes) -> None:
    source = "import sys\nfor _ in range(300): sys.stdout.write('x' * 100_000)"
    result = await python(boxes, source, replace(LIMITS, output_bytes=1000))
    assert (result.exit_code, len(result.stdout), result.output_cut) == (0, 1000, True)


async def test_memory_is_bounded_for_each_process_and_for_all(boxes: Boxes) -> None:
    one = await python(boxes, "bytearray(300 << 20)")
    assert b"MemoryError" in one.stderr
    if boxes.groups is None:
        pytest.skip(f"no control group bounds a box: {boxes.groups_told}")
    source = """
import os
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(os.urandom(1 << 20) * 100); os.read(0, 1); os._exit(0)
os.kill(0, 0)
held = bytearray(os.urandom(1 << 20) * 120)
print(sum(os.wait()[1] == 0 for _ in range(6)))
"""
    tree = await python(boxes, source)
    assert tree.ended in ("memory", "exited")
    assert tree.ended == "memory" or int(tree.stdout) < 4


async def test_no_command_ends_or_forges_its_box(boxes: Boxes) -> None:
    sources = {
        "kill the runner": "import os; os.kill(os.getppid(), 9)",
        "kill all": "import os; os.kill(-1, 9)",
        "write to the runner's socket": "import os; p = os.getppid()\n"
        "os.write(os.open(f'/proc/{p}/fd/0', os.O_WRONLY), b'z' + bytes(10))",
        "write to the runner's memory": "import os; open(f'/proc/{os.getppid()}/mem', 'r+b')",
    }
    found = {}
    for name, source in sources.items():
        result = await python(boxes, source)
        found[name] = (result.ended, result.exit_code, dict(result.changed))
    # In nsjail the runner is the first process, which no process of its namespace can kill.
    first = boxes.launcher.name == "nsjail"
    assert found == {
        "kill the runner": ("exited", 0, {}) if first else ("signal", None, {}),
        "kill all": ("exited", 1, {}) if first else ("signal", None, {}),
        "write to the runner's socket": ("exited", 1, {}),
        "write to the runner's memory": ("exited", 1, {}),
    }


async def test_a_stopped_runner_is_ended_at_the_boxs_own_deadline() -> None:
    if (missing := why_no_boxes()) is not None:
        pytest.skip(missing)
    source = "import os; open('new', 'w'); os.kill(os.getppid(), 19)"
    for start_s in (2.0, 60.0):  # a busy machine may take the longer one to start a box
        sandbox = Boxes(boxes=1, packages=(), start_s=start_s)
        with suppress(SandboxError):
            result = await python(sandbox, source, replace(LIMITS, wall_s=1.0))
            break
        await sandbox.close()
    await sandbox.close()
    assert (result.ended, result.exit_code, dict(result.changed)) == ("wall_time", None, {})


async def test_a_child_that_keeps_the_pipe_open_neither_hangs_nor_writes_on(
    boxes: Boxes,
) -> None:
    source = """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        with open("late.txt", "ab") as file: file.write(b"x" * 1000)
"""
    result = await python(boxes, source)
    assert result.ended == "exited"
    assert result.seconds < LIMITS.wall_s / 2


async def test_boxes_do_not_see_each_other_or_what_an_earlier_one_left(
    boxes: Boxes,
) -> None:
    source = """
import os
for name in ("/w/mark", "/tmp/mark", "/dev/shm/mark"):
    assert not os.path.exists(name), name
    open(name, "w")
assert len([one for one in os.listdir("/proc") if one.isdigit()]) < 5
"""
    results = await asyncio.gather(*(python(boxes, source) for _ in range(4)))
    assert [one.stderr for one in results] == [b""] * 4


async def test_a_cancelled_command_leaves_no_box(boxes: Boxes) -> None:
    running = asyncio.ensure_future(python(boxes, "import time; time.sleep(600)"))
    for _ in range(3):
        await python(boxes, "pass")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await python(boxes, "print(1)")).stdout == b"1\n"


async def test_many_commands_at_once_are_all_answered_by_one_keeper(boxes: Boxes) -> None:
    keeper = boxes.keeper
    odd = replace(LIMITS, disk_bytes=4 * MIB)
    commands = (boxes.run(TREE, ["true"], limits=(LIMITS, odd)[n % 2]) for n in range(80))
    results = await asyncio.gather(*commands)
    assert [one.exit_code for one in results] == [0] * 80
    assert boxes.keeper == keeper


async def test_a_killed_keeper_is_replaced(boxes: Boxes) -> None:
    os.kill(boxes.keeper, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, boxes.keeper, os.WEXITED | os.WNOWAIT)
    assert (await python(boxes, "print(1)")).stdout == b"1\n"


async def test_a_keeper_killed_with_requests_unread_loses_none_of_them(boxes: Boxes) -> None:
    os.kill(boxes.keeper, signal.SIGSTOP)  # so that the requests wait in its socket
    asked = [asyncio.ensure_future(python(boxes, "print(1)")) for _ in range(2)]
    await asyncio.sleep(0)  # each has sent its request
    os.kill(boxes.keeper, signal.SIGKILL)
    assert [one.stdout for one in await asyncio.gather(*asked)] == [b"1\n"] * 2


WORKER = """
import asyncio, sys
from composer_mesh.mesh.sandboxes.boxes import Boxes
from composer_mesh.tasks.sandbox import FileTree
async def main():
    boxes = Boxes(boxes=2, packages=(), first_uid=int(sys.argv[1]), launcher=sys.argv[2])
    await boxes.run(FileTree({}), ["true"])
    print(boxes.keeper, boxes.folder, flush=True)
    commands = (["sleep", "600"], ["sh", "-c", "sleep 600 & sleep 600"])
    await asyncio.gather(*(boxes.run(FileTree({}), one) for one in commands))
asyncio.run(main())
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("with_keeper", [False, True])
async def test_nothing_is_left_of_a_worker_that_is_killed(with_keeper: bool, launcher: str) -> None:
    if (missing := why_no_boxes(launcher)) is not None:
        pytest.skip(missing)
    if os.geteuid() != 0:
        pytest.skip("without root, boxes have no users of their own to look for")
    first = FIRST_UID + os.getpid() % UID_BLOCKS * UIDS_A_KEEPER  # not those of another test run
    uids = range(first, first + UIDS_A_KEEPER)
    with subprocess.Popen(  # noqa: ASYNC220 nothing else runs on this loop
        [sys.executable, "-c", WORKER, str(uids.start), launcher],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(PACKAGES)},
    ) as worker:
        assert worker.stdout is not None
        number, folder = worker.stdout.readline().decode().split()
        keeper = os.pidfd_open(int(number))
        before = left_of(uids, int(number), folder)
        if with_keeper:
            signal.pidfd_send_signal(keeper, signal.SIGKILL)
        worker.kill()
    await asyncio.to_thread(_wait_for_end, keeper)
    if with_keeper:  # the kernel ends the boxes; what else is left goes with the next start
        await Boxes(boxes=1, packages=()).close()
    assert before
    end = time.monotonic() + 60.0
    while left := left_of(uids, int(number), folder):  # what was killed ends when it has a core
        assert with_keeper, left
        assert time.monotonic() < end, left
        await asyncio.sleep(0.05)


def _wait_for_end(process: int) -> None:
    import select

    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    assert waiting.poll(60_000)
    os.close(process)


async def test_a_closed_sandbox_says_so() -> None:
    if (missing := why_no_boxes()) is not None:
        pytest.skip(missing)
    sandbox = Boxes(boxes=1, packages=())
    await sandbox.close()
    with pytest.raises(Exception, match="closed"):
        await sandbox.run(TREE, ["true"])


def test_the_number_of_boxes_is_bounded() -> None:
    with pytest.raises(UnusableTask, match=r"options\.boxes is 99"):
        Boxes(boxes=99)
