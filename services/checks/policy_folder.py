"""Checks the model folders that a config names, before anything is started.

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
from composer_mesh.planning.model_facts import ModelFacts, check_model_fits, check_model_teaches
from composer_mesh.planning.model_folder import (
    TEACHER_KEY,
    UnfitModelFolder,
    check_model_folder,
)


def check_policy_files(config: Config) -> None:
    """Raise `UnfitModelFolder` where files are missing or broken, or hold weights like NaN."""
    if (folder := _folder(config)) is not None:
        check_model_folder(folder)
    if (other := _teacher_folder(config)) is not None:
        try:
            check_model_folder(other)
        except UnfitModelFolder as error:
            raise error.at(TEACHER_KEY) from None


def check_policy_template(config: Config, tools: list[dict[str, Any]]) -> None:
    """Raise `UnfitModelFolder` where a tokenizer or the policy's chat template cannot be used.

    Raises `UnfitModel` where a model cannot do what the config asks of it. Tokenizers and templates
    run in a process of their own, whose CPU time and memory are limited.
    """
    if (facts := _facts(config, tools)) is not None:
        check_model_fits(facts, config)
    folder = _folder(config)
    if (other := _teacher_folder(config)) is not None:
        check_model_teaches(_checked_teacher(other, folder), config)


def chat_remarks(config: Config, tools: list[dict[str, Any]]) -> list[str]:
    """Return lines that say how the policy's chat template has the tools of a task."""
    facts = _facts(config, tools) if tools else None
    return [] if facts is None else [f"policy: {facts.chat}"]


def _facts(config: Config, tools: list[dict[str, Any]]) -> ModelFacts | None:
    """Return what is known of the policy's folder; None without one."""
    folder = _folder(config)
    if folder is None:
        return None
    return _checked(folder, json.dumps(tools), config.sdpo.on, json.dumps(config.policy.chat))


@lru_cache
def _checked_teacher(folder: Path, policy: Path | None) -> ModelFacts:
    with closing(TemplateProcess(folder)) as templates:
        return templates.check_teacher_of(policy)


@lru_cache
def _checked(folder: Path, tools: str, hints: bool, chat: str) -> ModelFacts:
    with closing(TemplateProcess(folder)) as templates:
        return templates.check(json.loads(tools), hints, json.loads(chat))


def _folder(config: Config) -> Path | None:
    return _there(config.policy.path)


def _teacher_folder(config: Config) -> Path | None:
    other = config.sdpo.teacher_model
    return None if other is None or not config.sdpo.on else _there(other.path)


def _there(folder: Path | None) -> Path | None:
    return folder if folder is not None and (folder / "config.json").is_file() else None
