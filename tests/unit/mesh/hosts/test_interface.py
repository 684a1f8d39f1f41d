"""The address that other hosts reach is told by the worker; the interface that has it is found."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from pathlib import Path

import pytest

from composer_mesh.actors.models.ranks import IFNAMES, Address, talk_over
from composer_mesh.mesh.hosts.address import NoAddress, cluster_address, interface_of
from composer_mesh.mesh.process_resources import ADDRESS

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


def test_an_address_of_nobody_is_refused() -> None:
    with pytest.raises(NoAddress, match=r"no network interface .* has the address 203\.0\.113\.7"):
        interface_of("203.0.113.7")


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
    talk_over(tmp_path / "ranks", environ)
    assert environ.keys() == {ADDRESS}
    talk_over(Address("10.0.0.9", 1), environ)
    assert [environ[name] for name in IFNAMES] == ["lo", "lo"]
    with pytest.raises(NoAddress):
        talk_over(Address("10.0.0.9", 1), elsewhere := {ADDRESS: "203.0.113.7"})
    talk_over(Address("127.0.0.1", 1), elsewhere)
    assert [elsewhere[name] for name in IFNAMES] == ["lo", "lo"]
