"""Finds the models and datasets that a config names by an id of a hub, and downloads the models.

`with_models` pins each id at its commit and reads a model's small files; `download_models` gets the
weights, when all else was checked. From then on a config has folders, wherever they came from.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_mesh.configs.hub import GGUF, HubId, ModelSource
from composer_mesh.configs.paths import ids_in, models_in, with_sections
from composer_mesh.configs.schema import Config
from composer_mesh.planning import hub
from composer_mesh.planning.model_folder import has_weights
from composer_mesh.services.checks import gguf
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
            found[key] = model.at(model.path, gguf.converted(model.path, cache, key))
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
        return pinned, gguf.converted(hub.whole_model(pinned, key) / named.part, cache, key)
    return pinned, gguf.folder_by(digest, cache)


def download_models(config: Config) -> bool:
    """Download the weights of the config's models; return whether some were not here before.

    Raises ConfigError.
    """
    new = False
    for key, section, named in ids_in(config):
        if isinstance(section, ModelSource) and not has_weights(section.folder_of(named.repo)):
            folder = hub.whole_model(named, key)
            if named.part:
                gguf.converted(folder / named.part, config.policy.cache_dir, key)
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
        else:
            splits = Counter(row.get(COLUMN, "its only split") for row in read_rows(str(named)))
            more = ", ".join(f"{count} rows of {split}" for split, count in splits.items())
        yield f"{key}: {named}, {more}"
    yield from _dequantized(config)


def _dequantized(config: Config) -> Iterator[str]:
    for key, model in models_in(config).items():
        if model.folder is not None and (line := gguf.remark(model.folder)):
            yield f"{key}: {line}"


def _weights_of(folder: Path, named: HubId) -> str:
    if has_weights(folder):
        return "its weights are here"
    files = hub.files_of(named) or {}
    sizes = [size for name, (size, _) in files.items() if hub.is_weight(name, named.part)]
    return f"{sum(sizes) / 1e9:.3g} GB of weights are downloaded when a run starts"
