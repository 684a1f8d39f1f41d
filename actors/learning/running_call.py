"""Users' functions in the trainer's step: a limit of time, and channels that are not ours.

A function is called in a thread, which cannot be ended. So whoever waits raises an error once
it is late, and the process is then ended by its owner, as after any error of a user's function.

Axes: B sequences of a microbatch, T their padded length.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from composer_mesh.actors.learning.update_pass import MicrobatchStates, TrainedChannel, UpdatePass
from composer_mesh.actors.models.language_model import padded
from composer_mesh.channels.port import ChannelRows, make_channel
from composer_mesh.configs.channels import ChannelConfig
from composer_mesh.configs.user_code import frame_of_stack
from composer_mesh.losses.custom_function import CustomFunctionError, Function, call_function
from composer_mesh.mesh.progress import made_progress

T = TypeVar("T")


class RunningCall:
    """The call of a user's function that is under way; each may take `limit_s`."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._called: tuple[str, float, int] | None = None

    def watched(self, function: Function, name: str) -> Function:
        """Return the function, which records here when it is called and returns."""

        @functools.wraps(function)
        def call(*inputs: Any, **kwargs: Any) -> Any:
            self._called = (name, self._clock(), threading.get_ident())
            try:
                return function(*inputs, **kwargs)
            finally:
                self._called = None
                made_progress(f"a call of {name}")

        return call

    def left_s(self) -> float:
        """Return the seconds until a call could be late: of the one under way, or of a next one."""
        called = self._called
        return self._limit_s - (0.0 if called is None else self._clock() - called[1])

    def check(self) -> None:
        """Raise `CustomFunctionError` if the call under way has exceeded its time."""
        called = self._called
        if called is not None and self._clock() - called[1] >= self._limit_s:
            running = sys._current_frames().get(called[2])
            raise CustomFunctionError(
                called[0],
                "",
                f"it did not return within {self._limit_s:g} s: look for a loop without end in it, "
                "or raise supervision.custom_function_s",
                "" if running is None else frame_of_stack(running),
            )

    async def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work that calls the function in a thread. Raises once a call is late."""
        working = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait([working], timeout=max(self.left_s(), 0.0))
                if done:
                    return working.result()
                self.check()
        finally:
            working.cancel()


class ForeignChannel(TrainedChannel):
    """Computes the loss of a channel that a section of [channels] names; `custom` observes it."""

    def __init__(
        self, name: str, section: ChannelConfig, temperature: float, custom: RunningCall
    ) -> None:
        self.name, self._path, self._temperature = name, section.import_path, temperature
        self._channel = make_channel(name, section)
        self._loss = custom.watched(self._channel.loss, self._path)

    def term(self, states: MicrobatchStates, /) -> Tensor | None:
        """Return the loss of a microbatch's samples of the channel; None without any."""
        one, hidden = states.one, states.of_samples
        own = {sample.trace_id: sample.values for sample in one.batch.channels.get(self.name, ())}
        samples = states.samples
        if hidden is None or not any(sample.trace_id in own for sample in samples):
            return None
        device = hidden.computed.device
        rows = [own.get(sample.trace_id, [0.0] * len(sample.ids)) for sample in samples]
        values = padded(rows).float()[:, 1:].to(device)
        ids = padded([sample.ids for sample in samples]).to(device)
        logprobs = one.model.logprobs(hidden, ids, values != 0, self._temperature)
        inputs = ChannelRows(ids, values, logprobs)
        loss, figures = self._checked(call_function(self._loss, self._path, "loss", inputs, {}))
        normalizer = self._normalizer(one)
        for name, figure in figures.items():
            value = call_function(float, self._path, f"figure {name!r}", figure, {})
            one.sums.figures[f"{self.name}/{name}"] += value / normalizer
        return loss / normalizer

    def _normalizer(self, one: UpdatePass) -> float:
        samples = one.batch.channels[self.name]
        found = call_function(self._channel.normalizer, self._path, "normalizer", samples, {})
        if not (isinstance(found, int | float) and found > 0):
            raise CustomFunctionError(
                self._path, "normalizer", f"it returned {found}: return a number above 0"
            )
        return found

    def _checked(self, found: object) -> tuple[Tensor, Mapping[str, float | Tensor]]:
        match found:
            case (torch.Tensor() as loss, Mapping() as figures) if (
                loss.numel() == 1 and loss.requires_grad
            ):
                return loss.reshape(()), figures
        raise CustomFunctionError(
            self._path,
            "loss",
            f"it returned {type(found).__name__}: return a scalar tensor with a gradient, and a "
            "dict of figures",
        )
