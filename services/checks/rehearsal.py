"""Plays a dry episode of the configured task in a process of its own, which may hang or end.

    this process                         the process
    config, number of the episode  -->   plays it as `checks.task` says
    lines, or the task's error     <--   or ends: the stacks of its threads say where

A task whose code holds Python's interpreter is ended after `supervision.hang_s`. Imports neither
torch nor Monarch unless the process has ended.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import dump_toml, resolve_config
from composer_mesh.configs.schema import Config
from composer_mesh.configs.user_code import frame_at, frame_of, is_library, is_ours
from composer_mesh.mesh.environment import python_module, use_import_paths
from composer_mesh.mesh.private_folder import private_folder
from composer_mesh.mesh.programs import run
from composer_mesh.mesh.task_resources import serving
from composer_mesh.services.checks.scripted import Script, describe_scripts
from composer_mesh.services.checks.task import describe_task
from composer_mesh.tasks.errors import TaskError, UnusableTask
from composer_mesh.tasks.loading import make_task

LONGEST_S = 3600.0
"""Longest wait for a dry episode, each call of which may take `environment.call_s`."""
LONGEST_SCRIPTS_S = 7 * 24 * 3600.0
"""Longest wait for all episodes of a task, played by scripts."""
EPISODES = 3
"""A run refuses a task of which these first episodes fail; it sets a single one aside."""
ANSWER, STACKS = "answer.json", "stacks.txt"
ALIVE_S = 1.0


def rehearse(config: Config, index: int = 0, scripts: Sequence[Script] = ()) -> list[str]:
    """Play a dry episode of each task; return lines that describe them. Waits for it.

    Then all episodes are played by these scripts. Raises UnusableTask with the task's own line for
    an episode that fails, and for one that a script does not solve as it should.
    """
    with TemporaryDirectory(prefix="rehearsal-", dir=private_folder()) as name:
        folder = Path(name)
        command = python_module(__name__, name, str(index), str(config.supervision.hang_s))
        deadline_s = LONGEST_SCRIPTS_S if scripts else LONGEST_S
        done = run([*command, *scripts], text=dump_toml(config), deadline_s=deadline_s, check=False)
        sys.stderr.write(done.stdout + done.stderr)  # what the task's own code has printed
        try:
            answer: dict[str, Any] = json.loads((folder / ANSWER).read_bytes())
        except FileNotFoundError:
            raise _ended(config, done.status, (folder / STACKS).read_text()) from None
    if "refused" in answer:
        error = UnusableTask(answer["refused"])
        error.frame = answer["frame"]
        raise error
    return list(answer["lines"])


def refuse_unplayable(config: Config) -> None:
    """Raise UnusableTask where the first `EPISODES` episodes fail; print which ones of them do.

    A run whose environments are on other hosts is not checked: what its task needs is there.
    """
    if config.cluster.remote or config.placement.hosts:
        return
    errors: list[UnusableTask] = []
    for index in range(EPISODES):
        try:
            rehearse(config, index)
        except UnusableTask as error:
            errors.append(error)
        else:
            break
    if len(errors) == EPISODES:
        raise errors[0]
    for skipped in errors:
        sys.stderr.write(f"composer-mesh: an episode cannot be played: {skipped}\n")


def _ended(config: Config, status: int, stacks: str) -> UnusableTask:
    """Return the error of a process that gave no answer."""
    from composer_mesh.actors.task_process.process import parsed_stacks

    how = f"ended its process (status {status})"
    if stacks.startswith("Timeout"):
        how = f"held Python's interpreter for {config.supervision.hang_s:g} s"
    error = UnusableTask(
        f"the code of the task {how} in a dry episode: correct that line, or run it in a process "
        "of its own"
    )
    for frames in parsed_stacks(stacks).threads.values():
        for one in frames:
            if not (error.frame or is_library(one.file) or is_ours(one.file)):
                error.frame = frame_at(one.file, one.line, one.function)
    return error


def _keep_alive(limit_s: float, stacks: Path) -> None:
    """End this process with the stacks of its threads once no other thread can run."""
    with stacks.open("w") as file:
        faulthandler.enable(file)
        while True:
            faulthandler.dump_traceback_later(limit_s, exit=True, file=file)
            time.sleep(ALIVE_S)


def _answer(text: str, index: int, scripts: Sequence[Script] = ()) -> dict[str, Any]:
    """Play the episodes; return what `rehearse` reads."""
    try:
        config = resolve_config(tomllib.loads(text), [], "the config", model_later=True)
        task = make_task(config)
        with serving(config, task):
            lines = [*describe_task(config, task, index)]
            return {"lines": [*lines, *describe_scripts(config, task, scripts)]}
    except (ConfigError, TaskError, ValueError) as error:
        return {"refused": str(error), "frame": getattr(error, "frame", "")}
    except Exception as error:  # noqa: BLE001  supervision boundary: what it uses may have failed
        said = f"a dry episode could not be played: {type(error).__name__}: {error}"
        return {"refused": said, "frame": frame_of(error)}


def main(folder: str, index: str, limit_s: str, *scripts: Script) -> None:
    """Play one episode of the config that is this process's input, then all by scripts."""
    use_import_paths()
    stacks = Path(folder) / STACKS
    stacks.touch()
    watching = (float(limit_s), stacks)
    threading.Thread(target=_keep_alive, args=watching, daemon=True).start()
    answer = _answer(sys.stdin.read(), int(index), scripts)
    (Path(folder) / ANSWER).write_text(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread of the task's may still run


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
