"""The log of a run on Kubernetes, whose controller may move from pod to pod."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_kubectl import FakeKubectl, handle, job, pod

from composer_mesh.plugins.kubernetes.launcher import KubernetesLauncher
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
