"""Deadlines of calls: progress extends them, and one that was missed is doubled.

What a process reports of its progress.
"""

from __future__ import annotations

import asyncio
import pickle

import pytest
from scripted_work import NOW_S, Broken, Silent, Worker, actor, moves, stands_still

from composer_mesh.mesh.failures import is_deterministic
from composer_mesh.mesh.progress import Progress, ProgressReport
from composer_mesh.mesh.spawned import Deadlines, working_together
from composer_mesh.mesh.supervision import DeadlineExceeded

Events = list[tuple[str, str, str]]


def recorded() -> tuple[Deadlines, Events]:
    events: Events = []
    deadlines = Deadlines(lambda *event, **_: events.append(event))
    deadlines.most = 5
    return deadlines, events


async def test_work_that_makes_progress_is_waited_for_past_its_deadline() -> None:
    deadlines, events = recorded()
    worker = Worker([moves(), moves(), moves()])
    assert await actor(worker, deadlines).call("train", deadline_s=NOW_S) == "done"
    assert worker.asked == 3
    assert not events


async def test_work_without_progress_ends_with_what_was_completed_last() -> None:
    worker = Worker([moves(), stands_still(), moves()])
    with pytest.raises(
        DeadlineExceeded,
        match=r"trainer\.train made no progress for 1e-09 s \(last progress: microbatch 3 of 8 of "
        r"step 5, 1 s before\): raise run\.deadline_s",
    ):
        await actor(worker).call("train", deadline_s=NOW_S)
    assert worker.asked == 2


async def test_an_answer_that_comes_with_the_deadline_counts() -> None:
    worker = Worker([stands_still()])  # the work ends while the actor is asked
    assert await actor(worker).call("train", deadline_s=NOW_S) == "done"


async def test_the_same_work_has_twice_the_time_after_each_missed_deadline() -> None:
    deadlines, events = recorded()
    for bound in ("1e-09", "2e-09", "4e-09"):
        worker = Worker([stands_still(), moves()])
        with pytest.raises(DeadlineExceeded, match=f"for {bound} s"):
            await actor(worker, deadlines).call("train", deadline_s=NOW_S)
    assert [event[:2] for event in events] == [("deadline_doubled", "trainer")] * 3
    assert events[1][2] == "train: no progress within 2e-09 s, so the next one has 4e-09 s"
    assert deadlines.of("trainer", "save", 120.0) == 120.0
    assert deadlines.of("trainer", "train", 120.0) == 960.0


async def test_ranks_that_miss_one_deadline_together_double_it_once() -> None:
    deadlines, events = recorded()
    ranks = [actor(Worker([stands_still(), moves()]), deadlines, f"trainer-{n}") for n in range(2)]
    calls = (rank.call("train", deadline_s=NOW_S) for rank in ranks)
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in found] == [DeadlineExceeded] * 2
    assert len(events) == 1


async def test_work_that_missed_its_last_deadline_fails_in_every_process() -> None:
    deadlines, events = recorded()
    deadlines.most = 1
    for final in (False, True):
        with pytest.raises(DeadlineExceeded) as raised:
            await actor(Worker([stands_still(), moves()]), deadlines).call(
                "train", deadline_s=NOW_S
            )
        assert is_deterministic(raised.value) is final
        assert is_deterministic(pickle.loads(pickle.dumps(raised.value))) is final
    assert len(events) == 1


async def test_the_progress_of_one_rank_counts_for_those_that_wait_for_it() -> None:
    slow = actor(Worker([moves(), moves(), moves(), moves()]), name="trainer-1")
    waiting = Worker([stands_still(), stands_still(), stands_still()])
    rank = actor(waiting, name="trainer-0")
    with working_together(lambda: [rank, slow]):
        assert await rank.call("train", deadline_s=NOW_S) == "done"
    assert waiting.asked == 3


async def test_an_actor_that_is_not_at_work_with_the_others_is_judged_alone() -> None:
    busy = actor(Worker([moves(), moves()]), name="trainer-0")
    newcomer = actor(Worker([stands_still(), moves()]), name="sdpo_teacher")
    with working_together(lambda: [busy]), pytest.raises(DeadlineExceeded):
        await newcomer.call("train", deadline_s=NOW_S)


async def test_an_actor_that_waits_for_another_has_twice_the_time() -> None:
    waits = ProgressReport(3, "microbatch 3 of 8", 1.5 * NOW_S, "the SDPO teachers")
    late = ProgressReport(3, "microbatch 3 of 8", 2.5 * NOW_S, "the SDPO teachers")
    deadlines, _ = recorded()
    waiting = actor(Worker([waits, late, moves()]), deadlines)
    with pytest.raises(DeadlineExceeded, match=r"for 2e-09 s .*waiting for the SDPO teachers"):
        await waiting.call("train", deadline_s=NOW_S)
    assert waiting.ref.asked == 2


async def test_outside_a_run_a_deadline_is_what_its_caller_says() -> None:
    deadlines = Deadlines()
    for _ in range(3):
        with pytest.raises(DeadlineExceeded, match="for 1e-09 s") as raised:
            await actor(Worker([stands_still(), moves()]), deadlines).call(
                "train", deadline_s=NOW_S
            )
        assert not is_deterministic(raised.value)


async def test_an_actor_whose_status_fails_has_its_deadline_as_it_is() -> None:
    with pytest.raises(DeadlineExceeded, match=r"trainer\.train gave no answer within 1e-09 s"):
        await actor(Broken([])).call("train", deadline_s=NOW_S)


async def test_an_actor_that_reports_no_progress_has_its_deadline_as_it_is() -> None:
    worker = Worker([ProgressReport(), moves()])
    with pytest.raises(DeadlineExceeded, match=r"trainer\.train gave no answer within 1e-09 s"):
        await actor(worker).call("train", deadline_s=NOW_S)


async def test_a_question_of_its_state_is_no_work_whose_deadline_doubles() -> None:
    deadlines, events = recorded()
    with pytest.raises(DeadlineExceeded, match=r"describe gave no answer"):
        await actor(Silent([]), deadlines).call("describe", deadline_s=NOW_S)
    assert not events


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_report_says_what_was_completed_last_and_how_long_ago() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.made("microbatch 2 of 8")
    progress.made("microbatch 3 of 8")
    clock.now = 70.0
    found = ProgressReport.of({"progress": progress.report()})
    assert found == ProgressReport(2, "microbatch 3 of 8", 70.0)
    assert str(found) == "last progress: microbatch 3 of 8, 70 s before"


def test_a_report_names_whom_the_work_waits_for() -> None:
    progress = Progress(Clock())
    progress.made("microbatch 3 of 8")
    with progress.waiting("the SDPO teachers"):
        found = ProgressReport.of({"progress": progress.report()})
    assert str(found).endswith("before, now waiting for the SDPO teachers")
    assert not progress.report()["waits_for"]


def test_an_actor_of_another_kind_reports_nothing() -> None:
    assert ProgressReport.of({"kind": "stranger"}) is None
