"""The port that several processes of one user share; the kernel gives each some of the clients."""

from __future__ import annotations

import socket

from composer_mesh.services.serve_env.options import ServeRefused


def reusable_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen; other processes may bind the same port.

    Raises ServeRefused for an address that this machine does not have, or a port in use.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
    except OSError as error:
        raise ServeRefused(f"--host is {host}, which is no address: {error.strerror}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Accepted sockets inherit it; asyncio sets it only where a socket names its protocol, and
        # a response's headers and body, two writes, would wait 40 ms for each other.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind(place)
    except OSError as error:
        bound.close()
        raise ServeRefused(
            f"{host} port {port} cannot be listened on ({error.strerror}): name another --port, "
            "or 0 for a free one"
        ) from None
    return bound
