"""Retries: what counts against a rollout, what against its episode, and what against neither.

Paced events: a burst becomes one line that says how many it stands for.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.configs.supervision import SupervisionConfig
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, RemoteError, SessionLost
from composer_mesh.rollouts.tasks import Episode, PoisonedInput
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.episodes.rollout import (
    EpisodeRetries,
    PacedEvents,
    RolloutsFail,
    WorkerLost,
)
from composer_mesh.services.pool.dispatch import NoReplicaLeft
from composer_mesh.services.store.writing import RunStore
from composer_mesh.tasks.errors import JudgeFailed, JudgesSpent, TaskError, TaskProcessEnded

EPISODE = Episode("toolbox", "train", 7, {"question": "how many?"})
TRACE = Trace("train-000007-000", 7, 0, "toolbox", "train", 7, [], [], 1.0, True, [])


class ServerGone(TaskError):
    """A server of environments cannot be reached."""

    failure_class = "provider"


@dataclass
class Attempts:
    """Attempts that end as they are told: by an error, made for their session, or with a trace."""

    ends: list[Callable[[str], Exception]]
    sessions: list[str] = field(default_factory=list)

    async def __call__(self, session: str) -> Trace:
        self.sessions.append(session)
        await asyncio.sleep(0)
        if self.ends:
            raise self.ends.pop(0)(session)
        return TRACE


@dataclass
class Told:
    """What a run's retries kept and recorded."""

    poisoned: list[PoisonedInput] = field(default_factory=list)
    events: list[tuple[str, str, str, dict[str, Any]]] = field(default_factory=list)

    def record(self, kind: str, actor: str, detail: str, /, **fields: Any) -> None:
        self.events.append((kind, actor, detail, fields))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, *_ in self.events]


def retries(told: Told, **limits: Any) -> EpisodeRetries:
    return EpisodeRetries(SupervisionConfig(**limits), told.poisoned.append, told.record)


async def sampled(made: EpisodeRetries, *ends: Callable[[str], Exception]) -> tuple[Any, list[str]]:
    attempts = Attempts(list(ends))
    return await made.trial(EPISODE).sample("train-000007-000", attempts), attempts.sessions


def lost_idle(session: str) -> Exception:
    return SessionLost(session, "environment-0", "Killed(sig=9)")


def lost_under_way(session: str) -> Exception:
    return SessionLost(session, "environment-0", "Killed(sig=9)", True)


async def test_an_attempt_that_only_stood_by_while_a_process_died_counts_for_nothing() -> None:
    told = Told()
    made = retries(told, rollout_retries=0)
    trace, sessions = await sampled(made, *[lost_idle] * 5)
    assert trace is TRACE
    assert sessions == ["train-000007-000", *[f"train-000007-000.{n}" for n in range(2, 7)]]
    assert made.figures() == {
        "rollouts/retried": 5,
        "rollouts/resumed": 0,
        "rollouts/given_up": 0,
        "rollouts/poisoned": 0,
    }


@pytest.mark.parametrize(
    "loss",
    [
        lost_under_way,
        lambda _: ActorDied("generator-0", "Killed(sig=9)"),
        lambda _: DeadlineExceeded("environment-0", "step", 120.0),
        lambda _: MemoryError("no room"),
    ],
)
async def test_equal_losses_are_tried_again_as_often_as_any_failure(loss: Any) -> None:
    told = Told()
    made = retries(told, rollout_retries=3, poison_after=2)
    assert (await sampled(made, *[loss] * 3))[0] is TRACE
    assert told.poisoned == []
    assert (await sampled(made, *[loss] * 4))[0] is None
    assert told.poisoned[0].cause == "infrastructure"
    assert told.poisoned[0].attempts == 4


async def test_without_retries_a_loss_costs_the_sample_and_not_its_episode() -> None:
    told = Told()
    trace, sessions = await sampled(retries(told, rollout_retries=0), lost_under_way)
    assert (trace, len(sessions)) == (None, 1)
    assert told.kinds == ["rollout_given_up"]
    assert told.poisoned == []


async def test_a_failed_server_of_environments_costs_the_sample_and_never_its_episode() -> None:
    told, attempts = Told(), Attempts([lambda _: ServerGone("http://x")] * 3)
    runs = retries(told, rollout_retries=2, poison_after=2)
    trial = runs.trial(EPISODE)
    assert await trial.sample("train-000007-000", attempts) is None
    assert await trial.sample("train-000007-001", attempts) is TRACE
    assert told.poisoned == []
    assert told.kinds == ["rollout_retried", "rollout_given_up"]


async def test_an_error_that_names_its_session_is_the_same_in_the_next_one() -> None:
    told = Told()
    made = retries(told)
    trace, sessions = await sampled(made, *[lambda session: KeyError(f"{session} has no row")] * 9)
    assert (trace, len(sessions)) == (None, 2)
    assert told.kinds == ["rollout_retried", "input_poisoned"]
    _, _, detail, fields = told.events[1]
    assert detail.startswith("train-000007-000, set aside after 2 failures: KeyError: ")
    assert fields["class"] == "code"
    assert made.is_set_aside(EPISODE)
    assert (await sampled(made))[1] == []  # it is not asked again


async def test_one_burst_over_all_samples_of_an_episode_is_no_poison() -> None:
    told = Told()
    trial = retries(told, poison_after=2).trial(EPISODE)
    samples = [Attempts([lambda _: ValueError("one burst")]) for _ in range(8)]
    work = [trial.sample(f"train-000007-{n:03d}", one) for n, one in enumerate(samples)]
    assert await asyncio.gather(*work) == [TRACE] * 8
    assert told.poisoned == []


async def test_a_process_that_died_is_held_against_one_episode_only() -> None:
    """The other one was there each time too; what killed the process is taken to be found."""
    told = Told()
    made = retries(told, rollout_retries=2)
    other = Episode("toolbox", "train", 8, {})
    trials = made.trial(EPISODE), made.trial(other)
    work = [
        trial.sample(f"train-00000{7 + n}-000", Attempts([lost_under_way] * 3))
        for n, trial in enumerate(trials)
    ]
    assert await asyncio.gather(*work) == [None, TRACE]
    assert [poisoned.episode for poisoned in told.poisoned] == [EPISODE]


def worker_lost(turns: int) -> Callable[[str], Exception]:
    return lambda _: WorkerLost("rollouts-0", "Killed(sig=9)", turns)


async def test_a_worker_that_dies_counts_for_nothing_if_its_episode_has_advanced() -> None:
    told = Told()
    made = retries(told, rollout_retries=1)
    assert (await sampled(made, *map(worker_lost, range(1, 30))))[0] is TRACE
    figures = made.figures()
    assert figures["rollouts/retried"] == figures["rollouts/resumed"] == 29
    assert told.poisoned == []
    kind, actor, detail, fields = told.events[0]
    assert (kind, actor) == ("rollout_retried", "rollouts-0")
    assert detail.startswith("train-000007-000, resumed from turn 1: ")
    assert detail.endswith("rollouts-0 died: Killed(sig=9)")
    assert fields["class"] == "infrastructure"


async def test_an_episode_at_whose_turn_workers_die_again_and_again_is_set_aside() -> None:
    told = Told()
    made = retries(told, rollout_retries=2, poison_after=2)
    trace, sessions = await sampled(made, *[worker_lost(3)] * 9)
    assert (trace, len(sessions)) == (None, 4)  # the first loss had three turns to show
    assert told.kinds[-1] == "input_poisoned"
    assert made.figures()["rollouts/resumed"] == 3
    trace, _ = await sampled(retries(Told(), rollout_retries=2), *[worker_lost(0)] * 2)
    assert trace is TRACE


async def test_an_episode_that_begins_anew_has_not_advanced_until_it_is_further_than_before() -> (
    None
):
    made = retries(Told(), rollout_retries=1)
    ends = [worker_lost(5), worker_lost(2), worker_lost(4)]
    assert (await sampled(made, *ends))[0] is None


async def test_when_no_process_is_left_nothing_is_tried_again() -> None:
    told = Told()
    with pytest.raises(NoReplicaLeft, match="environment-0 died: killed"):
        await sampled(retries(told), lambda _: NoReplicaLeft("environment-0", "killed"))
    assert told.events == []


async def test_a_sample_that_is_cancelled_is_not_tried_again() -> None:
    attempts = Attempts([lambda _: ValueError("never seen")])
    running = asyncio.create_task(retries(Told()).trial(EPISODE).sample("a", attempts))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert attempts.sessions == ["a"]


async def test_an_episode_is_set_aside_after_the_second_process_that_its_own_code_has_ended() -> (
    None
):
    told = Told()
    ends = iter(["at a (task.py:1)", "at b (task.py:2)"])
    made = retries(told)
    trial = made.trial(EPISODE)

    async def kills(session: str) -> Trace:
        await asyncio.sleep(0)
        raise TaskProcessEnded("finish of train episode 7", f"held it, {next(ends)}")

    async def bystands(session: str) -> Trace:
        await asyncio.sleep(0)
        raise lost_idle(session)

    others = Attempts([lost_idle] * 6)
    made_elsewhere = made.trial(Episode("toolbox", "train", 8))
    found = await asyncio.gather(
        trial.sample("train-000007-000", kills),
        trial.sample("train-000007-001", bystands),
        made_elsewhere.sample("train-000008-000", others),
    )
    assert found == [None, None, TRACE]
    (poisoned,) = told.poisoned
    assert (poisoned.episode, poisoned.cause) == (EPISODE, "data")
    assert next(ends, "none left") == "none left"
    (detail,) = [detail for kind, _, detail, _ in told.events if kind == "input_poisoned"]
    assert "finish of train episode 7 held it, at b (task.py:2)" in detail


async def test_events_name_the_actor_the_rollout_and_the_cause_in_one_line() -> None:
    told = Told()
    await sampled(retries(told), lost_under_way)
    ((kind, actor, detail, fields),) = told.events
    assert (kind, actor) == ("rollout_retried", "environment-0")
    assert detail == "train-000007-000: environment-0 died: Killed(sig=9)"
    assert fields["rollout"] == "train-000007-000"
    assert fields["class"] == "infrastructure"


async def test_a_poisoned_episode_is_on_disk_with_all_that_is_needed_to_see_it_again(
    tmp_path: Path, build_config: Any
) -> None:
    error = RemoteError("environment-0", "step", "Traceback ...\nZeroDivisionError: by zero")
    with RunStore(tmp_path, build_config()) as store:
        made = EpisodeRetries(SupervisionConfig(), store.add_poisoned, Told().record)
        await sampled(made, *[lambda _: error] * 2)
    line = json.loads((tmp_path / "poisoned.jsonl").read_text())
    assert line["episode"] == {
        "task": "toolbox",
        "split": "train",
        "index": 7,
        "payload": {"question": "how many?"},
    }
    assert line["error"].endswith("ZeroDivisionError: by zero")
    assert (line["cause"], line["attempts"]) == ("code", 2)
    assert "Traceback" in line["traceback"]


def test_the_error_of_a_run_without_rollouts_travels_whole() -> None:
    error = RolloutsFail("step 3 has none", "ValueError: x")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (copy.args, str(copy)) == (error.args, str(error))


def judge_failed(_: str) -> Exception:
    return JudgeFailed("quality", "3 answers had another form")


async def test_a_judge_that_fails_costs_a_sample_and_never_its_episode() -> None:
    told = Told()
    made = retries(told, rollout_retries=3, poison_after=2)
    trace, sessions = await sampled(made, *[judge_failed] * 9)
    assert (trace, len(sessions)) == (None, 4)
    assert set(told.kinds) == {"rollout_retried", "rollout_given_up"}
    assert told.poisoned == []
    assert (await sampled(made))[0] is TRACE


async def test_a_spent_ceiling_is_not_retried() -> None:
    attempts = Attempts([lambda _: JudgesSpent("quality", "spent")])
    with pytest.raises(JudgesSpent):
        await retries(Told()).trial(EPISODE).sample("train-000007-000", attempts)
    assert len(attempts.sessions) == 1


@dataclass
class Log:
    """A recorder and a clock."""

    now: float = 0.0
    told: list[tuple[str, str, str]] = field(default_factory=list)
    fields: list[dict[str, Any]] = field(default_factory=list)

    def record(self, kind: str, actor: str, detail: str, /, **fields: Any) -> None:
        self.told.append((kind, actor, detail))
        self.fields.append(fields)

    def clock(self) -> float:
        return self.now


def paced(log: Log) -> PacedEvents:
    return PacedEvents(log.record, interval_s=1.0, clock=log.clock)


def test_the_first_event_of_a_burst_is_told_at_once_and_the_next_counts_the_others() -> None:
    log = Log()
    events = paced(log)
    for number in range(5):
        log.now = 0.1 * number
        events("retried", "e-0", f"no. {number}")
    log.now = 1.0
    events("retried", "e-1", "no. 5")
    assert log.told == [
        ("retried", "e-0", "no. 0"),
        ("retried", "e-1", "no. 5 (and 4 more before it)"),
    ]


def test_each_kind_has_a_pace_of_its_own() -> None:
    log = Log()
    events = paced(log)
    events("retried", "", "a")
    events("poisoned", "", "b", cause="c")
    assert log.told == [("retried", "", "a"), ("poisoned", "", "b")]
    assert log.fields == [{}, {"cause": "c"}]


def test_what_was_held_back_is_told_in_the_end_and_once() -> None:
    log = Log()
    events = paced(log)
    for name in "abc":
        events("retried", "", name)
    events.flush()
    events.flush()
    assert log.told == [("retried", "", "a"), ("retried", "", "2 more")]


class Failed(RuntimeError):
    """A failure of infrastructure that states its kind."""

    failure_class = "infrastructure"
    kind = "registry"


async def test_failures_of_infrastructure_are_counted_by_the_kind_that_they_state() -> None:
    made = retries(Told(), rollout_retries=5)
    assert (await sampled(made, *[lambda _: Failed("slow")] * 2))[0] is TRACE
    assert made.figures()["rollouts/failed/registry"] == 2
    assert "rollouts/failed/registry" not in made.figures()
