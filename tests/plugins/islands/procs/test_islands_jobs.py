"""Two islands as jobs of a cloud: whole runs, whose records come back through the store."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from hf_jobs_server import TOKEN, hf_jobs_server
from huggingface_hub import HfApi
from islands_s3 import BUCKET, s3_program, s3_server
from job_islands import ends_of
from live_run import PRESET, RUN_DEADLINE_S, SHORT, composer_mesh, wait_until
from modal_server import TOKEN_ID, TOKEN_SECRET, modal_server, use

from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.islands.jobs.directory import IslandsDirectory, summarize
from composer_mesh.plugins.islands.jobs.hf_jobs import HfJobs
from composer_mesh.plugins.islands.jobs.jobs import JobCloud, JobExecutor, JobOptions
from composer_mesh.plugins.islands.jobs.modal_sandboxes import ModalSandboxes
from composer_mesh.plugins.islands.jobs.ports import IslandReplica
from composer_mesh.plugins.islands.store.opening import open_store
from composer_mesh.services.directory.report import read_metrics

Pids = Callable[[int], int]
"""The process of an island's first job, by its rank."""
OfCloud = Callable[[Path], AbstractContextManager[tuple[JobCloud, Pids]]]
STEPS, ENDLESS = 4, 1000
SETTINGS = SHORT | {
    "trainer.lr_schedule": "constant",
    "replay.actors": 1,
    "trainer.checkpoint_every": 1,
    "islands.steps_per_round": 2,
    "islands.deadline_s": 5.0,
    "islands.absent_after": 1,
    "cluster.python": sys.executable,
}


def sets(cache: Path, **changes: object) -> list[str]:
    values = SETTINGS | {"policy.cache_dir": cache, **changes}
    return [f"{key}={value}" for key, value in values.items()]


def config_of(folder: Path, cache: Path, rank: int, steps: int) -> Config:
    own = {"islands.store": f"file://{folder}/store", "islands.rank": rank}
    changes = {"run.steps": steps, "run.name": f"island-{rank}", "islands.world_size": 2, **own}
    return load_config(PRESET, sets(cache, **changes))


@contextmanager
def hf_jobs(folder: Path) -> Iterator[tuple[JobCloud, Pids]]:
    with hf_jobs_server(folder) as fake:
        cloud = HfJobs(api=HfApi(endpoint=fake.url, token=TOKEN))
        yield cloud, lambda rank: fake.jobs[f"job{rank}"].process.pid


@contextmanager
def modal(folder: Path) -> Iterator[tuple[JobCloud, Pids]]:
    with modal_server(folder) as fake, pytest.MonkeyPatch.context() as patch:
        client = use(fake, patch)
        yield ModalSandboxes(client=client), lambda rank: fake.started[rank].process.pid
        client.close()


@pytest.mark.parametrize("of_cloud", [hf_jobs, modal])
def test_islands_in_jobs_train_and_one_that_is_told_to_end_comes_back(
    of_cloud: OfCloud, tmp_path: Path, policy_cache: Path
) -> None:
    place = IslandsDirectory(tmp_path / "all", f"file://{tmp_path}/store", 2)
    place.root.mkdir()
    replicas = [
        IslandReplica(rank, config_of(tmp_path, policy_cache, rank, steps), place.run(rank))
        for rank, steps in enumerate((STEPS, ENDLESS))
    ]
    in_job = tmp_path / "composer-mesh-runs" / "all" / "island-1" / "metrics.jsonl"
    with of_cloud(tmp_path) as (jobs, pid):
        executor = JobExecutor(jobs, place.root, JobOptions("mesh:1"), {})
        executor.connect(open_store(place.address))
        executor.launch_replicas(replicas)
        wait_until(lambda: len(read_metrics(in_job)) >= 1, "step 1", RUN_DEADLINE_S)
        os.kill(pid(1), signal.SIGTERM)
        ends = ends_of(executor, RUN_DEADLINE_S)
        assert [one.state for one in ends] == ["finished", "failed"]
        assert '"run_stopped"' in (place.run(1) / "events.jsonl").read_text()
        before = len(read_metrics(place.run(1) / "metrics.jsonl"))
        rest = IslandReplica(
            1, config_of(tmp_path, policy_cache, 1, before + 2), place.run(1), resume=True
        )
        again = JobExecutor(jobs, place.root, JobOptions("mesh:1"), {})
        again.connect(open_store(place.address))
        again.launch_replicas([rest])
        states = [ends[0], *ends_of(again, RUN_DEADLINE_S)]
    assert [one.state for one in states] == ["finished", "finished"]
    summary = summarize(place, states, 1.0)
    assert before >= 1
    assert (summary["finished"], summary["steps"]) == (2, STEPS + before + 2)
    assert summary["eval"]["final"]["episodes"] == 2 * SHORT["eval.episodes"]


@pytest.mark.parametrize("of_cloud", [hf_jobs, modal])
def test_an_island_that_its_job_refuses_is_told_with_the_reason(
    of_cloud: OfCloud, tmp_path: Path, policy_cache: Path
) -> None:
    place = IslandsDirectory(tmp_path / "all", f"file://{tmp_path}/store", 2)
    place.root.mkdir()
    config = config_of(tmp_path, policy_cache, 0, STEPS)
    data = config.data.model_copy(update={"task": "no_such_package:Task"})
    replica = IslandReplica(0, config.model_copy(update={"data": data}), place.run(0))
    with of_cloud(tmp_path) as (jobs, _):
        executor = JobExecutor(jobs, place.root, JobOptions("mesh:1"), {})
        executor.connect(open_store(place.address))
        executor.launch_replicas([replica])
        (end,) = ends_of(executor, RUN_DEADLINE_S)
    assert end.state == "failed"
    assert "no_such_package" in end.cause


@pytest.mark.parametrize("on", ["hf-jobs", "modal"])
def test_the_command_follows_jobs_over_s3_and_sums_them_up(
    on: str, tmp_path: Path, policy_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = s3_program()
    if program is None:
        pytest.skip("no S3 server is installed: nox -s islands")
    server = hf_jobs_server if on == "hf-jobs" else modal_server
    with s3_server(program, tmp_path / "log") as environment, server(tmp_path) as cloud:
        cloud.without = ("AWS_SECRET_ACCESS_KEY",)  # jobs have only what they are given
        given = {"HF_ENDPOINT": cloud.url, "HF_TOKEN": TOKEN, "MODAL_SERVER_URL": cloud.url}
        given |= {"MODAL_TOKEN_ID": TOKEN_ID, "MODAL_TOKEN_SECRET": TOKEN_SECRET}
        for name, value in (environment | given).items():
            monkeypatch.setenv(name, value)
        changes = {"run.steps": 4, "islands.deadline_s": RUN_DEADLINE_S}  # each round is of both
        words = [word for one in sets(policy_cache, **changes) for word in ("--set", one)]
        where = ["-n", "2", "--store", f"s3://{BUCKET}/run", "--output", str(tmp_path / "all")]
        job = ["--on", on, "--image", "mesh:1", "--secret", "AWS_SECRET_ACCESS_KEY"]
        done = composer_mesh("islands", str(PRESET), *words, *where, *job)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "all" / "summary.json").read_text())
    assert (summary["finished"], summary["steps"], summary["round"]) == (2, 8, 2)
    for rank in range(2):
        run = tmp_path / "all" / f"island-{rank}"
        assert len(read_metrics(run / "metrics.jsonl")) == 4
        assert '"run_finished"' in (run / "events.jsonl").read_text()
