"""Hands the configured sandbox to tasks that run code of agents."""

from __future__ import annotations

import asyncio
import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from composer_mesh.configs import plugins
from composer_mesh.configs.schema import Config
from composer_mesh.tasks.errors import TaskError, UnusableTask, code_error
from composer_mesh.tasks.sandbox import Sandbox
from composer_mesh.tasks.task import Task

NAME_ONE = (
    "name a function that returns a sandbox as my_package.my_module:my_function, in a folder that "
    "run.import_paths names, or one of"
)


def attach_sandbox(config: Config, task: Task) -> Sandbox | None:
    """Open the configured sandbox for those parts of a task that need one; None if none does.

    May take a while, because a sandbox is probed before it is used. Raises UnusableTask where it
    cannot be imported or made, where a task cannot be played in it, and whatever it says of a
    machine on which it does not hold.
    """
    parts = [part for part in task.parts if part.needs_sandbox and part.sandbox is None]
    if not parts:
        return None
    sandbox = open_configured(config)
    with ThreadPoolExecutor(1) as thread:  # the caller's thread may have a loop
        try:
            for part in parts:
                thread.submit(asyncio.run, part.check_sandbox(sandbox)).result()
        except BaseException:
            thread.submit(asyncio.run, sandbox.close()).result()
            raise
    for part in parts:
        part.sandbox = sandbox
    return sandbox


def open_configured(config: Config) -> Sandbox:
    """Return the sandbox that a config names."""
    chosen = config.environment.sandbox
    opener = _imported(plugins.find("sandboxes", chosen.kind) or chosen.kind)
    try:
        sandbox: Sandbox = opener(**chosen.options)
    except TaskError:
        raise
    except TypeError as error:
        raise UnusableTask(
            f"environment.sandbox.options are {dict(chosen.options)}, which {chosen.kind!r} does "
            f"not take ({error}): change them"
        ) from error
    except (StopIteration, SystemExit, asyncio.CancelledError, BaseExceptionGroup) as error:
        raise code_error(f"opening the sandbox {chosen.kind!r}", error) from error
    return sandbox


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnusableTask(
            f"environment.sandbox.kind is {path!r}, which cannot be imported ({error}): {NAME_ONE} "
            f"{plugins.known('sandboxes')}"
        ) from None
