"""Weights that are not finite are found in each type, wherever they are; no others are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from composer_mesh.planning.model_folder import PIECE_BYTES, SAMPLE_BYTES, not_finite

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2)


def stored(tmp_path: Path, *tensors: torch.Tensor) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({f"layer.{place}": one for place, one in enumerate(tensors)}, path)
    return path


@pytest.mark.parametrize("kind", FLOATS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_one_value_of_a_tensor_is_found(
    tmp_path: Path, kind: torch.dtype, value: float, place: int
) -> None:
    whole, broken = torch.ones(1000), torch.ones(1000)
    broken[place] = value
    path = stored(tmp_path, whole.to(kind), broken.to(kind), whole.to(torch.int64))
    assert list(not_finite([path])) == [(path, "layer.1")]


@pytest.mark.parametrize("kind", FLOATS, ids=str)
def test_the_largest_and_the_smallest_values_are_finite(tmp_path: Path, kind: torch.dtype) -> None:
    about = torch.finfo(kind)
    ends = torch.tensor([about.max, about.min, about.tiny, 0.0, -0.0, 1.0], dtype=torch.float64)
    path = stored(tmp_path, ends.to(kind), torch.tensor([2**31 - 1, -1], dtype=torch.int32))
    assert list(not_finite([path])) == []


def test_a_value_at_the_end_of_the_last_piece_is_found(tmp_path: Path) -> None:
    tensor = torch.zeros(PIECE_BYTES // 2 + 3, dtype=torch.bfloat16)
    tensor[-1] = float("nan")
    path = stored(tmp_path, tensor)
    assert list(not_finite([path])) == [(path, "layer.0")]


def test_of_a_large_folder_the_beginning_of_each_tensor_is_read(tmp_path: Path) -> None:
    first, last = torch.zeros(SAMPLE_BYTES, dtype=torch.float32), torch.zeros(SAMPLE_BYTES)
    first[SAMPLE_BYTES // 4 - 1] = float("nan")
    last[-1] = float("nan")
    path = stored(tmp_path, first, last)
    assert {name for _, name in not_finite([path])} == {"layer.0", "layer.1"}
    assert list(not_finite([path], whole_bytes=0)) == [(path, "layer.0")]
