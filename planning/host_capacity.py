"""Free capacity of one host, and whether a process fits on it."""

from dataclasses import dataclass, field

from composer_mesh.planning.memory import SHARED_CODE, in_gb, total
from composer_mesh.planning.process_specs import WHOLE, Process


@dataclass(frozen=True)
class HostResources:
    """Resources of a host that a run may use; memory in bytes, cores and GPUs counted from 0."""

    name: str
    cores: int
    memory: int
    gpus: int = 0
    gpu_memory: int = 0


@dataclass(frozen=True)
class Placed:
    """A process with its allocation on a host; without cores it may run on all of them.

    `gpu_bytes` are reserved for it on each of its GPUs.
    """

    process: Process
    host: str
    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    gpu_bytes: int = 0

    @property
    def gpu_share(self) -> float:
        """The fraction of each of its GPUs that is allocated to it."""
        return min(self.process.gpus, WHOLE) / WHOLE


@dataclass
class HostCapacity:
    """Free capacity of one host; `aliases` are further names for it in a config."""

    host: HostResources
    aliases: frozenset[str] = frozenset()
    memory: int = field(init=False)
    gpus: list[int] = field(init=False)
    owned: set[int] = field(default_factory=set)
    threads: int = 0
    floating: int = 0
    kinds: set[tuple[int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.memory = self.host.memory - SHARED_CODE
        self.gpus = [WHOLE] * self.host.gpus

    @property
    def load(self) -> float:
        """Busy threads per core; exact enough to compare hosts, as both numbers are small."""
        return self.threads / self.host.cores

    @property
    def free_cores(self) -> int:
        return self.host.cores - len(self.owned)

    @property
    def shared_cores(self) -> tuple[int, ...]:
        """Cores without an exclusive owner; empty if that is all of them."""
        return self._unowned() if self.owned else ()

    def why_not(self, process: Process) -> str:
        """Return why a process does not fit on this host; empty if it does."""
        if process.hosts and not {self.host.name, *self.aliases} & set(process.hosts):
            return f"is not among placement.{process.kind}.hosts"
        return self._no_gpus(process) or self._no_cores(process) or self._no_memory(process)

    def take(self, process: Process) -> Placed:
        """Allocate the resources of a process on this host."""
        cores, gpus = self._unowned()[: process.cores], self._gpus_for(process)
        placed = Placed(process, self.host.name, cores, gpus, self._gpu_bytes(process))
        self.hold(placed)
        return placed

    def hold(self, placed: Placed) -> None:
        """Account for a process that is already allocated on this host."""
        process = placed.process
        self.owned.update(placed.cores if process.cores else ())
        self.floating += not process.cores
        self.threads += process.threads
        self.memory -= process.host_bytes
        for number in placed.gpus:
            self.gpus[number] -= min(process.gpus, WHOLE)
            self.kinds.add((number, process.kind))

    def _unowned(self) -> tuple[int, ...]:
        return tuple(core for core in range(self.host.cores) if core not in self.owned)

    def _no_gpus(self, process: Process) -> str:
        if not process.gpus:
            return ""
        if not self.gpus:
            return "has no GPU"
        if why := self._no_gpu_memory(process):
            return why
        if self._gpus_for(process):
            return ""
        return f"has {self._free_gpus()} of its {len(self.gpus)} GPUs free, {_gpus(process)} wanted"

    def _free_gpus(self) -> str:
        whole = sum(left == WHOLE for left in self.gpus)
        parts = [f"{left / WHOLE:g}" for left in self.gpus if 0 < left < WHOLE]
        return f"{whole}" + (f" and parts of {', '.join(parts)}" if parts else "")

    def _no_gpu_memory(self, process: Process) -> str:
        share, needed = min(process.gpus, WHOLE) / WHOLE, total(process.memory.gpu)
        share = process.memory.takes or share
        may = int(share * self.host.gpu_memory)
        if needed <= may:
            return ""
        own = f"{share:g} x {in_gb(self.host.gpu_memory)} = " if share < 1 else ""
        return f"has GPUs of which it may use {own}{in_gb(may)} GB each, {in_gb(needed)} GB needed"

    def _gpu_bytes(self, process: Process) -> int:
        taken = int(process.memory.takes * self.host.gpu_memory)
        return max(taken, total(process.memory.gpu)) if process.gpus else 0

    def _gpus_for(self, process: Process) -> tuple[int, ...]:
        """Return the first GPUs with enough capacity; trainer ranks never share a GPU."""
        count, share = max(1, process.gpus // WHOLE), min(process.gpus, WHOLE)
        if not share:
            return ()
        alone = process.kind == "trainer"  # NCCL refuses two ranks on one GPU
        found = [
            number
            for number, left in enumerate(self.gpus)
            if left >= share and not (alone and (number, process.kind) in self.kinds)
        ]
        return tuple(found[:count]) if len(found) >= count else ()

    def _no_cores(self, process: Process) -> str:
        spare = self.free_cores - process.cores
        if spare >= (0 if process.cores and not self.floating else 1):
            return ""
        wanted = f"{process.cores} wanted" if process.cores else "1 wanted to share"
        kept = ", and 1 must stay for processes without" if process.cores and self.floating else ""
        return f"has {self.free_cores} of {self.host.cores} cores without an owner, {wanted}{kept}"

    def _no_memory(self, process: Process) -> str:
        if process.host_bytes <= self.memory:
            return ""
        left = f"{in_gb(max(0, self.memory))} of {in_gb(self.host.memory)} GB"
        return f"has {left} of memory left, {in_gb(process.host_bytes)} GB wanted"


def _gpus(process: Process) -> str:
    alone = " that no other rank has" if process.kind == "trainer" else ""
    return f"{process.gpus / WHOLE:g}{alone}"
