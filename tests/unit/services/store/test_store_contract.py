"""Every implementation of the store's ports keeps their contract: the fakes, and `RunStore`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_store import FakeStore
from stored_runs import group_of, pair_of

from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.steps.step_manifest import StepManifest, manifest_to_json
from composer_mesh.services.store.writing import RunStore

OLDEST = 3
"""The age at which a pair is still trained."""


@pytest.fixture(params=["fake", "RunStore"])
def store(request: Any, tmp_path: Path, build_config: Any) -> Iterator[Any]:
    if request.param == "fake":
        yield FakeStore()
        return
    with RunStore(tmp_path, build_config()) as store:
        yield store


def names(pairs: list[PreferencePair]) -> list[str]:
    return [pair.pair_id for pair in pairs]


async def plan(store: Any, step: int, group: int, pairs: Sequence[str] = ()) -> None:
    manifest = StepManifest(step, (group,), tuple(pairs))
    await store.plan_step(step, [group], manifest_to_json(manifest), pairs, OLDEST)


async def test_a_group_is_stored_once_and_told_again_as_it_was_first(store: Any) -> None:
    store.enter(0, 1)
    first = group_of(0, size=2)
    assert await store.add_group(0, first) == first
    assert await store.add_group(0, group_of(0, size=3)) == first
    assert await store.add_group(1, []) == []
    assert await store.add_group(1, group_of(1)) == []


async def test_only_the_pairs_that_are_new_are_told_and_wait(store: Any) -> None:
    old, new = pair_of(0, "a"), pair_of(0, "b")
    assert names(await store.add_teacher_queries(0, b"{}", [old])) == names([old])
    assert names(await store.add_teacher_queries(0, b"{}", [old, new])) == names([new])
    taken, expired = await store.take_pairs(0, OLDEST, 8)
    assert (names(taken), expired) == (names([old, new]), 0)


async def test_taking_pairs_changes_nothing_until_a_step_is_planned_with_them(store: Any) -> None:
    await store.add_group(0, group_of(0))
    pairs = [pair_of(group, version=group) for group in range(3)]
    for group, pair in enumerate(pairs):
        await store.add_teacher_queries(group, b"{}", [pair])
    for _ in range(2):
        taken, expired = await store.take_pairs(OLDEST + 1, OLDEST, 1)
        assert (names(taken), expired) == (names(pairs[1:2]), 1)
    await plan(store, OLDEST + 1, 0, names(pairs[1:2]))
    taken, expired = await store.take_pairs(OLDEST + 1, OLDEST, 8)
    assert (names(taken), expired) == (names(pairs[2:]), 0)


async def test_a_step_cannot_take_a_group_that_is_not_finished_or_taken(store: Any) -> None:
    await store.add_group(0, group_of(0))
    await plan(store, 0, 0)
    for group in (0, 7):
        with pytest.raises(ValueError, match="cannot train it"):
            await plan(store, 1, group)


async def test_what_is_queued_and_awaited_is_taken_in_any_order(store: Any) -> None:
    store.add_evaluation(Evaluation(0, 0.5, 4))
    await store.add_group(0, group_of(0))
    await store.add_worded(0, b"{}")
    await plan(store, 0, 0)
    await store.end_step(0, {"step": 1, "loss/total": 0.5})
    assert all(seconds >= 0 for seconds in store.waits().values())
