"""Runs as batch jobs: what is asked of Slurm, what it answers, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from slurm_jobs import Build, build

from composer_mesh.planning.host_capacity import HostResources
from composer_mesh.plugins.slurm.launcher import ENDED, RUNNING, WAITING, SlurmLauncher
from composer_mesh.plugins.slurm.script import (
    JobFiles,
    job_name,
    job_script,
    options_of,
    seconds_of,
)
from composer_mesh.services.launch.ports import Handle, LaunchFailed, LaunchRefused
from composer_mesh.services.launch.workers import write_files

__all__ = ["build"]

GONE = "slurm_load_jobs error: Invalid job id specified"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.path()["PATH"])
    fake.answers("sbatch", "17\n")
    yield fake
    fake.close()


class Clock:
    """Time that only goes on when somebody sleeps; then something may happen."""

    def __init__(self) -> None:
        self.now, self.events = 0.0, dict[int, Callable[[], None]]()
        self.naps = 0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps += 1
        self.events.pop(self.naps, lambda: None)()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def launcher(clock: Clock) -> SlurmLauncher:
    return SlurmLauncher(look_s=1.0, ask_s=2.0, clock=lambda: clock.now, sleep=clock.sleep)


@pytest.fixture
def handle(build: Build, slurm: FakeSlurm, launcher: SlurmLauncher) -> Handle:
    """A run that was submitted as job 17."""
    order = build()
    plan = launcher.plan(order)
    write_files(plan)
    return launcher.submit(order, plan)


# What Slurm answers


@pytest.mark.parametrize("answer", ["17\n", "17;cluster\n", "Welcome to the cluster\n17\n"])
def test_the_id_of_a_job_is_found_in_what_sbatch_prints(
    build: Build, slurm: FakeSlurm, launcher: SlurmLauncher, answer: str
) -> None:
    slurm.answers("sbatch", answer)
    order = build()
    plan = launcher.plan(order)
    write_files(plan)
    handle = launcher.submit(order, plan)
    places = JobFiles(order.output)
    assert (handle.kind, handle.job, handle.log) == ("slurm", "17", places.log)
    assert places.job.read_text() == "17\n"
    assert slurm.calls() == [f"sbatch --parsable {places.script}"]


def test_a_job_that_sbatch_refuses_fails_with_its_words(
    build: Build, slurm: FakeSlurm, launcher: SlurmLauncher
) -> None:
    slurm.answers("sbatch", status=1, error="sbatch: error: invalid partition specified: gpu")
    order = build()
    write_files(plan := launcher.plan(order))
    with pytest.raises(LaunchFailed, match="invalid partition specified: gpu"):
        launcher.submit(order, plan)


def test_without_slurm_the_error_says_where_to_launch(
    build: Build, slurm: FakeSlurm, launcher: SlurmLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(slurm.folder))
    slurm.lacks("sbatch")
    order = build()
    write_files(plan := launcher.plan(order))
    with pytest.raises(
        LaunchFailed, match="sbatch is not installed here: launch from a login node"
    ):
        launcher.submit(order, plan)


def test_a_new_launch_forgets_the_end_of_the_one_before(
    build: Build, handle: Handle, launcher: SlurmLauncher
) -> None:
    places = JobFiles(handle.run)
    for left in (places.stopping, places.queued_at, places.log):
        left.write_text("before\n")
    order = build()
    launcher.submit(order, launcher.plan(order))
    assert not places.stopping.exists()
    assert not places.queued_at.exists()
    assert places.log.with_name("controller.1.log").read_text() == "before\n"


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        ("PENDING|Priority", "waiting", "PENDING (Priority)"),
        ("PENDING|BeginTime", "waiting", "PENDING (BeginTime)"),
        ("REQUEUE_HOLD|launch failed requeued held", "waiting", "REQUEUE_HOLD (launch failed"),
        ("RUNNING|None", "running", "RUNNING"),
        ("COMPLETING|None", "running", "COMPLETING"),
        ("COMPLETED|None", "ended", "COMPLETED"),
        ("TIMEOUT|TimeLimit", "ended", "TIMEOUT"),
        ("NODE_FAIL|None", "ended", "NODE_FAIL"),
        ("A_NEW_WORD|None", "unknown", "A_NEW_WORD"),
    ],
)
def test_every_state_of_slurm_has_a_meaning(
    handle: Handle, slurm: FakeSlurm, launcher: SlurmLauncher, answer: str, state: str, words: str
) -> None:
    slurm.answers("squeue", f"{answer}\n")
    found = launcher.state(handle)
    assert found[0] == state
    assert found[1].startswith(words)


@pytest.mark.parametrize(
    ("sacct", "scontrol", "word"),
    [
        ("CANCELLED by 1000\n", "", "CANCELLED by 1000"),
        ("CANCELLED+\n", "", "CANCELLED+"),
        ("", "JobId=17 JobName=x JobState=FAILED Reason=NonZeroExitCode", "FAILED"),
        ("", "", "not known to Slurm any more"),
    ],
)
def test_a_job_that_squeue_has_forgotten_is_asked_of_who_may_know(
    handle: Handle, slurm: FakeSlurm, launcher: SlurmLauncher, sacct: str, scontrol: str, word: str
) -> None:
    slurm.answers("squeue", status=1, error=GONE)
    slurm.answers("sacct", sacct, status=0 if sacct else 1)
    slurm.answers("scontrol", scontrol)
    assert launcher.state(handle) == ("ended", word)


def test_a_cluster_without_accounting_is_no_error(
    handle: Handle, slurm: FakeSlurm, launcher: SlurmLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answers("squeue", "")
    slurm.lacks("sacct")
    slurm.answers("scontrol", "JobState=COMPLETED")
    assert launcher.state(handle) == ("ended", "COMPLETED")


def test_slurm_that_does_not_answer_is_no_end_of_a_job(
    handle: Handle, slurm: FakeSlurm, launcher: SlurmLauncher
) -> None:
    slurm.answers("squeue", status=1, error="slurm_load_jobs error: Unable to contact controller")
    state, words = launcher.state(handle)
    assert state == "unknown"
    assert "Unable to contact controller" in words


def test_states_that_mean_different_things_are_told_apart() -> None:
    assert not WAITING & RUNNING
    assert not ENDED & (WAITING | RUNNING)


# Following and stopping


def test_following_tells_what_a_job_waits_for_then_its_lines_then_its_end(
    handle: Handle, slurm: FakeSlurm, launcher: SlurmLauncher, clock: Clock
) -> None:
    def writes(text: str, state: str) -> None:
        JobFiles(handle.run).log.write_text(text)
        slurm.answers("squeue", f"{state}|None\n")

    slurm.answers("squeue", "PENDING|Priority\n")
    clock.events[3] = lambda: slurm.answers("squeue", "PENDING|Resources\n")
    clock.events[5] = lambda: writes("one\ntw", "RUNNING")
    clock.events[7] = lambda: writes("one\ntwo\nthr", "COMPLETED")
    assert list(launcher.follow(handle)) == [
        "job 17 waits: PENDING (Priority)",
        "job 17 waits: PENDING (Resources)",
        "one",
        "two",
        "thr",
        "job 17 has ended: COMPLETED",
    ]


def test_following_survives_a_job_that_is_queued_again(
    handle: Handle, slurm: FakeSlurm, launcher: SlurmLauncher, clock: Clock
) -> None:
    slurm.answers("squeue", "RUNNING|None\n")
    clock.events[1] = lambda: slurm.answers("squeue", "PENDING|BeginTime\n")
    clock.events[3] = lambda: slurm.answers("squeue", "RUNNING|None\n")
    clock.events[5] = lambda: slurm.answers("squeue", "COMPLETED|None\n")
    assert list(launcher.follow(handle)) == [
        "job 17 waits: PENDING (BeginTime)",
        "job 17 has ended: COMPLETED",
    ]


def test_following_goes_on_with_the_job_that_took_over(
    handle: Handle, slurm: FakeSlurm, launcher: SlurmLauncher, clock: Clock
) -> None:
    def taken_over() -> None:
        JobFiles(handle.run).job.write_text("18\n")
        slurm.answers("squeue", "COMPLETED|None\n")

    slurm.answers("squeue", "RUNNING|None\n")
    clock.events[2] = taken_over
    assert list(launcher.follow(handle))[-1] == "job 18 has ended: COMPLETED"
    assert launcher.state(handle)[0] == "ended"
    assert "--jobs=18" in slurm.calls("squeue")[-1]


def test_a_stop_asks_the_script_first_and_is_remembered(
    handle: Handle, slurm: FakeSlurm, launcher: SlurmLauncher, clock: Clock
) -> None:
    clock.events[2] = lambda: slurm.answers("squeue", "COMPLETED|None\n")
    launcher.stop(handle, grace_s=60)
    assert JobFiles(handle.run).stopping.exists()
    assert slurm.calls("scancel") == ["scancel --batch --signal=TERM 17"]


def test_a_stop_cancels_a_job_that_takes_longer_than_its_grace(
    handle: Handle, slurm: FakeSlurm, launcher: SlurmLauncher, clock: Clock
) -> None:
    clock.events[9] = lambda: slurm.answers("squeue", "CANCELLED|None\n")
    launcher.stop(handle, grace_s=5)
    assert slurm.calls("scancel") == ["scancel --batch --signal=TERM 17", "scancel 17"]


def test_a_job_that_waits_is_cancelled_at_once(
    handle: Handle, slurm: FakeSlurm, launcher: SlurmLauncher, clock: Clock
) -> None:
    slurm.answers("squeue", "PENDING|Resources\n")
    clock.events[1] = lambda: slurm.answers("squeue", "CANCELLED|None\n")
    launcher.stop(handle, grace_s=60)
    assert set(slurm.calls("scancel")) == {"scancel 17"}


def test_a_job_that_does_not_end_is_an_error(
    handle: Handle, slurm: FakeSlurm, launcher: SlurmLauncher
) -> None:
    slurm.answers("squeue", "COMPLETING|None\n")
    with pytest.raises(LaunchFailed, match="still COMPLETING, 60 s after scancel"):
        launcher.stop(handle, grace_s=0)


GPUS = {"gpus": 4, "gpu_memory_gb": 80.0}


def test_a_job_asks_for_a_node_for_each_host_whole_and_as_large_as_described(build: Build) -> None:
    options = options_of(build(host=GPUS))
    assert {"--nodes=2", "--ntasks-per-node=1", "--exclusive", "--mincpus=8"} <= set(options)
    assert {"--mem=0", "--gres=gpu:4", "--signal=B:TERM@120", "--time=24:00:00"} <= set(options)
    assert {"--requeue", "--no-kill", "--open-mode=append"} <= set(options)


def test_a_job_that_shares_nodes_asks_only_for_what_is_described(build: Build) -> None:
    options = options_of(build(exclusive=False))
    assert {"--cpus-per-task=8", "--mem=65536M"} <= set(options)
    assert not {"--exclusive", "--mem=0", "--gres=gpu:0"} & set(options)


def test_a_job_names_its_partition_account_and_qos_only_where_they_are_set(build: Build) -> None:
    named = {"partition": "gpu", "account": "lab", "qos": "high"}
    given = [f"--{name}={value}" for name, value in named.items()]
    assert set(given) <= set(options_of(build(**named)))
    assert not [one for one in options_of(build()) if one.split("=")[0] in ("--partition", "--qos")]


def test_a_path_with_a_percent_sign_is_no_pattern_of_slurm(build: Build, tmp_path: Path) -> None:
    order = replace(build(), output=tmp_path / "100%j")
    assert f"--output={tmp_path}/100%%j/launch/slurm-%j.log" in options_of(order)


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("quickstart", "quickstart"),
        ("a b/c;d", "a-b-c-d"),
        ("..", "composer-mesh"),
        ("ä", "composer-mesh"),
    ],
)
def test_a_job_has_a_valid_name(name: str, job: str) -> None:
    assert job_name(name) == job


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("10", 600),
        ("10:30", 630),
        ("1:00:05", 3605),
        ("2-3", 2 * 86400 + 3 * 3600),
        ("1-00:30", 86400 + 1800),
        ("1-01:01:01", 86400 + 3661),
        ("0", None),
    ],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(limit: str, seconds: int | None) -> None:
    assert seconds_of(limit) == seconds


def test_hosts_of_different_shapes_are_refused_with_both(build: Build) -> None:
    order = build()
    other = HostResources("cpu", 4, 2**30)
    with pytest.raises(LaunchRefused, match=r"gpu-0 with 8 cores.* and cpu with 4 cores"):
        options_of(replace(order, hosts=(order.hosts[0], other)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"time_limit": "3", "grace_s": 120}, "time_limit is 3 .180 s. but must be above 180 s"),
        ({"partition": "a b"}, "partition is 'a b'"),
        ({"options": ["--array=1-3"]}, "several controllers"),
        ({"options": ["--time=5"]}, "cluster.slurm.time_limit"),
        ({"options": ["--nodes=5"]}, "placement.hosts decides"),
        ({"options": ["-N5"]}, "must be a whole option"),
        ({"options": ["--comment=a\n#SBATCH --array=3"]}, "of one line"),
        ({"setup": ["#SBATCH --array=3"]}, "cluster.slurm.options"),
    ],
)
def test_what_a_job_cannot_have_is_refused(
    build: Build, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(LaunchRefused, match=said):
        job_script(build(**settings))


def test_a_directory_that_slurm_cannot_name_is_refused(build: Build, tmp_path: Path) -> None:
    with pytest.raises(LaunchRefused, match="neither backslashes nor control"):
        job_script(replace(build(), output=tmp_path / "a\nb"))
