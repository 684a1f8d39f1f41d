"""The optimizer's part of the memory sums: bytes that torch allocates, and the guide's sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optimizer_runs as runs
import pytest
import torch
import torch.distributed as dist
from allocated import peak_allocated
from repository import ROOT
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from composer_mesh.actors.learning.weight_update import WeightUpdate
from composer_mesh.actors.models.backend import optimizers_of
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.optimizer_state import plain
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.configs.policy import ModelSizes
from composer_mesh.configs.trainer import OptimizerName
from composer_mesh.losses.fused import linear_jsd, linear_logprobs
from composer_mesh.planning.memory import (
    GB,
    RankTraining,
    in_gb,
    optimizer_of,
    total,
    training_parts,
)
from composer_mesh.planning.memory_estimate import memory_of
from composer_mesh.planning.model_sizes import parameter_count
from composer_mesh.planning.optimizer_memory import (
    EACH,
    ORTHOGONALIZING,
    OWNING,
    QUANTIZING,
    optimizer_memory,
    state_bytes,
)

pytest.importorskip("torchao", exc_type=ModuleNotFoundError)

NAMES: tuple[OptimizerName, ...] = ("adamw", "adamw_8bit", "muon")
TOKENS, CONTEXT = 256, 128
SIZES: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 16_384,
    "tie_word_embeddings": True,
}


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """One rank, whose process group is gone after the test."""
    yield Ranks()
    dist.destroy_process_group()


@pytest.fixture
def plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of matrices without oneDNN, whose buffers differ between kinds of processors."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.fixture(scope="module")
def model() -> Any:
    """A model of which optimizer and scores take most, with few tokens."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES))


def train(model: Any, update: WeightUpdate, step: int) -> None:
    """A step over two microbatches, of the policy loss and of SDPO's."""
    update.begin()
    weight = LanguageModel(model).weight
    for microbatch in range(2):
        ids = torch.randint(0, SIZES["vocab_size"], (TOKENS // CONTEXT, CONTEXT))
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        rows = hidden.reshape(-1, hidden.shape[-1])
        if microbatch:
            linear_jsd(
                rows, weight, rows.detach().clone(), weight, jsd_beta=0.5, normalizer=1.0
            ).backward()
        else:
            linear_logprobs(rows, weight, ids.reshape(-1)).sum().backward()
    update.apply(step, lambda: None)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("optimizer", NAMES)
def test_a_step_allocates_what_is_planned_within_15_percent(
    model: Any, optimizer: OptimizerName, offload: bool
) -> None:
    config = runs.config(optimizer=optimizer, optimizer_offload=offload)
    update = WeightUpdate(model, config, Ranks())
    train(model, update, 0)
    update.begin()
    held = sum(one.nbytes for one in model.parameters())
    if not offload:
        held += sum(one.nbytes for one in update.optimizer_state().values())
    allocated = held + peak_allocated(lambda: train(model, update, 1))
    sizes = ModelSizes.model_validate(SIZES)
    how = RankTraining(
        ranks=1,
        tokens=TOKENS,
        trainable=parameter_count(sizes),
        optimizer=optimizer,
        optimizer_offload=offload,
    )
    parts = [one for one in training_parts(sizes, how) if one.what != "allocator's slack"]
    found = f"{in_gb(total(parts))} GB planned, {in_gb(allocated)} allocated"
    assert total(parts) == pytest.approx(allocated, rel=0.15), found


def updated(shape: tuple[int, ...], optimizer: OptimizerName) -> Any:
    """A layer's weight after an update, with its optimizer and the gradient of another."""
    weight = nn.Parameter(torch.randn(shape))
    (one,) = optimizers_of(runs.config(optimizer=optimizer).trainer, {"layers.0.w": weight})
    weight.grad = torch.randn(shape)
    one.step()
    return weight, one


@pytest.mark.parametrize("shape", [(512, 896), (300, 130), (4096,), (8, 32, 64)])
@pytest.mark.parametrize("optimizer", NAMES)
def test_the_state_of_a_weight_has_the_bytes_that_are_planned(
    optimizer: OptimizerName, shape: tuple[int, ...]
) -> None:
    if optimizer == "muon" and len(shape) != 2:
        pytest.skip("Muon has matrices alone")
    weight, one = updated(shape, optimizer)
    held = [value for value in one.state[weight].values() if value.ndim]
    tables = 1024 if optimizer == "adamw_8bit" else 0  # torchao's table of codes, for each tensor
    found = sum(part.nbytes for value in held for part in plain(value) if part.nbytes != tables)
    assert found == state_bytes(optimizer, "layers.0.w", shape)


@pytest.mark.parametrize(
    ("optimizer", "each"), list(zip(NAMES, (EACH, QUANTIZING, ORTHOGONALIZING), strict=True))
)
def test_an_update_allocates_what_is_planned_for_it(
    plain_products: None, optimizer: OptimizerName, each: int
) -> None:
    weight, one = updated((256, 256), optimizer)
    assert_planned(peak_allocated(one.step), each * weight.numel())


def test_an_update_of_sharded_muon_allocates_what_is_planned_for_it(
    plain_products: None, ranks: Ranks
) -> None:
    rows = distribute_tensor(torch.randn(256, 256), ranks.mesh(), [Shard(0)])
    weight = nn.Parameter(rows)
    (one,) = optimizers_of(runs.config(optimizer="muon").trainer, {"layers.0.w": weight})
    weight.grad = distribute_tensor(torch.randn(256, 256), ranks.mesh(), [Shard(0)])
    one.step()
    assert_planned(peak_allocated(one.step), OWNING * weight.numel())


def assert_planned(allocated: int, planned: int) -> None:
    """What is planned has up to two bytes of each value that are not always allocated."""
    assert 0.9 * planned < allocated < 1.01 * planned


def test_a_large_weight_with_8_bit_state_is_updated_in_parts() -> None:
    weight, one = updated((2048, 1024), "adamw_8bit")
    assert peak_allocated(one.step) < 30 * weight.numel()


EIGHT_BILLION = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
HALF_BILLION = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("optimizer", "row"),
    [
        ("adamw", "| adamw | 15.26, 20.31, 2.32 | 3.68, 6.92, 1.24 |"),
        ("adamw_8bit", "| adamw_8bit | 3.87, 5.16, 0.59 | 0.95, 1.78, 0.32 |"),
        ("muon", "| muon | 8.79, 12.16, 2.32 | 2.35, 4.46, 1.13 |"),
    ],
)
def test_the_state_of_real_models_is_what_the_guide_sums_by_hand(
    optimizer: OptimizerName, row: str
) -> None:
    """All of it; offloaded, that of the host's memory and the most on a GPU at once."""
    cells = []
    for fields, shards in ((EIGHT_BILLION, 4), (HALF_BILLION, 1)):
        sizes = ModelSizes.model_validate(fields)
        found = optimizer_memory(sizes, optimizer, shards, offloaded=True, on_gpu=True)
        bytes_of = (found.state, found.offloaded, found.visiting)
        cells.append(", ".join(f"{one / GB:.2f}" for one in bytes_of))
    assert row == f"| {optimizer} | {' | '.join(cells)} |"
    assert row in (ROOT / "docs" / "placement.md").read_text(encoding="utf-8")


def test_offloaded_state_is_in_the_sum_of_the_host_and_not_of_the_gpu(build_config: Any) -> None:
    sizes = ModelSizes.model_validate(EIGHT_BILLION)

    def parts(offload: bool) -> tuple[dict[str, int], dict[str, int]]:
        config = build_config(
            trainer={"optimizer_offload": offload}, placement={"trainer": {"gpus": 1}}
        )
        found = memory_of("trainer", config, sizes)
        return tuple({one.what: one.bytes for one in part} for part in (found.host, found.gpu))  # type: ignore[return-value]

    (host, gpu), (far, near) = parts(False), parts(True)
    assert (host["offloaded optimizer state"], near["optimizer state"]) == (0, 0)
    assert gpu["optimizer state"] == 8 * parameter_count(sizes)
    assert gpu["optimizer state"] < far["offloaded optimizer state"] < 2 * gpu["optimizer state"]


def test_pinned_memory_is_counted_as_torch_rounds_it() -> None:
    sizes = ModelSizes.model_validate(EIGHT_BILLION)
    pageable, pinned = (
        optimizer_memory(sizes, "adamw", 1, offloaded=True, on_gpu=on_gpu)
        for on_gpu in (False, True)
    )
    matrices = {4096 * 12288: 3 * 36, 4096 * 4096: 2 * 36, 4096 * 1024: 2 * 36, 151_936 * 4096: 2}
    rounded = {4096 * 12288: 2**26, 151_936 * 4096: 2**30}
    large = sum(8 * count * rounded.get(values, values) for values, count in matrices.items())
    assert pageable.offloaded == pageable.state
    assert pinned.offloaded == pytest.approx(large, rel=1e-4)


@pytest.mark.parametrize("optimizer", NAMES)
def test_adapters_are_counted_as_for_adamw(optimizer: OptimizerName) -> None:
    sizes = ModelSizes.model_validate(EIGHT_BILLION)
    how = RankTraining(ranks=1, tokens=64, trainable=1000, optimizer=optimizer)
    assert optimizer_of(sizes, how).state == 8000
