"""The port of a channel: what one that is not ours adds to each step, named in [channels.NAME].

    rollouts of a step -> samples -> loss of the policy's log-probs at their values -> / normalizer

A channel trains ids of the step's own rollouts, in the forward that the policy's samples have. Its
weight, its schedule and the bounds of its share are keys of its section; see docs/channels.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from composer_mesh.configs import plugins
from composer_mesh.configs.channels import ChannelConfig
from composer_mesh.losses.custom_function import (
    CustomFunctionError,
    call_function,
    check_signature,
    load_function,
)
from composer_mesh.losses.reductions import Number
from composer_mesh.rollouts.batches import ChannelSample
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.traces import Trace


@dataclass(frozen=True)
class ChannelRows:
    """A channel's samples in one microbatch. Axes: B sequences, T their padded length.

    `values` are those of the samples, and `logprobs` the policy's at its temperature, 0 where a
    value is 0; position t of both is about the id at t + 1.
    """

    ids: Int[Tensor, "B T"]
    values: Float[Tensor, "B T-1"]
    logprobs: Float[Tensor, "B T-1"]


class Channel(ABC):
    """A part of the loss of each step.

    `name` is that of the section, and its `kwargs` are further arguments of the constructor.
    """

    chat: ChatFormat | None = None
    """How the run's conversations are tokenized, where `samples` is called."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def samples(self, traces: Sequence[Trace]) -> Iterable[ChannelSample]:
        """Return what the channel trains of the trajectories of a step; it may leave some out.

        It depends on nothing but the traces: a step that is trained again has the same samples.
        """

    @abstractmethod
    def loss(self, rows: ChannelRows) -> tuple[Tensor, Mapping[str, float | Tensor]]:
        """Return the loss of some rows, and figures by name: sums, which the trainer divides."""

    def normalizer(self, samples: Sequence[ChannelSample]) -> Number:
        """Return what loss and figures of an update are divided by: its values other than 0."""
        return sum(value != 0 for sample in samples for value in sample.values[1:])


def make_channel(name: str, section: ChannelConfig) -> Channel:
    """Import and make the channel of a section; raises `CustomFunctionError`."""
    path = plugins.find("channels", section.import_path) or section.import_path
    made = load_function(path)
    check_signature(made, path, section.kwargs, given="name")
    channel = call_function(made, path, "", name, section.kwargs)
    if not isinstance(channel, Channel):
        raise CustomFunctionError(
            path,
            "",
            f"it made a {type(channel).__name__}, which is not a channel: derive it from "
            "composer_mesh.Channel",
        )
    return channel


def samples_of(channel: Channel, path: str, traces: Sequence[Trace]) -> list[ChannelSample]:
    """Return a channel's samples, checked; raises `CustomFunctionError`."""
    lengths = {trace.trace_id: len(trace.token_ids()) for trace in traces}
    found = call_function(lambda of: list(channel.samples(of)), path, "samples", traces, {})
    for sample in found:
        length = lengths.pop(sample.trace_id, None)
        if length is None:
            problem = f"a sample is of {sample.trace_id!r}: give one at most for each trace"
        elif len(sample.values) != length:
            problem = (
                f"the sample of {sample.trace_id} has {len(sample.values)} values for {length} "
                "ids: give one for each, 0 where nothing is trained"
            )
        elif not all(map(math.isfinite, sample.values)):
            problem = f"the sample of {sample.trace_id} has values that are not finite: remove them"
        else:
            continue
        raise CustomFunctionError(path, "samples", problem)
    return [sample for sample in found if any(sample.values[1:])]
