"""Two ranks with sharded weights and packed rows train what one rank trains with neither."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import learning
import pytest
import torch
from rank_processes import run_ranks
from transformers import AutoModelForCausalLM

from composer_mesh.actors.models.ranks import Ranks

HAS_PEFT = importlib.util.find_spec("peft") is not None
needs_peft = pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed")


class World:
    """The policy, its batches, what two ranks made of them, and what one makes of them here."""

    def __init__(self, root: Path) -> None:
        torch.set_num_threads(1)
        self.root, self.folder = root, root / "policy"
        self.steps = learning.batches(learning.write_policy(self.folder))
        self.one = self.alone()
        rendezvous = root / "rendezvous"
        work = (rendezvous, self.folder, self.steps, root, HAS_PEFT)
        run_ranks(learning.both, work, 2)
        self.two: list[dict[str, Any]] = [
            torch.load(root / f"rank-{rank}.pt", weights_only=False) for rank in range(2)
        ]

    def alone(self) -> dict[str, Any]:
        """The same work on one rank that neither shards nor packs, nor divides a step."""
        plain, ranks = learning.config(), Ranks()
        of_one = self.root / "checkpoints" / "of-one"
        return {
            "five": learning.five_steps(
                learning.config(learning.WHOLE), self.folder, ranks, self.steps
            ),
            "dense": learning.five_steps(
                learning.config(learning.WHOLE, **learning.LONGER),
                self.folder,
                ranks,
                learning.with_prompts(self.steps),
            ),
            "updates": learning.five_steps(
                learning.config(learning.WHOLE | learning.SEVERAL, **learning.CORRECTED),
                self.folder,
                ranks,
                self.steps,
            ),
            "bounded": learning.five_steps(
                learning.config(learning.WHOLE, **learning.BOUNDED), self.folder, ranks, self.steps
            ),
            "lost": learning.lost(plain, self.folder, ranks, self.steps[0], at=0),
            "saved": learning.saved(plain, self.folder, ranks, self.steps, of_one),
        }

    def alone_from(self, name: str, **trainer: Any) -> dict[str, Any]:
        """What one rank makes that goes on from a checkpoint of two."""
        settings, checkpoint = learning.config(trainer), self.root / "checkpoints" / name
        return learning.gone_on(settings, self.folder, Ranks(), self.steps[2:], checkpoint)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("ranks"))


def same(found: learning.Weights, expected: learning.Weights, bound: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    assert worst < bound


def goes_on(found: dict[str, Any], expected: dict[str, Any], bound: float = 1e-5) -> None:
    """The next step's loss, all losses after it, and the weights in the end."""
    for two, one in zip(found["metrics"], expected["metrics"], strict=True):
        assert two["loss/total"] == pytest.approx(one["loss/total"], rel=bound, abs=bound)
    same(found["last"], expected["last"], bound)


def test_five_steps_have_the_losses_figures_and_gradient_norms_of_one_rank(world: World) -> None:
    for two, one in zip(world.two[0]["five"]["metrics"], world.one["five"]["metrics"], strict=True):
        off = {name for name, value in one.items() if value is None}
        assert off == {name for name, value in two.items() if value is None}
        found, expected = ({n: m[n] for n in m if n not in off} for m in (two, one))
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert {"loss/policy", "loss/sdpo", "loss/replay"} <= found.keys() | off


def test_two_ranks_that_share_prefixes_make_the_weights_of_one_that_does_not(world: World) -> None:
    for rank in world.two:
        same(rank["sharing"]["last"], world.one["dense"]["last"])
    same(world.two[0]["sharing"]["gradients"], world.one["dense"]["gradients"])
    for two, one in zip(
        world.two[0]["sharing"]["metrics"], world.one["dense"]["metrics"], strict=True
    ):
        assert two["loss/total"] == pytest.approx(one["loss/total"], rel=1e-5, abs=1e-5)
    first = world.two[0]["sharing"]["metrics"][0]
    assert first["tokens/computed"] < 0.8 * first["tokens/dense"]


@needs_peft
def test_levels_of_checkpointed_layers_with_adapters_make_the_weights_of_dense_rows(
    world: World,
) -> None:
    """On two ranks that share and pack, and on one that does neither."""
    dense = learning.five_steps(
        learning.config({"microbatch_tokens": 100_000} | learning.ADAPTED, **learning.LONGEST),
        world.folder,
        Ranks(),
        learning.with_prompts(world.steps, learning.LONG_PROMPT),
    )
    for rank in world.two:
        same(rank["levels"]["last"], dense["last"])
    same(world.two[0]["levels"]["gradients"], dense["gradients"])
    for two, one in zip(world.two[0]["levels"]["metrics"], dense["metrics"], strict=True):
        assert two["loss/total"] == pytest.approx(one["loss/total"], rel=1e-5, abs=1e-5)
    first = world.two[0]["levels"]["metrics"][0]
    assert first["tokens/computed"] < 0.6 * first["tokens/dense"]


def test_several_updates_of_two_ranks_make_the_weights_of_one(world: World) -> None:
    for rank in world.two:
        same(rank["updates"]["last"], world.one["updates"]["last"])
    for two, one in zip(
        world.two[0]["updates"]["metrics"], world.one["updates"]["metrics"], strict=True
    ):
        assert two["loss/total"] == pytest.approx(one["loss/total"], rel=1e-5, abs=1e-5)
    assert world.one["updates"]["metrics"][0]["policy/updates"] == 4


def test_two_ranks_measure_and_bound_the_shares_of_one(world: World) -> None:
    expected = world.one["bounded"]
    for rank in world.two:
        # AdamW divides by a gradient's own size, also by one that is mostly rounding.
        same(rank["bounded"]["last"], expected["last"], 5e-5)
        for two, one in zip(rank["bounded"]["metrics"], expected["metrics"], strict=True):
            names = [name for name in one if name.startswith("update/")]
            assert {n: two[n] for n in names} == pytest.approx({n: one[n] for n in names}, rel=1e-4)
    first = expected["metrics"][0]
    assert first["update/share_sdpo"] >= 0.3 - 1e-6
    assert first["update/share_replay"] <= 0.2 + 1e-6
    assert first["update/share_replay"] > 0


def test_a_rank_that_loses_its_signals_lets_all_measure_the_step_without_them(world: World) -> None:
    for rank in world.two:
        assert [one["update/share_sdpo"] > 0 for one in rank["lost bounded"]["metrics"]] == [
            False,
            True,
        ]


@needs_peft
def test_shares_of_adapters_that_ranks_hold_whole_are_those_of_one_rank(world: World) -> None:
    expected = learning.five_steps(
        learning.config(learning.ADAPTED, **learning.BOUNDED), world.folder, Ranks(), world.steps
    )
    for rank in world.two:
        same(rank["adapted bounded"]["last"], expected["last"])


def test_gradients_are_sums_over_ranks_the_tied_head_among_them(world: World) -> None:
    found, expected = (one["five"]["gradients"] for one in (world.two[0], world.one))
    assert float(expected["model.embed_tokens.weight"].abs().max()) > 0.01
    same(found, expected)


def test_five_steps_make_the_weights_of_one_rank_on_both(world: World) -> None:
    for rank in world.two:
        same(rank["five"]["last"], world.one["five"]["last"])


def test_an_export_in_the_middle_of_a_step_is_the_version_before_it(world: World) -> None:
    for one in (world.one, *world.two):
        assert one["five"]["unmoved"]
        assert all(one["five"]["unmoved"])


def test_a_rank_that_loses_its_signals_lets_all_train_the_step_without_them(world: World) -> None:
    for rank in world.two:
        assert [one.get("sdpo/lost_steps") for one in rank["lost"]["metrics"]] == [1, None]
        same(rank["lost"]["last"], world.one["lost"]["last"])


def test_a_checkpoint_of_two_ranks_goes_on_with_one(world: World) -> None:
    goes_on(world.alone_from("of-two"), world.two[0]["saved"])


def test_a_checkpoint_of_two_ranks_goes_on_with_two(world: World) -> None:
    for rank in world.two:
        goes_on(rank["from two"], rank["saved"], 1e-7)


def test_a_checkpoint_of_one_rank_goes_on_with_two(world: World) -> None:
    goes_on(world.two[1]["from one"], world.one["saved"])


def test_a_saved_policy_is_what_transformers_loads(world: World) -> None:
    folder = world.root / "checkpoints" / "of-two"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    same(loaded.state_dict(), world.two[0]["saved"]["saved"], 1e-9)


def test_bfloat16_learns_and_keeps_float32_weights(world: World) -> None:
    half = world.two[0]["half"]
    assert half["computes"] == "torch.bfloat16"
    assert half["keeps"] == {"torch.float32"}
    losses = [one["loss/replay"] for one in half["metrics"]]
    assert losses == sorted(losses, reverse=True)


@needs_peft
def test_adapters_of_two_ranks_make_the_policy_that_those_of_one_make(world: World) -> None:
    goes_on(world.alone_from("adapted", **learning.ADAPTED), world.two[0]["adapted"])
