"""Real runs on disks that fill, that are taken away and that may not be written.

Each disk is a tmpfs of a mount namespace of its own, so nothing outside sees it and nothing is
left of it. A run must end by itself, not by a signal, with one line that names what to do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from composer_mesh.actors.sqlite_file import SqliteFile, StoreError
from composer_mesh.services.directory.claim import RunDirectoryError, claimed
from composer_mesh.services.store.schema import KIND

PRESET = Path(__file__).parents[2] / "configs" / "quickstart.toml"
DEADLINE_S = 240
MOST_LINES = 12
SHORT = (
    *("run.steps=1000", "run.name=disk", "policy.warm_start.steps=2", "eval.episodes=2"),
    *("policy.warm_start.demonstrations=20", "schedule.prompts_per_step=2"),
    *("schedule.group_size=2", "replay.beta=0", "sdpo.alpha=0", "trainer.checkpoint_every=1"),
)
FAULTS = {
    "removed": "rm -rf {run}",
    "immutable folder": "chattr +i {run}",
}
REPAIRS = ("free the disk", "free some space", "correct its permissions", "--output", "--resume")


def command(output: Path, cache: Path) -> list[str]:
    sets = [word for one in (*SHORT, f"policy.cache_dir={cache}") for word in ("--set", one)]
    return [
        sys.executable,
        "-m",
        "composer_mesh",
        "train",
        str(PRESET),
        "--output",
        str(output),
        *sets,
    ]


def on_a_disk(size: str, words: list[str], disk: Path, fault: str = "") -> tuple[int, str]:
    """Exit status and errors of a command on a tmpfs, with a fault once its actors have started."""
    disk.mkdir()
    started = f"until grep -q actor_started {disk}/run/events.jsonl 2>/dev/null; do sleep 0.1; "
    then = f'{started} kill -0 "$pid" || break; done; {fault}; ' if fault else ""
    done = subprocess.run(
        [
            *("unshare", "-m", "--propagation", "private"),
            *("--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c"),
            f'mount -t tmpfs -o size={size} tmpfs {disk}; "$@" & pid=$!; '
            + then
            + "wait $pid; status=$?; chattr -R -i "
            + f"{disk} 2>/dev/null; exit $status",
            "bash",
            *words,
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    return done.returncode, done.stderr


def ends_well(status: int, errors: str) -> None:
    """The run ended by itself with one line of the command's own, and a repair."""
    own = [line for line in errors.splitlines() if line.startswith("composer-mesh: ")]
    assert status in (1, 2), errors[-2000:]
    assert "Traceback" not in errors, errors[-3000:]
    assert len(own) == 1, errors[-2000:]
    assert len(errors.splitlines()) <= MOST_LINES, errors[-2000:]
    assert any(repair in own[0] for repair in REPAIRS), own[0]


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("size", ["64k", "1m", "2m", "4m", "7m"])
def test_a_run_on_a_disk_that_fills_ends_with_one_line_and_no_signal(
    size: str, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    ends_well(*on_a_disk(size, command(disk / "run", tmp_path / "cache"), disk))


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_whose_files_are_taken_away_ends_with_one_line_and_no_signal(
    fault: str, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    how = FAULTS[fault].format(run=disk / "run")
    status, errors = on_a_disk("200m", command(disk / "run", tmp_path / "cache"), disk, how)
    ends_well(status, errors)
    assert fault != "removed" or "run.sqlite cannot keep" in errors


@pytest.mark.timeout(2 * DEADLINE_S)
def test_another_user_is_refused_by_a_folder_of_mode_000_in_one_line(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0)
    words = command(closed / "run", tmp_path / "cache")
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd="/",
        env={**os.environ, "HOME": "/nonexistent"},
    )
    if "No module named" in done.stderr or "can't open" in done.stderr:
        pytest.skip("another user cannot read this installation")
    ends_well(done.returncode, done.stderr)


@contextmanager
def immutable(path: Path) -> Iterator[None]:
    """Not even root can change a file or folder."""
    done = subprocess.run(["chattr", "+i", str(path)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this file system has no immutable files")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)


def test_an_immutable_store_is_one_line_with_the_repair(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    SqliteFile(path, KIND).close()
    with immutable(path), pytest.raises(StoreError, match=r"readonly.*correct its permissions"):
        _write_to(path)


def _write_to(path: Path) -> None:
    with closing(SqliteFile(path, KIND)) as file, file.transaction() as rows:
        rows.execute("INSERT INTO poisoned (body) VALUES (x'00')")


def test_an_immutable_run_directory_is_one_line_with_the_repair(tmp_path: Path) -> None:
    with (
        immutable(tmp_path),
        pytest.raises(RunDirectoryError, match=r"Operation not permitted.*correct its permissions"),
        claimed(tmp_path),
    ):
        raise AssertionError("the directory was claimed")
