"""Channels that are not ours, in the trainer's step: their loss on the microbatches' log-probs.

Axes: B sequences of a microbatch, T their padded length.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from composer_mesh.actors.learning.running_call import RunningCall
from composer_mesh.actors.learning.update_pass import MicrobatchStates, TrainedChannel, UpdatePass
from composer_mesh.actors.models.language_model import padded
from composer_mesh.channels.port import ChannelRows, make_channel
from composer_mesh.configs.channels import ChannelConfig
from composer_mesh.losses.custom_function import CustomFunctionError, call_function


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
