"""Orders for Kubernetes, and the strict schemas of its objects, which need no cluster."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
from kubernetes_validate.utils import all_versions
from repository import ROOT

from composer_mesh.configs.load import resolve_config
from composer_mesh.planning.placement_solver import described_hosts
from composer_mesh.plugins.kubernetes.manifests import manifests, secret
from composer_mesh.services.launch.ports import Order

Table = dict[str, Any]

PRESET = ROOT / "configs/quickstart.toml"
HOSTS = [
    {"name": "gpu", "count": 2, "cores": 8, "memory_gb": 64, "gpus": 4, "gpu_memory_gb": 80},
    {"name": "cpu", "cores": 4, "memory_gb": 16},
    {"name": "Big.host", "cores": 16, "memory_gb": 32},
]
FOLDER = Path("/home/ada/work")
LAUNCH = "0123456789abcdef"
AUTHORITY = {"ca.pem": "public", "ca.key": "private"}
FLAVOURS = ["manifests", "monarchmesh"]
OLDEST = "1.29"
"""From here on a Job can wait until a lost pod is surely gone, before it starts another."""


def order(
    output: str = "runs/quickstart",
    hosts: list[Table] = HOSTS,
    resume: bool = False,
    cluster: Table | None = None,
    policy: Table | None = None,
    **kubernetes: object,
) -> Order:
    """The quickstart on four hosts; keywords are keys of [cluster.kubernetes]."""
    table = tomllib.loads(PRESET.read_text())
    table["policy"] |= policy or {}
    about = {"image": "registry.example.com/composer-mesh:0.1.0", "volume": "runs", **kubernetes}
    table["cluster"] = {"kind": "kubernetes", "kubernetes": about, **(cluster or {})}
    table["placement"] = {"hosts": hosts}
    config = resolve_config(table, [], "order")
    described = described_hosts(config.placement)
    return Order(config, described, FOLDER / output, FOLDER, "/usr/bin/python3", resume)


def every(**kubernetes: object) -> list[Table]:
    """All objects of a run, the Secret too."""
    made = order(**kubernetes)
    return [*manifests(made, LAUNCH), secret(made, AUTHORITY)]


def templates(objects: list[Table]) -> Iterator[Table]:
    for one in objects:
        spec = one.get("spec", {})
        if template := spec.get("template") or spec.get("podTemplate"):
            yield template


def containers(objects: list[Table]) -> Iterator[Table]:
    for template in templates(objects):
        yield from template["spec"].get("initContainers", [])
        yield from template["spec"]["containers"]


def worker_of(objects: list[Table], name: str) -> Table:
    found = next(one for one in objects if one["metadata"]["name"] == name)
    template = found["spec"].get("template") or found["spec"]["podTemplate"]
    return {**found, "pod": template["spec"], "container": template["spec"]["containers"][0]}


def job_of(objects: list[Table]) -> Table:
    return next(one for one in objects if one["kind"] == "Job")


def versions() -> list[str]:
    """The versions of Kubernetes whose schemas are at hand and that a run works on."""
    return sorted({one for one in all_versions() if _number(one) >= _number(OLDEST)})


def check(one: Table, version: str) -> None:
    """Raise for a field that a version of Kubernetes does not know, or of another type.

    The schema of a MonarchMesh is that of the operator's version 0.2: replicas from 1 on, a port,
    and a whole pod template, which is what a StatefulSet has too.
    """
    if one["kind"] != "MonarchMesh":
        kubernetes_validate.validate(one, version, strict=True)
        return
    assert set(one) == {"apiVersion", "kind", "metadata", "spec"}
    assert one["apiVersion"] == "monarch.pytorch.org/v1alpha1"
    assert re.fullmatch(r"[a-z][a-z0-9]{0,62}", one["metadata"]["name"])
    spec = dict(one["spec"])
    template, replicas = spec.pop("podTemplate"), spec.pop("replicas")
    assert type(replicas) is int
    assert replicas >= 1
    assert set(spec) <= {"port"}
    assert set(template["metadata"]) <= {"labels", "annotations", "finalizers", "name", "namespace"}
    selector = {"matchLabels": {"monarch.pytorch.org/mesh-name": one["metadata"]["name"]}}
    made = {"serviceName": f"{one['metadata']['name']}-svc", "selector": selector}
    meta = one["metadata"]
    check(
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": meta,
            "spec": {**made, "template": template},
        },
        version,
    )


def _number(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
