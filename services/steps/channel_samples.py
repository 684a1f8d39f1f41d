"""Samples of the channels that are not ours, from a step's rollouts, within a time limit.

They are computed in the thread that builds the step. One that does not return ends the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from composer_mesh.channels.port import make_channel, samples_of
from composer_mesh.configs.schema import Config
from composer_mesh.losses.custom_function import CustomFunctionError
from composer_mesh.mesh.waiting import in_background
from composer_mesh.rollouts.batches import ChannelSample
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.traces import Trace


class ChannelSamples:
    """The channels that the config names and that are on."""

    def __init__(self, config: Config, chat: ChatFormat) -> None:
        """Import them; raises `CustomFunctionError`."""
        self._limit_s = config.supervision.custom_function_s
        self._channels = {
            name: (make_channel(name, section), section.import_path)
            for name, section in config.channels.items()
            if section.on
        }
        for channel, _ in self._channels.values():
            channel.chat = chat

    def of(self, traces: Sequence[Trace]) -> Mapping[str, Sequence[ChannelSample]]:
        """Return the samples of some trajectories by channel. Waits for each channel.

        Raises `CustomFunctionError`, also for a channel that takes too long.
        """
        found = {}
        for name, (channel, path) in self._channels.items():
            working = in_background(partial(samples_of, channel, path, traces))
            try:
                found[name] = working.result(self._limit_s)
            except TimeoutError:
                raise CustomFunctionError(
                    path,
                    "samples",
                    f"it did not return within {self._limit_s:g} s: look for a loop without end "
                    "in it, or raise supervision.custom_function_s",
                ) from None
        return found
