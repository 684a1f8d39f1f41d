"""Simulated hosts on one machine: network namespaces whose packets can be dropped.

The machine's own network is unchanged: the bridge between the hosts is in a namespace too. Needs
root, and the programs of util-linux and iproute2.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

Keeper: TypeAlias = "subprocess.Popen[bytes]"

KEEP = ("unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity")
NETWORK = "10.77.0"
"""Host n has the address 10.77.0.(n + 1); 0 is the controller's."""
MOST_HOSTS = 250


class NotPermitted(RuntimeError):
    """Namespaces cannot be created here; the message says why."""


@dataclass
class Net:
    """Network namespaces behind one bridge: the controller's, and one for each host."""

    keepers: list[Keeper]

    def within(self, host: int) -> list[str]:
        """Return the command prefix that runs a command on a host; 0 is the controller's."""
        return ["nsenter", "--net", f"--target={self.keepers[host].pid}"]

    def cut(self, host: int) -> None:
        """Silently drop every packet of a host."""
        self._ip(0, "link", "set", f"host{host}", "nomaster")

    def heal(self, host: int) -> None:
        """Let packets pass again."""
        self._ip(0, "link", "set", f"host{host}", "master", "bridge0")

    def make(self) -> None:
        """Connect the namespaces."""
        for number in range(len(self.keepers)):
            self._ip(number, "link", "set", "lo", "up")
        self._ip(0, "link", "add", "bridge0", "type", "bridge")
        self._ip(0, "link", "set", "bridge0", "up")
        self._ip(0, "addr", "add", f"{NETWORK}.1/24", "dev", "bridge0")
        for number in range(1, len(self.keepers)):
            pid = str(self.keepers[number].pid)
            pair = ["type", "veth", "peer", "name", "eth0", "netns", pid]
            self._ip(0, "link", "add", f"host{number}", *pair)
            self.heal(number)
            self._ip(0, "link", "set", f"host{number}", "up")
            self._ip(number, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
            self._ip(number, "link", "set", "eth0", "up")

    def _ip(self, host: int, *arguments: str) -> None:
        command = [*self.within(host), "ip", *arguments]
        subprocess.run(command, check=True, capture_output=True, text=True)


@contextmanager
def net(hosts: int) -> Iterator[Net]:
    """Yield a network of this many hosts and a controller. Raises `NotPermitted`."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise ValueError(f"hosts is {hosts}, but a net has 1 to {MOST_HOSTS}: choose another")
    keepers: list[Keeper] = []
    try:
        made = _connected(keepers, hosts)
        yield made
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.communicate()


def _connected(keepers: list[Keeper], hosts: int) -> Net:
    try:
        for _ in range(1 + hosts):
            keepers.append(subprocess.Popen(KEEP, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
            _wait_for(keepers[-1])
        made = Net(keepers)
        made.make()
    except FileNotFoundError as error:
        raise NotPermitted(f"network namespaces need the program {error.filename}") from error
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip()
        raise NotPermitted(f"network namespaces cannot be connected here: {why}") from error
    return made


def _wait_for(keeper: Keeper) -> None:
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    if keeper.stdout.readline() != b"ready\n":
        why = keeper.stderr.read().decode().strip()
        raise NotPermitted(f"network namespaces cannot be made here: {why}")
