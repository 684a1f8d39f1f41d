"""New weights for a running vLLM: everything in one reload, with what vLLM would silently miss.

vLLM keeps fused and prepacked copies of what a checkpoint has. A part of a fused group, or a tied
head that is not named, leaves some of them as they were, without a word: so weights that are not
complete end the engine.
"""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from composer_mesh.actors.engines.port import Weights

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SHARED_MEMORY = Path("/dev/shm")
FILE_BYTES = 1 << 30


class WeightsIncomplete(ValueError):
    """Weights that lack tensors of the model that is served."""

    def __init__(self, version: int, missing: list[str]) -> None:
        super().__init__(version, missing)

    def __str__(self) -> str:
        version, missing = self.args
        return (
            f"version {version} of the weights lacks {len(missing)} tensors of the served model, "
            f"among them {', '.join(missing[:3])}: publish every tensor of the checkpoint, because "
            "vLLM would mix them with older ones"
        )


class CollectiveRpc(Protocol):
    """Calls a method of every worker of an engine."""

    def __call__(self, method: str, *, kwargs: dict[str, Any]) -> Any: ...


class VllmWeights:
    """Gives whole versions of the weights to the workers of an engine."""

    def __init__(self, call: CollectiveRpc, expected: set[str], tied: bool, here: bool) -> None:
        """`expected` names the checkpoint's tensors; `tied`: the head is the embedding; `here`: the
        engine has one worker, in this process."""
        self._call, self._expected, self._tied, self._here = call, expected, tied, here

    def update(self, weights: Weights) -> None:
        """Put one version in place of the one before. An engine where this fails is lost.

        Workers in other processes read files in shared memory, which cost one more copy of the
        weights while it lasts.
        """
        if self._here:
            self._call("reload_weights", kwargs={"weights_iterator": self._named(weights)})
            return
        place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        with tempfile.TemporaryDirectory(prefix="composer-mesh-", dir=place) as folder:
            write(self._named(weights), Path(folder))
            self._call("reload_weights", kwargs={"weights_path": folder})

    def _named(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under every name; raises `WeightsIncomplete` after the last one."""
        seen: set[str] = set()
        embedding: Tensor | None = None
        for names, tensor in weights.tensors():
            for name in names:
                seen.add(name)
                yield name, tensor
            embedding = tensor if EMBEDDING in names else embedding
        if self._tied and HEAD not in seen and embedding is not None:
            yield HEAD, embedding
        if missing := sorted(self._expected - seen):
            raise WeightsIncomplete(weights.version, missing)


def checkpoint_names(folder: Path) -> set[str]:
    """The names of all tensors in a folder's safetensors files."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    return names


def write(named: Iterable[tuple[str, Tensor]], folder: Path, file_bytes: int = FILE_BYTES) -> None:
    """Safetensors files that hold about `file_bytes` each; only one is in memory at a time."""
    held: dict[str, Tensor] = {}
    files = 0
    for name, tensor in named:
        # A file shares no memory between its tensors, as the names of a tied one would.
        held[name] = tensor.clone(memory_format=torch.contiguous_format)
        if sum(one.nbytes for one in held.values()) >= file_bytes:
            save_file(held, folder / f"{files}.safetensors")
            held, files = {}, files + 1
    if held:
        save_file(held, folder / f"{files}.safetensors")
