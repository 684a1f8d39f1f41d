"""Updates the adapters of a running vLLM, which computes them beside the weights that it loaded.

vLLM reads adapters from a folder in peft's format, here in shared memory while it does. One adapter
has one id for good and is replaced in place, so that requests under way go on with the new one.
"""

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.engines.port import Weights
from composer_mesh.actors.engines.vllm_weights import SHARED_MEMORY, WeightsIncomplete
from composer_mesh.actors.models.adapter_files import FOLDER, AdapterFolder
from composer_mesh.actors.models.lora import PARTS
from composer_mesh.configs.trainer import LoraConfig
from composer_mesh.rollouts.generation import GenerationRequest

NAME, ID = "policy", 1

Files = Mapping[str, bytes]
"""An adapter in peft's format, by the names of its files."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each adapter weight, by its name in the trainer's model."""


class AdapterRefused(ValueError):
    """An adapter weight whose name or shape is not of the served model's adapters."""

    def __init__(self, name: str, shape: tuple[int, ...], own: tuple[int, ...] | None) -> None:
        super().__init__(name, shape, own)

    def __str__(self) -> str:
        name, shape, own = self.args
        return (
            f"{name} of shape {[*shape]} was published, but the engine's adapters have "
            f"{'no such weight' if own is None else [*own]}: start generators and trainer with the "
            "same trainer.lora"
        )


class VllmAdapters:
    """Loads complete versions of the adapters into the workers of an engine."""

    def __init__(
        self, llm: Any, request: Callable[..., Any], config: LoraConfig, shapes: Shapes
    ) -> None:
        """Load adapters without effect, as those of a new trainer are.

        `llm` adds adapters as vLLM's `LLMEngine`; `request` makes its `LoRARequest`.
        """
        self._llm, self._made, self._shapes = llm, request, shapes
        self._folder = AdapterFolder(config, "")
        self._request: Any = None
        self._load({name: torch.zeros(shape) for name, shape in shapes.items()})

    def of_request(self, request: GenerationRequest) -> Any:
        """Return what vLLM's `add_request` wants, to compute the adapters for any request."""
        del request
        return self._request

    def update(self, weights: Weights) -> None:
        """Replace the served version, for requests under way too.

        Raises `AdapterRefused` and `WeightsIncomplete`; the old version is served on then.
        """
        given: dict[str, Tensor] = {}
        for (name, *_), tensor in weights.tensors():
            own = self._shapes.get(name)
            if own != tuple(tensor.shape):
                raise AdapterRefused(name, tuple(tensor.shape), own)
            given[name] = tensor
        if missing := sorted(self._shapes.keys() - given):
            raise WeightsIncomplete(weights.version, missing)
        self._load(given)

    def _load(self, given: Mapping[str, Tensor]) -> None:
        with shared_folder() as folder:
            self._folder.write(Path(folder), given)
            path = str(Path(folder) / FOLDER)
            self._llm.add_lora(self._made(NAME, ID, path, load_inplace=True))
            # With `load_inplace` each step would read the folder again.
            self._request = self._made(NAME, ID, path)


class AdapterSlots:
    """Several adapters that one vLLM serves side by side, and which of them a request is for.

    `add` and `remove` are called between steps, in the engine's thread. Files stay until then: vLLM
    reads an adapter again that it has dropped for others.
    """

    def __init__(self, llm: Any, request: Callable[..., Any]) -> None:
        self._llm, self._made, self._ids = llm, request, count(1)
        self._held: dict[str, tuple[Any, TemporaryDirectory[str]]] = {}
        self._of_request: dict[int, tuple[GenerationRequest, Any]] = {}
        # With the request itself: the id of one that is freed may be another client's next.

    def add(self, files: Files) -> str:
        """Load an adapter; return the name that is its own for good."""
        number = next(self._ids)
        name, place = f"adapter-{number}", TemporaryDirectory(prefix="composer-mesh-")
        for file, content in files.items():
            (Path(place.name) / file).write_bytes(content)
        adapter = self._made(name, number, place.name)
        try:
            self._llm.add_lora(adapter)
        except BaseException:
            place.cleanup()
            raise
        self._held[name] = (adapter, place)
        return name

    def remove(self, name: str) -> None:
        """Forget an adapter, which no request may use any more."""
        adapter, place = self._held.pop(name)
        self._llm.remove_lora(adapter.lora_int_id)
        place.cleanup()

    def use(self, request: GenerationRequest, name: str) -> None:
        """Let this very request, which is submitted next, be answered with an adapter."""
        self._of_request[id(request)] = (request, self._held[name][0])

    def forget(self, request: GenerationRequest) -> None:
        """Forget what a request, now answered or given up, was for."""
        self._of_request.pop(id(request), None)

    def of_request(self, request: GenerationRequest) -> Any:
        """Return what vLLM's `add_request` wants for a request; None for one of the policy."""
        found = self._of_request.get(id(request))
        return None if found is None else found[1]


def shared_folder() -> "TemporaryDirectory[str]":
    """Return a new folder, in shared memory where there is some."""
    place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    return TemporaryDirectory(prefix="composer-mesh-", dir=place)


def adapter_shapes(model: Any, layers: list[str], rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the adapters of some layers of a model, by their names in it."""
    down, up = PARTS
    found: dict[str, tuple[int, ...]] = {}
    for name in layers:
        outputs, inputs = model.get_submodule(name).weight.shape
        found |= {f"{name}{down}": (rank, inputs), f"{name}{up}": (outputs, rank)}
    return found
