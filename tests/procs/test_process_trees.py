"""The helper that runs launchers of ranks: none of their processes outlives a test's time."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_trees import has_ended, run_tree

RANK = (
    "import os, pathlib, sys, time; draft = pathlib.Path(sys.argv[1] + '.draft'); "
    "draft.write_text(str(os.getpid())); draft.rename(sys.argv[1]); time.sleep(600)"
)
LAUNCHER = (
    "import subprocess, sys\n"
    f"rank = [sys.executable, '-c', {RANK!r}, sys.argv[1]]\n"
    "subprocess.Popen(rank, start_new_session=True).wait()"
)


def test_ranks_in_sessions_of_their_own_end_with_the_time_of_their_launcher(
    tmp_path: Path,
) -> None:
    file = tmp_path / "pid"
    for timeout in (5, 60):  # a busy machine may take the longer one to start both
        with pytest.raises(subprocess.TimeoutExpired):
            run_tree([sys.executable, "-c", LAUNCHER, str(file)], timeout=timeout)
        if file.exists():
            break
    deadline = time.monotonic() + 60
    while not has_ended(int(file.read_text())):
        assert time.monotonic() < deadline, "the rank has outlived its launcher"
        time.sleep(0.05)


def test_what_a_program_prints_and_how_it_ends_is_returned() -> None:
    ended = run_tree([sys.executable, "-c", "print('said'); raise SystemExit(3)"], timeout=60)
    assert (ended.returncode, ended.stdout) == (3, "said\n")
