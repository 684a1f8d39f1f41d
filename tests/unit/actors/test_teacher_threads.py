"""The SDPO teacher actor copies weights beside its event loop, and no forward sees half of them."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_mesh.actors.sdpo_teacher import SDPOTeacherActor
from composer_mesh.mesh.weights.choice import Transport
from composer_mesh.mesh.weights.manifest import PublisherGone
from composer_mesh.mesh.weights.receiver import WeightReceiver

LONG_ENOUGH_S = 0.05
"""What something that should wait, and does not, is given to show it."""
PATIENCE_S = 10.0
"""What a loop that stands still is given before the copy ends all the same."""


class Script:
    """A teacher and a receiver whose copies take until `may_end`."""

    version = 3

    def __init__(self) -> None:
        self.log: list[str] = []
        self.copying, self.may_end = threading.Event(), threading.Event()
        self.models = [self]

    def copy(self, *_: Any) -> None:
        self.log.append("copying")
        self.copying.set()
        self.log.append("copied" if self.may_end.wait(PATIENCE_S) else "the loop stood still")

    apply = absorb = restore = copy

    def average(self) -> dict[str, torch.Tensor]:
        self.copy()
        return {}

    def teacher_output(self, *_: Any) -> dict[str, torch.Tensor]:
        self.log.append("forward")
        raise LookupError("no teacher_output is needed here")

    async def receive(self, _handle: Any) -> Script:
        return self

    def abandon(self) -> None:
        """Nothing is on its way."""


class Handle:
    """Of version 4."""

    version = 4


class ScriptedTeacher(SDPOTeacherActor):
    """A teacher without a model."""

    def __init__(self, script: Any) -> None:
        super().__init__()
        self._loaded = self._receiver = script
        self._slots: Any = self
        self._follows = True

    def _average_at(self, file: Path | None) -> Any:
        return {}

    async def acquire(self, _step: int) -> int:
        return 0

    async def release(self, _ticket: int) -> None:  # type: ignore[override]
        """Nothing is held."""

    def ask(self, endpoint: str, *args: Any) -> asyncio.Task[Any]:
        """Call an endpoint as a message would, without a mesh."""
        work = inspect.unwrap(getattr(SDPOTeacherActor, endpoint)._method)
        return asyncio.create_task(work(self, *args))


@pytest.fixture
async def script() -> AsyncIterator[Script]:
    script = Script()
    yield script
    script.may_end.set()


@pytest.mark.parametrize(
    ("endpoint", "args"),
    [
        ("pull", (Handle(),)),
        ("adopt", ([Handle()],)),
        ("keep", ()),
        ("restore", (3, None)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_weights_are_copied_beside_the_loop_and_a_forward_waits_for_all_of_them(
    script: Script, endpoint: str, args: tuple[Any, ...]
) -> None:
    teacher = ScriptedTeacher(script)
    copying = teacher.ask(endpoint, *args)
    assert await asyncio.to_thread(script.copying.wait, PATIENCE_S)
    reading = teacher.ask("teacher_output", 0, [])
    await asyncio.wait([reading], timeout=LONG_ENOUGH_S)
    assert script.log == ["copying"]
    script.may_end.set()
    await copying
    with pytest.raises(LookupError):
        await reading
    assert script.log == ["copying", "copied", "forward"]


async def test_a_copy_that_nobody_waits_for_any_more_still_keeps_forwards_out(
    script: Script,
) -> None:
    teacher = ScriptedTeacher(script)
    copying = teacher.ask("pull", Handle())
    assert await asyncio.to_thread(script.copying.wait, PATIENCE_S)
    copying.cancel()
    reading = teacher.ask("teacher_output", 0, [])
    await asyncio.wait([reading], timeout=LONG_ENOUGH_S)
    assert script.log == ["copying"]
    script.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    with pytest.raises(LookupError):
        await reading
    assert script.log == ["copying", "copied", "forward"]


async def test_a_published_average_is_gone_once_its_state_is_released() -> None:
    script = Script()
    script.models = [torch.nn.Linear(2, 2)]  # type: ignore[list-item]
    teacher = ScriptedTeacher(script)
    teacher._publishers, teacher._transport = [], Transport("shm")
    (handle,) = await teacher.ask("state")
    await WeightReceiver().receive(handle)
    await teacher.ask("release_state")
    with pytest.raises(PublisherGone):
        await WeightReceiver().receive(handle)
