"""Every actor of a run is counted once, whether it answers or not."""

from __future__ import annotations

from typing import Any

import pytest

from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, MeshError, RemoteError
from composer_mesh.services.directory.status import ActorStatus
from composer_mesh.services.inspection.census import (
    ActorName,
    census,
    failure_line,
    parse_name,
    placed,
)
from composer_mesh.services.inspection.tree import CpuMeter


class FakePool:
    def __init__(self, *lines: dict[str, Any]) -> None:
        self._lines = list(lines)

    def status(self) -> list[dict[str, Any]]:
        return self._lines


def line(name: str, state: str = "ready", pid: int | None = 1, **more: Any) -> dict[str, Any]:
    about = {"generation": parse_name(name).generation, "outstanding": 0, "reason": "", **more}
    return {"name": name, "state": state, "pid": pid, **about}


def test_an_actor_outside_the_pools_is_as_it_said() -> None:
    trainer = ActorStatus("trainer", "trainer", 1, "busy", 3, "forward")
    assert census([trainer], {}) == (trainer,)


def test_an_actor_outside_the_pools_is_shown_as_dead_until_its_successor_is_there() -> None:
    before = [ActorStatus("trainer", "trainer", 1, "busy", 3, "forward", restarts=0)]
    (gone,) = census([], {}, before)
    assert (gone.name, gone.state, gone.pid) == ("trainer", "dead", None)
    assert census([], {}, [gone]) == (gone,)
    (one,) = census([ActorStatus("trainer.2", "trainer", 2)], {}, [gone])
    assert (one.name, one.state, one.restarts) == ("trainer.2", "ready", 1)
    assert census([], {"trainer": FakePool()}, before) == ()


def test_a_replica_that_answers_tells_what_it_does_and_its_pool_how_much_it_has() -> None:
    said = ActorStatus("w-0.3", "w", 7, "busy", 2, "work")
    (one,) = census([said], {"w": FakePool(line("w-0.3", outstanding=5))})
    assert (one.state, one.activity, one.restarts, one.outstanding) == ("busy", "work", 2, 5)


@pytest.mark.parametrize("state", ["starting", "draining", "dead", "stopped", "anything"])
def test_what_the_pool_says_of_a_replica_that_does_not_serve_counts(state: str) -> None:
    said = ActorStatus("w-0", "w", 7, "ready", 2, "idle")
    (one,) = census([said], {"w": FakePool(line("w-0", state, reason="why"))})
    assert (one.state, one.activity) == (state, "why")


def test_a_death_that_the_pool_has_not_heard_of_is_shown() -> None:
    said = ActorStatus("w-0", "w", 7, "dead", None, "Killed(sig=9)")
    (one,) = census([said], {"w": FakePool(line("w-0"))})
    assert (one.state, one.activity) == ("dead", "Killed(sig=9)")


def test_replicas_without_an_answer_stand_with_their_kind_in_the_order_of_their_places() -> None:
    actors = [
        ActorStatus("trainer", "trainer", 1),
        *(ActorStatus(f"w-{place}", "w", 1) for place in (10, 2)),
        ActorStatus("v-0", "v", 1),
    ]
    pools = {
        "v": FakePool(line("v-0")),
        "w": FakePool(
            line("w-10"), line("w-2"), line("w-1", "dead"), line("w-1.2", "starting", None)
        ),
    }
    names = [(one.name, one.state) for one in census(actors, pools)]
    assert names == [
        ("trainer", "ready"),
        *(("w-1", "dead"), ("w-1.2", "starting"), ("w-2", "ready"), ("w-10", "ready")),
        ("v-0", "ready"),
    ]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("trainer", ActorName("trainer")),
        ("trainer-1", ActorName("trainer", 1)),
        ("teacher_replay-12.34", ActorName("teacher_replay", 12, 34)),
        ("reference.2", ActorName("reference", 0, 2)),
        ("a.b", ActorName("a.b")),
        ("a-b", ActorName("a-b")),
        ("a.", ActorName("a.")),
        ("", ActorName("")),
    ],
)
def test_a_name_says_mesh_rank_and_generation(name: str, parts: ActorName) -> None:
    assert parse_name(name) == parts


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (ActorDied("w-1.2", "Killed(sig=9)"), ["w-1.2 died: Killed(sig=9) (host "]),
        (DeadlineExceeded("w-1", "load", 2.0), ["w-1.load gave no answer within 2 s: "]),
        (RemoteError("w-1", "load", "a\nb"), ["w-1.load failed: (host ", "a", "b"]),
    ],
)
def test_a_failure_names_host_mesh_actor_rank_and_cause_in_its_first_line(
    error: MeshError, lines: list[str]
) -> None:
    first, *rest = failure_line(error, "here").splitlines()
    assert first.startswith(lines[0])
    assert first.endswith("(host here, mesh w, rank 1)")
    assert rest == lines[1:]


def test_what_an_event_says_of_a_process_has_its_mesh_and_rank() -> None:
    fields = {"host": "here", "cause": "gone"}
    assert placed("w-3.2", fields) == {"host": "here", "mesh": "w", "rank": 3, "cause": "gone"}
    assert placed("w-3", {"attempt": 2}) == {"attempt": 2}
    assert placed("", fields) == fields


def test_a_failure_of_no_actor_is_its_text() -> None:
    assert failure_line(MeshError("no replica is left"), "here") == "no replica is left"


def test_cpu_is_measured_between_two_looks() -> None:
    now = [100.0]
    meter = CpuMeter[int](lambda: now[0])
    assert meter.look({1: 10.0, 2: 0.0}) == {}
    now[0] += 2
    assert meter.look({1: 13.0, 2: 0.0, 3: 1.0}) == {1: 150.0, 2: 0.0}


def test_a_process_whose_number_another_has_now_is_a_new_one() -> None:
    now = [100.0]
    meter = CpuMeter[int](lambda: now[0])
    meter.look({1: 10.0})
    now[0] += 1
    assert meter.look({1: 0.5}) == {}
    now[0] += 1
    assert meter.look({1: 0.5}) == {1: 0.0}
