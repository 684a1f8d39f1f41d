"""A cluster as kubectl shows it: what it was told, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from composer_mesh.mesh.programs import FinishedProgram, ProgramFailed
from composer_mesh.services.launch.ports import Handle

Table = dict[str, Any]


def pod(name: str, phase: str, *, begun: bool = True, **status: Any) -> Table:
    """A pod of the controller."""
    state = {"running": {}} if begun else {"waiting": {"reason": "PodInitializing"}}
    containers = [{"name": "controller", "state": state}]
    return {
        "metadata": {"name": name},
        "status": {"phase": phase, "containerStatuses": containers, **status},
    }


def job(kind: str = "", message: str = "", suspend: bool = False) -> Table:
    """The controller's Job, which may have come to an end."""
    condition = {"type": kind, "status": "True", "message": message}
    return {
        "spec": {"suspend": suspend},
        "status": {"conditions": [condition] if kind else []},
    }


def handle() -> Handle:
    """Of a run that was launched before."""
    there, cluster = Path("/runs/quickstart"), {"context": "kind-test", "namespace": "default"}
    return Handle("kubernetes", there, "quickstart", "python", Path("/runs"), **cluster)


class FakeKubectl:
    """Plays both ways in which a launcher runs kubectl; `fails` are words of commands that fail."""

    def __init__(self, context: str = "kind-test") -> None:
        self.context = context
        self.commands: list[list[str]] = []
        self.applied: list[Table] = []
        self.secret_modes: list[int] = []
        self.job: Table | None = None
        self.pods: list[Table] = []
        self.logs: dict[str, list[str]] = {}
        self.fails: set[str] = set()

    def run(
        self, command: Sequence[str], *, check: bool = True, deadline_s: float = 60.0
    ) -> FinishedProgram:
        self.commands.append(list(command))
        if command[1:3] == ["config", "current-context"]:
            return FinishedProgram(0 if self.context else 1, f"{self.context}\n", "")
        if self.fails & set(command):
            raise ProgramFailed(command, "the server does not answer")
        return FinishedProgram(0, self._answer(list(command)), "")

    def lines(self, command: Sequence[str]) -> Iterator[str]:
        self.commands.append(list(command))
        container = command[command.index("--container") + 1]
        name = command[-1] if container == "controller" else f"{command[-1]}/{container}"
        yield from self.logs.get(name, [])

    def told(self, word: str) -> list[list[str]]:
        """The commands with a word in them, in their order."""
        return [command for command in self.commands if word in command]

    def _answer(self, command: list[str]) -> str:
        if "apply" in command:
            file = Path(command[-1])
            self.secret_modes.append(file.stat().st_mode & 0o777)
            self.applied += yaml.safe_load_all(file.read_text())
        if "get" in command and "job" in command:
            if "jsonpath={.metadata.uid}" in command:
                return "uid-7"
            return "" if self.job is None else json.dumps(self.job)
        if "get" in command:
            return json.dumps({"items": self.pods})
        if "delete" in command and "job" in command:
            self.job = None
        return ""
