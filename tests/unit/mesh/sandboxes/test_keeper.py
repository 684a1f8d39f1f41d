"""The keeper calls what is ready, and nothing that was closed while it did."""

from __future__ import annotations

import os
import selectors

from composer_mesh.mesh.sandboxes.box_process import claimed_uids
from composer_mesh.mesh.sandboxes.keeper import dispatch


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
