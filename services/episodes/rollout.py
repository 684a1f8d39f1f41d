"""Samples of episodes, played by a port; failed attempts are retried, failing episodes quarantined.

    attempt fails --> retried, with a fresh environment, up to `rollout_retries`
                      its worker died --> continued in the same session, if that is still open;
                      not counted if it had advanced since the last such death
                      the same error of its episode `poison_after` times, or a lost process in each
                      attempt: the episode is quarantined for the run
                      anything else until the end: the sample is given up; failures of an external
                      service, such as a judge, are never counted against the episode

The controller schedules episodes; `rollouts.episode` says how one is played. A sample that is given
up is left out of its group, and never becomes a reward. Which failures are equal is decided here,
and counted in `rollouts.tasks`. Events of a kind are recorded once per interval, with a count of
those that were suppressed; exact counts are in the metrics.
"""

import asyncio
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

from composer_mesh.configs.supervision import SupervisionConfig
from composer_mesh.configs.worded import Worded
from composer_mesh.mesh.failures import FailureClass, cause_of, classify, error_key
from composer_mesh.mesh.supervision import ActorDied, MeshError, Recorder, SessionLost
from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.rollouts.tasks import (
    SMALLEST_GROUP,
    Episode,
    FinishedRollout,
    GroupScore,
    PoisonedInput,
    Shortage,
    Trial,
    short_groups,
    with_group_score,
    without_left_out,
)
from composer_mesh.rollouts.traces import Split, Trace
from composer_mesh.services.pool.dispatch import NoReplicaLeft, ServiceClosed
from composer_mesh.services.steps.ports import Player
from composer_mesh.tasks.errors import JudgesSpent, TaskProcessEnded
from composer_mesh.tasks.task import Task

INTERVAL_S = 1.0


class PacedEvents:
    """A rate-limiting recorder in front of another one. Not thread-safe."""

    def __init__(
        self,
        record: Recorder,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._record, self._interval_s, self._clock = record, interval_s, clock
        self._last: dict[str, float] = {}
        self._held: Counter[str] = Counter()

    def __call__(self, kind: str, actor: str, detail: str, /, **fields: Any) -> None:
        """Record an event, or suppress and count it where one of its kind was recorded just now."""
        now = self._clock()
        if now - self._last.get(kind, -self._interval_s) < self._interval_s:
            self._held[kind] += 1
            return
        self._last[kind] = now
        held = self._held.pop(kind, 0)
        full_detail = f"{detail} (and {held} more before it)" if held else detail
        self._record(kind, actor, full_detail, **fields)

    def flush(self) -> None:
        """Record the counts of suppressed events."""
        for kind, held in self._held.items():
            self._record(kind, "", f"{held} more")
        self._held.clear()


LOST = "lost process"
"""Key of a failure in which an actor died or was unresponsive during one of the attempt's calls."""

KILLED = "killed the task process"
"""Key of a failure in which the attempt's own code held or ended the process that it ran in."""

LONGEST_TRACEBACK = 8_000
COUNTED = ("retried", "resumed", "given_up", "poisoned")

T = TypeVar("T")


class RolloutsFail(Worded, MeshError):
    """Too few rollouts succeed to continue the run: what was found, the last failure, its frame."""

    message = (
        "{0}; the last failure was {1}: correct what failed (poisoned.jsonl in the run directory "
        "has the episodes that were set aside), or raise supervision.rollout_retries"
    )

    @property
    def frame(self) -> str:
        """The line of the user's code that failed last; empty where it was none."""
        return str(self.args[2]) if len(self.args) > 2 else ""


@dataclass(eq=False, repr=False)
class WorkerLost(ActorDied):
    """A rollout worker died; its episode can be continued from its turn `turns`."""

    turns: int


class EpisodeRetries:
    """All retries of a run. `keep` persists a quarantined episode."""

    def __init__(
        self,
        config: SupervisionConfig,
        keep: Callable[[PoisonedInput], None],
        record: Recorder,
    ) -> None:
        self.attempts = config.rollout_retries + 1
        self._poison_after = config.poison_after
        self._keep, self._events = keep, PacedEvents(record)
        self._set_aside: set[tuple[Split, int]] = set()
        self._counts: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._shortage = Shortage()
        self._last: Exception | None = None
        self._lost_processes = 0

    def restore(self, poisoned: Iterable[Mapping[str, Any]], sizes: list[int], wanted: int) -> None:
        """Restore an earlier process's quarantined episodes and its last step's group sizes."""
        episodes = [one["episode"] for one in poisoned]
        self._set_aside |= {(episode["split"], episode["index"]) for episode in episodes}
        if sizes:
            self._shortage.step(sizes, wanted)

    def trial(self, episode: Episode) -> "EpisodeTrial":
        """Return a trial that counts the failures of an episode over all its samples."""
        return EpisodeTrial(self, episode)

    def is_set_aside(self, episode: Episode) -> bool:
        """Whether this episode is quarantined."""
        return (episode.split, episode.index) in self._set_aside

    def key_of(self, error: Exception, session: str) -> str | None:
        """Return the key that groups equal failures; None where the attempt is not the cause.

        The key of a lost process changes with each episode that is quarantined for such losses:
        earlier losses are then explained, and no longer count against the attempts that were merely
        present.
        """
        key = key_of(error, session)
        return self.lost_key if key == LOST else key

    @property
    def lost_key(self) -> str:
        """The current key of lost-process failures."""
        return f"{LOST} {self._lost_processes}"

    def figures(self) -> dict[str, int]:
        """Return the counts of retries, given-up samples and quarantines since the last call.

        Retries that continue an episode after its worker's death are also counted as resumed.
        Attempts that failed by infrastructure which states a kind, such as a container, are counted
        by that.
        """
        self._events.flush()
        counts, self._counts = self._counts, Counter()
        kinds, self._kinds = self._kinds, Counter()
        every = {f"rollouts/{name}": counts[name] for name in COUNTED}
        return every | {f"rollouts/failed/{kind}": kinds[kind] for kind in sorted(kinds)}

    def check_step(self, step: int, sizes: list[int], wanted: int) -> None:
        """Raise `RolloutsFail` where most groups of two steps in a row lack most rollouts."""
        if self._shortage.step(sizes, wanted):
            short = short_groups(sizes, wanted)
            raise self._fail(
                f"step {step} has less than half of its rollouts in {short} of {len(sizes)} "
                "groups, after a step like that"
            ) from self._last

    def check_evaluation(self, step: int, measured: int, requested: int) -> None:
        """Raise `RolloutsFail` where an evaluation has no episode to measure."""
        if not measured:
            what = f"none of {requested} held-out episodes could be run after step {step}"
            raise self._fail(what) from self._last

    def _fail(self, what: str) -> RolloutsFail:
        last = self._last
        return RolloutsFail(
            what, "none" if last is None else one_line(last), getattr(last, "frame", "")
        )

    def failed(self, trial: "EpisodeTrial", attempt: "FailedAttempt") -> None:
        """Handle a failed attempt: quarantine the episode, give up the sample, or retry it."""
        self._last = attempt.error
        if kind := infrastructure_kind(attempt.error):
            self._kinds[kind] += 1
        if self.is_set_aside(trial.episode):
            return
        most = (
            max(self.attempts, self._poison_after) if attempt.lost_a_process else self._poison_after
        )
        if attempt.times >= most:
            self._set_aside_for_good(trial, attempt)
        elif attempt.failures >= self.attempts:
            self._counts["given_up"] += 1
            self._tell("rollout_given_up", attempt, f", after {attempt.failures} failures")
        else:
            self._counts["retried"] += 1
            what = ""
            if isinstance(attempt.error, WorkerLost):
                self._counts["resumed"] += 1
                what = f", resumed from turn {attempt.error.turns}"
            self._tell("rollout_retried", attempt, what)

    def _set_aside_for_good(self, trial: "EpisodeTrial", attempt: "FailedAttempt") -> None:
        self._set_aside.add((trial.episode.split, trial.episode.index))
        self._lost_processes += attempt.lost_a_process
        self._counts["poisoned"] += 1
        error = attempt.error
        story = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
        cause, attempts = classify(error).value, trial.attempts
        self._keep(PoisonedInput(trial.episode, cause, error_key(error), story, attempts))
        self._tell("input_poisoned", attempt, f", set aside after {attempts} failures")

    def _tell(self, kind: str, attempt: "FailedAttempt", what: str = "") -> None:
        error, cause = attempt.error, one_line(attempt.error)
        fields = {"rollout": attempt.name, "cause": cause, "class": classify(error).value}
        self._events(kind, actor_of(error), f"{attempt.name}{what}: {cause}", **fields)


@dataclass(frozen=True)
class FailedAttempt:
    """One failed attempt at a sample, which has had `failures` failures so far.

    `times` counts failures of this kind: of the sample where a process was lost by it, none where a
    provider failed, and otherwise of any sample of the episode.
    """

    name: str
    error: Exception
    key: str | None
    times: int
    failures: int

    @property
    def lost_a_process(self) -> bool:
        """Whether a process was lost in the attempt."""
        return is_loss(self.key)


class EpisodeTrial:
    """One episode's attempts, over all of its samples."""

    def __init__(self, retries: EpisodeRetries, episode: Episode) -> None:
        self.episode = episode
        self._retries, self._trial = retries, Trial()

    @property
    def attempts(self) -> int:
        """Number of failed attempts."""
        return self._trial.attempts

    async def sample(self, name: str, attempt: Callable[[str], Awaitable[T]]) -> T | None:
        """Return what a sample's attempt returns; None where it, or its episode, was given up.

        Each attempt gets a session name of its own. An attempt whose environment died between its
        calls does not count, nor one whose worker died if its episode continues with more turns
        than after any earlier such death. Waits for the last attempt.
        """
        own: Counter[str] = Counter()
        turns = 0
        for number in count(1):
            if self._retries.is_set_aside(self.episode) or self._spent(own):
                break
            session, began = session_name(name, number), self._trial.begin()
            try:
                return await attempt(session)
            except (ServiceClosed, NoReplicaLeft, JudgesSpent):
                raise  # nothing is left to retry with
            except Exception as error:  # noqa: BLE001  supervision boundary
                key = self._retries.key_of(error, session)
                if isinstance(error, WorkerLost) and error.turns > turns:
                    key, turns = None, error.turns
                self._retries.failed(self, self._failed_attempt(name, error, key, began, own))
        return None

    def _failed_attempt(
        self, name: str, error: Exception, key: str | None, began: int, own: Counter[str]
    ) -> FailedAttempt:
        """Count a sample's failure, with its `own` earlier ones and with its episode's."""
        if key is not None:
            own[key] += 1
        outside = classify(error) is FailureClass.PROVIDER  # no episode is the cause of that
        if key == KILLED:
            began = self._trial.begin()  # each such process was ended by one attempt alone
        shared = self._trial.failed(began, None if outside or is_loss(key) else key)
        times = own[key] if key is not None and is_loss(key) else shared
        return FailedAttempt(name, error, key, times, self._failures(own))

    def _failures(self, own: Counter[str]) -> int:
        """Count a sample's failures, without those that were attributed to another episode."""
        lost_key = self._retries.lost_key
        return sum(n for key, n in own.items() if key == lost_key or not is_loss(key))

    def _spent(self, own: Counter[str]) -> bool:
        return self._failures(own) >= self._retries.attempts


def session_name(name: str, attempt: int) -> str:
    """Return the name of an attempt's session: the rollout's own, then with `.2`, `.3`, …"""
    return name if attempt == 1 else f"{name}.{attempt}"


def is_loss(key: str | None) -> bool:
    """Whether this is the key of a lost-process failure, current or earlier."""
    return key is not None and key.startswith(LOST)


def key_of(error: Exception, session: str) -> str | None:
    """Return the key that groups equal failures; None where the attempt is not the cause.

    A session lost between two calls is not the attempt's fault. One lost during a call may have
    been caused by it, whatever process was called.
    """
    if isinstance(error, SessionLost) and not error.in_call:
        return None
    if isinstance(error, TaskProcessEnded):
        return KILLED
    if classify(error) is FailureClass.INFRASTRUCTURE:
        return LOST
    return error_key(error).replace(session, "…")


def infrastructure_kind(error: Exception) -> str:
    """Return the kind that a failure of infrastructure states; empty where it states none."""
    kind = getattr(error, "kind", None)
    failed = classify(error) is FailureClass.INFRASTRUCTURE
    return kind if failed and isinstance(kind, str) else ""


def one_line(error: Exception) -> str:
    """Return an error in one line, for an event."""
    if isinstance(error, SessionLost):
        return f"{error.replica} died: {error.reason}"  # the loss is already handled
    return cause_of(error)


def actor_of(error: Exception) -> str:
    """Return the actor that a mesh error names, empty where it names none."""
    name = getattr(error, "replica", None) or getattr(error, "actor", None)
    return name if isinstance(name, str) else ""


class Rollouts:
    """Plays samples of episodes with retries, on one event loop."""

    def __init__(self, player: Player, retries: EpisodeRetries) -> None:
        self.retries = retries
        self._player = player
        self._tokens = Counter[str]()

    def start(
        self, episode: Episode, group_id: int, size: int, sampling: Sampling
    ) -> list[asyncio.Task[Trace | None]]:
        """Start `size` samples of an episode; all of them are announced before any of them runs.

        A sample that is given up, by itself or with its episode, returns None.
        """
        samples = [Sample(episode, group_id, number, sampling) for number in range(size)]
        announced = self._player.announce(samples)
        trial = self.retries.trial(episode)
        return [
            asyncio.create_task(self._announced(live, trial, sample))
            for live, sample in zip(announced, samples, strict=True)
        ]

    async def comparable(self, task: Task, traces: list[Trace]) -> list[Trace]:
        """Return the finished samples of one episode with rewards that can be compared.

        Group rewards are added, and what one sample does without is left out of all. None are left
        where a group reward failed as often as a sample may. Waits for the group rewards.
        """
        if not traces:
            return traces
        part, first = task.of(traces[0].task), traces[0]
        weights = part.reward_weights
        whole = without_left_out(traces, weights)
        if not part.group_rewards or len(whole) < SMALLEST_GROUP:
            return whole
        episode = Episode(first.task, first.split, first.index)
        group = [FinishedRollout.of(trace) for trace in whole]

        async def attempt(_: str) -> GroupScore:
            return await self._player.score_group(episode, group)

        name = f"{first.split}-{first.group_id:06d}-group"
        score = await self.retries.trial(episode).sample(name, attempt)
        return [] if score is None else with_group_score(whole, score, weights)

    def cached_prompts(self) -> dict[str, float | None]:
        """Return how many prompt tokens this process had sampled from since the last call.

        With the share of the tokens sampled for workflows that train. Without the tokens of
        rollouts that an earlier process of the run has stored.
        """
        found, self._tokens = self._tokens, Counter[str]()
        prompt, cached, sampled = found["prompt"], found["cached"], found["sampled"]
        return {
            "generator/prompt_tokens": prompt,
            "generator/cached_tokens": cached,
            "generator/prefix_hit": cached / prompt if prompt else None,
            "rollouts/trained_share": found["trained"] / sampled if sampled else None,
        }

    async def close(self) -> None:
        """End the connections to whatever plays, after every sample has ended."""
        await self._player.close()

    async def _announced(
        self, live: AbstractContextManager[None], trial: EpisodeTrial, sample: Sample
    ) -> Trace | None:
        with live:
            return await trial.sample(sample.trace_id, partial(self._play, sample))

    async def _play(self, sample: Sample, session: str) -> Trace:
        played = await self._player.play(sample, session)
        self._tokens["prompt"] += played.prompt_tokens
        self._tokens["cached"] += played.cached_tokens
        if played.sampled_tokens:
            self._tokens["sampled"] += played.sampled_tokens
            self._tokens["trained"] += played.trained_tokens
        return played.trace
