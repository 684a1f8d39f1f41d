"""The rows of a batch are divided among ranks by its shape alone, and put together again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.plugins.tinker.models.batches import (
    MODELS,
    ROWS,
    Shares,
    TokenLimit,
    microbatches,
)
from composer_mesh.plugins.tinker.models.messages import BatchShape, Datum, TrainCall

SIZES = st.integers(1, 7)


@given(SIZES, SIZES, st.integers(1, 5))
def test_the_shares_of_all_ranks_are_the_batch(models: int, rows: int, ranks: int) -> None:
    shape = BatchShape(models, 0, rows, 3)
    shares = Shares.of(shape, ranks)
    batch = torch.arange(1, models * rows * 3 + 1).view(models * rows, 3)
    parts = [shares.cut(batch, rank) for rank in range(ranks)]
    assert torch.equal(shares.joined(parts), batch)
    for part in parts:
        assert len(part) == shares.part.models * shares.part.rows
    kept = torch.cat(parts).flatten()
    assert torch.equal(kept[kept > 0].sort().values, batch.flatten())


@given(SIZES, SIZES, st.integers(1, 5))
def test_a_model_is_where_its_rows_are(models: int, rows: int, ranks: int) -> None:
    shape = BatchShape(models, 0, rows, 1)
    shares = Shares.of(shape, ranks)
    batch = torch.arange(models).repeat_interleave(rows)[:, None] + 1
    for rank in range(ranks):
        own = shares.cut(batch, rank).view(shares.part.models, shares.part.rows)
        for place, its_rows in zip(shares.models_of(rank), own, strict=True):
            assert set(its_rows.tolist()) <= {0, place + 1}


@pytest.mark.parametrize(
    ("models", "rows", "axis", "tokens"),
    [(1, 1, ROWS, 8), (1, 5, ROWS, 24), (8, 1, MODELS, 32), (3, 4, ROWS, 48), (4, 3, MODELS, 48)],
)
def test_the_axis_with_the_least_padding_is_divided(
    models: int, rows: int, axis: int, tokens: int
) -> None:
    shares = Shares.of(BatchShape(models, 0, rows, 8), 2)
    assert (shares.axis, shares.tokens) == (axis, tokens)


def test_a_microbatch_is_as_large_as_each_rank_allows() -> None:
    ids = torch.zeros(8, dtype=torch.long).numpy()
    data = tuple(Datum(ids, {"target_tokens": ids}) for _ in range(7))
    call = TrainCall("a", 0, "forward", data, "cross_entropy")
    for ranks, sizes in ((1, [2, 2, 2, 1]), (2, [4, 3]), (3, [6, 1])):
        parts = microbatches(call, BatchShape(1, 0, 7, 8), TokenLimit(16, ranks))
        assert [len(one) for one in parts] == sizes
