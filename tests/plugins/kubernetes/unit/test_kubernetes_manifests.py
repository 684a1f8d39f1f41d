"""The objects of a run on Kubernetes: valid, closed, and what a person would expect.

The golden files show a run on four hosts. After a change that is meant, renew them with

    RENEW_GOLDEN=1 pytest tests/plugins/kubernetes/unit/test_kubernetes_manifests.py
"""

from __future__ import annotations

import copy
import os
import re
import socket
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_orders import FLAVOURS, LAUNCH, check, every, job_of, order, templates, versions

from composer_mesh.configs.load import load_config
from composer_mesh.mesh.hosts.roster import ROSTER, Record, announce, read_roster
from composer_mesh.plugins.kubernetes.claim import claim, forget_the_dead, main
from composer_mesh.plugins.kubernetes.manifests import as_yaml, manifests
from composer_mesh.services.launch.ports import LaunchRefused

Table = dict[str, Any]

GOLDEN = Path(__file__).parent / "golden"
FULL: Table = {
    "secrets": ["teacher-keys"],
    "service_account": "trainer",
    "rdma_resource": "rdma/hca",
    "node_selector": {"pool": "gpu"},
}


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("more", [{}, FULL], ids=["least", "everything"])
def test_every_object_is_valid_by_the_strict_schema(
    version: str, flavour: str, more: Table
) -> None:
    for one in every(flavour=flavour, **more):
        check(one, version)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("StatefulSet", ("spec", "replicaz"), 2),
        ("StatefulSet", ("spec", "replicas"), "2"),
        ("StatefulSet", ("spec", "template", "spec", "hostNetworking"), True),
        ("Job", ("spec", "backofLimit"), 1),
        ("Job", ("spec", "template", "spec", "containers", 0, "envFrom"), [{"secret": "x"}]),
        ("NetworkPolicy", ("spec", "ingres"), []),
        ("ConfigMap", ("data",), {"config.toml": 1}),
        ("Secret", ("stringdata",), {}),
        ("Service", ("spec", "clusterIp"), "None"),
        ("MonarchMesh", ("spec", "template"), {}),
        ("MonarchMesh", ("spec", "replicas"), 0),
        ("MonarchMesh", ("spec", "podTemplate", "spec", "hostNetworking"), True),
    ],
)
def test_the_check_finds_an_object_that_is_broken(
    kind: str, path: tuple[str | int, ...], value: object
) -> None:
    objects = [one for flavour in FLAVOURS for one in every(flavour=flavour)]
    broken: Any = copy.deepcopy(next(one for one in objects if one["kind"] == kind))
    place = broken
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises((jsonschema.ValidationError, AssertionError)):
        check(broken, versions()[-1])


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_run_on_four_hosts_looks_as_it_did(flavour: str) -> None:
    objects = manifests(order(flavour=flavour, **FULL), LAUNCH)
    for one in objects:
        if one["kind"] == "ConfigMap":  # grows with every key of a config
            one["data"] = dict.fromkeys(one["data"], "...")
    text, file = as_yaml(objects), GOLDEN / f"{flavour}.yaml"
    if os.environ.get("RENEW_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text(), f"if this is meant, renew {file.name} as this file says"


def test_the_text_is_read_back_as_the_same_objects() -> None:
    objects = every()
    assert list(yaml.safe_load_all(as_yaml(objects))) == objects
    assert "&id" not in as_yaml(objects)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_what_objects_call_each_other_is_there(flavour: str) -> None:
    objects = every(flavour=flavour)
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    assert len(names) == len(objects)
    for template in templates(objects):
        spec = template["spec"]
        volumes = {one["name"]: one for one in spec["volumes"]}
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
        assert ("Secret", volumes["authority"]["secret"]["secretName"]) in names
        if "config" in volumes:
            assert ("ConfigMap", volumes["config"]["configMap"]["name"]) in names
    for one in objects:
        if one["kind"] == "StatefulSet":
            wanted = one["spec"]["selector"]["matchLabels"].items()
            assert wanted <= one["spec"]["template"]["metadata"]["labels"].items()
            assert ("Service", one["spec"]["serviceName"]) in names


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_names_and_labels_are_ones_that_kubernetes_takes(flavour: str) -> None:
    """Schemas say nothing of their letters."""
    for one in every(flavour=flavour):
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", one["metadata"]["name"])
        assert one["metadata"]["namespace"] == "default"
        for value in one["metadata"]["labels"].values():
            assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", value)
        assert one["metadata"]["labels"]["composer-mesh/run"] == "quickstart"


def test_the_config_of_the_controller_is_the_order_with_paths_on_the_volume(
    tmp_path: Path,
) -> None:
    made = order(policy={"cache_dir": "/home/ada/work/cache"})
    config = next(one for one in manifests(made, LAUNCH) if one["kind"] == "ConfigMap")
    file = tmp_path / "config.toml"
    file.write_text(config["data"]["config.toml"])
    there = load_config(file)
    assert there.policy.cache_dir == Path("/runs/cache")
    assert there.cluster.authority == Path("/etc/composer-mesh/authority")
    assert there.placement == made.config.placement
    assert there.loss == made.config.loss
    elsewhere = order(policy={"cache_dir": "/models/cache"})
    config = next(one for one in manifests(elsewhere, LAUNCH) if one["kind"] == "ConfigMap")
    assert 'cache_dir = "/models/cache"' in config["data"]["config.toml"]


def test_a_resumed_launch_takes_a_directory_that_is_there() -> None:
    def claim(resume: bool) -> list[str]:
        job = job_of(manifests(order(resume=resume), LAUNCH))
        return list(job["spec"]["template"]["spec"]["initContainers"][0]["command"])

    assert claim(False)[-2:] == ["/runs/quickstart", LAUNCH]
    assert claim(True) == [*claim(False), "--resume"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image": ""}, r"kubernetes\.image is empty.*set it"),
        ({"volume": ""}, r"kubernetes\.volume is empty.*ReadWriteMany"),
        ({"mount": "/"}, r"kubernetes\.mount is '/' but must be an absolute path"),
        ({"mount": "runs"}, r"kubernetes\.mount is 'runs' but must be"),
        ({"output": "runs/___"}, "accepts no letter"),
        ({"output": "runs/" + "x" * 60}, "letters but the name of an object 52 at most"),
        ({"cluster": {"authority": "/secret/ca"}}, r"remove cluster\.authority"),
        (
            {"hosts": [{"name": name, "cores": 1, "memory_gb": 4} for name in ("a.b", "a-b")]},
            "so would another object of the run: give it another name",
        ),
        (
            {"hosts": [{"name": "Controller", "cores": 1, "memory_gb": 4}]},
            "so would another object of the run",
        ),
    ],
)
def test_what_kubernetes_cannot_have_is_refused_with_the_repair(change: Table, said: str) -> None:
    with pytest.raises(LaunchRefused, match=said):
        manifests(order(**change), LAUNCH)


def record(name: str, port: int) -> Record:
    return Record(name, f"tls://127.0.0.1:{port}", "python", 1, "boot")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs/quickstart"


def test_a_new_directory_is_taken_and_the_next_pod_of_the_launch_finds_it(run: Path) -> None:
    assert claim(run, "mine", resume=False) == ""
    (run / "config.toml").write_text("")
    assert claim(run, "mine", resume=False) == ""


def test_workers_that_came_first_do_not_make_it_another_runs(run: Path) -> None:
    announce(run / ROSTER, record("gpu-0", 1))
    assert claim(run, "mine", resume=False) == ""


def test_the_directory_of_another_launch_is_refused_unless_it_is_resumed(run: Path) -> None:
    claim(run, "first", resume=False)
    assert "launch with --resume" in claim(run, "second", resume=False)
    assert claim(run, "second", resume=True) == ""
    assert claim(run, "second", resume=False) == ""
    assert "launch with --resume" in claim(run, "first", resume=False)


def test_nothing_is_resumed_where_nothing_is(run: Path) -> None:
    assert "nothing to resume" in claim(run, "mine", resume=True)
    assert not run.exists()


def test_records_of_workers_that_are_gone_are_removed(run: Path) -> None:
    with socket.socket() as lives, socket.socket() as dead:
        lives.bind(("127.0.0.1", 0))
        lives.listen()
        dead.bind(("127.0.0.1", 0))
        announce(run / ROSTER, record("gpu-0", lives.getsockname()[1]))
        announce(run / ROSTER, record("gpu-1", dead.getsockname()[1]))
        assert forget_the_dead(run / ROSTER) == ["gpu-1"]
    assert [one.name for one in read_roster(run / ROSTER)] == ["gpu-0"]


def test_the_program_says_why_and_how_it_ended(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "first"]) == 0
    assert main([str(run), "second"]) == 2
    assert f"composer-mesh: {run} is on the volume already" in capsys.readouterr().err
    assert main([str(run), "second", "--resume"]) == 0
