"""Which addresses a host may listen on, and which one it takes by itself.

The address that other hosts reach is told by the worker; the interface that has it is found.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from monarch._rust_bindings.monarch_hyperactor.proc import ProcId, Uid

from composer_mesh.actors.models.ranks import IFNAMES, Address, choose_interfaces
from composer_mesh.mesh.hosts.address import (
    SCHEMES,
    BadAddress,
    NoAddress,
    _base58,
    channel_of,
    check_listen,
    cluster_address,
    free_port,
    interface_of,
    join,
    own_address,
    process_address,
    split,
)
from composer_mesh.mesh.process_resources import ADDRESS


@given(
    scheme=st.sampled_from(["tls", "tcp"]),
    host=st.ip_addresses().map(str)
    | st.from_regex(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", fullmatch=True),
    port=st.integers(0, 65535),
)
def test_an_address_that_is_put_together_comes_apart_again(
    scheme: str, host: str, port: int
) -> None:
    assert split(join(scheme, host, port)) == (scheme, host, port)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.5:22300",
        "ipc://10.0.0.5:22300",
        "tls://10.0.0.5",
        "tls://:22300",
        "tls://10.0.0.5:",
        "tls://10.0.0.5:65536",
        "tls://10.0.0.5:-1",
        "tls://10.0.0.5:٣",
        "tls://*:22300",
        "tls://::1:22300",
        "tls://[10.0.0.5]:22300",
        "tcp://10.0.0.5:22300@tcp://0.0.0.0:22300",
        "tls://10.0.0.5,0.0.0.0:22300",
        "tls://10.0.0.5 :22300",
        "@tls://10.0.0.5:22300",
        "service@tls://10.0.0.5:22300",
        "service<0>@tls://10.0.0.5:22300",
        "service<2>x@tls://10.0.0.5:22300",
    ],
)
def test_what_is_no_address_is_refused_with_an_example(address: str) -> None:
    with pytest.raises(BadAddress, match=r"such as tls://10\.0\.0\.5:22300") as refused:
        split(address)
    assert repr(address) in str(refused.value)


@pytest.mark.parametrize("channel", ["tls://10.0.0.5:22300", "tcp://[fd00::2]:1", "tls://gpu-0:7"])
def test_both_ends_derive_the_same_identity_from_an_address(channel: str) -> None:
    whole = process_address(channel)
    assert whole == process_address(channel) == process_address(whole)
    assert channel_of(whole) == channel == channel_of(channel)
    assert split(whole) == split(channel)
    assert str(ProcId.from_string(whole.partition("@")[0])) == whole.partition("@")[0]
    assert process_address(f"gpu-0<2>@{channel}") == f"gpu-0<2>@{channel}"


@given(number=st.integers(0, 2**64 - 1))
def test_numbers_of_identities_are_written_as_monarch_does(number: int) -> None:
    assert f"service<{_base58(number)}>" == str(Uid.instance_from_value(number, "service"))


def test_processes_at_different_addresses_have_different_identities() -> None:
    places = [
        f"tls://10.0.{net}.{host}:{port}" for net in (0, 1) for host in (5, 6) for port in (1, 2)
    ]
    identities = {process_address(one).partition("@")[0] for one in places}
    assert len(identities) == len(places)
    same = {process_address(f"{scheme}://gpu-0:022300").partition("@")[0] for scheme in SCHEMES}
    assert same == {process_address("tls://gpu-0:22300").partition("@")[0]}


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "[::1]", "10.0.0.5", "172.31.0.9", "192.168.1.1", "100.64.3.4", "[fd00::2]"],
)
def test_loopback_and_private_addresses_pass(host: str) -> None:
    check_listen(f"tls://{host}:22300")


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "0", "[::ffff:0.0.0.0]", "0x0"])
def test_every_spelling_of_all_addresses_is_refused(host: str) -> None:
    with pytest.raises(BadAddress, match="every address of the machine"):
        check_listen(f"tls://{host}:22300")
    with pytest.raises(BadAddress, match="every address of the machine"):
        check_listen(f"tls://{host}:22300", subnets=["0.0.0.0/0", "::/0"])


@pytest.mark.parametrize(
    "host", ["8.8.8.8", "172.32.0.1", "169.254.169.254", "[2001:4860::1]", "[::ffff:8.8.8.8]"]
)
def test_addresses_that_are_not_private_are_refused_with_the_ways_out(host: str) -> None:
    with pytest.raises(BadAddress, match=r"is not private.*private address.*--subnet.*any-address"):
        check_listen(f"tcp://{host}:22300")


def test_a_network_that_is_named_bounds_the_addresses_and_may_be_public() -> None:
    check_listen("tls://131.1.2.3:22300", subnets=["131.1.0.0/16"])
    check_listen("tls://127.0.0.1:22300", subnets=["131.1.0.0/16"])
    with pytest.raises(BadAddress, match=r"10\.0\.0\.5 is not in 131\.1\.0\.0/16.*--subnet"):
        check_listen("tls://10.0.0.5:22300", subnets=["131.1.0.0/16"])


def test_only_the_explicit_flag_opens_every_address() -> None:
    check_listen("tls://0.0.0.0:22300", any_address=True)
    with pytest.raises(BadAddress, match="is not an address"):
        check_listen("tls://*:22300", any_address=True)


def test_a_name_is_judged_by_where_it_leads() -> None:
    check_listen("tls://localhost:22300")
    with pytest.raises(BadAddress, match=r"cannot be looked up.*IP address"):
        check_listen("tls://no-such-host.invalid:22300")


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (
            partial(check_listen, "tls://10.0.0.5:22300", subnets=["10.0.0.5/8"]),
            r"subnet '10\.0\.0\.5/8' is not a network",
        ),
        (
            partial(own_address, "tls", subnets=["10.255.255.252/32"]),
            r"no address in 10\.255\.255\.252/32, it has .*--subnet",
        ),
        (
            partial(own_address, "tls", towards="no-such-host.invalid"),
            r"no route to no-such-host\.invalid",
        ),
        (partial(own_address, "ipc"), "scheme is 'ipc' but must be one of tls, tcp"),
        (
            partial(free_port, "198.51.100.7"),
            r"198\.51\.100\.7 is not an address of this machine",
        ),
        (
            partial(interface_of, "203.0.113.7"),
            r"no network interface .* has the address 203\.0\.113\.7",
        ),
    ],
)
def test_what_this_machine_does_not_have_is_refused(asked: Callable[[], object], why: str) -> None:
    with pytest.raises((BadAddress, NoAddress), match=why):
        asked()


def test_the_own_address_can_be_listened_on_and_passes_the_check() -> None:
    host = own_address("tls")
    check_listen(join("tls", host, 0))
    assert 0 < free_port(host) <= 65535


@pytest.mark.parametrize("towards", ["127.0.0.1", "tls://127.0.0.1:22300", "localhost"])
def test_the_own_address_is_the_one_from_which_the_other_is_reached(towards: str) -> None:
    assert own_address("tcp", towards=towards) in {"127.0.0.1", "::1"}


def test_the_free_port_is_not_one_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert free_port("127.0.0.1") != taken.getsockname()[1]


NAMES = {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_all_of_loopback_is_one_interface(address: str) -> None:
    assert interface_of(address) == "lo"


def test_the_interface_of_an_address_is_the_one_that_has_it() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network interface but loopback")
        found = interface_of(probe.getsockname()[0])
    assert found in NAMES - {"lo"}


def test_an_address_that_nobody_told_is_no_loopback() -> None:
    with pytest.raises(NoAddress, match=f"{ADDRESS} is not set"):
        cluster_address({})
    assert cluster_address({ADDRESS: "10.0.0.5"}) == "10.0.0.5"


def test_a_name_that_means_loopback_here_is_refused_with_the_repair() -> None:
    assert all(ip_address(one[4][0]).is_loopback for one in socket.getaddrinfo("localhost", None))
    with pytest.raises(NoAddress, match=r"localhost, which is .* name this host by its IP address"):
        cluster_address({ADDRESS: "localhost"})


def test_ranks_of_one_host_are_left_as_they_were_told(tmp_path: Path) -> None:
    environ = {ADDRESS: "127.0.0.1"}
    choose_interfaces(tmp_path / "ranks", environ)
    assert environ.keys() == {ADDRESS}
    choose_interfaces(Address("10.0.0.9", 1), environ)
    assert [environ[name] for name in IFNAMES] == ["lo", "lo"]
    with pytest.raises(NoAddress):
        choose_interfaces(Address("10.0.0.9", 1), elsewhere := {ADDRESS: "203.0.113.7"})
    choose_interfaces(Address("127.0.0.1", 1), elsewhere)
    assert [elsewhere[name] for name in IFNAMES] == ["lo", "lo"]
