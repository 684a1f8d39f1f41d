"""Opens the back end of containers that a config names, or the first that works here."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

from composer_mesh.plugins.harbor.containers.boxes import BoxContainers
from composer_mesh.plugins.harbor.containers.engines import EngineContainers
from composer_mesh.plugins.harbor.containers.port import (
    ContainerError,
    Containers,
    ContainerSettings,
    ImageSource,
)
from composer_mesh.tasks.errors import UnusableTask

BACK_ENDS = ("bubblewrap", "podman", "docker")


def open_containers(backend: str = "any", **options: Any) -> Containers:
    """Return a back end that works on this machine, tried by use. Takes about a second.

    "any" is bubblewrap, else podman, else docker. `options` are those of the back end's class.
    Raises UnusableTask with the reason, for each back end that was tried.
    """
    if backend != "any" and backend not in BACK_ENDS:
        raise UnusableTask(
            f"the back end of containers is {backend!r}: use any, {', '.join(BACK_ENDS)}"
        )
    reasons = []
    for name in BACK_ENDS if backend == "any" else (backend,):
        try:
            return OPENERS[name](**options)
        except UnusableTask as error:
            reasons.append(f"{name}: {error}")
    raise UnusableTask(f"no containers can be made here: {'; '.join(reasons)}")


def open_boxes(overlays: bool = True, **options: Any) -> BoxContainers:
    """Return boxes that start here: with overlays, or where there are none, with copies."""
    opened = BoxContainers(overlays=overlays, **options)
    try:
        with ThreadPoolExecutor(1) as thread:  # the caller's thread may have a loop
            thread.submit(asyncio.run, _tried(opened)).result()
    except ContainerError as error:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, opened.close()).result()
        if opened.overlays and error.kind == "start":
            return open_boxes(overlays=False, **options)
        raise UnusableTask(
            f"{error}. Boxes need user namespaces, which containers and some systems forbid"
        ) from None
    return opened


async def _tried(containers: BoxContainers) -> None:
    """Start a container of nothing."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "etc").mkdir()
        image = ImageSource(f"rootfs:{folder}")
        container = await containers.start(ContainerSettings(image))
        try:
            await container.put({"file": b"content"}, "/folder")
            if (await container.get("/folder", most_bytes=100)) != {"file": b"content"}:
                raise ContainerError("backend", "a file of a container is not what was written")
        finally:
            await container.close()


def open_engine(name: Literal["podman", "docker"], **options: Any) -> EngineContainers:
    """Return the containers of a daemon that answers."""
    opened = EngineContainers(name, **options)

    async def check() -> None:
        trial = EngineContainers(name, **options)
        try:
            opened.version = await trial.check()
        finally:
            await trial.close()

    try:
        with ThreadPoolExecutor(1) as thread:  # connections belong to the loop that opened them
            thread.submit(asyncio.run, check()).result()
    except ContainerError as error:
        raise UnusableTask(str(error)) from None
    return opened


OPENERS: dict[str, Callable[..., Containers]] = {
    "bubblewrap": open_boxes,
    "podman": partial(open_engine, "podman"),
    "docker": partial(open_engine, "docker"),
}
