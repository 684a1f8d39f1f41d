"""Questions to an admin server that refuses a connection for a moment, or for good."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from composer_mesh.mesh.admin import AdminUnreachable, read_stacks

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


def answer_later(listener: socket.socket) -> None:
    """Refuse connections for a moment, then answer one."""
    time.sleep(0.2)
    listener.listen()
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(ANSWER)


def test_a_connection_that_is_refused_for_a_moment_is_tried_again() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        answering = threading.Thread(target=answer_later, args=(listener,))
        answering.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert asyncio.run(read_stacks(url, ["one"])) == [{}]
        answering.join()


def test_a_server_that_is_gone_is_told() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(AdminUnreachable, match="has the run ended"):
            asyncio.run(read_stacks(url, ["one"]))
