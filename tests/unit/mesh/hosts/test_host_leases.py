"""What a host knows of its controller and of the roster, without any process of Monarch.

When a worker says that it listens, the roster has its address.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from composer_mesh.mesh.hosts import worker
from composer_mesh.mesh.hosts import worker as workers
from composer_mesh.mesh.hosts.agent import SOURCES, differences, versions
from composer_mesh.mesh.hosts.roster import (
    Lease,
    LeaseRenewal,
    Record,
    announce,
    read_record,
    read_roster,
    withdraw,
)
from composer_mesh.mesh.hosts.worker import WorkerOptions, WorkerRefused, _Worker, worker_command
from composer_mesh.mesh.private_folder import remove_abandoned
from composer_mesh.mesh.processes import descendants, is_alive

RECORD = Record("gpu-1", "tls://10.0.0.5:22300", "/usr/bin/python3", 12, "boot")


def test_a_lease_ages_from_each_renewal_and_ends_by_word(tmp_path: Path) -> None:
    now = [100.0]
    lease = Lease(tmp_path, lambda: now[0])
    assert (lease.age_s(), lease.ended) == (None, False)
    lease.renew()
    now[0] = 107.5
    assert (lease.age_s(), lease.ended) == (7.5, False)
    lease.renew()
    assert lease.age_s() == 0.0
    lease.end()
    assert (lease.age_s(), lease.ended) == (None, True)


def test_a_beat_counts_from_its_arrival_once_its_answer_was_heard(tmp_path: Path) -> None:
    now = [100.0]
    lease = Lease(tmp_path, lambda: now[0])
    beats = LeaseRenewal(lease)
    beats.renew(1, 0)
    assert lease.age_s() == 0.0
    now[0] = 103.0
    beats.renew(2, 1)
    assert lease.age_s() == 3.0
    now[0] = 106.0
    beats.renew(3, 2)
    assert lease.age_s() == 3.0
    for number, at in ((4, 109.0), (5, 112.0)):  # the controller hears no answer any more
        now[0] = at
        beats.renew(number, 2)
        assert lease.age_s() == at - 103.0
    now[0] = 115.0
    beats.renew(6, 5)
    assert lease.age_s() == 3.0


def test_the_roster_lists_workers_in_natural_order_and_ignores_what_is_no_record(
    tmp_path: Path,
) -> None:
    assert read_roster(tmp_path / "none") == []
    for number in (10, 9, 1):
        announce(tmp_path, replace(RECORD, name=f"gpu-{number}"))
    (tmp_path / "torn.json").write_text('{"name": "x"')
    (tmp_path / "list.json").write_text("[]")
    assert [one.name for one in read_roster(tmp_path)] == ["gpu-1", "gpu-9", "gpu-10"]


def test_a_worker_withdraws_its_own_record_only(tmp_path: Path) -> None:
    announce(tmp_path, RECORD)
    other = replace(RECORD, address="tls://10.0.0.6:22300", pid=13)
    announce(tmp_path, other)
    withdraw(tmp_path, RECORD)
    assert read_record(tmp_path, "gpu-1") == other
    withdraw(tmp_path, other)
    assert read_record(tmp_path, "gpu-1") is None


def test_hosts_that_differ_are_told_by_name_and_version() -> None:
    here = versions()
    assert set(here) == {"Python", "torch", "torchmonarch", "composer-mesh", SOURCES}
    assert differences("gpu-1", here, dict(here)) == []
    there = {**here, "torch": "2.12.0"}
    del there["torchmonarch"]
    assert differences("gpu-1", here, there) == [
        f"gpu-1 has torch 2.12.0, the controller {here['torch']}",
        f"gpu-1 has torchmonarch of no version, the controller {here['torchmonarch']}",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (WorkerOptions(listen="tls://127.0.0.1:0"), "--authority is not given"),
        (WorkerOptions(listen="tcp://127.0.0.1:0", name="../gpu"), "is not a name of a host"),
        (WorkerOptions(listen="tcp://0.0.0.0:22300"), "0.0.0.0"),
        (WorkerOptions(listen="tcp://10.1.2.3:5000", subnets=("10.9.0.0/16",)), "10.9.0.0/16"),
    ],
)
def test_a_worker_that_anybody_could_use_does_not_start(
    monkeypatch: pytest.MonkeyPatch, options: WorkerOptions, said: str
) -> None:
    started: list[object] = []
    monkeypatch.setattr(workers.programs, "start_tied", lambda *args: started.append(args))
    with pytest.raises((WorkerRefused, ValueError), match=said):
        worker_command(options)
    assert started == []


def test_a_worker_without_its_process_ends_with_all_that_it_started(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    options = ["--listen", "tcp://127.0.0.1:0", "--with-process", str(gone.pid)]
    command = [sys.executable, "-m", "composer_mesh", "worker", "--name", "w", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"process {gone.pid} is gone" in done.stderr


def test_a_killed_worker_leaves_one_folder_which_the_next_start_removes() -> None:
    command = [sys.executable, "-m", "composer_mesh", "worker", "--name", "w"]
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as base:
        worker = subprocess.Popen(
            [*command, "--listen", "tcp://127.0.0.1:0"],
            stdout=subprocess.PIPE,
            env={**os.environ, "TMPDIR": base},
        )
        assert worker.stdout is not None
        assert b"listens on" in worker.stdout.readline()
        started = descendants(worker.pid)
        worker.kill()
        worker.communicate()
        end = time.monotonic() + 60
        while any(map(is_alive, started)) and time.monotonic() < end:
            time.sleep(0.01)
        (left,) = Path(base).iterdir()
        assert remove_abandoned(Path(base)) == [left]
        assert list(Path(base).iterdir()) == []


def test_descendants_are_all_below_a_process() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
    try:
        end = time.monotonic() + 30
        while len(found := descendants(child.pid)) < 1 and time.monotonic() < end:
            time.sleep(0.01)
        assert len(found) == 1
        assert child.pid in descendants(os.getpid())
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_a_worker_is_on_the_roster_before_it_says_that_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, bool]] = []

    def write(_: object, text: str) -> None:
        said.append((text, read_record(tmp_path, "gpu-1") is not None))

    monkeypatch.setattr(worker, "_write", write)
    monkeypatch.setattr(_Worker, "_until_it_listens", lambda *_: None)
    monkeypatch.setattr(_Worker, "_until_it_ends", lambda *_: ("told", 0))
    made = _Worker(WorkerOptions(roster=tmp_path), tmp_path)
    assert made._look_after(1, "gpu-1", "tcp://127.0.0.1:7") == 0
    assert said[0] == ("gpu-1 listens on tcp://127.0.0.1:7", True)
    assert read_record(tmp_path, "gpu-1") is None
