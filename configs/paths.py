"""Conversion of a config's relative paths to absolute ones.

The ids of models and datasets in a config, and the config with them at their commits.

Which commits those are is known to a hub, or to an earlier run; nothing here asks for them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from composer_mesh.configs.data import DataConfig
from composer_mesh.configs.hub import HubId, id_of
from composer_mesh.configs.policy import PolicyConfig
from composer_mesh.configs.schema import Config
from composer_mesh.configs.sdpo import TeacherModelConfig

Model = TypeVar("Model", bound=BaseModel)


def with_whole_paths(config: Config, folder: Path | None = None) -> Config:
    """Return the config with absolute paths, resolved against `folder` or the cwd."""
    folder = folder or Path.cwd()
    whole = _section(config, folder)
    changed: dict[str, Any] = {"data": _with_task_files(whole.data, folder)}
    if whole.rollouts.workflow is not None:
        workflow = _whole_import(whole.rollouts.workflow, folder)
        changed["rollouts"] = whole.rollouts.model_copy(update={"workflow": workflow})
    return whole.model_copy(update=changed)


def _with_task_files(data: DataConfig, folder: Path) -> DataConfig:
    if data.task is not None:
        return data.model_copy(update={"task": _whole_import(data.task, folder)})
    mixed = [
        one.model_copy(update={"task": _whole_import(one.task, folder)}) for one in data.mixture
    ]
    return data.model_copy(update={"mixture": tuple(mixed)})


def _whole_import(path: str, folder: Path) -> str:
    """Return an import path; where it is that of a file, with the absolute path of the file."""
    file, _, name = path.rpartition(":")
    return f"{folder / file}:{name}" if file.endswith(".py") else path


def _section(section: Model, folder: Path) -> Model:
    changed = {name: _value(value, folder) for name, value in section}
    return section.model_copy(update=changed)


def _value(value: Any, folder: Path) -> Any:
    if isinstance(value, Path):
        return folder / value
    if isinstance(value, BaseModel):
        return _section(value, folder)
    if isinstance(value, tuple | list):
        return type(value)(_value(one, folder) for one in value)
    if isinstance(value, dict):
        return {name: _value(one, folder) for name, one in value.items()}
    return value


POLICY_KEY, TEACHER_KEY = "policy.path", "sdpo.teacher_model.path"
DATA_KEY, SFT_KEY = "data.path", "sft.path"
NEWEST = ("", "main")
"""Revisions that name no other than the newest commit."""


def models_in(config: Config) -> dict[str, PolicyConfig | TeacherModelConfig]:
    """Return the sections that name a model, by the keys of their paths."""
    sections: dict[str, PolicyConfig | TeacherModelConfig] = {POLICY_KEY: config.policy}
    if config.sdpo.on and config.sdpo.teacher_model is not None:
        sections[TEACHER_KEY] = config.sdpo.teacher_model
    return sections


def ids_in(config: Config) -> Iterator[tuple[str, Any, HubId]]:
    """Yield the key, the section and the id of each path that is one."""
    sections: dict[str, Any] = {**models_in(config), DATA_KEY: config.data}
    if config.sft is not None:
        sections[SFT_KEY] = config.sft
    for number, one in enumerate(config.data.mixture):
        sections[_mixed(number)] = one
    for key, section in sections.items():
        if (named := id_of(section.path)) is not None:
            yield key, section, named


def with_sections(config: Config, found: Mapping[str, Any]) -> Config:
    """Return the config with other sections, by the keys of their paths."""
    if not found:
        return config
    data = found.get(DATA_KEY, config.data)
    mixture = [found.get(_mixed(number), one) for number, one in enumerate(data.mixture)]
    teacher = found.get(TEACHER_KEY, config.sdpo.teacher_model)
    changed = {
        "policy": found.get(POLICY_KEY, config.policy),
        "sft": found.get(SFT_KEY, config.sft),
        "data": data.model_copy(update={"mixture": tuple(mixture)}),
        "sdpo": config.sdpo.model_copy(update={"teacher_model": teacher}),
    }
    return config.model_copy(update=changed)


def _mixed(number: int) -> str:
    return f"data.mixture.{number}.path"


def pinned_as(config: Config, before: Config) -> Config:
    """Return the config with the commits of an earlier one, for ids that both have.

    An id that names another revision than the newest is left as it is.
    """
    earlier = {key: named for key, _, named in ids_in(before)}
    found = {
        key: section.model_copy(update={"path": str(earlier[key])})
        for key, section, named in ids_in(config)
        if named.revision in NEWEST and key in earlier and earlier[key].at("") == named.at("")
    }
    return with_sections(config, found)
