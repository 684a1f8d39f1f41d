"""Ranks that divide the positions of each forward train what one rank trains alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import contexts
import pytest
import torch
from rank_processes import run_ranks

from composer_mesh.actors.models.ranks import Ranks

BOUND = 1e-5
APART = ("divided keys", "repeated keys")
"""Cases that four ranks train, as two contexts of two."""


class World:
    """The policies, and what one rank, two and four ranks made of the same steps."""

    def __init__(self, root: Path) -> None:
        torch.set_num_threads(1)
        models = contexts.write_policies(root)
        steps = {name: contexts.batches(model) for name, model in models.items()}
        self.one = {case: contexts.trained(case, root, Ranks(), steps) for case in contexts.CASES}
        self.lost = contexts.lost(root, Ranks(), steps, at=0)
        self.ranks: dict[int, list[dict[str, Any]]] = {}
        for size, cases in ((2, [*contexts.CASES]), (4, [*APART])):
            work = (size, 2, cases, root, steps)
            run_ranks(contexts.every, work, size)
            self.ranks[size] = [
                torch.load(root / f"rank-{rank}-of-{size}.pt", weights_only=False)
                for rank in range(size)
            ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("contexts"))


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert float((found[name] - one).abs().max()) < BOUND, name


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", contexts.CASES)
def test_ranks_that_divide_positions_make_the_losses_gradients_and_weights_of_one(
    world: World, case: str, size: int
) -> None:
    if size == 4 and case not in APART:
        pytest.skip("four ranks train other cases")
    alone = world.one[case]
    assert float(max(one.abs().max() for one in alone["gradients"].values())) > 0.01
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


def test_a_rank_that_loses_its_signals_lets_its_context_train_without_them(world: World) -> None:
    for rank in world.ranks[2]:
        assert [one.get("sdpo/lost_steps") for one in rank["lost"]["metrics"]] == [1, None]
        same(rank["lost"]["last"], world.lost["last"])
