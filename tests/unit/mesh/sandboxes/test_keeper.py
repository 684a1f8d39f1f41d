"""The keeper calls what is ready, and nothing that was closed while it did.

Groups of boxes are made where they bound something, and removed if they are ours and dead.
"""

from __future__ import annotations

import os
import selectors
import socket
from pathlib import Path

from composer_mesh.mesh.sandboxes.box_process import (
    PREFIX,
    BoxGroup,
    ControlGroups,
    Sizes,
    claimed_uids,
    is_abandoned,
    owner_of,
    writable_groups,
)
from composer_mesh.mesh.sandboxes.keeper import Box, Keeper, Settings, dispatch


class Sleeping(Keeper):
    """A keeper whose boxes are processes that sleep."""

    def _start(self, sizes: Sizes) -> Box:
        process = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
        ours, theirs = socket.socketpair()
        theirs.close()
        end, errors = os.pidfd_open(process), os.memfd_create("errors")
        box = Box(process, end, ours, errors, self._free.pop(), None, sizes)
        self._boxes[process] = box
        return box

    def end(self) -> None:
        for box in list(self._boxes.values()):
            self._kill(box)
            self._finish(box)
        self._waiting.close()
        self._control.close()


def test_a_spare_that_makes_room_for_another_gets_no_command(tmp_path: Path) -> None:
    control, worker = socket.socketpair()
    settings = Settings(
        control.detach(), 0, "bubblewrap", None, str(tmp_path / "boxes"), "", 0, None, None, 1
    )
    keeper, one, other = Sleeping(settings), (1, 1, 1), (2, 2, 2)
    try:
        keeper._keep_spare(one)
        assert keeper._spare(one) is not None
        keeper._keep_spare(other)  # the first is killed, and not reaped before the next request
        assert keeper._spare(one) is None
        assert keeper._spare(other) is not None
        keeper._keep_spare(other)
        assert len(keeper._spares()) == 1
    finally:
        keeper.end()
        worker.close()


def test_what_was_closed_in_the_same_turn_is_not_called_by_its_number() -> None:
    waiting = selectors.DefaultSelector()
    pipes = [os.pipe() for _ in range(2)]
    called: list[str] = []

    def closes_the_other(own: int, other: int) -> None:
        called.append("first")
        waiting.unregister(own)
        waiting.unregister(other)
        os.dup2(own, other)  # the same number for something else, which is ready too
        waiting.register(other, selectors.EVENT_READ, lambda: called.append("new"))

    for (own, _), (other, _) in (pipes, pipes[::-1]):
        waiting.register(own, selectors.EVENT_READ, lambda a=own, b=other: closes_the_other(a, b))
    for _, end in pipes:
        os.write(end, b"x")
    dispatch(waiting, 1.0)
    assert called == ["first"]
    dispatch(waiting, 1.0)
    assert called == ["first", "new"]
    waiting.close()
    for both in pipes:
        for one in both:
            os.close(one)


def test_two_keepers_have_users_of_their_own() -> None:
    first, holder = claimed_uids(700_000)
    second, other = claimed_uids(700_000)
    assert holder is not None
    assert other is not None
    with holder, other:
        assert (first, second) == (700_000, 700_064)
    again, holder = claimed_uids(700_000)
    assert holder is not None
    with holder:
        assert again == 700_000


def test_without_root_a_box_has_the_workers_own_user() -> None:
    assert claimed_uids(None) == (None, None)


def test_the_group_of_a_living_keeper_is_not_abandoned() -> None:
    assert not is_abandoned(f"{PREFIX}-{owner_of(os.getpid())}-1")


def test_the_group_of_a_dead_keeper_is_abandoned() -> None:
    namespace, process, started = owner_of(os.getpid()).split("-")
    assert is_abandoned(f"{PREFIX}-{namespace}-{process}-{int(started) - 1}-7")


def test_groups_of_others_are_left_alone(tmp_path: Path) -> None:
    namespace, process, started = owner_of(os.getpid()).split("-")
    others = (
        f"{PREFIX}-{int(namespace) + 1}-{process}-{int(started) - 1}-7",  # of another container
        f"{PREFIX}-backup",
        "user.slice",
    )
    for name in others:
        (tmp_path / name).mkdir()
    assert ControlGroups([tmp_path], unified=False).remove_abandoned() == []
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(others)


def test_groups_of_dead_keepers_are_removed(tmp_path: Path) -> None:
    namespace, process, started = owner_of(os.getpid()).split("-")
    dead = tmp_path / f"{PREFIX}-{namespace}-{process}-{int(started) - 1}-7"
    dead.mkdir()
    assert ControlGroups([tmp_path], unified=True).remove_abandoned() == [dead]
    assert list(tmp_path.iterdir()) == []


def test_a_group_bounds_memory_with_swap_and_processes_in_both_versions(tmp_path: Path) -> None:
    files = {
        "two": ("memory.max", "memory.swap.max", "pids.max"),
        "one": ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "pids.max"),
    }
    for name, names in files.items():
        (tmp_path / name).mkdir()
        for one in names:
            (tmp_path / name / one).touch()
        BoxGroup([tmp_path / name], unified=name == "two").bound(1000, 8)
    found = {one: (tmp_path / "two" / one).read_text() for one in files["two"]}
    assert found == {"memory.max": "1000", "memory.swap.max": "0", "pids.max": "16"}
    found = {one: (tmp_path / "one" / one).read_text() for one in files["one"]}
    assert found == dict.fromkeys(files["one"][:2], "1000") | {"pids.max": "16"}


def test_kills_for_memory_are_counted_in_both_versions(tmp_path: Path) -> None:
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 3\noom_group_kill 0\n")
    assert BoxGroup([tmp_path], unified=True).kills_for_memory() == 5


def test_a_machine_without_writable_groups_says_why(tmp_path: Path) -> None:
    mounts = f"cgroup2 {tmp_path / 'missing'} cgroup2 rw,nosuid 0 0\n"
    groups, why = writable_groups("0::/some/group\n", mounts)
    assert groups is None
    assert "No such file" in why
    groups, why = writable_groups("0::/\n", "tmpfs / tmpfs rw 0 0\n")
    assert (groups, why) == (None, "no cgroup controllers are mounted")


def test_groups_in_which_nothing_can_be_bounded_are_not_used(tmp_path: Path) -> None:
    mounts = f"cgroup2 {tmp_path} cgroup2 rw,nosuid 0 0\n"
    groups, why = writable_groups("0::/\n", mounts)
    assert groups is None
    assert "not enabled" in why
    assert list(tmp_path.iterdir()) == []
