"""Hosts that reach each other by ssh alone: a real sshd in a network namespace for each host.

Every namespace has a network of its own with the controller's, and no route to the other's. All
that listens on these networks is sshd.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from composer_mesh.mesh.hosts.address import process_address
from composer_mesh.mesh.hosts.certificates import make_authority, tls_environment
from composer_mesh.services.launch.workers import tunnels

PORTS, CONTROLLER = (22301, 22302), 22300
TAG = f"cm{os.getpid() % 100000}"
CENTRE, HOSTS = f"{TAG}c", (f"{TAG}a", f"{TAG}b")
ADDRESSES = ("10.91.1.2", "10.91.2.2")
SSHD = "mount -t tmpfs run /run && mkdir /run/sshd && exec /usr/sbin/sshd -D -e -f "
SERVE = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""
CALL = """
import os, sys
from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint

class Named(Actor):
    def __init__(self, name):
        self.name = name

    @endpoint
    def tell(self) -> str:
        return self.name

    @endpoint
    def ask(self, other) -> str:
        return f"{self.name} heard {other.tell.call_one().get(timeout=60)}"

enable_transport(sys.argv[1])
actors = []
for number, worker in enumerate(sys.argv[2:]):
    mesh = attach_to_workers(name=f"run{number}", workers=[worker], ca="trust_all_connections")
    mesh.initialized.get(timeout=60)
    actors.append(mesh.spawn_procs(per_host={"n": 1}).spawn("named", Named, f"host {number}"))
for one, other in ((0, 1), (1, 0)):
    print(actors[one].ask.call_one(actors[other]).get(timeout=60))
sys.stdout.flush()
os._exit(0)
"""


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[None]:
    """One for the controller, and one for each host with a link to the controller's alone."""
    for program in ("ip", "ssh", "ssh-keygen", "/usr/sbin/sshd"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt install iproute2 openssh-server")
    with ExitStack() as undo:
        for name in (CENTRE, *HOSTS):
            try:
                sh("ip", "netns", "add", name)
            except subprocess.CalledProcessError as refused:
                pytest.skip(f"network namespaces cannot be made here: {refused.stderr.strip()}")
            undo.callback(sh, "ip", "netns", "del", name)
            sh("ip", "-n", name, "link", "set", "lo", "up")
        for number, (name, address) in enumerate(zip(HOSTS, ADDRESSES, strict=True)):
            inner, outer = f"{TAG}i{number}", f"{TAG}o{number}"
            peer = ("type", "veth", "peer", "name", inner, "netns", name)
            sh("ip", "link", "add", outer, "netns", CENTRE, *peer)
            here = address.removesuffix("2") + "1/30"
            for where, link, own in ((CENTRE, outer, here), (name, inner, f"{address}/30")):
                sh("ip", "-n", where, "addr", "add", own, "dev", link)
                sh("ip", "-n", where, "link", "set", link, "up")
        yield


class Programs:
    """Programs in namespaces that end with the test."""

    def __init__(self, undo: ExitStack, folder: Path) -> None:
        self.undo, self.folder = undo, folder

    def start(self, where: str, *command: str, env: dict[str, str] | None = None) -> None:
        log = self.undo.enter_context((self.folder / "programs.log").open("ab"))
        process = subprocess.Popen(
            ["ip", "netns", "exec", where, *command],
            env={**os.environ, **(env or {})},
            stdout=log,
            stderr=log,
        )
        self.undo.callback(process.wait)
        self.undo.callback(process.kill)


@pytest.fixture
def programs(namespaces: None, tmp_path: Path) -> Iterator[Programs]:
    with ExitStack() as undo:
        yield Programs(undo, tmp_path)


@pytest.fixture
def ssh_options(programs: Programs, tmp_path: Path) -> list[str]:
    """What a user writes into cluster.ssh.options; both sshds are up and known."""
    for name in ("host", "user"):
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name))
    public = (tmp_path / "host.pub").read_text()
    known = "".join(f"{address} {public}" for address in ADDRESSES)
    (tmp_path / "known").write_text(known)
    for name, address in zip(HOSTS, ADDRESSES, strict=True):
        config = tmp_path / f"{name}.conf"
        config.write_text(
            f"Port 22\nListenAddress {address}\nHostKey {tmp_path}/host\nUsePAM no\n"
            f"AuthorizedKeysFile {tmp_path}/user.pub\nStrictModes no\nPidFile none\n"
            "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        )
        programs.start(name, "sh", "-c", SSHD + str(config))
    files = ["-F", "none", "-i", str(tmp_path / "user")]
    return [*files, "-o", f"UserKnownHostsFile={tmp_path}/known", "-o", "ConnectionAttempts=20"]


def listening(where: str) -> set[str]:
    """Everything that accepts connections in a namespace, without what is on loopback."""
    told = subprocess.run(
        ["ip", "netns", "exec", where, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    rows = [line.split() for line in told.splitlines()]
    places = {row[1] for row in rows if len(row) > 3 and row[3] == "0A"}
    return {place for place in places if not place.startswith("0100007F:")}


def attach(addresses: Sequence[str], env: dict[str, str]) -> Sequence[str]:
    done = subprocess.run(
        ["ip", "netns", "exec", CENTRE, sys.executable, "-c", CALL, *addresses],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("scheme", ["tls", "tcp"])
def test_actors_on_hosts_that_see_each_other_by_ssh_alone_call_each_other(
    programs: Programs, ssh_options: list[str], tmp_path: Path, scheme: str
) -> None:
    controller, *workers = (f"{scheme}://127.0.0.1:{port}" for port in (CONTROLLER, *PORTS))
    make_authority(tmp_path / ".tls")
    env = tls_environment(tmp_path / ".tls", tmp_path / "own", ["127.0.0.1"])
    for name, worker in zip(HOSTS, workers, strict=True):
        programs.start(name, sys.executable, "-c", SERVE, process_address(worker), env=env)
    for tunnel in tunnels(ADDRESSES, PORTS, CONTROLLER, ssh_options):
        programs.start(CENTRE, *tunnel.command)
    attached = attach([controller, *map(process_address, workers)], env)
    assert attached == ["host 0 heard host 1", "host 1 heard host 0"]
    port = f"{22:04X}"
    assert {place.rpartition(":")[2] for name in HOSTS for place in listening(name)} == {port}
    assert listening(CENTRE) == set()
