"""Updates the weights of a running vLLM in one complete reload.

vLLM holds fused and prepacked copies of checkpoint tensors. A partial fused group, or a tied head
that is not named, would silently leave stale copies: so incomplete weights end the engine.

Updates the adapters of a running vLLM, which computes them together with the weights that it
loaded.

vLLM reads adapters from a folder in peft's format, here in shared memory while it does. One adapter
has one id for good and is replaced in place, so that requests under way continue with the new one.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from composer_mesh.actors.engines.port import VersionedWeights
from composer_mesh.actors.engines.vllm_worker import HAS_HEAD, RELOAD
from composer_mesh.actors.models.lora import FOLDER, PARTS, AdapterFolder
from composer_mesh.actors.models.policy import Named
from composer_mesh.configs.trainer import LoraConfig
from composer_mesh.configs.worded import Worded
from composer_mesh.rollouts.generation import GenerationRequest

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SHARED_MEMORY = Path("/dev/shm")
FILE_BYTES = 1 << 30

Converted = Callable[[Iterable[Named]], Iterator[tuple[str, Tensor]]]
"""Makes the tensors of a checkpoint from those of the transformers model."""


class WeightsIncomplete(Worded, ValueError):
    """Weights that lack tensors of the served model: their version, how many, and some names."""

    message = (
        "version {0} of the weights lacks {1} tensors of the served model, among them {2}: publish "
        "every tensor of the checkpoint, because vLLM would mix them with older ones"
    )


def under_every_name(tensors: Iterable[Named]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor under all its names."""
    for names, tensor in tensors:
        for name in names:
            yield name, tensor


class VllmWeights:
    """Loads complete versions of the weights into the workers of an engine."""

    def __init__(
        self,
        call: Callable[..., Any],
        expected: set[str],
        tied: bool,
        here: bool,
        converted: Converted = under_every_name,
    ) -> None:
        """`call` calls a method of every worker of an engine; `expected` names the checkpoint's
        tensors; `tied`: the head is the embedding; `here`: the engine has one worker, in this
        process; `converted` makes the checkpoint's tensors."""
        self._call, self._expected, self._tied, self._here = call, expected, tied, here
        self._converted = converted
        self._named_head = all(call(HAS_HEAD, kwargs={}))

    def update(self, weights: VersionedWeights) -> None:
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

    def _named(self, weights: VersionedWeights) -> Iterator[tuple[str, Tensor]]:
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
            raise WeightsIncomplete(weights.version, len(missing), ", ".join(missing[:3]))


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


NAME, ID = "policy", 1

Files = Mapping[str, bytes]
"""An adapter in peft's format, by the names of its files."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each adapter weight, by its name in the trainer's model."""


class AdapterRefused(Worded, ValueError):
    """An adapter weight that the served model's adapters have not: its name, shape, and theirs."""

    message = (
        "{0} of shape {1} was published, but the engine's adapters have {2}: start generators and "
        "trainer with the same trainer.lora"
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

    def update(self, weights: VersionedWeights) -> None:
        """Replace the served version, for requests under way too.

        Raises `AdapterRefused` and `WeightsIncomplete`; the old version is served on then.
        """
        given: dict[str, Tensor] = {}
        for (name, *_), tensor in weights.tensors():
            own = self._shapes.get(name)
            if own != tuple(tensor.shape):
                theirs = "no such weight" if own is None else [*own]
                raise AdapterRefused(name, [*tensor.shape], theirs)
            given[name] = tensor
        if missing := sorted(self._shapes.keys() - given):
            raise WeightsIncomplete(weights.version, len(missing), ", ".join(missing[:3]))
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
