"""Whether a run directory may be gone on with: the run is there, unfinished, and of this config.

Reads files only, and loads no torch. How the run then goes on is `looking_back`; whether another
process has the directory is `run_directory`'s business.
"""

from collections.abc import Sequence
from pathlib import Path

from composer_mesh.actors.checkpoint_folder import checkpoints_of
from composer_mesh.configs.changes import Change, changes
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.services.report import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    read_evaluations,
    read_metrics,
)
from composer_mesh.services.run_directory import RunDirectoryError, holds_a_run

MOST_CHANGES = 8
"""Changes that a refusal names."""


def refuse_unfit(output: Path, config: Config) -> list[Change]:
    """The changes with which the run in a directory goes on.

    Raises RunDirectoryError when the run is not there, has come to its end, or when its config was
    changed in a way that what it has learned and stored would no longer fit.
    """
    if not holds_a_run(output) or not (output / "config.toml").exists():
        raise RunDirectoryError(
            f"--resume {output} holds no run but must be the directory of one: name it with "
            "--output, or leave --resume out to start a new run"
        )
    try:
        before = load_config(output / "config.toml")
    except ConfigError as error:
        raise RunDirectoryError(f"--resume {output} cannot be read: {error}") from None
    found = changes(before, config)
    if unsafe := [change for change in found if not change.safe]:
        raise RunDirectoryError(_refusal(output, unsafe))
    done = len(read_metrics(output / METRICS_FILE))
    if done > config.run.steps:
        raise RunDirectoryError(
            f"--resume {output} has trained {done} steps but run.steps is {config.run.steps}: "
            f"raise run.steps to {done} or more"
        )
    if any(one.step >= config.run.steps for one in read_evaluations(output / EVALUATIONS_FILE)):
        raise RunDirectoryError(
            f"--resume {output} has trained all its {config.run.steps} steps: raise run.steps to "
            "go on, or leave --resume out to start a new run"
        )
    return found


def _refusal(output: Path, unsafe: Sequence[Change]) -> str:
    named = "\n  ".join(str(change) for change in unsafe[:MOST_CHANGES])
    more = f"\n  and {len(unsafe) - MOST_CHANGES} more" if len(unsafe) > MOST_CHANGES else ""
    newest = max(checkpoints_of(output), default=None)
    where = "a checkpoint" if newest is None else str(newest.folder)
    return (
        f"--resume {output} cannot go on with these changes:\n  {named}{more}\n"
        f"give {output / 'config.toml'} as the config, or begin a new run from what this one has "
        f"learned: a checkpoint is a model folder, so set policy.path to {where}"
    )
