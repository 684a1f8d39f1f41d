"""What a version of the weights is, how it lies in memory and fills a model; and buffers."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn

from composer_mesh.mesh.transport import BufferHandle, SendBuffer, TransportError, read
from composer_mesh.mesh.weights.manifest import (
    ALIGNMENT,
    PieceLayout,
    RankPart,
    TornWeights,
    WeightsHandle,
    WeightsMismatch,
    manifest_of,
    own_rows,
)
from composer_mesh.mesh.weights.receiver import StagedWeights
from composer_mesh.mesh.weights.transports import ROW, checksum, stamp, unstamp


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


def staged(model: nn.Module, version: int, dtype: torch.dtype | None = None) -> StagedWeights:
    """What a receiver has when it has received a model's weights from one rank."""
    rows = own_rows(model.state_dict(), 0, dtype)
    layout, manifest = PieceLayout.of(rows), manifest_of(rows)
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for piece, place in layout.views(manifest, memory):
        place.copy_(rows[piece.entry].local)
    stamp(memory, version, 5)
    part = RankPart(0, "shm", layout, 5, None)
    return StagedWeights(WeightsHandle(version, manifest, (part,)), (memory,))


def test_tied_tensors_are_stored_once_and_nothing_overlaps() -> None:
    weights = staged(tied_model(), 1)
    assert [entry.names for entry in weights.manifest.entries] == [
        ("embed.weight", "head.weight"),
        ("norm.weight",),
        ("norm.bias",),
    ]
    assert weights.manifest.parameters == 6 * 3 + 3 + 3
    layout, end = weights.handle.parts[0].layout, ALIGNMENT
    for piece, view in layout.views(weights.manifest, weights.memories[0]):
        assert piece.offset % ALIGNMENT == 0
        assert piece.offset >= end
        end = piece.offset + view.nbytes
    assert layout.nbytes >= end + ALIGNMENT


def test_a_manifest_is_the_same_for_the_same_model_and_travels() -> None:
    manifest = staged(tied_model(), 1).manifest
    assert manifest == staged(tied_model(), 2).manifest
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


def test_a_tied_name_that_nobody_published_is_filled_by_the_other() -> None:
    source, target = tied_model(), tied_model()
    named = nn.ModuleDict({"embed": source["embed"], "norm": source["norm"]})
    staged(named, 4).apply(target)
    assert torch.equal(target["head"].weight, source["embed"].weight)


def test_a_share_of_the_way_is_between_what_was_and_what_came() -> None:
    source, target = tied_model(), tied_model()
    before = target["embed"].weight.clone()
    staged(source, 4).apply(target, 0.25)
    expected = torch.lerp(before, source["embed"].weight, 0.25)
    torch.testing.assert_close(target["embed"].weight, expected)


def test_weights_of_another_floating_dtype_are_converted_where_they_are_applied() -> None:
    source, target = tied_model(), tied_model()
    weights = staged(source, 4, torch.bfloat16)
    assert {tensor.dtype for _, tensor in weights.tensors()} == {torch.bfloat16}
    for rate in (1.0, 1 - 1e-9):
        weights.apply(target, rate)
        assert torch.equal(target["embed"].weight, source["embed"].weight.bfloat16().float())


def test_staged_weights_that_were_replaced_are_refused() -> None:
    weights = staged(tied_model(), 4)
    unstamp(weights.memories[0])
    with pytest.raises(TornWeights, match="version 4 but read version stamps -1 and -1"):
        weights.apply(tied_model())
    with pytest.raises(TornWeights):
        next(weights.tensors())


def test_a_model_that_does_not_fit_is_refused_by_the_name_of_its_parameter() -> None:
    weights = staged(tied_model(), 4)
    wider, longer = tied_model(), tied_model()
    wider["norm"] = nn.LayerNorm(4, dtype=torch.bfloat16)
    longer["extra"] = nn.Linear(2, 2)
    counting = tied_model()
    counting["norm"].weight = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    del (shorter := tied_model())["norm"]
    for model, match in (
        (wider, r"norm\.weight is published as torch\.bfloat16 \(3,\)"),
        (counting, r"norm\.weight is published as torch\.bfloat16 .* has torch\.int64"),
        (longer, r"extra\.weight is missing in the published weights"),
        (shorter, r"norm\.weight is missing in the receiving model"),
    ):
        with pytest.raises(WeightsMismatch, match=match):
            weights.apply(model)


def some_bytes(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("count", [1, 7, 8, 9, ROW * 8, ROW * 8 + 5, ROW * 24 + 77])
def test_a_checksum_shows_any_byte_that_changed(count: int) -> None:
    data = some_bytes(count)
    right = checksum(data)
    assert checksum(data.clone()) == right
    for place in {0, count // 2, count - 1}:
        for bit in (1, 128):
            wrong = data.clone()
            wrong[place] ^= bit
            assert checksum(wrong) != right


def test_a_checksum_shows_pages_that_changed_places_or_were_lost() -> None:
    pages = some_bytes(ROW * 8 * 4).view(4, -1)
    right = checksum(pages.view(-1))
    assert checksum(pages[[1, 0, 2, 3]].view(-1)) != right
    assert checksum(pages.roll(1, 0).view(-1)) != right
    assert checksum(pages[:3].reshape(-1)) != right
    assert checksum(torch.zeros(0, dtype=torch.uint8)) == 0


def test_a_buffer_needs_room() -> None:
    with pytest.raises(ValueError, match="capacity_bytes is 0"):
        SendBuffer(0)


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
