"""A run on Kubernetes by the real kubectl, against a server that keeps objects and runs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kube_api import KubeApi
from kubernetes_orders import LAUNCH, order, worker_of

from composer_mesh.mesh import programs
from composer_mesh.mesh.hosts.certificates import make_authority
from composer_mesh.plugins.kubernetes.launcher import KubernetesLauncher
from composer_mesh.plugins.kubernetes.manifests import manifests
from composer_mesh.plugins.kubernetes.names import AUTHORITY
from composer_mesh.services.launch.ports import Handle, LaunchFailed, LaunchRefused, Order
from composer_mesh.services.launch.workers import write_files

WORKERS = {"manifests": "statefulsets", "monarchmesh": "monarchmeshes"}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    """A cluster that kubectl finds by its own configuration."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    api = KubeApi()
    for words in (
        ["set-cluster", "here", f"--server={api.url}"],
        ["set-context", "here", "--cluster=here"],
        ["use-context", "here"],
    ):
        programs.run(["kubectl", "config", "--kubeconfig", str(tmp_path / "config"), *words])
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))  # kubectl keeps what it discovers there
    yield api
    api.close()


@pytest.fixture(params=sorted(WORKERS))
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Order:
    asked = order(flavour=request.param)
    return replace(asked, output=tmp_path / "runs/quickstart", folder=tmp_path)


def submit(made: Order) -> Handle:
    launcher = KubernetesLauncher(pause=lambda: None)
    plan = launcher.plan(made)
    write_files(plan)
    return launcher.submit(made, plan)


def test_a_run_is_brought_to_the_cluster_looked_at_and_ended(api: KubeApi, made: Order) -> None:
    launcher = KubernetesLauncher()
    handle = submit(made)
    workers = WORKERS[made.config.cluster.kubernetes.flavour]
    assert len(api.names(workers)) == 3
    assert api.names("jobs") == ["quickstart"]
    job = api.objects["jobs", "default", "quickstart"]
    for (plural, _, _), one in api.objects.items():
        if plural not in ("jobs", "pods"):
            (owner,) = one["metadata"]["ownerReferences"]
            assert owner["uid"] == job["metadata"]["uid"]
    assert launcher.state(handle) == ("running", "pod quickstart-abcde")
    with pytest.raises(LaunchRefused, match="is there already"):
        submit(made)
    launcher.stop(handle, grace_s=1.0)
    assert api.objects == {}
    kinds = [plural for plural, _, _ in api.gone]
    assert kinds.index("pods") < kinds.index("jobs")
    assert launcher.state(handle) == ("ended", "its objects are gone")


def test_what_the_controller_prints_is_followed_to_its_end(api: KubeApi, made: Order) -> None:
    handle = submit(made)
    api.log = "2026-01-01T00:00:01.1Z step 1\n2026-01-01T00:00:02.1Z step 2, loss 0.5\n"

    def ends() -> None:
        api.objects["pods", "default", "quickstart-abcde"]["status"]["phase"] = "Succeeded"
        done = [{"type": "Complete", "status": "True"}]
        api.objects["jobs", "default", "quickstart"]["status"] = {"conditions": done}

    lines = KubernetesLauncher(pause=ends).follow(handle)
    assert list(lines) == ["step 1", "step 2, loss 0.5"]
    assert KubernetesLauncher().state(handle) == ("ended", "completed")


def test_an_object_that_the_cluster_refuses_leaves_nothing_there(api: KubeApi, made: Order) -> None:
    launcher = KubernetesLauncher()
    plan = launcher.plan(made)
    (objects,) = set(plan.files) - plan.secret
    wrong = plan.files[objects].replace("parallelism: 1", "parallelizm: 1")
    plan = replace(plan, files={**plan.files, objects: wrong})
    write_files(plan)
    with pytest.raises(LaunchFailed, match="parallelizm"):
        launcher.submit(made, plan)
    assert api.objects == {}


def test_the_worker_of_a_pod_is_ready_while_it_listens(tmp_path: Path) -> None:
    """The rendered commands as plain processes, with what Kubernetes puts into them."""
    made = order(mount=str(tmp_path), cluster={"python": sys.executable})
    container = worker_of(manifests(made, LAUNCH), "quickstart-gpu")["container"]
    make_authority(tmp_path / "authority")
    env = {**os.environ, "COMPOSER_MESH_HOST": "gpu-1"}

    def words(command: list[str]) -> list[str]:
        names = {str(AUTHORITY): str(tmp_path / "authority"), "$(COMPOSER_MESH_HOST)": "gpu-1"}
        return [names.get(word, word) for word in command]

    def ready() -> bool:
        probe = words(container["readinessProbe"]["exec"]["command"])
        return subprocess.run(probe, env=env, capture_output=True, timeout=60).returncode == 0

    assert not ready()
    command = words(container["command"])
    worker = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        assert "composer-mesh worker gpu-1 listens on tls://" in worker.stdout.readline()
        assert ready()
        record = tmp_path / "quickstart/hosts/gpu-1.json"
        told = record.read_text()
        worker.terminate()
        assert worker.wait(timeout=60) == 0
        record.write_text(told)  # of a container that was killed
        assert not ready()
    finally:
        worker.kill()
        worker.communicate()
