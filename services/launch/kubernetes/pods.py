"""The pods of a run: one per host, and the controller's.

They run without root, privilege escalation or cluster tokens, and API keys come from Secrets only,
which only the controller's pod has. `manifests` sets restarts and owners.
"""

from __future__ import annotations

from typing import Any

from composer_mesh.mesh.environment import python_code, python_module
from composer_mesh.planning.host_capacity import processes_of
from composer_mesh.planning.memory import GB, MB, SHARED_CODE
from composer_mesh.planning.placement_solver import WITH_CONTROLLER
from composer_mesh.services.launch.kubernetes.names import (
    AUTHORITY,
    CLAIM,
    CONFIG,
    CONFIG_FILE,
    CONTROLLER,
    HOST,
    WORKER,
    Group,
    labels,
    python_there,
    roster_there,
    run_there,
)
from composer_mesh.services.launch.orders import controller_command, worker_command
from composer_mesh.services.launch.ports import Order

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


def worker_template(order: Order, run: str, group: Group) -> Table:
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
    module = "composer_mesh.services.launch.kubernetes.claim"
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


def _host_resources(order: Order, group: Group) -> Table:
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
    beside = [one for one in processes_of(order.config, None) if one.kind in WITH_CONTROLLER]
    memory = SHARED_CODE + sum(one.host_bytes for one in beside)
    return {
        "requests": {"cpu": str(len(beside)), "memory": f"{memory // MB}Mi"},
        "limits": {"memory": f"{max(2 * memory, 2 * GB) // MB}Mi"},
    }


def _memory(group: Group) -> str:
    return f"{int(group.host.memory_gb * 1024)}Mi"


def _probe(order: Order, **times: int) -> Table:
    """Return a probe of whether the worker accepts connections; its lease covers the rest."""
    roster = str(roster_there(order))
    command = python_code(LISTENS, roster, python=python_there(order))
    return {"exec": {"command": command}, "timeoutSeconds": 10, **times}


def _from_field(name: str, path: str) -> Table:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
