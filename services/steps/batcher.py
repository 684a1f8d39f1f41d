"""Builds one step's batch from finished groups: advantages, hinted views, pairs.

A sample with advantage 0 is left out where nothing but its policy loss, which is 0, would need its
forward. Pure; the order of everything in a batch depends only on its groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from operator import attrgetter

from composer_mesh.channels.policy import (
    policy_sample,
    without_aged,
    without_zero_advantages,
)
from composer_mesh.channels.port import make_channel, samples_of
from composer_mesh.channels.replay import pair_samples
from composer_mesh.channels.sdpo import HintedSites, hinted_sites
from composer_mesh.configs.schema import Config
from composer_mesh.losses.custom_function import CustomFunctionError
from composer_mesh.mesh.waiting import in_background
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import ChannelSample, PolicySample, Skipped, StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.steps.advantages import Advantages, trajectory_advantages
from composer_mesh.services.steps.hint_writing import WrittenHints
from composer_mesh.tasks.task import Task


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


@dataclass(frozen=True)
class Batcher:
    """Packs the samples of the loss channels into steps.

    `report` is called with the reason of a hint that could not be written.
    """

    config: Config
    task: Task
    chat: ChatFormat
    advantages: Advantages
    report: Callable[[str], object]

    def batch(
        self,
        step: int,
        groups: Sequence[Sequence[Trace]],
        pairs: Sequence[PreferencePair],
        worded: WrittenHints | None = None,
        corrections: Sequence[PolicySample] = (),
        agreement: float | None = None,
    ) -> StepBatch:
        """Return the batch of a step, with the hint writer's texts where there are any.

        A channel that is off gets no samples. `corrections` are samples of earlier steps' rollouts;
        `agreement` is that of the teachers' majority with the student.
        """
        most, weight = self.config.policy.max_context, self.config.replay.weight_pairs_by
        packed = pair_samples(pairs, self.chat, most, weight)
        oldest = self.config.schedule.oldest_trained(step)
        worded = worded or WrittenHints()
        sites = self._sites(groups, worded, oldest) if self.config.sdpo.on else None
        views, counts = (sites.views, sites.counts) if sites else ([], None)
        every = [one for group in groups for trace in group for one in trace.trajectories()]
        channels = self._channels.of([one for one in every if one.turns])
        others: list[HintedView | ChannelSample] = [*views]
        others += (one for found in channels.values() for one in found)
        samples = [*self._samples(every, groups), *corrections]
        if oldest is not None:
            samples = [without_aged(one, oldest) for one in samples]
        samples, skipped = self._needed(samples, others)
        success = _success(groups)
        return StepBatch(
            *(step, samples, views, packed, counts, skipped, success, agreement, channels),
            oldest=oldest,
        )

    @cached_property
    def _channels(self) -> ChannelSamples:
        return ChannelSamples(self.config, self.chat)

    def _needed(
        self, samples: list[PolicySample], others: Sequence[HintedView | ChannelSample]
    ) -> tuple[list[PolicySample], Skipped]:
        """Return the samples that the trainer computes, and the count of the others."""
        config = self.config
        if config.loss.trains_zero_advantages or config.logprob_mismatch.all_tokens:
            return samples, Skipped()
        return without_zero_advantages(samples, others)

    def _sites(
        self, groups: Sequence[Sequence[Trace]], worded: WrittenHints, oldest: int | None
    ) -> HintedSites:
        # Iterates sample by sample over the groups, so that each prompt gets its share of the
        # views.
        found = [trace for row in zip_longest(*groups) for trace in row if trace is not None]
        spread = [one for trace in found for one in trace.trajectories()]
        sites = hinted_sites(
            spread,
            self.chat,
            attrgetter("answer"),
            self.config.sdpo.max_sites_per_step,
            self.config.policy.max_context,
            self.config.sdpo.hints,
            worded.written,
            self.task.hint_templates,
            self.config.sdpo,
            oldest,
        )
        for reason in sites.counts.faults:
            self.report(reason)
        sites.counts.requests, sites.counts.usd = worded.requests, worded.usd
        return sites

    def _samples(
        self, every: Sequence[Trace], groups: Sequence[Sequence[Trace]]
    ) -> list[PolicySample]:
        self._refuse_turn_advantages(every)
        found = trajectory_advantages(self.advantages, groups)
        return [policy_sample(one, found[one.trace_id]) for one in every if one.turns]

    def _refuse_turn_advantages(self, traces: Sequence[Trace]) -> None:
        """Raise ValueError where a workflow gives turns advantages that the loss cannot take."""
        reason = self.config.loss.refuses_turn_advantages
        stated = next((one for one in traces if one.turn_advantages), None)
        if reason and stated is not None:
            raise ValueError(
                f"the workflow gave {stated.trace_id} turn_advantages, but {reason}, or give one "
                "advantage"
            )


def _success(groups: Sequence[Sequence[Trace]]) -> float | None:
    """Return the share of rollouts that succeeded; None without any."""
    found = [trace.success for group in groups for trace in group]
    return sum(found) / len(found) if found else None
