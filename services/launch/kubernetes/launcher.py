"""Launches runs on Kubernetes with kubectl: submits, follows, inspects and ends them.

The rendered objects are in `launch/` of the local output directory; the run's own directory is on
the volume that the pods share. The controller's Job owns every other object: all are deleted with
it, by `stop` or some minutes after the run has ended.
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
from composer_mesh.services.launch.kubernetes import places
from composer_mesh.services.launch.kubernetes.kubectl import (
    OWNED_S,
    Kubectl,
    ended,
    has_log,
    of_handle,
    state_of,
)
from composer_mesh.services.launch.kubernetes.manifests import as_yaml, manifests, secret
from composer_mesh.services.launch.kubernetes.names import run_name
from composer_mesh.services.launch.orders import FOLDER
from composer_mesh.services.launch.ports import (
    Handle,
    LaunchFailed,
    LaunchRefused,
    Order,
    Plan,
    State,
)

Table = dict[str, Any]
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
            run=Path(places.run_there(order)),
            job=kubectl.run,
            python=places.python_there(order),
            folder=Path(places.mount(order)),
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
