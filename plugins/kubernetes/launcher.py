"""Launches runs on Kubernetes with kubectl: submits, follows, inspects and ends them.

The rendered objects are in `launch/` of the local output directory; the run's own directory is on
the volume that the pods share. The controller's Job owns every other object: all are deleted with
it, by `stop` or some minutes after the run has ended.

The kubectl commands of a run, and the interpretation of their output.

The cluster is given by a context, which a launched run stores, so that it is found after the
current context has changed. Runs nothing.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from composer_mesh.mesh import programs
from composer_mesh.mesh.hosts.certificates import new_authority
from composer_mesh.plugins.kubernetes.manifests import as_yaml, manifests, secret
from composer_mesh.plugins.kubernetes.names import (
    CLAIM,
    CONTROLLER,
    ROLE,
    RUN,
    mount,
    python_there,
    run_name,
    run_there,
    selector,
)
from composer_mesh.services.launch.ports import (
    Handle,
    LaunchFailed,
    LaunchRefused,
    Order,
    Plan,
    State,
)
from composer_mesh.services.launch.workers import FOLDER

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


Run = Callable[..., programs.FinishedProgram]
Lines = Callable[[Sequence[str]], Iterator[str]]

OBJECTS, AUTHORITY = "kubernetes.yaml", "authority.yaml"
UID = "UID_OF_THE_JOB"
"""Placeholder for the Job's unique id, which is known once it exists."""
LOOK_S = 2.0
SLACK_S = 60.0
MISSES = 30
"""Successive failed requests to the cluster after which following a log is given up."""


@dataclass(frozen=True)
class KubernetesLauncher:
    """Launches a run on a cluster that kubectl can access."""

    run: Run = programs.run
    lines: Lines = programs.lines
    pause: Callable[[], None] = lambda: time.sleep(LOOK_S)

    def plan(self, order: Order) -> Plan:
        authority = {name: data.decode() for name, data in new_authority().items()}
        objects = manifests(order, launch=secrets.token_hex(8))
        folder = order.output / FOLDER
        files = {
            folder / OBJECTS: as_yaml(objects),
            folder / AUTHORITY: as_yaml([secret(order, authority)]),
        }
        return Plan(files, _commands(order, objects), frozenset({folder / AUTHORITY}))

    def submit(self, order: Order, plan: Plan) -> Handle:
        """Apply the plan's files, which must be written; the secret one is removed afterwards."""
        try:
            kubectl = Kubectl(run_name(order.output), _namespace(order), self._context())
            self._delete_earlier(kubectl)
            self._apply(kubectl, order, plan)
        except programs.ProgramFailed as failed:
            raise LaunchFailed(str(failed)) from None
        finally:
            (order.output / FOLDER / AUTHORITY).unlink(missing_ok=True)
        return Handle(
            "kubernetes",
            run=Path(run_there(order)),
            job=kubectl.run,
            python=python_there(order),
            folder=Path(mount(order)),
            context=kubectl.context,
            namespace=kubectl.namespace,
        )

    def reach(self, handle: Handle) -> tuple[str, ...]:
        return of_handle(handle).reach

    def state(self, handle: Handle) -> tuple[State, str]:
        kubectl = of_handle(handle)
        try:
            return state_of(self._job(kubectl), self._pods(kubectl))
        except programs.ProgramFailed as failed:
            return "unknown", str(failed)

    def follow(self, handle: Handle) -> Iterator[str]:
        """Yield the logs of all controller pods in order; an interrupted log is resumed."""
        kubectl, read, since = of_handle(handle), set[str](), ""
        while True:
            job, pods = self._look(kubectl)
            unread = [pod for pod in pods if pod["metadata"]["name"] not in read and has_log(pod)]
            for pod in unread[:1]:
                for line in self._since(kubectl, pod, since):
                    since, _, text = line.partition(" ")
                    yield text
            if unread and ended(unread[0]):
                read.add(unread[0]["metadata"]["name"])
                since = ""
            elif state_of(job, pods)[0] == "ended":
                return
            else:
                self.pause()

    def stop(self, handle: Handle, grace_s: float) -> None:
        """End the controller, whose checkpoint needs the workers, then delete all objects."""
        kubectl = of_handle(handle)
        try:
            if self._job(kubectl) is not None:
                self.run(kubectl.suspend())
                self.run(kubectl.end_controller(grace_s), deadline_s=grace_s + SLACK_S)
            self._delete(kubectl)
        except programs.ProgramFailed as failed:
            raise LaunchFailed(str(failed)) from None

    def stopping(self, handle: Handle) -> None:
        """Do nothing: a stopped run is not restarted anyway."""

    def stopped(self, handle: Handle) -> None:
        """Delete the objects now, as the workers would occupy nodes until the Job is removed."""
        self.stop(handle, 0.0)

    def _context(self) -> str:
        """Return the current context; empty in a pod, which needs none."""
        return self.run(["kubectl", "config", "current-context"], check=False).stdout.strip()

    def _delete_earlier(self, kubectl: Kubectl) -> None:
        """Delete the objects of an earlier run of this name; refuse while it is running."""
        job = self._job(kubectl)
        state, word = state_of(job, self._pods(kubectl))
        if state != "ended":
            raise LaunchRefused(
                f"job {kubectl.run} in namespace {kubectl.namespace} is there already ({state}, "
                f"{word}): stop it with composer-mesh stop, or name another directory with --output"
            )
        self._delete(kubectl)

    def _apply(self, kubectl: Kubectl, order: Order, plan: Plan) -> None:
        folder = order.output / FOLDER
        objects = list(yaml.safe_load_all(plan.files[folder / OBJECTS]))
        try:
            for file in (folder / AUTHORITY, folder / OBJECTS):
                self.run(kubectl.apply(file))
            uid = self.run(kubectl.job_uid()).stdout.strip()
            for kind, name in _owned(order, objects):
                self.run(kubectl.own(kind, name, uid))
        except programs.ProgramFailed as failed:
            self._undo(kubectl, objects, failed)
            raise

    def _undo(
        self, kubectl: Kubectl, objects: Sequence[Table], failed: programs.ProgramFailed
    ) -> None:
        """Delete the objects of a failed launch, including a MonarchMesh that has no owner yet."""
        meshes = [one["metadata"]["name"] for one in objects if one["kind"] == "MonarchMesh"]
        try:
            self._delete(kubectl)
            for name in meshes:
                self.run(kubectl.delete_mesh(name))
        except programs.ProgramFailed as also:
            raise LaunchFailed(f"{failed}; what had been made may be there still: {also}") from None

    def _delete(self, kubectl: Kubectl) -> None:
        for command in kubectl.delete():
            self.run(command, deadline_s=OWNED_S + SLACK_S)

    def _since(self, kubectl: Kubectl, pod: Table, since: str) -> Iterator[str]:
        """Yield the lines after a timestamp, as kubectl repeats those of the same second."""
        for line in self.lines(kubectl.logs(pod, since)):
            if line.partition(" ")[0] > since:
                yield line

    def _look(self, kubectl: Kubectl) -> tuple[Table | None, list[Table]]:
        """Return the Job and its pods; retries while the cluster does not answer."""
        for _ in range(MISSES):
            try:
                return self._job(kubectl), self._pods(kubectl)
            except programs.ProgramFailed as failed:
                why = str(failed)
                self.pause()
        raise LaunchFailed(why)

    def _job(self, kubectl: Kubectl) -> Table | None:
        said = self.run(kubectl.job()).stdout
        return json.loads(said) if said.strip() else None

    def _pods(self, kubectl: Kubectl) -> list[Table]:
        items: list[Table] = json.loads(self.run(kubectl.pods()).stdout)["items"]
        return items


def _commands(order: Order, objects: Sequence[Table]) -> list[list[str]]:
    """Return the commands of a submission; the current context is added to each."""
    kubectl, folder = Kubectl(run_name(order.output), _namespace(order)), order.output / FOLDER
    return [
        kubectl.apply(folder / AUTHORITY),
        kubectl.apply(folder / OBJECTS),
        kubectl.job_uid(),
        *(kubectl.own(kind, name, UID) for kind, name in _owned(order, objects)),
    ]


def _owned(order: Order, objects: Sequence[Table]) -> list[tuple[str, str]]:
    """Return kind and name of all objects but the Job, which owns them."""
    every = [*objects, secret(order, {})]
    return [(one["kind"], one["metadata"]["name"]) for one in every if one["kind"] != "Job"]


def _namespace(order: Order) -> str:
    return order.config.cluster.kubernetes.namespace
