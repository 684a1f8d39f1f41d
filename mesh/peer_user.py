"""The user of the process at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct

ROOT_USER = 0
CREDENTIALS = struct.Struct("iII")
"""`struct ucred` of Linux: pid, uid, gid."""


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process that opened the other end, or listens there."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(found)[1])


def is_own_user(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user, or of root."""
    return peer_user(connection) in (os.geteuid(), ROOT_USER)
