"""The supervised run that a config starts from: `policy.start`, resolved to its last checkpoint.

Reads files only and does not import torch.
"""

from pathlib import Path

from composer_mesh.actors.checkpoints.folder import FOLDER, newest
from composer_mesh.actors.checkpoints.manifest import MANIFEST_FILE, crc32_of, damage
from composer_mesh.configs.changes import different
from composer_mesh.configs.errors import ConfigError, shown
from composer_mesh.configs.load import load_config
from composer_mesh.configs.paths import pinned_as, with_whole_paths
from composer_mesh.configs.schema import Config
from composer_mesh.services.directory.claim import RUNS
from composer_mesh.services.directory.resume import CONFIG_FILE, may_be_resumed

SUFFIX = "-sft"
"""Ending of the name of a supervised run."""
OF_THIS_RUN = ("start", "cache_dir", "max_context", "chat_date")
"""Keys of [policy] in which the supervised run may differ."""


class NoStart(ConfigError):
    """The supervised run of `policy.start` cannot be started from."""


def started(config: Config) -> Config:
    """Return the config with the model of its `policy.start`; raises NoStart where there is none.

    The key then names the checkpoint and the CRC-32 of its manifest, so that a resumed run cannot
    continue with another one.
    """
    start = config.policy.start
    if start == "base":
        return config
    folder, _, crc = start.partition(":")[2].partition("@")
    if crc:
        _check_kept(Path(folder), crc)
        return config
    run = Path(folder) if folder else RUNS / f"{config.run.name}{SUFFIX}"
    if not may_be_resumed(run):
        raise NoStart(
            f"policy.start is {start!r} but {run} holds no supervised run: run "
            "composer-mesh sft with this config first, or name another directory as sft:DIR"
        )
    before = load_config(run / CONFIG_FILE, model_later=True)
    _check_fits(config, before, run)
    checkpoint = _last(run, before).absolute()
    policy = config.policy.model_copy(
        update={
            "path": checkpoint,
            "sizes": None,
            "start": f"sft:{checkpoint}@{crc32_of(checkpoint / MANIFEST_FILE):08x}",
            "chat_date": config.policy.chat_date or before.policy.chat_date,
        }
    )
    return config.model_copy(update={"policy": policy})


def _last(run: Path, config: Config) -> Path:
    """Return the checkpoint of a finished run's last step."""
    found = newest(run)
    done, steps = (0 if found is None else found.step), config.run.steps
    if found is None or done < steps:
        raise NoStart(
            f"policy.start needs a finished supervised run but {run} has a checkpoint of step "
            f"{done} of {steps}: finish it by composer-mesh sft with --resume"
        )
    if wrong := damage(found.folder):
        raise NoStart(f"the checkpoint {found.folder} is damaged ({wrong[0]}): restore it")
    return found.folder


def _check_fits(config: Config, before: Config, run: Path) -> None:
    """Refuse a run that fine-tuned another model, or wrote its conversations in another way."""
    if before.sft is None or not before.run.name.endswith(SUFFIX):
        raise NoStart(
            f"policy.start names {run}, which is not a supervised run: set policy.path to its "
            f"checkpoint in {run / FOLDER}"
        )
    config = pinned_as(config, before)
    one, other = (
        with_whole_paths(each).policy.model_dump(mode="json", exclude=set(OF_THIS_RUN))
        for each in (before, config)
    )
    for key, was, now in different(one, other):
        raise NoStart(
            f"policy.{key} is {shown(now)} but was {shown(was)} in the supervised run {run}: set "
            "it back, or run composer-mesh sft again"
        )


def _check_kept(folder: Path, crc: str) -> None:
    manifest = folder / MANIFEST_FILE
    found = f"{crc32_of(manifest):08x}" if manifest.is_file() else None
    if found != crc:
        why = "is gone" if found is None else "is of another supervised run by now"
        raise NoStart(
            f"the checkpoint {folder}, from which the run started, {why}: restore it, or start a "
            "new run"
        )
