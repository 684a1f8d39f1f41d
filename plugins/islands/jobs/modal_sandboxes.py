"""Sandboxes of Modal, by its SDK (extra `modal`).

MODAL_TOKEN_ID with MODAL_TOKEN_SECRET, or a login, say who pays. A Volume keeps run directories.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from math import ceil
from typing import Any

from composer_mesh.plugins.islands.jobs.jobs import (
    MOUNTED_RUNS,
    IslandJob,
    JobOptions,
    refusals,
)
from composer_mesh.plugins.islands.jobs.ports import State
from composer_mesh.services.launch.ports import LaunchFailed

APP = "composer-mesh-islands"
LONGEST_S = 86400
"""Longest time of a sandbox at Modal, and what it gets here by default: theirs is 5 minutes."""
SIZES: Mapping[str, type[int] | type[float]] = {"cpu": float, "memory": int}
"""Words of the hardware in addition to the GPU: cores, and MiB."""
LOG_ENTRIES = 100


class ModalSandboxes:
    """The port on Modal's sandboxes; raises `LaunchFailed` where its SDK is not installed."""

    name = "modal"

    def __init__(self, environment: str | None = None, client: Any = None) -> None:
        if find_spec("modal") is None:
            raise LaunchFailed("modal's SDK is not installed: pip install 'composer-mesh[modal]'")
        self._environment, self._client = environment, client

    def check(self, options: JobOptions) -> None:
        resources_of(options.hardware)
        if options.timeout_s is not None and options.timeout_s > LONGEST_S:
            raise LaunchFailed(
                f"--timeout-h is {options.timeout_s / 3600:g} but a sandbox lives "
                f"{LONGEST_S // 3600} hours at most: lower it, and continue with --resume"
            )

    def connect(self) -> None:
        """Check the token; raises `LaunchFailed` without a valid one."""
        from modal import Client

        with _refusals("accept a token (set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or log in)"):
            self._client = self._client or Client.from_env()
            self._client.hello()

    def describe(self, job: IslandJob) -> Mapping[str, object]:
        options = job.options
        volume = {"volumes": {MOUNTED_RUNS: options.volume}} if options.volume else {}
        return {
            "call": "modal.Sandbox.create",
            "args": list(job.command),
            "app": APP,
            "image": options.image,
            **self._plain(job),
            **volume,
            "secrets": sorted(job.secrets),
        }

    def submit(self, job: IslandJob) -> str:
        from modal import App, Image, Sandbox, Secret, Volume

        options = job.options
        with _refusals(f"start {job.name}"):
            where, client = self._environment, self._client
            app = App.lookup(APP, create_if_missing=True, client=client, environment_name=where)
            volumes: dict[str | os.PathLike[str], Any] = {}
            if options.volume is not None:
                volumes[MOUNTED_RUNS] = Volume.from_name(
                    options.volume, create_if_missing=True, client=client, environment_name=where
                )
            sandbox = Sandbox.create(
                *job.command,
                app=app,
                image=Image.from_registry(options.image),
                secrets=[Secret.from_dict(dict(job.secrets))] if job.secrets else [],
                volumes=volumes,
                client=client,
                **self._plain(job),
            )
            return str(sandbox.object_id)

    def state(self, job: str) -> tuple[State, str]:
        from modal.exception import SandboxTerminatedError, SandboxTimeoutError

        with _refusals(f"tell of sandbox {job}"):
            sandbox = self._sandbox(job)
            status = sandbox.poll()
            if status is None:
                return "running", ""
            try:
                sandbox.wait()  # the only call that says why a sandbox has ended
            except SandboxTerminatedError:
                return "stopped", ""
            except SandboxTimeoutError:
                return "failed", "it took longer than its --timeout-h"
        return ("failed", f"its command has ended with {status}") if status else ("finished", "")

    def last_lines(self, job: str, count: int) -> list[str]:
        with _refusals(f"send the output of sandbox {job}"):
            entries = list(self._sandbox(job).logs.tail(LOG_ENTRIES))
        return "".join(entry.message for entry in entries).splitlines()[-count:]

    def cancel(self, job: str) -> None:
        with _refusals(f"end sandbox {job}"):
            self._sandbox(job).terminate()

    def _sandbox(self, job: str) -> Any:
        from modal import Sandbox

        return Sandbox.from_id(job, client=self._client)

    def _plain(self, job: IslandJob) -> dict[str, Any]:
        """Return the arguments of a sandbox that are plain values."""
        options = job.options
        return {
            "tags": {"name": job.name},
            "env": dict(job.environment),
            "timeout": LONGEST_S if options.timeout_s is None else ceil(options.timeout_s),
            **resources_of(options.hardware),
        }


def resources_of(hardware: str | None) -> dict[str, str | float | int]:
    """Return what a sandbox gets of hardware such as "H100:2,cpu=16,memory=65536" (MiB).

    Raises `LaunchFailed` for other words.
    """
    found: dict[str, str | float | int] = {}
    for word in [] if hardware is None else hardware.split(","):
        name, is_size, value = word.partition("=")
        name = name if is_size else "gpu"
        known = word if name == "gpu" and not is_size else _size(name, value)
        if not known or name in found:
            raise LaunchFailed(
                f"--hardware is {hardware!r}, whose {word!r} is not a GPU, cpu=CORES or "
                "memory=MIB, each once: write for example H100:2,cpu=16,memory=65536"
            )
        found[name] = known
    return found


def _size(name: str, value: str) -> float | int | None:
    """Return a number above 0; None for another word."""
    try:
        number = SIZES[name](value)
    except (KeyError, ValueError):
        return None
    return number if 0 < number < float("inf") else None


def _refusals(what: str) -> AbstractContextManager[None]:
    from grpclib import GRPCError
    from grpclib.exceptions import StreamTerminatedError
    from modal.exception import Error

    return refusals("modal", what, Error, GRPCError, StreamTerminatedError, OSError)
