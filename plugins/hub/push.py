"""CLI command `push`: uploads a checkpoint of a run to a hub, with a model card."""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from composer_mesh.actors.checkpoints.folder import Checkpoint, checkpoints_of
from composer_mesh.actors.checkpoints.manifest import MANIFEST_FILE, damage
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.hub import HubId
from composer_mesh.planning import hub
from composer_mesh.planning.model_folder import CONFIG, folder_weights, has_weights
from composer_mesh.plugins.hub.model_card import model_card
from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.commands.parser import RUN, argument, command

CARD = "README.md"
NOT_THE_MODELS = (MANIFEST_FILE, "training.json")
FORMATS = (".safetensors", ".json", ".jinja", ".model", ".txt")
OWN_NAMES = ("_name_or_path", "_model_name_or_path")
"""Keys of config.json that may hold a path of this machine."""


@command(
    "upload a checkpoint of a run to a hub, with a model card",
    RUN,
    argument("repository", metavar="ORG/NAME", help="id of the model on the hub"),
    argument(
        "--checkpoint", type=int, metavar="N", help="step of the checkpoint (default: the newest)"
    ),
    argument("--private", action="store_true", help="make a new repository private"),
    argument("--revision", metavar="R", help="branch to upload to (default: main)"),
    argument(
        "--dry", action="store_true", help="print the model card and the files; upload nothing"
    ),
    group="tasks",
    example="push runs/quickstart ORG/NAME --dry",
)
def push(arguments: argparse.Namespace) -> int:
    """Upload the exported model of a run's checkpoint; prints where it is."""
    run: Path = arguments.run
    named = HubId.parse(arguments.repository)
    if named is None or named.part or named.revision:
        raise UsageError(
            f"{arguments.repository[:200]!r} is not an id of a repository: write ORG/NAME, and a "
            "branch as --revision"
        )
    checkpoint = _exported(run, arguments.checkpoint)
    card = model_card(run, checkpoint, named.repo)
    if arguments.dry:
        print(card)
        for file in sorted(_files(checkpoint.folder)):
            print(f"{file.name}: {file.stat().st_size:,} bytes")
        return 0
    with tempfile.TemporaryDirectory(prefix=".push-", dir=run) as scratch:
        _stage(checkpoint.folder, Path(scratch), card)
        what = f"step {checkpoint.step} of a run of Composer Mesh"
        print(hub.upload(Path(scratch), named.repo, what, arguments.revision, arguments.private))
    return 0


def _exported(run: Path, step: int | None) -> Checkpoint:
    """Return a checkpoint with a whole model; raises UsageError or ConfigError."""
    found = [one for one in checkpoints_of(run) if has_weights(one.folder)]
    if not found:
        raise UsageError(
            f"{run} has no exported checkpoint: name the directory of a run, wait for its first "
            "checkpoint, or resume it with trainer.checkpoint_export = true"
        )
    if step is None:
        chosen = found[-1]
    elif not (those := [one for one in found if one.step == step]):
        steps = ", ".join(str(one.step) for one in found)
        raise UsageError(f"--checkpoint is {step} but {run} has those of the steps {steps}")
    else:
        chosen = those[0]
    if wrong := damage(chosen.folder):
        raise ConfigError(f"{chosen.folder} is damaged ({wrong[0]}): name another checkpoint")
    folder_weights(chosen.folder)
    return chosen


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of the model, not those by which the run is resumed."""
    for file in folder.iterdir():
        if file.suffix in FORMATS and file.name not in NOT_THE_MODELS and not file.is_symlink():
            yield file


def _stage(folder: Path, scratch: Path, card: str) -> None:
    """Put what is uploaded into one folder, which a run that continues does not remove."""
    for file in _files(folder):
        if file.name == CONFIG:
            table = json.loads(file.read_text(encoding="utf-8"))
            kept = {key: value for key, value in table.items() if key not in OWN_NAMES}
            (scratch / CONFIG).write_text(json.dumps(kept, indent=2) + "\n")
            continue
        try:
            os.link(file, scratch / file.name)
        except OSError:  # a file system without links
            shutil.copy2(file, scratch / file.name)
    (scratch / CARD).write_text(card, encoding="utf-8")
