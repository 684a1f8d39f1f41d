"""Islands as sandboxes of Modal: its own client against a gRPC server that answers as theirs."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from job_islands import FINISHED, PRESET, ends_of, job_islands
from modal_proto import api_pb2
from modal_server import FakeModal, modal_server, use

from composer_mesh.plugins.islands.jobs.command import executor_of
from composer_mesh.plugins.islands.jobs.jobs import CONFIG, JobExecutor, JobOptions
from composer_mesh.plugins.islands.jobs.modal_sandboxes import ModalSandboxes, resources_of
from composer_mesh.plugins.islands.jobs.ports import IslandReplica
from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.cli import main
from composer_mesh.services.launch.ports import LaunchFailed

GPU, CPU = "H100:2", "cpu=2,memory=4096"
SECRETS = {"KEY_OF_THE_STORE": "a-secret-of-the-tests"}
Run = Callable[..., tuple[JobExecutor, list[IslandReplica]]]


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeModal]:
    with modal_server(tmp_path) as fake:
        yield fake


@pytest.fixture
def client(cloud: FakeModal, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    found = use(cloud, monkeypatch)
    yield found
    found.close()


@pytest.fixture
def islands(client: Any, tmp_path: Path) -> Run:
    """Two islands whose sandboxes run a shell script in place of Python."""

    def make(
        script: str, hardware: str = CPU, resume: bool = False, **changes: Any
    ) -> tuple[JobExecutor, list[IslandReplica]]:
        options = JobOptions("registry.example/mesh:1", hardware, tuple(SECRETS), **changes)
        jobs = ModalSandboxes("dev", client)
        return job_islands(jobs, tmp_path, options, SECRETS, script, resume)

    return make


@pytest.mark.parametrize("hardware", [GPU, CPU])
def test_each_island_is_a_sandbox_with_its_config_and_its_secrets(
    hardware: str, cloud: FakeModal, islands: Run
) -> None:
    executor, replicas = islands(FINISHED, hardware, volume="runs", timeout_s=3600.0)
    executor.launch_replicas(replicas)
    assert {one.state for one in ends_of(executor)} == {"finished"}
    asked = cloud.started[1]
    assert asked.tags == {"name": "all-1"}
    assert asked.environment["KEY_OF_THE_STORE"] == "a-secret-of-the-tests"
    assert 'name = "island-1"' in asked.environment[CONFIG]
    command = list(asked.definition.entrypoint_args)
    assert command[1:6] == ["-P", "-m", "composer_mesh", "island-job", "--output"]
    assert command[6] == "/runs/all/island-1"
    assert asked.definition.timeout_secs == 3600
    assert [one.mount_path for one in asked.definition.volume_mounts] == ["/runs"]
    assert set(cloud.images) == {"FROM registry.example/mesh:1"}
    assert (set(cloud.environments), set(cloud.volumes)) == ({"dev"}, {"runs"})
    resources = asked.definition.resources
    got = resources.gpu_config.gpu_type, resources.gpu_config.count, resources.milli_cpu
    assert got == (("H100", 2, 0) if hardware == GPU else ("", 0, 2000))


@pytest.mark.parametrize("hardware", [GPU, CPU])
def test_a_command_that_fails_is_told_with_its_status_and_the_end_of_its_output(
    hardware: str, islands: Run
) -> None:
    executor, replicas = islands("echo first; echo no GPU is there; exit 3", hardware)
    executor.launch_replicas(replicas)
    states = ends_of(executor)
    assert {one.state for one in states} == {"failed"}
    assert states[0].cause == "its command has ended with 3: first / no GPU is there"


def test_a_start_that_the_service_could_not_make_is_no_finished_island(
    cloud: FakeModal, islands: Run
) -> None:
    executor, replicas = islands("sleep 600")
    executor.launch_replicas(replicas)
    for one in cloud.started:
        one.end(api_pb2.GenericResult.GENERIC_STATUS_INIT_FAILURE)
    assert [(one.state, one.cause) for one in ends_of(executor)] == [
        ("failed", "its job has ended, but no run has finished in it")
    ] * 2


def test_a_sandbox_at_the_end_of_its_time_is_told(cloud: FakeModal, islands: Run) -> None:
    executor, replicas = islands("sleep 600")
    executor.launch_replicas(replicas[:1])
    cloud.started[0].end(api_pb2.GenericResult.GENERIC_STATUS_TIMEOUT)
    (state,) = ends_of(executor)
    assert (state.state, state.cause) == ("failed", "it took longer than its --timeout-h")


def test_a_refused_start_ends_the_sandboxes_that_were_started(
    cloud: FakeModal, islands: Run
) -> None:
    cloud.refuse_after = 1
    executor, replicas = islands("sleep 600")
    with pytest.raises(LaunchFailed, match=r"did not start all-1: no credit is left"):
        executor.launch_replicas(replicas)
    assert [one.ended for one in cloud.started] == [api_pb2.GenericResult.GENERIC_STATUS_TERMINATED]


def test_a_service_that_is_away_ends_nothing(cloud: FakeModal, islands: Run) -> None:
    executor, replicas = islands("sleep 600")
    executor.launch_replicas(replicas)
    assert {one.state for one in executor.poll()} == {"running"}
    cloud.failing = True
    away = executor.poll()
    assert {one.state for one in away} == {"running"}
    assert "overloaded" in away[0].cause
    cloud.failing = False
    executor.cancel(0.0)
    assert {one.state for one in executor.poll()} == {"stopped"}


def test_a_sandbox_that_goes_on_is_not_started_twice(cloud: FakeModal, islands: Run) -> None:
    executor, replicas = islands("sleep 600")
    executor.launch_replicas(replicas)
    again, replicas = islands("sleep 600", resume=True)
    with pytest.raises(LaunchFailed, match=r"job sb-2-0 of island 0 has not ended"):
        again.launch_replicas(replicas)
    assert len(cloud.started) == 2


def test_a_sandbox_that_is_not_known_any_more_is_told_with_the_repair(
    cloud: FakeModal, islands: Run
) -> None:
    executor, replicas = islands("sleep 600")
    executor.launch_replicas(replicas)
    cloud.started[0].end()
    del cloud.sandboxes["sb-2-0"]
    again, replicas = islands("sleep 600", resume=True)
    with pytest.raises(LaunchFailed, match=r"sandbox sb-2-0 is not known; it is in .*jobs.json"):
        again.launch_replicas(replicas)
    assert len(cloud.started) == 1


def test_a_token_that_is_not_known_is_told_before_anything_starts(
    cloud: FakeModal, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = use(cloud, monkeypatch, secret="as-wrong")
    with pytest.raises(LaunchFailed, match="set MODAL_TOKEN_ID") as told:
        ModalSandboxes(client=client).connect()
    client.close()
    assert "as-wrong" not in str(told.value)


def test_hardware_is_a_gpu_cores_and_memory() -> None:
    assert resources_of(None) == {}
    assert resources_of("A100-80GB:4") == {"gpu": "A100-80GB:4"}
    assert resources_of("H100,cpu=0.5,memory=512") == {"gpu": "H100", "cpu": 0.5, "memory": 512}


@pytest.mark.parametrize(
    "hardware",
    ["", "H100,A100", "cpu=0", "cpu=many", "memory=1.5", "disk=3", "gpu=H100", "cpu=inf"],
)
def test_other_hardware_is_refused(hardware: str) -> None:
    with pytest.raises(LaunchFailed, match="write for example H100:2,cpu=16,memory=65536"):
        resources_of(hardware)


def options(**changes: object) -> Namespace:
    known: dict[str, object] = {
        "on": "modal",
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
        ({"hardware": "disk=3"}, "'disk=3' is not a GPU"),
        ({"timeout_h": 25.0}, "--timeout-h is 25 but a sandbox lives 24 hours at most"),
        ({"store": "file:///shared"}, "see no folder of this machine"),
    ],
)
def test_unfit_options_are_refused(
    changes: dict[str, object], refused: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=refused):
        executor_of(options(**changes), tmp_path)


def test_the_sdk_is_looked_for_when_the_executor_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(UsageError, match=r"pip install 'composer-mesh\[modal\]'"):
        executor_of(options(), tmp_path)


def test_a_dry_run_shows_the_calls_without_asking_anybody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_THE_STORE", "a-secret-of-the-tests")
    monkeypatch.setenv("MODAL_SERVER_URL", "http://127.0.0.1:9")
    words = ["islands", str(PRESET), "-n", "2", "--store", "s3://bucket/run", "--dry-run"]
    words += ["--output", str(tmp_path / "all"), "--on", "modal", "--image", "mesh:1"]
    words += ["--secret", "KEY_OF_THE_STORE", "--volume", "runs", "--hardware", "H100:2,cpu=4"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "# island 1" in shown
    for word in ("modal.Sandbox.create", '"gpu": "H100:2"', '"cpu": 4.0', '"timeout": 86400'):
        assert word in shown
    assert '"/runs": "runs"' in shown
    assert '"KEY_OF_THE_STORE"' in shown
    assert "a-secret-of-the-tests" not in shown
    assert not (tmp_path / "all").exists()
