"""What a box reports is data of a stranger: bounded, checked, and never believed to be whole.

A box ends with its keeper, also one that had not begun when the keeper ended.
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import subprocess
import sys

import pytest

from composer_mesh.mesh.sandboxes import records
from composer_mesh.mesh.sandboxes.box_process import NOT_STARTED
from composer_mesh.mesh.sandboxes.box_stream import Reported, job_bytes, read_reported
from composer_mesh.mesh.sandboxes.boxes import result_of
from composer_mesh.mesh.sandboxes.runner import NO_JOB, Streams
from composer_mesh.tasks.sandbox import FileTree, SandboxError, SandboxLimits

TREE = FileTree({"kept.py": b"kept", "folder/gone.py": b"gone"})
LIMITS = SandboxLimits(file_bytes=1000, disk_bytes=1500, output_bytes=100)
STARTED, END = records.record(records.STARTED), records.record(records.END)
EXITED = records.record(records.EXITED, data=b"3")


async def read(said: bytes) -> Reported:
    reader = asyncio.StreamReader()
    reader.feed_data(said)
    reader.feed_eof()
    return await read_reported(reader, TREE, LIMITS)


def file(path: bytes, content: bytes = b"new") -> bytes:
    return records.record(records.FILE, path, content)


async def test_a_report_becomes_the_result_of_a_command() -> None:
    said = (
        *(STARTED, EXITED, records.record(records.SECONDS, data=b"0.5")),
        *(records.record(records.STDOUT, data=b"out"), records.record(records.STDERR, data=b"err")),
        *(file(b"a/b.py"), records.record(records.REMOVED, b"folder/gone.py"), END),
    )
    result = result_of(await read(b"".join(said)), {})
    assert (result.exit_code, result.ended, result.seconds) == (3, "exited", 0.5)
    assert (result.stdout, result.stderr, result.output_cut) == (b"out", b"err", False)
    assert result.changed == {"a/b.py": b"new", "folder/gone.py": None}


NO_PATHS = (
    *(b"../up.py", b"/etc/passwd", b"a//b", b"./a", b"a/../../b", b"", b"new\nline", b"x" * 301),
    *(b"nul\0byte", b"\xff\xfe.py", b"escape\x1b[2J", b"\xed\xa0\x80.py"),
)


@pytest.mark.parametrize("path", NO_PATHS)
async def test_no_name_that_leaves_the_tree_is_taken_over(path: bytes) -> None:
    reported = await read(STARTED + EXITED + file(path) + END)
    assert reported.complete
    assert reported.changed == {}
    assert len(reported.refused) == 1


BAD = (
    records.record(b"?"),
    file(b"large.py", b"x" * 1001),
    file(b"one.py", b"x" * 900) + file(b"two.py", b"x" * 900),
    file(b"twice.py") + file(b"twice.py"),
    file(b"gone.py") + records.record(records.REMOVED, b"gone.py"),
    records.record(records.REMOVED, b"never/there.py"),
    records.record(records.STDOUT, data=b"x" * 101),
    records.record(records.EXITED, data=b"-1"),
    records.record(records.EXITED, data=b"256"),
    records.record(records.SECONDS, data=b"nan"),
    records.record(records.SECONDS, data=b"-1"),
    records.record(records.REFUSED, b"x" * 5000),
    records.FILE + b"\xff\xff" + b"\xff" * 8,
    records.STARTED * 20_000,
)


@pytest.mark.parametrize("bad", BAD)
async def test_a_forged_report_is_a_command_that_ended_itself(bad: bytes) -> None:
    result = result_of(await read(STARTED + EXITED + bad + END), {"memory": 0, "late": False})
    assert (result.ended, result.exit_code, result.changed) == ("signal", None, {})


@pytest.mark.parametrize(
    ("told", "ended"),
    [
        ({"memory": 0, "late": False}, "signal"),
        ({"memory": 2, "late": False}, "memory"),
        ({"memory": 0, "late": True}, "wall_time"),
    ],
)
async def test_a_box_that_ends_without_a_report_has_changed_nothing(
    told: dict[str, int], ended: str
) -> None:
    result = result_of(await read(STARTED + file(b"a.py")), told)
    assert (result.ended, result.changed) == (ended, {})


async def test_a_box_that_never_started_the_command_is_infrastructure() -> None:
    told = {"memory": 0, "late": False, "status": 256, "errors": "bwrap: no namespaces"}
    with pytest.raises(SandboxError, match="no namespaces"):
        result_of(await read(b""), told)


async def test_random_bytes_are_no_report() -> None:
    for seed in range(300):
        chosen = random.Random(seed)
        said = chosen.randbytes(chosen.randrange(200))
        reported = await read(STARTED + said)
        assert not reported.complete
        assert sum(len(one or b"") for one in reported.changed.values()) <= LIMITS.disk_bytes


def test_what_no_program_can_be_given_is_refused() -> None:
    for argv in ([], ["a\0b"], ["\ud800"]):
        with pytest.raises(ValueError, match="command"):
            job_bytes(TREE, argv, b"", LIMITS, {})
    with pytest.raises(ValueError, match="command"):
        job_bytes(TREE, ["true"], b"", LIMITS, {"A": "\0"})


DEADLINE_S = 60.0


def finished(program: str, text: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a Python program with this input, which ends with it."""
    return subprocess.run(
        [sys.executable, "-c", program],
        input=text,
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.parametrize("sent", [b"", records.JOB, records.record(records.JOB, data=b"true")[:-1]])
def test_a_runner_whose_job_never_comes_whole_ends(sent: bytes) -> None:
    done = finished("from composer_mesh.mesh.sandboxes.runner import read_job; read_job()", sent)
    assert done.returncode == NO_JOB


@pytest.mark.parametrize(
    ("parent", "status", "printed"),
    [("os.getppid()", 0, b"begins\n"), ("os.getppid() + 1", NOT_STARTED, b"")],
)
def test_a_box_begins_only_while_its_keeper_lives(parent: str, status: int, printed: bytes) -> None:
    done = finished(
        "import os\n"
        "from composer_mesh.mesh.sandboxes.box_process import die_with_parent\n"
        f"die_with_parent({parent})\n"
        "print('begins')"
    )
    assert (done.returncode, done.stdout) == (status, printed)


def test_output_beyond_the_limit_is_left_out_and_said_to_be() -> None:
    streams = Streams(b"", limit=10)
    os.write(streams.child_out, b"0123456789abc")
    os.write(streams.child_err, b"0123456789")
    streams.begin(select.poll())
    streams.drain()
    for descriptor in streams.kept:
        os.close(descriptor)
    assert (streams.texts(), streams.cut) == ([b"0123456789"] * 2, True)
