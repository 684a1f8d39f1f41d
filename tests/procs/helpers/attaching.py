"""Attaches to the worker of an address, with a limit of a process's start, and gives it back."""

import asyncio
import sys

from monarch.actor import enable_transport
from monarch.config import configure

from composer_mesh.mesh.hosts import address as addresses
from composer_mesh.mesh.hosts.remote import RemoteHost
from composer_mesh.mesh.supervision import ProcessLate


def tell(late: ProcessLate) -> None:
    print(late.actor, late.why_repeated, flush=True)


async def attach_and_close(address: str) -> None:
    host = RemoteHost("host-0", addresses.process_address(address), lease_s=15.0, note_late=tell)
    await host.attach(deadline_s=120.0)
    print(f"attached to {host.known.hostname}", flush=True)
    await host.close(deadline_s=10.0)


if __name__ == "__main__":
    worker_address, start_limit = sys.argv[1:]
    configure(mesh_proc_spawn_max_idle=start_limit)
    enable_transport(addresses.join("tcp", "127.0.0.1", addresses.free_port("127.0.0.1")))
    asyncio.run(attach_and_close(worker_address))
