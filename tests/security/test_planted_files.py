"""Files that another user plants where a run is expected to write."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ANOTHER_USER = 65534
INSIDE = 'mount -t tmpfs -o mode=0777,uid="$1" tmpfs "$2" && shift 2 && exec "$@"'
STARTED = """
import os, pathlib, sys
private, planted, temporary = (pathlib.Path(path) for path in sys.argv[1:])
(planted / "monarch_log.log").symlink_to(private)
(temporary / "composer-mesh-run-planted").symlink_to(private.parent)
import composer_mesh.mesh.spawn
from composer_mesh.mesh.environment import set_umask
from composer_mesh.mesh.monarch_log import open_log
set_umask()
from monarch.actor import this_host
print(open_log("controller"), flush=True)
this_host().spawn_procs(per_host={"gpus": 1}).initialized.get()
log = "".join(path.read_text() for path in temporary.glob("*/logs/*"))
written = [path for path in [*planted.iterdir(), *temporary.iterdir()] if not path.is_symlink()]
print(len(log) > 1000, [path.name for path in written if path.stat().st_mode & 0o077], flush=True)
os._exit(0)
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as path:
        yield Path(path)


def test_no_link_that_another_user_planted_is_followed_by_a_log(
    tmp_path: Path, temporary: Path
) -> None:
    """In a mount namespace in which the other user was the first to make `/tmp/USER`."""
    private, planted = tmp_path / "id_rsa", Path("/tmp", pwd.getpwuid(os.getuid()).pw_name)
    private.write_text("a key")
    planted.mkdir(exist_ok=True)
    program = [sys.executable, "-P", "-c", STARTED, str(private), str(planted), str(temporary)]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", INSIDE, "sh", str(ANOTHER_USER), str(planted), *program],
        env={**os.environ, "TMPDIR": str(temporary)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    log, written = done.stdout.splitlines()
    assert log.startswith(f"{temporary}/composer-mesh-run-")
    assert written == "True []"
    assert private.read_text() == "a key"
