"""The names and shapes that a folder's files give to the tensors of a transformers model.

transformers holds some tensors otherwise than checkpoints do: it fuses the experts of a layer, and
renames. What it converted while reading a folder it converts back here, by its own rules, so that
vLLM and checkpoints get the names of the folder. Reads headers of files, never weights.

Writes the policy in Hugging Face format during training, for transformers and vLLM.

Holds the model's structure and its tokenizer but no weights, so that it may write in another thread
while the model is trained.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.models.policy import empty_model, save_policy
from composer_mesh.actors.models.tokenizer import load_tokenizer
from composer_mesh.planning.model_folder import folder_weights

Named = tuple[tuple[str, ...], Tensor]
"""A tensor with all its names."""

SHOWN = 3


class CheckpointNames:
    """Converts the tensors of a folder's model to those that its files hold."""

    def __init__(self, folder: Path) -> None:
        self.model = empty_model(folder)
        self._files = folder_weights(folder)
        self._told = _read(empty_model(folder), self._files)
        self.model._weight_conversions = self._told.conversions
        state = self.model.state_dict(keep_vars=True)
        self.expected = {name for name, _ in self.converted(_with_all_names(state))}

    def differences(self) -> Iterator[str]:
        """Yield why the files do not hold the model that the folder's config describes."""
        told = self._told
        for name, held, own in sorted(told.mismatched):
            yield f"{name} is {[*held]} but {[*own]} there"
        if told.missing:
            yield f"{_few(told.missing)} {_verb(told.missing)} missing"
        if told.unexpected:
            yield f"{_few(told.unexpected)} {_verb(told.unexpected)} unknown there"

    def converted(self, tensors: Iterable[Named]) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of the files, under every name, in the order of the layers.

        `tensors` are those of the model in the order of its state dict. Only one layer of them is
        held at a time.
        """
        for _, layer in groupby(tensors, lambda one: _layer(one[0][0])):
            named = {name: tensor for names, tensor in layer for name in names}
            yield from _reverted(self.model, named).items()


class _Told:
    """What transformers says of files that it read into a model."""

    def __init__(self, model: Any, info: Any) -> None:
        self.conversions: list[Any] = model._weight_conversions
        self.missing: set[str] = info.missing_keys
        self.unexpected: set[str] = info.unexpected_keys
        self.mismatched: set[tuple[str, Any, Any]] = info.mismatched_keys


def _read(model: Any, shapes: dict[str, tuple[int, ...]]) -> _Told:
    """Let transformers read tensors of these shapes, without numbers, into an empty model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    here = LoadStateDictConfig(
        device_map={"": torch.device("meta")},
        dtype=torch.float32,
        weight_mapping=get_model_conversion_mapping(model),
    )
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    info, _ = convert_and_load_state_dict_in_model(model, tensors, here)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    return _Told(model, info)


def _reverted(model: Any, named: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, named)
    return found


def _with_all_names(state: dict[str, Tensor]) -> Iterator[Named]:
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    for together in names.values():
        yield tuple(together), state[together[0]]


def _layer(name: str) -> tuple[str, ...]:
    """Return a name up to its first number, which all tensors of a layer share."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return tuple(parts[: numbers[0] + 1]) if numbers else tuple(parts)


def _few(names: set[str]) -> str:
    shown = ", ".join(name[:120] for name in sorted(names)[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _verb(names: set[str]) -> str:
    return "is" if len(names) == 1 else "are"


class ModelFolder:
    """Writes folders with the architecture of the initial policy, and its names of tensors."""

    def __init__(self, initial: Path) -> None:
        from transformers import GenerationConfig

        self._model, self._tokenizer = CheckpointNames(initial).model, load_tokenizer(initial)
        if (initial / "generation_config.json").exists():
            self._model.generation_config = GenerationConfig.from_pretrained(initial)

    def write(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write the policy with these weights, each tensor under its first name."""
        save_policy(self._model, self._tokenizer, folder, weights)
