"""Ids of models and datasets on a hub, and the keys of a config that take an id or a path.

    ORG/NAME    ORG/NAME@REVISION    ORG/NAME:FILE.gguf    ORG/NAME:CONFIG (of a dataset)

A file or folder that exists is always a path. So is everything that starts with `.` or `/`, has no
slash or several, or ends like a file of rows or of weights. Nothing here asks a hub.
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import PlainSerializer, PlainValidator, PrivateAttr
from pydantic_core import PydanticCustomError

from composer_mesh.configs.base import Section, usable_path

_ID = re.compile(
    r"(?!.*\.\.)(?P<repo>[A-Za-z0-9][\w.-]*/[\w-][\w.-]*)"
    r"(:(?P<part>[\w-][\w.-]*))?(@(?P<revision>\w[\w./-]*))?",
    re.ASCII,
)
_FILES = (".jsonl", ".json", ".parquet", ".gguf", ".safetensors")
LONGEST = 300
GGUF = ".gguf"
NO_ID = "or the id of one on the hub, as ORG/NAME or ORG/NAME@REVISION"


@dataclass(frozen=True)
class HubId:
    """A repository, a file or a config of it, and a revision; both may be missing."""

    repo: str
    part: str = ""
    revision: str = ""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the id that a text is; None for any other text."""
        found = _ID.fullmatch(text) if len(text) <= LONGEST else None
        if found is None or found["repo"].endswith(_FILES):
            return None
        return cls(found["repo"], found["part"] or "", found["revision"] or "")

    def __str__(self) -> str:
        part = f":{self.part}" if self.part else ""
        return f"{self.repo}{part}@{self.revision}" if self.revision else f"{self.repo}{part}"

    def at(self, revision: str) -> Self:
        """Return the id at another revision."""
        return replace(self, revision=revision)


def id_of(path: Path | str | None) -> HubId | None:
    """Return the id that a config's key has; None for a path."""
    return HubId.parse(path) if isinstance(path, str) else None


def read_path(text: str) -> Path | str:
    """Return the path that a text names, or the text itself where it is an id."""
    path = usable_path(Path(text))
    return path if HubId.parse(text) is None or os.path.lexists(path) else text


def _read(value: Any) -> Path | str:
    if isinstance(value, Path):
        return usable_path(value)
    if isinstance(value, str):
        return read_path(value)
    raise PydanticCustomError("path_type", "must be the path of a file or folder")


def _read_model(value: Any) -> Path | str:
    path = _read(value)
    if (named := id_of(path)) is not None and named.part and not named.part.endswith(GGUF):
        raise ValueError(
            f"{path!r} names {named.part!r} of a model, which is not a GGUF file: write ORG/NAME, "
            "or ORG/NAME:FILE.gguf"
        )
    return path


def _written(path: Any) -> Any:
    """Return what is read as the same path, also where its folder is missing."""
    text = str(path)
    return f"./{text}" if isinstance(path, Path) and HubId.parse(text) is not None else text


_AS_WRITTEN = PlainSerializer(_written, when_used="json-unless-none")
DataPath = Annotated[Path | str, PlainValidator(_read), _AS_WRITTEN]
"""A file or folder of rows, or the id of a dataset."""
ModelPath = Annotated[Path | str, PlainValidator(_read_model), _AS_WRITTEN]
"""A model folder, a GGUF file, or the id of a model."""


class ModelSource(Section):
    """A section whose `path` names a model, wherever that is."""

    _folder: Path | None = PrivateAttr(default=None)

    def at(self, path: Path | str, folder: Path) -> Self:
        """Return the section for a model that was found, with the folder where it is."""
        found = self.model_copy(update={"path": path})
        found._folder = folder
        return found

    def folder_of(self, path: Path | str) -> Path:
        """Return the folder of a model; that of an id which nobody looked for does not exist."""
        return self._folder or Path(path)
