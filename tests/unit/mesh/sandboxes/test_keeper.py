"""The keeper calls what is ready, and nothing that was closed while it did."""

from __future__ import annotations

import os
import selectors
import socket
from pathlib import Path

from composer_mesh.mesh.sandboxes.box_process import Sizes, claimed_uids
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
