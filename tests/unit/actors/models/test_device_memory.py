"""Processes that take turns on a device: memory is freed for real, and comes back bit for bit."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_requests import ask, put, serve
from fake_host import turns
from optimizer_runs import batches, config, write_policy
from torch import Tensor

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.device_memory import Asleep, DeviceMemory, DeviceTurn, slices
from composer_mesh.actors.models.optimizer_state import plain
from composer_mesh.actors.models.policy import load_model
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import local, stored_weights

CPU = torch.device("cpu")


def held(tensors: list[Tensor]) -> int:
    return sum(part.untyped_storage().nbytes() for one in tensors for part in plain(one))


def test_tensors_keep_their_bits_views_and_holders_while_their_memory_is_gone() -> None:
    whole = torch.randn(6, 4)
    tied, rows, gone, nothing = whole, whole[2:5], torch.randn(3), torch.empty(0)
    before, memory = whole.clone(), DeviceMemory(CPU)
    for _ in range(2):
        memory.release([whole, tied, nothing], constant=[rows], replaced=[gone])
        assert (held([whole, gone]), memory.released) == (0, True)
        memory.restore()
        assert torch.equal(whole, before)
        assert rows.data_ptr() == whole[2:5].data_ptr()
        assert gone.shape == (3,)
        assert held([gone]) == 12


def test_pages_of_a_file_are_given_up_too(build_model: Any, tmp_path: Path) -> None:
    build_model(1).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    weights = list(stored_weights(model).values())
    before, memory = [one.clone() for one in weights], DeviceMemory(CPU)
    memory.release(weights)
    assert held(weights) == 0
    memory.restore()
    assert all(torch.equal(*pair) for pair in zip(weights, before, strict=True))


def test_pinned_memory_is_one_block_of_whole_pages_cut_into_parts_that_do_not_overlap() -> None:
    blocks: list[Tensor] = []
    sizes = [5, 256, 1, 1000]
    parts = slices(sizes, blocks.append)
    (block,) = blocks
    assert block.data_ptr() % 4096 == 0
    assert [one.numel() for one in parts] == sizes
    for number, one in enumerate(parts):
        one.fill_(number + 1)
    assert [int(one.sum()) for one in parts] == [(n + 1) * size for n, size in enumerate(sizes)]
    assert slices([], blocks.append) == []


KINDS: list[dict[str, Any]] = [
    {},
    {"optimizer_offload": True},
    {"optimizer": "muon"},
    {"lora": {"rank": 2}},
    {"sharding": "fsdp2"},
]


@pytest.mark.parametrize("trainer", KINDS, ids=["adamw", "offloaded", "muon", "lora", "fsdp2"])
def test_a_trainer_that_slept_between_steps_trains_bit_for_bit_as_one_that_did_not(
    tmp_path: Path, trainer: dict[str, Any]
) -> None:
    steps = batches(write_policy(tmp_path), 3)
    awake, sleepy = (Learner(config(**trainer), tmp_path, Ranks()) for _ in range(2))
    for batch in steps:
        expected = awake.train(batch, None)
        assert sleepy.train(batch, None) == expected
        sleepy.set_awake(False)
        sleepy.set_awake(False)
        on_device = [*sleepy.model.parameters(), *sleepy.step.device_state()]
        assert held(on_device) == 0
        assert all(one.grad is None for one in sleepy.model.parameters())
        again = partial(sleepy.train, batch, None)
        for work in (sleepy.published, sleepy.copy, again):
            with pytest.raises(Asleep, match="while the process is asleep"):
                work()
        sleepy.set_awake(True)
        sleepy.set_awake(True)
    state = sleepy.step.optimizer_state()
    assert state
    for name, one in awake.step.optimizer_state().items():
        assert torch.equal(local(one), local(state[name]))
    for name, one in awake.export().items():
        assert torch.equal(local(one), local(sleepy.export()[name]))


class Plain:
    """Weights that replace all that an engine serves."""

    def __init__(self, version: int, state: dict[str, Tensor]) -> None:
        self.version, self.state = version, state

    def apply(self, model: Any, rate: float = 1.0) -> None:
        model.load_state_dict(self.state)


@pytest.mark.parametrize("replaced", [False, True])
def test_an_engine_that_slept_amid_requests_answers_as_one_that_took_new_weights(
    build_model: Any, replaced: bool
) -> None:
    """Their keys are computed again, as after an update, so that log-probs may differ slightly."""
    prompts = [ask(f"r{at}", list(range(1, 4 + 7 * at)), new=9, seed=at) for at in range(3)]
    newer = {name: one.clone() for name, one in build_model(2).state_dict().items()}
    found = []
    for sleeps in (True, False):
        engine = EmbeddedEngine(build_model(1), rows=4, length=64)
        results: dict[str, Any] = {}
        put(engine, prompts, results)
        for _ in range(3):
            engine.step()
        weights: Any = Plain(1, newer) if replaced else None
        if sleeps:
            engine.sleep(set(newer) if replaced else ())
            model = engine._model
            assert held([*model.parameters(), *engine._cache._whole]) == 0
            engine.wake(weights)
        elif replaced:
            engine.swap(weights)
        while engine.busy:
            engine.step()
        found.append(results)
    for name, result in found[0].items():
        other = found[1][name]
        assert (result.token_ids, result.versions) == (other.token_ids, other.versions)
        assert result.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_closed_batch_of_an_engine_that_slept_is_the_same_bit_for_bit(build_model: Any) -> None:
    engine = EmbeddedEngine(build_model(1), rows=4, length=64)
    prompts = [ask(f"r{at}", list(range(1, 30 + at)), new=6, seed=at) for at in range(3)]
    first = serve(engine, prompts)
    engine.sleep(())
    engine.wake(None)
    assert serve(engine, prompts) == first


async def test_work_waits_for_its_turn_and_a_turn_for_running_work() -> None:
    turn, done = DeviceTurn(awake=False), list[str]()

    async def work(name: str, until: asyncio.Event) -> None:
        async with turn:
            await until.wait()
            done.append(name)

    go_on = asyncio.Event()
    waiting = asyncio.ensure_future(work("first", go_on))
    await turns()
    await turn.set_awake(True, lambda: done.append("awake"))
    await turn.set_awake(True, lambda: done.append("again"))
    await turns()
    ending = asyncio.ensure_future(turn.set_awake(False, lambda: done.append("asleep")))
    later = asyncio.ensure_future(work("later", go_on))
    await turns()
    go_on.set()
    await asyncio.gather(waiting, ending)
    assert done == ["awake", "first", "asleep"]
    assert not later.done()
    await turn.set_awake(True, lambda: None)
    await later
    assert done[-1] == "later"


async def test_a_turn_that_cannot_be_taken_says_why_and_may_be_tried_again() -> None:
    turn = DeviceTurn(awake=False)

    def fail() -> None:
        raise MemoryError("8.00 GB are to be restored")

    with pytest.raises(MemoryError, match="are to be restored"):
        await turn.set_awake(True, fail)
    await turn.set_awake(True, lambda: None)
    async with turn:
        pass
