"""torchft's Manager for one island: quorum from a lighthouse, and gloo between the islands.

Imports torchft, so it is imported only by runs with `islands.lighthouse`.

By itself torchft listens on every interface, lets whoever reaches its port end the process, and
heals by pickles over HTTP. Here all that listens does so at `host`, and weights travel as plain
tensors over the process group.
"""

import socket
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup as BaseProcessGroup
from torch.distributed import ProcessGroupGloo as Gloo
from torch.distributed import TCPStore
from torchft import Manager
from torchft._torchft import ManagerServer
from torchft.checkpointing import CheckpointTransport
from torchft.manager import MANAGER_ADDR_KEY, REPLICA_ID_KEY
from torchft.process_group import ProcessGroupGloo

from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.plugins.islands.rounds.outer_optimizer import Vector
from composer_mesh.plugins.islands.rounds.torchft_rules import LighthouseUnfit, OtherLayout

HEARTBEAT = timedelta(milliseconds=100)
GROUP_RANK = 1
"""Not 0, so that Manager uses the server made here; its own binds all interfaces."""


class HostGloo(ProcessGroupGloo):
    """torchft's gloo group, connecting by the address `host` only."""

    def __init__(self, host: str, timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        self._host = host

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        options = Gloo._Options()
        options._timeout = self._timeout
        options._devices = [Gloo.create_device(hostname=self._host)]
        backend = Gloo(store, rank, world_size, options)
        backend._set_sequence_number_for_group()
        group = BaseProcessGroup(store, rank, world_size)
        group._set_default_backend(BaseProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), BaseProcessGroup.BackendType.GLOO, backend)
        return group


class StateTransport(CheckpointTransport):
    """Sends the common state to islands that heal: two tensors over the process group."""

    def __init__(self, group: HostGloo, layout: bytes, count: Callable[[int, int], None]) -> None:
        self._group, self._count = group, count
        self._layout = list(layout)

    def metadata(self) -> str:
        return "over the process group"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        state = state_dict["user"]["default"]
        batches = state_dict["torchft"]["batches_committed"]
        about = torch.tensor([step, batches, state.numel(), *self._layout], dtype=torch.int64)
        for rank in dst_ranks:
            self._group.send([about], rank, tag=1).wait(timeout)
            if state.numel():
                self._group.send([state], rank, tag=2).wait(timeout)
            self._count(state.nbytes, 0)

    def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,  # noqa: ARG002  of torchft's port
        step: int,
        timeout: timedelta,
    ) -> Any:
        about = torch.zeros(3 + len(self._layout), dtype=torch.int64)
        self._group.recv([about], src_rank, tag=1).wait(timeout)
        sent_step, batches, size, *layout = about.tolist()
        if layout != self._layout:
            raise OtherLayout()
        if sent_step != step:
            raise RuntimeError(f"healed with the state of round {sent_step} in place of {step}")
        state = torch.zeros(size)
        if size:
            self._group.recv([state], src_rank, tag=2).wait(timeout)
        self._count(0, state.nbytes)
        return {
            "user": {"default": state},
            "torchft": {"step": step, "batches_committed": batches},
        }


class IslandManager:
    """A Manager with what it needs: a store for rendezvous, its server and its process group.

    `dump` and `load` are the common state that is healed. Raises `LighthouseUnfit`.
    """

    def __init__(
        self,
        config: IslandsConfig,
        layout: bytes,
        dump: Callable[[], Vector],
        load: Callable[[Vector], None],
        count: Callable[[int, int], None],
    ) -> None:
        assert config.lighthouse is not None, "a run without islands.lighthouse has no Manager"
        host, name = config.host, f"island-{config.rank}"
        patience = timedelta(seconds=config.request_s)
        self._listener = _listen(host)
        port = self._listener.getsockname()[1]
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=patience,
            master_listen_fd=self._listener.detach(),
        )
        replica = f"{name}:{uuid.uuid4()}"
        try:
            self._server = ManagerServer(
                replica_id=replica,
                lighthouse_addr=config.lighthouse,
                hostname=host,
                bind=f"{host}:0",
                store_addr=f"{host}:{port}",
                world_size=1,
                heartbeat_interval=HEARTBEAT,
                connect_timeout=patience,
                quorum_retries=0,
            )
        except (RuntimeError, TimeoutError) as error:
            raise LighthouseUnfit(config.lighthouse, str(error)) from error
        self._store.set(MANAGER_ADDR_KEY, self._server.address())
        self._store.set(REPLICA_ID_KEY, replica)
        self.group = HostGloo(host, patience)
        self.manager = Manager(
            pg=self.group,
            load_state_dict=lambda state: load(state.numpy()),
            state_dict=lambda: torch.from_numpy(dump()),
            min_replica_size=config.quorum,
            use_async_quorum=True,  # an island that heals adds nothing in that round
            init_sync=False,  # a round compares the common weights, see `torchft_all_reduce`
            timeout=patience,
            quorum_timeout=patience,
            connect_timeout=patience,
            rank=GROUP_RANK,
            world_size=1,
            store_addr=host,
            store_port=port,
            replica_id=name,
            hostname=host,
            checkpoint_transport=StateTransport(self.group, layout, count),
        )

    def close(self) -> None:
        """Leave: no island waits for this one any more once its heartbeats end."""
        self.manager.shutdown(wait=False)
        self._server.shutdown()
        self.group.abort(errored=False)


def _listen(host: str) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.bind(address)
        found.listen()
    except OSError as error:
        raise LighthouseUnfit(
            host, f"this machine cannot listen there ({error}); islands.host must be its own"
        ) from error
    return found
