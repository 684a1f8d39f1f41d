"""The proxy of an allowlist, attacked over loopback: nothing but a listed host is ever reached.

The outside is one of the tests: names resolve as they say, and whatever address is connected to
leads to one server on loopback, or to none.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_containers import FakeContainer
from fake_outside import BODY, HOSTS, PUBLIC, FakeOutside, opened, said

from composer_mesh.plugins.harbor.allowlist import Allowlist, NotAllowed, address_of, is_public
from composer_mesh.plugins.harbor.box_ports import MOST_CONNECTIONS
from composer_mesh.plugins.harbor.proxy import MOST_HEAD, Outside, proxied, resolved
from composer_mesh.plugins.harbor.task_toml import Network


def get(url: str, host: str | None = None) -> bytes:
    stated = url.partition("//")[2].partition("/")[0] if host is None else host
    return f"GET {url} HTTP/1.1\r\nHost: {stated}\r\nX-Mine: yes\r\n\r\n".encode()


def connect(target: str) -> bytes:
    return f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode()


async def test_a_listed_host_is_reached_at_the_address_that_was_checked() -> None:
    outside = FakeOutside()
    async with opened(outside) as box:
        assert (await said(box, get("http://good.org/a?b=c"))).endswith(BODY)
        assert (await said(box, get("http://A.Below.Org:80/"))).endswith(BODY)
        assert (await said(box, get("http://[2606:4700::1]/"))).endswith(BODY)
        assert (await said(box, get("http://listed.org/"))).endswith(BODY)
        assert (await said(box, get("http://192.168.1.9/"))).endswith(BODY)
    reached = [PUBLIC, PUBLIC, "2606:4700::1", "192.168.1.5", "192.168.1.9"]
    assert outside.reached == [(one, 80) for one in reached]
    head = outside.received[0].lower()
    assert head.startswith(b"get /a?b=c http/1.1\r\nhost: good.org\r\n")
    assert b"x-mine: yes" in head
    assert b"connection: close" in head


async def test_a_tunnel_passes_bytes_both_ways_and_ends_with_its_host() -> None:
    outside = FakeOutside(answer=b"\x16hello")
    async with opened(outside) as box:
        reader, writer = await asyncio.open_connection("127.0.0.1", box.port)
        writer.write(connect("good.org:443") + b"first")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert await reader.readexactly(6) == b"\x16hello"
        writer.write(b"second")
        assert await reader.readexactly(6) == b"\x16hello"
        writer.close()
        await outside.ended.wait()
    assert outside.reached == [(PUBLIC, 443)]
    assert b"".join(outside.received) == b"firstsecond"


REFUSED = {
    "another host": get("http://evil.org/"),
    "another host in a tunnel": connect("evil.org:443"),
    "a host whose end is a listed one": get("http://notgood.org/"),
    "a host that begins like a listed one": get("http://good.org.evil.org/"),
    "the host above a wildcard": get("http://below.org/"),
    "an unlisted address": connect(f"{PUBLIC}:443"),
    "loopback": connect("127.0.0.1:443"),
    "loopback by its name": get("http://localhost/"),
    "loopback of IPv6": connect("[::1]:443"),
    "loopback mapped": connect("[::ffff:127.0.0.1]:443"),
    "an unlisted address of IPv6": get("http://[2606:4700::2]/"),
    "a number as an address": get("http://2130706433/"),
    "an octal address": get("http://0177.0.0.1/"),
    "a short address": get("http://127.1/"),
    "another port": connect("good.org:22"),
    "another port over HTTP": get("http://good.org:8080/"),
    "a name that is private": connect("inside.org:443"),
    "a name with a private address among others": connect("mixed.org:443"),
    "a name of the machine's metadata": get("http://meta.org/"),
    "a name that is loopback mapped": connect("mapped.org:443"),
    "a name that a gateway translates": connect("translated.org:443"),
}
MALFORMED = {
    "a user's name": get("http://good.org@evil.org/", "evil.org"),
    "a user's name that is a host": get("http://evil.org@good.org/", "good.org"),
    "a backslash": get("http://good.org\\@evil.org/", "good.org"),
    "another Host header": get("http://good.org/", "evil.org"),
    "another port in the Host header": get("http://good.org/", "good.org:443"),
    "two Host headers": get("http://good.org/", "good.org\r\nHost: evil.org"),
    "a path without a host": get("/etc/passwd", "good.org"),
    "another scheme": get("ftp://good.org/", "good.org"),
    "TLS without a tunnel": get("https://good.org/", "good.org"),
    "a percent sign": get("http://good%2eorg/"),
    "a scope": connect("[fe80::1%eth0]:443"),
    "no port of a tunnel": connect("good.org"),
    "port 0": connect("good.org:0"),
    "a port beyond": connect("good.org:65536"),
    "a fragment": get("http://good.org/#@evil.org/", "good.org"),
    "no HTTP": b"\x16\x03\x01 hello\r\n\r\n",
    "SOCKS": b"\x05\x01\x00\r\n\r\n",
    "a zero in a header": get("http://good.org/", "good.org\r\nX: \0"),
}


@pytest.mark.parametrize("attack", REFUSED)
async def test_nothing_but_a_listed_host_is_reached(attack: str) -> None:
    outside = FakeOutside()
    async with opened(outside) as box:
        assert (await said(box, REFUSED[attack])).startswith(b"HTTP/1.1 403 ")
    assert outside.reached == []
    assert set(outside.resolved) <= {*HOSTS, "a.below.org"}  # no query has left for another name


@pytest.mark.parametrize("attack", MALFORMED)
async def test_a_request_of_another_form_is_refused(attack: str) -> None:
    outside = FakeOutside()
    async with opened(outside) as box:
        assert (await said(box, MALFORMED[attack])).startswith(b"HTTP/1.1 400 ")
    assert (outside.reached, outside.resolved) == ([], [])


async def test_a_name_that_changes_its_address_is_checked_each_time_it_is_connected_to() -> None:
    outside = FakeOutside()
    async with opened(outside) as box:
        assert (await said(box, get("http://good.org/"))).endswith(BODY)
        outside.names["good.org"] = ["127.0.0.1"]
        assert (await said(box, get("http://good.org/"))).startswith(b"HTTP/1.1 403 ")
        outside.names["good.org"] = []
        assert (await said(box, get("http://good.org/"))).startswith(b"HTTP/1.1 502 ")
        del outside.names["good.org"]
        assert (await said(box, get("http://good.org/"))).startswith(b"HTTP/1.1 502 ")
    assert outside.reached == [(PUBLIC, 80)]
    assert outside.resolved == ["good.org"] * 4  # once for each connection


async def test_a_redirect_is_the_boxs_to_follow_and_its_target_is_checked() -> None:
    moved = b"HTTP/1.1 302 Found\r\nLocation: http://evil.org/\r\nContent-Length: 0\r\n\r\n"
    outside = FakeOutside(answer=moved)
    async with opened(outside) as box:
        found = await said(box, get("http://good.org/"))
        assert b"location: http://evil.org/" in found.lower()
        assert (await said(box, get("http://evil.org/"))).startswith(b"HTTP/1.1 403 ")
    assert outside.reached == [(PUBLIC, 80)]


async def test_a_second_request_on_a_connection_reaches_nobody() -> None:
    outside = FakeOutside()
    async with opened(outside) as box:
        found = await said(box, get("http://good.org/1") + get("http://good.org/2", "evil.org"))
    assert found.count(b"HTTP/1.1") == 1
    assert b"/2" not in b"".join(outside.received)


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 4\r\n\r\nbodyGET http://evil.org/ HTTP/1.1\r\nHost: evil.org\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 90\r\n\r\n4\r\nbody\r\n0\r\n\r\nGET /evil",
    ],
)
async def test_a_body_ends_where_its_framing_says_and_nothing_is_smuggled(framing: bytes) -> None:
    outside = FakeOutside()
    async with opened(outside) as box:
        await said(box, b"POST http://good.org/ HTTP/1.1\r\nHost: good.org\r\n" + framing)
    received = b"".join(outside.received)
    assert b"body" in received
    assert b"evil" not in received
    assert (b"chunked" in received) != (b"content-length" in received.lower())


async def test_a_huge_head_is_refused_and_nothing_of_it_is_kept() -> None:
    outside = FakeOutside()
    async with opened(outside) as box:
        head = b"GET http://good.org/ HTTP/1.1\r\nHost: good.org\r\nX: " + b"a" * (2 * MOST_HEAD)
        found = await said(box, head)
    assert found == b"" or found.startswith(b"HTTP/1.1 431 ")  # unread bytes may reset it
    assert outside.reached == []


async def test_a_host_that_speaks_no_http_is_reported() -> None:
    outside = FakeOutside(answer=b"SSH-2.0-server\r\n\r\n")
    async with opened(outside) as box:
        assert (await said(box, get("http://good.org/"))).startswith(b"HTTP/1.1 502 ")


async def test_a_request_that_arrives_byte_by_byte_is_ended() -> None:
    outside = FakeOutside(head_s=0.2)
    async with opened(outside) as box:
        assert (await said(box, b"GET http://go")).startswith(b"HTTP/1.1 408 ")
    assert outside.reached == []


async def test_connections_beyond_the_bound_are_closed_and_the_others_work() -> None:
    outside = FakeOutside()
    async with opened(outside) as box:
        held = []
        for _ in range(MOST_CONNECTIONS):
            reader, writer = await asyncio.open_connection("127.0.0.1", box.port)
            writer.write(connect("good.org:443"))
            await reader.readuntil(b"\r\n\r\n")
            held.append(writer)
        assert await said(box, get("http://good.org/")) == b""
        held.pop().close()
        await outside.ended.wait()
        assert (await said(box, get("http://good.org/"))).endswith(BODY)
        for writer in held:
            writer.close()


async def test_the_end_of_a_phase_ends_every_connection_and_the_port() -> None:
    outside = FakeOutside()
    async with opened(outside) as box:
        reader, writer = await asyncio.open_connection("127.0.0.1", box.port)
        writer.write(connect("good.org:443"))
        await reader.readuntil(b"\r\n\r\n")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
    await asyncio.wait_for(outside.ended.wait(), 60)
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", box.port)


async def test_a_phase_without_a_list_has_no_proxy() -> None:
    for mode in ("public", "no-network"):
        async with proxied(FakeContainer, Network(mode), Outside()) as variables:  # type: ignore[arg-type]
            assert variables == {}


@pytest.mark.parametrize(
    "text",
    [
        *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "169.254.1.1", "172.16.0.1"),
        *("192.168.0.1", "224.0.0.1", "255.255.255.255", "168.63.129.16", "::", "::1", "fe80::1"),
        *("fc00::1", "fec0::1", "ff02::1", "64:ff9b::1", "2002:7f00:1::", "::ffff:10.0.0.1"),
        *("::127.0.0.1", "::ffff:0:127.0.0.1"),
    ],
)
def test_no_address_near_this_machine_is_a_public_one(text: str) -> None:
    address = address_of(text)
    assert address is not None
    assert not is_public(address)
    with pytest.raises(NotAllowed, match="no public address"):
        Allowlist.of(["a.org"]).reached("a.org", [text])
    assert Allowlist.of(["a.org", str(address)]).reached("a.org", [text]) == [address]


async def test_a_name_is_looked_up_in_no_thread_that_others_share() -> None:
    loop, busy = asyncio.get_running_loop(), threading.Event()
    shared = ThreadPoolExecutor(1)
    loop.set_default_executor(shared)
    holding = loop.run_in_executor(None, busy.wait)
    try:
        async with asyncio.timeout(60):
            assert "127.0.0.1" in await resolved("localhost")
    finally:
        busy.set()
        await holding
