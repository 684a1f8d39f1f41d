"""The training state: tensors in `torch.distributed.checkpoint` shards, other values in JSON.

    state/__0_0.distcp ...   each rank's part of every tensor
    state/.metadata          names and layout of the tensors
    training.json            version, TAID's position, RNG states of each rank

A run resumed from it computes the same weights as an uninterrupted one. Any number of ranks,
sharded or not, can resume from what any other number has written. Checkpoint folders are handled in
`folder`, writing concurrently with training in `writer`.
"""

import json
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, EnumType
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from composer_mesh.actors.checkpoints.folder import UnreadableCheckpoint

SHARDS = "state"
TRAINING_FILE = "training.json"
FORMAT = 1

WEIGHTS, OPTIMIZER, ADAPTERS, TEACHER = "weights/", "moments/", "adapters/", "teacher/"
"""Prefixes of tensor names, by kind."""

_METADATA = {
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
}
_TRUSTED = {
    "torch.distributed.checkpoint.metadata": _METADATA,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}
"""Names that torch's metadata may reference, so that a foreign folder cannot run code."""

UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    pickle.UnpicklingError,
    CheckpointException,
)
"""Errors that unreadable or damaged files raise."""


@dataclass(frozen=True)
class TrainingState:
    """The state of one trainer at a version.

    The names in `tensors` start with their kind; `figures` are the step's non-tensor state, and
    `rng` has an entry for each rank.
    """

    version: int
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    rng: list[dict[str, Any]] = field(default_factory=list)

    def write_figures(self, folder: Path) -> None:
        """Write everything except the tensors."""
        content = {"format": FORMAT, "version": self.version, "figures": self.figures}
        (folder / TRAINING_FILE).write_text(
            json.dumps({**content, "rng": self.rng}) + "\n", encoding="utf-8"
        )


class CheckpointReader:
    """Reads a checkpoint without collectives; raises `UnreadableCheckpoint`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            content = json.loads((folder / TRAINING_FILE).read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r} is not {FORMAT}")
            found = content["version"], content["figures"], content["rng"]
            metadata = _TrustingReader(folder / SHARDS).read_metadata()
        except UNREADABLE as error:
            raise UnreadableCheckpoint(str(folder), _told(error)) from error
        self.version, self.figures, self.rng = found
        self._shapes = {
            name: tuple(about.size)
            for name, about in metadata.state_dict_metadata.items()
            if isinstance(about, TensorStorageMetadata)
        }

    def of(self, kind: str) -> "KeptTensors":
        """Return the checkpoint's tensors of a kind."""
        return KeptTensors(self, kind)

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Return the full shapes of a kind's tensors, by their names without the prefix."""
        return {
            name.removeprefix(kind): shape
            for name, shape in self._shapes.items()
            if name.startswith(kind)
        }

    def read(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Fill a kind's tensors in place: complete ones, or this rank's rows of sharded ones."""
        if not tensors:
            return
        shards = self._folder / SHARDS
        try:
            without_ranks()
            wanted = {kind + name: tensor for name, tensor in tensors.items()}
            dcp.load(wanted, storage_reader=_TrustingReader(shards), no_dist=True)
        except UNREADABLE as error:
            raise UnreadableCheckpoint(str(self._folder), _told(error)) from error


@dataclass(frozen=True)
class KeptTensors:
    """The tensors of a kind in a checkpoint; methods as in `CheckpointReader`."""

    _reader: CheckpointReader
    _kind: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._reader.shapes(self._kind)

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        self._reader.read(self._kind, tensors)


def without_ranks() -> None:
    """Silence torch's warning about loading and saving without torch.distributed."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _told(error: BaseException) -> str:
    """Return the innermost cause, in one line."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # how Python 3.11 before 3.11.4 pickled Enum members
        if name not in _TRUSTED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata needs")
        return super().find_class(module, name)


def _member(kind: Any, name: Any) -> Enum:
    """Return an Enum member; refuse all other uses of `getattr`."""
    if isinstance(kind, EnumType) and name in kind.__members__:
        return cast(Enum, kind[name])
    raise pickle.UnpicklingError(f"it takes {name!r} from {kind!r}, which no metadata needs")


class _TrustingReader(dcp.FileSystemReader):
    """torch's reader, restricted to metadata that references only the trusted names."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise ValueError(f".metadata holds a {type(found).__name__}")
        return found
