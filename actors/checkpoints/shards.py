"""The tensors of a checkpoint as safetensors files, by `torch.distributed.checkpoint`.

    state/shard-00001-model-00001-of-00001.safetensors ...   the part of the first rank

Each file's header says which rows of which tensors it holds. There is no other metadata, and no
file of a checkpoint is ever unpickled, neither when it is written nor when it is read.

Importing this module takes a second, so that others import it where they read or write shards.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from composer_mesh.configs.regular_files import open_regular
from composer_mesh.mesh.progress import made_progress

FILE_BYTES = 1 << 30
"""Bytes of a file, unless one tensor alone has more; a file is built in memory."""

UNREADABLE = (
    *(OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError),
    *(AssertionError, ArithmeticError, SafetensorError, CheckpointException),
)
"""Errors that unreadable or damaged files raise."""

UNWRITABLE = (OSError, RuntimeError, SafetensorError, CheckpointException)
"""Errors of a disk that is full or gone."""


class TensorsOnly(dcp.DefaultLoadPlanner):
    """torch's load planner, without the values that torch would unpickle."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        del value
        name = read_item.dest_index.fqn
        raise ValueError(f"{name} is no tensor: a checkpoint holds only tensors")

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        made_progress(f"{read_item.dest_index.fqn} of a checkpoint")


class ReportedSave(dcp.DefaultSavePlanner):
    """torch's save planner, which reports each tensor that is handed to a file."""

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        made_progress(f"{write_item.index.fqn} for a checkpoint")
        return found


class ShardReader(HuggingFaceStorageReader):
    """torch's reader of safetensors; it reads the headers once, and checks them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(path=str(folder))
        _check_files(folder)
        self._metadata = super().read_metadata()
        for name, about in self._metadata.state_dict_metadata.items():
            _check_rows(name, about)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the full shape of every tensor."""
        found = self._metadata.state_dict_metadata
        return {name: tuple(about.size) for name, about in found.items()}

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors in place: complete ones, or this rank's rows of sharded ones."""
        dcp.load(dict(tensors), storage_reader=self, planner=TensorsOnly(), no_dist=True)


def write_shards(folder: Path, tensors: Mapping[str, Tensor], group: Any) -> None:
    """Write this rank's part of the tensors; collective over `group`, None for a single rank."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    writer = HuggingFaceStorageWriter(str(folder), _files(whole), save_distributed=True)
    dcp.save(
        whole,
        storage_writer=writer,
        planner=ReportedSave(),
        process_group=group,
        no_dist=group is None,
    )


def shard_files(folder: Path, rank: int) -> list[Path]:
    """Return the files that a rank has written."""
    return list(folder.glob(f"shard-{rank + 1:05d}-*"))


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of each tensor's file, the same on every rank."""
    number, held = 1, 0
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if held and held + size > FILE_BYTES:
            number, held = number + 1, 0
        held += size
        found[name] = number
    return found


def _check_files(folder: Path) -> None:
    for path in folder.iterdir():
        open_regular(path).close()


def _check_rows(name: str, about: Any) -> None:
    """Refuse a tensor of which some part is in no file, or in several."""
    if not isinstance(about, TensorStorageMetadata):
        raise ValueError(f"{name} is no tensor: a checkpoint holds only tensors")
    held = sum(math.prod(chunk.sizes) for chunk in about.chunks)
    if held != math.prod(about.size):
        raise ValueError(f"the files hold {held} numbers of {name}, whose shape is {[*about.size]}")
