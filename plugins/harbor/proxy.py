"""The way out of a box with an allowlist: an HTTP proxy in this process, on the box's loopback.

    program in the box -- CONNECT or http:// --> this process, which checks --> port 80 or 443

The box has no other network. Hosts are compared with the list, names are resolved here, and the
address that was checked is the one that is connected to. A request over plain HTTP is read and
written anew, one for each connection, so that nothing but it reaches the host that it names.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import h11

from composer_mesh.mesh.waiting import in_background
from composer_mesh.plugins.harbor.allowlist import Allowlist, NotAllowed
from composer_mesh.plugins.harbor.box_ports import CHUNK, Stream, joined, served
from composer_mesh.plugins.harbor.containers.port import Container
from composer_mesh.plugins.harbor.task_toml import Network

PORT = 3128
"""Of the box's loopback; nothing of the image runs yet when it is taken."""
URL = f"http://127.0.0.1:{PORT}"
DIRECT = "localhost,127.0.0.1,::1"
VARIABLES = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), URL),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), DIRECT),
}
"""What programs in the box find the proxy by."""
CONNECT_S = 20.0
"""Seconds in which a host is resolved and connected to."""
MOST_HEAD = 1 << 16
AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::([0-9]{1,5}))?")
ABSOLUTE = re.compile(r"http://([^/?#]*)([/?][^#]*)?", re.IGNORECASE)
HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization"),
        *(b"proxy-authenticate", b"te", b"trailer", b"upgrade", b"expect", b"host"),
    )
)
"""Headers that concern one connection, or that are written anew."""
Headers = Sequence[tuple[bytes, bytes]]


async def resolved(name: str) -> list[str]:
    """Return the addresses of a name, by the resolver of this machine.

    In a thread of its own: names that are answered late would hold all of those that are shared.
    """
    looked_up = partial(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
    found = await asyncio.wrap_future(in_background(looked_up))
    return [str(one[4][0]) for one in found]


async def connected(address: str, port: int) -> Stream:
    """Connect to an address."""
    return await asyncio.open_connection(address, port)


@dataclass(frozen=True)
class Outside:
    """How names are resolved and addresses connected to; tests have an outside of their own.

    `head_s` are the seconds until the head of a request is whole, however slowly its bytes come.
    """

    resolve: Callable[[str], Awaitable[Sequence[str]]] = resolved
    connect: Callable[[str, int], Awaitable[Stream]] = connected
    head_s: float = 10.0


class ProxyRefusal(Exception):
    """A request that is answered by a status, and a text for whoever reads it in the box."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status, self.text = status, text


@asynccontextmanager
async def proxied(
    container: Container, network: Network, outside: Outside, names: Sequence[str] = ()
) -> AsyncIterator[dict[str, str]]:
    """Open the proxy of a phase in a container; yield the variables that name it.

    `names` are hosts of the container's own loopback, which are reached without it. It ends with
    the context, and every connection through it. A phase without an allowlist has none, and no
    variables.
    """
    if network.mode != "allowlist":
        yield {}
        return
    proxy = Proxy(Allowlist.of(network.hosts), outside)
    async with served(await container.listen(PORT), proxy.serve):
        direct = ",".join([DIRECT, *names])
        yield VARIABLES | {"NO_PROXY": direct, "no_proxy": direct}


class Proxy:
    """Serves connections of one box."""

    def __init__(self, allowlist: Allowlist, outside: Outside) -> None:
        self._allowlist, self._outside = allowlist, outside

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the one request of a connection."""
        client = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEAD)
        with contextlib.suppress(OSError, h11.ProtocolError, EOFError):  # the client sees its end
            try:
                request = await self._head(client, reader)
                host, port, path = target_of(request)
                other = await self._reached(host, port)
                try:
                    if request.method == b"CONNECT":
                        await _tunnelled(client, reader, writer, other)
                    else:
                        await _forwarded(client, (reader, writer), request, path, other)
                finally:
                    other[1].close()
            except ProxyRefusal as refused:
                await _refuse(client, writer, refused)

    async def _head(self, client: h11.Connection, reader: asyncio.StreamReader) -> h11.Request:
        """Return the first request; raise ProxyRefusal for one too long, too slow or malformed."""
        try:
            async with asyncio.timeout(self._outside.head_s):
                found = await _event(client, reader)
        except TimeoutError:
            raise ProxyRefusal(
                408, f"the request did not arrive in {self._outside.head_s:g} s"
            ) from None
        except h11.RemoteProtocolError as error:
            raise ProxyRefusal(error.error_status_hint, str(error)) from None
        if not isinstance(found, h11.Request):
            raise EOFError
        return found

    async def _reached(self, host: str, port: int) -> Stream:
        """Connect to a listed host; raise ProxyRefusal for any other, and for one that fails."""
        try:
            async with asyncio.timeout(CONNECT_S):
                target = self._allowlist.checked(host, port)
                addresses = [target]
                if isinstance(target, str):
                    found = await self._outside.resolve(target)
                    addresses = [*self._allowlist.reached(target, found)]
                return await self._first(addresses, port)
        except NotAllowed as error:
            raise ProxyRefusal(403, str(error)) from None
        except TimeoutError:
            raise ProxyRefusal(
                504, f"{host[:80]} was not connected to in {CONNECT_S:g} s"
            ) from None
        except OSError as error:
            raise ProxyRefusal(502, f"{host[:80]} cannot be connected to: {error}") from None

    async def _first(self, addresses: Sequence[Any], port: int) -> Stream:
        error = OSError("it has no address")
        for address in addresses:
            try:
                return await self._outside.connect(str(address), port)
            except OSError as failed:
                error = failed
        raise error


def target_of(request: h11.Request) -> tuple[str, int, str]:
    """Return the host, the port and the path of a request to a proxy; raises ProxyRefusal.

    The host is that of the target. A Host header that names another one is refused.
    """
    target = request.target.decode("ascii")
    if request.method == b"CONNECT":
        host, port = authority_of(target, 0)
        return host, port, ""
    found = ABSOLUTE.fullmatch(target)
    if found is None:
        raise ProxyRefusal(400, f"{target[:80]!r} is no http:// URL: send that, or CONNECT")
    host, port = authority_of(found[1], 80)
    stated = dict(request.headers).get(b"host", found[1].encode()).decode("latin-1")
    if authority_of(stated, 80) != (host, port):
        raise ProxyRefusal(400, f"the Host header is not {found[1][:80]}, which the URL names")
    path = found[2] or "/"
    return host, port, path if path.startswith("/") else f"/{path}"


def authority_of(text: str, default: int) -> tuple[str, int]:
    """Return a host, in lower case, and a port; raises ProxyRefusal, also for a user's name."""
    found = AUTHORITY.fullmatch(text)
    port = int(found[3] or default) if found is not None else 0
    if found is None or not 0 < port < 1 << 16:
        raise ProxyRefusal(400, f"{text[:80]!r} is no host and port")
    return (found[1] or found[2]).lower(), port


async def _event(connection: h11.Connection, reader: asyncio.StreamReader) -> Any:
    """Return the next event of a connection."""
    while (found := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(CHUNK))
    return found


async def _refuse(
    client: h11.Connection, writer: asyncio.StreamWriter, refused: ProxyRefusal
) -> None:
    text = f"{refused.text}\n".encode("utf-8", "replace")
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))]
    closing = [*headers, ("Connection", "close")]
    for event in (h11.Response(status_code=refused.status, headers=closing), h11.Data(data=text)):
        writer.write(client.send(event) or b"")
    await writer.drain()


async def _tunnelled(
    client: h11.Connection,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other: Stream,
) -> None:
    """Answer a CONNECT, and pass on whatever follows."""
    answer = h11.Response(status_code=200, headers=[], reason="Connection established")
    writer.write(client.send(answer) or b"")
    other[1].write(client.trailing_data[0])
    await joined(reader, writer, other)


async def _forwarded(
    client: h11.Connection, near: Stream, request: h11.Request, path: str, far: Stream
) -> None:
    """Send a request on, and its answer back; both connections end after it."""
    server = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST_HEAD)
    stated = ABSOLUTE.fullmatch(request.target.decode("ascii"))
    assert stated is not None, "it was checked"
    headers = [(b"Host", stated[1].encode()), *_kept(request.headers), (b"Connection", b"close")]
    sent = h11.Request(method=request.method, target=path, headers=headers)
    far[1].write(server.send(sent) or b"")
    await _passed(client, near[0], server, far[1])
    try:
        while isinstance(answer := await _event(server, far[0]), h11.InformationalResponse):
            pass  # it concerns the connection to us
    except h11.RemoteProtocolError as error:
        raise ProxyRefusal(502, f"the answer is no HTTP: {error}") from None
    closing = [*_kept(answer.headers), (b"Connection", b"close")]
    answered = h11.Response(
        status_code=answer.status_code, headers=closing, reason=bytes(answer.reason)
    )
    near[1].write(client.send(answered) or b"")
    await _passed(server, far[0], client, near[1])


async def _passed(
    source: h11.Connection,
    reader: asyncio.StreamReader,
    target: h11.Connection,
    writer: asyncio.StreamWriter,
) -> None:
    """Pass on the body of a message, and its end."""
    while isinstance(event := await _event(source, reader), h11.Data):
        writer.write(target.send(h11.Data(data=bytes(event.data))) or b"")
        await writer.drain()
    writer.write(target.send(h11.EndOfMessage()) or b"")
    await writer.drain()


def _kept(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers that are passed on; of two lengths of a body the one that is read."""
    named = {
        part.strip().lower() for n, v in headers if n == b"connection" for part in v.split(b",")
    }
    chunked = {b"content-length"} if any(n == b"transfer-encoding" for n, _ in headers) else set()
    return [(n, v) for n, v in headers if n not in HOP_BY_HOP | named | chunked]
