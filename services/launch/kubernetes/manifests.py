"""The Kubernetes objects of a run: a pure function of the order.

    NetworkPolicy   only the run's own pods may connect to them
    ConfigMap       the resolved config, a file in the controller's pod
    Service         names for the pods of the workers
    StatefulSet     one per entry of [[placement.hosts]], or MonarchMesh if configured
    Job             the controller; the launcher makes it the owner of all the others

The Secret with the certificate authority is separate, because it is never printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from composer_mesh.services.launch.kubernetes.names import (
    CONFIG_FILE,
    CONTROLLER,
    HOST,
    RUN,
    WORKER,
    Group,
    config_there,
    groups_of,
    labels,
    run_name,
)
from composer_mesh.services.launch.kubernetes.pods import (
    authority_name,
    controller_template,
    worker_template,
)
from composer_mesh.services.launch.ports import LaunchRefused, Order

Table = dict[str, Any]

MESH_API = "monarch.pytorch.org/v1alpha1"
KEPT_S = 600
"""Seconds for which an ended run keeps its pods, for their logs; then its nodes are freed."""
RETRIES = 6
"""Restarts of a killed controller, in addition to moves to another node."""
DECIDED = (1, 2, 130, 143)
"""Exit statuses after which it is not restarted: failure, refusal, SIGINT and SIGTERM."""


def manifests(order: Order, launch: str) -> list[Table]:
    """Return all objects but the Secret, in creation order; raises `LaunchRefused`."""
    _check(order)
    run, groups = run_name(order.output), groups_of(order)
    mesh = order.config.cluster.kubernetes.flavour == "monarchmesh"
    workers = [(_mesh if mesh else _set)(order, run, group) for group in groups]
    return [
        _policy(order, run),
        _config(order, run),
        *([] if mesh else [_service(order, run)]),  # Monarch's operator makes its own
        *workers,
        _job(order, run, launch),
    ]


def secret(order: Order, authority: Mapping[str, str]) -> Table:
    """Return the Secret of a certificate authority: the texts of ca.pem and ca.key."""
    run = run_name(order.output)
    meta = _meta(order, authority_name(run), run, CONTROLLER)
    body = {"type": "Opaque", "immutable": True, "stringData": dict(authority)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, **body}


def as_yaml(objects: list[Table]) -> str:
    """Return objects as one YAML text for kubectl and for users."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, explicit_start=True)


def _policy(order: Order, run: str) -> Table:
    own = {"matchLabels": {RUN: run}}
    spec = {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": own}]}],
    }
    meta = _meta(order, run, run, CONTROLLER)
    return _object("networking.k8s.io/v1", "NetworkPolicy", meta, spec)


def _config(order: Order, run: str) -> Table:
    data = {CONFIG_FILE: config_there(order)}
    meta = _meta(order, run, run, CONTROLLER)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}


def _service(order: Order, run: str) -> Table:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {RUN: run},
    }
    return _object("v1", "Service", _meta(order, run, run, WORKER), spec)


def _set(order: Order, run: str, group: Group) -> Table:
    template = worker_template(order, run, group)
    spec = {
        "replicas": group.host.count,
        "serviceName": run,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": {RUN: run, HOST: group.object}},
        "template": template,
    }
    return _object("apps/v1", "StatefulSet", _meta(order, group.object, run, WORKER), spec)


def _mesh(order: Order, run: str, group: Group) -> Table:
    """Return a MonarchMesh as Monarch's KubernetesJob creates it, with our worker in the pods."""
    spec = {"replicas": group.host.count, "podTemplate": worker_template(order, run, group)}
    return _object(MESH_API, "MonarchMesh", _meta(order, group.object, run, WORKER), spec)


def _job(order: Order, run: str, launch: str) -> Table:
    """Return the controller's Job; a pod on a lost node is replaced once it has surely ended."""
    codes = {"operator": "In", "values": list(DECIDED)}
    moved = {"type": "DisruptionTarget", "status": "True"}
    spec = {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": RETRIES,
        "podReplacementPolicy": "Failed",  # two controllers would write into one run
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [moved]},
                {"action": "FailJob", "onExitCodes": codes},
            ]
        },
        "ttlSecondsAfterFinished": KEPT_S,
        "template": controller_template(order, run, launch),
    }
    return _object("batch/v1", "Job", _meta(order, run, run, CONTROLLER), spec)


def _meta(order: Order, name: str, run: str, role: str) -> Table:
    namespace = order.config.cluster.kubernetes.namespace
    return {"name": name, "namespace": namespace, "labels": labels(run, role)}


def _object(api: str, kind: str, meta: Table, spec: Table) -> Table:
    return {"apiVersion": api, "kind": kind, "metadata": meta, "spec": spec}


def _check(order: Order) -> None:
    kubernetes = order.config.cluster.kubernetes
    if not kubernetes.image:
        raise LaunchRefused(
            "cluster.kubernetes.image is empty, and pods need an image with composer-mesh in it: "
            'set it, such as "registry.example.com/composer-mesh:0.1.0"'
        )
    if not kubernetes.volume:
        raise LaunchRefused(
            "cluster.kubernetes.volume is empty, and all pods share the run's directory: set it to "
            "a persistent volume claim of the namespace with access mode ReadWriteMany"
        )
    if not kubernetes.mount.startswith("/") or kubernetes.mount.strip("/") == "":
        raise LaunchRefused(
            f"cluster.kubernetes.mount is {kubernetes.mount!r} but must be an absolute path other "
            'than "/": set it, such as "/runs"'
        )


class _Dumper(yaml.SafeDumper):
    """Dumps multi-line strings as blocks, and without YAML references between objects."""

    def ignore_aliases(self, _data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
