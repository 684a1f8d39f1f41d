"""Finds the models and datasets that a config names by an id of a hub, and downloads the models.

`with_models` pins each id at its commit and reads a model's small files; `download_models` gets the
weights, when all else was checked. From then on a config has folders, wherever they came from.

GGUF files as models: each is converted once, into a folder of the cache by its content.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from composer_mesh.configs.data import DataConfig, MixedTask
from composer_mesh.configs.errors import ConfigError, one_line, shown
from composer_mesh.configs.hub import GGUF, HubId, ModelSource
from composer_mesh.configs.paths import ids_in, models_in, with_sections
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.environment import python_module
from composer_mesh.mesh.programs import ProgramFailed, run
from composer_mesh.planning import hub
from composer_mesh.planning.model_folder import has_weights
from composer_mesh.tasks.loading import task_class
from composer_mesh.tasks.rows import COLUMN, read_rows


def with_models(config: Config) -> Config:
    """Return the config with its ids at their commits, and the folders of its models.

    Of models on a hub only the small files are downloaded; GGUF files are converted. Raises
    ConfigError.
    """
    cache = config.policy.cache_dir
    found: dict[str, Any] = {}
    for key, model in models_in(config).items():
        if isinstance(model.path, Path) and model.path.suffix == GGUF and model.path.is_file():
            found[key] = model.at(model.path, converted(model.path, cache, key))
    for key, section, named in ids_in(config):
        if isinstance(section, ModelSource):
            pinned, folder = _found(named, cache, key)
            found[key] = section.at(str(pinned), folder)
        else:
            pinned = named.at(hub.commit_of(named, key, "dataset"))
            found[key] = section.model_copy(update={"path": str(pinned)})
    return with_sections(config, found)


def _found(named: HubId, cache: Path, key: str) -> tuple[HubId, Path]:
    """Return a model's id at its commit, and the folder where it is or will be."""
    if not named.part:
        folder = hub.small_files(named, key)
        pinned = named.at(folder.name)
        hub.refuse_other_formats(pinned, key)
        return pinned, folder
    pinned = named.at(hub.commit_of(named, key, "model"))
    digest = hub.digest_of(pinned, key)
    if digest is None:  # no hub answers: it is in the cache, or refused
        return pinned, converted(hub.whole_model(pinned, key) / named.part, cache, key)
    return pinned, folder_by(digest, cache)


def download_models(config: Config) -> bool:
    """Download the weights of the config's models; return whether some were not here before.

    Raises ConfigError.
    """
    new = False
    for key, section, named in ids_in(config):
        if isinstance(section, ModelSource) and not has_weights(section.folder_of(named.repo)):
            folder = hub.whole_model(named, key)
            if named.part:
                converted(folder / named.part, config.policy.cache_dir, key)
            new = True
        sys.stderr.write(f"composer-mesh: {key} is {named}\n")
    for line in _dequantized(config):
        sys.stderr.write(f"composer-mesh: {line}\n")
    return new


def hub_remarks(config: Config) -> Iterator[str]:
    """Yield a line for each id: its commit, what a run downloads, and the rows of each split.

    And one for each model that was converted from a GGUF file.
    """
    for key, section, named in ids_in(config):
        if isinstance(section, ModelSource):
            more = _weights_of(section.folder_of(named.repo), named)
        elif _is_folder(section):
            more = "a folder of files"
        else:
            splits = Counter(row.get(COLUMN, "its only split") for row in read_rows(str(named)))
            more = ", ".join(f"{count} rows of {split}" for split, count in splits.items())
        yield f"{key}: {named}, {more}"
    yield from _dequantized(config)


def _is_folder(section: Any) -> bool:
    """Whether a section with a dataset has a task that reads a folder of files."""
    task = section.task if isinstance(section, DataConfig | MixedTask) else None
    return task is not None and task_class(task).reads_folder


def _dequantized(config: Config) -> Iterator[str]:
    for key, model in models_in(config).items():
        if model.folder is not None and (line := dequantization(model.folder)):
            yield f"{key}: {line}"


def _weights_of(folder: Path, named: HubId) -> str:
    if has_weights(folder):
        return "its weights are here"
    files = hub.files_of(named) or {}
    sizes = [size for name, (size, _) in files.items() if hub.is_weight(name, named.part)]
    return f"{sum(sizes) / 1e9:.3g} GB of weights are downloaded when a run starts"


PROGRAM, NOTE = "composer_mesh.actors.models.gguf_program", "gguf.json"
LONGEST_S = 86_400.0


def folder_by(digest: str, cache: Path) -> Path:
    """Return the folder of a file with this SHA-256, whether or not it was converted."""
    return (cache / f"gguf-{digest[:16]}").absolute()


def converted(file: Path, cache: Path, key: str) -> Path:
    """Return the folder of a file's model in float32. Waits for the conversion where it is new.

    Raises ConfigError; a folder that was written partially is never used.
    """
    with file.open("rb") as content:
        folder = folder_by(hashlib.file_digest(content, "sha256").hexdigest(), cache)
    if folder.exists():
        return folder
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        why = f"reading it needs {missing[0]}: pip install 'composer-mesh[gguf]'"
        raise _refused(key, file, why)
    sys.stderr.write(f"composer-mesh: {key}: {file.name} is converted into {folder}\n")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        place = Path(scratch) / "model"
        try:
            done = run(
                python_module(PROGRAM, str(file.absolute()), str(place)), deadline_s=LONGEST_S
            )
        except ProgramFailed as error:
            raise _refused(key, file, f"its conversion failed: {error.said[-300:]}") from None
        if why := json.loads(done.stdout).get("error"):
            raise _refused(
                key, file, f"transformers cannot read it ({why}): give a folder with safetensors"
            )
        if not folder.exists():
            shutil.move(place, folder)
    return folder


def dequantization(folder: Path) -> str:
    """Return what the weights of a converted folder are; nothing for another folder."""
    try:
        note = json.loads((folder / NOTE).read_text())
    except FileNotFoundError:
        return ""
    return (
        f"float32 weights of {note['file']}, dequantized from {', '.join(note['types'][:4])}: not "
        "those of the original model"
    )


def _refused(key: str, file: Path, why: str) -> ConfigError:
    return ConfigError(one_line(f"{key} = {shown(str(file))}: {why}"))
