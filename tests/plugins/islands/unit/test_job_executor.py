"""Islands as jobs of Hugging Face: its own client against a server that answers as its own does."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hf_jobs_server import NAMESPACE, TOKEN, FakeHfJobs, hf_jobs_server
from huggingface_hub import HfApi
from job_islands import FINISHED, PRESET, ends_of, job_islands

from composer_mesh.plugins.islands.jobs.command import executor_of
from composer_mesh.plugins.islands.jobs.hf_jobs import HfJobs
from composer_mesh.plugins.islands.jobs.jobs import (
    CONFIG,
    JOBS_FILE,
    IslandRecords,
    JobExecutor,
    JobOptions,
)
from composer_mesh.plugins.islands.jobs.ports import IslandReplica
from composer_mesh.plugins.islands.store.opening import StoreUnavailable, open_store
from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.cli import main
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.launch.ports import LaunchFailed

OPTIONS = JobOptions("registry.example/mesh:1", "a100-large", ("KEY_OF_THE_STORE",), None, 3600.0)
SECRETS = {"KEY_OF_THE_STORE": "a-secret-of-the-tests"}
STOPPED = FINISHED + "sed -i s/finished/stopped/ $records/status.json"
"""A script that leaves the record of a run that was stopped."""
Run = Callable[..., tuple[JobExecutor, list[IslandReplica]]]


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeHfJobs]:
    with hf_jobs_server(tmp_path) as fake:
        yield fake


@pytest.fixture
def islands(cloud: FakeHfJobs, tmp_path: Path) -> Run:
    """Two islands whose jobs run a shell script in place of Python."""

    def make(script: str, resume: bool = False) -> tuple[JobExecutor, list[IslandReplica]]:
        jobs = HfJobs(api=HfApi(endpoint=cloud.url, token=TOKEN))
        return job_islands(jobs, tmp_path, OPTIONS, SECRETS, script, resume)

    return make


def test_each_island_is_a_job_with_its_config_and_its_secrets(
    cloud: FakeHfJobs, islands: Run
) -> None:
    executor, replicas = islands(FINISHED)
    executor.launch_replicas(replicas)
    assert {one.state for one in ends_of(executor)} == {"finished"}
    asked = cloud.jobs["job1"].asked
    assert asked["dockerImage"] == OPTIONS.image
    assert asked["flavor"] == "a100-large"
    assert asked["timeoutSeconds"] == 3600
    assert asked["secrets"] == SECRETS
    assert asked["labels"] == {"name": "all-1"}
    assert asked["command"][1:5] == ["-P", "-m", "composer_mesh", "island-job"]
    assert 'name = "island-1"' in asked["environment"][CONFIG]
    assert SECRETS["KEY_OF_THE_STORE"] not in json.dumps(asked["environment"])


def test_a_job_that_fails_is_told_with_the_end_of_its_output(islands: Run) -> None:
    executor, replicas = islands("echo first; echo no GPU is there; exit 3")
    executor.launch_replicas(replicas)
    states = ends_of(executor)
    assert {one.state for one in states} == {"failed"}
    assert "no GPU is there" in states[0].cause


@pytest.mark.parametrize("script", ["exit 0", STOPPED], ids=["no record", "a stopped run"])
def test_a_job_that_ends_without_a_finished_run_has_failed(islands: Run, script: str) -> None:
    executor, replicas = islands(script)
    executor.launch_replicas(replicas)
    (first, _) = ends_of(executor)
    assert (first.state, first.cause) == (
        "failed",
        "its job has ended, but no run has finished in it",
    )


def test_a_refused_start_ends_the_jobs_that_were_started(cloud: FakeHfJobs, islands: Run) -> None:
    cloud.refuse_after = 1
    executor, replicas = islands("sleep 600")
    with pytest.raises(LaunchFailed, match=r"did not start all-1"):
        executor.launch_replicas(replicas)
    assert [one.stage for one in cloud.jobs.values()] == ["CANCELED"]


def test_a_service_that_is_away_ends_nothing(cloud: FakeHfJobs, islands: Run) -> None:
    executor, replicas = islands("sleep 600")
    executor.launch_replicas(replicas)
    assert {one.state for one in executor.poll()} == {"running"}
    cloud.failing = 2
    away = executor.poll()
    assert {one.state for one in away} == {"running"}
    assert "503" in away[0].cause
    executor.cancel(0.0)
    assert {one.state for one in executor.poll()} == {"stopped"}


def test_a_job_that_cannot_be_cancelled_is_named_and_the_others_are(
    cloud: FakeHfJobs, islands: Run
) -> None:
    executor, replicas = islands("sleep 600")
    executor.launch_replicas(replicas)
    cloud.failing = 1
    with pytest.raises(LaunchFailed, match=r"job job0 may continue: .*503"):
        executor.cancel(0.0)
    assert [one.stage for one in cloud.jobs.values()] == ["RUNNING", "CANCELED"]


def test_records_that_cannot_be_read_are_told_of_a_finished_island(
    islands: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(_: IslandRecords) -> None:
        raise StoreUnavailable("read", "records/0/status.json", "no answer")

    executor, replicas = islands(FINISHED)
    executor.launch_replicas(replicas)
    monkeypatch.setattr(IslandRecords, "fetch", unavailable)
    ends = ends_of(executor)
    assert {one.state for one in ends} == {"finished"}
    assert "no answer" in ends[0].cause


def test_a_job_that_goes_on_is_not_started_twice(cloud: FakeHfJobs, islands: Run) -> None:
    executor, replicas = islands("sleep 600")
    executor.launch_replicas(replicas)
    again, replicas = islands("sleep 600", resume=True)
    with pytest.raises(LaunchFailed, match=r"job job0 of island 0 has not ended"):
        again.launch_replicas(replicas)
    assert len(cloud.jobs) == 2
    cloud.jobs["job0"].kill()
    again.launch_replicas(replicas[:1])
    assert json.loads((replicas[0].output.parent / JOBS_FILE).read_text()) == {
        "hf-jobs": {"0": "job2", "1": "job1"}
    }


def test_a_broken_list_of_jobs_starts_nothing(cloud: FakeHfJobs, islands: Run) -> None:
    executor, replicas = islands(FINISHED)
    (replicas[0].output.parent / JOBS_FILE).write_text('{"hf-jobs": 3}')
    with pytest.raises(RunDirectoryError, match="does not say which jobs"):
        executor.launch_replicas(replicas)
    assert cloud.jobs == {}


def test_a_token_that_is_not_known_is_told_before_anything_starts(cloud: FakeHfJobs) -> None:
    jobs = HfJobs(api=HfApi(endpoint=cloud.url, token="hf_wrong"))
    with pytest.raises(LaunchFailed, match="set HF_TOKEN"):
        jobs.connect()


def test_records_come_back_and_those_of_an_earlier_run_do_not(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    (there / "metrics.jsonl").write_text('{"step": 1}\n')
    (there / "other").write_text("stays")
    sender = IslandRecords(store, 1, there)
    sender.send()
    reader = IslandRecords(store, 1, here)
    reader.fetch()
    assert [one.name for one in here.iterdir()] == ["metrics.jsonl"]
    (there / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    sender.send()
    reader.fetch()
    assert (here / "metrics.jsonl").read_text().count("\n") == 2
    reader.forget()
    fresh = IslandRecords(store, 1, tmp_path / "fresh")
    fresh.fetch()
    assert not (tmp_path / "fresh").exists()


def test_a_job_without_a_config_says_what_starts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["island-job", "--output", str(tmp_path / "run")]) == 2
    assert f"{CONFIG} is not set" in capsys.readouterr().err


def options(**changes: object) -> Namespace:
    known: dict[str, object] = {
        "on": "hf-jobs",
        "image": "mesh:1",
        "hardware": None,
        "secret": None,
        "volume": None,
        "timeout_h": None,
        "namespace": None,
        "store": "s3://bucket/run",
    }
    return Namespace(**known | changes)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"image": None}, "--image is missing"),
        ({"store": "file:///shared"}, "see no folder of this machine"),
        ({"store": None}, "--store is missing"),
        ({"timeout_h": -1.0}, "--timeout-h is -1 but must be above 0"),
        ({"secret": ["NOT_SET_ANYWHERE"]}, "NOT_SET_ANYWHERE names a variable that is not set"),
        ({"volume": "runs"}, "--volume is 'runs' but must be USER/BUCKET"),
        ({"on": "launch"}, "--image is for jobs of a cloud"),
    ],
)
def test_unfit_options_are_refused(
    changes: dict[str, object], refused: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=refused):
        executor_of(options(**changes), tmp_path)


def test_a_dry_run_shows_the_calls_without_asking_anybody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_THE_STORE", "a-secret-of-the-tests")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    words = ["islands", str(PRESET), "-n", "2", "--store", "s3://bucket/run", "--dry-run"]
    words += ["--output", str(tmp_path / "all"), "--on", "hf-jobs", "--image", "mesh:1"]
    words += ["--secret", "KEY_OF_THE_STORE", "--volume", f"{NAMESPACE}/runs"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "# island 1" in shown
    assert '"call": "HfApi.run_job"' in shown
    assert '"KEY_OF_THE_STORE"' in shown
    assert f"{NAMESPACE}/runs" in shown
    assert "a-secret-of-the-tests" not in shown
    assert not (tmp_path / "all").exists()
