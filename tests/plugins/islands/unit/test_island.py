"""Islands in one process: exact averages, overlap, late islands, restarts, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from islands_stores import Faults, FaultyStore, MemoryStore
from islands_world import SIZES, FlatWeights, Run, island_config, together

from composer_mesh.plugins.islands.rounds.island import Island, OtherIslands


def trained(count: int, steps: int, store: MemoryStore | None = None, **changes: Any) -> list[Run]:
    shared = store or MemoryStore()
    runs = [
        Run(rank, island_config(rank, count, **changes), shared, steps) for rank in range(count)
    ]
    together([run.to_the_end for run in runs])
    return runs


def data_parallel(count: int, steps: int, lr: float) -> np.ndarray:
    """SGD of torch on the mean loss of all islands' data."""
    targets = [
        np.concatenate(
            [Run(rank, island_config(rank, count), MemoryStore(), 1).target(name) for name in SIZES]
        )
        for rank in range(count)
    ]
    weights = torch.nn.Parameter(torch.ones(sum(SIZES.values())))
    optimizer = torch.optim.SGD([weights], lr)
    for _ in range(steps):
        optimizer.zero_grad()
        losses = [((weights - torch.tensor(one)) ** 2).sum() / 2 for one in targets]
        (torch.stack(losses).sum() / count).backward()
        optimizer.step()
    return weights.detach().numpy()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("fragments", [1])
def test_plain_averages_of_each_step_equal_data_parallel_sgd(count: int, fragments: int) -> None:
    runs = trained(count, 20, steps_per_round=1, fragments=fragments)

    expected = data_parallel(count, 20, 0.1)
    for run in runs:
        np.testing.assert_allclose(run.flat, expected, atol=1e-6, rtol=0)
        assert (run.flat == runs[0].flat).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"fragments": 4},
        {"fragments": 2, "quantization": "int8"},
        {"overlap_steps": 2},
        {"overlap_steps": 1, "fragments": 2, "quantization": "int4"},
        {"outer": {"lr": 0.7, "momentum": 0.9}},
        {"outer": {"type": "adam", "lr": 0.05}, "overlap_steps": 3},
        {"overlap_steps": 1, "fragments": 4},
        {"overlap_steps": 2, "mixing": 0.5},
    ],
)
def test_islands_end_with_common_weights(changes: dict[str, Any]) -> None:
    runs = trained(3, 24, **changes)

    if changes.get("mixing"):
        assert np.abs(runs[0].flat - runs[1].flat).max() < np.abs(runs[0].target("a")).max()
    else:
        assert all((run.flat == runs[0].flat).all() for run in runs)
    assert sum(one["islands/lost"] for run in runs for one in run.figures) == 0
    assert not [kind for run in runs for kind, _ in run.new_events]


@pytest.mark.parametrize("how", ["int8", "int4"])
def test_50_rounds_in_few_bits_end_near_the_exact_ones(how: str) -> None:
    exact = trained(2, 50, steps_per_round=1)
    rounded = trained(2, 50, steps_per_round=1, quantization=how)

    limit = {"int8": 127, "int4": 7}[how]
    largest_gradient = 0.1 * 4
    assert np.abs(rounded[0].flat - exact[0].flat).max() <= largest_gradient / limit


def test_progress_of_overlapped_steps_is_not_lost() -> None:
    (run,) = trained(1, 12, steps_per_round=4, overlap_steps=3)

    expected = data_parallel(1, 12, 0.1)
    np.testing.assert_allclose(run.flat, expected, atol=1e-5)


def test_a_new_island_starts_from_the_newest_common_weights() -> None:
    store = MemoryStore()
    first = trained(1, 8, store, absent_after=1)[0]
    late = Run(0, island_config(0, 1, member="f" * 16, absent_after=1), store, 8)

    late.open()

    assert (late.flat == first.flat).all()


def test_islands_that_begin_apart_start_from_the_same_weights() -> None:
    store = MemoryStore()
    runs = [Run(rank, island_config(rank, 2), store, 8) for rank in range(2)]
    runs[0].open()
    other = FlatWeights(fill=3.0)

    Island(runs[1].config, 8, other, store).join()

    assert (other.read(list(SIZES)) == runs[0].flat).all()


def test_an_island_without_the_others_goes_on_alone_and_tells() -> None:
    run = Run(0, island_config(0, 2, quorum=2, deadline_s=0.05), MemoryStore(), 8)

    run.to_the_end()

    assert [kind for kind, _ in run.new_events] == ["round_lost", "round_lost"]
    np.testing.assert_allclose(run.flat, data_parallel(1, 8, 0.1), atol=1e-6)


def test_the_contribution_of_a_lost_round_is_merged_when_it_closes() -> None:
    store = MemoryStore()
    early, late = (Run(n, island_config(n, 2, quorum=2, deadline_s=0.3), store, 8) for n in (0, 1))
    early.open()
    late.open()
    for _ in range(5):
        early.train()
    assert [kind for kind, _ in early.new_events] == ["round_lost"]

    together([early.to_the_end, late.to_the_end])

    assert [one["islands/round"] for one in early.figures][-1] >= 1
    assert {kind for kind, _ in early.new_events + late.new_events} <= {
        "round_lost",
        "contribution_late",
    }


def test_a_slow_island_is_dropped_by_the_rule_and_takes_the_common_weights() -> None:
    store = MemoryStore()
    fast, slow = (Run(n, island_config(n, 2, deadline_s=0.02), store, 16) for n in (0, 1))
    slow.open()
    fast.to_the_end()

    for _ in range(4):
        slow.train()

    assert [kind for kind, _ in slow.new_events] == ["contribution_dropped"]
    assert (slow.flat == fast.flat).all()


@pytest.mark.parametrize(
    "changes", [{}, {"overlap_steps": 2}, {"quantization": "int8", "fragments": 2}]
)
@pytest.mark.parametrize("dies_after", [3, 5, 9])
def test_a_run_that_trains_steps_again_merges_what_it_merged_before(
    changes: dict[str, Any], dies_after: int
) -> None:
    expected = trained(2, 16, **changes)
    store = MemoryStore()
    runs = [Run(n, island_config(n, 2, **changes), store, 16, checkpoint_every=3) for n in (0, 1)]

    def dies_once() -> None:
        runs[1].open()
        while runs[1].step < dies_after:
            runs[1].train()
        runs[1].open()
        runs[1].to_the_end()

    together([runs[0].to_the_end, dies_once])

    for run, other in zip(runs, expected, strict=True):
        assert (run.flat == other.flat).all()


def test_an_island_back_from_before_what_is_kept_takes_the_newest_weights() -> None:
    store = MemoryStore()
    changes = {"deadline_s": 0.02, "rounds_kept": 1, "absent_after": 1}
    away = Run(0, island_config(0, 2, **changes), store, 60)
    there = Run(1, island_config(1, 2, **changes), store, 60)
    together(
        [
            lambda: (away.open(), [away.train() for _ in range(4)]),
            lambda: (there.open(), [there.train() for _ in range(4)]),
        ]
    )
    away.checkpoint_every = 10**6
    while there.step < 40:
        there.train()
    assert there.island is not None
    there.island.finish()

    away.open()

    assert away.island is not None
    assert [kind for kind, _ in away.island.new_events()] == [
        "common_weights_read",
        "island_rejoined",
    ]
    assert (away.flat == there.flat).all()


def test_weights_of_nan_are_never_sent_and_are_replaced() -> None:
    store = MemoryStore()
    runs = [Run(n, island_config(n, 2, deadline_s=2.0), store, 4) for n in (0, 1)]
    for run in runs:
        run.open()
    for _ in range(3):
        runs[0].train()
        runs[1].train()
    runs[1].weights.of["b"][2] = np.nan

    together([run.train for run in runs])

    assert [kind for kind, _ in runs[1].new_events] == ["contribution_refused"]
    assert np.isfinite(runs[1].flat).all()
    assert (runs[1].flat == runs[0].flat).all()


def test_what_is_no_longer_needed_is_removed_from_the_store() -> None:
    store = MemoryStore()
    changes = {"steps_per_round": 1, "rounds_kept": 2}
    trained(2, 12, store, **changes)

    states = {key.split("/")[2] for key in store.objects if "/states/" in key}
    bases = {key.split("/")[2] for key in store.objects if "/contributions/" in key}
    rounds = {key.split("/")[2] for key in store.objects if "/rounds/" in key}
    assert len(rounds) == 12
    assert len(states) <= 4
    assert len(bases) <= 6


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"quantization": "int8"}, "quantization"),
        ({"outer": {"lr": 0.5}}, "outer"),
        ({"fragments": 2}, "fragments"),
    ],
)
def test_islands_with_other_rules_are_refused(changes: dict[str, Any], name: str) -> None:
    store = MemoryStore()
    Island(island_config(0, 2), 8, FlatWeights(), store)

    with pytest.raises(OtherIslands, match=f"other {name}"):
        Island(island_config(1, 2, **changes), 8, FlatWeights(), store)


def test_islands_of_another_model_are_refused() -> None:
    store = MemoryStore()
    Island(island_config(0, 2), 8, FlatWeights(), store)

    with pytest.raises(OtherIslands, match="other weights"):
        Island(island_config(1, 2), 8, FlatWeights({"a": 7}), store)


def test_a_contribution_is_sent_after_an_outage_that_outlasts_all_patience() -> None:
    store = MemoryStore()
    view = FaultyStore(store, Faults(), 0)
    changes = {"request_s": 0.05, "deadline_s": 1.0, "absent_after": 1}
    run = Run(0, island_config(0, 1, **changes), view, 8)
    run.open()
    for _ in range(3):
        run.train()
    view.dead = True
    run.train()
    assert [kind for kind, _ in run.new_events] == ["round_lost"]

    view.dead = False
    run.to_the_end()

    *before, last = (one["islands/merged"] for one in run.figures)
    assert not any(before)
    assert last >= 1  # the round of the outage may be closed by itself, before the last one
    np.testing.assert_allclose(run.flat, data_parallel(1, 8, 0.1), atol=1e-6)


def test_another_process_of_a_rank_hears_that_the_first_contribution_counts() -> None:
    store = MemoryStore()
    changes = {"quorum": 2, "deadline_s": 0.05}
    run = Run(0, island_config(0, 2, **changes), store, 8)
    run.to_the_end()
    again = Run(0, island_config(0, 2, member="f" * 16, **changes), store, 8, lr=0.2)

    again.to_the_end()

    assert "contribution_kept" in [kind for kind, _ in again.new_events]
