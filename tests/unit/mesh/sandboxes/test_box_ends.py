"""A box ends with its keeper, also one that had not begun when the keeper ended."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from composer_mesh.mesh.sandboxes import records
from composer_mesh.mesh.sandboxes.box_process import NOT_STARTED
from composer_mesh.mesh.sandboxes.runner import NO_JOB, Streams

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
