"""Optimizers on two ranks with sharded weights: in 8 bits, offloaded, resumed by other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optimizer_runs as runs
import optimizing
import pytest
import torch
from optimizing import OFFLOADS, name_of
from rank_processes import run_ranks

from composer_mesh.actors.models.ranks import Ranks

pytest.importorskip("torchao", exc_type=ModuleNotFoundError)

OPTIMIZERS = ("adamw", "adamw_8bit", "muon")
CASES = [(optimizer, offload) for optimizer in OPTIMIZERS for offload in OFFLOADS]


class World:
    """The policy, its batches, what two ranks made of them, and what one makes of them here."""

    def __init__(self, root: Path) -> None:
        torch.set_num_threads(1)
        self.root, self.folder = root, root / "policy"
        self.steps = runs.batches(runs.write_policy(self.folder))
        self.one = {
            name_of(optimizer, 1, offload): optimizing.saved(
                runs.config(optimizer=optimizer, optimizer_offload=offload),
                self.folder,
                Ranks(),
                self.steps,
                root / name_of(optimizer, 1, offload),
            )
            for optimizer, offload in CASES
        }
        work = (root / "rendezvous", self.folder, self.steps, root)
        run_ranks(optimizing.both, work, 2)
        self.two: list[dict[str, Any]] = [
            torch.load(root / f"rank-{rank}.pt", weights_only=False) for rank in range(2)
        ]

    def alone_from_two(self, optimizer: str, offload: bool) -> Any:
        config = runs.config(optimizer=optimizer, optimizer_offload=offload)
        checkpoint = self.root / name_of(optimizer, 2, offload)
        return optimizing.resumed(config, self.folder, Ranks(), self.steps[2:], checkpoint)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("optimizers"))


def near(found: dict[str, Any], expected: dict[str, Any], optimizer: str) -> None:
    """That weights differ as sums in another order let them.

    A code of 8 bits may be the next one, and Muon rounds gradients to bfloat16.
    """
    assert found.keys() == expected.keys()
    bound = {"adamw": 1e-5, "adamw_8bit": 1e-3, "muon": 2e-4}[optimizer]
    assert max(float((found[name] - one).abs().max()) for name, one in expected.items()) < bound


@pytest.mark.parametrize(("optimizer", "offload"), CASES)
def test_two_ranks_that_resume_go_on_bit_for_bit(
    world: World, optimizer: str, offload: bool
) -> None:
    name = name_of(optimizer, 2, offload)
    for rank in world.two:
        assert runs.equal(rank[name]["state"], rank[f"{name} again"]["state"])
        assert runs.equal(rank[name]["last"], rank[f"{name} again"]["last"])


@pytest.mark.parametrize(("optimizer", "offload"), CASES)
def test_one_rank_restores_the_state_of_two_bit_for_bit(
    world: World, optimizer: str, offload: bool
) -> None:
    two = world.two[0][name_of(optimizer, 2, offload)]
    one = world.alone_from_two(optimizer, offload)
    assert runs.equal(two["state"], one["state"])
    near(one["last"], two["last"], optimizer)


@pytest.mark.parametrize(("optimizer", "offload"), CASES)
def test_two_ranks_restore_the_state_of_one_bit_for_bit(
    world: World, optimizer: str, offload: bool
) -> None:
    one = world.one[name_of(optimizer, 1, offload)]
    for rank in world.two:
        two = rank[f"{name_of(optimizer, 2, offload)} from one"]
        assert runs.equal(one["state"], two["state"])
        near(two["last"], one["last"], optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_offloaded_state_changes_no_bit_on_two_ranks(world: World, optimizer: str) -> None:
    for rank in world.two:
        kept, offloaded = (rank[name_of(optimizer, 2, offload)] for offload in OFFLOADS)
        assert runs.equal(kept["state"], offloaded["state"])
        assert runs.equal(kept["last"], offloaded["last"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_make_the_weights_of_one(world: World, optimizer: str) -> None:
    one = world.one[name_of(optimizer, 1, False)]
    for rank in world.two:
        near(rank[name_of(optimizer, 2, False)]["last"], one["last"], optimizer)


def test_most_of_the_state_has_8_bits(world: World) -> None:
    names = (name_of(one, 2, False) for one in ("adamw_8bit", "adamw"))
    coarse, exact = (world.two[0][name]["state"] for name in names)
    codes = sum(one.numel() for one in coarse.values() if one.dtype is torch.uint8)
    assert codes > 0.95 * sum(one.numel() for one in exact.values() if one.ndim)


def test_a_rank_without_rows_of_a_weight_stores_and_restores_its_8_bit_state(world: World) -> None:
    assert [rank["rowless"] for rank in world.two] == [True, True]


def test_muon_of_sharded_rows_is_muon_of_whole_matrices(world: World) -> None:
    for rank in world.two:
        assert rank["muon"] < 1e-6
