"""What a fork server prints when its owner has ended: nothing, however many forks end later."""

import subprocess
import sys

SERVER = """
import os, socket, subprocess, tempfile, time
from pathlib import Path
from composer_mesh.mesh.hosts.exit_status import ExitStatuses
from composer_mesh.mesh.fork_server.server import ForkServer

for number in range(5):
    if os.fork() == 0:
        time.sleep(1 + 0.1 * number)
        os._exit(0)
owner = subprocess.Popen(["true"])
with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
    listening.bind(f"{folder}/listens")
    listening.listen()
    ForkServer(listening, ExitStatuses(Path(folder)), owner.pid).serve()
until = time.monotonic() + 2
while time.monotonic() < until:
    time.sleep(0.05)
"""


def test_forks_that_end_after_the_server_print_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
