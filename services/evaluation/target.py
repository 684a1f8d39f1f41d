"""What is evaluated: a config, a run, a checkpoint or a URL, as a config to evaluate it with.

The config of a run decides which task is imported, so one that another account wrote is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.actors.checkpoints.folder import FOLDER, newest
from composer_mesh.configs.hub import GGUF, HubId
from composer_mesh.configs.load import Table, read_table, resolve_config, table_of
from composer_mesh.configs.presets import is_config
from composer_mesh.configs.schema import Config
from composer_mesh.services.directory.claim import own_content
from composer_mesh.services.directory.report import STORE_FILE

CONFIG_FILE = "config.toml"
MODEL_FILE = "config.json"
OFF = ("sdpo.alpha=0", "replay.beta=0")
"""Overrides of every evaluation: it needs neither teachers nor hints."""


class EvalRefused(Exception):
    """The evaluation cannot be made as requested; the message says why."""


@dataclass(frozen=True)
class Target:
    """What is evaluated: its name and config; a `url` is queried in place of a model."""

    name: str
    config: Config
    url: str | None = None


def target_of(named: str, task: str | None, overrides: Sequence[str]) -> Target:
    """Return the target that a command names; raises EvalRefused or ConfigError."""
    if named.startswith(("http://", "https://")):
        if task is None:
            raise EvalRefused(
                f"{named} is a URL, which has no task: add --task with a config or a task, such as "
                "--task my_task.py:MyTask"
            )
        config = _resolved(table_of(task, "evaluation"), overrides, task)
        if config.rollouts.workflow is not None:
            raise EvalRefused(
                f"{named} is a URL, but rollouts.workflow is {config.rollouts.workflow!r}: a "
                "workflow needs the ids and log-probs of the run's own generators; evaluate a "
                "config, a run or a checkpoint"
            )
        return Target(named, config, named)
    path = Path(named)
    if named.endswith(".toml"):
        _refuse_task(task, "a config", named)
        return Target(named, _resolved(read_table(path), overrides, named))
    if (path / STORE_FILE).is_file():
        _refuse_task(task, "a run", named)
        return _of_run(path, overrides)
    if (path / MODEL_FILE).is_file() or (path.suffix == GGUF and path.is_file()):
        return _of_folder(path, task, overrides)
    if HubId.parse(named) is not None and task is not None:
        return _with_policy(named, table_of(task, "evaluation"), overrides)
    if is_config(named):
        _refuse_task(task, "a preset", named)
        return Target(named, _resolved(read_table(path), overrides, named))
    raise EvalRefused(
        f"{named} cannot be evaluated: name a config (.toml), a preset, a run directory, a model "
        f"folder (with {MODEL_FILE}), a URL, or with --task an id of a hub (ORG/NAME)"
    )


def _of_run(run: Path, overrides: Sequence[str]) -> Target:
    found = newest(run)
    if found is None:
        raise EvalRefused(
            f"{run} has no checkpoint yet: wait for one, or evaluate its first policy with "
            f"{run / CONFIG_FILE}"
        )
    return _with_policy(found.folder, _own_table(run), overrides)


def _of_folder(folder: Path, task: str | None, overrides: Sequence[str]) -> Target:
    if task is not None:
        return _with_policy(folder, table_of(task, "evaluation"), overrides)
    run = folder.absolute().parent.parent
    if folder.absolute().parent.name == FOLDER and (run / STORE_FILE).is_file():
        return _with_policy(folder, _own_table(run), overrides)
    raise EvalRefused(
        f"{folder} is a model folder outside of a run, which has no task: add --task with a config "
        "or a task, such as --task my_task.py:MyTask"
    )


def _with_policy(folder: Path | str, table: Table, overrides: Sequence[str]) -> Target:
    policy = table.setdefault("policy", {})
    if isinstance(policy, dict):
        policy["path"] = str(folder)
        policy.pop("sizes", None)
        policy.pop("start", None)
    return Target(str(folder), _resolved(table, overrides, str(folder)))


def _own_table(run: Path) -> Table:
    """Return the config that a run of this account wrote."""
    path = run / CONFIG_FILE
    if own_content(path) is None:
        raise EvalRefused(
            f"{path} was not written by a run of this account, and it names code that would be "
            f"imported: read it, then name it: composer-mesh eval CHECKPOINT --task {path}"
        )
    return read_table(path)


def _resolved(table: Table, overrides: Sequence[str], source: str) -> Config:
    return resolve_config(table, [*OFF, *overrides], source)


def _refuse_task(task: str | None, kind: str, named: str) -> None:
    if task is not None:
        raise EvalRefused(f"--task is {task!r} but {named} is {kind}, which has its own: remove it")
