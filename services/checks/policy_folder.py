"""Checks the model folder that a config names, before anything is started.

The built-in policy is made by the run itself and needs no check. A folder that is not here yet is
checked where the run starts.
"""

import json
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

from composer_mesh.actors.models.template_process import TemplateProcess
from composer_mesh.configs.schema import Config
from composer_mesh.planning.model_folder import check_model_folder


def check_policy_files(config: Config) -> None:
    """Raise `UnfitModelFolder` where files are missing or broken; reads only headers of weights."""
    if (folder := _folder(config)) is not None:
        check_model_folder(folder)


def check_policy_template(config: Config, tools: list[dict[str, Any]]) -> None:
    """Raise `UnfitModelFolder` where the tokenizer or its chat template cannot be used.

    They run in a process of their own, whose CPU time and memory are limited.
    """
    if (folder := _folder(config)) is not None:
        _check_template(folder, json.dumps(tools), config.sdpo.on)


@lru_cache
def _check_template(folder: Path, tools: str, hints: bool) -> None:
    with closing(TemplateProcess(folder)) as templates:
        templates.check(json.loads(tools), hints)


def _folder(config: Config) -> Path | None:
    folder = config.policy.path
    return folder if folder is not None and (folder / "config.json").is_file() else None
