"""Conversion of a config's relative paths to absolute ones."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from composer_mesh.configs.data import DataConfig
from composer_mesh.configs.schema import Config

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
