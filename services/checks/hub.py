"""Finds the models and datasets that a config names by an id of a hub, and downloads the models.

`with_models` pins each id at its commit and reads a model's small files; `download_models` gets the
weights, when all else was checked. From then on a config has folders, wherever they came from.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from composer_mesh.configs.hub import HubId, ModelSource
from composer_mesh.configs.pinning import ids_in, with_sections
from composer_mesh.configs.schema import Config
from composer_mesh.planning import hub
from composer_mesh.planning.model_folder import has_weights
from composer_mesh.tasks.rows import COLUMN, read_rows


def with_models(config: Config) -> Config:
    """Return the config with its ids at their commits, and the folders of its models.

    Of models only the small files are downloaded. Raises ConfigError.
    """
    found = {}
    for key, section, named in ids_in(config):
        if isinstance(section, ModelSource):
            folder = hub.small_files(named, key)
            pinned = named.at(folder.name)
            hub.refuse_other_formats(pinned, key)
            found[key] = section.at(str(pinned), folder)
        else:
            pinned = named.at(hub.commit_of_dataset(named, key))
            found[key] = section.model_copy(update={"path": str(pinned)})
    return with_sections(config, found)


def download_models(config: Config) -> bool:
    """Download the weights of the config's models; return whether some were not here before.

    Raises ConfigError.
    """
    new = False
    for key, section, named in ids_in(config):
        if isinstance(section, ModelSource) and not has_weights(section.folder_of(named.repo)):
            hub.whole_model(named, key)
            new = True
        sys.stderr.write(f"composer-mesh: {key} is {named}\n")
    return new


def hub_remarks(config: Config) -> Iterator[str]:
    """Yield a line for each id: its commit, what a run downloads, and the rows of each split."""
    for key, section, named in ids_in(config):
        if isinstance(section, ModelSource):
            more = _weights_of(section.folder_of(named.repo), named)
        else:
            splits = Counter(row.get(COLUMN, "its only split") for row in read_rows(str(named)))
            more = ", ".join(f"{count} rows of {split}" for split, count in splits.items())
        yield f"{key}: {named}, {more}"


def _weights_of(folder: Path, named: HubId) -> str:
    if has_weights(folder):
        return "its weights are in the cache"
    sizes = [size for name, (size, _) in (hub.files_of(named) or {}).items() if hub.is_weight(name)]
    return f"{sum(sizes) / 1e9:.3g} GB of weights are downloaded when a run starts"
