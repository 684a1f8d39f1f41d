"""Lockstep: the batches depend on the announced episodes, never on workers, time or order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import chain

from fake_host import turns as turns_of_the_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process_calls import peers

from composer_mesh.actors.rollout_workers.peers import LockstepGeneration, Round
from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.rollouts.generation import GenerationRequest
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.services.episodes.workers import LockstepRounds

SAMPLING = Sampling(1.0, 4, 100, 0)
GENERATORS = ["generator-0", "generator-1"]


def group(number: int, size: int) -> list[Sample]:
    episode = Episode("toolbox", "train", number, {})
    return [Sample(episode, number, place, SAMPLING) for place in range(size)]


class Workers:
    """Rollout workers that only say which requests wait."""

    def __init__(self, generators: Sequence[str] = GENERATORS) -> None:
        self.released: list[Round] = []
        self.rounds = LockstepRounds(lambda: generators, self.released.append)

    @property
    def shares(self) -> list[dict[str, Sequence[str]]]:
        return [dict(sorted(one.shares.items())) for one in self.released]


def played(lengths: list[list[int]], workers: int, seed: int) -> list[dict[str, Sequence[str]]]:
    """Play groups of episodes of so many turns, dealt out to workers at random."""
    made, rng = Workers(), random.Random(seed)
    samples = [one for number, sizes in enumerate(lengths) for one in group(number, len(sizes))]
    left = dict(zip((one.trace_id for one in samples), chain(*lengths), strict=True))
    lives = dict(zip(left, made.rounds.announce(samples), strict=True))
    home = {name: rng.randrange(workers) for name in left}
    turn = 0
    for live in lives.values():
        live.__enter__()
    while lives:
        for ended in [name for name in lives if left[name] == turn]:
            lives.pop(ended).__exit__(None, None, None)
        order = list(range(workers))
        rng.shuffle(order)
        for worker in order:
            waiting = [f"{name}-{turn:02d}" for name in lives if home[name] == worker]
            if waiting:
                made.rounds.wait(f"rollouts-{worker}", waiting)
        turn += 1
    return made.shares


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 1000),
)
def test_the_shares_are_the_same_however_episodes_are_split_over_workers(
    lengths: list[list[int]], seed: int
) -> None:
    alone = played(lengths, 1, 0)
    assert len(alone) == max(max(sizes) for sizes in lengths)
    assert played(lengths, 2, seed) == alone
    assert played(lengths, 3, seed) == alone


def test_a_group_has_one_generator_and_few_groups_are_divided_singly() -> None:
    assert played([[1, 1], [1, 1]], 1, 0) == [
        {
            "generator-0": ["train-000000-000-00", "train-000000-001-00"],
            "generator-1": ["train-000001-000-00", "train-000001-001-00"],
        }
    ]
    assert played([[1, 1]], 1, 0) == [
        {"generator-0": ["train-000000-000-00"], "generator-1": ["train-000000-001-00"]}
    ]


def test_no_round_leaves_out_an_announced_episode_that_has_not_asked() -> None:
    made = Workers()
    one, two = made.rounds.announce(group(0, 2))
    with one:
        made.rounds.wait("rollouts-0", ["train-000000-000-00"])
        assert made.released == []
        with two:
            pass  # given up
        assert [len(shares) for shares in made.shares] == [1]


def test_what_waited_at_a_worker_that_died_is_asked_again_elsewhere() -> None:
    made = Workers()
    lives = made.rounds.announce(group(0, 2))
    for live in lives:
        live.__enter__()
    made.rounds.wait("rollouts-0", ["train-000000-000-00"])
    made.rounds.lose("rollouts-0")
    made.rounds.wait("rollouts-1", ["train-000000-001-00"])
    assert made.released == []
    made.rounds.wait("rollouts-1", ["train-000000-000-00", "train-000000-001-00"])
    assert [sum(map(len, shares.values())) for shares in made.shares] == [2]


def test_a_request_of_a_cancelled_episode_takes_nobodys_place_in_a_round() -> None:
    made = Workers()
    lives = made.rounds.announce(group(0, 3))
    for live in lives:
        live.__enter__()
    made.rounds.wait("rollouts-0", ["train-000000-000-00"])
    made.rounds.wait("rollouts-1", ["train-000000-001-00"])
    lives[0].__exit__(None, None, None)
    assert made.released == []  # the third has not asked
    made.rounds.wait("rollouts-2", ["train-000000-002-00"])
    assert sorted(chain(*made.shares[0].values())) == [
        "train-000000-001-00",
        "train-000000-002-00",
    ]


def test_requests_that_are_told_after_their_episodes_were_cancelled_start_no_round() -> None:
    made = Workers()
    (live,) = made.rounds.announce(group(0, 1))
    with live:
        pass
    made.rounds.wait("rollouts-0", ["train-000000-000-00"])
    assert made.released == []


class ShortOfResults:
    """A generator that answers fewer requests than it was asked."""

    async def generate_round(self, *_: object) -> list[object]:
        return []


async def test_a_batch_with_too_few_results_fails_each_of_its_episodes_and_hangs_none() -> None:
    request = GenerationRequest("a-00", [1], 4, 1.0, 0, [])
    generation = LockstepGeneration(peers({"generator-0": ShortOfResults()}), lambda: 1)
    asking = asyncio.ensure_future(generation.generate(request, "a"))
    names = await generation.waiting()
    generation.release(Round(0, False, {"generator-0": names}))
    (found,) = await asyncio.gather(asking, return_exceptions=True)
    assert isinstance(found, ValueError)


async def test_without_generators_no_round_is_released_until_one_serves() -> None:
    made = Workers([])
    with made.rounds.announce(group(0, 1))[0]:
        made.rounds.wait("rollouts-0", ["train-000000-000-00"])
        await turns_of_the_loop()
        assert made.released == []


def test_a_complete_round_waits_for_a_generator_and_starts_with_the_first() -> None:
    generators, released = list[str](), list[Round]()
    rounds = LockstepRounds(lambda: generators, released.append)
    one = Sample(Episode("toolbox", "train", 0, {}), 0, 0, Sampling(1.0, 8, 64, 0))
    rounds.announce([one])
    rounds.wait("rollouts-0", [f"{one.trace_id}-00"])
    assert released == []
    generators.append("generator-0.2")
    rounds.check()
    assert released == [Round(0, False, {"generator-0.2": [f"{one.trace_id}-00"]})]
