"""The layout of weights in memory, and the buffers that carry them, without processes."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from composer_mesh.mesh.transport import BufferHandle, SendBuffer, TransportError, read
from composer_mesh.mesh.weights.errors import TornWeights, WeightsMismatch
from composer_mesh.mesh.weights.handle import StagedWeights
from composer_mesh.mesh.weights.manifest import ALIGNMENT, WeightManifest
from composer_mesh.mesh.weights.publisher import WeightPublisher


def tied_model() -> nn.Module:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(6, 3),
            "norm": nn.LayerNorm(3, dtype=torch.bfloat16),
            "head": nn.Linear(3, 6, bias=False),
        }
    )
    model["head"].weight = model["embed"].weight
    return model


def staged(model: nn.Module, version: int) -> StagedWeights:
    manifest = WeightManifest.of(model)
    memory = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    for entry, place in manifest.tensors(memory):
        place.copy_(model.state_dict()[entry.names[0]])
    memory[:8].view(torch.int64).fill_(version)
    memory[-8:].view(torch.int64).fill_(version)
    return StagedWeights(version, manifest, memory)


def test_tied_tensors_are_stored_once_and_nothing_overlaps() -> None:
    manifest = WeightManifest.of(tied_model())
    assert [entry.names for entry in manifest.entries] == [
        ("embed.weight", "head.weight"),
        ("norm.weight",),
        ("norm.bias",),
    ]
    assert manifest.parameters == 6 * 3 + 3 + 3
    end = ALIGNMENT
    for entry in manifest.entries:
        assert entry.offset % ALIGNMENT == 0
        assert entry.offset >= end
        end = entry.offset + entry.nbytes
    assert manifest.nbytes >= end + 8


def test_a_manifest_is_the_same_for_the_same_model_and_travels() -> None:
    manifest = WeightManifest.of(tied_model())
    assert manifest == WeightManifest.of(tied_model())
    assert pickle.loads(pickle.dumps(manifest)) == manifest


def test_applied_weights_equal_the_published_ones_and_stay_tied() -> None:
    source, target = tied_model(), tied_model()
    staged(source, 4).apply(target)
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[name])
    assert target["head"].weight is target["embed"].weight


def test_a_model_that_is_not_tied_gets_every_copy() -> None:
    source, target = tied_model(), tied_model()
    target["head"].weight = nn.Parameter(torch.zeros(6, 3))
    staged(source, 4).apply(target)
    assert torch.equal(target["head"].weight, source["embed"].weight)


def test_staged_weights_that_were_replaced_are_refused() -> None:
    weights = staged(tied_model(), 4)
    weights.memory[:8].view(torch.int64).fill_(5)
    with pytest.raises(TornWeights, match="version 4 but read marks 5 and 4"):
        weights.apply(tied_model())


def test_a_model_that_does_not_fit_is_refused_by_the_name_of_its_parameter() -> None:
    weights = staged(tied_model(), 4)
    wider, longer = tied_model(), tied_model()
    wider["norm"] = nn.LayerNorm(4, dtype=torch.bfloat16)
    longer["extra"] = nn.Linear(2, 2)
    del (shorter := tied_model())["norm"]
    for model, match in (
        (wider, r"norm\.weight is published as torch\.bfloat16 \(3,\)"),
        (longer, r"extra\.weight is missing in the published weights"),
        (shorter, r"norm\.weight is missing in the receiving model"),
    ):
        with pytest.raises(WeightsMismatch, match=match):
            weights.apply(model)


async def test_a_negative_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version is -1"):
        await WeightPublisher(tied_model()).publish(-1)


def test_a_buffer_needs_room_and_a_first_write() -> None:
    with pytest.raises(ValueError, match="capacity_bytes is 0"):
        SendBuffer(0)
    with pytest.raises(TransportError, match="call write\\(\\) before handle"):
        SendBuffer(8).handle()


@pytest.mark.parametrize(
    ("out", "match"),
    [
        (torch.zeros(3), r"\(2, 3\) \(24 bytes\) but out is .* \(3,\) \(12 bytes\): allocate"),
        (torch.zeros(2, 3, dtype=torch.float64), "torch.float64"),
        (torch.zeros(3, 2).T, "must be contiguous"),
    ],
)
async def test_out_that_does_not_fit_is_refused_before_a_transfer(
    out: torch.Tensor, match: str
) -> None:
    with pytest.raises(TransportError, match=match):
        await read(BufferHandle(None, 24, torch.float32, (2, 3)), out)
