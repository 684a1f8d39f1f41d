"""Where Monarch writes its log: into a private, bounded file, whatever is at the usual path."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_mesh.mesh.monarch_log import LOGS, SUFFIX, BoundedLog

OPENED = """
import os
from composer_mesh.mesh.monarch_log import open_log
print(open_log("generator-0"))
for number in os.listdir("/proc/self/fd"):
    try:
        path = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        continue
    if "monarch" in path and path.endswith(("log", "(deleted)")):
        print(path)
"""


def log_at(path: Path, largest_bytes: int) -> BoundedLog:
    """A log behind a descriptor that something else has opened before."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    log = BoundedLog(path, descriptor, largest_bytes)
    log.attach()
    return log


def test_a_process_logs_into_the_folder_of_its_run_and_nowhere_else(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPENED],
        env={**os.environ, LOGS: str(tmp_path / "logs")},
        check=True,
        capture_output=True,
        text=True,
    )
    file = tmp_path / "logs" / "monarch-generator-0.log"
    assert done.stdout.splitlines() == [str(file), str(file)]
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_log_never_follows_a_link(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.write_text("mine")
    (tmp_path / "log").symlink_to(private)
    with pytest.raises(OSError, match="is a link"):
        log_at(tmp_path / "log", 10)
    assert private.read_text() == "mine"


def test_a_full_log_makes_room_and_the_last_full_one_is_kept(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log", largest_bytes=4)
    for text in (b"first", b"second", b"3rd"):
        os.write(log.descriptor, text)
        log.rotate()
    os.close(log.descriptor)
    assert (tmp_path / "log").read_bytes() == b"3rd"
    assert (tmp_path / "log.1").read_bytes() == b"second"
    assert {path.name for path in tmp_path.iterdir()} == {"log", "log.1"}


def test_on_a_disk_that_is_nearly_full_nothing_is_logged_until_there_is_space(
    tmp_path: Path,
) -> None:
    log = log_at(tmp_path / "log", largest_bytes=100)
    nearly_full = dataclasses.replace(log, spare_bytes=1 << 60)
    os.write(log.descriptor, b"one ")
    for _ in range(2):
        nearly_full.rotate()
        os.write(log.descriptor, b"lost ")
    log.rotate()
    os.write(log.descriptor, b"two")
    os.close(log.descriptor)
    assert (tmp_path / "log").read_bytes() == b"one two"


IMPORTED = """
import os, pathlib, pwd
import composer_mesh.mesh.supervision
suffix = os.environ["MONARCH_LOG_SUFFIX"]
folder = pathlib.Path("/tmp", pwd.getpwuid(os.getuid()).pw_name)
print((folder / f"monarch_log_{suffix}.log").exists())
"""


def test_a_process_that_only_imports_monarch_leaves_no_file() -> None:
    environ = {name: value for name, value in os.environ.items() if name != SUFFIX}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], env=environ, check=True, capture_output=True, text=True
    )
    assert done.stdout == "False\n"
