"""Weights for vLLM: all of them, under every name, in one reload."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stepped import Plain, weight
from torch import Tensor

from composer_mesh.actors.engines.vllm_weights import (
    EMBEDDING,
    HEAD,
    VllmWeights,
    WeightsIncomplete,
    write,
)
from composer_mesh.actors.engines.vllm_worker import (
    HAS_HEAD,
    RELOAD,
    PolicyWorker,
    WeightsNotTaken,
)

Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


class Workers:
    """Take weights over, each call one list of names and tensors."""

    def __init__(self, head: bool = True) -> None:
        self.head = head
        self.reloads: list[list[tuple[str, Tensor]]] = []
        self.folders: list[Path] = []

    def __call__(self, method: str, *, kwargs: dict[str, Any]) -> list[bool]:
        if method == HAS_HEAD:
            return [self.head, self.head]
        assert method == RELOAD
        assert hasattr(PolicyWorker, method)
        if "weights_iterator" in kwargs:
            self.reloads.append(list(kwargs["weights_iterator"]))
            return []
        folder = Path(kwargs["weights_path"])
        files = sorted(folder.glob("*.safetensors"))
        self.folders.append(folder)
        self.reloads.append([item for file in files for item in load_file(file).items()])
        return []


def test_everything_goes_in_one_reload_under_every_name() -> None:
    workers = Workers()
    weights = VllmWeights(workers, {EMBEDDING, Q}, tied=True, here=True)
    weights.update(Plain(1, {(EMBEDDING, HEAD): weight(1.0), (Q,): weight(2.0)}))
    (reload,) = workers.reloads
    assert [name for name, _ in reload] == [EMBEDDING, HEAD, Q]


@pytest.mark.parametrize("here", [True, False])
def test_a_tied_head_is_named_also_where_the_weights_do_not(here: bool) -> None:
    workers = Workers()
    weights = VllmWeights(workers, {EMBEDDING, Q}, tied=True, here=here)
    weights.update(Plain(1, {(EMBEDDING,): weight(1.0), (Q,): weight(2.0)}))
    (reload,) = workers.reloads
    assert torch.equal(dict(reload)[HEAD], weight(1.0))


@pytest.mark.parametrize("names", [(EMBEDDING,), (EMBEDDING, HEAD)])
def test_a_tied_head_is_not_named_where_the_served_model_has_none(names: tuple[str, ...]) -> None:
    """As vLLM's Gemma, which refuses the name."""
    workers = Workers(head=False)
    weights = VllmWeights(workers, {EMBEDDING, Q}, tied=True, here=True)
    weights.update(Plain(1, {names: weight(1.0), (Q,): weight(2.0)}))
    assert [name for name, _ in workers.reloads[0]] == [EMBEDDING, Q]


def test_a_head_of_its_own_is_not_made_the_embedding() -> None:
    workers = Workers()
    weights = VllmWeights(workers, {EMBEDDING, HEAD}, tied=False, here=True)
    weights.update(Plain(1, {(EMBEDDING,): weight(1.0), (HEAD,): weight(3.0)}))
    assert torch.equal(dict(workers.reloads[0])[HEAD], weight(3.0))


@pytest.mark.parametrize("here", [True, False])
def test_a_part_of_a_fused_group_is_refused(here: bool) -> None:
    weights = VllmWeights(Workers(), {EMBEDDING, Q, K}, tied=False, here=here)
    with pytest.raises(WeightsIncomplete, match=f"version 6 .* lacks 1 tensors .* {K}"):
        weights.update(Plain(6, {(EMBEDDING,): weight(1.0), (Q,): weight(2.0)}))


def test_workers_elsewhere_read_a_folder_that_is_gone_afterwards() -> None:
    workers = Workers()
    weights = VllmWeights(workers, {EMBEDDING, Q}, tied=False, here=False)
    weights.update(Plain(1, {(EMBEDDING, HEAD): weight(1.0), (Q,): weight(2.0)}))
    assert {name: float(tensor[0, 0]) for name, tensor in workers.reloads[0]} == {
        EMBEDDING: 1.0,
        HEAD: 1.0,
        Q: 2.0,
    }
    assert not workers.folders[0].exists()


def test_files_hold_what_fits_and_views_of_larger_memory_alone(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    named = [("a", whole[0]), ("b", whole[:, 1]), ("c", whole)]
    write(iter(named), tmp_path, file_bytes=28)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [sorted(load_file(file)) for file in files] == [["a", "b"], ["c"]]
    for name, tensor in named:
        found = [load_file(file)[name] for file in files if name in load_file(file)]
        assert torch.equal(found[0], tensor)


@pytest.mark.parametrize(
    "error", [WeightsIncomplete(6, 2, f"{Q}, {K}"), WeightsNotTaken(2, "Model", Q)]
)
def test_the_errors_of_weights_travel(error: Exception) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
