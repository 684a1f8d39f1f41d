"""A real Slurm on this machine: munged, slurmctld and one slurmd for each node.

    python tests/plugins/slurm/cluster/cluster.py   one node, until Ctrl-C; prints what to export

Everything it writes is in one temporary folder, it listens on ports of its own, and its processes
end by their ids. The nodes are this machine under other names, so all of them have all its cores.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
BEFORE = "/usr/sbin:/sbin"
UP_S, END_S, LOOK_S = 60.0, 30.0, 0.1
NODE_LOSS_S = 120.0
"""At most until Slurm calls a node down whose slurmd is gone; SlurmdTimeout is 20 s here."""
CONF = """\
ClusterName=composer
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
KillWait=30
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
"""


def missing() -> list[str]:
    """The programs that are not installed here."""
    path = f"{os.environ.get('PATH', '')}:{BEFORE}"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


@dataclass
class SlurmCluster:
    """A cluster that is up; `SLURM_CONF` in the environment is how every program finds it."""

    folder: Path
    nodes: Sequence[str]
    daemons: dict[str, subprocess.Popen[bytes]]

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    def run(self, *command: str) -> str:
        """What a program of Slurm prints; an error where it fails."""
        done = subprocess.run(
            command,
            env={**os.environ, "SLURM_CONF": str(self.conf)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def jobs(self) -> str:
        """The jobs that Slurm has not ended."""
        return self.run("squeue", "--noheader", "--format=%i %T %r")

    def end_jobs(self) -> None:
        """Cancel every job, and wait until none of them is left."""
        self.run("scancel", f"--user={getpass.getuser()}")
        end = time.monotonic() + END_S
        while self.jobs() and time.monotonic() < end:
            time.sleep(LOOK_S)

    def lose(self, node: str) -> None:
        """Kill the daemon of a node, as if the node had lost its power."""
        daemon = self.daemons[f"slurmd-{node}"]
        daemon.kill()
        daemon.wait()

    def bring_back(self, node: str) -> None:
        """Start the daemon of a node again."""
        _start(self, f"slurmd-{node}", "slurmd", "-D", "-N", node)
        _until(lambda: self.node_state(node) == "idle", "nodes", self)

    def node_state(self, node: str) -> str:
        """What Slurm calls the state of a node."""
        said = self.run("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%t")
        return said.split()[0]

    def start_now(self, job: str) -> None:
        """Do not wait two minutes with a job that was queued again."""
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")


@contextmanager
def started(nodes: Sequence[str] = ("node",), megabytes: int = 4000) -> Iterator[SlurmCluster]:
    """A cluster while the block runs; its jobs and daemons end with it."""
    folder = Path(
        tempfile.mkdtemp(prefix="composer-slurm-", dir="/tmp")
    )  # a socket's path is short
    folder.chmod(0o755)
    cluster = SlurmCluster(folder, nodes, {})
    _write_conf(cluster, megabytes)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(_end, cluster)
        _start(cluster, "munged", *_munge(folder))
        _until(lambda: (folder / "munge.socket").exists(), "munged", cluster)
        _start(cluster, "slurmctld", "slurmctld", "-D")
        _until(lambda: _answers(cluster), "slurmctld", cluster)
        for node in nodes:
            _start(cluster, f"slurmd-{node}", "slurmd", "-D", "-N", node)
        _until(lambda: _idle(cluster) == sorted(nodes), "nodes", cluster)
        yield cluster


def _write_conf(cluster: SlurmCluster, megabytes: int) -> None:
    folder = cluster.folder
    (folder / "state").mkdir()
    host = socket.gethostname().partition(".")[0]
    port, *ports = _free_ports(1 + len(cluster.nodes))
    text = CONF.format(host=host, port=port, folder=folder, user=getpass.getuser())
    for node, own in zip(cluster.nodes, ports, strict=True):
        (folder / f"spool-{node}").mkdir()
        text += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={own} "
        text += f"CPUs={os.cpu_count()} RealMemory={megabytes}\n"
    text += "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
    cluster.conf.write_text(text)


def _munge(folder: Path) -> list[str]:
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    paths = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
    options = [f"--{name}={folder}/munge.{end}" for name, end in paths.items()]
    return ["munged", "--foreground", "--force", f"--log-file={folder}/munge.log", *options]


def _start(cluster: SlurmCluster, name: str, *command: str) -> None:
    path = f"{os.environ.get('PATH', '')}:{BEFORE}"
    with (cluster.folder / f"{name}.out").open("wb") as out:
        cluster.daemons[name] = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, "PATH": path, "SLURM_CONF": str(cluster.conf)},
            start_new_session=True,
        )


def _answers(cluster: SlurmCluster) -> bool:
    env = {**os.environ, "SLURM_CONF": str(cluster.conf)}
    done = subprocess.run(["scontrol", "ping"], env=env, capture_output=True, check=False)
    return b"is UP" in done.stdout


def _idle(cluster: SlurmCluster) -> list[str]:
    said = cluster.run("sinfo", "--noheader", "--Node", "--format=%N %t")
    return sorted(line.split()[0] for line in said.splitlines() if line.split()[1] == "idle")


def _until(condition, what: str, cluster: SlurmCluster, deadline_s: float = UP_S) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not there after {deadline_s:g} s\n{_words(cluster)}")
        time.sleep(LOOK_S)


def _words(cluster: SlurmCluster) -> str:
    return "\n".join(file.read_text()[-2000:] for file in sorted(cluster.folder.glob("*.out")))


def _end(cluster: SlurmCluster) -> None:
    """Cancel every job, wait for their ends, then end the daemons, the last one first."""
    slurmctld = cluster.daemons.get("slurmctld")
    if slurmctld is not None and slurmctld.poll() is None:
        cluster.end_jobs()
    for daemon in reversed(cluster.daemons.values()):
        daemon.terminate()
        try:
            daemon.wait(END_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def main() -> int:
    if absent := missing():
        print(f"{', '.join(absent)} not installed: apt install slurm-wlm munge", file=sys.stderr)
        return 2
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), started(megabytes=memory * 9 // 10) as cluster:
        print(f"export SLURM_CONF={cluster.conf}", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
