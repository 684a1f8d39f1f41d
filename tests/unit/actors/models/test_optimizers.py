"""Optimizers by their names: 8-bit state, state in the host's memory, and what a resume has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import optimizer_runs as runs
import pytest
import torch
from repetition import crossed
from torch import Tensor, nn

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.learning.weight_update import WeightUpdate
from composer_mesh.actors.models.backend import optimizers_of
from composer_mesh.actors.models.optimizer_state import (
    OffloadedOptimizers,
    mapped,
    optimizer_state_of,
    plain,
    restore_optimizer_state,
)
from composer_mesh.actors.models.ranks import CPU, Ranks
from composer_mesh.actors.models.sharding import is_dtensor, local
from composer_mesh.planning import optimizer_memory
from composer_mesh.planning.model_refusals import LowbitMissing
from composer_mesh.services.checks.accepting import startable

pytest.importorskip("torchao", exc_type=ModuleNotFoundError)

NAMES = ("adamw", "adamw_8bit", "muon")
KINDS = ("fsdp2", "none")
"""Of sharding."""
SHARDED = [(name, sharding) for sharding in KINDS for name in NAMES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("optimizers") / "policy"


@pytest.fixture(scope="module")
def steps(folder: Path) -> Any:
    return runs.batches(runs.write_policy(folder))


def updated(shape: tuple[int, ...], optimizer: str = "adamw_8bit", **trainer: Any) -> Any:
    """A weight after a few updates by random gradients, with its optimizer."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(shape))
    (one,) = optimizers_of(runs.config(optimizer=optimizer, **trainer).trainer, {"w": weight})
    for _ in range(3):
        weight.grad = torch.randn(shape, generator=generator)
        one.step()
    return weight, one


class Stored:
    """State as a checkpoint has it, and what was read into."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = {name: one.clone() for name, one in tensors.items()}
        self.read_into: dict[str, Tensor] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(one.shape) for name, one in self._tensors.items()}

    def read(self, tensors: Any) -> None:
        assert tensors.keys() == self._tensors.keys()
        self.read_into = dict(tensors)
        for name, one in tensors.items():
            one.copy_(self._tensors[name])


@pytest.mark.parametrize(
    ("shape", "block"),
    [((64, 512), 256), ((64, 128), 128), ((40, 896), 128), ((16, 8, 64), 256), ((5, 320_000), 256)],
)
def test_large_weights_have_8_bit_state_in_blocks_that_divide_a_row(
    shape: tuple[int, ...], block: int
) -> None:
    weight, optimizer = updated(shape)
    stored = optimizer.stored(weight)
    for key in ("exp_avg", "exp_avg_sq"):
        assert stored[f"{key}.codes"].dtype is torch.uint8
        assert stored[f"{key}.codes"].shape == shape
        assert stored[f"{key}.scale"].shape == (shape[0], weight[0].numel() // block)


@pytest.mark.parametrize("shape", [(8192,), (2, 2), (256, 15), (4096, 32)])
def test_vectors_small_weights_and_narrow_rows_keep_their_state_in_float32(
    shape: tuple[int, ...],
) -> None:
    weight, optimizer = updated(shape)
    stored = optimizer.stored(weight)
    assert {key: (one.dtype, one.shape) for key, one in stored.items() if one.ndim} == {
        key: (torch.float32, torch.Size(shape)) for key in ("exp_avg", "exp_avg_sq")
    }


def test_8_bit_state_changes_an_update_little() -> None:
    (exact, _), (coarse, _) = updated((64, 256), "adamw"), updated((64, 256))
    difference = (exact - coarse).detach().abs().mean() / exact.detach().abs().mean()
    assert 0 < float(difference) < 0.02


def test_small_weights_are_updated_as_by_adamw() -> None:
    (one, _), (other, _) = updated((8, 8), "adamw"), updated((8, 8))
    torch.testing.assert_close(one, other)


def test_an_update_is_not_compiled_unless_the_config_compiles() -> None:
    torch._dynamo.utils.counters.clear()
    updated((64, 256))
    assert not torch._dynamo.utils.counters["frames"]


def test_quantizing_dequantized_state_again_loses_scales_so_that_codes_are_stored() -> None:
    """A block whose largest value is negative: no code is -1, so its scale is not its maximum."""
    weight, optimizer = updated((64, 256))
    state = optimizer.state[weight]["exp_avg"]
    again = mapped(state, torch.clone)
    again.copy_(state.dequantize())
    assert not torch.equal(again.scale, state.scale)


def test_stored_8_bit_state_is_restored_bit_for_bit_without_float32_of_its_size() -> None:
    weight, optimizer = updated((64, 256))
    stored = Stored(optimizer_state_of({"w": weight}, [optimizer]))
    other, (empty,) = (
        weight,
        optimizers_of(runs.config(optimizer="adamw_8bit").trainer, {"w": weight}),
    )
    restore_optimizer_state({"w": other}, [empty], stored)
    largest = max(one.nbytes for one in stored.read_into.values())
    assert largest == weight.numel()
    for key in ("exp_avg", "exp_avg_sq"):
        one, two = (held.state[weight][key] for held in (optimizer, empty))
        assert torch.equal(one.codes, two.codes)
        assert torch.equal(one.scale, two.scale)
    for one, two in zip(stored.read_into.values(), empty.stored(other).values(), strict=True):
        assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


@pytest.mark.parametrize(("name", "sharding", "offload"), crossed(NAMES, KINDS, [False, True]))
def test_a_resume_of_each_optimizer_goes_on_bit_for_bit(
    folder: Path, steps: Any, ranks: Ranks, tmp_path: Path, name: str, sharding: str, offload: bool
) -> None:
    config = runs.config(optimizer=name, sharding=sharding, optimizer_offload=offload)
    learner = Learner(config, folder, ranks)
    runs.trained(learner, steps[:2])
    runs.save(learner, ranks, tmp_path / "step-2")
    before = runs.state_of(learner)
    other = Learner(config, folder, ranks)
    other.restore(tmp_path / "step-2")
    assert runs.equal(before, runs.state_of(other))
    assert runs.equal(runs.trained(learner, steps[2:]), runs.trained(other, steps[2:]))
    assert any(key.endswith("exp_avg.codes") for key in before) == (name == "adamw_8bit")


@pytest.mark.parametrize(("name", "sharding"), crossed(NAMES, KINDS))
def test_offloaded_state_changes_no_bit_of_the_weights(
    folder: Path, steps: Any, ranks: Ranks, name: str, sharding: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(optimizer_memory, "PART_VALUES", 20_000)
    found = [
        Learner(
            runs.config(optimizer=name, sharding=sharding, optimizer_offload=offload), folder, ranks
        )
        for offload in (False, True)
    ]
    assert len(found[1].step._update._optimizers) > 3
    stays, visits = (runs.trained(one, steps) for one in found)
    assert runs.equal(stays, visits)
    assert runs.equal(*(runs.state_of(one) for one in found))


def test_optimizers_of_a_users_backend_are_offloaded_too(build_model: Any) -> None:
    """Each as a whole; their state may be of any kind, and of weights of any shape."""
    ends = []
    for offload in (False, True):
        model, config = build_model(1), runs.config(optimizer_offload=offload)

        def make(weights: Any) -> list[torch.optim.Optimizer]:
            held = list(weights.values())
            first = torch.optim.SGD(held[:3], lr=1e-2, momentum=0.9)
            return [first, torch.optim.Adagrad(held[3:], lr=1e-2)]

        update = WeightUpdate(model, config, Ranks(), make)
        for step in range(3):
            update.begin()
            model(input_ids=torch.arange(20)[None]).logits.square().mean().backward()
            update.apply(step, lambda: None)
        ends.append({name: one.detach() for name, one in update.weights.items()})
    assert runs.equal(*ends)


def test_state_is_in_the_same_memory_of_the_host_between_updates(folder: Path, steps: Any) -> None:
    """And not in it during an update: a checkpoint's copy reads it, the optimizer does not."""
    learner = Learner(runs.config(optimizer_offload=True), folder, Ranks())
    runs.trained(learner, steps[:1])
    first = {name: one.data_ptr() for name, one in learner.step.optimizer_state().items()}
    seen: list[int] = []
    (optimizer,) = learner.step._update._optimizers
    optimizer.register_step_pre_hook(
        lambda held, *_: seen.extend(one["exp_avg"].data_ptr() for one in held.state.values())
    )
    runs.trained(learner, steps[1:2])
    assert {n: one.data_ptr() for n, one in learner.step.optimizer_state().items()} == first
    assert seen
    assert not set(seen) & set(first.values())


def test_only_the_optimizer_that_updates_has_its_state_on_the_device() -> None:
    weights = [nn.Parameter(torch.zeros(8)) for _ in range(5)]
    optimizers = [torch.optim.AdamW([one]) for one in weights]
    offloaded, most = OffloadedOptimizers(optimizers, CPU), []
    hosts: set[int] = set()

    def visiting(*_: Any) -> None:
        here = [
            one.state[w]["exp_avg"].data_ptr() for one, w in zip(optimizers, weights, strict=True)
        ]
        most.append(sum(pointer not in hosts for pointer in here))

    for step in range(2):
        for one in weights:
            one.grad = torch.ones(8)
        offloaded.step()
        if not step:
            hosts |= {
                o.state[w]["exp_avg"].data_ptr() for o, w in zip(optimizers, weights, strict=True)
            }
            for optimizer in optimizers:
                optimizer.register_step_pre_hook(visiting)
    assert most == [1] * 5


def test_weights_are_divided_into_parts_that_visit_the_device(monkeypatch: Any) -> None:
    monkeypatch.setattr(optimizer_memory, "PART_VALUES", 100)
    assert optimizer_memory.parts_of([60, 40, 1, 300, 99]) == [[0, 1], [2], [3], [4]]
    weights = {str(n): nn.Parameter(torch.zeros(60)) for n in range(4)}
    one, other = (
        optimizers_of(runs.config(optimizer_offload=offload).trainer, weights)
        for offload in (False, True)
    )
    assert (len(one), len(other)) == (1, 4)


def test_parts_of_a_sharded_state_are_plain_tensors_and_make_one_of_its_kind(
    folder: Path, steps: Any, ranks: Ranks
) -> None:
    learner = Learner(runs.config(optimizer="adamw_8bit", sharding="fsdp2"), folder, ranks)
    runs.trained(learner, steps[:1])
    update = learner.step._update
    weight = update.weights["model.embed_tokens.weight"]
    moment = update._optimizers[0].state[weight]["exp_avg"]
    assert is_dtensor(moment)
    assert len(plain(moment)) == 3
    copied: Any = mapped(moment, torch.clone)
    assert is_dtensor(copied)
    assert copied.shape == moment.shape
    assert torch.equal(local(copied).codes, local(moment).codes)  # type: ignore[attr-defined]
    assert all(
        a.data_ptr() != b.data_ptr() for a, b in zip(plain(copied), plain(moment), strict=True)
    )


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_the_learning_rate_of_a_step_is_that_of_the_schedule(
    folder: Path, steps: Any, optimizer: str
) -> None:
    config = runs.config(optimizer=optimizer, lr_schedule="linear", lr=3e-4)
    learner = Learner(config, folder, Ranks())
    for batch in steps:
        metrics = learner.train(batch, None)
        (group,) = (g for one in learner.step._update._optimizers for g in one.param_groups)
        assert float(group["lr"]) == pytest.approx(metrics["policy/lr"], rel=1e-6)


def test_a_run_is_refused_before_it_starts_where_torchao_is_missing(monkeypatch: Any) -> None:
    config = runs.config(optimizer="adamw_8bit")
    startable(config)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(LowbitMissing, match=r"pip install 'composer-mesh\[lowbit\]'"):
        startable(config)
    startable(runs.config())
