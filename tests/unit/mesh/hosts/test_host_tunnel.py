"""The ssh commands of the tunnels: who binds what, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.services.launch.ports import LaunchRefused
from composer_mesh.services.launch.workers import Tunnel, tunnels


def forwards(tunnel: Tunnel, flag: str) -> list[str]:
    pairs = zip(tunnel.command, tunnel.command[1:], strict=False)
    return [value for before, value in pairs if before == flag]


def test_each_host_gives_its_own_port_and_gets_all_others() -> None:
    made = tunnels(["ada@a", "b", "c"], [22301, 22302, 22303], 22300, ())
    assert [tunnel.destination for tunnel in made] == ["ada@a", "b", "c"]
    first = made[0]
    assert forwards(first, "-L") == ["127.0.0.1:22301:127.0.0.1:22301"]
    assert forwards(first, "-R") == [
        f"127.0.0.1:{port}:127.0.0.1:{port}" for port in (22302, 22303, 22300)
    ]


@given(st.lists(st.integers(1, 65535), min_size=2, max_size=7, unique=True))
def test_on_every_machine_every_port_leads_to_its_owner(ports: list[int]) -> None:
    """Follow the forwards: a dial of any port, from any machine, ends where that port listens."""
    *workers, controller = ports
    made = tunnels([f"host{number}" for number in range(len(workers))], workers, controller, ())
    centre = {controller: "centre"}  # where a dial on the controller's machine ends
    for tunnel, port in zip(made, workers, strict=True):
        assert forwards(tunnel, "-L") == [f"127.0.0.1:{port}:127.0.0.1:{port}"]
        centre[port] = tunnel.destination
    assert len(centre) == len(ports)
    for tunnel, port in zip(made, workers, strict=True):
        carried = {int(forward.split(":")[1]) for forward in forwards(tunnel, "-R")}
        assert carried | {port} == set(centre)
        assert port not in carried


def test_nothing_is_bound_but_loopback_and_nothing_waits_for_a_person() -> None:
    for tunnel in tunnels(["a", "b"], [1, 2], 3, ["-i", "/k"]):
        bound = [*forwards(tunnel, "-L"), *forwards(tunnel, "-R")]
        assert {forward.partition(":")[0] for forward in bound} == {"127.0.0.1"}
        assert {"BatchMode=yes", "ExitOnForwardFailure=yes"} <= set(forwards(tunnel, "-o"))
        assert {"ControlMaster=no", "ControlPath=none"} <= set(forwards(tunnel, "-o"))
        assert any(option.startswith("ServerAlive") for option in forwards(tunnel, "-o"))
        assert tunnel.command[:5] == ("ssh", "-N", "-T", "-i", "/k")
        assert tunnel.command[-2:] == ("--", tunnel.destination)
        assert "-g" not in tunnel.command


@pytest.mark.parametrize(
    ("destinations", "ports", "controller", "said"),
    [
        (["a", "a"], [1, 2], 3, "a is the destination of 2 hosts"),
        (["a", "b"], [22300, 22300], 3, "port 22300 is there 2 times.*such as 22301"),
        (["a"], [22300], 22300, "port 22300 is there 2 times"),
        (["a"], [0], 3, "port 0 cannot be tunnelled: write a fixed one"),
    ],
)
def test_what_cannot_be_tunnelled_is_refused_with_the_repair(
    destinations: list[str], ports: list[int], controller: int, said: str
) -> None:
    with pytest.raises(LaunchRefused, match=said):
        tunnels(destinations, ports, controller, ())
