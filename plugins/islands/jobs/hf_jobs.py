"""Jobs of Hugging Face, by `huggingface_hub`.

HF_TOKEN or a login says who pays. A bucket as the volume keeps run directories.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from composer_mesh.plugins.islands.jobs.jobs import (
    MOUNTED_RUNS,
    IslandJob,
    JobOptions,
    refusals,
)
from composer_mesh.plugins.islands.jobs.ports import State
from composer_mesh.services.launch.ports import LaunchFailed

STATES: Mapping[str, State] = {
    "SCHEDULING": "waiting",
    "RUNNING": "running",
    "COMPLETED": "finished",
    "CANCELED": "stopped",
    "ERROR": "failed",
    "DELETED": "failed",
}


class HfJobs:
    """The port on Hugging Face's jobs; needs a token, and asks whose it is."""

    name = "hf-jobs"

    def __init__(self, namespace: str | None = None, api: Any = None) -> None:
        self._api, self._namespace = api, namespace

    def check(self, options: JobOptions) -> None:
        if options.volume is not None and options.volume.strip("/").count("/") != 1:
            raise LaunchFailed(
                f"--volume is {options.volume!r} but must be USER/BUCKET, which is a bucket there"
            )

    def connect(self) -> None:
        """Check the token; raises `LaunchFailed` without a valid one."""
        from huggingface_hub import HfApi

        self._api = self._api or HfApi()
        with _refusals("tell whose token this is (set HF_TOKEN, or log in by `hf auth login`)"):
            name = self._api.whoami()["name"]
        self._namespace = self._namespace or name

    def describe(self, job: IslandJob) -> Mapping[str, object]:
        call = self._call(job)
        volumes = [one.to_uri() for one in call.pop("volumes", [])]
        return {
            "call": "HfApi.run_job",
            **call,
            "secrets": sorted(job.secrets),
            **({"volumes": volumes} if volumes else {}),
        }

    def submit(self, job: IslandJob) -> str:
        with _refusals(f"start {job.name}"):
            secrets = {"secrets": dict(job.secrets)} if job.secrets else {}
            started = self._api.run_job(
                **self._call(job), **secrets, namespace=self._namespace, token=None
            )
            return str(started.id)

    def state(self, job: str) -> tuple[State, str]:
        with _refusals(f"tell of job {job}"):
            status = self._api.inspect_job(job_id=job, namespace=self._namespace).status
        stage = str(getattr(status.stage, "value", status.stage))
        if stage not in STATES:
            raise LaunchFailed(f"hf-jobs says that job {job} is {stage!r}, which is not known here")
        return STATES[stage], status.message or ""

    def last_lines(self, job: str, count: int) -> list[str]:
        with _refusals(f"send the output of job {job}"):
            return list(
                self._api.fetch_job_logs(job_id=job, namespace=self._namespace, tail=count)
            )[-count:]

    def cancel(self, job: str) -> None:
        with _refusals(f"cancel job {job}"):
            self._api.cancel_job(job_id=job, namespace=self._namespace)

    def _call(self, job: IslandJob) -> dict[str, Any]:
        from huggingface_hub import Volume

        options = job.options
        call: dict[str, Any] = {
            "image": options.image,
            "command": list(job.command),
            "env": dict(job.environment),
            "name": job.name,
        }
        if options.hardware is not None:
            call["flavor"] = options.hardware
        if options.timeout_s is not None:
            call["timeout"] = int(options.timeout_s)
        if options.volume is not None:
            volume = Volume(type="bucket", source=options.volume, mount_path=MOUNTED_RUNS)
            call["volumes"] = [volume]
        return call


def _refusals(what: str) -> AbstractContextManager[None]:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    errors = (HfHubHTTPError, LocalTokenNotFoundError, httpx.HTTPError)
    return refusals(HfJobs.name, what, *errors)
