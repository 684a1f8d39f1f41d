"""Connections of other users are closed where Monarch accepts them, and none of this user.

The slots of a loaded library hold the functions that it calls.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_mesh.mesh.connection_guard import (
    _address,
    _installed,
    _libc,
    function_slots,
    guard_connections,
    guarded_accept,
    is_of_this_user,
    user_of,
    write_slot,
)

QUICK_CONNECTIONS = 300


def test_the_library_of_monarch_accepts_through_the_guard() -> None:
    from monarch import _rust_bindings

    guard_connections()
    guard_connections()  # once is enough, and twice is no more
    (guarded,) = _installed
    library = Path(_rust_bindings.__file__)
    (slot,) = function_slots(library, _address(guarded))
    assert ctypes.c_uint64.from_address(slot).value == _address(guarded)
    assert function_slots(library, _address(_libc().accept4)) == []


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A listening socket that does not wait."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        listener.setblocking(False)
        yield listener


def test_a_stranger_is_closed_and_the_next_of_this_user_is_accepted(
    listener: socket.socket,
) -> None:
    verdicts = iter([False, False, True])
    accept = guarded_accept(_libc().accept4, lambda _: next(verdicts))
    clients = [socket.create_connection(listener.getsockname(), 5.0) for _ in range(3)]
    accepted = accept(listener.fileno(), None, None, 0)
    with socket.socket(fileno=accepted) as end:
        assert end.getpeername() == clients[2].getsockname()
        assert [client.recv(1) for client in clients[:2]] == [b"", b""]
        assert (accept(listener.fileno(), None, None, 0), ctypes.get_errno()) == (-1, errno.EAGAIN)
    for client in clients:
        client.close()


def test_a_failure_to_decide_refuses(
    listener: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_connection: int) -> bool:
        raise KeyError("no table")

    accept = guarded_accept(_libc().accept4, fails)
    with socket.create_connection(listener.getsockname(), 5.0) as client:
        assert accept(listener.fileno(), None, None, 0) == -1
        assert client.recv(1) == b""
    assert "a connection was refused: KeyError('no table')" in capsys.readouterr().err


def test_no_quick_connection_of_this_user_is_refused(listener: socket.socket) -> None:
    """As many as wait for `accept` are opened at once, while others are closed."""
    accept = guarded_accept(_libc().accept4)
    for _ in range(QUICK_CONNECTIONS // 20):
        clients = [socket.create_connection(listener.getsockname(), 5.0) for _ in range(20)]
        ends = [socket.socket(fileno=accept(listener.fileno(), None, None, 0)) for _ in clients]
        assert [end.getpeername() for end in ends] == [one.getsockname() for one in clients]
        for one in (*clients, *ends):
            one.close()


def test_a_unix_connection_has_the_user_of_its_process(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client.connect(str(tmp_path / "s"))
        end, _ = listener.accept()
        with end:
            assert user_of(end.fileno()) == os.geteuid()
            assert is_of_this_user(end.fileno())


pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux loads ELF libraries"
)


def loaded_math() -> Path:
    """The library of `math`, which calls the `pow` of libm."""
    if not getattr(math, "__file__", None):
        pytest.skip("math is built into this Python")
    return Path(str(math.__file__))


def own_pow() -> int:
    """The address of libm's `pow`, which a library that calls it holds."""
    return ctypes.cast(ctypes.CDLL("libm.so.6").pow, ctypes.c_void_p).value or 0


def test_a_slot_holds_the_imported_function_until_another_is_written() -> None:
    assert math.pow(2.0, 3.0) == 8.0  # the linker may fill a slot at the first call
    (slot, *_) = function_slots(loaded_math(), own_pow())
    double = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)
    other = double(lambda a, b: a + b)
    try:
        write_slot(slot, ctypes.cast(other, ctypes.c_void_p).value or 0)
        assert math.pow(2.0, 3.0) == 5.0
    finally:
        write_slot(slot, own_pow())
    assert math.pow(2.0, 3.0) == 8.0


def test_a_function_that_is_not_imported_has_no_slot() -> None:
    double = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)
    unknown = double(lambda a: a)
    assert function_slots(loaded_math(), ctypes.cast(unknown, ctypes.c_void_p).value or 0) == []


def test_a_library_that_is_not_loaded_has_no_slot(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(loaded_math().read_bytes())
    assert function_slots(library, own_pow()) == []
