"""The private folder of a run: who may look into it, and that nothing stays after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_mesh.mesh.private_folder import (
    PREFIX,
    PRIVATE,
    PrivateFolderRefused,
    private_folder,
    remove_abandoned,
)

OWNER = """
import sys
from composer_mesh.mesh.private_folder import private_folder
print(private_folder(), flush=True)
sys.stdin.read()
"""

KILLED_AT_A_REMOVAL = """
import os, signal, sys
from composer_mesh.mesh.private_folder import private_folder
folder = private_folder()
for name in ("a", "b"):
    (folder / name / "c").mkdir(parents=True)
    (folder / name / "c" / "file").touch()
    (folder / f"{name}.sock").touch()
left = int(sys.argv[1])
def watch(event, arguments):
    global left
    if event in ("os.remove", "os.rmdir"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
"""
"""Makes a private folder and ends, killed at the removal of one of the things in it."""


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short temporary folder, as sockets need one, in which this test's starts make theirs."""
    with tempfile.TemporaryDirectory(prefix="pf-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.delenv(PRIVATE, raising=False)
        yield Path(folder)


def start_owner() -> tuple[subprocess.Popen[str], Path]:
    """Start a process that makes a private folder and lives until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str], with_signal: int | None = None) -> None:
    if with_signal is not None:
        process.send_signal(with_signal)
    process.communicate()


def test_only_its_user_can_look_into_it_whatever_the_umask_until_its_owner_ends(base: Path) -> None:
    os.umask(0)
    process, folder = start_owner()
    assert folder.parent == base
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "owner").stat().st_mode & 0o777 == 0o600
    end(process)
    assert not folder.exists()


def test_the_next_start_removes_what_a_killed_one_left_but_nothing_of_a_living_one(
    base: Path,
) -> None:
    killed, left = start_owner()
    living, used = start_owner()
    (left / "socket").mkdir()
    (left / "socket" / "key").write_text("secret")
    end(killed, signal.SIGKILL)
    assert left.is_dir()
    later, _ = start_owner()
    assert not left.exists()
    assert (used / "owner").exists()
    end(living)
    end(later)


def test_a_child_uses_the_folder_of_its_starter(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, folder = start_owner()
    monkeypatch.setenv(PRIVATE, str(folder))
    child, same = start_owner()
    assert same == folder
    end(child)
    assert folder.is_dir()
    end(owner)


def test_a_folder_that_others_could_read_is_not_taken_over(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = base / "planted"
    planted.mkdir(mode=0o755)
    monkeypatch.setenv(PRIVATE, str(planted))
    process, folder = start_owner()
    assert folder != planted
    end(process)


def test_links_and_readable_folders_are_not_removed(base: Path) -> None:
    private = base / "documents"
    private.mkdir(mode=0o700)
    (private / "owner").touch()
    (base / f"{PREFIX}link").symlink_to(private)
    readable = base / f"{PREFIX}readable"
    readable.mkdir()
    readable.chmod(0o755)
    (readable / "owner").touch()
    assert remove_abandoned(base) == []
    assert (private / "owner").exists()
    assert (readable / "owner").exists()


def test_a_link_inside_an_abandoned_folder_leads_nowhere(base: Path) -> None:
    precious = base / "precious"
    precious.mkdir()
    (precious / "file").touch()
    abandoned = base / f"{PREFIX}dead"
    abandoned.mkdir(mode=0o700)
    (abandoned / "owner").touch()
    (abandoned / "link").symlink_to(precious)
    assert remove_abandoned(base) == [abandoned]
    assert (precious / "file").exists()


def test_a_start_that_was_killed_before_its_claim_leaves_nothing(base: Path) -> None:
    (base / f"{PREFIX}unclaimed").mkdir(mode=0o700)
    remove_abandoned(base)
    assert list(base.iterdir()) == []


def test_no_folder_is_made_where_others_could_replace_it(base: Path) -> None:
    base.chmod(0o777)
    with pytest.raises(PrivateFolderRefused, match=r"chmod \+t"):
        private_folder({})


def test_a_path_too_long_for_sockets_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = base / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(PrivateFolderRefused, match="set TMPDIR to one of at most"):
        private_folder({})


def test_a_removal_that_is_cut_off_at_any_moment_is_finished_by_the_next_start(base: Path) -> None:
    removals = 0
    while True:
        command = [sys.executable, "-c", KILLED_AT_A_REMOVAL, str(removals)]
        ended = subprocess.run(command, check=False).returncode
        remove_abandoned(base)
        assert list(base.iterdir()) == []
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        removals += 1
    assert removals == 10
