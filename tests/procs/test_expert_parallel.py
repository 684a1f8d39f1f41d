"""Ranks that divide a mixture's experts train what one rank with all of them trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import contexts
import divided_experts
import learning
import pytest
import torch
from rank_processes import run_ranks
from transformers import AutoModelForCausalLM

from composer_mesh.actors.models.ranks import Ranks

BOUND = 1e-5
OF_FOUR = ["experts", "checkpointed"]
"""Cases that four ranks train, two of which divide the experts and two store each part."""


class World:
    """A mixture, and what one rank, two and four ranks made of the same steps."""

    def __init__(self, root: Path) -> None:
        torch.set_num_threads(1)
        self.root, self.folder = root, root / "mixture"
        model = contexts.write_policies(root)["mixture"]
        self.steps = divided_experts.batches(model)
        self.one = {
            case: divided_experts.trained(case, self.folder, Ranks(), self.steps)
            for case in divided_experts.CASES
        }
        of_one = root / "checkpoints" / "of-one"
        self.saved = divided_experts.saved(self.folder, Ranks(), self.steps, of_one)
        self.ranks: dict[int, list[dict[str, Any]]] = {}
        for size, cases in ((2, [*divided_experts.CASES]), (4, OF_FOUR)):
            work = (size, cases, root, self.steps)
            run_ranks(divided_experts.every, work, size)
            self.ranks[size] = [
                torch.load(root / f"rank-{rank}-of-{size}.pt", weights_only=False)
                for rank in range(size)
            ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("experts"))


def same(found: dict[str, Any], expected: dict[str, Any], bound: float = BOUND) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert float((found[name] - one).abs().max()) < bound, name


TRAINED = [(case, 2) for case in divided_experts.CASES] + [(case, 4) for case in OF_FOUR]


@pytest.mark.parametrize(("case", "size"), TRAINED)
def test_ranks_that_divide_experts_make_the_losses_gradients_and_weights_of_one(
    world: World, case: str, size: int
) -> None:
    alone = world.one[case]
    for rank in world.ranks[size]:
        same(rank[case]["gradients"], alone["gradients"])
        same(rank[case]["last"], alone["last"])
        for two, one in zip(rank[case]["metrics"], alone["metrics"], strict=True):
            off = {name for name, value in one.items() if value is None}
            assert off == {name for name, value in two.items() if value is None}
            found, expected = ({n: m[n] for n in m if n not in off} for m in (two, one))
            assert found == pytest.approx(expected, rel=BOUND, abs=BOUND)
    first = alone["metrics"][0]
    assert {"loss/policy", "loss/sdpo", "loss/replay"} <= {n for n, v in first.items() if v}
    assert first["moe/rerouted"] > 0
    assert first["moe/balance_loss"] > 1


def test_an_export_in_the_middle_of_a_step_is_the_version_before_it(world: World) -> None:
    for rank in world.ranks[2]:
        assert rank["experts"]["unmoved"]
        assert all(rank["experts"]["unmoved"])


def test_a_rank_stores_its_part_of_the_experts_and_gathers_no_other(world: World) -> None:
    assert world.saved["apart"] == [False, False]
    whole = world.saved["stored"]
    experts = [name for name in whole if ".experts." in name]
    assert experts
    for rank in world.ranks[2]:
        assert rank["saved"]["apart"] == [True, True]
        for name in experts:
            assert rank["saved"]["stored"][name] == (whole[name][0] // 2, *whole[name][1:])


def test_a_checkpoint_of_divided_experts_is_what_transformers_loads(world: World) -> None:
    folder = world.root / "checkpoints" / "of-two"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    same(dict(loaded.state_dict()), world.ranks[2][0]["saved"]["saved"], 1e-9)


def test_a_checkpoint_of_divided_experts_goes_on_with_one_rank(world: World) -> None:
    settings = divided_experts.config("experts", world.folder, 1)
    checkpoint = world.root / "checkpoints" / "of-two"
    found = learning.gone_on(settings, world.folder, Ranks(), world.steps[2:], checkpoint)
    same(found["last"], world.ranks[2][0]["saved"]["last"])


def test_a_checkpoint_of_one_rank_goes_on_with_divided_experts(world: World) -> None:
    for rank in world.ranks[2]:
        same(rank["from one"]["last"], world.saved["last"])
