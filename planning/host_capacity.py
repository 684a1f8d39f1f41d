"""Free capacity of one host, and whether a process fits on it.

All processes of a run: name, allocated resources and memory needs.

Combines the mesh layout, the section `[placement]` and `memory_estimate`. `placement_solver`
decides which host a process runs on.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.policy import ModelSizes
from composer_mesh.configs.schema import Config
from composer_mesh.planning.memory import (
    CONTROLLER,
    GB,
    SHARED_CODE,
    MemoryTerm,
    in_gb,
    in_words,
    total,
)
from composer_mesh.planning.memory_estimate import TURNS, Memory, memory_of
from composer_mesh.planning.mesh_layout import ActorRow, plan_mesh

WHOLE = 1000
"""Thousandths of one GPU."""


@dataclass(frozen=True)
class Process:
    """One process that a run starts; `gpus` counts thousandths, `given` is host memory in bytes.

    `hosts` are the allowed ones, all if empty; `relief` suggests how to reduce its model's memory.
    Processes that are `together` fill one host before the next; others go to the least loaded host.
    Those of another `turn` have the same GPUs at other times.
    """

    name: str
    kind: str
    threads: int
    memory: Memory
    cores: int = 0
    gpus: int = 0
    hosts: tuple[str, ...] = ()
    given: int | None = None
    relief: str = ""
    together: bool = False
    turn: str = ""

    @property
    def host_bytes(self) -> int:
        """Host memory that is reserved for it."""
        return total(self.memory.host) if self.given is None else self.given


class UnfitPlace(ConfigError):
    """A process's configured resources do not fit its kind or its needs."""


def processes_of(
    config: Config, sizes: ModelSizes | None, teacher: ModelSizes | None = None
) -> tuple[Process, ...]:
    """Return the controller and every actor process; without sizes, without models' memory.

    `teacher` are the sizes of an SDPO teacher that is another model.
    """
    place = config.placement.controller
    controller = Process(
        "controller",
        "controller",
        threads=1,
        memory=Memory((MemoryTerm("process", CONTROLLER),)),
        cores=place.cores,
        hosts=place.hosts,
        given=_bytes(place.memory_gb),
    )
    rows = plan_mesh(config).actors
    return (controller, *(one for row in rows for one in _processes(row, config, sizes, teacher)))


def _processes(
    row: ActorRow, config: Config, sizes: ModelSizes | None, teacher: ModelSizes | None
) -> tuple[Process, ...]:
    place, gpus = config.placement.of(row.kind), config.placement.gpus(row.kind)
    _check(row, place.cores, gpus, config)
    numbers = range(row.replicas)
    needs = [memory_of(row.kind, config, sizes, number, teacher) for number in numbers]
    _check_given(row.kind, max(needs, key=lambda one: total(one.host)), place.memory_gb)
    return tuple(
        Process(
            name,
            row.kind,
            row.threads,
            needs[number],
            cores=place.cores,
            gpus=round(gpus * WHOLE),
            hosts=place.hosts,
            given=_bytes(place.memory_gb),
            relief=_relief(row.kind, config),
            together=row.kind == "trainer" or gpus > 0,
            turn=TURNS.get(row.kind, "") if config.placement.colocate else "",
        )
        for number, name in enumerate(row.names)
    )


def _check(row: ActorRow, cores: int, gpus: float, config: Config) -> None:
    """Refuse resources that could never be used."""
    kind, key = row.kind, f"placement.{row.kind}"
    if 0 < cores < row.threads:
        raise UnfitPlace(
            f"{key}.cores is {cores} but its processes compute with {row.threads} threads each: "
            f"raise {key}.cores, set it to 0, or lower {threads_key(kind)}"
        )
    if kind == "generator" and config.generator.engine == "vllm":
        parts = config.generator.vllm.tensor_parallel
        if gpus and max(1.0, gpus) != parts:
            raise UnfitPlace(
                f"{key}.gpus is {gpus:g} but generator.vllm.tensor_parallel is {parts}, and each "
                "part of the model needs a GPU of its own: set both to the same number"
            )
    elif gpus > 1:
        raise UnfitPlace(
            f"{key}.gpus is {gpus:g} but such a process computes on one GPU: set it to 1 or less"
            f"{_MORE_GPUS[kind]}"
        )


def _relief(kind: str, config: Config) -> str:
    """Return the settings that would reduce the memory of this kind's model."""
    if kind == "trainer":
        trainer, found = config.trainer, ["raise trainer.ranks", "lower trainer.microbatch_tokens"]
        if not trainer.checkpoints_layers:
            found.append("set trainer.activation_checkpointing to true")
        if trainer.context_parallel == 1 and trainer.packing:
            found.append("raise trainer.context_parallel")
        if trainer.compute_dtype == "float32":
            found.append("set trainer.compute_dtype to 'bfloat16'")
        return ", ".join(found)
    if kind == "generator" and config.generator.engine == "vllm":
        return "raise generator.vllm.tensor_parallel, or lower policy.max_context"
    if kind == "sdpo_teacher" and config.sdpo.teacher == "model":
        return "give sdpo.teacher_model.path a smaller model, or lower trainer.microbatch_tokens"
    if kind == "sdpo_teacher":
        return "set sdpo.placement to 'inline', where the trainer's ranks share the teacher"
    return _LESS.get(kind, "")


_LESS = {
    "generator": "lower generator.max_concurrent or policy.max_context, or take engine 'vllm'",
    "reference": "lower trainer.microbatch_tokens, or take a replay.loss without a reference",
}
_MORE_GPUS = {
    "trainer": ", and raise trainer.ranks to use more",
    "generator": ", and raise generator.replicas, or take engine 'vllm', to use more",
    "sdpo_teacher": ", and raise sdpo.replicas to use more",
    "reference": "",
}


def threads_key(kind: str) -> str:
    """Return the config key of the threads of each process of a kind."""
    return "sdpo.threads" if kind == "sdpo_teacher" else f"{kind}.threads"


def _check_given(kind: str, memory: Memory, given_gb: float | None) -> None:
    given, needed = _bytes(given_gb), total(memory.host)
    if given is not None and needed > given:
        raise UnfitPlace(
            f"placement.{kind}.memory_gb is {given_gb:g} but such a process needs about "
            f"{in_gb(needed)} GB ({in_words(memory.host)}): raise it"
        )


def _bytes(given_gb: float | None) -> int | None:
    return None if given_gb is None else int(given_gb * GB)


def busiest(amounts: Iterable[tuple[Process, float]]) -> float:
    """Return the sum of amounts of processes, of the largest turn where there are turns."""
    sums: defaultdict[str, float] = defaultdict(float)
    for process, amount in amounts:
        sums[process.turn] += amount
    return max(sums.values(), default=0)


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
    gpus: defaultdict[str, list[int]] = field(init=False)
    """Free thousandths of each GPU, in each turn."""
    owned: set[int] = field(default_factory=set)
    threads: int = 0
    floating: int = 0
    kinds: set[tuple[int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.memory = self.host.memory - SHARED_CODE
        self.gpus = defaultdict(lambda: [WHOLE] * self.host.gpus)

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
            self.gpus[process.turn][number] -= min(process.gpus, WHOLE)
            self.kinds.add((number, process.kind))

    def _unowned(self) -> tuple[int, ...]:
        return tuple(core for core in range(self.host.cores) if core not in self.owned)

    def _no_gpus(self, process: Process) -> str:
        if not process.gpus:
            return ""
        if not self.host.gpus:
            return "has no GPU"
        if why := self._no_gpu_memory(process):
            return why
        if self._gpus_for(process):
            return ""
        free = self._free_gpus(self.gpus[process.turn])
        return f"has {free} of its {self.host.gpus} GPUs free, {_gpus(process)} wanted"

    @staticmethod
    def _free_gpus(gpus: list[int]) -> str:
        whole = sum(left == WHOLE for left in gpus)
        parts = [f"{left / WHOLE:g}" for left in gpus if 0 < left < WHOLE]
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
            for number, left in enumerate(self.gpus[process.turn])
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
