"""The agent on a host: started again if its process is late, and gone with the worker."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from live_run import GONE_DEADLINE_S
from workers import worker

HELPERS = Path(__file__).parent / "helpers"

LATE_ONCE = """
import os, sys, time

if "monarch._src.actor.bootstrap_main" in sys.orig_argv:
    with open(os.environ["STARTS"], "a+") as starts:
        starts.seek(0)
        first = not starts.read()
        print(os.getpid(), file=starts, flush=True)
    if first:
        time.sleep(60)
"""
"""A sitecustomize.py: the first process that Monarch starts on the host sleeps before it begins."""


def test_an_agent_that_is_late_is_started_again_and_leaves_nothing(tmp_path: Path) -> None:
    site, starts = tmp_path / "site", tmp_path / "starts"
    site.mkdir()
    (site / "sitecustomize.py").write_text(LATE_ONCE)
    paths = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths, "STARTS": str(starts)}
    options = ("--listen", "tcp://127.0.0.1:0", "--wait", "60")
    with worker(tmp_path, "host-0", tmp_path, *options, env=env) as one:
        command = [sys.executable, str(HELPERS / "attaching.py"), one.address, "8s"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        *late, attached = done.stdout.splitlines()
        assert set(late) == {"host-0-agent its process was not ready within 8s"}
        assert len(starts.read_text().split()) >= 2
        assert attached == f"attached to {socket.gethostname()}"
        assert one.process.wait(GONE_DEADLINE_S) == 0
        one.until_gone(GONE_DEADLINE_S)
    assert "the run gave this host back" in one.log.read_text()
