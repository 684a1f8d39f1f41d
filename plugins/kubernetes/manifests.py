"""The Kubernetes objects of a run: a pure function of the order.

    NetworkPolicy   only the run's own pods may connect to them
    ConfigMap       the resolved config, a file in the controller's pod
    Service         names for the pods of the workers
    StatefulSet     one per entry of [[placement.hosts]], or MonarchMesh if configured
    Job             the controller; the launcher makes it the owner of all the others

The Secret with the certificate authority is separate, because it is never printed.

The pods of a run: one per host, and the controller's.

They run without root, privilege escalation or cluster tokens, and API keys come from Secrets only,
which only the controller's pod has. `manifests` sets restarts and owners.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from composer_mesh.mesh.environment import python_code, python_module
from composer_mesh.planning.host_capacity import processes_of
from composer_mesh.planning.memory import GB, MB, SHARED_CODE
from composer_mesh.planning.placement_solver import WITH_CONTROLLER
from composer_mesh.plugins.kubernetes.names import (
    AUTHORITY,
    CLAIM,
    CONFIG,
    CONFIG_FILE,
    CONTROLLER,
    HOST,
    RUN,
    WORKER,
    HostGroup,
    config_there,
    groups_of,
    labels,
    python_there,
    roster_there,
    run_name,
    run_there,
)
from composer_mesh.services.launch.ports import LaunchRefused, Order
from composer_mesh.services.launch.workers import controller_command, worker_command

Table = dict[str, Any]

USER = 1000
"""User and group id of every process: not root, and the volume is writable for the group."""
GPU = "nvidia.com/gpu"
GRACE_S = 300
"""Seconds that a terminated controller has for its checkpoint."""
WORKER_GRACE_S = 30
WAIT_S = 3600
"""Seconds that a worker waits for a controller, which may itself wait for a node."""
LOST_NODE_S = 60
"""Seconds until a pod leaves an unreachable node; Kubernetes' default is 300."""
NAME = "COMPOSER_MESH_HOST"
"""Variable with the worker's name; probe commands read variables but expand no $(NAME)."""
LISTENS = f"""\
import json, os, pathlib, socket, sys
record = pathlib.Path(sys.argv[1], os.environ["{NAME}"] + ".json")
host, _, port = json.loads(record.read_text())["address"].partition("://")[2].rpartition(":")
socket.create_connection((host.strip("[]"), int(port)), 5).close()
"""
"""Probe script: connects to the worker's announced port, which differs at each start."""


def worker_template(order: Order, run: str, group: HostGroup) -> Table:
    """Return the pod template of one host."""
    container = _container(order, WORKER, _worker_command(order))
    container["env"] += [
        _from_field("POD_INDEX", "metadata.labels['apps.kubernetes.io/pod-index']"),
        {"name": NAME, "value": group.worker_name},
    ]
    container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    container |= {
        "resources": _host_resources(order, group),
        "startupProbe": _probe(order, periodSeconds=5, failureThreshold=60),
        "readinessProbe": _probe(order, periodSeconds=20, failureThreshold=3),
    }
    spec = {**_spec(order, run, WORKER_GRACE_S), "containers": [container]}
    memory = {"medium": "Memory", "sizeLimit": _memory(group)}
    spec["volumes"].append({"name": "shm", "emptyDir": memory})
    if group.host.gpus:
        spec["tolerations"].append({"key": GPU, "operator": "Exists", "effect": "NoSchedule"})
    return {"metadata": {"labels": {**labels(run, WORKER), HOST: group.object}}, "spec": spec}


def controller_template(order: Order, run: str, launch: str) -> Table:
    """Return the pod template of the controller; `launch` identifies this launch."""
    resources = {"resources": _controller_resources(order)}
    claim = _container(order, CLAIM, _claim_command(order, launch)) | resources
    container = _container(order, CONTROLLER, _controller_command(order)) | resources
    # It sends the keys in them to the actors that use them.
    secrets = order.config.cluster.kubernetes.secrets
    container["envFrom"] = [{"secretRef": {"name": secret}} for secret in secrets]
    mount = {"name": "config", "mountPath": str(CONFIG), "readOnly": True}
    container["volumeMounts"].append(mount)
    spec = {
        **_spec(order, run, GRACE_S),
        "restartPolicy": "Never",  # the Job starts another pod, or not
        "initContainers": [claim],
        "containers": [container],
    }
    spec["volumes"].append({"name": "config", "configMap": {"name": run}})
    return {"metadata": {"labels": labels(run, CONTROLLER)}, "spec": spec}


def authority_name(run: str) -> str:
    """Return the name of the Secret of the run's certificate authority."""
    return f"{run}-authority"


def _worker_command(order: Order) -> list[str]:
    # Monarch cannot attach again to a port that was used before.
    where = ("--listen", "tls://auto:0", "--name", f"$({NAME})")
    python, roster = python_there(order), roster_there(order)
    return worker_command(python, order.config, roster, AUTHORITY, *where, wait_s=WAIT_S)


def _controller_command(order: Order) -> list[str]:
    python, run = python_there(order), run_there(order)
    config = CONFIG / CONFIG_FILE
    return controller_command(python, run, "--auto-resume", config=config)


def _claim_command(order: Order, launch: str) -> list[str]:
    module = "composer_mesh.plugins.kubernetes.claim"
    run, python = str(run_there(order)), python_there(order)
    command = python_module(module, run, launch, python=python)
    return [*command, "--resume"] if order.resume else command


def _spec(order: Order, run: str, grace_s: int) -> Table:
    """Return the common part of all pods of a run."""
    kubernetes = order.config.cluster.kubernetes
    account = kubernetes.service_account
    return {
        **({"serviceAccountName": account} if account else {}),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "nodeSelector": dict(kubernetes.node_selector),
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{state}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": LOST_NODE_S,
            }
            for state in ("unreachable", "not-ready")
        ],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": kubernetes.volume}},
            {
                "name": "authority",
                "secret": {"secretName": authority_name(run), "defaultMode": 0o440},
            },
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def _container(order: Order, name: str, command: list[str]) -> Table:
    kubernetes = order.config.cluster.kubernetes
    capabilities: Table = {"drop": ["ALL"]}
    if name == WORKER and kubernetes.rdma_resource:
        capabilities["add"] = ["IPC_LOCK"]  # RDMA pins memory
    return {
        "name": name,
        "image": kubernetes.image,
        "command": command,
        "workingDir": kubernetes.mount,
        "env": [
            {"name": "HOME", "value": "/tmp"},
            {"name": "USER", "value": "composer-mesh"},  # this user is not in the image's passwd
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
        "volumeMounts": [
            {"name": "runs", "mountPath": kubernetes.mount},
            {"name": "authority", "mountPath": str(AUTHORITY), "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def _host_resources(order: Order, group: HostGroup) -> Table:
    """Return exactly the described resources, as requests and limits."""
    host, rdma = group.host, order.config.cluster.kubernetes.rdma_resource
    wanted = {
        "cpu": str(host.cores),
        "memory": _memory(group),
        **({GPU: str(host.gpus)} if host.gpus else {}),
        **({rdma: "1"} if rdma else {}),
    }
    return {"requests": wanted, "limits": dict(wanted)}


def _controller_resources(order: Order) -> Table:
    """Resources of the controller's pod; the memory limit is twice the estimate, or 2 GB."""
    local = [one for one in processes_of(order.config, None) if one.kind in WITH_CONTROLLER]
    memory = SHARED_CODE + sum(one.host_bytes for one in local)
    return {
        "requests": {"cpu": str(len(local)), "memory": f"{memory // MB}Mi"},
        "limits": {"memory": f"{max(2 * memory, 2 * GB) // MB}Mi"},
    }


def _memory(group: HostGroup) -> str:
    return f"{int(group.host.memory_gb * 1024)}Mi"


def _probe(order: Order, **times: int) -> Table:
    """Return a probe of whether the worker accepts connections; its lease covers the rest."""
    roster = str(roster_there(order))
    command = python_code(LISTENS, roster, python=python_there(order))
    return {"exec": {"command": command}, "timeoutSeconds": 10, **times}


def _from_field(name: str, path: str) -> Table:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


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


def _set(order: Order, run: str, group: HostGroup) -> Table:
    template = worker_template(order, run, group)
    spec = {
        "replicas": group.host.count,
        "serviceName": run,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": {RUN: run, HOST: group.object}},
        "template": template,
    }
    return _object("apps/v1", "StatefulSet", _meta(order, group.object, run, WORKER), spec)


def _mesh(order: Order, run: str, group: HostGroup) -> Table:
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
