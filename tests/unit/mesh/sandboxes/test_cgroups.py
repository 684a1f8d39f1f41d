"""Groups of boxes are made where they bound something, and removed if they are ours and dead."""

from __future__ import annotations

import os
from pathlib import Path

from composer_mesh.mesh.sandboxes.box_process import (
    PREFIX,
    BoxGroup,
    ControlGroups,
    is_abandoned,
    owner_of,
    writable_groups,
)


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
