"""The training state of a checkpoint, and one rank's part in writing it.

    state/shard-00001-model-00001-of-00001.safetensors ...   the part of the first rank
    training.json   version, TAID's position, RNG states of each rank

A run resumed from it computes the same weights as an uninterrupted one. Any number of ranks,
sharded or not, can resume from what any other number has written. Checkpoint folders are handled in
`folder`. A checkpoint is written concurrently with the following steps:

    copy    blocks training, no gathering: each tensor of this rank into a reused staging buffer
    write   in another thread: shards, training.json and, on the first rank, a model folder

Shards are written by `torch.distributed.checkpoint`. Each file's header says which rows of which
tensors it holds. There is no other metadata, and no file of a checkpoint is ever unpickled, neither
when it is written nor when it is read. Importing this module takes a second, for torch's.

Random-number-generator states are Python's, NumPy's and torch's, as JSON. Dropout of adapters and
custom functions draw random numbers; the losses here do not. For NumPy this covers the global
functions, not generators that a custom function creates.
"""

import base64
import json
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from composer_mesh.actors.checkpoints.folder import CheckpointFailed, UnreadableCheckpoint
from composer_mesh.actors.checkpoints.manifest import WrittenFile, written
from composer_mesh.actors.checkpoints.teacher_average import AVERAGE_FILE
from composer_mesh.actors.models.lora import OtherAdapters
from composer_mesh.actors.models.optimizer_state import StateOfOtherWeights
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import local
from composer_mesh.configs.regular_files import open_regular, read_regular
from composer_mesh.mesh.progress import made_progress


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the current RNG states of the CPU and one device."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, [int(key) for key in keys], *rest],
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore the result of `random_states`; a device without a saved state keeps its own."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(states["torch"]))
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor(states["cuda"]), device)


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


SHARDS = "state"
TRAINING_FILE = "training.json"
FORMAT = 2

WEIGHTS, OPTIMIZER, ADAPTERS, TEACHER = "weights/", "moments/", "adapters/", "teacher/"
ISLAND = "island/"
"""Prefixes of tensor names, by kind."""

_MOST_BYTES = 1 << 28
"""Largest `training.json` that is read; 20 KB a rank are written."""


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
        without_ranks()
        self.folder = folder
        with reading(folder):
            self.version, self.figures, self.rng = _figures(folder / TRAINING_FILE)
            self._shards = ShardReader(folder / SHARDS)

    def of(self, kind: str) -> "KeptTensors":
        """Return the checkpoint's tensors of a kind."""
        return KeptTensors(self.folder, self._shards, kind)


@dataclass(frozen=True)
class KeptTensors:
    """The tensors of a kind in a checkpoint, by their names without its prefix."""

    _folder: Path
    _shards: Any
    _kind: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the full shapes of the tensors."""
        return {
            name.removeprefix(self._kind): shape
            for name, shape in self._shards.shapes().items()
            if name.startswith(self._kind)
        }

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors in place: complete ones, or this rank's rows of sharded ones."""
        if tensors:
            with reading(self._folder):
                self._shards.read({self._kind + name: one for name, one in tensors.items()})


def without_ranks() -> None:
    """Silence torch's warning about loading and saving without torch.distributed."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn errors about a checkpoint's content, whatever it is, into `UnreadableCheckpoint`.

    A checkpoint of another policy is not unreadable; its errors stay.
    """
    try:
        yield
    except (UnreadableCheckpoint, StateOfOtherWeights, OtherAdapters):
        raise
    except UNREADABLE as error:
        raise UnreadableCheckpoint(str(folder), cause_of(error)) from error


def _figures(file: Path) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    content = json.loads(read_regular(file, _MOST_BYTES))
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r} is not {FORMAT}")
    version, figures, rng = content["version"], content["figures"], content["rng"]
    if type(version) is not int or version < 0:
        raise ValueError(f"version is {str(version)[:40]} but is a number of steps")
    if not isinstance(figures, dict) or not isinstance(rng, list):
        raise ValueError("figures is not a table or rng is not a list")
    return version, figures, rng


def cause_of(error: BaseException) -> str:
    """Return the innermost cause, in one line."""
    causes = getattr(error, "failures", None)  # of torch's CheckpointException
    if causes:
        error = next(iter(causes.values()))[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


Export = Callable[[Path, dict[str, Tensor]], None]
"""Writes a model folder from the policy's complete tensors."""


class CheckpointWriter:
    """Writes one checkpoint at a time: `copy`, then `write`; collective over all ranks."""

    reuses_stager: bool = torch.__version__ >= (2, 13)
    """Older ones close a stager after its first copy (pytorch/pytorch issue 183413)."""

    def __init__(self, ranks: Ranks, export: Export | None, adapters: Export | None = None) -> None:
        """`export` is None on ranks that write no model folder, `adapters` where there are none."""
        self._ranks, self._export, self._adapters = ranks, export, adapters
        self._stager = self._new_stager()
        self._copied: TrainingState | None = None

    def _new_stager(self) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        fast = self._ranks.device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=fast,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=fast,
        )
        return DefaultStager(options)

    def copy(self, state: TrainingState) -> None:
        """Copy a state, which may change afterwards."""
        if self._copied is not None and not self.reuses_stager:
            self._stager = self._new_stager()
        tensors = self._stager.stage(dict(state.tensors))
        self._copied = TrainingState(state.version, tensors, state.figures, state.rng)
        made_progress("the copy of a checkpoint's state")

    def write(self, folder: Path, export: bool) -> list[WrittenFile]:
        """Write the copied state; return this rank's files, which are on disk by then.

        With `export`, the first rank also writes a model folder. Raises `CheckpointFailed`.
        """
        state = self._copied
        if state is None:
            raise RuntimeError("write comes after copy, and there was none")
        try:
            self._write_shards(state, folder / SHARDS)
            if self._ranks.rank == 0:
                state.write_figures(folder)
                if export and self._export is not None:
                    self._export(folder, self._whole(state, folder))
                    made_progress("the model folder of a checkpoint")
                    if self._adapters is not None:
                        self._adapters(folder, _of_kind(state, ADAPTERS))
            return written(folder, self._own(folder))
        except UNWRITABLE as error:
            raise CheckpointFailed(str(folder), cause_of(error)) from error

    def _write_shards(self, state: TrainingState, folder: Path) -> None:
        if self._ranks.size == 1:
            without_ranks()
        write_shards(
            folder, state.tensors, None if self._ranks.size == 1 else self._ranks.background_group
        )

    def _whole(self, state: TrainingState, folder: Path) -> dict[str, Tensor]:
        """Return the policy's complete tensors, read from all shards if there are several ranks."""
        copied = {n: one for n, one in state.tensors.items() if n.startswith(WEIGHTS)}
        if self._ranks.size == 1:
            return {name.removeprefix(WEIGHTS): local(one) for name, one in copied.items()}
        found = {
            name.removeprefix(WEIGHTS): torch.empty(one.shape, dtype=one.dtype)
            for name, one in copied.items()
        }
        CheckpointReader(folder).of(WEIGHTS).read(found)
        return found

    def _own(self, folder: Path) -> list[Path]:
        """Return this rank's files: its shards, and on the first rank all others of the trainer.

        A teacher's own process writes its average into the same draft at the same time.
        """
        own = list((folder / SHARDS).glob(f"shard-{self._ranks.rank + 1:05d}-*"))
        if self._ranks.rank:
            return own
        paths = [path for path in folder.rglob("*") if path.is_file()]
        of_others = (folder / SHARDS, (folder / AVERAGE_FILE).parent)
        return own + [path for path in paths if path.parent not in of_others]


def _of_kind(state: TrainingState, kind: str) -> dict[str, Tensor]:
    """Return the tensors of a kind that are complete on every rank, such as adapters."""
    own = {name: one for name, one in state.tensors.items() if name.startswith(kind)}
    return {name.removeprefix(kind): local(one) for name, one in own.items()}


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
        raise ValueError(f"{name} is not a tensor: a checkpoint holds only tensors")

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
        raise ValueError(f"{name} is not a tensor: a checkpoint holds only tensors")
    held = sum(math.prod(chunk.sizes) for chunk in about.chunks)
    if held != math.prod(about.size):
        raise ValueError(f"the files hold {held} numbers of {name}, whose shape is {[*about.size]}")
