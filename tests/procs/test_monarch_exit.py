"""The exit of a program that used Monarch: our handler shuts its client down, before Monarch's."""

import subprocess
import sys

PROGRAM = """
from monarch._src.actor import actor_mesh

from composer_mesh.mesh.hosts import host
from composer_mesh.mesh.hosts.host import LocalHost

shut_down = host.shutdown_context


def told(**limits):
    print("ours is first" if not actor_mesh._shutdown_claimed else "Monarch's was first")
    return shut_down(**limits)


host.shutdown_context = told
LocalHost().mesh
"""


def test_the_client_is_shut_down_once_by_our_handler_which_waits_for_it() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "ours is first\n"), done.stderr
