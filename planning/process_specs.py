"""All processes of a run: name, allocated resources and memory needs.

Combines the mesh layout, the section `[placement]` and `memory_estimate`. `placement_solver`
decides which host a process runs on.
"""

from dataclasses import dataclass

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.policy import ModelSizes
from composer_mesh.configs.schema import Config
from composer_mesh.planning.memory import CONTROLLER, GB, Part, in_gb, in_words, total
from composer_mesh.planning.memory_estimate import Memory, memory_of
from composer_mesh.planning.mesh_layout import ActorRow, plan_mesh

WHOLE = 1000
"""Thousandths of one GPU."""


@dataclass(frozen=True)
class Process:
    """One process that a run starts; `gpus` counts thousandths, `given` is host memory in bytes.

    `hosts` are the allowed ones, all if empty; `relief` suggests how to reduce its model's memory.
    Processes that are `together` fill one host before the next; others go to the least loaded host.
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
        memory=Memory((Part("process", CONTROLLER),)),
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
        )
        for number, name in enumerate(row.names)
    )


def _check(row: ActorRow, cores: int, gpus: float, config: Config) -> None:
    """Refuse resources that could never be used."""
    kind, key = row.kind, f"placement.{row.kind}"
    if 0 < cores < row.threads:
        raise UnfitPlace(
            f"{key}.cores is {cores} but its processes compute with {row.threads} threads each: "
            f"raise {key}.cores, set it to 0, or lower {_threads_key(kind)}"
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
        if not trainer.activation_checkpointing:
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


def _threads_key(kind: str) -> str:
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
