"""Masks of prefix trees: what each position sees, densely and in the blocks of FlexAttention."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from repetition import crossed
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from composer_mesh.actors.models.hidden_states import shared_states
from composer_mesh.actors.models.tree_masks import BLOCK, Chunk, Reach, Windows
from composer_mesh.rollouts.prefix_tree import ONE_ROW, Node, PrefixTree

FULL: Windows = {"full_attention": None}


def masks_of(tree: PrefixTree, windows: Windows, blocks: bool) -> list[Any]:
    """The masks with which a tree's levels are computed, None where a level needs none."""
    found: list[Any] = []

    def states_of(input_ids: Tensor, attention_mask: Any = None, **inputs: Any) -> Tensor:
        found.append(attention_mask)
        if "cache" in inputs:  # as a layer would
            keys = torch.zeros(len(input_ids), 1, input_ids.shape[1], 1)
            inputs["cache"].update(keys, keys, 0)
        return input_ids[..., None].float()

    shared_states(states_of, tree, torch.device("cpu"), windows, blocks)
    return found


def branching(rng: random.Random, depth: int) -> list[list[int]]:
    stem = [rng.randrange(3) for _ in range(rng.randrange(1, 150))]
    if depth == 0:
        return [stem]
    return [stem + rest for _ in range(rng.randrange(1, 4)) for rest in branching(rng, depth - 1)]


def expected(tree: PrefixTree, reach: Reach) -> Tensor:
    """What each column of a one-row tree sees, from the nodes before its own."""
    (level,) = tree.levels
    seen = torch.zeros(level.width, level.width, dtype=torch.bool)

    def columns(node: Node) -> list[int]:
        return [*range(node.column, node.column + len(node.ids))]

    for node in level.nodes:
        path = [column for one in [*node.ancestors()][::-1] for column in columns(one)]
        for column in columns(node):
            path.append(column)
            if isinstance(reach, Chunk):
                seen[column, path[(len(path) - 1) // reach.size * reach.size :]] = True
            else:
                seen[column, path[-reach:] if reach else path] = True
    return seen


@pytest.mark.parametrize(
    ("seed", "reach"),
    crossed(range(4), [None, 1, 40, 300, Chunk(1), Chunk(40), Chunk(300)]),
)
def test_a_position_sees_its_path_back_to_its_window_or_chunk(seed: int, reach: Reach) -> None:
    rng = random.Random(seed)
    tree = PrefixTree.of(
        [one for _ in range(2) for one in branching(rng, 1 + seed % 3)], 1, ONE_ROW
    )
    wanted = expected(tree, reach)
    (dense,) = masks_of(tree, {"sliding_attention": reach}, blocks=False)
    assert torch.equal(dense[0, 0], wanted)
    (blocks,) = masks_of(tree, {"sliding_attention": reach}, blocks=True)
    assert torch.equal(seen_by_kernel(blocks), wanted)


@pytest.mark.parametrize("window", [None, 40])
def test_a_kernel_is_given_no_number_of_more_than_32_bits(window: int | None) -> None:
    """Compiled with dynamic sizes it takes numbers as 32 bits, and 2 ** 40 became 0."""
    tree = PrefixTree.of(branching(random.Random(0), 2), 1, ONE_ROW)
    (mask,) = masks_of(tree, {"sliding_attention": window}, blocks=True)
    numbers = [one for one in closed_over(mask.mask_mod) if isinstance(one, int)]
    assert all(abs(number) < 2**31 for number in numbers)
    assert (window in numbers) == (window is not None)


def closed_over(function: Any) -> list[Any]:
    found = [cell.cell_contents for cell in function.__closure__ or ()]
    return found + [one for inner in found if callable(inner) for one in closed_over(inner)]


def seen_by_kernel(mask: BlockMask) -> Tensor:
    """What a kernel computes: all of full blocks, and what is visible of partial ones."""
    length = mask.seq_lengths[0]
    visible = create_mask(mask.mask_mod, 1, None, length, length, device="cpu")[0, 0]
    some, every = (
        named(counts[0, 0], indices[0, 0])
        for counts, indices in (
            (mask.kv_num_blocks, mask.kv_indices),
            (mask.full_kv_num_blocks, mask.full_kv_indices),
        )
    )
    assert not (some & every).any()
    wide = [one.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1) for one in (some, every)]
    partial, full = (one[:length, :length] for one in wide)
    return full | (partial & visible)


def named(counts: Tensor, indices: Tensor) -> Tensor:
    chosen = torch.zeros(indices.shape, dtype=torch.bool)
    for row, count in enumerate(counts.tolist()):
        chosen[row, indices[row, :count].long()] = True
    return chosen


def test_a_group_names_few_blocks_beside_those_that_are_needed() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(1000) for _ in range(2048)]
    group = [[*prompt, *(rng.randrange(1000) for _ in range(256))] for _ in range(8)]
    tree = PrefixTree.of(group, 1, ONE_ROW)
    (mask,) = masks_of(tree, FULL, blocks=True)
    length, blocks = tree.levels[0].width, -(-tree.levels[0].width // BLOCK)
    wide = torch.zeros(blocks * BLOCK, blocks * BLOCK, dtype=torch.bool)
    wide[:length, :length] = expected(tree, None)
    needed = wide.view(blocks, BLOCK, blocks, BLOCK).any(-1).any(1).sum()
    taken = mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()
    assert needed <= taken <= 1.02 * needed
    assert taken < 0.6 * blocks * (blocks + 1) / 2 * 8  # dense rows: eight triangles of the prompt


@pytest.mark.parametrize("blocks", [False, True])
def test_layers_of_each_kind_get_their_own_mask_where_windows_differ(blocks: bool) -> None:
    tree = PrefixTree.of([[*range(30), last] for last in range(3)], 1, ONE_ROW)
    windows = {"full_attention": None, "sliding_attention": 8}
    (masks,) = masks_of(tree, windows, blocks)
    assert masks.keys() == windows.keys()
    assert masks["full_attention"] is not masks["sliding_attention"]
    wide = {"full_attention": None, "sliding_attention": 4096}
    assert not isinstance(masks_of(tree, wide, blocks)[0], dict)


def test_a_level_of_equal_paths_has_one_mask_for_all_rows() -> None:
    prompt = [*range(100)] * 2
    tree = PrefixTree.of(
        [[*prompt, *[200 + last] * (28 + last)] for last in range(4)], row_capacity=0
    )
    first, second = masks_of(tree, FULL, blocks=False)
    assert first is None
    assert tree.levels[1].rows == 4
    assert second.shape == (1, 1, 31, 231)
