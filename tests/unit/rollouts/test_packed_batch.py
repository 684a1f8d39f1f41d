"""A batch for several ranks is pickled once, beside other work, and arrives as it was."""

from __future__ import annotations

import asyncio
import pickle
import random
from typing import Any

from step_batches import batch_of

from composer_mesh.rollouts.batches import PolicySample, StepBatch
from composer_mesh.rollouts.packing import TURN_BYTES, PackedBatch


async def test_a_batch_arrives_as_it_was(build_model: Any) -> None:
    batch = batch_of(build_model(1), random.Random(3), samples=5, pairs=3)
    assert batch.views
    packed = pickle.loads(pickle.dumps(await PackedBatch.of(batch)))
    assert packed.unpack() == batch


async def test_the_event_loop_goes_on_while_a_large_batch_is_packed() -> None:
    ids = list(range(TURN_BYTES // 4))
    sample = PolicySample("t", ids, [True] * len(ids), [0.5] * len(ids), 1.0, [3] * len(ids))
    packing = asyncio.create_task(PackedBatch.of(StepBatch(0, [sample] * 4, [], [])))
    turns = 0
    while not packing.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 4


async def test_a_message_to_a_rank_copies_bytes_and_no_lists() -> None:
    """So a message costs the same objects whatever the samples hold."""
    ids = list(range(1000))
    sample = PolicySample("t", ids, [True] * 1000, [0.5] * 1000, 1.0, [3] * 1000)
    packed = await PackedBatch.of(StepBatch(0, [sample], [], []))
    assert packed.rest.samples == []
    assert [type(piece) for piece in packed.samples] == [bytes]
