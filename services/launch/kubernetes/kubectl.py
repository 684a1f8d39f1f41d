"""The kubectl commands of a run, and the interpretation of their output.

The cluster is given by a context, which a launched run stores, so that it is found after the
current context has changed. Runs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_mesh.services.launch.kubernetes.names import CLAIM, CONTROLLER, ROLE, RUN, selector
from composer_mesh.services.launch.ports import Handle, State

Table = dict[str, Any]

MANAGER = "composer-mesh"
LEFT = "job,statefulset,service,configmap,secret,networkpolicy"
"""Kinds of objects that every run has; a MonarchMesh is deleted with the Job that owns it."""
OWNED_S = 120


@dataclass(frozen=True)
class Kubectl:
    """The kubectl commands about one run."""

    run: str
    namespace: str
    context: str = ""

    @property
    def base(self) -> tuple[str, ...]:
        """The start of every command."""
        return ("kubectl", *self._where)

    @property
    def reach(self) -> tuple[str, ...]:
        """The command prefix that runs a command in the controller's pod."""
        there = (f"job/{self.run}", "--container", CONTROLLER, "--")
        return ("kubectl", "exec", *self._where, "--stdin", *there)

    def apply(self, file: Path) -> list[str]:
        """Create or update a file's objects; fields unknown to the cluster are errors."""
        how = ["--server-side", "--field-manager", MANAGER, "--validate=strict"]
        return [*self.base, "apply", *how, "--filename", str(file)]

    def job(self) -> list[str]:
        """Get the controller's Job as JSON, empty if it is gone."""
        return [*self.base, "get", "job", self.run, "--ignore-not-found", "--output", "json"]

    def job_uid(self) -> list[str]:
        """Get the Job's unique id."""
        return [*self.base, "get", "job", self.run, "--output", "jsonpath={.metadata.uid}"]

    def own(self, kind: str, name: str, uid: str) -> list[str]:
        """Make the Job the owner of an object, so that both are deleted together."""
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": self.run, "uid": uid}
        patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
        return [*self.base, "patch", kind.lower(), name, "--type", "merge", "--patch", patch]

    def pods(self) -> list[str]:
        """Get the controller's pods as JSON, oldest first."""
        by = ["--selector", self._controller, "--sort-by", ".metadata.creationTimestamp"]
        return [*self.base, "get", "pods", *by, "--output", "json"]

    def logs(self, pod: Table, since: str) -> list[str]:
        """Follow a pod's log with timestamps; for a pod that never started, the reason."""
        later = ["--since-time", since] if since else []
        container = CONTROLLER if _begun(pod) else CLAIM
        how = ["--container", container, "--follow", "--timestamps", *later]
        return [*self.base, "logs", *how, pod["metadata"]["name"]]

    def suspend(self) -> list[str]:
        """Suspend the Job: it starts no other controller pod."""
        patch = '{"spec":{"suspend":true}}'
        return [*self.base, "patch", "job", self.run, "--type", "merge", "--patch", patch]

    def end_controller(self, grace_s: float) -> list[str]:
        """Terminate the controller, and wait until it has ended."""
        wait = [f"--grace-period={max(1, int(grace_s))}", f"--timeout={int(grace_s) + 30}s"]
        by = ["--selector", self._controller]
        return [*self.base, "delete", "pods", *by, "--ignore-not-found", "--wait", *wait]

    def delete(self) -> list[list[str]]:
        """Delete all objects of the run, and wait until they are gone."""
        wait = ["--ignore-not-found", "--wait", f"--timeout={OWNED_S}s"]
        job = [*self.base, "delete", "job", self.run, "--cascade=foreground", *wait]
        return [job, [*self.base, "delete", LEFT, "--selector", selector({RUN: self.run}), *wait]]

    def delete_mesh(self, name: str) -> list[str]:
        """Delete one MonarchMesh and its pods."""
        return [*self.base, "delete", "monarchmesh", name, "--ignore-not-found"]

    @property
    def _where(self) -> tuple[str, ...]:
        context = ("--context", self.context) if self.context else ()
        return (*context, "--namespace", self.namespace)

    @property
    def _controller(self) -> str:
        return selector({RUN: self.run, ROLE: CONTROLLER})


def of_handle(handle: Handle) -> Kubectl:
    """Return the commands about a launched run."""
    return Kubectl(handle.job, handle.namespace, handle.context)


def state_of(job: Table | None, pods: Sequence[Table]) -> tuple[State, str]:
    """Return a run's state from its Job and the controller's pods, oldest first."""
    if job is None:
        return "ended", "its objects are gone"
    for condition in job.get("status", {}).get("conditions") or ():
        if condition["status"] == "True" and condition["type"] == "Complete":
            return "ended", "completed"
        if condition["status"] == "True" and condition["type"] == "Failed":
            return "ended", f"failed: {condition.get('message', 'Kubernetes says no more')}"
    if job["spec"].get("suspend"):
        return "waiting", "suspended"
    if not pods:
        return "waiting", "no pod yet"
    name, status = pods[-1]["metadata"]["name"], pods[-1].get("status", {})
    phase = status.get("phase", "Pending")
    if phase == "Running":
        return "running", f"pod {name}"
    why = _why_pending(status)
    return "waiting", f"pod {name} is {phase}" + (f": {why}" if why else "")


def ended(pod: Table) -> bool:
    """Whether a pod has ended, so that its log is complete."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def has_log(pod: Table) -> bool:
    """Whether a pod has a log or a reason for its end."""
    return _begun(pod) or ended(pod)


def _begun(pod: Table) -> bool:
    """Whether the controller's container has started, and not only the init containers."""
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return any(one["name"] == CONTROLLER and "waiting" not in one["state"] for one in statuses)


def _why_pending(status: Table) -> str:
    """Return the first reason that Kubernetes gives: no node, no image, a missing key."""
    for container in (
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ):
        waiting = container["state"].get("waiting")
        if waiting and waiting.get("reason") not in (None, "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            return str(condition.get("message", condition.get("reason", "")))
    return ""
