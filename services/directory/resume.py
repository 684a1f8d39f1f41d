"""Checks that a run can be resumed: it exists, is unfinished, and has a compatible config.

Reads files only and does not import torch. `resume_loader` restores the run; `claim` locks it.
"""

import os
import shlex
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from composer_mesh.actors.checkpoints.folder import checkpoints_of
from composer_mesh.configs.changes import Change, changes
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import load_config
from composer_mesh.configs.paths import pinned_as, with_whole_paths
from composer_mesh.configs.schema import Config
from composer_mesh.services.directory.claim import RunDirectoryError, holds_a_run
from composer_mesh.services.directory.report import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    STORE_FILE,
    read_evaluations,
    read_metrics,
)

CONFIG_FILE = "config.toml"
LAUNCH_FILE = "launch.json"
THERE = "COMPOSER_MESH_REACHED"
"""Environment variable of a command forwarded to the controller: the user's path of the run."""
MOST_CHANGES = 8
"""Maximum number of changes that an error message lists."""


class RunFinished(RunDirectoryError):
    """The run has finished, so there is nothing to resume."""


def may_be_resumed(output: Path) -> bool:
    """Return whether a run was started in this directory and has written its config."""
    return holds_a_run(output) and (output / CONFIG_FILE).exists()


def refuse_unfit(output: Path, config: Config) -> list[Change]:
    """Return the config changes with which the run in a directory would be resumed.

    Raises RunDirectoryError if there is no run or no store, if the run has finished, or if its
    config was changed in a way that is incompatible with its weights and stored data.
    """
    if not may_be_resumed(output):
        raise RunDirectoryError(
            f"--resume {output} holds no run but must be the directory of one: name it with "
            "--output, or leave --resume out to start a new run"
        )
    try:
        before = load_config(output / CONFIG_FILE)
    except ConfigError as error:
        raise RunDirectoryError(f"--resume {output} cannot be read: {error}") from None
    done = len(read_metrics(output / METRICS_FILE))
    _refuse_without_store(output, done)
    found = changes(with_whole_paths(before), with_whole_paths(as_recorded(config, before)))
    if unsafe := [change for change in found if not change.safe]:
        raise RunDirectoryError(_refusal(output, unsafe))
    if done > config.run.steps:
        raise RunDirectoryError(
            f"--resume {output} has trained {done} steps but run.steps is {config.run.steps}: "
            f"raise run.steps to {done} or more"
        )
    if any(one.step >= config.run.steps for one in read_evaluations(output / EVALUATIONS_FILE)):
        raise RunFinished(
            f"--resume {output} has trained all its {config.run.steps} steps: raise run.steps to "
            "continue, or leave --resume out to start a new run"
        )
    return found


def with_chat_date(config: Config, recorded: str | None = None) -> Config:
    """Return the config with the date for its chat template: its own, else the recorded, else
    today's. The built-in model's template has none."""
    if config.policy.path is None or config.policy.chat_date is not None:
        return config
    day = recorded or date.today().isoformat()
    policy = config.policy.model_copy(update={"chat_date": day})
    return config.model_copy(update={"policy": policy})


def recorded_date(output: Path) -> str | None:
    """Return the date for chat templates that the run in a directory has recorded, if any."""
    if not may_be_resumed(output):
        return None
    return load_config(output / CONFIG_FILE, model_later=True).policy.chat_date


def pinned(config: Config, output: Path) -> Config:
    """Return the config with the commits of models and datasets that a run has recorded, if any."""
    if not may_be_resumed(output):
        return config
    return pinned_as(config, load_config(output / CONFIG_FILE, model_later=True))


def as_recorded(config: Config, before: Config) -> Config:
    """Return a config with what an earlier one recorded: the date, where this has none; commits."""
    config, day = pinned_as(config, before), before.policy.chat_date
    return config if day is None else with_chat_date(config, day)


def _refuse_without_store(output: Path, done: int) -> None:
    """Raises where steps were written, but the store is gone."""
    if done and not (output / STORE_FILE).is_file():
        raise RunDirectoryError(
            f"--resume {output} holds {done} steps but no {STORE_FILE}, without which no run can "
            "be resumed: restore it if it was removed, or start a new run from this one's weights "
            f"with policy.path set to {_checkpoint(output)}"
        )


def _checkpoint(output: Path) -> str:
    newest = max(checkpoints_of(output), default=None)
    return "a checkpoint" if newest is None else str(newest.folder)


def _refusal(output: Path, unsafe: Sequence[Change]) -> str:
    named = "\n  ".join(str(change) for change in unsafe[:MOST_CHANGES])
    more = f"\n  and {len(unsafe) - MOST_CHANGES} more" if len(unsafe) > MOST_CHANGES else ""
    return (
        f"--resume {output} cannot continue with these changes:\n  {named}{more}\n"
        f"give {output / CONFIG_FILE} as the config, or start a new run from this one's weights: "
        f"a checkpoint is a model folder, so set policy.path to {_checkpoint(output)}"
    )


def describe_resume(output: Path, steps: int) -> str:
    """Describe how far a stopped run came, and which steps a resume would train again."""
    done = len(read_metrics(output / METRICS_FILE))
    newest = max((one.step for one in checkpoints_of(output) if one.step <= done), default=0)
    reached = f"stopped after step {done} of {steps}"
    if newest == done:
        where = f"step {done}'s checkpoint" if done else "the beginning"
        return f"{reached}: a resume continues from {where}, and trains nothing again"
    where = f"step {newest}'s checkpoint" if newest else "the beginning"
    times = "1 step is" if done - newest == 1 else f"{done - newest} steps are"
    return f"{reached}: a resume continues from {where}, so {times} trained again"


def called(run: Path) -> Path:
    """Return the user's path of a run, which may be on another machine than this process."""
    return Path(os.environ.get(THERE) or run)


def resume_command(run: Path) -> str:
    """Return the command line that resumes a stopped run."""
    place, program, config = called(run), "train", "config.toml"
    if (run / LAUNCH_FILE).exists() or THERE in os.environ:
        program, config = "launch", "launch/config.toml"
    words = ["composer-mesh", program, str(place / config), "--output", str(place), "--resume"]
    return shlex.join(words)
