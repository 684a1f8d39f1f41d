"""Updates the weights of a running vLLM in one complete reload.

vLLM holds fused and prepacked copies of checkpoint tensors. A partial fused group, or a tied head
that is not named, would silently leave stale copies: so incomplete weights end the engine.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from composer_mesh.actors.engines.port import Weights
from composer_mesh.actors.engines.vllm_worker import HAS_HEAD, RELOAD
from composer_mesh.actors.models.checkpoint_names import Named

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SHARED_MEMORY = Path("/dev/shm")
FILE_BYTES = 1 << 30

Converted = Callable[[Iterable[Named]], Iterator[tuple[str, Tensor]]]
"""Makes the tensors of a checkpoint from those of the transformers model."""


class WeightsIncomplete(ValueError):
    """Weights that lack tensors of the served model."""

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


def under_every_name(tensors: Iterable[Named]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor under all its names."""
    for names, tensor in tensors:
        for name in names:
            yield name, tensor


class VllmWeights:
    """Loads complete versions of the weights into the workers of an engine."""

    def __init__(
        self,
        call: CollectiveRpc,
        expected: set[str],
        tied: bool,
        here: bool,
        converted: Converted = under_every_name,
    ) -> None:
        """`expected` names the checkpoint's tensors; `tied`: the head is the embedding; `here`: the
        engine has one worker, in this process; `converted` makes the checkpoint's tensors."""
        self._call, self._expected, self._tied, self._here = call, expected, tied, here
        self._converted = converted
        self._named_head = all(call(HAS_HEAD, kwargs={}))

    def update(self, weights: Weights) -> None:
        """Replace the served version. An engine where this fails is unusable.

        Workers in other processes read files in shared memory, which temporarily takes one more
        copy of the weights.
        """
        if self._here:
            self._call(RELOAD, kwargs={"weights_iterator": self._named(weights)})
            return
        place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        with tempfile.TemporaryDirectory(prefix="composer-mesh-", dir=place) as folder:
            write(self._named(weights), Path(folder))
            self._call(RELOAD, kwargs={"weights_path": folder})

    def _named(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor under every name; raises `WeightsIncomplete` after the last one."""
        seen: set[str] = set()
        embedding: Tensor | None = None
        for name, tensor in self._converted(weights.tensors()):
            seen.add(name)
            if name != HEAD or self._named_head or not self._tied:
                yield name, tensor
            embedding = tensor if name == EMBEDDING else embedding
        if self._tied and self._named_head and HEAD not in seen and embedding is not None:
            yield HEAD, embedding
        if missing := sorted(self._expected - seen):
            raise WeightsIncomplete(weights.version, missing)


def write(named: Iterable[tuple[str, Tensor]], folder: Path, file_bytes: int = FILE_BYTES) -> None:
    """Write safetensors files of about `file_bytes` each; only one is in memory at a time."""
    held: dict[str, Tensor] = {}
    files = 0
    for name, tensor in named:
        # Tensors in a file must not share memory, as tied names would.
        held[name] = tensor.clone(memory_format=torch.contiguous_format)
        if sum(one.nbytes for one in held.values()) >= file_bytes:
            save_file(held, folder / f"{files}.safetensors")
            held, files = {}, files + 1
    if held:
        save_file(held, folder / f"{files}.safetensors")
