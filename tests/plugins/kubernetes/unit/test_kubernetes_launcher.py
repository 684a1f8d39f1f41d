"""How a run is brought to Kubernetes, followed and ended, against a cluster that is played."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_kubectl import FakeKubectl, Table, handle, job, pod
from kubernetes_orders import order

from composer_mesh.mesh.programs import FinishedProgram, ProgramFailed
from composer_mesh.plugins.kubernetes.launcher import KubernetesLauncher, state_of
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
