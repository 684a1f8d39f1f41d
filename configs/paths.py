"""Conversion of a config's relative paths to absolute ones."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from composer_mesh.configs.schema import Config, DataConfig

Model = TypeVar("Model", bound=BaseModel)


def with_whole_paths(config: Config, folder: Path | None = None) -> Config:
    """Return the config with absolute paths, resolved against `folder` or the cwd."""
    folder = folder or Path.cwd()
    whole = _section(config, folder)
    return whole.model_copy(update={"data": _with_task_file(whole.data, folder)})


def _with_task_file(data: DataConfig, folder: Path) -> DataConfig:
    file, _, name = data.task.rpartition(":")
    if not file.endswith(".py"):
        return data
    return data.model_copy(update={"task": f"{folder / file}:{name}"})


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
