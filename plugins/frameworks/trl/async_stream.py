"""Groups of episodes played for TRL's AsyncGRPOTrainer: as many as it can train in time.

Finished rollouts are its samples, in the queue that it takes them from. Knows neither the mesh nor
the trainer. Needs the extra `trl`.

Why no sample is too old when it is taken: a group enters only while all rollouts that are played
or wait, its own included, are at most `max_staleness` steps' worth of samples, and groups are
handed over in the order of their entry. So less than S * N samples are taken between the entry of
a rollout and its own taking (S: `max_staleness`, N: samples of a step). The trainer takes N samples
between two weight syncs, so at most S syncs are in between. Its tokens are of the version that was
served at its entry or of later ones. Where steps take fewer samples than N, as with a
`token_budget`, a sample can be too old: then `RolloutBuffer` drops it.
"""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.supervision import MeshError
from composer_mesh.mesh.waiting import in_thread
from composer_mesh.plugins.frameworks.trl.rollouts import logprobs_of
from composer_mesh.rollouts.traces import Trace, equal_rewards
from composer_mesh.services.episodes.rollout import EpisodeRetries
from composer_mesh.services.schedule.groups import Groups
from composer_mesh.services.schedule.step_builder import Group
from composer_mesh.services.steps.advantages import compared_with_each_other

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

Figures = dict[str, float | tuple[float, float]]
"""What TRL logs: a number, or a numerator and a denominator that are summed before they divide."""
EPSILON = 1e-8
"""What TRL adds to the standard deviation of a group's rewards."""


class RolloutBuffer(queue.Queue["RolloutSample"]):
    """The queue that TRL's trainer takes samples from, which drops those that are too old by then.

    `model_version` is the version that the trainer trains. A sample more than `max_staleness`
    versions older is dropped and counted in `dropped`. `taken` is called after each sample that
    has left the queue, in the thread that takes it.
    """

    def __init__(self, max_staleness: int, taken: Callable[[], None]) -> None:
        super().__init__()
        self.model_version = self.dropped = 0
        self._max_staleness, self._taken = max_staleness, taken

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """Return the next sample that is not too old. Waits as `queue.Queue` does."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            sample = super().get(block, left)
            self._taken()
            if self.model_version - sample.model_version <= self._max_staleness:
                return sample
            self.dropped += 1


def advantages_of(rewards: Sequence[float]) -> tuple[list[float], float]:
    """Return the advantages of a group, and the standard deviation of its rewards, as TRL does.

    A reward that is NaN is left out and has the advantage 0; so have all where rewards are equal.
    """
    found = np.array(rewards, dtype=float)
    advantages, scored = np.zeros_like(found), ~np.isnan(found)
    if not scored.any():
        return advantages.tolist(), math.nan
    known = found[scored]
    advantages[scored] = (known - known.mean()) / (known.std() + EPSILON)
    return advantages.tolist(), float(known.std())


def group_samples(group_id: int, traces: Sequence[Trace]) -> list[RolloutSample]:
    """Return a group's samples: one for each trajectory with a trained token.

    `model_version` is the version of a trajectory's oldest token. A screened one has no reward.
    """
    advantages, deviations = dict[str, float](), dict[str, float]()
    for compared in compared_with_each_other(traces):
        values, deviation = advantages_of([_reward(one) for one in compared])
        advantages |= {one.trace_id: value for one, value in zip(compared, values, strict=True)}
        deviations |= {one.trace_id: deviation for one in compared}
    rows = [one for trace in traces for one in trace.trajectories()]
    uses_tools = any(any(_calls(one)) for one in rows)
    found = []
    for one in rows:
        if not any(one.action_mask()):
            continue
        advantage = advantages.get(one.trace_id)
        metrics = _metrics(one, deviations.get(one.trace_id, math.nan), uses_tools)
        found.append(_sample(group_id, one, _own(one) if advantage is None else advantage, metrics))
    return found


def _sample(
    group_id: int, trace: Trace, advantage: float, metrics: dict[str, float]
) -> RolloutSample:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    prompt = list(takewhile(lambda message: message["role"] != "assistant", trace.messages))
    versions = [version for turn in trace.turns for version in turn.versions]
    return RolloutSample(
        prompt=prompt,
        completion=list(trace.messages[len(prompt) :]),
        input_ids=np.asarray(trace.token_ids(), dtype=np.int64),
        completion_mask=np.asarray(trace.action_mask(), dtype=np.int64),
        old_log_probs=np.asarray(logprobs_of(trace), dtype=np.float32),
        advantage=advantage,
        model_version=min(versions),
        group_id=group_id,
        metrics=metrics,
        enqueued_at=time.time(),
    )


def _reward(trace: Trace) -> float:
    return math.nan if trace.screened else trace.reward


def _own(trace: Trace) -> float:
    """Return the advantage of a trajectory that is compared with no other."""
    if trace.turn_advantages or trace.advantage is None:
        raise ValueError(
            f"{trace.trace_id} has one advantage for each turn, but a sample of AsyncGRPOTrainer "
            "has one for all: return a trajectory with `advantage`, or with a reward alone"
        )
    return 0.0 if trace.screened else trace.advantage


def _metrics(trace: Trace, deviation: float, uses_tools: bool) -> dict[str, float]:
    """Return the figures of a sample that TRL logs as means over the samples it trains."""
    found = {
        "reward": _reward(trace),
        "reward_std": deviation,
        "rollouts/success": float(trace.success),
        **{f"rewards/{name}": float(value) for name, value in trace.rewards.items()},
    }
    if uses_tools:
        calls = _calls(trace)
        failed = sum(site.turn < len(calls) and calls[site.turn] > 0 for site in trace.error_sites)
        found["tools/call_frequency"] = float(sum(calls))
        found["tools/failure_frequency"] = failed / sum(calls) if any(calls) else 0.0
    return found


def _calls(trace: Trace) -> list[int]:
    """Return the number of tool calls of each turn."""
    said = (message for message in trace.messages if message["role"] == "assistant")
    return [len(message.get("tool_calls") or ()) for message in said]


def group_figures(traces: Sequence[Trace]) -> Figures:
    """Return the figures of a group's rollouts by the names that TRL's own worker gives them."""
    rows = [one for trace in traces for one in trace.trajectories() if one.turns]
    if not rows:
        return {}
    lengths = [len(one.token_ids()) - len(one.turns[0].context_ids) for one in rows]
    turns = [len(one.turns) for one in rows]
    clipped = sum(one.turns[-1].stop_reason == "length" for one in rows)
    return {
        "completions/mean_length": (float(sum(lengths)), float(len(rows))),
        "completions/max_length": float(max(lengths)),
        "completions/min_length": float(min(lengths)),
        "completions/clipped_ratio": (float(clipped), float(len(rows))),
        "rollout/samples_per_rollout": (float(len(rows)), float(len(traces))),
        "rollout/turns_mean": (float(sum(turns)), float(len(rows))),
        "rollout/turns_max": float(max(turns)),
    }


def offer(metrics: queue.Queue[Any], figures: Mapping[str, Any]) -> None:
    """Give figures to a trainer; where it has not taken thousands of them, these are left out."""
    if not metrics.full():
        metrics.put_nowait(dict(figures))


FOLDER = "rollouts"
"""Folder of the mesh in the trainer's output folder: a run directory with events and rollouts."""


class MeshFailed(RuntimeError):
    """The mesh that plays rollouts has ended; the message says why."""


class OlderWeights(MeshError):
    """A group has tokens of weights that no generator should have served any more."""

    def __init__(self, group_id: int, entered: int, oldest: int) -> None:
        super().__init__(group_id, entered, oldest)

    def __str__(self) -> str:
        group_id, entered, oldest = self.args
        return (
            f"group {group_id} entered when all generators served version {entered} but has "
            f"tokens of version {oldest}: a generator did not pull the weights that were sent"
        )


@dataclass(frozen=True)
class SampleQueues:
    """Where samples and figures go, and the most rollouts that are played or wait."""

    samples: RolloutBuffer
    figures: queue.Queue[Any]
    most: int


class SampleStream:
    """Plays groups of episodes while it is open; hands over their samples in order of entry.

    `next_group` is the first group that enters, `restarts` returns how many processes have been
    replaced. All methods are called on one event loop.
    """

    def __init__(
        self,
        config: Config,
        groups: Groups,
        retries: EpisodeRetries,
        queues: SampleQueues,
        next_group: int = 0,
        restarts: Callable[[], int] = lambda: 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._groups, self._retries = config, groups, retries
        self._queues, self._restarts, self._now = queues, restarts, now
        self._size = config.schedule.group_size
        self.next_group = next_group
        self.unfinished = 0
        """Number of groups that entered and are not handed over yet."""
        self.progressed_at = now()
        """When a group has last entered or finished."""
        self.is_open = False
        self.version = 0
        """The version that every generator has pulled."""
        self._closed, self._entered = False, asyncio.Event()
        self._versions: dict[int, int] = {}
        self._sizes: list[int] = []
        self._steps = self._reported_restarts = self._reported_drops = 0
        self._reported_at = now()

    def open(self) -> None:
        """Let groups enter from now on."""
        self.is_open = not self._closed
        self._progressed()
        self.admit()

    def pause(self) -> None:
        """Let no group enter until `open`; those that have entered are played on."""
        self.is_open = False

    def close(self) -> None:
        """Let no group enter any more."""
        self._closed, self.is_open = True, False

    def admit(self) -> None:
        """Start groups while there is room for all their rollouts."""
        while self.is_open and self._outstanding + self._size <= self._queues.most:
            self._groups.enter([self.next_group], self.version)
            self._groups.running[self.next_group].add_done_callback(self._progressed)
            self._versions[self.next_group] = self.version
            self._progressed()
            self.next_group += 1
            self.unfinished += 1
            self._entered.set()

    async def run(self) -> None:
        """Hand over groups until cancelled. Raises what ends a run, such as `RolloutsFail`."""
        while True:
            while not self.unfinished:
                self._entered.clear()
                await self._entered.wait()
            (group,) = await self._groups.collect(1)
            self._check_versions(group)
            samples = await in_thread(group_samples, group.group_id, self._kept(group))
            for sample in samples:
                self._queues.samples.put_nowait(sample)
            self.unfinished -= 1
            self._tell(group, dropped=not self._kept(group))
            self._check(len(group.traces))
            self.admit()

    def check(self, stale_after_s: float) -> None:
        """Raise MeshFailed where groups may enter, and none has entered or finished for so long."""
        silent_s = self._now() - self.progressed_at
        if self.is_open and silent_s > stale_after_s:
            raise MeshFailed(
                f"no group of rollouts has finished for {silent_s:.0f} s, but "
                f"heartbeat_stale_after_s is {stale_after_s:g}, and {self.unfinished} are being "
                f"played: look for failures in {FOLDER}/events.jsonl of the output folder, or "
                "raise heartbeat_stale_after_s if episodes take longer"
            )

    @property
    def _outstanding(self) -> int:
        return self.unfinished * self._size + self._queues.samples.qsize()

    def _check_versions(self, group: Group) -> None:
        entered = self._versions.pop(group.group_id)
        versions = (version for trace in group.traces for version in trace.versions())
        if (oldest := min(versions, default=entered)) < entered:
            raise OlderWeights(group.group_id, entered, oldest)

    def _kept(self, group: Group) -> Sequence[Trace]:
        drops = self._config.schedule.dynamic_sampling and equal_rewards(group.traces)
        return [] if drops else group.traces

    def _progressed(self, _: object = None) -> None:
        self.progressed_at = self._now()

    def _check(self, size: int) -> None:
        """Raise RolloutsFail where most rollouts of two steps' worth of groups have failed."""
        self._sizes.append(size)
        if len(self._sizes) == self._config.schedule.prompts_per_step:
            sizes, self._sizes, self._steps = self._sizes, [], self._steps + 1
            self._retries.check_step(self._steps, sizes, self._size)

    def _tell(self, group: Group, dropped: bool) -> None:
        """Offer the figures of a group, and counts since the group before."""
        now, tokens = self._now(), sum(trace.action_tokens() for trace in group.traces)
        restarts, drops = self._restarts(), self._queues.samples.dropped
        counts = self._retries.figures()
        figures: Figures = {
            **group_figures(group.traces),
            "rollout/inflight": float(self.unfinished * self._size),
            "rollout/generated_tok_s": (float(tokens), now - self._reported_at),
            "rollout/retried_total": float(counts["rollouts/retried"]),
            "rollout/given_up_total": float(counts["rollouts/given_up"]),
            "rollout/poisoned_total": float(counts["rollouts/poisoned"]),
            "rollout/restarts_total": float(restarts - self._reported_restarts),
            "rollout/dropped_stale_total": float(drops - self._reported_drops),
            "rollout/dropped_equal_total": float(dropped),
        }
        self._reported_at, self._reported_restarts, self._reported_drops = now, restarts, drops
        offer(self._queues.figures, figures)
