"""The pods of a run on Kubernetes: what they are given, who they are, and when they begin again.

The log of the run is followed while its controller moves from pod to pod.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_kubectl import FakeKubectl, handle, job, pod
from kubernetes_orders import (
    AUTHORITY,
    FLAVOURS,
    LAUNCH,
    containers,
    every,
    job_of,
    order,
    templates,
    worker_of,
)

from composer_mesh.plugins.kubernetes.launcher import KubernetesLauncher
from composer_mesh.plugins.kubernetes.manifests import as_yaml, manifests, secret
from composer_mesh.services.launch.ports import LaunchFailed


@pytest.fixture
def cluster() -> FakeKubectl:
    return FakeKubectl()


def stamped(*texts: str, minute: int = 0) -> list[str]:
    return [f"2026-01-01T00:{minute:02}:0{n}.5Z {text}" for n, text in enumerate(texts)]


def playing(cluster: FakeKubectl, *scenes: Callable[[], None]) -> KubernetesLauncher:
    """A launcher whose every pause is the next scene."""
    left = list(scenes)
    return KubernetesLauncher(cluster.run, cluster.lines, pause=lambda: left.pop(0)())


def test_a_log_is_followed_from_one_pod_to_the_next(cluster: FakeKubectl) -> None:
    first, second = pod("first", "Running"), pod("second", "Running")
    cluster.job, cluster.pods = job(), [pod("first", "Pending", begun=False)]
    cluster.logs = {"first": stamped("one", "two words"), "second": stamped("three", minute=1)}

    def runs() -> None:
        cluster.pods = [first]

    def is_moved() -> None:
        cluster.pods = [pod("first", "Failed"), second]

    def ends() -> None:
        cluster.job, cluster.pods = (
            job("Complete"),
            [pod("first", "Failed"), pod("second", "Succeeded")],
        )

    launcher = playing(cluster, runs, is_moved, ends)
    assert list(launcher.follow(handle())) == ["one", "two words", "three"]


def test_a_line_that_was_cut_off_goes_on_without_saying_anything_twice(
    cluster: FakeKubectl,
) -> None:
    cluster.job, cluster.pods = job(), [pod("only", "Running")]
    cluster.logs = {"only": stamped("one", "two")}

    def goes_on() -> None:
        cluster.fails = {"get"}
        cluster.logs["only"] = stamped("one", "two", "three")

    def answers() -> None:
        cluster.fails = set()
        cluster.job, cluster.pods = job("Complete"), [pod("only", "Succeeded")]

    launcher = playing(cluster, goes_on, answers)
    assert list(launcher.follow(handle())) == ["one", "two", "three"]
    assert "2026-01-01T00:00:01.5Z" in cluster.told("logs")[-1]


def test_why_a_controller_never_began_is_shown(cluster: FakeKubectl) -> None:
    cluster.job = job("Failed", "container claim failed with exit code 2")
    cluster.pods = [pod("only", "Failed", begun=False)]
    cluster.logs = {"only/claim": stamped("composer-mesh: /runs/quickstart is on the volume")}
    launcher = playing(cluster)
    assert list(launcher.follow(handle())) == ["composer-mesh: /runs/quickstart is on the volume"]


def test_a_cluster_that_never_answers_again_ends_the_following(cluster: FakeKubectl) -> None:
    cluster.fails = {"get"}
    launcher = KubernetesLauncher(cluster.run, cluster.lines, pause=lambda: None)
    with pytest.raises(LaunchFailed, match="does not answer"):
        list(launcher.follow(handle()))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_no_process_is_root_or_can_become_it_and_no_pod_has_a_token(flavour: str) -> None:
    """The rules of the "restricted" pod security standard."""
    objects = every(flavour=flavour)
    for template in templates(objects):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        kinds = {kind for one in spec["volumes"] for kind in one if kind != "name"}
        assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
    for container in containers(objects):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


def test_only_workers_with_rdma_may_pin_memory() -> None:
    objects = every(rdma_resource="rdma/hca")
    adding = [
        container["name"]
        for container in containers(objects)
        if "add" in container["securityContext"]["capabilities"]
    ]
    assert set(adding) == {"worker"}
    limits = worker_of(objects, "quickstart-gpu")["container"]["resources"]["limits"]
    assert limits["rdma/hca"] == "1"


def test_only_the_runs_own_pods_reach_its_pods() -> None:
    policy = next(one for one in every() if one["kind"] == "NetworkPolicy")
    own = {"matchLabels": {"composer-mesh/run": "quickstart"}}
    assert policy["spec"]["podSelector"] == own
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": own}]}]
    for template in templates(every()):
        assert template["metadata"]["labels"]["composer-mesh/run"] == "quickstart"


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_key_of_the_authority_is_in_the_secret_alone(flavour: str) -> None:
    made = order(flavour=flavour)
    assert "private" in as_yaml([secret(made, AUTHORITY)])
    assert "private" not in as_yaml(manifests(made, LAUNCH))


def test_a_host_gets_what_the_placement_describes() -> None:
    worker = worker_of(every(), "quickstart-gpu")
    assert worker["spec"]["replicas"] == 2
    wanted = {"cpu": "8", "memory": "65536Mi", "nvidia.com/gpu": "4"}
    assert worker["container"]["resources"] == {"requests": wanted, "limits": wanted}
    shm = next(one for one in worker["pod"]["volumes"] if one["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "65536Mi"}
    cpu = worker_of(every(), "quickstart-cpu")
    assert "nvidia.com/gpu" not in cpu["container"]["resources"]["limits"]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_names_of_workers_are_those_of_the_placement(flavour: str) -> None:
    objects, made = every(flavour=flavour), order(flavour=flavour)
    called = set()
    for one in objects:
        if one["kind"] not in ("StatefulSet", "MonarchMesh"):
            continue
        worker = worker_of(objects, one["metadata"]["name"])
        env = {entry["name"]: entry.get("value") for entry in worker["container"]["env"]}
        for number in range(one["spec"]["replicas"]):
            name = str(env["COMPOSER_MESH_HOST"])
            called.add(name.replace("$(POD_INDEX)", str(number)))
        order_of = list(env)
        assert order_of.index("POD_INDEX") < order_of.index("COMPOSER_MESH_HOST")
        assert "$(COMPOSER_MESH_HOST)" in worker["container"]["command"]
    assert called == {host.name for host in made.hosts}
    assert called == {"gpu-0", "gpu-1", "cpu", "Big.host"}


def test_a_probe_uses_no_variable_of_a_command() -> None:
    """Kubernetes puts $(NAME) into commands and not into probes."""
    for container in containers(every()):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert "$(" not in str(container.get(probe, {}))


def test_a_run_that_ended_is_not_started_again_and_one_that_lost_its_node_is() -> None:
    spec = job_of(every())["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    assert rules[0]["action"] == "Ignore"  # a pod that was moved, whatever its status
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert rules[1]["action"] == "FailJob"
    assert rules[1]["onExitCodes"]["values"] == [1, 2, 130, 143]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["podReplacementPolicy"] == "Failed"
    command = spec["template"]["spec"]["containers"][0]["command"]
    assert command[-3:] == ["--output", "/runs/quickstart", "--auto-resume"]


def test_a_controller_has_minutes_for_its_checkpoint() -> None:
    assert job_of(every())["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 120


def test_keys_come_from_secrets_into_the_controllers_container_alone() -> None:
    for container in containers(every(secrets=["teacher-keys", "more"])):
        if container["name"] != "controller":
            assert "envFrom" not in container
            continue
        assert container["envFrom"] == [
            {"secretRef": {"name": "teacher-keys"}},
            {"secretRef": {"name": "more"}},
        ]
