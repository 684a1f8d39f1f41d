"""Builds images from Dockerfiles in boxes, each once: the result is one more layer of a store."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import posixpath
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from composer_mesh.plugins.harbor.containers.box_container import BoxContainer, BoxOwner
from composer_mesh.plugins.harbor.containers.port import (
    ContainerError,
    ContainerSettings,
    ImageSource,
)
from composer_mesh.plugins.harbor.images.dockerfile import (
    NO_EFFECT,
    Instruction,
    assignments,
    context_files,
    exec_form,
    instructions,
    sources,
    started_words,
    substituted,
)
from composer_mesh.plugins.harbor.images.manifest import ImageConfig
from composer_mesh.plugins.harbor.images.store import UnpackedImage, errors_named
from composer_mesh.plugins.harbor.images.trees import remove_tree

MOST_SAID = 2000
PROCESSES = 4096


@dataclass(frozen=True)
class BuiltImage:
    """An image that was built: its folders, the lowest first."""

    lowers: tuple[Path, ...]
    config: ImageConfig
    identity: str


async def built(containers: BoxOwner, image: ImageSource, build_s: float) -> BuiltImage:
    """Return the image of a Dockerfile, built if this store has none of the same.

    Commands have the network of this machine. Raises ContainerError with the kind "build".
    """
    until, folder = time.monotonic() + build_s, image.build
    assert folder is not None, image
    steps = list(instructions(folder, image.dockerfile))
    arguments: dict[str, str] = {}
    while steps and steps[0].name == "ARG":
        _argument(steps.pop(0), arguments, {}, image.arguments)
    if not steps or steps[0].name != "FROM" or any(one.name == "FROM" for one in steps[1:]):
        raise ContainerError("build", f"{folder / 'Dockerfile'}: one FROM is needed, and the first")
    named, *more = steps[0].words()
    if named.startswith("--") or (more and more[0].upper() != "AS"):
        raise steps[0].error("write FROM IMAGE")
    reference = substituted(named, arguments)
    base = await asyncio.to_thread(containers.store.unpacked, reference, until)
    with errors_named(f"the Dockerfile in {folder}"):
        key = await asyncio.to_thread(_key, containers, base, image, folder)
        place = containers.store.folder / "roots" / key
        if not place.exists():
            with contextlib.ExitStack() as held:
                await asyncio.to_thread(held.enter_context, containers.store.locked(key, until))
                if not place.exists():
                    build = _Build(containers, base, folder, image.arguments, until)
                    await build.run(steps[1:], place)
        config = ImageConfig(**json.loads((place / "image.json").read_text(encoding="utf-8")))
    own = place / "root"
    lowers = (base.root, own) if containers.overlays else (own,)
    return BuiltImage(lowers, config, f"sha256:{key}")


def _key(containers: BoxOwner, base: UnpackedImage, image: ImageSource, folder: Path) -> str:
    """Return what stands for a build: its base, its Dockerfile and all files next to it."""
    own = [image.dockerfile, sorted(image.arguments.items())]
    found = hashlib.sha256(
        json.dumps([base.identity, containers.first_id, containers.overlays, own]).encode()
    )
    for one in sorted(folder.rglob("*")):
        if one.is_file():
            content = hashlib.sha256(one.read_bytes()).hexdigest()
            name = one.relative_to(folder).as_posix()
            found.update(json.dumps([name, bool(one.stat().st_mode & 0o100), content]).encode())
    return found.hexdigest()


class _Build:
    """One build: a container on the base, and what the instructions have set so far."""

    def __init__(
        self,
        containers: BoxOwner,
        base: UnpackedImage,
        folder: Path,
        given: Mapping[str, str],
        until: float,
    ) -> None:
        self._containers, self._base, self._folder = containers, base, folder
        self._until, self._config, self._given = until, base.config, given
        self._arguments: dict[str, str] = {}

    async def run(self, steps: Sequence[Instruction], place: Path) -> None:
        """Do all steps in a container, and keep its files as `place`."""
        settings = ContainerSettings(
            ImageSource("rootfs:/"), processes=PROCESSES, network="host", user="root"
        )
        base = (self._base.root,)
        container = await self._containers.started(settings, base, self._base.config, None)
        try:
            for step in steps:
                await self._do(container, step)
            await container.stop_processes()
            await self._keep(container, place)
        finally:
            await container.close()

    async def _keep(self, container: BoxContainer, place: Path) -> None:
        draft = place.with_name(f".partial-{place.name}-{secrets.token_hex(8)}")
        try:
            draft.mkdir()
            draft.chmod(0o755)  # whatever the umask is: the ids of containers pass through it
            await self._containers.copy(container.own / "upper", draft / "root")
            (draft / "image.json").write_text(json.dumps(asdict(self._config)), encoding="utf-8")
            draft.rename(place)
        except BaseException:
            await asyncio.to_thread(remove_tree, draft)
            raise

    @property
    def _variables(self) -> Mapping[str, str]:
        return {**self._arguments, **self._config.environment}

    async def _do(self, container: BoxContainer, step: Instruction) -> None:
        if step.name == "RUN":
            await self._run(container, step)
        elif step.name == "COPY":
            await self._copy(container, step)
        elif step.name == "WORKDIR":
            workdir = self._absolute(substituted(step.text, self._variables))
            await container.make_folder(workdir)
            self._config = replace(self._config, workdir=workdir)
        elif step.name == "ENV":
            more = assignments(step, self._variables)
            self._config = replace(self._config, environment={**self._config.environment, **more})
        elif step.name == "USER":
            self._config = replace(self._config, user=substituted(step.text, self._variables))
        elif step.name == "ARG":
            _argument(step, self._arguments, self._variables, self._given)
        elif step.name == "CMD":
            self._config = replace(self._config, command=started_words(step.text))
        elif step.name == "ENTRYPOINT":
            config = self._config
            own = () if config.command is self._base.config.command else config.command
            words = started_words(step.text)
            self._config = replace(config, entrypoint=words, command=own)
        else:
            assert step.name in NO_EFFECT

    async def _run(self, container: BoxContainer, step: Instruction) -> None:
        argv = exec_form(step.text) or ["/bin/sh", "-c", step.text]
        left = max(1.0, self._until - time.monotonic())
        done = await container.run(
            argv,
            timeout_s=left,
            user=self._config.user or "root",
            environment={**self._arguments, **self._config.environment},
            workdir=self._config.workdir,
        )
        if done.exit_code != 0:
            said = (done.output + done.errors)[-MOST_SAID:].decode("utf-8", "replace").strip()
            end = f"exit code {done.exit_code}" if done.exit_code is not None else done.ended
            raise step.error(f"{step.text[:200]}: {end}: {said}")

    async def _copy(self, container: BoxContainer, step: Instruction) -> None:
        *patterns, wanted = [substituted(one, self._variables) for one in step.words()]
        if not patterns:
            raise step.error("write COPY SOURCE ... TARGET")
        found = sources(step, self._folder, patterns)
        target = self._absolute(wanted)
        real, is_folder = await container.look(target)
        several = len(found) > 1 or wanted.endswith("/") or is_folder
        if len(found) > 1 and not (wanted.endswith("/") or is_folder):
            raise step.error(f"{wanted!r} must end with / for several sources")
        for source in found:
            files = await asyncio.to_thread(context_files, step, source)
            folder = real
            if source.is_file() and not several:
                folder, name = posixpath.split(real)
                files = {name: source}
            await container.put(
                {path: await asyncio.to_thread(one.read_bytes) for path, one in files.items()},
                folder,
                executable=[path for path, one in files.items() if one.stat().st_mode & 0o100],
            )

    def _absolute(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._config.workdir, path))


def _argument(
    step: Instruction,
    arguments: dict[str, str],
    variables: Mapping[str, str],
    given: Mapping[str, str],
) -> None:
    """Give an argument the value that was given for it, else its default."""
    for word in step.words():
        name, sign, value = word.partition("=")
        if name in given:
            arguments[name] = given[name]
        elif sign:
            arguments[name] = substituted(value, {**arguments, **variables})
