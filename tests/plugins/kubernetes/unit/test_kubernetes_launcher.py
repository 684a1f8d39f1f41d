"""How a run is brought to Kubernetes, followed and ended, against a cluster that is played.

Its pods: what they are given, and who they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_kubectl import FakeKubectl, Table, handle, job, pod
from kubernetes_orders import (
    AUTHORITY,
    FLAVOURS,
    LAUNCH,
    containers,
    every,
    order,
    templates,
    worker_of,
)

from composer_mesh.mesh.programs import FinishedProgram, ProgramFailed
from composer_mesh.plugins.kubernetes.launcher import KubernetesLauncher, state_of
from composer_mesh.plugins.kubernetes.manifests import as_yaml, manifests, secret
from composer_mesh.services.launch.ports import Handle, LaunchFailed, LaunchRefused, Order, Plan
from composer_mesh.services.launch.workers import write_files

PREFIX = ["kubectl", "--context", "kind-test", "--namespace", "default"]


@pytest.fixture
def cluster() -> FakeKubectl:
    return FakeKubectl()


@pytest.fixture
def launcher(cluster: FakeKubectl) -> KubernetesLauncher:
    return KubernetesLauncher(cluster.run, cluster.lines, pause=lambda: None)


@pytest.fixture
def made(tmp_path: Path) -> Order:
    return replace(order(), output=tmp_path / "runs/quickstart", folder=tmp_path)


def submit(launcher: KubernetesLauncher, made: Order) -> tuple[Plan, Handle]:
    plan = launcher.plan(made)
    write_files(plan)
    return plan, launcher.submit(made, plan)


def test_a_plan_asks_nobody_and_shows_everything_but_the_key(
    launcher: KubernetesLauncher, cluster: FakeKubectl, made: Order
) -> None:
    plan = launcher.plan(made)
    assert cluster.commands == []
    assert not made.output.exists()
    shown = {path: text for path, text in plan.files.items() if path not in plan.secret}
    (hidden,) = plan.secret
    assert hidden.name == "authority.yaml"
    assert "PRIVATE KEY" in plan.files[hidden]
    assert "PRIVATE KEY" not in f"{shown} {plan.commands}"
    assert [path.name for path in shown] == ["kubernetes.yaml"]


def test_submitting_does_what_the_plan_says_in_its_order(
    launcher: KubernetesLauncher, cluster: FakeKubectl, made: Order
) -> None:
    plan, _ = submit(launcher, made)
    planned = [
        [*PREFIX, *(word.replace("UID_OF_THE_JOB", "uid-7") for word in command[3:])]
        for command in plan.commands
    ]
    assert cluster.commands[-len(planned) :] == planned
    kinds = [one["kind"] for one in cluster.applied]
    assert kinds[0] == "Secret"
    assert kinds[-1] == "Job"


def test_the_job_owns_every_other_object(
    launcher: KubernetesLauncher, cluster: FakeKubectl, made: Order
) -> None:
    submit(launcher, made)
    owned = {
        (command[command.index("patch") + 1], command[command.index("patch") + 2])
        for command in cluster.told("patch")
    }
    others = {
        (one["kind"].lower(), one["metadata"]["name"])
        for one in cluster.applied
        if one["kind"] != "Job"
    }
    assert owned == others
    assert all('"uid": "uid-7"' in command[-1] for command in cluster.told("patch"))


def test_the_key_is_never_readable_for_others_and_gone_afterwards(
    launcher: KubernetesLauncher, cluster: FakeKubectl, made: Order
) -> None:
    plan, _ = submit(launcher, made)
    (hidden,) = plan.secret
    assert cluster.secret_modes[0] == 0o600
    assert not hidden.exists()
    assert "PRIVATE KEY" not in str(cluster.commands)


def test_a_launch_that_fails_halfway_leaves_nothing_behind(
    launcher: KubernetesLauncher, cluster: FakeKubectl, made: Order
) -> None:
    cluster.fails = {"patch"}
    plan = launcher.plan(made)
    write_files(plan)
    with pytest.raises(LaunchFailed, match="the server does not answer"):
        launcher.submit(made, plan)
    assert "delete" in cluster.commands[-1]
    assert "composer-mesh/run=quickstart" in cluster.commands[-1]
    assert not any(path.exists() for path in plan.secret)


def test_the_key_is_gone_too_where_there_is_no_kubectl(made: Order) -> None:
    def missing(command: list[str], **_: object) -> FinishedProgram:
        raise ProgramFailed(command, "it is not installed here, or not on PATH")

    launcher = KubernetesLauncher(missing)
    plan = launcher.plan(made)
    write_files(plan)
    with pytest.raises(LaunchFailed, match="kubectl config current-context failed: it is not"):
        launcher.submit(made, plan)
    assert not any(path.exists() for path in plan.secret)


def test_a_mesh_without_an_owner_yet_is_removed_by_its_name(
    launcher: KubernetesLauncher, cluster: FakeKubectl, made: Order
) -> None:
    mesh = order(flavour="monarchmesh")
    mesh = replace(mesh, output=made.output, folder=made.folder)
    cluster.fails = {"patch"}
    plan = launcher.plan(mesh)
    write_files(plan)
    with pytest.raises(LaunchFailed):
        launcher.submit(mesh, plan)
    names = {command[-2] for command in cluster.told("monarchmesh")}
    assert names == {"quickstartgpu", "quickstartcpu", "quickstartbighost"}


def test_the_handle_says_where_the_run_is_in_the_cluster(
    launcher: KubernetesLauncher, made: Order
) -> None:
    _, found = submit(launcher, made)
    assert found.run == Path("/runs/quickstart")
    assert found.folder == Path("/runs")
    assert found.python == "python"
    assert (found.job, found.namespace) == ("quickstart", "default")
    where = ["--context", "kind-test", "--namespace", "default"]
    there = ["--stdin", "job/quickstart", "--container", "controller", "--"]
    assert list(launcher.reach(found)) == ["kubectl", "exec", *where, *there]


def test_a_run_that_goes_on_is_not_launched_over(
    launcher: KubernetesLauncher, cluster: FakeKubectl, made: Order
) -> None:
    cluster.job, cluster.pods = job(), [pod("quickstart-a", "Running")]
    plan = launcher.plan(made)
    write_files(plan)
    with pytest.raises(
        LaunchRefused, match=r"is there already \(running, pod quickstart-a\).*stop"
    ):
        launcher.submit(made, plan)
    assert not cluster.told("apply")
    assert not cluster.told("delete")
    assert not any(path.exists() for path in plan.secret)


def test_what_an_earlier_run_has_left_is_removed_first(
    launcher: KubernetesLauncher, cluster: FakeKubectl, made: Order
) -> None:
    cluster.job = job("Failed", "exit code 1")
    submit(launcher, made)
    words = [
        next(w for w in ("delete", "apply") if w in c)
        for c in cluster.commands
        if {"delete", "apply"} & set(c)
    ]
    assert words == ["delete", "delete", "apply", "apply"]


def test_in_a_pod_without_contexts_none_is_named(made: Order) -> None:
    cluster = FakeKubectl(context="")
    launcher = KubernetesLauncher(cluster.run, cluster.lines, pause=lambda: None)
    _, found = submit(launcher, made)
    assert "--context" not in launcher.reach(found)
    assert launcher.state(found)[0] == "ended"


PENDING = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes fit"}]}
NO_IMAGE = {
    "containerStatuses": [
        {"name": "controller", "state": {"waiting": {"reason": "ErrImagePull", "message": "404"}}}
    ]
}


@pytest.mark.parametrize(
    ("there", "pods", "state", "word"),
    [
        (None, [], "ended", "its objects are gone"),
        (job(), [], "waiting", "no pod yet"),
        (job(suspend=True), [], "waiting", "suspended"),
        (job(), [pod("a", "Pending", **PENDING)], "waiting", "pod a is Pending: 0/3 nodes fit"),
        (
            job(),
            [pod("a", "Pending") | {"status": {"phase": "Pending", **NO_IMAGE}}],
            "waiting",
            "pod a is Pending: ErrImagePull: 404",
        ),
        (job(), [pod("a", "Failed"), pod("b", "Running")], "running", "pod b"),
        (job(), [pod("a", "Failed")], "waiting", "pod a is Failed"),
        (job("Complete"), [pod("a", "Succeeded")], "ended", "completed"),
        (job("Failed", "exit code 2"), [pod("a", "Failed")], "ended", "failed: exit code 2"),
    ],
)
def test_the_state_is_told_with_kubernetes_own_reason(
    there: Table | None, pods: list[Table], state: str, word: str
) -> None:
    assert state_of(there, pods) == (state, word)


def test_a_cluster_that_does_not_answer_is_unknown(
    launcher: KubernetesLauncher, cluster: FakeKubectl
) -> None:
    cluster.fails = {"get"}
    state, word = launcher.state(handle())
    assert state == "unknown"
    assert "the server does not answer" in word


def test_stopping_ends_the_controller_before_its_workers(
    launcher: KubernetesLauncher, cluster: FakeKubectl
) -> None:
    cluster.job, cluster.pods = job(), [pod("only", "Running")]
    launcher.stop(handle(), grace_s=90.0)
    suspend, end, remove, rest = cluster.commands[-4:]
    assert suspend[-1] == '{"spec":{"suspend":true}}'
    assert "--grace-period=90" in end
    assert "composer-mesh/run=quickstart,composer-mesh/role=controller" in end
    assert remove[5:8] == ["delete", "job", "quickstart"]
    assert "composer-mesh/run=quickstart" in rest
    assert all(command[:5] == PREFIX for command in cluster.commands)


def test_stopping_what_is_gone_removes_what_is_left_and_fails_not(
    launcher: KubernetesLauncher, cluster: FakeKubectl
) -> None:
    launcher.stop(handle(), grace_s=90.0)
    assert not cluster.told("patch")
    assert len(cluster.told("delete")) == 2


def test_a_stop_that_the_cluster_refuses_is_told(
    launcher: KubernetesLauncher, cluster: FakeKubectl
) -> None:
    cluster.job, cluster.fails = job(), {"delete"}
    with pytest.raises(LaunchFailed, match="does not answer"):
        launcher.stop(handle(), grace_s=1.0)


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


def test_keys_come_from_secrets_into_the_controllers_container_alone() -> None:
    for container in containers(every(secrets=["teacher-keys", "more"])):
        if container["name"] != "controller":
            assert "envFrom" not in container
            continue
        assert container["envFrom"] == [
            {"secretRef": {"name": "teacher-keys"}},
            {"secretRef": {"name": "more"}},
        ]
